"""The first batch of a query, run again after a crash: Spark asks anew where it begins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keyfold import Changelog
from support.source import QUIET, Driver, clean, numbered, table

pytest.importorskip("pyspark")


@pytest.fixture
def log(tmp_path: Path) -> Changelog:
    log = Changelog.open(tmp_path / "log", partitions=2, config=QUIET)
    log.append(numbered(range(10)))
    return log


def keys(rows: list[dict[str, object]] | None) -> set[object]:
    return {row["key"] for row in rows or []}


def restarted(driver: Driver, batch: int, **options: str) -> list[dict[str, object]]:
    """The rows of a batch that a new process runs again: for the first, Spark asks where the query begins."""
    again = Driver(driver.path, {**driver.options, **options})
    start = json.dumps(again.reader.initialOffset()) if batch == 0 else driver.batches[batch][0]
    again.batches = [(start, driver.batches[batch][1])]
    return again.run(0)


def test_a_first_batch_from_latest_comes_again_whole(log: Changelog) -> None:
    driver = Driver(log.path, {"startingOffsets": "latest"})
    log.append(numbered(range(10, 20)))
    first = driver.trigger()
    log.append(numbered(range(20, 30)))
    assert len(keys(first)) == 10
    assert keys(restarted(driver, 0)) == keys(first)


def test_a_first_batch_comes_again_whole_where_the_options_name_another_position(log: Changelog) -> None:
    """As those of a second `resume` do, when the sink has committed the batch and Spark has not noted it."""
    driver = Driver(log.path, {"startingOffsets": "earliest"})
    first = driver.trigger()
    ends = {str(p): end for p, end in log.end_offsets().items()}
    later = json.dumps({"keyfold": log.identity.uuid, "offsets": ends})
    log.append(numbered(range(10, 20)))
    assert keys(restarted(driver, 0, startingOffsets=later)) == keys(first)


def test_a_first_batch_without_rows_stays_without(log: Changelog) -> None:
    """Where another source of the query had some."""
    driver = Driver(log.path, {"startingOffsets": "latest"})
    driver.batches.append((driver.position, driver.position))
    log.append(numbered(range(10, 20)))
    assert restarted(driver, 0, startingOffsets="earliest") == []
    assert len(keys(driver.trigger())) == 10


def test_only_the_first_batch_says_where_the_query_began(log: Changelog) -> None:
    driver = Driver(log.path, {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "4"})
    rows = [keys(batch) for batch in driver.triggers()]
    assert [len(batch) for batch in rows] == [4, 4, 2]
    begun = ["begun" in json.loads(end) for _, end in driver.batches]
    assert begun == [True, False, False]
    assert [keys(restarted(driver, batch)) for batch in range(3)] == rows


def test_a_delete_that_was_dropped_since_is_not_missed_by_a_first_batch_that_comes_again(
    tmp_path: Path,
) -> None:
    """It began at the log's start, where every position is safe."""
    with Changelog.open(tmp_path / "log", config={**QUIET, "delete.retention.ms": 0}) as log:
        log.append(table(("a", "1"), ("b", "1")))
        driver = Driver(log.path, {"startingOffsets": "earliest"})
        driver.trigger()
        log.append(table(("a", None), ("c", "1")))
        clean(log)
        clean(log)
        assert keys(restarted(driver, 0)) == {b"b"}


def test_a_first_batch_that_began_below_a_dropped_delete_comes_again(tmp_path: Path) -> None:
    """Its position was written when the delete was gone already, so the query has missed nothing."""
    with Changelog.open(tmp_path / "log", config={**QUIET, "delete.retention.ms": 0}) as log:
        log.append(table(("a", "1"), ("b", "1")))
        log.append(table(("a", None), ("c", "1")))
        clean(log)
        clean(log)
        position = {"keyfold": log.identity.uuid, "offsets": {"0": 1}, "snapshot": {"0": log.state.seq}}
        driver = Driver(log.path, {"startingOffsets": json.dumps(position)})
        assert keys(driver.trigger()) == {b"b", b"c"}
        assert keys(restarted(driver, 0, startingOffsets="latest")) == {b"b", b"c"}
