"""One micro-batch in: the rows of a DataFrame become blocks per partition, and one commit.

    changelog_sink   `ChangelogSink`: rows are changes, written as they are
    task_sink        `TaskSink`: a task reads and writes the last values; its changes are the commit
    task_runner      one micro-batch of a task: expiry, process, window
    named_stores     the stores of a task by their names, with serdes, without what has expired
    ttl              which entries have outlived their time to live and become tombstones
    arrow_batches    a DataFrame's rows on the driver, a partition at a time
    base             what the two sinks have in common
    batch_gate       which batches are taken: idempotence, continuity, what the commit says of them
    offset_log       the query that calls, and the offsets that its checkpoint keeps
    query_plan       how that query begins: where its sources do, and what its state does with
    staging          blocks that tasks wrote, and how the driver brings them into the log
    encoding         rows to key and value bytes, in the JVM

Nothing in here decides what counts: that is `keyfold.checkpoints`. A Spark task never opens RocksDB.
Spark's Python workers import this package, so it imports nothing itself.
"""
