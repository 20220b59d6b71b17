"""A point-in-time view of the last values of a partition, held by a RocksDB iterator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rocksdict import Rdict

from keyfold.statestore.keys.buffers import prefixed
from keyfold.statestore.keys.sort import key_order
from keyfold.statestore.kv.api import (
    LAST_RECORDS,
    Entries,
    Frozen,
    ReadOnlyStore,
    StoreBase,
    binary_array,
    check_arrow,
    check_bounds,
    check_key,
)
from keyfold.statestore.rocksdb.db import Cursor
from keyfold.statestore.rocksdb.format import (
    HEADER,
    PREFIX_BYTES,
    data_end,
    data_prefix,
    meta_key,
    unpack_meta,
)

#: The cursor tries this many steps to the next key before a seek, which costs as much as two or three steps.
_STEPS: Final = 2
#: The number of keys to look up before other readers of the cursor get a turn.
_TURN_KEYS: Final = 8_192
_INT32_MAX: Final = (1 << 31) - 1

#: The number of rows that a scan fetches at first, since most scans are short. It doubles up to the second.
_SCAN_ROWS_FIRST: Final = 16
_SCAN_ROWS_MAX: Final = 1_024

#: Fewer keys than this are looked up in a snapshot one by one, in the given order.
_FEW_KEYS: Final = 16


class LastValuesSnapshot(StoreBase):
    """A point-in-time view of a partition. It keeps files and memory of that time alive until it is closed.

    With `owns` it closes the cursor, which several partitions can share.
    """

    def __init__(self, cursor: RecordCursor, partition: int, *, owns: bool = True) -> None:
        self._cursor = cursor
        self._partition = partition
        self._prefix = data_prefix(partition)
        self._owns = owns

    @property
    def applied(self) -> int:
        """`LastValues.applied` at the time of the snapshot."""
        record = self._cursor.value(meta_key(self._partition))
        return 0 if record is None else unpack_meta(record)[2]

    def get(self, key: bytes) -> bytes | None:
        check_key(key)
        record = self._cursor.value(self._prefix + key)
        return None if record is None else record[HEADER.size :]

    def get_record(self, key: bytes) -> tuple[int, int, bytes] | None:
        check_key(key)
        record = self._cursor.value(self._prefix + key)
        return None if record is None else (*HEADER.unpack_from(record), record[HEADER.size :])

    def get_records(self, keys: pa.Array) -> pa.RecordBatch:
        self._check_open()
        return self._cursor.records(self._prefix, check_arrow(keys))

    def _get_list(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if len(keys) < _FEW_KEYS:
            return super()._get_list(keys)
        values: list[bytes | None] = self._get_array(pa.array(keys, pa.binary())).to_pylist()
        return values

    def _get_array(self, keys: pa.Array) -> pa.Array:
        return self._cursor.records(self._prefix, keys).column("value")

    def range(self, from_: bytes | None = None, to: bytes | None = None) -> Entries[bytes, bytes]:
        self._check_open()
        check_bounds(from_, to)
        rows = rows_between(self._cursor, self._partition, from_, to)
        return Entries((key, record[HEADER.size :]) for key, record in rows)

    def records(
        self, from_: bytes | None = None, to: bytes | None = None
    ) -> Entries[bytes, tuple[int, int, bytes]]:
        self._check_open()
        check_bounds(from_, to)
        rows = rows_between(self._cursor, self._partition, from_, to)
        return Entries((key, (*HEADER.unpack_from(r), r[HEADER.size :])) for key, r in rows)

    def snapshot(self) -> ReadOnlyStore:
        """A view of this snapshot, valid as long as this one."""
        self._check_open()
        return Frozen(self, owns=False)

    def close(self) -> None:
        if self._owns:
            self._cursor.close()
        super().close()


def rows_between(
    cursor: Cursor, partition: int, from_: bytes | None, to: bytes | None
) -> Iterator[tuple[bytes, bytes]]:
    start: bytes | None = data_prefix(partition) + (from_ or b"")
    end = data_end(partition) if to is None else data_prefix(partition) + to
    rows_max = _SCAN_ROWS_FIRST
    while start is not None:
        rows, start = cursor.run(start, end, rows_max)
        yield from rows
        rows_max = min(2 * rows_max, _SCAN_ROWS_MAX)


class RecordCursor(Cursor):
    """A cursor whose values are complete records: offset, timestamp, value."""

    def __init__(self, db: Rdict, directory: Path) -> None:
        super().__init__(db, directory, key_skip=PREFIX_BYTES, value_skip=0)

    def records(self, prefix: bytes, keys: pa.Array) -> pa.RecordBatch:
        """The last records of `keys` (`binary`, without nulls) of the partition with this prefix, with the
        columns of `LAST_RECORDS`.

        Keys are read in sort order, in which the next one is often near.
        """
        order = key_order(keys)
        stored = prefixed(prefix, keys.take(pa.array(order)))
        found: list[bytes | None] = []
        for start in range(0, len(stored), _TURN_KEYS):
            found += self._values(stored.slice(start, _TURN_KEYS).to_pylist())
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return unpacked(binary_array(found).take(pa.array(back)))

    def _values(self, ascending: list[bytes]) -> list[bytes | None]:
        found: list[bytes | None] = []
        add = found.append
        with self._moving:
            iterator = self._moved(ascending[0])
            seek, at_key, value, forward = iterator.seek, iterator.key, iterator.value, iterator.next
            at = at_key()
            for key in ascending:
                steps = _STEPS
                while at is not None and at < key:
                    if steps:
                        forward()
                    else:
                        seek(key)
                    steps -= 1
                    at = at_key()
                add(value() if at == key else None)
            if at is None:
                self._check(iterator)
        return found


def unpacked(stored: pa.Array) -> pa.RecordBatch:
    """The columns of `LAST_RECORDS` from stored records, null for a missing record."""
    heads = pc.binary_slice(stored, 0, HEADER.size)
    there = stored.is_valid().to_numpy(zero_copy_only=False)
    numbers = np.zeros((len(stored), 2), np.int64)
    if there.any():
        whole = heads.drop_null()
        numbers[there] = np.frombuffer(whole.buffers()[2], "<i8", 2 * len(whole)).reshape(-1, 2)
    absent = ~there
    columns = [pa.array(numbers[:, place], pa.int64(), mask=absent) for place in (0, 1)]
    values = pc.binary_slice(stored, HEADER.size, _INT32_MAX)
    return pa.RecordBatch.from_arrays([*columns, values], schema=LAST_RECORDS)
