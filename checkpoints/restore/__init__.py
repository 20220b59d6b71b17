"""Restore: the exact state as of a commit, into memory, RocksDB, a file, or another changelog."""
