"""The last value of every key of one partition, in RocksDB: key -> (offset, timestamp, value).

The store is disposable: the log is the truth. It holds the fold of the log up to `applied`, the next offset
to apply, and says so itself: `applied` is written in the same RocksDB write batch, or in the same ingested
file, as the rows it speaks of. There is no write-ahead log. After kill -9 or power loss the store is what it
was after some earlier `apply`, never something between two, and the caller applies the log from `applied` on.
Whatever is wrong with a store is `StoreUnusable`, and the caller builds another in a new directory.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from rocksdict import Options, Rdict, WriteBatch

from keyfold.statestore.contract import Entries, StoreBase, check_bounds, check_key, closed
from keyfold.statestore.errors import KeyfoldError
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.keybytes import prefixed
from keyfold.statestore.keyorder import key_order
from keyfold.statestore.lastsnapshot import LastValuesSnapshot, RecordCursor, rows_between
from keyfold.statestore.rocks import (
    CORES,
    FILES_OF_READ,
    FILES_OF_WRITTEN,
    REBUILT,
    Cursor,
    StoreUnusable,
    close_database,
    database_options,
    get_many,
    moving_ingestion,
    open_database,
    unusable,
)
from keyfold.statestore.sst import SortedFile
from keyfold.statestore.storeformat import (
    DATA,
    FORMAT_VERSION,
    HEADER,
    META_KEY,
    Identity,
    meta_row,
    pack_meta,
    put_rows,
    sorted_rows,
    unpack_meta,
    values_of,
)

__all__ = ["Identity", "LastValues", "LastValuesSnapshot", "StoreUnusable"]

#: From so many rows on a sorted file is built and ingested, below they go into a write batch. At 5,000 rows
#: both cost the same; at 100,000 the file takes a third of the time and never holds the interpreter for long.
INGEST_ROWS = 20_000

#: The file that is built to be ingested. RocksDB leaves names alone that are not its own.
_LOAD_FILE = "load.tmp"


class LastValues(StoreBase):
    """The last values of one partition. One thread applies, any number may read meanwhile.

    A `get` sees one state, and so does a `get_all` of up to 4,000 keys; a larger one is split over the cores
    and may see an `apply` in between. An iterator and a `snapshot` always see one state.
    """

    def __init__(self, directory: Path, files: Files, db: Rdict, options: Options) -> None:
        """For `open` only."""
        self._directory = directory
        self._files = files
        self._db: Rdict | None = db
        self._options = options
        self._applied = 0
        self._resting = True
        self._writing = threading.Lock()
        self._viewing = threading.Lock()
        self._cursors: weakref.WeakSet[Cursor] = weakref.WeakSet()

    @classmethod
    def open(
        cls,
        directory: Path,
        identity: Identity | None,
        *,
        files: Files = LOCAL,
    ) -> LastValues:
        """The store in `directory`, made if missing; of any identity, and only if it is there, where none is
        given. Raises `StoreUnusable`.
        """
        try:
            files.make_directory(directory)
        except OSError as error:
            raise unusable(directory, error) from error
        options = database_options()
        db = open_database(directory, options)
        store = cls(directory, files, db, options)
        try:
            store._begin(identity)
        except BaseException:
            store._release()
            raise
        return store

    def _begin(self, identity: Identity | None) -> None:
        """Check that the store is the one asked for. A new one has no meta record before its first apply."""
        with self.snapshot() as snapshot:
            record = snapshot.meta()
            if record is not None:
                self._identity, self._applied = self._check_meta(record, identity)
                return
            if identity is None:
                raise self._refused("a meta record", "none")
            with snapshot.all() as rows:
                if next(rows, None) is not None:
                    raise self._refused("a meta record", "rows without one")
        self._identity = identity

    def _check_meta(self, record: bytes, asked: Identity | None) -> tuple[Identity, int]:
        try:
            version, identity, applied = unpack_meta(record)
        except ValueError as error:
            raise self._refused("a meta record", error) from None
        if identity is None:
            raise self._refused(f"format version {FORMAT_VERSION}", f"format version {version}")
        if asked is not None and identity != asked:
            raise self._refused(asked, identity)
        return identity, applied

    # -- writing ---------------------------------------------------------------------------------------------

    @property
    def applied(self) -> int:
        """The next offset to apply: the store is the fold of the log below it."""
        return self._applied

    def apply(self, last: pa.RecordBatch, applied: int) -> None:
        """Fold a range of the log in. It becomes visible at once, and survives a crash whole or not at all.

        Args:
            last: `offset: int64, timestamp: int64 or timestamp[ms], key: binary, value: binary`; one row per
                key, its last record in a range of the log that begins at `self.applied` or before it. A null
                value is a delete.
            applied: the end of that range; `self.applied` becomes it.

        A range can come again, or overlap with those before; that changes nothing. All is durable after
        `flush`. Raises `StoreUnusable`, and `ValueError` for rows that are not as said above: nothing has
        changed then.
        """
        with self._writing:
            db = self._opened()
            if applied <= self._applied:
                return
            rows = _checked(last, applied)
            self._rest(False)
            if rows.num_rows < INGEST_ROWS:
                self._write(db, rows, applied)
            else:
                self._ingest(db, rows, applied)
            self._applied = applied

    def _write(self, db: Rdict, rows: pa.RecordBatch, applied: int) -> None:
        """As one write batch: it goes into one memtable, which is flushed whole and after those before it."""
        batch = WriteBatch(raw_mode=True)
        put_rows(batch, rows)
        batch[META_KEY] = pack_meta(self._identity, applied)
        try:
            db.write(batch)
        except Exception as error:
            raise self._failed(error) from error

    def _ingest(self, db: Rdict, rows: pa.RecordBatch, applied: int) -> None:
        """As one sorted file: one entry of RocksDB's manifest takes it over, after a flush of older rows."""
        path = self._directory / _LOAD_FILE
        self._write_file(path, rows, applied)
        self._take_over(db, path)

    def _write_file(self, path: Path, rows: pa.RecordBatch, applied: int) -> None:
        """A sorted file to be ingested.

        RocksDB takes it over by a hard link, and a kill can leave both names of what is then live data: to
        write to this one again would empty the live file.
        """
        sorted_file = SortedFile()
        try:
            if self._files.exists(path):
                self._files.unlink(path)
            file = self._files.create(path)
            try:
                for part in (meta_row(self._identity, applied), sorted_rows(rows)):
                    for blocks in sorted_file.add(part):
                        self._files.append(file, [blocks])
                self._files.append(file, sorted_file.finish())
            finally:
                self._files.close(file)
        except Exception as error:
            raise self._failed(error) from error

    def _take_over(self, db: Rdict, path: Path) -> None:
        """RocksDB syncs the file that it takes over by a link."""
        try:
            db.ingest_external_file([str(path)], moving_ingestion())
        except Exception as error:
            raise self._failed(error) from error

    def load(self, ranges: Iterable[tuple[list[pa.RecordBatch], int]]) -> None:
        """`apply` for much at once: the rows of several ranges, one behind the other, are sorted and written
        on all cores, and RocksDB does not begin to compact before the last.

        Args:
            ranges: what `apply` takes, the rows in batches; so many as there are cores, and one more, are
                held at a time.

        Raises as `apply`, with a part of the ranges applied, or none; and what `ranges` raises.
        """
        waiting: deque[tuple[Path, int, Future[None]]] = deque()

        def take_over_first() -> None:
            path, applied, written = waiting.popleft()
            written.result()
            self._take_over(db, path)
            self._applied = applied

        with self._writing, ThreadPoolExecutor(CORES, thread_name_prefix="keyfold-load") as pool:
            db = self._opened()
            self._set("disable_auto_compactions", "true")
            try:
                for number, (batches, applied) in enumerate(ranges):
                    path = self._directory / f"load-{number % (CORES + 1)}.tmp"
                    waiting.append((path, applied, pool.submit(self._prepare, path, batches, applied)))
                    if len(waiting) > CORES:
                        take_over_first()
                while waiting:
                    take_over_first()
            finally:
                self._set("disable_auto_compactions", "false")
                self._rest(True)

    def _prepare(self, path: Path, batches: list[pa.RecordBatch], applied: int) -> None:
        self._write_file(path, _checked(pa.concat_batches(batches), applied), applied)

    def rest(self) -> None:
        """Nothing is applied for now: RocksDB may put its files in better order for who reads, meanwhile.

        Raises `StoreUnusable`.
        """
        with self._writing:
            self._rest(True)

    def _rest(self, resting: bool) -> None:
        if resting != self._resting:
            self._set("level0_file_num_compaction_trigger", FILES_OF_READ if resting else FILES_OF_WRITTEN)
            self._resting = resting

    def _set(self, option: str, value: object) -> None:
        db = self._opened()
        try:
            db.set_options({option: str(value)})
        except Exception as error:
            raise self._failed(error) from error

    def flush(self) -> None:
        """All that was applied survives a crash after this returns. Raises `StoreUnusable`."""
        db = self._opened()
        try:
            db.flush()
        except Exception as error:
            raise self._failed(error) from error

    # -- reading ---------------------------------------------------------------------------------------------

    def get(self, key: bytes) -> bytes | None:
        record = self._record(key)
        return None if record is None else record[HEADER.size :]

    def get_record(self, key: bytes) -> tuple[int, int, bytes] | None:
        """Offset, timestamp in ms and value of the last record of `key`; None where there is none."""
        record = self._record(key)
        return None if record is None else (*HEADER.unpack_from(record), record[HEADER.size :])

    def _record(self, key: bytes) -> bytes | None:
        db = self._opened()
        check_key(key)
        try:
            found: bytes | None = db.get(DATA + key)
        except Exception as error:
            raise self._failed(error) from error
        return found

    def _get_list(self, keys: Sequence[bytes]) -> list[bytes | None]:
        records = self._records([DATA + key for key in keys])
        return [None if record is None else record[HEADER.size :] for record in records]

    def _get_array(self, keys: pa.Array) -> pa.Array:
        return values_of(self._records(prefixed(DATA, keys).to_pylist()))

    def _records(self, stored: list[bytes]) -> list[bytes | None]:
        db = self._opened()
        try:
            return get_many(db, stored)
        except Exception as error:
            raise self._failed(error) from error

    def range(self, from_: bytes | None = None, to: bytes | None = None) -> Entries[bytes, bytes]:
        check_bounds(from_, to)
        cursor = self._cursor()
        return Entries(rows_between(cursor, from_, to), cursor.close)

    def snapshot(self) -> LastValuesSnapshot:
        with self._viewing:
            cursor = RecordCursor(self._opened(), self._directory)
            self._cursors.add(cursor)
        return LastValuesSnapshot(cursor)

    def _cursor(self) -> Cursor:
        with self._viewing:
            cursor = Cursor(self._opened(), self._directory, key_skip=len(DATA), value_skip=HEADER.size)
            self._cursors.add(cursor)
        return cursor

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush and close; iterators and snapshots end with it. Raises `StoreUnusable` if that failed."""
        with self._writing:
            if self._db is None:
                return
            try:
                self.flush()
            finally:
                self._release()

    def destroy(self) -> None:
        """Close, and remove the directory."""
        with self._writing:
            self._release()
        self._files.remove_tree(self._directory)

    def _release(self) -> None:
        """Let go of RocksDB and of its lock."""
        with self._viewing:
            db, self._db = self._db, None
            for cursor in list(self._cursors):
                cursor.close()
        if db is not None:
            close_database(db, self._directory)

    def _opened(self) -> Rdict:
        db = self._db
        if db is None:
            raise closed("store")
        return db

    def _failed(self, error: Exception) -> KeyfoldError:
        return closed("store") if self._db is None else unusable(self._directory, error)

    def _refused(self, expected: object, found: object) -> StoreUnusable:
        return StoreUnusable(
            "this is not the last-value store that was asked for",
            path=self._directory,
            expected=expected,
            found=found,
            remedy=REBUILT,
        )


def in_key_order(last: pa.RecordBatch) -> pa.RecordBatch:
    """The rows sorted by key; themselves where they are."""
    keys = last.column("key")
    if keys.null_count:
        raise ValueError("a row has no key")
    if _ascend(keys):
        return last
    rows = last.take(pa.array(key_order(keys)))
    if not _ascend(rows.column("key")):
        raise ValueError("two rows have the same key: fold the range first")
    return rows


def _ascend(keys: pa.Array) -> bool:
    ascending: bool = pc.all(pc.less(keys[:-1], keys[1:]), min_count=0).as_py()
    return ascending


def _checked(last: pa.RecordBatch, applied: int) -> pa.RecordBatch:
    """In key order. `ValueError`: they cannot be the fold of a range that ends at `applied`."""
    end = pc.max(last.column("offset")).as_py()
    if end is not None and end >= applied:
        raise ValueError(f"offset {end} is not below {applied}, the end of its range")
    return in_key_order(last)
