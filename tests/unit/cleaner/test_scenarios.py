"""What Kafka's cleaner tests show and no other test here; `tests/kafka/SCENARIOS.md` has the whole list."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from keyfold import Changelog, restore
from keyfold.checkpoints.cleaner import manager as cleaner_manager
from keyfold.checkpoints.cleaner.clean_pass import Aborted, clean_partition
from keyfold.checkpoints.cleaner.log_to_clean import LogToClean, find_log_to_clean
from keyfold.checkpoints.cleaner.retention import apply_retention
from keyfold.statestore.errors import CompactedAway
from keyfold.statestore.segment.writer import Segment
from support.changelogs import Clock

TESTS = Path(__file__).resolve().parent.parent.parent
CONFIG = {"cleaner.threads": 0, "anchors.auto": 0, "segment.bytes": 4096}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(tmp_path: Path, clock: Clock) -> Iterator[Changelog]:
    with Changelog.open(tmp_path / "log", config=CONFIG, clock_ms=clock) as log:
        yield log


def append(log: Changelog, keys: range, value: bytes = b"v" * 100) -> None:
    log.append(pa.table({"key": [b"%d" % k for k in keys], "value": [value] * len(keys)}))
    log.engine.writer.seal_active()


def offsets(log: Changelog) -> list[int]:
    return [o for b in log.read(0) for o in b["offset"].to_pylist()]


# -- grouping ------------------------------------------------------------------------------------------------


def section(*sizes: int) -> LogToClean:
    segments = tuple(
        Segment(f"{n}", 10 * n, 10 * (n + 1), size, 10, 0, -1, 0, 1) for n, size in enumerate(sizes)
    )
    return LogToClean(segments, 0, 0, 10 * len(sizes), (), 0, 0)


@pytest.mark.parametrize(
    ("largest", "groups"),
    [
        (10**9, [[0, 1, 2, 3, 4]]),
        (1, [[0], [1], [2], [3], [4]]),
        (300, [[0, 1, 2], [3, 4]]),
        (299, [[0, 1], [2, 3], [4]]),
    ],
)
def test_neighbours_are_put_together_up_to_the_segment_size(largest: int, groups: list[list[int]]) -> None:
    found = section(100, 100, 100, 100, 100).groups(largest)
    assert [[int(s.name) for s in group] for group in found] == groups


def test_a_segment_that_is_too_large_is_a_group_of_its_own() -> None:
    found = section(10, 1000, 10, 10).groups(100)
    assert [[int(s.name) for s in group] for group in found] == [[0], [1], [2, 3]]


def test_segments_behind_the_map_are_in_no_group() -> None:
    found = section(10, 10, 10, 10).groups(100, below=20)
    assert [[int(s.name) for s in group] for group in found] == [[0, 1]]


def test_the_dirty_ratio_is_of_bytes_below_what_cannot_be_cleaned(log: Changelog) -> None:
    append(log, range(50))
    log.compact()
    append(log, range(25))
    log.append(pa.table({"key": [b"active"], "value": [b"v"]}))
    clean, dirty, active = log.state.partitions[0].segments
    found = find_log_to_clean(log.engine.writer, log.state, 0)
    assert found.segments == (clean, dirty)
    assert found.dirty_bytes == dirty.size
    assert found.dirty_ratio == dirty.size / (clean.size + dirty.size)
    assert active.records == 1


# -- a log whose start moves ---------------------------------------------------------------------------------


def retain(log: Changelog, clock: Clock) -> None:
    """Drop all segments but the last, by size."""
    log.engine.configure({"cleanup.policy": "compact,delete", "retention.bytes": 1})
    assert apply_retention(log.engine.writer) > 0


def test_a_first_dirty_offset_that_retention_has_passed_is_where_the_log_begins(
    log: Changelog, clock: Clock
) -> None:
    for start in (0, 30, 60):
        append(log, range(start, start + 30))
    retain(log, clock)
    start = log.start_offsets()[0]
    assert start == 60
    assert find_log_to_clean(log.engine.writer, log.state, 0).first_dirty == start
    append(log, range(60, 75), b"new")
    log.compact()
    assert restore(log.path).to_dict() == {b"%d" % k: b"new" if k < 75 else b"v" * 100 for k in range(60, 90)}


def test_segments_that_retention_drops_during_a_pass_end_it(log: Changelog, clock: Clock) -> None:
    """And neither comes anything back, nor are their files left behind."""
    for start in (0, 30, 60):
        append(log, range(start, start + 30))
    append(log, range(90), b"new")
    calls = 0

    def pace(size: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            retain(log, clock)

    with pytest.raises(Aborted):
        clean_partition(log.engine.writer, 0, pace)
    log.engine.writer.garbage.collect()
    named = {s.name for s in log.state.partitions[0].segments}
    assert {f.name for f in (log.path / "0").glob("*.arrows")} == named
    log.engine.configure({"retention.bytes": -1})
    log.compact()
    assert offsets(log) == list(range(90, 180))


def test_compact_and_delete_together(log: Changelog, clock: Clock) -> None:
    """The log is compacted, and what is too old goes whether it is a last value or not."""
    log.engine.configure({"cleanup.policy": "compact,delete", "retention.ms": 1000})
    append(log, range(10), b"1")
    append(log, range(10), b"2")
    log.compact()
    assert offsets(log) == list(range(10, 20))
    clock.now_ms += 800
    append(log, range(5), b"3")
    clock.now_ms += 800
    assert apply_retention(log.engine.writer) == 1
    assert restore(log.path).to_dict() == {b"%d" % k: b"3" for k in range(5)}
    assert dict(log.store().all()) == restore(log.path).to_dict()
    with pytest.raises(CompactedAway):
        log.read(0, 3)


# -- size ----------------------------------------------------------------------------------------------------


def test_values_of_64_mib_pass(tmp_path: Path) -> None:
    with Changelog.open(
        tmp_path / "log", config={**CONFIG, "segment.bytes": "16MiB", "compression.type": "none"}
    ) as log:
        for fill in (b"a", b"b"):
            log.append(pa.table({"key": [b"large", b"small"], "value": [fill * (64 << 20), fill]}))
        (done,) = log.compact()
        assert (done.records_read, done.records_kept) == (4, 2)
        assert log.get(b"large") == b"b" * (64 << 20)


# -- settings that change ------------------------------------------------------------------------------------


def test_a_new_limit_holds_for_the_next_pass(log: Changelog, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[int] = []

    class Noting:
        def __init__(self, rate: Callable[[], int]) -> None:
            self.rate = rate

        def __call__(self, size: int, check: Callable[[], None]) -> None:
            rates.append(self.rate())

    monkeypatch.setattr(cleaner_manager, "Throttle", Noting)
    manager = cleaner_manager.CleanerManager(log.engine.writer)
    append(log, range(10))
    for rate in ("10MB", "20MB"):
        append(log, range(10))
        log.engine.configure({"cleaner.io.max.bytes.per.second": rate})
        rates.clear()
        assert manager.clean_in_background(0) is not None
        assert set(rates) == {int(rate[:2]) * 10**6}


# -- crashes -------------------------------------------------------------------------------------------------


def test_a_rolled_back_partition_ends_the_pass(log: Changelog) -> None:
    """Truncation against cleaning: the swap of a pass that began before is void."""
    append(log, range(10))
    append(log, range(10), b"new")
    writer = log.engine.writer

    def pace(size: int) -> None:
        p = replace(writer.state.partitions[0], cuts=(20,))
        writer.state = replace(writer.state, partitions=(p,))

    with pytest.raises(Aborted):
        clean_partition(writer, 0, pace)
    assert offsets(log) == list(range(20))


# -- the list ------------------------------------------------------------------------------------------------


def test_every_test_that_the_list_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS / "kafka" / "SCENARIOS.md").read_text())
    assert len(named) > 30
    for path, name in named:
        text = (TESTS / path).read_text()
        assert re.search(rf"(def|class) {name}\b|^{name} = ", text, re.MULTILINE), f"{path}::{name}"
