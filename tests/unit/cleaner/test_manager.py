"""Which partition is cleaned next, by whom, and what becomes of one that fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from keyfold import Changelog, restore
from keyfold.checkpoints.cleaner import manager as cleaner_manager
from keyfold.checkpoints.cleaner.clean_pass import Aborted, PassStatistics, clean_partition
from keyfold.checkpoints.cleaner.manager import FAILURES_MAX, CleanerManager
from keyfold.checkpoints.cleaner.pool import POOL, Pool
from keyfold.checkpoints.cli import group
from keyfold.statestore.errors import ConfigError, Damaged, StorageFailed
from keyfold.statestore.keys.partitioner import partition_of
from support.changelogs import BY_HAND, Clock, rows
from support.waiting import eventually

#: Dirty ratios are of file bytes: without compression, as many records are as many bytes.
CONFIG = {
    "compression.type": "none",
    "cleaner.threads": 0,
    "segment.bytes": "1MiB",
    "anchors.auto": 0,
    "min.cleanable.dirty.ratio": 0.5,
}
PARTITIONS = 3


def keys_of(partition: int, count: int) -> list[bytes]:
    found = (b"%d" % n for n in range(10**6))
    chosen = (key for key in found if partition_of(key, PARTITIONS) == partition)
    return [next(chosen) for _ in range(count)]


def append(log: Changelog, partition: int, count: int, value: bytes = b"v" * 100) -> None:
    log.append(pa.table({"key": keys_of(partition, count), "value": [value] * count}))
    log.engine.writer.seal_active()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(tmp_path: Path, clock: Clock) -> Iterator[Changelog]:
    with Changelog.open(tmp_path / "log", partitions=PARTITIONS, config=CONFIG, clock_ms=clock) as log:
        yield log


# -- choosing ------------------------------------------------------------------------------------------------


def clean_then_dirty(log: Changelog, dirty: dict[int, int]) -> None:
    """100 clean records in every partition, and so many dirty ones behind them."""
    for partition in range(PARTITIONS):
        append(log, partition, 100)
    log.compact()
    for partition, count in dirty.items():
        append(log, partition, count)


def test_the_filthiest_partition_is_taken_first(log: Changelog) -> None:
    clean_then_dirty(log, {0: 150, 1: 300, 2: 200})
    taken = []
    while (found := log.engine.cleaning.filthiest()) is not None:
        assert log.engine.cleaning.clean_in_background(found[1]) is not None
        taken.append(found[1])
    assert taken == [1, 2, 0]


def test_a_partition_is_due_strictly_above_the_dirty_ratio(log: Changelog) -> None:
    clean_then_dirty(log, {0: 50, 1: 100})
    sizes = [[s.size for s in p.segments] for p in log.state.partitions]
    assert sizes[1][0] == sizes[1][1]
    assert log.engine.cleaning.filthiest() is None
    log.engine.configure({"min.cleanable.dirty.ratio": 0.49})
    assert log.engine.cleaning.filthiest() == (0.5, 1)


def test_an_overdue_partition_goes_before_a_filthier_one(log: Changelog, clock: Clock) -> None:
    clean_then_dirty(log, {0: 10})
    clock.now_ms += 1000
    append(log, 1, 300)
    log.engine.configure({"max.compaction.lag.ms": 999})
    assert log.engine.cleaning.filthiest() == (2.0, 0)


def test_nothing_is_due_where_the_policy_does_not_compact(log: Changelog) -> None:
    clean_then_dirty(log, {0: 300})
    log.engine.configure({"cleanup.policy": "delete"})
    assert log.engine.cleaning.filthiest() is None


# -- a log at rest -------------------------------------------------------------------------------------------


def test_a_log_at_rest_is_cleaned_of_what_a_dropped_anchor_kept_and_of_old_deletes(
    log: Changelog, clock: Clock
) -> None:
    """And then left alone, whatever else is kept."""
    seconds = Seconds()
    manager = CleanerManager(log.engine.writer, seconds)
    log.engine.configure({"delete.retention.ms": 1000, "cleaner.backoff.ms": 10_000})
    append(log, 0, 100)
    log.anchor("x")
    log.append(pa.table({"key": keys_of(0, 100), "value": pa.array([None] * 100, pa.binary())}))
    log.compact()
    assert log.state.partitions[0].records == 200

    def due() -> tuple[float, int] | None:
        assert manager.filthiest() is None
        seconds.now += 9.9
        assert manager.filthiest() is None
        seconds.now += 0.1
        return manager.filthiest()

    assert due() is None
    clock.now_ms += 1000
    assert manager.filthiest() == (0.0, 0)
    done = manager.clean_in_background(0)
    assert done is not None
    assert done.tombstones_dropped == 0
    seconds.now += 10**6
    assert manager.filthiest() is None
    log.drop_anchor("x")
    assert manager.filthiest() == (0.0, 0)
    assert manager.clean_in_background(0) is not None
    assert log.state.partitions[0].records == 0
    seconds.now += 10**6
    assert manager.filthiest() is None


def test_old_deletes_of_a_log_without_anchors_go_at_rest(log: Changelog, clock: Clock) -> None:
    seconds = Seconds()
    manager = CleanerManager(log.engine.writer, seconds)
    log.engine.configure({"delete.retention.ms": 1000, "anchors.auto": 0})
    log.append(pa.table({"key": keys_of(0, 100), "value": pa.array([None] * 100, pa.binary())}))
    log.compact()
    assert manager.filthiest() is None
    seconds.now += 10**6
    clock.now_ms += 999
    assert manager.filthiest() is None
    clock.now_ms += 1
    assert manager.filthiest() == (0.0, 0)
    done = manager.clean_in_background(0)
    assert done is not None
    assert done.tombstones_dropped == 100
    seconds.now += 10**6
    assert manager.filthiest() is None


def test_what_a_dropped_anchor_kept_goes_at_rest_from_a_log_without_deletes(log: Changelog) -> None:
    seconds = Seconds()
    manager = CleanerManager(log.engine.writer, seconds)
    log.engine.configure({"anchors.auto": 0})
    append(log, 0, 100)
    log.anchor("x")
    append(log, 0, 100)
    log.compact()
    assert log.state.partitions[0].records == 200
    assert manager.filthiest() is None
    seconds.now += 10**6
    assert manager.filthiest() is None
    log.drop_anchor("x")
    assert manager.filthiest() == (0.0, 0)
    assert manager.clean_in_background(0) is not None
    assert log.state.partitions[0].records == 100
    seconds.now += 10**6
    assert manager.filthiest() is None


def test_a_log_that_is_written_to_is_left_to_its_dirty_ratio(log: Changelog) -> None:
    seconds = Seconds()
    manager = CleanerManager(log.engine.writer, seconds)
    append(log, 0, 100)
    log.anchor("x")
    append(log, 0, 100)
    log.compact()
    log.drop_anchor("x")
    for _ in range(5):
        append(log, 0, 1)
        assert manager.filthiest() is None
        seconds.now += 14
    seconds.now += 1
    assert manager.filthiest() == (0.0, 0)
    done = manager.clean_in_background(0)
    assert done is not None
    # However long it takes, a tenth of the time is the most that such passes get.
    manager._last[0] = replace(done, seconds=100.0)
    log.anchor("y")
    append(log, 0, 100)
    log.compact()
    log.drop_anchor("y")
    assert manager.filthiest() is None
    seconds.now += 990
    assert manager.filthiest() is None
    seconds.now += 30
    assert manager.filthiest() == (0.0, 0)


# -- young records -------------------------------------------------------------------------------------------


def test_everything_from_the_first_young_segment_on_is_left_alone(log: Changelog, clock: Clock) -> None:
    """Also what is older than the lag and lies behind it."""
    log.engine.configure({"min.compaction.lag.ms": 1000})
    key = keys_of(0, 1)[0]
    for ms, value in ((clock.now_ms - 5000, b"1"), (clock.now_ms, b"2"), (clock.now_ms - 5000, b"3")):
        log.append(
            pa.table({"key": [key], "value": [value], "timestamp": pa.array([ms], pa.timestamp("ms"))})
        )
        log.engine.writer.seal_active()
    log.compact()
    assert log.state.partitions[0].clean_end == 1
    assert [o for b in log.read(0) for o in b["offset"].to_pylist()] == [0, 1, 2]
    clock.now_ms += 1000
    log.compact()
    assert [o for b in log.read(0) for o in b["offset"].to_pylist()] == [2]


def test_a_log_at_rest_is_sealed_and_cleaned_when_its_lag_has_passed(tmp_path: Path) -> None:
    """Kafka rolls a segment with an append only, so the last records of a quiet topic are never cleaned."""
    config = {**CONFIG, "cleaner.threads": 1, "cleaner.backoff.ms": 10, "max.compaction.lag.ms": 300}
    with Changelog.open(tmp_path / "log", config=config) as log:
        for value in (b"1", b"2"):
            log.append(pa.table({"key": [b"a"], "value": [value]}))
        eventually(lambda: log.state.partitions[0].records == 1)
        assert log.get(b"a") == b"2"


# -- pausing -------------------------------------------------------------------------------------------------


def test_pauses_are_counted(log: Changelog) -> None:
    clean_then_dirty(log, {0: 300, 1: 200})
    with log.cleaning_paused([0]):
        with log.cleaning_paused([0, 1]):
            assert log.engine.cleaning.filthiest() is None
        second = log.engine.cleaning.filthiest()
        assert second is not None
        assert second[1] == 1
        with pytest.raises(ConfigError, match="Cleaning is paused"):
            log.compact()
        assert log.engine.cleaning.clean_in_background(0) is None
    found = log.engine.cleaning.filthiest()
    assert found is not None
    assert found[1] == 0
    with (
        pytest.raises(ConfigError, match=r"Partition -?[0-9]+ does not exist"),
        log.cleaning_paused([PARTITIONS]),
    ):
        pass


def slow_pass(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[str]]:
    """Passes that go on until they are stopped; the event is set when one has begun."""
    begun, ended = threading.Event(), []

    def slow(writer: object, number: int, pace: Callable[[int], None], **more: object) -> None:
        begun.set()
        try:
            while True:
                pace(1)
                time.sleep(0.005)
        finally:
            ended.append(str(number))

    monkeypatch.setattr(cleaner_manager, "clean_partition", slow)
    return begun, ended


def test_pausing_stops_the_pass_that_is_under_way(log: Changelog, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = slow_pass(monkeypatch)
    thread = threading.Thread(target=log.engine.cleaning.clean_in_background, args=(1,))
    thread.start()
    assert begun.wait(10)
    assert log.engine.cleaning.clean_in_background(1) is None  # in progress
    with log.cleaning_paused():
        assert ended == ["1"]
    thread.join(10)


def test_compact_waits_for_a_rollback_and_for_no_other_pause(log: Changelog) -> None:
    clean_then_dirty(log, {0: 300})
    with ThreadPoolExecutor(1) as pool:
        with log.engine.cleaning.paused([0], cut=True):
            passes = pool.submit(log.compact)
            time.sleep(0.1)
            assert not passes.done()
        assert passes.result(10)
        append(log, 0, 300)
        with log.engine.cleaning.paused([0], cut=True):
            passes = pool.submit(log.compact)
            time.sleep(0.1)
            with log.cleaning_paused([0]), pytest.raises(ConfigError, match="found: 1 pauses"):
                passes.result(10)


def test_a_rollback_stops_the_pass_that_compact_makes_and_it_begins_again(
    log: Changelog, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean_then_dirty(log, {0: 300})
    begun, _ = slow_pass(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        passes = pool.submit(log.compact)
        assert begun.wait(10)
        monkeypatch.setattr(cleaner_manager, "clean_partition", clean_partition)
        log.rollback(log.state.commits[-1].number)
        assert passes.result(10)


def test_closing_stops_the_pass_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = slow_pass(monkeypatch)
    config = {**CONFIG, "cleaner.threads": 1, "min.cleanable.dirty.ratio": 0}
    with Changelog.open(tmp_path / "log", config=config) as log:
        log.append(pa.table({"key": [b"a"], "value": [b"1"]}))
        log.engine.writer.seal_active()
        POOL.wake()
        assert begun.wait(10)
    assert ended == ["0"]


# -- failing -------------------------------------------------------------------------------------------------


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def damage(log: Changelog, partition: int) -> bytes:
    path = log.path / str(partition) / log.state.partitions[partition].segments[0].name
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    return data


def fail_until_given_up(log: Changelog, seconds: Seconds) -> CleanerManager:
    manager = CleanerManager(log.engine.writer, seconds)
    waits = []
    for _ in range(FAILURES_MAX):
        assert manager.clean_in_background(0) is None
        assert manager.filthiest() != (1.0, 0)
        began = seconds.now
        while manager.filthiest() is None and seconds.now < began + 10_000:
            seconds.now += 1
        waits.append(round(seconds.now - began))
    assert waits[:-1] == [15, 30, 60, 120]
    assert waits[-1] == 10_000
    return manager


def test_a_damaged_partition_is_tried_again_ever_later_then_given_up_and_taken_back(log: Changelog) -> None:
    append(log, 0, 10)
    append(log, 0, 10, b"new")
    whole = damage(log, 0)
    manager = fail_until_given_up(log, Seconds())
    reason = log.state.partitions[0].uncleanable
    assert "bytes of a segment are damaged" in reason
    assert manager.metrics()["uncleanable-partitions-count"] == 1
    assert manager.metrics()["uncleanable-bytes"] > 0
    append(log, 1, 10)
    assert manager.filthiest() == (1.0, 1)  # the others go on
    with Changelog.open(log.path, mode="r") as reader:
        assert reader.state.partitions[0].uncleanable == reason  # every process sees it
    shown = CliRunner().invoke(group.cli, ["stats", str(log.path)]).output
    assert "partition 0 is not cleaned until `keyfold compact` succeeds" in shown
    with pytest.raises(Damaged):
        log.compact()
    assert log.state.partitions[0].uncleanable
    (log.path / "0" / log.state.partitions[0].segments[0].name).write_bytes(whole)
    log.compact()
    assert log.state.partitions[0].uncleanable == ""
    assert log.state.partitions[0].records == 10


def test_the_reason_survives_a_new_writer(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", partitions=PARTITIONS, config=CONFIG) as log:
        append(log, 0, 10)
        whole = damage(log, 0)
        fail_until_given_up(log, Seconds())
        (log.path / "0" / log.state.partitions[0].segments[0].name).write_bytes(whole)
    with Changelog.open(tmp_path / "log"):
        pass
    with Changelog.open(tmp_path / "log") as log:  # from a checkpoint of the state, not from the line
        assert "bytes of a segment are damaged" in log.state.partitions[0].uncleanable
        assert log.engine.cleaning.filthiest() is None


def test_a_full_disk_never_gives_a_partition_up(log: Changelog, monkeypatch: pytest.MonkeyPatch) -> None:
    append(log, 0, 10)

    def full(*args: object, **more: object) -> None:
        raise StorageFailed("Not enough disk space for a cleaner pass.", path=log.path)

    monkeypatch.setattr(cleaner_manager, "clean_partition", full)
    seconds = Seconds()
    manager = CleanerManager(log.engine.writer, seconds)
    for _ in range(3 * FAILURES_MAX):
        assert manager.clean_in_background(0) is None
        seconds.now += 3601
    assert log.state.partitions[0].uncleanable == ""
    assert manager.filthiest() == (1.0, 0)


def test_one_damaged_partition_does_not_keep_compact_from_the_others(log: Changelog) -> None:
    for partition in range(PARTITIONS):
        append(log, partition, 10)
        append(log, partition, 10, b"new")
    damage(log, 0)
    with pytest.raises(Damaged):
        log.compact()
    assert [p.records for p in log.state.partitions] == [20, 10, 10]


# -- threads -------------------------------------------------------------------------------------------------


def test_a_dead_thread_is_counted_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    died: list[bool] = []

    class Dying(Pool):
        def _work(self) -> bool:
            if not died:
                died.append(True)
                raise SystemExit
            return super()._work()

    pool = Dying()
    config = {**CONFIG, "min.cleanable.dirty.ratio": 0, "cleaner.backoff.ms": 10}
    with Changelog.open(tmp_path / "log", config=config) as log:
        log.engine.configure({"cleaner.threads": 1})
        POOL.remove(log.engine)
        log.engine.cleaning = CleanerManager(log.engine.writer)
        # Only now: the pool that was removed would have cleaned it.
        append(log, 0, 1)
        pool.add(log.engine)
        eventually(lambda: log.state.partitions[0].unique_end > 0)
        assert pool.dead_threads == 1
        assert "a cleaner thread has died" in caplog.text
        pool.remove(log.engine)
        POOL.add(log.engine)


def test_two_threads_clean_two_partitions_of_one_changelog_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=10)
    real = clean_partition

    def together(*args: object, **more: object) -> PassStatistics | None:
        both.wait()
        return real(*args, **more)  # type: ignore[arg-type]

    config = {**CONFIG, "cleaner.threads": 2, "min.cleanable.dirty.ratio": 0, "cleaner.backoff.ms": 10}
    monkeypatch.setattr(cleaner_manager, "clean_partition", together)
    with Changelog.open(tmp_path / "log", partitions=2, config={**config, "cleaner.threads": 0}) as log:
        log.append(pa.table({"key": [b"%d" % n for n in range(50)], "value": [b"v"] * 50}))
        log.engine.writer.seal_active()
        log.engine.configure({"cleaner.threads": 2})
        eventually(lambda: all(p.unique_end == p.end for p in log.state.partitions))


# -- telling -------------------------------------------------------------------------------------------------


def test_metrics_have_kafkas_names_and_tell_what_happened(log: Changelog) -> None:
    append(log, 0, 10)
    append(log, 0, 10)
    before = log.cleaner_metrics()
    assert before["max-dirty-percent"] == 100
    assert before["time-since-last-run-ms"] == -1
    (done,) = log.compact()
    assert (done.records_read, done.records_kept, done.dirty_percent) == (20, 10, 100)
    assert done.recopy_percent == pytest.approx(100 * done.bytes_kept / done.bytes_read)
    after = log.cleaner_metrics()
    assert after["max-dirty-percent"] == 0
    assert after["cleaner-recopy-percent"] == pytest.approx(done.recopy_percent)
    assert after["max-clean-time-secs"] == done.seconds > 0
    assert after["max-buffer-utilization-percent"] == pytest.approx(100 * done.map_utilisation)
    assert 0 <= after["time-since-last-run-ms"] < 60_000
    assert after["DeadThreadCount"] == 0
    json.dumps(after)


def test_the_state_is_the_same_behind_everything(log: Changelog) -> None:
    clean_then_dirty(log, {0: 150, 1: 300, 2: 200})
    before = restore(log.path).to_dict()
    while (found := log.engine.cleaning.filthiest()) is not None:
        log.engine.cleaning.clean_in_background(found[1])
    assert restore(log.path).to_dict() == before


def test_a_pass_that_the_log_has_changed_under_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention on the cleaner's thread cuts the partition while `compact` is at it."""
    begun: list[int] = []
    cuts = 2

    def cut(*args: Any, **options: Any) -> PassStatistics | None:
        begun.append(1)
        if len(begun) <= cuts:
            raise Aborted
        return clean_partition(*args, **options)

    monkeypatch.setattr(cleaner_manager, "clean_partition", cut)
    with Changelog.open(tmp_path / "log", config={"cleaner.threads": 0, "anchors.auto": 0}) as log:
        log.append(pa.table({"key": ["a", "a"], "value": ["1", "2"]}))
        assert [p.records_kept for p in log.compact()] == [1]
        cuts = 10**6
        with pytest.raises(ConfigError, match="stopped"):
            log.compact()


@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
def test_retention_removes_nothing_of_a_partition_that_is_paused(tmp_path: Path, policy: str) -> None:
    config = {**BY_HAND, "cleanup.policy": policy, "retention.bytes": 0, "segment.bytes": 1024}
    with Changelog.open(tmp_path / "log", partitions=2, config=config) as log:
        with log.cleaning_paused([0]):
            for n in range(200):
                log.append(rows((f"k{n}", "x" * 100)))
            log.engine.do_chores()
            first, second = log.start_offsets().values()
            assert first == 0 < second
        log.engine.do_chores()
        assert min(log.start_offsets().values()) > 0
