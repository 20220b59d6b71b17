"""The last value of every key in RocksDB. The only room that imports rocksdict."""
