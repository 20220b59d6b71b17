"""Four kinds of jobs that follow the same events, and can be killed at a chosen moment inside one JVM.

A job that is killed loses what a process loses: its files and locks, and what it had not written. What it
leaves on the disk is what the next life of the job finds.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from keyfold import (
    Changelog,
    ChangelogSink,
    Resumed,
    Store,
    TaskSink,
    aggregate,
    initial_state,
    restore,
    resume_if_lost,
)
from keyfold.sink.task_sink import Int64Serde, StringSerde
from keyfold.statestore.schema.columns import Columns
from support.faults.inject import KillAt, Killed, Selection, changes, on
from support.lifecycle import bury

#: Key, amount, whether the key is deleted.
Event = tuple[str, int, bool]

CONFIG = {"cleaner.threads": 0, "anchors.auto": 1, "segment.bytes": 1024}
ROWS_PER_TRIGGER = 24
PARTITIONS = 2
WAIT_SECONDS = 180


def write_events(path: Path, draw: random.Random, count: int) -> list[Event]:
    """A changelog of events, one partition, a number before each."""
    events = [(f"k{draw.randrange(12)}", draw.randrange(100), draw.random() < 0.2) for _ in range(count)]
    fields = [("id", "long"), ("key", "string"), ("amount", "long"), ("gone", "boolean")]
    schema = {
        "type": "struct",
        "fields": [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in fields],
    }
    columns = Columns(schema, ("id",), "json")
    values = [
        f'{{"key":"{key}","amount":{amount},"gone":{str(gone).lower()}}}'.encode()
        for key, amount, gone in events
    ]
    keys = [columns.encode_key(number) for number in range(count)]
    with Changelog.open(path, columns=columns, config={**CONFIG, "cleanup.policy": "delete"}) as log:
        log.append(pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}))
    return events


def last_values(events: list[Event]) -> dict[Any, Any]:
    """What the upsert job should end with."""
    state: dict[Any, Any] = {}
    for number, (key, amount, gone) in enumerate(events):
        state.pop(key, None)
        if not gone:
            state[key] = {"id": number, "amount": amount}
    return state


def sums(events: list[Event]) -> dict[Any, Any]:
    """What the two aggregating jobs should end with."""
    state: dict[Any, Any] = {}
    for key, amount, _ in events:
        entry = state.setdefault(key, {"total": 0, "rows": 0})
        entry["total"] += amount
        entry["rows"] += 1
    return state


def counted(events: list[Event]) -> dict[Any, Any]:
    """What the task should end with: an event that deletes begins its key anew."""
    state: dict[str, int] = {}
    for key, amount, gone in events:
        state[key] = 0 if gone else state.get(key, 0) + amount
    kept = {key: total for key, total in state.items() if total}
    keys, values = StringSerde(), Int64Serde()
    return {b"totals\0" + keys.serialize(key): values.serialize(total) for key, total in kept.items()}


# -- the kinds -----------------------------------------------------------------------------------------------


class Totals:
    """The task. A total of 0 is not kept."""

    stores: ClassVar = {"totals": Store(StringSerde(), Int64Serde())}

    def process(self, records: pa.RecordBatch, store: Any) -> None:
        totals = store["totals"]
        for row in records.to_pylist():
            total = 0 if row["gone"] else (totals.get(row["key"]) or 0) + row["amount"]
            if total:
                totals.put(row["key"], total)
            else:
                totals.delete(row["key"])


def processor() -> StatefulProcessor:
    """Classes of a module of tests cannot be imported by Spark's workers."""

    class Sums(StatefulProcessor):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self.sums = handle.getValueState("sums", "total long, rows long")

        def add(self, total: int, rows: int) -> tuple[int, int]:
            before = self.sums.get() or (0, 0)
            after = int(before[0]) + total, int(before[1]) + rows
            self.sums.update(after)
            return after

        def handleInputRows(self, key: Any, rows: Iterator[Row], timers: Any) -> Iterator[Row]:
            amounts = [row.amount for row in rows]
            total, count = self.add(sum(amounts), len(amounts))
            yield Row(key=key[0], total=total, rows=count)

        def handleInitialState(self, key: Any, initial: Row, timers: Any) -> None:
            self.add(initial.total, initial.rows)

        def close(self) -> None:
            pass

    return Sums()


