"""Bytes at rest: errors, files, segments, key-value stores. Nothing here knows of commits or of Spark.

Files, paths and errors are in this package. The subpackages are:

    keys       keys as bytes: buffers, sort order, hashes, partitions
    segment    blocks of records in segment files
    schema     typed columns and their JSON encoding
    kv         the key-value store interface, in Samza's terms
    rocksdb    the last value of every key, in RocksDB
"""
