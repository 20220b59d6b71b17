"""A RocksDB database with the last values of one or many partitions: opening, writing, reading and closing.

All partitions of a changelog share one database. So a thousand partitions need no more descriptors, threads
and memory than one, and a snapshot of all partitions is one iterator.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from rocksdict import Options, Rdict, SstFileWriter, WriteBatch

from keyfold.statestore.errors import KeyfoldError
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.kv.api import closed
from keyfold.statestore.rocksdb.db import (
    FILES_OF_READ,
    FILES_OF_WRITTEN,
    REBUILT,
    Cursor,
    StoreUnusable,
    close_database,
    database_options,
    forbid_after_fork,
    get_many,
    moving_ingestion,
    open_database,
    takes_sorted_files,
    unusable,
)
from keyfold.statestore.rocksdb.format import (
    DATA,
    HEADER,
    META,
    PREFIX_BYTES,
    StoreId,
    data_end,
    partition_of_stored,
    unpack_meta,
)
from keyfold.statestore.rocksdb.snapshot import RecordCursor
from keyfold.statestore.rocksdb.sst_writer import Rows, SortedFile
from keyfold.statestore.segment.block import FORMAT_VERSION

C = TypeVar("C", bound=Cursor)

_META_ROWS = 1_024
_END = bytes([DATA[0] + 1])


#: All open databases of this process.
_open: weakref.WeakSet[Database] = weakref.WeakSet()


def _after_fork() -> None:
    """RocksDB's threads do not survive a fork. Closing a database of the parent would wait for them and write
    to the parent's files, so a child never releases it.
    """
    for database in _open:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(database))
    forbid_after_fork()


os.register_at_fork(after_in_child=_after_fork)


class Database:
    """An open RocksDB. One thread writes and holds `writing`; any number of threads read at the same time."""

    def __init__(self, directory: Path, files: Files, db: Rdict, options: Options) -> None:
        """For `open` only."""
        self.directory = directory
        self.writing = threading.RLock()
        self._files = files
        self._db: Rdict | None = db
        self._options = options
        self._resting = True
        self._viewing = threading.Lock()
        self._cursors: weakref.WeakSet[Cursor] = weakref.WeakSet()
        _open.add(self)

    @classmethod
    def open(cls, directory: Path, *, files: Files = LOCAL) -> Database:
        """Open the database in `directory`, creating it if needed. Raises `StoreUnusable`."""
        try:
            files.make_directory(directory, below=directory.parent)
        except OSError as error:
            raise unusable(directory, error) from error
        options = database_options()
        return cls(directory, files, open_database(directory, options), options)

    def folds(self) -> dict[int, tuple[StoreId, int]]:
        """Partition → the identity of its rows, and the offset up to which they are applied.

        Raises `StoreUnusable` for damage, another version, or rows without a meta record.
        """
        found: dict[int, tuple[StoreId, int]] = {}
        cursor = self.scan(0, 0)
        try:
            at: bytes | None = META
            while at is not None:
                rows, at = cursor.run(at, DATA, _META_ROWS)
                for key, record in rows:
                    partition, fold = self._fold(key, record)
                    found[partition] = fold
            # From the first row of each partition to the first one after all its rows.
            rows, _ = cursor.run(DATA, _END, 1)
            while rows:
                partition = partition_of_stored(rows[0][0])
                if partition not in found:
                    raise self.refused("a meta record", "rows without one")
                rows, _ = cursor.run(data_end(partition), _END, 1)
        except ValueError as error:
            raise self.refused("the rows of last values", error) from None
        finally:
            cursor.close()
        return found

    def _fold(self, key: bytes, record: bytes) -> tuple[int, tuple[StoreId, int]]:
        try:
            partition = partition_of_stored(key)
            version, identity, applied = unpack_meta(record)
        except ValueError as error:
            raise self.refused("a meta record", error) from None
        if identity is None:
            raise self.refused(f"format version {FORMAT_VERSION}", f"format version {version}")
        if len(key) != PREFIX_BYTES or identity.partition != partition:
            raise self.refused("a meta record", f"one of partition {identity.partition} for {partition}")
        return partition, (identity, applied)

    # -- writing ---------------------------------------------------------------------------------------------

    def write(self, batch: WriteBatch) -> None:
        """Apply one write batch. It goes into one memtable, which is flushed whole and in order."""
        db = self._opened()
        try:
            db.write(batch)
        except Exception as error:
            raise self.failed(error) from error

    def write_file(self, name: str, parts: Iterable[Rows]) -> Path:
        """Write a sorted file that is then ingested, and from then on belongs to RocksDB.

        RocksDB ingests it by a hard link, and a kill can leave both names of live data: writing to this name
        again would truncate the live file.
        """
        path = self.directory / name
        try:
            if self._files.exists(path):
                self._files.unlink(path)
            if takes_sorted_files(version("rocksdict")):
                self._write_sorted(path, parts)
            else:
                self._write_by_rocksdb(path, parts)
        except Exception as error:
            raise self.failed(error) from error
        return path

    def _write_sorted(self, path: Path, parts: Iterable[Rows]) -> None:
        sorted_file = SortedFile()
        file = self._files.create(path)
        try:
            for part in parts:
                for blocks in sorted_file.add(part):
                    self._files.append(file, [blocks])
            self._files.append(file, sorted_file.finish())
        finally:
            self._files.close(file)

    def _write_by_rocksdb(self, path: Path, parts: Iterable[Rows]) -> None:
        """The same rows, each by a call of its own: many times slower, but right in any version."""
        by_rocksdb = SstFileWriter(self._options)
        by_rocksdb.open(str(path))
        for part in parts:
            for some in part.parts():
                for key, value in some.entries():
                    if value is None:
                        del by_rocksdb[key]
                    else:
                        by_rocksdb[key] = value
        by_rocksdb.finish()

    def ingest(self, path: Path) -> None:
        """Ingest a sorted file atomically, with one entry of RocksDB's manifest, after a flush of older rows
        in its range. RocksDB syncs the file.
        """
        db = self._opened()
        try:
            db.ingest_external_file([str(path)], moving_ingestion())
        except Exception as error:
            raise self.failed(error) from error

    def rest(self, resting: bool) -> None:
        """Tell RocksDB whether writes have paused. While they have, it compacts its files further for
        readers.

        Raises `StoreUnusable`.
        """
        if resting != self._resting:
            self.set("level0_file_num_compaction_trigger", FILES_OF_READ if resting else FILES_OF_WRITTEN)
            self._resting = resting

    def set(self, option: str, value: object) -> None:
        db = self._opened()
        try:
            db.set_options({option: str(value)})
        except Exception as error:
            raise self.failed(error) from error

    def flush(self) -> None:
        """Make everything written so far durable. Raises `StoreUnusable`."""
        db = self._opened()
        try:
            db.flush()
        except Exception as error:
            raise self.failed(error) from error

    # -- reading ---------------------------------------------------------------------------------------------

    def get(self, key: bytes) -> bytes | None:
        db = self._opened()
        try:
            found: bytes | None = db.get(key)
        except Exception as error:
            raise self.failed(error) from error
        return found

    def get_many(self, keys: list[bytes]) -> list[bytes | None]:
        db = self._opened()
        try:
            return get_many(db, keys)
        except Exception as error:
            raise self.failed(error) from error

    def cursor(self) -> RecordCursor:
        """A cursor over the current records of all partitions. Raises `StoreUnusable` or `StoreClosed`."""
        return self._watched(lambda db: RecordCursor(db, self.directory))

    def scan(self, key_skip: int = PREFIX_BYTES, value_skip: int = HEADER.size) -> Cursor:
        """The same, without the first bytes of keys and values: by default user keys and bare values."""
        return self._watched(lambda db: Cursor(db, self.directory, key_skip=key_skip, value_skip=value_skip))

    def _watched(self, make: Callable[[Rdict], C]) -> C:
        with self._viewing:
            cursor = make(self._opened())
            self._cursors.add(cursor)
        return cursor

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush and close, together with iterators and snapshots. Raises `StoreUnusable` if that fails."""
        with self.writing:
            if self._db is None:
                return
            try:
                self.flush()
            finally:
                self.release()

    def destroy(self) -> None:
        """Close, then remove the directory."""
        with self.writing:
            self.release()
        self._files.remove_tree(self.directory)

    def release(self) -> None:
        """Release RocksDB and its lock, without a flush."""
        with self._viewing:
            db, self._db = self._db, None
            for cursor in list(self._cursors):
                cursor.close()
        if db is not None:
            close_database(db, self.directory)

    def _opened(self) -> Rdict:
        db = self._db
        if db is None:
            raise closed("store")
        return db

    def failed(self, error: Exception) -> KeyfoldError:
        """The keyfold error for an error of RocksDB."""
        return closed("store") if self._db is None else unusable(self.directory, error)

    def refused(self, expected: object, found: object) -> StoreUnusable:
        return StoreUnusable(
            "the last-value store has another identity or version",
            path=self.directory,
            expected=expected,
            found=found,
            remedy=REBUILT,
        )
