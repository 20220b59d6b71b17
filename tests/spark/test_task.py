"""Tasks that are classes, under Spark: what they are given, what they commit, what a restart does."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

from keyfold import Store, Task, TaskSink, restore
from keyfold.sink.task_sink import Int64Serde, StringSerde
from keyfold.statestore.errors import ConfigError
from support import streams
from support.streams import commits, forget_batch, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Count(Task):
    """Counts the rows of every word, and the windows."""

    stores: ClassVar = {
        "words": Store(StringSerde(), Int64Serde(), ttl=timedelta(days=1)),
        "windows": Store(),
    }

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.fails = ""

    def process(self, records: pa.RecordBatch, store: Any) -> None:
        self.batches.append(records)
        words = store["words"]
        found = records.column("word").value_counts()
        keys = found.field("values").cast(pa.string())
        before = words.get_all(keys).fill_null(0)
        words.put_all(keys, pc.add(before, found.field("counts")))
        if self.fails == "process":
            raise ValueError("the task's own")

    def window(self, store: Any) -> None:
        windows = store["windows"]
        windows.put(b"n", b"%d" % (int(windows.get(b"n") or b"0") + 1))
        if self.fails == "window":
            raise ValueError("the task's own")


def words(spark: SparkSession, directory: Path) -> streams.Files:
    source = streams.Files(spark, directory / "words", "word string")
    return source.add({"word": "a"}, {"word": "b"}, {"word": "a"}).add({"word": "a"})


def state(path: Path) -> dict[bytes, Any]:
    found = restore(path).to_dict()
    decode = Int64Serde().deserialize
    return {k: decode(v) if k.startswith(b"words\0") else v for k, v in found.items()}


def test_each_micro_batch_is_one_commit_also_across_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path)
    path, checkpoint = tmp_path / "counts", tmp_path / "checkpoint"
    with TaskSink(path, Count(), partitions=2) as sink:
        run(source.stream(), sink, checkpoint)
        assert commits(sink.log) == [(n, (f'{{"logOffset":{n}}}',)) for n in range(2)]
    assert state(path) == {b"words\0a": 3, b"words\0b": 1, b"windows\0n": b"2"}
    source.add({"word": "b"})
    with TaskSink(path, Count()) as sink:
        run(source.stream(), sink, checkpoint)
    assert state(path) == {b"words\0a": 3, b"words\0b": 2, b"windows\0n": b"3"}


def test_a_batch_that_was_committed_calls_neither_process_nor_window(
    spark: SparkSession, tmp_path: Path
) -> None:
    source = words(spark, tmp_path)
    path, checkpoint = tmp_path / "counts", tmp_path / "checkpoint"
    with TaskSink(path, Count()) as sink:
        run(source.stream(), sink, checkpoint)
    before = state(path)
    forget_batch(checkpoint, 1)
    task = Count()
    with TaskSink(path, task) as sink:
        run(source.stream(), sink, checkpoint)
    assert (task.batches, state(path)) == ([], before)


@pytest.mark.parametrize("where", ["process", "window"])
def test_an_exception_commits_nothing(spark: SparkSession, tmp_path: Path, where: str) -> None:
    """Also one that leaves most of the batch unread."""
    source = words(spark, tmp_path)
    path, checkpoint = tmp_path / "counts", tmp_path / "checkpoint"
    task = Count()
    task.fails = where
    with TaskSink(path, task) as sink:
        with pytest.raises(StreamingQueryException, match="the task's own"):
            run(source.stream().repartition(6, "word"), sink, checkpoint)
        assert (state(path), sink.log.state.commits) == ({}, ())
        task.fails = ""
        run(source.stream().repartition(6, "word"), sink, checkpoint)
    assert state(path) == {b"words\0a": 3, b"words\0b": 1, b"windows\0n": b"2"}


def test_a_stateful_query_in_update_mode_is_read_whole(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path)
    task = Count()
    with TaskSink(tmp_path / "counts", task) as sink:
        run(source.stream().groupBy("word").count(), sink, tmp_path / "checkpoint", "update")
    assert sorted(row["count"] for batch in task.batches for row in batch.to_pylist()) == [1, 2, 3]


class Keep:
    """Keeps what it is given, and needs no base class."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []

    def process(self, records: pa.RecordBatch, store: Any) -> None:
        self.batches.append(records)
        store.put(b"%d" % len(self.batches), b"%d" % records.num_rows)


def test_records_come_in_arrow_batches_with_their_types(spark: SparkSession, tmp_path: Path) -> None:
    """Whatever the session's time zone is."""
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "4")
    made = session.range(0, 10, 1, 1).select(
        "id",
        F.timestamp_seconds(F.col("id") * 3600).alias("at"),
        F.array(F.struct(F.col("id").cast("string").alias("name"))).alias("tags"),
        F.when(F.col("id") > 0, F.col("id").cast("decimal(10,2)")).alias("price"),
    )
    task = Keep()
    with TaskSink(tmp_path / "kept", task) as sink:
        sink(made, 0)
        assert [batch.num_rows for batch in task.batches] == [4, 4, 2]
        assert sink.log.get(b"3") == b"2"
    rows = pa.Table.from_batches(task.batches).to_pylist()
    assert [row["at"] for row in rows] == [
        datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(hours=n) for n in range(10)
    ]
    assert [row["tags"] for row in rows] == [[{"name": str(n)}] for n in range(10)]
    assert rows[0]["price"] is None
    assert int(rows[9]["price"]) == 9


def test_an_empty_batch_commits(spark: SparkSession, tmp_path: Path) -> None:
    task = Count()
    with TaskSink(tmp_path / "counts", task) as sink:
        sink(spark.createDataFrame([], "word string"), 0)
        assert (task.batches, len(sink.log.state.commits)) == ([], 1)


def test_what_is_no_task_makes_no_sink_and_no_changelog(tmp_path: Path) -> None:
    for wrong in (Keep, object(), type("Late", (), {"process": lambda self: None})()):
        with pytest.raises(ConfigError, match=r"task"):
            TaskSink(tmp_path / "log", cast(Any, wrong))
    assert not (tmp_path / "log").exists()
