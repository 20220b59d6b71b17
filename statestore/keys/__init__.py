"""Keys as bytes in Arrow buffers: addresses, sort order, hashes, and the partition that a key belongs to.

Only this package reads memory by address.
"""
