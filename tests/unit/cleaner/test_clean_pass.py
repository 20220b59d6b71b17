"""Passes over a partition: partial ones, anchors that come and go, tombstones' horizons, retention."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from keyfold import Changelog, restore
from keyfold.checkpoints.cleaner.clean_pass import clean_partition
from keyfold.checkpoints.cleaner.retention import apply_retention
from keyfold.statestore.errors import CompactedAway, ConfigError, StorageFailed
from keyfold.statestore.files import Files
from support.changelogs import Clock

CONFIG = {"cleaner.threads": 0, "segment.bytes": 4096, "anchors.auto": 0}
KEYS = 300


def table(rows: dict[str, str | None]) -> pa.Table:
    return pa.table({"key": list(rows), "value": pa.array(list(rows.values()), pa.string())})


def offsets(log: Changelog) -> list[int]:
    return [o for b in log.read(0) for o in b["offset"].to_pylist()]


def test_a_full_map_makes_passes_that_each_get_further_until_all_is_folded(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config={**CONFIG, "cleaner.dedupe.buffer.size": 1024}) as log:
        for value in ("1", "2", "3"):
            log.append(table({f"k{i}": value for i in range(KEYS)}))
        log.engine.writer.seal_active()
        ends = []
        while (done := clean_partition(log.engine.writer, 0)) is not None:
            assert done.map_utilisation <= 1
            ends.append(log.state.partitions[0].clean_end)
            assert restore(log.path).to_dict() == {f"k{i}".encode(): b"3" for i in range(KEYS)}
        assert ends == sorted(set(ends))
        assert len(ends) > KEYS // 64
        assert offsets(log) == list(range(2 * KEYS, 3 * KEYS))


def test_a_deleted_key_does_not_come_back_while_passes_go_over_a_dropped_anchor_again(tmp_path: Path) -> None:
    config = {**CONFIG, "cleaner.dedupe.buffer.size": 1024, "delete.retention.ms": 10**12}
    with Changelog.open(tmp_path / "log", config=config) as log:
        log.append(table({f"k{i}": "old" for i in range(KEYS)}))
        log.anchor("before")
        deleted = {f"k{i}": None for i in range(0, KEYS, 2)}
        log.append(table({**deleted, **{f"k{i}": "new" for i in range(1, KEYS, 2)}}))
        log.compact()
        assert len(offsets(log)) == 2 * KEYS
        log.drop_anchor("before")
        expected = {f"k{i}".encode(): b"new" for i in range(1, KEYS, 2)}
        passes = 0
        while clean_partition(log.engine.writer, 0) is not None:
            passes += 1
            assert restore(log.path).to_dict() == expected
            assert restore(log.path).to_arrow().num_rows == len(expected)
        assert passes > 2
        assert offsets(log) == list(range(KEYS, 2 * KEYS))


def test_the_state_at_an_anchor_stays_exact_and_others_are_refused(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config=CONFIG) as log:
        for number in range(6):
            log.append(table({f"k{i}": str(number) for i in range(10)}))
        log.anchor("three", at=3)
        log.compact()
        assert restore(log.path, at="three").to_dict() == {f"k{i}".encode(): b"2" for i in range(10)}
        assert restore(log.path, at=3).to_dict() == restore(log.path, at="three").to_dict()
        with pytest.raises(CompactedAway, match="anchors three"):
            restore(log.path, at=4)
        with pytest.raises(CompactedAway):
            log.anchor("five", at=5)


def test_the_last_commits_are_anchors_by_themselves(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config={**CONFIG, "anchors.auto": 2}) as log:
        for number in range(6):
            log.append(table({"k": str(number)}))
        log.compact()
        assert offsets(log) == [4, 5]
        assert restore(log.path, at=5).to_dict() == {b"k": b"4"}


def test_a_tombstone_goes_only_when_its_horizon_has_passed(tmp_path: Path) -> None:
    clock = Clock()
    config = {**CONFIG, "delete.retention.ms": 1000}
    with Changelog.open(tmp_path / "log", config=config, clock_ms=clock) as log:
        log.append(table({"gone": "1", "there": "1"}))
        log.append(table({"gone": None}))
        clock.now_ms += 5000  # the record's own age does not count
        log.compact()
        assert offsets(log) == [1, 2]
        clock.now_ms += 999
        log.compact()
        assert offsets(log) == [1, 2]
        clock.now_ms += 1
        log.compact()
        assert offsets(log) == [1]
        assert log.state.partitions[0].dropped_tombstone == 2
        assert log.end_offsets() == {0: 3}


def test_who_follows_and_has_missed_a_delete_is_told(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config={**CONFIG, "delete.retention.ms": 0}) as log:
        log.append(table({"a": "1", "b": "1"}))
        log.append(table({"a": None}))
        log.append(table({"c": "1"}))
        log.compact()
        log.compact()
        assert log.state.partitions[0].dropped_tombstone == 2
        with pytest.raises(CompactedAway, match="A delete after this position"):
            log.read(0, 2, follow=True)
        assert [b["key"].to_pylist() for b in log.read(0, 3, follow=True)] == [[b"c"]]
        assert [b["key"].to_pylist() for b in log.read(0, 0, follow=True)] == [[b"b", b"c"]]
        assert dict(log.store().all()) == {b"b": b"1", b"c": b"1"}


def test_small_segments_are_put_together(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config={**CONFIG, "segment.bytes": "1MiB"}) as log:
        for number in range(20):
            log.append(table({f"k{number}": "v"}))
            log.engine.writer.seal_active()
        assert len(log.state.partitions[0].segments) == 20
        log.compact()
        assert len(log.state.partitions[0].segments) == 1
        assert offsets(log) == list(range(20))


def test_a_second_pass_over_a_clean_log_does_nothing(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config=CONFIG) as log:
        log.append(table({f"k{i}": "v" for i in range(50)}))
        assert log.compact()
        before = log.state.seq
        assert log.compact() == []
        assert log.state.seq == before


def test_the_last_end_offset_survives_when_no_record_does(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config={**CONFIG, "delete.retention.ms": 0}) as log:
        log.append(table({"a": "1"}))
        log.append(table({"a": None}))
        log.compact()
        log.compact()
        assert (offsets(log), log.end_offsets()) == ([], {0: 2})
    with Changelog.open(tmp_path / "log") as log:
        log.append(table({"b": "1"}))
        assert offsets(log) == [2]


def test_a_log_of_events_cannot_be_compacted_by_hand(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config={**CONFIG, "cleanup.policy": "delete"}) as log:
        log.append(table({"a": "1"}))
        with pytest.raises(ConfigError, match="keeps every change"):
            log.compact()


def test_retention_drops_whole_segments_from_the_start(tmp_path: Path) -> None:
    clock = Clock()
    config = {**CONFIG, "cleanup.policy": "delete", "retention.ms": 1000, "segment.bytes": 1024}
    with Changelog.open(tmp_path / "log", config=config, clock_ms=clock) as log:
        for number in range(4):
            log.append(table({f"k{number}": "v" * 1000}))
            clock.now_ms += 400
        assert apply_retention(log.engine.writer) == 2
        assert (log.start_offsets(), offsets(log)) == ({0: 2}, [2, 3])
        assert restore(log.path).to_dict() == {f"k{n}".encode(): b"v" * 1000 for n in (2, 3)}
        assert dict(log.store().all()) == restore(log.path).to_dict()
        with pytest.raises(CompactedAway, match="below the log start offset"):
            log.read(0, 1)


def test_a_pass_without_room_is_refused_before_it_begins(tmp_path: Path) -> None:
    class Full(Files):
        def free_bytes(self, path: Path) -> int:
            return 10

    with Changelog.open(tmp_path / "log", config=CONFIG, files=Full()) as log:
        log.append(table({"a": "1"}))
        with pytest.raises(StorageFailed, match="Not enough disk space for a cleaner pass"):
            log.compact()
        log.append(table({"a": "2"}))
        assert offsets(log) == [0, 1]
