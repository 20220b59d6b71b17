"""Last values of many partitions: a key waits for its own alone, a range sees one commit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from keyfold import Changelog
from keyfold.checkpoints.cleaner.retention import apply_retention
from keyfold.checkpoints.engine import Engine
from keyfold.checkpoints.lastvalues.stores import KeptStores, Step
from keyfold.checkpoints.log.reader_marks import now_ms
from keyfold.checkpoints.log.recovery import open_writer
from keyfold.statestore.errors import Damaged, WriterFenced
from keyfold.statestore.files import Files, OpenFile
from keyfold.statestore.kv.api import RecordStore, StoreClosed
from keyfold.statestore.rocksdb.store import LastValues
from support.waiting import eventually

#: Nobody follows before somebody asks. Blocks are small: compressed, they take longer to read than to write.
QUIET = {"cleaner.threads": 0, "cleanup.policy": "delete", "compression.type": "none"}


class NoSync(Files):
    """Commits are as fast as on a disk that is none."""

    def sync(self, file: OpenFile) -> None:
        pass


def table(keys: list[str], value: str) -> pa.Table:
    return pa.table({"key": keys, "value": [value] * len(keys)})


def key_in(log: Changelog, partition: int) -> str:
    return next(f"k{n}" for n in range(10_000) if log.partition(b"k%d" % n) == partition)


def test_a_key_waits_for_its_own_partition_and_for_no_other(tmp_path: Path) -> None:
    """The log of another one cannot even be read."""
    with Changelog.open(tmp_path / "log", partitions=2, config=QUIET) as log:
        keys = [key_in(log, 0), key_in(log, 1)]
        log.append(table(keys, "1"))
        (segment,) = (tmp_path / "log" / "1").glob("*.arrows")
        data = bytearray(segment.read_bytes())
        data[-100] ^= 1
        segment.write_bytes(data)
        for _ in range(3):
            assert log.get(keys[0].encode()) == b"1"
            assert log.store().get_all([keys[0].encode()]) == [b"1"]
            with pytest.raises(Damaged):
                log.get(keys[1].encode())
            with pytest.raises(Damaged):
                list(log.store().all())


def _slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Step.apply

    def apply_slowly(self: Step) -> None:
        apply(self)
        time.sleep(0.01)

    monkeypatch.setattr(Step, "apply", apply_slowly)


class Traffic:
    """A thread that commits to all partitions, and some that ask for a few of the keys."""

    def __init__(self, log: Changelog, keys: list[str], askers: int, pause: float = 0) -> None:
        self.log, self.keys, self._pause = log, keys, pause
        self.committed = self.asked = 0
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=work) for work in [self._write] + [self._ask] * askers]

    def _write(self) -> None:
        while not self._ended.is_set():
            self.log.append(table(self.keys, str(self.committed + 1)))
            self.committed += 1
            time.sleep(self._pause)

    def _ask(self) -> None:
        while not self._ended.is_set():
            self.log.get(self.keys[self.asked % 3].encode())
            self.asked += 1

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


def test_one_commit_is_seen_whole_in_all_partitions_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More partitions than are applied in one step, each slowly, and somebody who asks for single keys."""
    _slowly(monkeypatch)
    keys = [f"k{n}" for n in range(600)]
    with Changelog.open(tmp_path / "log", partitions=150, config=QUIET) as log:
        log.append(table(keys, "0"))
        # Without a pause the writer gets away from its readers, and each read takes longer than the last.
        with Traffic(log, keys, askers=1, pause=0.05) as traffic:
            for _ in range(20):
                before = traffic.committed
                seen = {value for _, value in log.store().all()}
                assert len(seen) == 1, seen
                assert int(seen.pop()) >= before


READS_OF_ALL: dict[str, Callable[[Changelog], Any]] = {
    "all": lambda log: len(list(log.store().all())),
    "range": lambda log: len(list(log.store().range(b"k1", b"k2"))),
    "snapshot": lambda log: log.store().snapshot().close(),
    "catch_up": lambda log: log.engine.catch_up(),
}


