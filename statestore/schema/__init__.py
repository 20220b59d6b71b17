"""Typed columns: which Spark and Arrow types a changelog keeps, and the JSON that their values become."""
