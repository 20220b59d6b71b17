"""The log itself: one writer that appends and commits, readers that follow, and what keeps them apart.

writer             the one writer: a commit, from blocks to the manifest line
active_segments    the segments that the writer appends to
ingest             a user's table to blocks per partition
tabular            which objects `append` takes as a table
recovery           opening: claim an epoch, cut a torn line, create
ownership          the lock, and the proof that a writer still owns the changelog
reader             committed records of one partition
reader_marks       which files readers may still need: marks and leases
rewrite            new segments in place of a group, for the cleaner
rereading          one partition read several times, in bounded memory
ahead              batches read ahead on background threads
spill              temporary files for key bytes
key_filter         some keys, or all keys with a prefix
compact_requests   another process asks the writer to compact
dead_standbys      stores that killed standbys left
descriptors        the limit of open files
processes          what is open belongs to one process, not to a forked child
"""
