"""Bytes at rest: blocks, segments, indexes, file names, the file-system seam, RocksDB last values, serdes.

Nothing here knows of commits, of the manifest or of Spark: whoever calls says which bytes count.
"""
