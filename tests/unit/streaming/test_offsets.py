"""Following a changelog: every record once, as many as allowed, and nobody misses a delete unawares."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from keyfold import Changelog
from keyfold.checkpoints.cleaner.retention import apply_retention
from keyfold.checkpoints.manifest.state import State
from keyfold.statestore.errors import CompactedAway, ConfigError
from keyfold.statestore.files import LOCAL
from keyfold.streaming import offsets
from support.source import QUIET, Driver, log_rows, numbered, read_batch, table

#: Tombstones go with the second pass.
AT_ONCE = {**QUIET, "delete.retention.ms": 0}

FOLLOW = {"startingOffsets": "earliest"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


def delivered(rows: list[dict[str, Any]]) -> list[tuple[int, int, bytes, bytes | None]]:
    return [(r["_partition"], r["_offset"], r["key"], r["value"]) for r in rows]


def folded(rows: list[dict[str, Any]], state: dict[bytes, bytes] | None = None) -> dict[bytes, bytes]:
    state = {} if state is None else state
    for row in rows:
        if row["_deleted"]:
            state.pop(row["key"], None)
        else:
            state[row["key"]] = row["value"]
    return state


def current(path: Path) -> dict[bytes, bytes]:
    return {row["key"]: row["value"] for row in read_batch(path)}


def test_every_record_comes_once_and_in_the_order_of_its_partition(path: Path) -> None:
    with Changelog.open(path, partitions=3, config=QUIET) as log:
        for start in range(0, 60, 20):
            log.append(numbered(range(start, start + 20)))
        rows = [row for batch in Driver(path, FOLLOW).triggers() for row in batch]
        assert delivered(rows) == log_rows(log)


def test_a_trigger_gives_no_more_rows_than_the_limit(path: Path) -> None:
    with Changelog.open(path, partitions=3, config=QUIET) as log:
        log.append(numbered(range(50)))
        batches = list(Driver(path, {**FOLLOW, "maxOffsetsPerTrigger": "7"}).triggers())
        assert [len(batch) for batch in batches] == [7] * 7 + [1]
        rows = sorted((r for batch in batches for r in batch), key=lambda r: (r["_partition"], r["_offset"]))
        assert delivered(rows) == log_rows(log)


def test_the_limit_counts_records_not_the_gaps_that_compaction_left(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        for _ in range(10):
            log.append(numbered(range(30)))
        log.compact()
        log.append(numbered(range(30, 40)))
        batches = list(Driver(path, {**FOLLOW, "maxOffsetsPerTrigger": "8"}).triggers())
        assert [len(batch) for batch in batches] == [8] * 5
        assert delivered([r for batch in batches for r in batch]) == log_rows(log)


def test_a_trigger_that_may_read_everything_ignores_the_limit(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(numbered(range(30)))
        assert (
            len(Driver(path, {**FOLLOW, "maxOffsetsPerTrigger": "7"}).trigger(ReadAllAvailable()) or ()) == 30
        )


def test_a_query_that_starts_again_goes_on_where_it_was(path: Path) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(numbered(range(20)))
        query = Driver(path, {**FOLLOW, "maxOffsetsPerTrigger": "6"})
        rows = query.trigger() or []
        query.start()
        log.append(numbered(range(20, 30)))
        rows += [row for batch in query.triggers() for row in batch]
        rows.sort(key=lambda r: (r["_partition"], r["_offset"]))
        assert delivered(rows) == log_rows(log)


def test_a_batch_that_runs_again_gives_the_same_rows(path: Path) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(numbered(range(20)))
        query = Driver(path, {**FOLLOW, "maxOffsetsPerTrigger": "6"})
        first = query.trigger()
        log.append(numbered(range(20)))
        query.trigger()
        query.start()
        assert query.run(0) == first


def test_nothing_new_is_told_by_the_same_offset(path: Path) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(numbered(range(20)))
        query = Driver(path, FOLLOW)
        query.everything()
        assert query.trigger() is None
        log.append(numbered([99]))
        assert [r["value"] for r in query.everything()] == [b"99"]


def test_bytes_that_no_commit_names_are_never_seen(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(numbered(range(3)))
        (segment,) = (path / "0").glob("*.arrows")
        committed = segment.read_bytes()
        with segment.open("ab") as file:
            file.write(committed[-64:])
        (path / "0" / "00000000000000000003-1-9.arrows").write_bytes(committed)
        assert [r["value"] for r in Driver(path, FOLLOW).everything()] == [b"0", b"1", b"2"]
        assert len(read_batch(path, mode="log")) == 3


def test_latest_gives_only_what_is_committed_later(path: Path) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(numbered(range(5)))
        query = Driver(path, {"startingOffsets": "latest"})
        assert query.trigger() is None
        log.append(numbered([7]))
        assert [r["value"] for r in query.everything()] == [b"7"]


def test_the_json_that_the_source_keeps_is_taken_as_the_start(path: Path) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(numbered(range(20)))
        query = Driver(path, {**FOLLOW, "maxOffsetsPerTrigger": "6"})
        rows = query.trigger() or []
        rows += Driver(path, {"startingOffsets": query.position}).everything()
        rows.sort(key=lambda r: (r["_partition"], r["_offset"]))
        assert delivered(rows) == log_rows(log)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keyfold": "0" * 32}, "of another changelog"),
        ({"offsets": {"0": 1}}, "do not match the partitions of this changelog"),
        ({"offsets": {"0": 1, "1": 0, "2": 0}}, "do not match the partitions of this changelog"),
        ({"offsets": {"0": 99, "1": 0}}, "ends before"),
    ],
)
def test_a_position_of_another_log_is_refused(path: Path, change: dict[str, Any], message: str) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(numbered(range(4)))
        start = {"keyfold": log.identity.uuid, "offsets": {"0": 0, "1": 0}, **change}
        with pytest.raises(ConfigError, match=message):
            Driver(path, {"startingOffsets": json.dumps(start)})


def test_a_checkpoint_of_another_source_is_refused(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(numbered(range(4)))
        query = Driver(path, FOLLOW)
        query.position = '{"logOffset": 3}'
        with pytest.raises(ConfigError, match="offsets of another source"):
            query.trigger()


def test_available_now_stops_at_what_was_committed_when_it_began(path: Path) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(numbered(range(10)))
        query = Driver(path, {**FOLLOW, "maxOffsetsPerTrigger": "4"})
        query.reader.prepareForTriggerAvailableNow()
        rows = query.trigger() or []
        log.append(numbered(range(10, 20)))
        rows += [row for batch in query.triggers() for row in batch]
        assert sorted(int(r["value"]) for r in rows) == list(range(10))


# -- what is gone ------------------------------------------------------------------------------------------


def retained(path: Path) -> Changelog:
    """A log whose first segment retention has deleted: it begins at 5."""
    clock = iter(range(1_000, 10_000_000, 1_000))
    log = Changelog.open(
        path, config={**QUIET, "cleanup.policy": "delete", "retention.ms": 1, "segment.ms": 1},
        clock_ms=lambda: next(clock),
    )  # fmt: skip
    log.append(table(*((f"k{i}", str(i)) for i in range(5)), timestamp_ms=0))
    log.append(table(*((f"k{i}", str(i)) for i in range(5, 9)), timestamp_ms=1 << 40))
    assert apply_retention(log.engine.writer) == 1
    assert log.start_offsets() == {0: 5}
    return log


def test_records_that_retention_deleted_before_they_were_read_are_told(path: Path) -> None:
    with retained(path) as log:
        start = json.dumps({"keyfold": log.identity.uuid, "offsets": {"0": 2}})
        with pytest.raises(CompactedAway, match=r"partition 0, offset 2(.|\n)*failOnDataLoss=false"):
            Driver(path, {"startingOffsets": start})
        with pytest.raises(CompactedAway):
            read_batch(path, startingOffsets=start)


def test_reading_goes_on_behind_what_retention_deleted_where_that_is_asked_for(path: Path) -> None:
    with retained(path) as log:
        start = json.dumps({"keyfold": log.identity.uuid, "offsets": {"0": 2}})
        options = {"startingOffsets": start, "failOnDataLoss": "false"}
        assert [r["_offset"] for r in Driver(path, options).everything()] == [5, 6, 7, 8]
        limited = Driver(path, {**options, "maxOffsetsPerTrigger": "3"})
        assert [[r["_offset"] for r in rows] for rows in limited.triggers()] == [[5, 6, 7], [8]]


def test_earliest_is_where_the_log_begins_now(path: Path) -> None:
    with retained(path):
        assert [r["_offset"] for r in Driver(path, FOLLOW).everything()] == [5, 6, 7, 8]


def with_lost_delete(log: Changelog) -> None:
    """`a` was written at 0 and deleted at 2; both are gone. 1 and 3 are there."""
    log.append(table(("a", "1"), ("b", "1"), ("a", None), ("c", "1")))
    log.compact()
    log.compact()
    assert log.state.partitions[0].dropped_tombstone == 2
    assert [offset for _, offset, _, _ in log_rows(log)] == [1, 3]


def test_a_reader_below_a_dropped_delete_is_told(path: Path) -> None:
    with Changelog.open(path, config=AT_ONCE) as log:
        query = Driver(path, {**FOLLOW, "maxOffsetsPerTrigger": "2"})
        log.append(table(("a", "1"), ("b", "1"), ("a", None), ("c", "1")))
        assert folded(query.trigger() or []) == {b"a": b"1", b"b": b"1"}
        log.compact()
        log.compact()
        with pytest.raises(CompactedAway, match=r"partition 0, offset 2(.|\n)*above 2(.|\n)*earliest"):
            query.trigger()


def test_a_reader_below_a_dropped_delete_goes_on_where_that_is_asked_for(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Changelog.open(path, config=AT_ONCE) as log:
        query = Driver(path, {**FOLLOW, "maxOffsetsPerTrigger": "2", "failOnDataLoss": "false"})
        log.append(table(("a", "1"), ("b", "1"), ("a", None), ("c", "1")))
        query.trigger()
        log.compact()
        log.compact()
        assert [r["_offset"] for rows in query.triggers() for r in rows] == [3]
        assert "delete" in caplog.text


def test_a_reader_above_every_dropped_delete_is_not_disturbed(path: Path) -> None:
    with Changelog.open(path, config=AT_ONCE) as log:
        query = Driver(path, FOLLOW)
        log.append(table(("a", "1"), ("b", "1"), ("a", None), ("c", "1")))
        state = folded(query.everything())
        log.compact()
        log.compact()
        log.append(table(("d", "1")))
        assert folded(query.everything(), state) == current(path)


def test_a_reader_that_begins_after_deletes_were_dropped_reads_past_them_at_any_pace(path: Path) -> None:
    with Changelog.open(path, config=AT_ONCE) as log:
        with_lost_delete(log)
        query = Driver(path, {**FOLLOW, "maxOffsetsPerTrigger": "1"})
        state = folded(query.trigger() or [])
        query.start()
        for rows in query.triggers():
            folded(rows, state)
        assert state == current(path) == {b"b": b"1", b"c": b"1"}


def test_a_reader_between_records_below_a_delete_that_was_gone_before_it_began_is_not_disturbed(
    path: Path,
) -> None:
    """Its position says which segments it has been promised, so that it need not be stopped in vain."""
    with Changelog.open(path, config=AT_ONCE) as log:
        log.append(table(("a", "1")))
        log.anchor("keeps-a")
        log.append(table(("a", "2"), ("b", "1"), ("b", None), ("c", "1")))
        log.compact()
        log.compact()
        assert [offset for _, offset, _, _ in log_rows(log)] == [0, 1, 4]
        assert log.state.partitions[0].dropped_tombstone == 3
        query = Driver(path, {**FOLLOW, "maxOffsetsPerTrigger": "1"})
        state = folded(query.trigger() or [])
        assert state == {b"a": b"1"}
        query.start()
        for rows in query.triggers():
            folded(rows, state)
        assert state == current(path) == {b"a": b"2", b"c": b"1"}


def test_a_delete_that_was_dropped_late_below_an_older_one_is_told(path: Path) -> None:
    """The highest dropped delete does not move, so the number alone would say that all is well."""
    with Changelog.open(path, config=AT_ONCE) as log:
        log.append(table(("a", "1")))
        log.anchor("keeps-a")
        log.append(table(("a", None), ("b", "1"), ("b", None), ("c", "1")))
        log.compact()
        log.compact()
        assert [offset for _, offset, _, _ in log_rows(log)] == [0, 1, 4]
        assert log.state.partitions[0].dropped_tombstone == 3
        query = Driver(path, {**FOLLOW, "maxOffsetsPerTrigger": "1"})
        assert folded(query.trigger() or []) == {b"a": b"1"}
        log.drop_anchor("keeps-a")
        log.compact()
        log.compact()
        assert log.state.partitions[0].dropped_tombstone == 3
        assert [offset for _, offset, _, _ in log_rows(log)] == [4]
        with pytest.raises(CompactedAway, match="delete"):
            query.trigger()


def test_passes_that_drop_no_delete_do_not_disturb_a_reader_that_is_on_its_way(path: Path) -> None:
    """The files between are others after each pass; what counts is that no tombstone is gone since."""
    with Changelog.open(path, config=AT_ONCE) as log:
        log.append(table(("a", "1"), ("b", "1"), ("c", "1"), ("d", "1"), ("a", None), ("e", "1")))
        log.compact()
        log.compact()
        assert log.state.partitions[0].dropped_tombstone == 4
        query = Driver(path, {**FOLLOW, "maxOffsetsPerTrigger": "1"})
        state = folded(query.trigger() or [])
        for value in "23":
            query.start()
            log.append(table(("e", value)))
            log.compact()
            folded(query.trigger() or [], state)
        assert len(state) == 3
        for rows in query.triggers():
            folded(rows, state)
        assert state == current(path)


actions = st.lists(
    st.one_of(
        st.lists(
            st.tuples(st.sampled_from("abcdef"), st.one_of(st.none(), st.sampled_from("123"))),
            min_size=1, max_size=6,
        ),
        st.sampled_from(["compact", "trigger", "restart", "anchor", "drop"]),
    ),
    max_size=14,
)  # fmt: skip


@given(steps=actions, limit=st.integers(1, 8), partitions=st.integers(1, 2))
def test_a_follower_ends_with_the_state_or_is_told(
    steps: list[Any], limit: int, partitions: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Promise 7: whatever the cleaner does between its triggers, a follower misses no delete in silence."""
    path = tmp_path_factory.mktemp("follow") / "log"
    with Changelog.open(path, partitions=partitions, config=AT_ONCE) as log:
        query = Driver(path, {**FOLLOW, "maxOffsetsPerTrigger": str(limit)})
        state: dict[bytes, bytes] = {}
        try:
            for step in steps:
                _do(step, log, query, state)
            for rows in query.triggers():
                folded(rows, state)
        except CompactedAway:
            assert any(p.dropped_tombstone >= 0 for p in log.state.partitions)
            return
        finally:
            query.reader.stop()
        assert state == current(path)


