"""Verification: every checksum of all data in use, and the consistency of manifest and records."""
