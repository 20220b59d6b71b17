"""Last-value stores that follow the log in the background: one RocksDB per writer or standby."""
