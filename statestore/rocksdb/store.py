"""The last value of every key of a partition, in RocksDB: key -> (offset, timestamp, value).

The store is disposable; the log is the source of truth. The store holds the fold of the log up to `applied`,
the next offset to apply. `applied` is written in the same RocksDB write batch, or in the same ingested file,
as its rows. There is no write-ahead log. After kill -9 or power loss the store is as it was after some
earlier `apply`, never in between, and the caller applies the log from `applied` on. Any problem with a store
raises `StoreUnusable`, and the caller builds another one in a new directory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from rocksdict import WriteBatch

from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.keys.buffers import prefixed
from keyfold.statestore.keys.sort import key_order
from keyfold.statestore.kv.api import Entries, StoreBase, check_bounds, check_key
from keyfold.statestore.rocksdb.database import Database
from keyfold.statestore.rocksdb.db import CORES, StoreUnusable
from keyfold.statestore.rocksdb.format import (
    HEADER,
    StoreId,
    data_end,
    data_prefix,
    meta_key,
    meta_rows,
    pack_meta,
    put_rows,
    sorted_rows,
    values_of,
)
from keyfold.statestore.rocksdb.snapshot import LastValuesSnapshot, rows_between

__all__ = ["LastValues", "LastValuesSnapshot", "StoreId", "StoreUnusable", "apply_together"]

#: From this many rows on, a sorted file is built and ingested; fewer rows go into a write batch. At 5,000
#: rows both cost the same. At 100,000 the file takes a third of the time and never holds the GIL for long.
INGEST_ROWS = 20_000

#: The file that is built for ingestion. RocksDB ignores file names that are not its own.
_LOAD_FILE = "load.tmp"


class LastValues(StoreBase):
    """The last values of one partition. One thread applies; any number of threads read at the same time.

    A `get` sees one state, and so does a `get_all` of up to 4,000 keys. A larger `get_all` is split over the
    cores and may see an `apply` in between. An iterator and a `snapshot` always see one state.

    Args:
        database: Holds the rows, possibly with those of other partitions. `close` and `destroy` affect all.
        identity: What the rows were computed from.
        applied: The offset up to which they were applied.
    """

    def __init__(self, database: Database, identity: StoreId, applied: int) -> None:
        self._database = database
        self._identity = identity
        self._applied = applied
        self._prefix = data_prefix(identity.partition)

    @classmethod
    def open(cls, directory: Path, identity: StoreId | None, *, files: Files = LOCAL) -> LastValues:
        """Open the single store in `directory`, creating it if needed. Without an identity it must exist and
        may have any identity. Raises `StoreUnusable`.
        """
        database = Database.open(directory, files=files)
        try:
            # A new store has no meta record before its first apply.
            folds = list(database.folds().values())
            found, applied = folds[0] if folds else (identity, 0)
            if len(folds) > 1:
                raise database.refused("a store of one partition", f"a store of {len(folds)} partitions")
            if found is None:
                raise database.refused("a meta record", "none")
            if identity not in (None, found):
                raise database.refused(identity, found)
            return cls(database, found, applied)
        except BaseException:
            database.release()
            raise

    # -- writing ---------------------------------------------------------------------------------------------

    @property
    def applied(self) -> int:
        """The next offset to apply: the store is the fold of the log below it."""
        return self._applied

    @property
    def identity(self) -> StoreId:
        """What the rows were computed from."""
        return self._identity

    def apply(self, last: pa.RecordBatch, applied: int) -> None:
        """Apply a range of the log atomically. It is visible at once, and durable after `flush`.

        Args:
            last: `offset: int64, timestamp: int64 or timestamp[ms], key: binary, value: binary`; one row per
                key, its last record in a range of the log that begins at or before `self.applied`. A null
                value is a delete.
            applied: The end of that range, and the new value of `self.applied`.

        Applying a range twice, or overlapping ranges, gives the same result. Raises `StoreUnusable`, and
        `ValueError` for rows that break the rules above; then nothing has changed.
        """
        if applied > self._applied:
            _apply(self._database, self._prefix, _checked(last, applied), [(self, applied)])

    def invalidate(self) -> None:
        """Mark the rows as invalid before `begin_again` removes them."""
        self._applied = 0

    def begin_again(self, generation: int) -> None:
        """Remove all rows and start again from an empty store, with this generation.

        Until this returns, readers must not use what they find as last values. Raises `StoreUnusable`.
        """
        with self._database.writing:
            self.invalidate()
            self._identity = replace(self._identity, generation=generation)
            batch = WriteBatch(raw_mode=True)
            batch.delete_range(self._prefix, data_end(self._identity.partition))
            batch.delete(meta_key(self._identity.partition))
            self._database.write(batch)

    def load(self, ranges: Iterable[tuple[list[pa.RecordBatch], int]]) -> None:
        """Apply many consecutive ranges at once. Rows are sorted and written on all cores, and RocksDB starts
        to compact only after the last range.

        Args:
            ranges: The arguments of `apply`, with the rows in batches. One more range than there are cores is
                in memory at a time.

        Raises the same errors as `apply`, with some of the ranges applied, and any error of `ranges`.
        """
        database = self._database
        waiting: deque[tuple[int, Future[Path]]] = deque()

        def take_over_first() -> None:
            applied, written = waiting.popleft()
            database.ingest(written.result())
            self._applied = applied

        with database.writing, ThreadPoolExecutor(CORES, thread_name_prefix="keyfold-load") as pool:
            database.set("disable_auto_compactions", "true")
            try:
                for number, (batches, applied) in enumerate(ranges):
                    name = f"load-{number % (CORES + 1)}.tmp"
                    waiting.append((applied, pool.submit(self._prepare, name, batches, applied)))
                    if len(waiting) > CORES:
                        take_over_first()
                while waiting:
                    take_over_first()
            finally:
                database.set("disable_auto_compactions", "false")
                database.rest(True)

    def _prepare(self, name: str, batches: list[pa.RecordBatch], applied: int) -> Path:
        rows = _checked(pa.concat_batches(batches), applied)
        parts = [meta_rows([(self._identity, applied)]), sorted_rows(self._prefix, rows)]
        return self._database.write_file(name, parts)

    def rest(self) -> None:
        """Tell RocksDB that writes have paused, so that it compacts its files further for readers.

        Raises `StoreUnusable`.
        """
        with self._database.writing:
            self._database.rest(True)

    def flush(self) -> None:
        """Make everything applied so far durable. Raises `StoreUnusable`."""
        self._database.flush()

    # -- reading ---------------------------------------------------------------------------------------------

    def get(self, key: bytes) -> bytes | None:
        check_key(key)
        record = self._database.get(self._prefix + key)
        return None if record is None else record[HEADER.size :]

    def get_record(self, key: bytes) -> tuple[int, int, bytes] | None:
        """Offset, timestamp in ms and value of the last record of `key`; None if the key is missing."""
        check_key(key)
        record = self._database.get(self._prefix + key)
        return None if record is None else (*HEADER.unpack_from(record), record[HEADER.size :])

    def _get_list(self, keys: Sequence[bytes]) -> list[bytes | None]:
        prefix = self._prefix
        records = self._database.get_many([prefix + key for key in keys])
        return [None if record is None else record[HEADER.size :] for record in records]

    def _get_array(self, keys: pa.Array) -> pa.Array:
        return values_of(self._database.get_many(prefixed(self._prefix, keys).to_pylist()))

    def range(self, from_: bytes | None = None, to: bytes | None = None) -> Entries[bytes, bytes]:
        check_bounds(from_, to)
        cursor = self._database.scan()
        return Entries(rows_between(cursor, self._identity.partition, from_, to), cursor.close)

    def snapshot(self) -> LastValuesSnapshot:
        return LastValuesSnapshot(self._database.cursor(), self._identity.partition)

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush and close, together with iterators and snapshots. Raises `StoreUnusable` if that fails."""
        self._database.close()

    def destroy(self) -> None:
        """Close, then remove the directory."""
        self._database.destroy()


