"""`spark.readStream.format("keyfold")` in Spark itself: triggers, restarts, limits, seeds, refusals."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from keyfold import Changelog, restore, resume
from keyfold.checkpoints.log.writer import Batch
from support.source import QUIET, TYPED, leases, log_rows, numbered, table

pytest.importorskip("pyspark")

from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

from keyfold.streaming.seed import seed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

WAIT_SECONDS = 120


class Job:
    """A query over a stream that keeps the rows of each batch, by batch id; `run` is one run to its end."""

    def __init__(self, stream: Callable[[], DataFrame], checkpoint: Path, mode: str = "append") -> None:
        self._stream = stream
        self.checkpoint = checkpoint
        self._mode = mode
        self.batches: dict[int, list[Row]] = {}

    def start(self, *, available_now: bool = True, fail_at: int | None = None) -> StreamingQuery:
        def keep(df: DataFrame, batch: int) -> None:
            rows = df.collect()
            if batch == fail_at:
                raise RuntimeError("planted")
            self.batches[batch] = rows

        writer = self._stream().writeStream.outputMode(self._mode).foreachBatch(keep)
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        return (writer.trigger(availableNow=True) if available_now else writer).start()

    def run(self, fail_at: int | None = None) -> None:
        query = self.start(fail_at=fail_at)
        assert query.awaitTermination(WAIT_SECONDS)

    @property
    def rows(self) -> list[Row]:
        return [row for _, rows in sorted(self.batches.items()) for row in rows]

    def offsets(self) -> list[str]:
        """The source's offset of every batch, as Spark keeps it."""
        found = [p for p in (self.checkpoint / "offsets").iterdir() if p.name.isdigit()]
        return [p.read_text().splitlines()[-1] for p in sorted(found, key=lambda p: int(p.name))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def job(spark: SparkSession, path: Path, tmp_path: Path) -> Callable[..., Job]:
    """A job that follows the log at `path` with these options."""

    def make(**options: str) -> Job:
        return Job(
            lambda: spark.readStream.format("keyfold").options(**options).load(str(path)),
            tmp_path / "checkpoint",
        )

    return make


def delivered(rows: list[Row]) -> list[tuple[int, int, bytes, bytes | None]]:
    found = [
        (r._partition, r._offset, bytes(r.key), None if r.value is None else bytes(r.value)) for r in rows
    ]
    return sorted(found, key=lambda r: r[:2])


def eventually(condition: Callable[[], bool], query: StreamingQuery) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert query.isActive, query.exception()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_given_up(path: Path) -> None:
    """Spark ends the reader's process, and does not wait for it."""
    deadline = time.monotonic() + 30
    while leases(path):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_available_now_gives_every_record_once_within_the_limit(job: Callable[..., Job], path: Path) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(numbered(range(20)))
        log.append(table(("k1", None), ("k2", "x")))
        query = job(startingOffsets="earliest", maxOffsetsPerTrigger="9")
        query.run()
        assert delivered(query.rows) == log_rows(log)
        assert [len(rows) for _, rows in sorted(query.batches.items())] == [9, 9, 4]
        for partition in (0, 1):
            offsets = [r._offset for r in query.rows if r._partition == partition]
            assert offsets == sorted(offsets)
        assert_given_up(path)
        log.append(numbered(range(3)))
        query.run()
        assert delivered(query.rows) == log_rows(log)
        ends = {str(p): end for p, end in log.end_offsets().items()}
        assert json.loads(query.offsets()[-1]) == {"keyfold": log.identity.uuid, "offsets": ends}


def test_a_batch_that_failed_comes_again_and_nothing_is_lost(job: Callable[..., Job], path: Path) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(numbered(range(20)))
        query = job(mode="changes", maxOffsetsPerTrigger="8")
        with pytest.raises(StreamingQueryException, match="planted"):
            query.run(fail_at=1)
        log.append(numbered(range(20, 25)))
        query.run()
        assert delivered(query.rows) == log_rows(log)
        assert len(query.batches[1]) == 8


def test_an_endless_query_sees_new_commits_and_gives_its_lease_up(
    job: Callable[..., Job], path: Path
) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(numbered(range(5)))
        follower = job(startingOffsets="earliest")
        query = follower.start(available_now=False)
        try:
            for i in range(5, 9):
                eventually(lambda: delivered(follower.rows) == log_rows(log), query)
                log.append(numbered([i]))
            eventually(lambda: delivered(follower.rows) == log_rows(log), query)
            assert len(leases(path)) == 1
        finally:
            query.stop()
        assert_given_up(path)


def test_where_a_query_begins_is_what_it_says(job: Callable[..., Job], path: Path) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(numbered(range(10)))
        first = job(startingOffsets="latest", mode="log")
        first.run()
        assert first.rows == []
        log.append(numbered(range(10, 14)))
        first.run()
        assert sorted(int(r.value) for r in first.rows) == [10, 11, 12, 13]
        kept = first.offsets()[0]
        shutil.rmtree(first.checkpoint)
        again = job(startingOffsets=kept)
        log.append(numbered([14]))
        again.run()
        assert sorted(int(r.value) for r in again.rows) == [10, 11, 12, 13, 14]


def test_a_follower_that_was_too_slow_is_told_or_goes_on(job: Callable[..., Job], path: Path) -> None:
    with Changelog.open(path, config={**QUIET, "delete.retention.ms": 0}) as log:
        log.append(table(("a", "1"), ("b", "1")))
        follower = job(startingOffsets="earliest")
        follower.run()
        log.append(table(("a", None), ("c", "1")))
        log.compact()
        log.compact()
        with pytest.raises(
            StreamingQueryException, match=r"CompactedAway(.|\n)*partition 0, offset 2(.|\n)*earliest"
        ):
            follower.run()
        careless = job(startingOffsets="earliest", failOnDataLoss="false")
        careless.run()
        assert delivered(careless.rows) == [(0, 3, b"c", b"1")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"startingOffsets(.|\n)*earliest"),
        ({"startingOffsets": '{"keyfold": "feed", "offsets": {"0": 0}}'}, "another changelog"),
        ({"endingOffsets": "latest"}, "not for a stream"),
    ],
)
def test_a_stream_that_cannot_be_is_refused(
    job: Callable[..., Job], path: Path, options: dict[str, str], message: str
) -> None:
    Changelog.open(path, config=QUIET).close()
    with pytest.raises(Exception, match=message):
        job(**options).run()


