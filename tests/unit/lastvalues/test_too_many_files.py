"""Without a free descriptor, or with a disk that fails, last values are not read and not written, and the
stores stay as they are.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from keyfold import Changelog
from keyfold.statestore.errors import StorageFailed
from keyfold.statestore.kv.api import RecordStore
from keyfold.statestore.rocksdb import database
from keyfold.statestore.rocksdb.database import Database
from keyfold.statestore.rocksdb.db import Cursor, unusable
from support.faults.inject import Operation, Watched, on

CONFIG = {"cleaner.threads": 0}


class Limited(Watched):
    """Where `error` is set, every read of a file of the log, and of the list of stores, fails with it."""

    error: int | None = None

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        selected = (on("map", "read", path="*.arrows"), on("list_directory", path="*/log"))
        if self.error is not None and any(chosen(operation) for chosen in selected):
            raise OSError(self.error, os.strerror(self.error), str(operation.path))
        with super().around(operation):
            yield


@contextmanager
def exhausted(limit: int = errno.EMFILE) -> Iterator[None]:
    """RocksDB cannot open a file. `limit`: of the process, or of the system (ENFILE)."""
    text = f"IO error: While open a file for random read: /x/000012.sst: {os.strerror(limit)}"

    def refuse(self: Any, *arguments: Any) -> Any:
        raise unusable(Path("/x"), Exception(text))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "_opened", refuse)
        patch.setattr(Cursor, "_moved", refuse)
        patch.setattr(database, "open_database", refuse)
        yield


def stores(path: Path) -> dict[str, int]:
    """The stores' directories, and which they are."""
    return {store.name: store.stat().st_ino for store in path.glob("store-*")}


def table(count: int, value: str) -> pa.Table:
    return pa.table({"key": [f"k{n}" for n in range(count)], "value": [value] * count})


def filled(log: Changelog) -> dict[str, int]:
    """Append 50 rows, and wait until the stores have them. Returns the stores."""
    log.append(table(50, "1"))
    log.engine.catch_up()
    return stores(log.path)


def refuses_then_answers(log: Changelog, told: str, over: Callable[[], None]) -> None:
    """A read is refused with this message until the failure is `over`. Then the three rows that were appended
    meanwhile are there.
    """
    log.append(table(3, "2"))
    with pytest.raises(StorageFailed, match=told):
        log.get(b"k1")
    over()
    assert [log.get(b"k1"), log.get(b"k7")] == [b"2", b"1"]


def _records(log: Changelog) -> RecordStore:
    return cast(RecordStore, log.store().snapshot())


READS: list[Callable[[Changelog], Any]] = [
    lambda log: log.get(b"k7"),
    lambda log: log.store().get_all([b"k7"]),
    lambda log: log.store().get_all(pa.array([b"k7"], pa.binary())),
    lambda log: list(log.store().prefix(b"k7")),
    lambda log: list(log.store().all()),
    lambda log: log.store().snapshot().get(b"k7"),
    lambda log: log.store().snapshot().get_all(pa.array([b"k7"], pa.binary())),
    lambda log: list(_records(log).records()),
    lambda log: _records(log).get_record(b"k7"),
]


@pytest.mark.parametrize("limit", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("read", READS)
def test_a_read_says_so_and_the_next_one_is_answered(
    tmp_path: Path, read: Callable[[Changelog], Any], limit: int
) -> None:
    with Changelog.open(tmp_path / "log", partitions=2, config=CONFIG) as log:
        before, expected = filled(log), read(log)
        with exhausted(limit), pytest.raises(StorageFailed, match="Too many open files") as refused:
            read(log)
        assert ("system" in refused.value.what) is (limit == errno.ENFILE)
        assert read(log) == expected
        assert stores(tmp_path / "log") == before


def test_the_middle_of_a_scan_says_so(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config=CONFIG) as log:
        log.append(table(5_000, "1"))
        log.engine.catch_up()
        before = stores(tmp_path / "log")
        with log.store().all() as entries:
            next(entries)
            with exhausted(), pytest.raises(StorageFailed, match="Too many open files"):
                list(entries)
        assert len(list(log.store().all())) == 5_000
        assert stores(tmp_path / "log") == before


@pytest.mark.parametrize("count", [3, 30_000], ids=["a few rows", "a whole file"])
def test_applying_a_commit_says_so_and_goes_on_with_the_same_store(tmp_path: Path, count: int) -> None:
    with Changelog.open(tmp_path / "log", config=CONFIG) as log:
        before = filled(log)
        with exhausted():
            log.append(table(count, "2"))
            with pytest.raises(StorageFailed, match="Too many open files"):
                log.get(b"k1")
        assert log.get(b"k1") == b"2"
        assert len(list(log.store().all())) == max(50, count)
        assert stores(tmp_path / "log") == before


def test_a_store_that_cannot_be_opened_now_is_opened_later(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config=CONFIG) as log:
        before = filled(log)
    with Changelog.open(tmp_path / "log") as log:
        with exhausted(), pytest.raises(StorageFailed, match="Too many open files"):
            log.get(b"k7")
        assert log.get(b"k7") == b"1"
        assert {*stores(tmp_path / "log").values()} == {*before.values()}


@pytest.mark.parametrize("fresh", [False, True], ids=["a commit is applied", "the stores are opened"])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (errno.EMFILE, "Too many open files in this process"),
        (errno.ENFILE, "Too many open files in the system"),
        (errno.EIO, "cannot be brought up to date"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_and_the_next_read_is_answered(
    tmp_path: Path, error: int, told: str, fresh: bool
) -> None:
    files = Limited()
    with Changelog.open(tmp_path / "log", config=CONFIG, files=files) as log:
        before = {*filled(log).values()}
    with Changelog.open(tmp_path / "log", files=files) as log:
        if not fresh:
            log.engine.catch_up()
        files.error = error
        refuses_then_answers(log, told, lambda: setattr(files, "error", None))
        assert {*stores(tmp_path / "log").values()} == before


def test_a_database_that_could_not_write_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB accepts no more writes after one that failed, until it is opened again."""
    failed: set[Database] = set()
    full = threading.Event()
    write, ingest = Database.write, Database.ingest

    def refused(of: Callable[..., None]) -> Callable[..., None]:
        def writing(self: Database, what: Any) -> None:
            if full.is_set() or self in failed:
                failed.add(self)
                raise unusable(Path("/x"), Exception(f"IO error: {os.strerror(errno.EMFILE)}"))
            of(self, what)

        return writing

    monkeypatch.setattr(Database, "write", refused(write))
    monkeypatch.setattr(Database, "ingest", refused(ingest))
    with Changelog.open(tmp_path / "log", config=CONFIG) as log:
        before = filled(log)
        full.set()
        refuses_then_answers(log, "Too many open files", full.clear)
        assert (len(failed), stores(tmp_path / "log")) == (1, before)
