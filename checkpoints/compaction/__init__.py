"""Log compaction as pure functions: batches of records in, batches of records out. No files, no clock."""
