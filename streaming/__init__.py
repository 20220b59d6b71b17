"""Where Spark meets the changelog: the data source `keyfold`, and restored states as seeds of queries.

    source           the documented entry point: options in, readers out
    options          names and values of options, and offsets as JSON
    batch_reader     `spark.read`: one view as a DataFrame
    stream_reader    `spark.readStream`: follow the log, or emit a restored state once
    pieces           what one task reads
    planner          plans, cut into pieces that carry all that a task needs
    leases           keep the cleaner from deleting the files of a plan
    offsets          whether a reader may continue from its position, and how far a trigger reads
    rows             converts records to Spark's columns
    seed             a restored state as the first micro-batch
    aggregate        `aggregate`: sums, counts, minima, maxima and averages that can begin with a seed
    initial_state    `initial_state`: a restored state for `transformWithState`
    kafka            `kafka_stream`: Spark's Kafka source, continued where a commit ended

Only here and in `keyfold.sink` may pyspark be imported. Records are only read here.
Spark's Python workers import this package, so it imports nothing itself.
"""