def _do(step: Any, log: Changelog, query: Driver, state: dict[bytes, bytes]) -> None:
    if isinstance(step, list):
        log.append(table(*step))
    elif step == "compact":
        log.compact()
    elif step == "trigger":
        folded(query.trigger() or [], state)
    elif step == "restart":
        query.start()
    elif step == "anchor" and log.state.commits:
        if "kept" not in log.anchors():
            log.anchor("kept")
    elif step == "drop" and "kept" in log.anchors():
        log.drop_anchor("kept")


# -- the arithmetic ------------------------------------------------------------------------------------------


@pytest.fixture
def two_partitions(path: Path) -> Iterator[State]:
    """90 % of the records are in one of two partitions."""
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        heavy, light = _keys(log, 0), _keys(log, 1)
        log.append(table(*((next(heavy), "x") for _ in range(90))))
        log.append(table(*((next(light), "x") for _ in range(10))))
        yield log.state


def _keys(log: Changelog, partition: int) -> Iterator[str]:
    return (f"k{i}" for i in range(1_000_000) if log.partition(f"k{i}".encode()) == partition)


def test_a_limit_is_shared_out_as_the_rows_wait(path: Path, two_partitions: State) -> None:
    limited: Callable[[int], list[int]] = lambda rows: offsets.limited(  # noqa: E731
        LOCAL, path, two_partitions, [0, 0], [90, 10], rows
    )
    assert limited(20) == [18, 2]
    assert limited(1) == [1, 0]
    assert limited(1000) == [90, 10]


def test_limits_are_of_the_kind_that_spark_asks_for(path: Path) -> None:
    with Changelog.open(path, config=QUIET):
        limited = Driver(path, {**FOLLOW, "maxOffsetsPerTrigger": "5"})
        assert limited.reader.getDefaultReadLimit() == ReadMaxRows(5)
        assert Driver(path, FOLLOW).reader.getDefaultReadLimit() == ReadAllAvailable()