@pytest.mark.parametrize("read", READS_OF_ALL.values(), ids=READS_OF_ALL)
def test_a_read_of_all_partitions_ends_beside_a_writer_and_askers_that_never_pause(
    read: Callable[[Changelog], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step takes longer than a commit, and somebody always waits for a single key: the read wants the
    commit that is current when it begins, and no later one.
    """
    _slowly(monkeypatch)
    monkeypatch.setattr("keyfold.checkpoints.lastvalues.stores._STEP_PARTITIONS", 1)
    keys = [f"k{n}" for n in range(40)]
    ended = threading.Event()

    def reading() -> None:
        for _ in range(3):
            read(log)
        ended.set()

    with Changelog.open(tmp_path / "log", files=NoSync(), partitions=10, config=QUIET) as log:
        log.append(table(keys, "0"))
        with Traffic(log, keys, askers=6) as traffic:
            reader = threading.Thread(target=reading)
            reader.start()
            in_time, asked = ended.wait(20), traffic.asked
        reader.join()
    assert in_time
    assert asked > 10  # nor do they starve for its sake


def test_no_read_takes_a_store_that_is_being_built_again_for_the_last_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention has removed old keys, so the rows are removed, between the look at the store and the read."""
    now = [1_000_000]
    config = {"cleaner.threads": 0, "cleanup.policy": "compact,delete", "retention.ms": 1000}
    with Changelog.open(tmp_path / "log", config=config, clock_ms=lambda: now[0]) as log:
        log.append(table(["old"], "1"))
        log.engine.writer.seal_active()
        now[0] += 900
        log.append(table(["stays"], "1"))
        assert log.get(b"stays") == b"1"
        cleared, read = threading.Event(), threading.Event()
        begin_again, get = LastValues.begin_again, LastValues.get

        def begin_again_slowly(self: LastValues, generation: int) -> None:
            begin_again(self, generation)
            cleared.set()
            read.wait(10)

        def get_late(self: LastValues, key: bytes) -> bytes | None:
            if not cleared.is_set():
                now[0] += 200
                assert apply_retention(log.engine.writer) == 1
                assert cleared.wait(10)
                found = get(self, key)
                read.set()
                return found
            return get(self, key)

        monkeypatch.setattr(LastValues, "begin_again", begin_again_slowly)
        monkeypatch.setattr(LastValues, "get", get_late)
        assert log.get(b"stays") == b"1"
        assert read.is_set()
        assert log.get(b"old") is None


def damage_store(path: Path) -> None:
    for sst in path.glob("store-*/*.sst"):
        # In place, because it is mapped.
        with sst.open("r+b") as file:
            for position in range(1_000, sst.stat().st_size - 2_000, 1_000):
                file.seek(position)
                file.write(b"\xff\x01\xff")


READS: list[Callable[[Changelog], Any]] = [
    lambda log: log.get(b"k7"),
    lambda log: log.store().get_all([b"k7"])[0],
    lambda log: log.store().get_all(pa.array([b"k7"], pa.binary())).to_pylist()[0],
]


@pytest.mark.parametrize("read", READS, ids=["get", "list", "array"])
def test_a_store_with_a_damaged_block_is_built_again_and_the_read_is_answered(
    tmp_path: Path, read: Callable[[Changelog], Any]
) -> None:
    with Changelog.open(tmp_path / "log", partitions=3, config=QUIET) as log:
        log.append(table([f"k{n}" for n in range(30_000)], "1"))
        log.engine.catch_up()
        damage_store(tmp_path / "log")
        assert read(log) == b"1"
        assert len(list(log.store().all())) == 30_000


def _counted(log: Changelog) -> None:
    with log.transaction(app_id="t", batch_id=0) as store:
        store.put(b"new", store.get(b"k7") or b"")


def _records(log: Changelog) -> RecordStore:
    return cast(RecordStore, log.store().snapshot())


SCANS: list[Callable[[Changelog], Any]] = [
    lambda log: list(log.store().all()),
    lambda log: list(log.store().prefix(b"k7")),
    lambda log: log.store().snapshot().get(b"k7"),
    lambda log: log.store().snapshot().get_all([b"k7"]),
    lambda log: log.store().snapshot().get_all(pa.array([b"k%d" % n for n in range(100)], pa.binary())),
    lambda log: list(log.store().snapshot().snapshot().all()),
    lambda log: list(_records(log).records()),
    lambda log: _records(log).get_record(b"k7"),
    lambda log: _records(log).get_records(pa.array([b"k7"], pa.binary())),
    _counted,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SCANS)))
