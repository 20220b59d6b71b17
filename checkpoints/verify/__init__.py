"""Verification: every checksum of everything that counts, and what must agree. Believes nothing."""
