"""Which bytes count: manifest, log, cleaner, restore, and the `keyfold` command. No Spark in here.

From the lowest room up. Each imports only rooms above it in this list, and `statestore`:

    compaction   the fold as a pure function: batches of records in, batches of records out
    manifest     what counts: the state of a changelog, the journal's lines, settings, the meaning of `at=`
    log          the one writer and the readers of segments; ownership, recovery, ingest
    cleaner      which segments are folded when, and the pass that replaces them
    lastvalues   RocksDB stores that follow the log
    snapshot     self-contained copies
    verify       whether every byte that counts is as it was written
    restore      the state as of a commit, and what it is written to
    anchors      names for commits whose exact state stays restorable
    rollback     takes back every commit after a point
    transaction  reads and writes of last values that become one commit
    engine       one writer per process and what runs in the background beside it
    changelog    `Changelog`: the public object
    resume       a job's state with its source offsets
    standby      a warm standby
    cli          the `keyfold` command

`import keyfold` has the public names.
"""