def apply_together(database: Database, rows: pa.RecordBatch, ends: Sequence[tuple[LastValues, int]]) -> None:
    """`LastValues.apply` for several partitions of one database, atomically.

    Args:
        rows: The same as for `apply`, with keys from `format.stored_keys`.
        ends: The stores, and the end of the range of each, which is above what it has applied.
    """
    _apply(database, b"", in_key_order(rows), ends)


def _apply(
    database: Database, prefix: bytes, rows: pa.RecordBatch, ends: Sequence[tuple[LastValues, int]]
) -> None:
    """Apply one write batch, or one sorted file. RocksDB makes either atomic."""
    with database.writing:
        database.rest(False)
        metas = [(store._identity, applied) for store, applied in ends]
        if rows.num_rows < INGEST_ROWS:
            batch = WriteBatch(raw_mode=True)
            put_rows(batch, prefix, rows)
            for identity, applied in metas:
                batch[meta_key(identity.partition)] = pack_meta(identity, applied)
            database.write(batch)
        else:
            parts = [meta_rows(metas), sorted_rows(prefix, rows)]
            database.ingest(database.write_file(_LOAD_FILE, parts))
        for store, applied in ends:
            store._applied = applied


def in_key_order(last: pa.RecordBatch) -> pa.RecordBatch:
    """The rows sorted by key; the same object if they already are."""
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
    """The rows in key order. Raises `ValueError` if they cannot be the fold of a range that ends at
    `applied`.
    """
    end = pc.max(last.column("offset")).as_py()
    if end is not None and end >= applied:
        raise ValueError(f"offset {end} is not below {applied}, the end of its range")
    return in_key_order(last)
