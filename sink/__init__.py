"""Writes a micro-batch: the rows of a DataFrame become blocks per partition, and one commit.

    changelog_sink   `ChangelogSink`: rows are changes and are written directly
    task_sink        `TaskSink`: a task reads and writes the last values; its changes are the commit
    task_runner      one micro-batch of a task: expiry, process, window
    named_stores     the named stores of a task, with serdes, without expired entries
    ttl              finds expired entries, which become tombstones
    arrow_batches    a DataFrame's rows on the driver, one partition at a time
    base             the common part of both sinks
    batch_gate       which batches are accepted: idempotence, continuity, their entry in the commit
    offset_log       the calling query, and the offsets in its checkpoint
    query_plan       how the query begins: the start offsets of its sources, and its initial state
    staging          blocks written by tasks, and how the driver appends them to the log
    small_batches    few rows, encoded by the driver without a Python worker
    python_worker    the worker of a task: prompt acknowledgements, less garbage collection
    encoding         rows to key and value bytes, in the JVM

`keyfold.checkpoints` decides what is committed, not this package. A Spark task never opens RocksDB.
Spark's Python workers import this package, so it imports nothing itself.
"""