def _upserts(live: DataFrame, spark: SparkSession, again: Resumed | None) -> DataFrame:
    return live


def _native(live: DataFrame, spark: SparkSession, again: Resumed | None) -> DataFrame:
    totals = F.sum("amount").alias("total"), F.count("*").alias("rows")
    return aggregate(live, "key", *totals, resumed=again)


def _with_state(live: DataFrame, spark: SparkSession, again: Resumed | None) -> DataFrame:
    state = None if again is None else initial_state(spark, again)
    grouped = live.groupBy("key")
    schema = "key string, total long, rows long"
    return grouped.transformWithState(processor(), schema, "Update", "none", state)


def _upsert_sink(**common: Any) -> ChangelogSink:
    return ChangelogSink(
        keys="key", sequence_by="id", apply_as_deletes="gone", except_column_list="gone", **common
    )


def _sink(**common: Any) -> ChangelogSink:
    return ChangelogSink(keys="key", **common)


def _task(**common: Any) -> TaskSink:
    return TaskSink(process=Totals(), **common)


@dataclass(frozen=True)
class Kind:
    """One kind of job: what it computes, what it writes with, what it should end with."""

    name: str
    frame: Callable[[DataFrame, SparkSession, Resumed | None], DataFrame]
    sink: Callable[..., ChangelogSink | TaskSink]
    expected: Callable[[list[Event]], dict[Any, Any]]


KINDS = (
    Kind("upserts", _upserts, _upsert_sink, last_values),
    Kind("native", _native, _sink, sums),
    Kind("with-state", _with_state, _sink, sums),
    Kind("task", _upserts, _task, counted),
)


# -- a life --------------------------------------------------------------------------------------------------


class Dying(KillAt):
    """Dies at the n-th selected operation from when it is told, or at once."""

    def arm(self, n: int, selection: Selection) -> None:
        with self._kill_lock:
            self._kill_only, self._kill_n = selection, n
            self.count = 0

    def die(self) -> None:
        with self._kill_lock:
            self.dead = True
        raise Killed


#: What happens to a job when it gets to a batch; it calls the sink, or dies.
Moment = Callable[["Job", "ChangelogSink | TaskSink", DataFrame, int], None]


def unharmed(job: Job, sink: ChangelogSink | TaskSink, df: DataFrame, batch: int) -> None:
    sink(df, batch)


@dataclass
class Job:
    """A job of one kind in a directory of its own, life after life."""

    kind: Kind
    root: Path
    events: Path
    #: How many batches each life has seen, for moments.
    seen: int = 0
    files: Dying = field(default_factory=Dying)
    partitions: int = PARTITIONS
    _query: StreamingQuery | None = None
    _sink: ChangelogSink | TaskSink | None = None

    @property
    def path(self) -> Path:
        return self.root / self.kind.name / "log"

    @property
    def checkpoint(self) -> Path:
        return self.root / self.kind.name / "checkpoint"

    @property
    def shipped(self) -> Path:
        """Where a snapshot of it goes that survives the machine."""
        return self.root / self.kind.name / "shipped"

    def start(self, spark: SparkSession, moment: Moment) -> None:
        """Begin a life: over all events that are left, or until it dies."""
        self.seen = 0
        self.files = Dying()
        reader = spark.readStream.format("keyfold").option("maxOffsetsPerTrigger", ROWS_PER_TRIGGER)
        again = resume_if_lost(self.path, app_id="log", checkpoint=self.checkpoint)
        options = {"startingOffsets": "earliest"} if again is None else again.options()
        live = reader.options(**options).load(str(self.events)).select("id", "key", "amount", "gone")
        frame = self.kind.frame(live, spark, again)
        sink = self.kind.sink(
            path=self.path, partitions=self.partitions, config=CONFIG, on_reset="restore", files=self.files
        )

        def run(df: DataFrame, batch: int) -> None:
            self.seen += 1
            try:
                moment(self, sink, df, batch)
            except Killed:
                # Spark's callback server takes nothing but an Exception for a failure of the batch.
                raise RuntimeError("the process is dead") from None

        writer = frame.writeStream.outputMode("update").foreachBatch(run)
        writer = writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True)
        self._sink, self._query = sink, writer.start()

    def wait_until_begun(self) -> None:
        """Until its first batch has begun, or it has ended without one."""
        while not self.seen and self._query is not None and self._query.isActive:
            time.sleep(0.02)

    def end(self) -> bool:
        """Wait for the life's end; whether it was killed."""
        assert self._query is not None
        assert self._sink is not None
        try:
            assert self._query.awaitTermination(WAIT_SECONDS), "the query does not end"
        except StreamingQueryException:
            if not self.files.dead:
                raise
        finally:
            self._query.stop()
            if self.files.dead:
                bury(self.files)
            else:
                self._sink.close()
        return self.files.dead

    def check(self, events: list[Event]) -> None:
        """Equal to the oracle, and so are the last values."""
        expected = self.kind.expected(events)
        found = restore(self.path).to_dict()
        assert found == expected, self.kind.name
        with Changelog.open(self.path) as log:
            assert sum(1 for _ in log.store().all()) == len(expected), self.kind.name


