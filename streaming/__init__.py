"""Where Spark meets the changelog: the data source `keyfold` for batches and streams, and seeds of state.

    source      options in, readers out: what a user finds documented
    options     names and values of options, and positions as JSON
    batch       `spark.read`: one view as a DataFrame
    stream      `spark.readStream`: follow the log, or put a state in once
    planning    plans, cut into pieces that carry all that a task needs
    leases      what keeps the files of a plan
    positions   whether a reader may go on from where it is, and how far a trigger goes
    rows        records to Spark's columns
    seed        a restored state as the first micro-batch
    additive    `aggregate`: sums, counts, minima, maxima and averages that can be begun with a seed
    initial     `initial_state`: a restored state for `transformWithState`
    kafka       `kafka_stream`: Spark's Kafka source, gone on with where a commit ended
    autoload    installed as `pyspark_keyfold`, which Spark finds by itself

Here and in `keyfold.sink` pyspark may be imported. Nothing below imports from here; records are only read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keyfold.streaming.seed import seed

if TYPE_CHECKING:
    from keyfold.streaming.additive import aggregate
    from keyfold.streaming.initial import initial_state
    from keyfold.streaming.kafka import kafka_stream
    from keyfold.streaming.source import KeyfoldSource, register

__all__ = ["KeyfoldSource", "aggregate", "initial_state", "kafka_stream", "register", "seed"]


def __getattr__(name: str) -> object:
    # Tasks import this package for `planning` alone, in every new worker.
    if name in ("KeyfoldSource", "register"):
        from keyfold.streaming import source

        return getattr(source, name)
    if name == "aggregate":
        from keyfold.streaming.additive import aggregate

        return aggregate
    if name == "initial_state":
        from keyfold.streaming.initial import initial_state

        return initial_state
    if name == "kafka_stream":
        from keyfold.streaming.kafka import kafka_stream

        return kafka_stream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
