"""Typed columns: the Spark and Arrow types that a changelog supports, and the JSON of their values."""
