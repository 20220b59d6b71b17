"""The cleaner: what is dirty, when it is compacted, and the pass that swaps segments. Kafka's
`LogCleaner`.

    pool           the threads, and which partition they take next
    manager        which partitions are being cleaned, are paused, or cannot be cleaned
    log_to_clean   what a pass may touch, and its groups of segments
    clean_pass     one pass over one partition
    progress       what a pass has proved so far
    disk_room      the disk space that a pass can use
    throttle       the limit of bytes per second
    retention      `cleanup.policy=delete`
"""
