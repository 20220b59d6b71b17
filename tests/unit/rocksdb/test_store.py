"""The last-value store: what it applies it holds, also when it is opened again; views keep their moment."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rocksdict import Options, Rdict

from keyfold.statestore.kv.api import StoreClosed
from keyfold.statestore.kv.stores import Overlay, ReadOnlyStore
from keyfold.statestore.rocksdb import format
from keyfold.statestore.rocksdb import store as lastvalues
from keyfold.statestore.rocksdb.store import LastValues, StoreId, StoreUnusable
from support.folds import IDENTITY, IN_MEMORY, Record, apply, folded, last_per_key, records_from
from support.waiting import eventually

OPEN = """
import pathlib, sys
from keyfold.statestore.rocksdb.store import StoreId, LastValues
LastValues.open(pathlib.Path(sys.argv[1]), StoreId("6f1c", 3, 1))
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        yield Path(name) / "store-1"


@pytest.fixture(params=["write batch", "ingested file"])
def path_taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(lastvalues, "INGEST_ROWS", 1 if request.param == "ingested file" else 10**9)
    return str(request.param)


# -- apply --------------------------------------------------------------------------------------------------


def test_a_new_store_is_empty_and_begins_at_offset_0(directory: Path) -> None:
    with LastValues.open(directory, IDENTITY) as store:
        assert (store.applied, list(store.all())) == (0, [])


@pytest.mark.usefixtures("path_taken")
def test_apply_puts_replaces_and_deletes_and_a_reopened_store_has_it_all(directory: Path) -> None:
    first = records_from(0, (b"", b"e"), (b"a", b"1"), (b"b", b"2"), (b"c", b""), (b"\xff\xff", b"5"))
    second = records_from(5, (b"a", None), (b"b", b"3"), (b"never there", None), (b"\x00", b"6"))
    with LastValues.open(directory, IDENTITY) as store:
        apply(store, first)
        apply(store, second)
    with LastValues.open(directory, IDENTITY) as store:
        assert store.applied == 9
        assert dict(store.all()) == folded(first + second)
        assert store.get_record(b"b") == (6, 60, b"3")
        assert store.get_record(b"") == (0, 0, b"e")
        assert store.get_record(b"a") is None


@pytest.mark.usefixtures("path_taken")
def test_timestamps_are_taken_as_integers_too_and_may_be_negative(directory: Path) -> None:
    rows = pa.record_batch({"offset": [7], "timestamp": [-5], "key": [b"k"], "value": [b"v"]})
    with LastValues.open(directory, IDENTITY) as store:
        store.apply(rows, 8)
        assert store.get_record(b"k") == (7, -5, b"v")


