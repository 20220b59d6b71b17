"""What a pass must not undo, one case of each; `tests/model/test_cleaner_model.py` has any life of a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from keyfold import Changelog, restore
from keyfold.checkpoints.cleaner import manager, progress
from keyfold.checkpoints.cleaner.clean_pass import Aborted, CleanPass, clean_partition
from keyfold.checkpoints.cleaner.retention import apply_retention
from keyfold.statestore.errors import CompactedAway
from keyfold.statestore.segment import block
from support.changelogs import Clock
from support.proofs import Record, prove

CONFIG = {"cleaner.threads": 0, "anchors.auto": 0, "delete.retention.ms": 1000, "segment.bytes": 1024}


class Log:
    """A changelog of one partition, and all that was committed to it."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.log = Changelog.open(path, config=CONFIG, clock_ms=clock)
        self.clock = clock
        self.committed: list[Record] = []

    @property
    def splits(self) -> list[int]:
        return list(self.log.state.partitions[0].splits)

    @property
    def dropped(self) -> list[int]:
        return list(self.log.state.partitions[0].dropped_tombstones)

    def put(self, *rows: Record) -> int:
        keys, values = [k for k, _ in rows], [v for _, v in rows]
        self.committed += rows
        table = pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})
        return self.log.append(table).number

    def configure(self, name: str, value: object) -> None:
        self.log.engine.configure({name: value})

    def prove(self) -> None:
        prove(self.log, 0, self.committed)
        last = {key: value for key, value in dict(self.committed).items() if value is not None}
        assert restore(self.log.path).to_dict() == last

    def offsets(self, key: bytes) -> list[int]:
        return [r["offset"] for b in self.log.read(0) for r in b.to_pylist() if r["key"] == key]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(tmp_path / "log", Clock())
    with made.log:
        yield made