# -- seeds -----------------------------------------------------------------------------------------------


@pytest.fixture
def totals(tmp_path: Path) -> Path:
    """A compacted changelog of sums per word, whose last commit says where its source `events` was."""
    events = tmp_path / "events"
    with Changelog.open(events, columns=TYPED, config=QUIET) as log:
        log.append({"word": ["a", "b", "a"], "n": [1, 2, 3]})
        position = json.dumps({"keyfold": log.identity.uuid, "offsets": {"0": 3}})
    path = tmp_path / "totals"
    with Changelog.open(path, columns=TYPED, config=QUIET) as log:
        writer = log.engine.writer
        log.append({"word": ["a", "b"], "n": [4, 2]}, app_id="totals")
        writer.commit({}, Batch("totals", 1, query="q", source=(position,)))
    with Changelog.open(events, config=QUIET) as log:
        log.append({"word": ["b", "c"], "n": [10, 20]})
    return path


def test_a_restored_state_goes_on_as_if_nothing_had_happened(
    spark: SparkSession, totals: Path, tmp_path: Path
) -> None:
    again = resume(totals, "totals")

    def stream() -> DataFrame:
        live = spark.readStream.format("keyfold").options(**again.options()).load(str(tmp_path / "events"))
        both = seed(spark, again).select("word", "n").unionByName(live.select("word", "n"))
        return both.groupBy("word").agg(F.sum("n").alias("n"))

    counter = Job(stream, tmp_path / "checkpoint", mode="update")
    with pytest.raises(StreamingQueryException, match="planted"):
        counter.run(fail_at=0)
    counter.run()
    result: dict[str, Any] = {row.word: row.n for row in counter.rows}
    assert result == {"a": 4, "b": 12, "c": 20}
    with Changelog.open(tmp_path / "events", config=QUIET) as log:
        log.append({"word": ["a"], "n": [100]})
    with Changelog.open(totals, config=QUIET) as log:
        log.append({"word": ["a"], "n": [-1]}, app_id="another")
    counter.run()
    assert {row.word: row.n for row in counter.rows} == {"a": 104, "b": 12, "c": 20}


def test_a_seed_alone_is_one_batch_for_ever(spark: SparkSession, job: Callable[..., Job], path: Path) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(numbered(range(6)))
        log.append(numbered(range(6, 9)))
        once = job(mode="state", at="1")
        once.run()
        once.run()
        log.append(numbered(range(9, 12)))
        once.run()
        assert list(once.batches) == [0]
        assert {bytes(r.key): bytes(r.value) for r in once.rows} == restore(path, at=1).to_dict()
        assert [json.loads(text)["seed"] for text in once.offsets()] == [1]