@pytest.mark.usefixtures("path_taken")
def test_applying_a_range_again_changes_nothing(directory: Path) -> None:
    entries = [(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", None), (b"c", b"1"), (b"a", b"3")]
    records = records_from(0, *entries)
    with LastValues.open(directory, IDENTITY) as store:
        for begin, end in ((0, 2), (2, 5), (0, 3), (1, 5), (0, 5)):
            apply(store, records[begin:end])
            assert store.applied == max(end, store.applied)
            assert dict(store.all()) == folded(records[: store.applied])
        store.apply(last_per_key(records[3:6]), 6)
        assert (store.applied, dict(store.all())) == (6, {b"a": b"3", b"c": b"1"})
        assert store.get_record(b"c") == (4, 40, b"1")


def test_an_apply_without_rows_moves_applied_on(directory: Path) -> None:
    """A range of the log may hold nothing after compaction, and is still done with."""
    with LastValues.open(directory, IDENTITY) as store:
        store.apply(last_per_key([]), 40)
    with LastValues.open(directory, IDENTITY) as store:
        assert (store.applied, list(store.all())) == (40, [])


@pytest.mark.usefixtures("path_taken")
@pytest.mark.parametrize("wrong", ["beyond its end", "key twice", "no key"])
def test_rows_that_are_not_a_fold_are_refused_and_change_nothing(directory: Path, wrong: str) -> None:
    keys = {"key twice": [b"x", b"x"], "no key": [b"x", None]}.get(wrong, [b"x", b"y"])
    rows = pa.record_batch(
        {
            "offset": pa.array([1, 2], pa.int64()),
            "timestamp": pa.array([1, 2], pa.int64()),
            "key": pa.array(keys, pa.binary()),
            "value": pa.array([b"new", b"new"], pa.binary()),
        }
    )
    with LastValues.open(directory, IDENTITY) as store:
        apply(store, records_from(0, (b"a", b"1")))
        with pytest.raises(ValueError):
            store.apply(rows, 2 if wrong == "beyond its end" else 3)
        assert (store.applied, list(store.all())) == (1, [(b"a", b"1")])


def test_large_and_small_applies_mixed_keep_their_order(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is ingested above what is still in memory, and what is written later lies above the file."""
    monkeypatch.setattr(lastvalues, "INGEST_ROWS", 3)
    records: list[Record] = []
    with LastValues.open(directory, IDENTITY) as store:
        for round_ in range(12):
            entries: list[tuple[bytes, bytes | None]] = [(b"both", b"%d" % round_)]
            if round_ % 2:
                entries += [(b"%d" % n, None if round_ % 3 == 0 else b"%d" % round_) for n in range(5)]
            new = records_from(len(records), *entries)
            records += new
            apply(store, new)
            assert dict(store.all()) == folded(records)
    with LastValues.open(directory, IDENTITY) as store:
        assert dict(store.all()) == folded(records)


def test_many_rows_take_the_ingested_path_by_default(directory: Path) -> None:
    many = [(n, b"%d" % n, b"v%d" % n) for n in range(lastvalues.INGEST_ROWS)]
    with LastValues.open(directory, IDENTITY) as store:
        apply(store, list(many))
        assert [name for name in os.listdir(directory) if name.endswith(".sst")]
        assert store.get_all([key for _, key, _ in many]) == [value for _, _, value in many]
        assert dict(store.all()) == folded(list(many))


def test_a_leftover_load_file_that_is_also_live_data_is_not_written_through(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill in the middle of the ingestion leaves two names of one file."""
    monkeypatch.setattr(lastvalues, "INGEST_ROWS", 1)
    with LastValues.open(directory, IDENTITY) as store:
        apply(store, records_from(0, (b"old", b"1"), (b"both", b"1")))
    (live,) = directory.glob("*.sst")
    os.link(live, directory / "load.tmp")
    with LastValues.open(directory, IDENTITY) as store:
        apply(store, records_from(2, (b"new", b"2"), (b"both", b"2")))
    with LastValues.open(directory, IDENTITY) as store:
        assert dict(store.all()) == {b"old": b"1", b"new": b"2", b"both": b"2"}
    assert not (directory / "load.tmp").exists()


RANGES = [
    records_from(
        100 * n, *((b"%d" % (k * (n + 1) % 70), None if k % 9 == n else b"%d-%d" % (n, k)) for k in range(60))
    )
    for n in range(9)
]


def load(store: LastValues, ranges: list[list[Record]]) -> None:
    """Each range in two batches."""
    rows = [(last_per_key(records), records[-1][0] + 1) for records in ranges]
    store.load(([batch[:7], batch[7:]], applied) for batch, applied in rows)


def test_what_is_loaded_is_as_if_it_had_been_applied(directory: Path) -> None:
    with LastValues.open(directory, IDENTITY) as store:
        apply(store, records_from(0, (b"0", b"before"), (b"never again", b"v")))
        load(store, RANGES)
    expected = folded(records_from(0, (b"never again", b"v")) + [r for records in RANGES for r in records])
    with LastValues.open(directory, IDENTITY) as store:
        assert store.applied == RANGES[-1][-1][0] + 1
        assert dict(store.all()) == expected
        assert store.get_all(list(expected)) == list(expected.values())
    assert not list(directory.glob("load*"))


@pytest.mark.parametrize("wrong", [0, 4, 8])
def test_ranges_in_front_of_a_wrong_one_are_loaded(directory: Path, wrong: int) -> None:
    rows = [([last_per_key(records)], records[-1][0] + 1) for records in RANGES]
    rows[wrong] = (rows[wrong][0], 1)
    with LastValues.open(directory, IDENTITY) as store:
        with pytest.raises(ValueError, match="is not below"):
            store.load(rows)
        before = [r for records in RANGES[:wrong] for r in records]
        assert store.applied == (before[-1][0] + 1 if before else 0)
        assert dict(store.all()) == folded(before)
        load(store, RANGES)
        assert dict(store.all()) == folded([r for records in RANGES for r in records])


def test_a_leftover_of_a_killed_load_is_not_written_through(directory: Path) -> None:
    with LastValues.open(directory, IDENTITY) as store:
        load(store, [records_from(0, (b"old", b"1"), (b"both", b"1"), *((b"%d" % n, b"") for n in range(9)))])
    (live,) = directory.glob("*.sst")
    for number in range(8):
        os.link(live, directory / f"load-{number}.tmp")
    with LastValues.open(directory, IDENTITY) as store:
        load(store, [records_from(20, *((b"new%d" % n, b"2") for n in range(9)))])
        assert store.get_all([b"old", b"both", b"new0"]) == [b"1", b"1", b"2"]
        assert store.get(b"8") == b""


def test_files_are_put_together_sooner_where_nothing_is_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lastvalues, "INGEST_ROWS", 1)

    def files() -> int:
        return len(list(directory.glob("*.sst")))

    with LastValues.open(directory, IDENTITY) as store:
        for records in RANGES[:3]:
            apply(store, records)
        time.sleep(0.3)
        assert files() == 3
    with LastValues.open(directory, IDENTITY) as store:
        eventually(lambda: files() == 1)
        apply(store, RANGES[3])
        load(store, RANGES[4:6])
        eventually(lambda: files() == 1)
        for records in RANGES[6:]:
            apply(store, records)
        time.sleep(0.3)
        assert files() > 2
        store.rest()
        eventually(lambda: files() == 1)
        assert dict(store.all()) == folded([r for records in RANGES for r in records])


# -- open ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [StoreId("other", 3, 1), StoreId("6f1c", 4, 1), StoreId("6f1c", 3, 2)])
def test_a_store_of_another_fold_is_unusable(directory: Path, other: StoreId) -> None:
    with LastValues.open(directory, IDENTITY) as store:
        store.apply(last_per_key([]), 1)
    with pytest.raises(StoreUnusable) as refused:
        LastValues.open(directory, other)
    assert (refused.value.expected, refused.value.found) == (other, IDENTITY)
    LastValues.open(directory, IDENTITY).close()


def test_a_store_of_another_version_is_unusable(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(format, "FORMAT_VERSION", 99)
        with LastValues.open(directory, IDENTITY) as store:
            store.apply(last_per_key([]), 1)
    with pytest.raises(StoreUnusable, match="version 99"):
        LastValues.open(directory, IDENTITY)


@pytest.mark.parametrize("record", [b"", b"short", b"XXXX" + bytes(40), format.pack_meta(IDENTITY, 7) + b"x"])
def test_a_meta_record_that_is_none_is_unusable(directory: Path, record: bytes) -> None:
    raw = Rdict(str(directory), Options(raw_mode=True))
    raw[b"\x00\x00\x03"] = record
    raw.close()
    with pytest.raises(StoreUnusable, match="meta record"):
        LastValues.open(directory, IDENTITY)


def test_rows_without_a_meta_record_are_unusable(directory: Path) -> None:
    raw = Rdict(str(directory), Options(raw_mode=True))
    raw[b"\x01\x00\x03key"] = bytes(20)
    raw.close()
    with pytest.raises(StoreUnusable, match="rows without one"):
        LastValues.open(directory, IDENTITY)


def test_a_path_that_is_a_file_is_unusable(directory: Path) -> None:
    directory.write_bytes(b"")
    with pytest.raises(StoreUnusable):
        LastValues.open(directory, IDENTITY)


def test_a_store_that_is_open_already_is_unusable_here_and_in_another_process(directory: Path) -> None:
    with LastValues.open(directory, IDENTITY) as store:
        apply(store, records_from(0, (b"a", b"1")))
        with pytest.raises(StoreUnusable, match="already open in this process"):
            LastValues.open(directory, IDENTITY)
        other = subprocess.run(
            [sys.executable, "-c", OPEN, str(directory)], capture_output=True, text=True, check=False
        )
        assert "open in another process" in other.stderr
        assert store.get(b"a") == b"1"


def test_values_are_never_unpickled(directory: Path) -> None:
    pickled = b"\x80\x04\x8c\x04text."
    with LastValues.open(directory, IDENTITY) as store:
        apply(store, records_from(0, (b"k", pickled)))
        store.flush()
        assert store.get(b"k") == pickled
    assert '"raw_mode":true' in (directory / "rocksdict-config.json").read_text()


def test_nothing_goes_into_a_write_ahead_log(directory: Path) -> None:
    with LastValues.open(directory, IDENTITY) as store:
        apply(store, records_from(0, (b"k", b"v" * 10_000)))
        assert [path.stat().st_size for path in directory.glob("*.log")] == [0]


def test_the_directory_does_not_fill_with_logs(directory: Path) -> None:
    for _ in range(6):
        LastValues.open(directory, IDENTITY).close()
    assert len(list(directory.glob("LOG*"))) <= 2


def test_destroy_removes_the_directory_and_ends_the_store(directory: Path) -> None:
    store = LastValues.open(directory, IDENTITY)
    apply(store, records_from(0, (b"k", b"v")))
    store.destroy()
    assert not directory.exists()
    with pytest.raises(StoreClosed):
        store.get(b"k")
    store.close()


# -- iterators, snapshots, threads --------------------------------------------------------------------------


@pytest.mark.usefixtures("path_taken")
def test_a_snapshot_and_an_iterator_keep_their_moment_with_its_offset(directory: Path) -> None:
    with LastValues.open(directory, IDENTITY) as store:
        old = [(n, b"%04d" % n, b"old") for n in range(3_000)]
        apply(store, list(old))
        with store.snapshot() as snapshot, store.all() as rows:
            apply(store, [(3_000 + n, b"%04d" % n, None if n % 2 else b"new") for n in range(3_000)])
            store.flush()
            assert list(rows) == [(key, value) for _, key, value in old]
            assert list(snapshot.all()) == [(key, value) for _, key, value in old]
            assert list(snapshot.range(b"0100", b"0103")) == [(b"%04d" % n, b"old") for n in (100, 101, 102)]
            assert snapshot.get_all([b"0001", b"0002", b"nope"]) == [b"old", b"old", None]
            assert (snapshot.applied, store.applied) == (3_000, 6_000)
        assert store.get_all([b"0001", b"0002"]) == [None, b"new"]


def test_scans_that_share_a_snapshot_do_not_disturb_each_other(directory: Path) -> None:
    with LastValues.open(directory, IDENTITY) as store:
        apply(store, [(n, b"%04d" % n, b"v") for n in range(2_000)])
        with store.snapshot() as snapshot:
            first, second = snapshot.all(), snapshot.range(b"1000", None)
            seen = []
            for n in range(1_000):
                seen.append((next(first)[0], next(second)[0]))
                snapshot.get(b"%04d" % (n * 7 % 2_000))
            assert seen == [(b"%04d" % n, b"%04d" % (n + 1_000)) for n in range(1_000)]


def test_closing_the_store_ends_its_iterators_and_frees_its_lock(directory: Path) -> None:
    store = LastValues.open(directory, IDENTITY)
    apply(store, [(n, b"%04d" % n, b"v") for n in range(2_000)])
    rows, snapshot = store.all(), store.snapshot()
    next(rows)
    store.close()
    with LastValues.open(directory, IDENTITY) as again:
        with pytest.raises(StoreClosed):
            list(rows)
        with pytest.raises(StoreClosed):
            snapshot.get(b"0001")
        assert again.applied == 2_000


def test_a_store_can_be_closed_while_other_threads_read(directory: Path) -> None:
    store = LastValues.open(directory, IDENTITY)
    apply(store, [(n, b"%05d" % n, b"v") for n in range(10_000)])
    keys = [b"%05d" % n for n in range(10_000)]
    ended: list[object] = []

    def read(call: Any) -> None:
        try:
            while True:
                call()
        except BaseException as error:
            ended.append(error)

    calls = [lambda: store.get_all(keys), lambda: list(store.all()), lambda: store.get(b"00001")]
    threads = [threading.Thread(target=read, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    store.close()
    for thread in threads:
        thread.join(60)
    assert [type(error) for error in ended] == [StoreClosed] * 3


@pytest.mark.usefixtures("path_taken")
def test_a_reader_sees_each_apply_whole(directory: Path) -> None:
    keys = [b"%d" % n for n in range(50)]
    with LastValues.open(directory, IDENTITY) as store:

        def write() -> None:
            for round_ in range(1, 40):
                apply(store, [(round_ * 50 + n, key, b"%d" % round_) for n, key in enumerate(keys)])

        writer = threading.Thread(target=write)
        writer.start()
        torn = []
        while writer.is_alive():
            with store.snapshot() as snapshot:
                values = {*snapshot.get_all(keys), *(value for _, value in snapshot.all())}
                if values != ({None} if snapshot.applied == 0 else {b"%d" % (snapshot.applied // 50 - 1)}):
                    torn.append((snapshot.applied, values))
        writer.join()
        assert torn == []
        assert store.get_all(keys) == [b"39"] * 50


# -- model --------------------------------------------------------------------------------------------------

KEYS = st.sampled_from([b"", b"\x00", b"a", b"a\x00", b"aa", b"ab", b"b", b"\xfe", b"\xff", b"\xff\xff"])
VALUES = st.binary(max_size=4)


class OverlayOverLastValues(RuleBasedStateMachine):
    """A user's transactions over a store that is reopened, against a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory(dir=IN_MEMORY)
        self.committed: dict[bytes, bytes] = {}
        self.model: dict[bytes, bytes] = {}
        self.frozen: dict[bytes, bytes] | None = None
        self.snapshot: ReadOnlyStore | None = None

    @initialize()
    def open(self) -> None:
        self.store = LastValues.open(Path(self.place.name) / "store", IDENTITY)
        self.overlay = Overlay(self.store)

    @rule(key=KEYS, value=VALUES)
    def put(self, key: bytes, value: bytes) -> None:
        self.overlay.put(key, value)
        self.model[key] = value

    @rule(entries=st.dictionaries(KEYS, VALUES))
    def put_all(self, entries: dict[bytes, bytes]) -> None:
        self.overlay.put_all(entries)
        self.model.update(entries)

    @rule(key=KEYS)
    def delete(self, key: bytes) -> None:
        self.overlay.delete(key)
        self.model.pop(key, None)

    @rule(ingested=st.booleans())
    def commit(self, ingested: bool) -> None:
        changes = self.overlay.changes()
        offsets = pa.array(range(self.store.applied, self.store.applied + changes.num_rows), pa.int64())
        columns = [offsets, offsets, *(changes.column(name).combine_chunks() for name in ("key", "value"))]
        rows = pa.record_batch(columns, names=["offset", "timestamp", "key", "value"])
        lastvalues.INGEST_ROWS = 1 if ingested else 20_000
        try:
            self.store.apply(rows, self.store.applied + changes.num_rows)
        finally:
            lastvalues.INGEST_ROWS = 20_000
        self.overlay = Overlay(self.store)
        self.committed = dict(self.model)

    @rule()
    def roll_back(self) -> None:
        self.overlay = Overlay(self.store)
        self.model = dict(self.committed)

    @rule()
    def reopen(self) -> None:
        """With an open snapshot and all: uncommitted changes are gone, the rest is there."""
        applied = self.store.applied
        self.store.close()
        self.open()
        assert self.store.applied == applied
        self.snapshot = self.frozen = None
        self.model = dict(self.committed)

    @rule()
    def take_snapshot(self) -> None:
        self.snapshot, self.frozen = self.overlay.snapshot(), dict(self.model)

    @precondition(lambda self: self.snapshot is not None)
    @rule(from_=st.none() | KEYS, to=st.none() | KEYS)
    def read_snapshot(self, from_: bytes | None, to: bytes | None) -> None:
        assert self.snapshot is not None
        assert self.frozen is not None
        assert list(self.snapshot.range(from_, to)) == between(self.frozen, from_, to)

    @rule(from_=st.none() | KEYS, to=st.none() | KEYS, prefix=st.binary(max_size=2))
    def read(self, from_: bytes | None, to: bytes | None, prefix: bytes) -> None:
        assert list(self.overlay.range(from_, to)) == between(self.model, from_, to)
        assert list(self.overlay.prefix(prefix)) == [
            entry for entry in sorted(self.model.items()) if entry[0].startswith(prefix)
        ]

    @rule(keys=st.lists(KEYS, max_size=5))
    def get(self, keys: list[bytes]) -> None:
        assert self.overlay.get_all(keys) == [self.model.get(key) for key in keys]
        assert [self.overlay.get(key) for key in keys] == [self.model.get(key) for key in keys]

    @invariant()
    def the_base_holds_what_was_committed(self) -> None:
        if hasattr(self, "store"):
            assert list(self.store.all()) == sorted(self.committed.items())

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        self.place.cleanup()


def between(table: dict[bytes, bytes], from_: bytes | None, to: bytes | None) -> list[tuple[bytes, bytes]]:
    return [e for e in sorted(table.items()) if (from_ or b"") <= e[0] and (to is None or e[0] < to)]


TestOverlayOverLastValues = OverlayOverLastValues.TestCase
TestOverlayOverLastValues.settings = settings(stateful_step_count=30)
