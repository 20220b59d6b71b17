"""The last value of every key, in RocksDB. The only package that imports rocksdict."""
