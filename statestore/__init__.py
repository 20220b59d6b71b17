"""Bytes at rest: errors, files, segments, key-value stores. Nothing here knows of commits or of Spark.

Files, paths and errors are here; the rooms are:

    keys       the bytes of keys: buffers, order, hashes, partitions
    segment    blocks of records in segment files
    schema     typed columns and their JSON
    kv         what a key-value store is, in Samza's terms
    rocksdb    last values in RocksDB
"""