# -- moments -------------------------------------------------------------------------------------------------

_COMMIT = on("append", path="*.journal")


def at_batch(number: int, moment: Moment) -> Moment:
    """In the n-th batch of the life, from 0. A snapshot is shipped before the second one."""

    def reached(job: Job, sink: ChangelogSink | TaskSink, df: DataFrame, batch: int) -> None:
        if job.seen == 2:
            sink.log.snapshot(job.shipped)
        (moment if job.seen == number + 1 else unharmed)(job, sink, df, batch)

    return reached


def mid_batch(job: Job, sink: ChangelogSink | TaskSink, df: DataFrame, batch: int) -> None:
    """Blocks are written, the line is not."""
    job.files.arm(0, _COMMIT)
    sink(df, batch)


def before_spark_commits(job: Job, sink: ChangelogSink | TaskSink, df: DataFrame, batch: int) -> None:
    """The sink has committed, Spark does not get to know."""
    sink(df, batch)
    job.files.die()


def while_cleaning(job: Job, sink: ChangelogSink | TaskSink, df: DataFrame, batch: int) -> None:
    """At the line that swaps cleaned segments in. The batch itself was not begun."""
    # Sealing writes a line before.
    job.files.arm(1, _COMMIT)
    sink.log.compact()


def while_restoring(operation: int) -> Moment:
    """In the first batch of a life that has something to restore, at some operation."""

    def dying(job: Job, sink: ChangelogSink | TaskSink, df: DataFrame, batch: int) -> None:
        job.files.arm(operation, changes)
        sink(df, batch)
        # A batch with fewer operations: then behind it.
        job.files.die()

    return dying


MOMENTS: dict[str, Moment] = {
    "mid-batch": at_batch(2, mid_batch),
    "between the sink's commit and Spark's": at_batch(2, before_spark_commits),
    "during cleaning": at_batch(2, while_cleaning),
}


# -- faults --------------------------------------------------------------------------------------------------


def killed(job: Job) -> None:
    """Nothing but the process is lost."""


def checkpoint_deleted(job: Job) -> None:
    shutil.rmtree(job.checkpoint)


def stores_deleted(job: Job) -> None:
    found = list(job.path.glob("store-*"))
    for store in found:
        shutil.rmtree(store)


def machine_lost(job: Job) -> None:
    """What is left is the shipped snapshot."""
    shutil.rmtree(job.path)
    shutil.rmtree(job.checkpoint)
    Changelog.clone(job.shipped, job.path).close()


def partitions_changed(job: Job) -> None:
    """The state goes into a changelog of another number of partitions."""
    other = job.path.with_name("other")
    job.partitions = 5 - job.partitions
    with restore(job.path) as state:
        state.to_changelog(other, partitions=job.partitions)
    shutil.rmtree(job.path)
    with suppress(FileNotFoundError):
        shutil.rmtree(job.checkpoint)
    other.rename(job.path)


FAULTS: dict[str, Callable[[Job], None]] = {
    "killed": killed,
    "checkpoint deleted": checkpoint_deleted,
    "last-value stores deleted": stores_deleted,
    "machine lost": machine_lost,
    "partitions changed": partitions_changed,
}
