"""A key-value store over Arrow columns, for key lookups by readers in other processes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.keys.sort import key_order
from keyfold.statestore.kv.api import Entries, ReadOnlyStore, StoreBase, check_bounds, check_key, joined

#: From this many keys on, `get_all` hashes all keys of the store instead of searching one by one.
_MANY: Final = 1000
#: The number of entries that are converted from Arrow at a time.
_ROWS: Final = 4096


class ArrowStore(StoreBase):
    """A read-only store in memory, of rows with unique keys.

    Args:
        rows: Columns `key` and `value`, binary without nulls, in any order.
    """

    def __init__(self, rows: pa.Table) -> None:
        keys = _joined(rows.column("key").cast(pa.large_binary()))
        order = pa.array(key_order(keys))
        self._keys: pa.Array = keys.take(order)
        self._values: pa.Array = _joined(rows.column("value").cast(pa.large_binary()).take(order))

    def get(self, key: bytes) -> bytes | None:
        self._check_open()
        check_key(key)
        at = self._place(key)
        if at < len(self._keys) and self._keys[at].as_py() == key:
            value: bytes = self._values[at].as_py()
            return value
        return None

    def _get_list(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if len(keys) < _MANY:
            return super()._get_list(keys)
        asked = pa.array(keys, pa.large_binary())
        found: list[bytes | None] = self._values.take(pc.index_in(asked, value_set=self._keys)).to_pylist()
        return found

    def range(self, from_: bytes | None = None, to: bytes | None = None) -> Entries[bytes, bytes]:
        self._check_open()
        check_bounds(from_, to)
        start = 0 if from_ is None else self._place(from_)
        stop = len(self._keys) if to is None else self._place(to)
        return Entries(chain.from_iterable(self._pieces(start, stop)))

    def snapshot(self) -> ReadOnlyStore:
        """The same entries, which cannot change. Close it separately."""
        self._check_open()
        copy = ArrowStore.__new__(ArrowStore)
        copy._keys, copy._values = self._keys, self._values
        return copy

    def _place(self, key: bytes) -> int:
        return bisect_left(self._keys, key, key=lambda scalar: scalar.as_py())

    def _pieces(self, start: int, stop: int) -> Iterator[Iterator[tuple[bytes, bytes]]]:
        for first in range(start, stop, _ROWS):
            self._check_open()
            count = min(_ROWS, stop - first)
            keys, values = self._keys.slice(first, count), self._values.slice(first, count)
            yield zip(keys.to_pylist(), values.to_pylist(), strict=True)


def _joined(column: pa.ChunkedArray) -> pa.Array:
    return joined(column.chunks) if column.num_chunks else pa.array([], column.type)