@pytest.fixture
def spanning(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """Records that do not fit one segment."""
    monkeypatch.setattr(block, "BLOCK_RECORDS_MAX", 2)
    return [(b"f%d" % n, b"x" * 700) for n in range(7)]


# -- what cuts a pass ----------------------------------------------------------------------------------------


def test_more_automatic_anchors_cannot_cut_where_the_state_is_gone(log: Log, spanning: list[Record]) -> None:
    log.put((b"a", b"1"))
    log.put(*spanning, (b"a", None))
    clean_partition(log.log.engine.writer, 0)
    assert 1 < log.log.state.partitions[0].clean_end < 9
    log.configure("anchors.auto", 3)
    log.put((b"c", b"1"))
    log.log.compact()
    log.prove()


def test_a_rollback_cannot_cut_where_the_state_is_gone(log: Log, spanning: list[Record]) -> None:
    log.configure("anchors.auto", 3)
    log.configure("segment.bytes", 4096)
    log.put((b"a", b"1"))
    second = log.put((b"b", b"1"), *spanning, (b"a", None))
    for number in range(3):
        log.put((b"c", b"%d" % number))
    clean_partition(log.log.engine.writer, 0)
    assert 1 < log.log.state.partitions[0].clean_end < 10
    log.log.rollback(second)
    del log.committed[10:]
    log.log.compact()
    log.prove()


def test_a_shorter_section_keeps_the_splits_beyond_it(log: Log) -> None:
    """Whether an anchor still wants them or not."""
    log.put((b"k", b"1"), (b"t", None), (b"f", b"x" * 2000))
    log.clock.now_ms += 100_000
    log.put((b"g", b"x" * 2000))
    log.log.anchor("x")
    log.put((b"h", b"x" * 2000))
    log.log.compact()
    assert log.splits == [4]
    log.clock.now_ms += 2000
    log.configure("min.compaction.lag.ms", 50_000)
    log.log.compact()
    log.prove()
    assert log.splits == [4]
    log.log.drop_anchor("x")
    log.put((b"k", None))
    log.clock.now_ms += 100_000
    log.log.compact()
    log.prove()
    assert log.splits == []
    assert log.offsets(b"k") == [5]


# -- tombstones ----------------------------------------------------------------------------------------------


def test_a_pass_dates_no_tombstone_that_it_has_not_come_to(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.put((b"a", b"1"), (b"a", b"2"), (b"t", b"old"), (b"f0", b"x" * 2000))
    log.put(*[(b"n%d" % n, b"v") for n in range(100)], (b"f1", b"x" * 2000))
    log.put((b"t", None), (b"f2", b"x" * 2000))
    log.log.engine.writer.seal_active()
    publish: Callable[..., None] = CleanPass._publish

    def once(self: CleanPass, *args: object, **more: object) -> None:
        publish(self, *args, **more)
        raise Aborted

    with monkeypatch.context() as patch, suppress(Aborted):
        patch.setattr(CleanPass, "_publish", once)
        clean_partition(log.log.engine.writer, 0)
    log.configure("cleaner.dedupe.buffer.size", 1024)
    assert clean_partition(log.log.engine.writer, 0) is not None
    log.clock.now_ms += 2000
    log.configure("cleaner.dedupe.buffer.size", 1 << 20)
    log.log.compact()
    assert log.offsets(b"t") == [105]
    log.clock.now_ms += 1000
    log.log.compact()
    assert log.offsets(b"t") == []
    log.prove()


def test_a_delete_is_missed_only_between_the_points_that_it_is_between(log: Log) -> None:
    log.put((b"a", b"1"))
    log.put((b"b", b"1"))
    log.log.anchor("A")
    log.put((b"a", b"2"))
    log.put((b"b", None))
    log.log.anchor("B")
    log.put((b"zz", None))
    log.log.compact()
    log.clock.now_ms += 5000
    log.log.compact()
    assert log.dropped == [4]
    path = log.log.path
    assert restore(path, since="A", at="B").to_dict() == {b"a": b"2", b"b": None}
    with pytest.raises(CompactedAway, match="A delete after this position"):
        restore(path, since="A")
    log.log.drop_anchor("A")
    log.log.compact()
    assert log.dropped == [3, 4]
    with pytest.raises(CompactedAway, match="an offset above 3"):
        restore(path, since={0: 2}, at="B")
    log.prove()


def test_passes_that_come_often_leave_few_dates(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_DATES", 8)
    log.configure("delete.retention.ms", 160)
    log.configure("segment.bytes", 1 << 20)
    for number in range(40):
        log.clock.now_ms += 10
        log.put((b"k%d" % number, None))
        log.log.compact()
    assert len(log.log.state.partitions[0].passes) <= 11
    # What was met 160 ms ago may stay an eighth of that longer.
    kept = {o for b in log.log.read(0) for o in b["offset"].to_pylist()}
    assert kept == set(range(min(kept), 40))
    assert 20 <= min(kept) <= 24


@pytest.fixture
def kept_delete(log: Log) -> Log:
    """A log whose second record is a delete past its horizon that the anchor "x" keeps."""
    log.put((b"a", b"1" * 2000))
    log.log.anchor("x")
    log.put((b"a", None))
    log.put(*((b"f%d" % n, b"x" * 500) for n in range(5)))
    log.log.compact()
    log.clock.now_ms += 5000
    log.log.compact()
    assert log.offsets(b"a") == [0, 1]
    assert log.log.state.partitions[0].swept_end == 7
    return log


def test_a_delete_goes_when_retention_has_removed_what_it_deleted(kept_delete: Log) -> None:
    log = kept_delete
    p = log.log.state.partitions[0]
    size = p.bytes - p.segments[0].size
    log.log.engine.configure({"cleanup.policy": "compact,delete", "retention.bytes": size})
    assert apply_retention(log.log.engine.writer) == 1
    assert log.log.start_offsets() == {0: 1}
    log.log.compact()
    assert log.offsets(b"a") == []


def test_a_pass_that_goes_back_and_is_broken_off_has_proved_nothing(
    kept_delete: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = kept_delete
    log.log.drop_anchor("x")
    publish: Callable[..., None] = CleanPass._publish

    def once(self: CleanPass, *args: object, **more: object) -> None:
        publish(self, *args, **more)
        raise Aborted

    with monkeypatch.context() as patch, suppress(Aborted):
        patch.setattr(CleanPass, "_publish", once)
        clean_partition(log.log.engine.writer, 0)
    p = log.log.state.partitions[0]
    assert (p.unique_end, p.swept_end, p.clean_end) == (1, 1, 7)
    log.prove()
    log.log.compact()
    log.prove()
    assert log.offsets(b"a") == []


# -- a pass that would change nothing ------------------------------------------------------------------------


def test_compaction_ends_beside_a_writer_where_deletes_cannot_go(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.put((b"a", b"1"))
    log.log.anchor("x")
    log.put((b"a", None))
    real, passes = clean_partition, 0

    def beside_a_writer(*args: object, **more: object) -> object:
        nonlocal passes
        passes += 1
        assert passes < 20
        log.put((b"b", b"1"))
        return real(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(manager, "clean_partition", beside_a_writer)
    for expected in (1, 1, 1):
        log.clock.now_ms += 5000
        passes = 0
        log.log.compact()
        assert passes == expected
    log.prove()


def test_a_clean_log_is_left_alone_whatever_deletes_it_keeps(log: Log) -> None:
    log.put((b"a", b"1" * 2000))
    log.log.anchor("x")
    log.put((b"a", None))
    log.put((b"c", b"z" * 2000))
    log.put((b"b" * 1200, None))
    log.log.compact()
    log.clock.now_ms += 5000
    (done,) = log.log.compact()
    assert done.tombstones_dropped == 1
    line = log.log.state.seq
    log.clock.now_ms += 5000
    assert log.log.compact() == []
    assert log.log.state.seq == line
    log.log.drop_anchor("x")
    (done,) = log.log.compact()
    assert done.tombstones_dropped == 1
    log.prove()
