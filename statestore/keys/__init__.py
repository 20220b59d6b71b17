"""Keys as bytes over Arrow buffers: addresses, order, hashes, and the partition that a key belongs to.

This is the only room whose code reads memory by address.
"""