def test_what_reads_one_commit_and_meets_a_damaged_block_says_so_and_the_next_one_is_right(
    number: int, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    with Changelog.open(path, partitions=3, config=QUIET) as log:
        log.append(table([f"k{n}" for n in range(30_000)], "1"))
        log.engine.catch_up()
        damage_store(path)
        with pytest.raises(Damaged) as refused:
            SCANS[number](log)
        assert str(refused.value.path).startswith(f"{path}/store-")
        assert "rebuilt from the log" in str(refused.value.remedy)
        SCANS[number](log)
        assert {value for _, value in log.store().all()} == {b"1"}


def descriptors(within: Path) -> int:
    links = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return sum(link.startswith(str(within)) for link in links)


def test_last_values_take_as_many_descriptors_for_many_partitions_as_for_one(tmp_path: Path) -> None:
    taken = []
    for partitions in (1, 60):
        path = tmp_path / str(partitions)
        with Changelog.open(path, partitions=partitions, config=QUIET) as log:
            log.append(table([f"k{n}" for n in range(2_000)], "1"))
            before = descriptors(path)
            assert len(list(log.store().all())) == 2_000
            taken.append(descriptors(path) - before)
    assert taken[0] == taken[1] < 12


class OtherFiles(Files):
    """Makes this process two: each changelog has one writer per process and file system."""


def test_a_writer_that_was_overtaken_touches_no_store_of_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(["a"], "1"))
        log.engine.catch_up()
    overtaken = Changelog.open(path)
    engine = Engine(open_writer(OtherFiles(), path, None, now_ms, steal=True))
    try:
        assert engine.last_values().get(b"a") == b"1"
        stores = sorted(path.glob("store-*"))
        with pytest.raises(WriterFenced):
            overtaken.get(b"a")
        assert sorted(path.glob("store-*")) == stores
        assert all((store / "CURRENT").exists() for store in stores)
        assert engine.last_values().get(b"a") == b"1"
    finally:
        engine.close()
        overtaken.close()


def test_a_store_that_a_living_writer_was_building_is_not_the_overtaken_ones_to_remove(
    tmp_path: Path,
) -> None:
    """Its own cannot be used any more, after another one has taken over."""
    path = tmp_path / "log"
    overtaken = Changelog.open(path, config=QUIET)
    overtaken.append(table(["a"], "1"))
    assert overtaken.get(b"a") == b"1"
    kept: KeptStores = overtaken.engine._updater._kept
    engine = Engine(open_writer(OtherFiles(), path, None, now_ms, steal=True))
    try:
        assert engine.last_values().get(b"a") == b"1"
        with pytest.raises(WriterFenced):
            kept.discard()
        assert engine.last_values().get(b"a") == b"1"
    finally:
        engine.close()
        overtaken.close()


def test_a_store_that_was_held_answers_after_its_changelog_has_moved_on(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", partitions=4, config=QUIET) as log:
        store = log.store()
        for number in range(5):
            log.append(table([f"k{n}" for n in range(50)], str(number)))
            assert store.get(b"k3") == b"%d" % number
            assert {v for _, v in store.all()} == {b"%d" % number}
            with log.transaction(app_id="t", batch_id=number) as changes:
                assert changes.get(b"k3") == b"%d" % number
    with pytest.raises(StoreClosed):
        store.get(b"k3")


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """Of those that a test has started: other tests of this process may have left a changelog open."""
    before = set(threading.enumerate())
    yield
    eventually(
        lambda: not [t for t in set(threading.enumerate()) - before if t.name == "keyfold-last-values"]
    )
