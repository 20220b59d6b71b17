"""Resuming queries of Spark: several sources, rolled back logs, states that are folded away meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

from keyfold import Changelog, ChangelogSink, aggregate, restore, resume
from keyfold.statestore.errors import CompactedAway, ConfigError
from support.events import QUIET, Events, finish, fold, kept, lose
from support.source import leases, numbered, table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from keyfold import Resumed

SCHEMA = "word string, n long"


# -- several sources -----------------------------------------------------------------------------------------


def test_a_union_of_two_changelogs_is_resumed_source_by_source_twice(
    spark: SparkSession, tmp_path: Path
) -> None:
    left = Events(spark, tmp_path / "left", SCHEMA).add(("a", 1), ("b", 2))
    right = Events(spark, tmp_path / "right", SCHEMA).add(("a", 10))
    log, checkpoint = tmp_path / "log", tmp_path / "checkpoint"

    def totals(again: Resumed | None) -> DataFrame:
        streams = [
            events.stream(None if again is None else again.options(source=i)).select("word", "n")
            for i, events in enumerate((left, right))
        ]
        return aggregate(streams[0].unionByName(streams[1]), "word", F.sum("n").alias("n"), resumed=again)

    with ChangelogSink(log, keys="word", config=QUIET, on_reset="restore") as sink:
        finish(totals(None), sink, checkpoint)
        for n in (100, 1000):
            lose(checkpoint)
            left.add(("a", n), ("c", n))
            right.add(("b", 2 * n))
            with resume(log, "log", checkpoint=checkpoint) as again:
                finish(totals(again), sink, checkpoint)
    assert {r["word"]: r["n"] for r in kept(log)} == {"a": 1111, "b": 2202, "c": 1100}


def test_the_static_side_of_a_join_is_no_source(spark: SparkSession, tmp_path: Path) -> None:
    events = Events(spark, tmp_path / "events", SCHEMA).add(("a", 1), ("b", 2))
    log, checkpoint = tmp_path / "log", tmp_path / "checkpoint"
    names = spark.createDataFrame([("a", "Anna"), ("b", "Bert")], "word string, name string")
    with ChangelogSink(log, keys="name", config=QUIET, on_reset="restore") as sink:
        live = events.stream().join(names, "word")
        finish(aggregate(live, "name", F.sum("n").alias("n")), sink, checkpoint)
        lose(checkpoint)
        events.add(("b", 5))
        with resume(log, "log", checkpoint=checkpoint) as again:
            live = names.join(events.stream(again.options()), "word")
            finish(aggregate(live, "name", F.sum("n").alias("n"), resumed=again), sink, checkpoint)
    assert {r["name"]: r["n"] for r in kept(log)} == {"Anna": 1, "Bert": 7}


def test_a_resumed_query_may_write_a_changelog_with_other_partitions(
    spark: SparkSession, tmp_path: Path
) -> None:
    """With `whole` its first batch gives every group; without, those that do not change would be missing."""
    events = Events(spark, tmp_path / "events", SCHEMA).add(("a", 1), ("b", 2), ("c", 3))
    old, new, counted = tmp_path / "old", tmp_path / "new", F.sum("n").alias("n")
    with ChangelogSink(old, keys="word", config=QUIET) as sink:
        finish(aggregate(events.stream(), "word", counted), sink, tmp_path / "first")
    events.add(("b", 5))
    with resume(old, "old", checkpoint=tmp_path / "second") as again:
        live = events.stream(again.options())
        with (
            ChangelogSink(new, keys="word", config=QUIET, partitions=3) as sink,
            pytest.raises(StreamingQueryException, match=r"(?s)returns only changed groups.*whole=True"),
        ):
            finish(aggregate(live, "word", counted, resumed=again), sink, tmp_path / "partial")
        assert not new.exists()
        frame = aggregate(live, "word", counted, resumed=again, whole=True)
        with ChangelogSink(new, keys="word", config=QUIET, partitions=3) as sink:
            finish(frame, sink, tmp_path / "second")
            assert sink.log.partitions == 3
    assert {r["word"]: r["n"] for r in kept(new)} == {"a": 1, "b": 7, "c": 3}


# -- rollback ------------------------------------------------------------------------------------------------


def test_a_query_behind_a_rollback_is_refused_until_it_is_resumed(
    spark: SparkSession, tmp_path: Path
) -> None:
    events = Events(spark, tmp_path / "events", SCHEMA).add(("a", 1)).add(("a", 2)).add(("b", 4))
    log, checkpoint = tmp_path / "log", tmp_path / "checkpoint"
    counted = [F.sum("n").alias("n")]
    with ChangelogSink(log, keys="word", config=QUIET, on_reset="restore") as sink:
        live = events.stream({"startingOffsets": "earliest", "maxOffsetsPerTrigger": "1"})
        finish(aggregate(live, "word", *counted), sink, checkpoint)
        assert len(sink.log.state.commits) == 3
        sink.log.rollback(("log", 0))
        events.add(("b", 8))
        with pytest.raises(StreamingQueryException, match=r"resume\(\.\.\.\)"):
            finish(aggregate(events.stream(), "word", *counted), sink, checkpoint)
        lose(checkpoint)
        with resume(log, "log", checkpoint=checkpoint) as again:
            live = events.stream(again.options())
            finish(aggregate(live, "word", *counted, resumed=again), sink, checkpoint)
    assert {r["word"]: r["n"] for r in kept(log)} == {"a": 3, "b": 12}


# -- a restored state in Spark -------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path, spark: SparkSession) -> Path:
    with Changelog.open(tmp_path / "log", partitions=2, config=QUIET) as opened:
        opened.append(numbered(range(8)))
    return tmp_path / "log"


def change(log: Path, value: str) -> None:
    """Everything has another value, and what was there is folded away."""
    with Changelog.open(log) as opened:
        opened.append(table(*((f"k{i}", value) for i in range(5))))
    fold(log)


def in_spark(frame: DataFrame) -> dict[bytes, bytes]:
    return {bytes(row.key): bytes(row.value) for row in frame.collect()}


def test_a_state_that_was_folded_away_is_read_as_it_was_restored(spark: SparkSession, log: Path) -> None:
    with restore(log) as state:
        before = state.to_dict()
        frame = state.to_spark(spark)
        change(log, "new")
        with pytest.raises(CompactedAway):
            restore(log, at=1)
        assert in_spark(frame) == before
        again = state.to_spark(spark)
        change(log, "newer")
        assert in_spark(again) == before
    change(log, "newest")
    assert in_spark(frame) == before, "a lease keeps the files when the state was closed"
    assert len(leases(log)) >= 2


def test_a_part_of_a_state_is_read_as_it_was_restored(spark: SparkSession, log: Path) -> None:
    with restore(log, partitions=[1]) as state:
        before = state.to_dict()
        frame = state.to_spark(spark)
        change(log, "new")
        assert in_spark(frame) == before
        assert 0 < len(before) < 8


def test_a_state_behind_a_rollback_is_read_as_it_was_restored(spark: SparkSession, log: Path) -> None:
    """The same offsets hold other records now."""
    with Changelog.open(log) as opened:
        opened.append(table(*((f"k{i}", "old") for i in range(8))))
    with restore(log) as state:
        frame = state.to_spark(spark)
        with Changelog.open(log) as opened:
            opened.rollback(1)
            opened.append(table(*((f"k{i}", "new") for i in range(8))))
        assert set(in_spark(frame).values()) == {b"old"}


def test_a_state_whose_files_nobody_holds_any_more_says_so(spark: SparkSession, log: Path) -> None:
    with restore(log) as state:
        frame = state.to_spark(spark)
    for lease in (log / "readers").glob("*.lease"):
        lease.unlink()
    change(log, "new")
    with pytest.raises(Exception, match="ViewExpired"):
        frame.collect()


def test_a_closed_state_gives_nothing(spark: SparkSession, log: Path) -> None:
    with restore(log) as state:
        pass
    with pytest.raises(ConfigError, match="was closed"):
        state.to_spark(spark)
