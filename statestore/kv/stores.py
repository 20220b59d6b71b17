"""The key-value stores that users see.

    MemoryStore          a sorted store in memory, for tests and small data
    PartitionedStore     one store over the stores of several partitions
    Overlay              uncommitted changes over a base store that is only read
    TypedStore           any of them, with serdes instead of bytes

`keyfold.statestore.kv.api` describes their common contract.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keyfold.statestore.kv.api import (
    Entries,
    Frozen,
    KeyValueStore,
    ReadOnlyStore,
    RecordStore,
    StoreBase,
    StoreClosed,
    WritableBase,
    binary_array,
    check_arrow,
    check_bounds,
    check_key,
    check_value,
    joined,
)
from keyfold.statestore.kv.serdes import TypedStore, TypedView

__all__ = [
    "Entries",
    "KeyValueStore",
    "MemoryStore",
    "Overlay",
    "PartitionedStore",
    "ReadOnlyStore",
    "RecordStore",
    "StoreClosed",
    "TypedStore",
    "TypedView",
]

V = TypeVar("V")

#: Up to this many new keys are inserted one by one; more are sorted at once.
_INSERT_KEYS_MAX = 8

CHANGES_SCHEMA = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])


class _SortedDict(Generic[V]):
    """A dict that can be iterated in key order. Keys are sorted on demand, not at every write."""

    __slots__ = ("_keys", "_new", "entries")

    def __init__(self, entries: dict[bytes, V] | None = None) -> None:
        self.entries: dict[bytes, V] = entries or {}
        self._keys: list[bytes] = []
        self._new: list[bytes] = list(self.entries)

    def set(self, key: bytes, value: V) -> None:
        if key not in self.entries:
            self._new.append(key)
        self.entries[key] = value

    def update(self, keys: list[bytes], values: list[V]) -> None:
        """`set` for many."""
        entries = self.entries
        if entries:
            self._new.extend(key for key in dict.fromkeys(keys) if key not in entries)
            entries.update(zip(keys, values, strict=True))
        else:
            entries.update(zip(keys, values, strict=True))
            self._new.extend(entries)

    def discard(self, key: bytes) -> None:
        if self.entries.pop(key, None) is not None:
            keys = self._sorted()
            del keys[bisect_left(keys, key)]

    def slice(self, from_: bytes | None, to: bytes | None) -> list[tuple[bytes, V]]:
        """The entries with `from_` <= key < `to`, in order, as they are now."""
        keys = self._sorted()
        first = 0 if from_ is None else bisect_left(keys, from_)
        end = len(keys) if to is None else bisect_left(keys, to)
        return [(key, self.entries[key]) for key in keys[first:end]]

    def _sorted(self) -> list[bytes]:
        if len(self._new) <= _INSERT_KEYS_MAX:
            for key in self._new:
                insort(self._keys, key)
        else:
            self._keys.extend(self._new)
            self._keys.sort()
        self._new.clear()
        return self._keys


class MemoryStore(WritableBase):
    """A store in memory. An iterator copies the entries that it returns."""

    def __init__(self, entries: Mapping[bytes, bytes] | Iterable[tuple[bytes, bytes]] = ()) -> None:
        self._entries: _SortedDict[bytes] = _SortedDict()
        self.put_all(entries)

    def get(self, key: bytes) -> bytes | None:
        self._check_open()
        check_key(key)
        return self._entries.entries.get(key)

    def range(self, from_: bytes | None = None, to: bytes | None = None) -> Entries[bytes, bytes]:
        self._check_open()
        check_bounds(from_, to)
        return Entries(iter(self._entries.slice(from_, to)))

    def put(self, key: bytes, value: bytes) -> None:
        self._check_open()
        check_key(key)
        check_value(value)
        self._entries.set(key, value)

    def delete(self, key: bytes) -> None:
        self._check_open()
        check_key(key)
        self._entries.discard(key)

    def snapshot(self) -> ReadOnlyStore:
        self._check_open()
        return Frozen(MemoryStore(self._entries.entries), owns=True)


class PartitionedStore(StoreBase):
    """One store over the stores of all partitions. Ranges are merged in key order.

    `partition_of` returns the partition of a key, from 0 up to the number of stores. `partitions_of`, if
    given, returns the partitions of many keys at once. A snapshot is one snapshot per partition: pause
    commits that may be applied while it is taken.
    """

    def __init__(
        self,
        stores: Sequence[ReadOnlyStore],
        partition_of: Callable[[bytes], int],
        partitions_of: Callable[[pa.Array], npt.NDArray[np.int32]] | None = None,
        *,
        owns: bool = False,
    ) -> None:
        self._stores = stores
        self._partition_of = partition_of
        self._many_partitions_of = partitions_of
        self._owns = owns

    def _partitions_of(self, keys: pa.Array) -> npt.NDArray[np.int32]:
        if self._many_partitions_of is not None:
            return self._many_partitions_of(keys)
        return np.fromiter(map(self._partition_of, keys.to_pylist()), np.int32, len(keys))

    def get(self, key: bytes) -> bytes | None:
        self._check_open()
        check_key(key)
        return self._stores[self._partition_of(key)].get(key)

    def _get_list(self, keys: Sequence[bytes]) -> list[bytes | None]:
        positions: dict[int, list[int]] = {}
        for position, partition in enumerate(map(self._partition_of, keys)):
            positions.setdefault(partition, []).append(position)
        values: list[bytes | None] = [None] * len(keys)
        for partition, mine in positions.items():
            found = self._stores[partition].get_all([keys[position] for position in mine])
            for position, value in zip(mine, found, strict=True):
                values[position] = value
        return values

    def _get_array(self, keys: pa.Array) -> pa.Array:
        return self._scattered(keys, lambda store, mine: store.get_all(mine))

    def _scattered(self, keys: pa.Array, ask: Callable[[Any, pa.Array], Any]) -> Any:
        """The results of `ask` for each partition's keys, an array or a batch, in the order of `keys`."""
        numbers = self._partitions_of(keys)
        order = np.argsort(numbers, kind="stable")
        counts = np.bincount(numbers, minlength=1)
        sorted_keys = keys.take(pa.array(order))
        parts, start = [], 0
        # Without keys, the first partition returns an empty result of the right type.
        for partition in np.flatnonzero(counts).tolist() or [0]:
            end = start + int(counts[partition])
            parts.append(ask(self._stores[partition], sorted_keys.slice(start, end - start)))
            start = end
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return joined(parts).take(pa.array(back))

    def range(self, from_: bytes | None = None, to: bytes | None = None) -> Entries[bytes, bytes]:
        self._check_open()
        check_bounds(from_, to)
        with ExitStack() as opened:
            parts = [opened.enter_context(store.range(from_, to)) for store in self._stores]
            # A key is in one partition only, so the merge never compares values.
            return Entries(heapq.merge(*parts), opened.pop_all().close)

    def snapshot(self) -> ReadOnlyStore:
        self._check_open()
        with ExitStack() as opened:
            taken = [opened.enter_context(closing(store.snapshot())) for store in self._stores]
            opened.pop_all()
        return PartitionedStore(taken, self._partition_of, self._many_partitions_of, owns=True)

    # -- as a `RecordStore`, if the stores of the partitions are ----------------------------------

    def get_record(self, key: bytes) -> tuple[int, int, bytes] | None:
        self._check_open()
        check_key(key)
        found: tuple[int, int, bytes] | None = self._below()[self._partition_of(key)].get_record(key)
        return found

    def get_records(self, keys: pa.Array) -> pa.RecordBatch:
        self._check_open()
        found: pa.RecordBatch = self._scattered(
            check_arrow(keys), lambda store, mine: store.get_records(mine)
        )
        return found

    def records(
        self, from_: bytes | None = None, to: bytes | None = None
    ) -> Entries[bytes, tuple[int, int, bytes]]:
        self._check_open()
        check_bounds(from_, to)
        with ExitStack() as opened:
            parts = [opened.enter_context(store.records(from_, to)) for store in self._below()]
            return Entries(heapq.merge(*parts), opened.pop_all().close)

    def _below(self) -> Sequence[RecordStore]:
        return cast("Sequence[RecordStore]", self._stores)

    def close(self) -> None:
        if not self._closed and self._owns:
            for store in self._stores:
                store.close()
        super().close()


class Overlay(WritableBase):
    """Uncommitted changes over a base store that is only read. Reads see the changes.

    The base is never written and never closed. A commit writes `changes()`. After that the base holds the
    changes, and a new overlay begins.
    """

    def __init__(self, base: ReadOnlyStore) -> None:
        self._base = base
        self._changes: _SortedDict[bytes | None] = _SortedDict()

    def get(self, key: bytes) -> bytes | None:
        self._check_open()
        check_key(key)
        if key in self._changes.entries:
            return self._changes.entries[key]
        return self._base.get(key)

    def _get_list(self, keys: Sequence[bytes]) -> list[bytes | None]:
        changed = self._changes.entries
        from_base = iter(self._base.get_all([key for key in keys if key not in changed]))
        return [changed[key] if key in changed else next(from_base) for key in keys]

    def _get_array(self, keys: pa.Array) -> pa.Array:
        changed = self._changes.entries
        if not changed:
            return self._base.get_all(keys)
        listed = keys.to_pylist()
        hits = np.fromiter((key in changed for key in listed), np.bool_, len(listed))
        if not hits.any():
            return self._base.get_all(keys)
        mine = binary_array([changed[key] for key in listed if key in changed])
        if hits.all():
            return mine
        both = [mine, self._base.get_all(keys.filter(pa.array(~hits)))]
        places = np.where(hits, np.cumsum(hits) - 1, len(mine) + np.cumsum(~hits) - 1)
        return joined(both).take(pa.array(places))

    def range(self, from_: bytes | None = None, to: bytes | None = None) -> Entries[bytes, bytes]:
        self._check_open()
        check_bounds(from_, to)
        below = self._base.range(from_, to)
        return Entries(_laid_over(below, self._changes.slice(from_, to)), below.close)

    def put(self, key: bytes, value: bytes) -> None:
        self._check_open()
        check_key(key)
        check_value(value)
        self._changes.set(key, value)

    def delete(self, key: bytes) -> None:
        self._check_open()
        check_key(key)
        self._changes.set(key, None)

    def _put_arrays(self, keys: pa.Array, values: pa.Array) -> None:
        self._changes.update(keys.to_pylist(), values.to_pylist())

    def changes(self) -> pa.Table:
        """`key: binary, value: binary`: one row per key, in order of first change; null is a delete."""
        self._check_open()
        entries = self._changes.entries
        columns = [pa.array(entries.keys(), pa.binary()), pa.array(entries.values(), pa.binary())]
        return pa.table(columns, schema=CHANGES_SCHEMA)

    def snapshot(self) -> ReadOnlyStore:
        self._check_open()
        copy = _OwnedOverlay(self._base.snapshot())
        copy._changes = _SortedDict(dict(self._changes.entries))
        return Frozen(copy, owns=True)


class _OwnedOverlay(Overlay):
    """An overlay over a snapshot that was taken for it."""

    def close(self) -> None:
        if not self._closed:
            self._base.close()
        super().close()


def _laid_over(
    below: Iterator[tuple[bytes, bytes]], changes: Sequence[tuple[bytes, bytes | None]]
) -> Iterator[tuple[bytes, bytes]]:
    """Merge both in key order. A change replaces the entry below it, and a null change removes it."""
    pending = iter(changes)
    change = next(pending, None)
    for key, value in below:
        while change is not None and change[0] < key:
            if change[1] is not None:
                yield change[0], change[1]
            change = next(pending, None)
        if change is None or change[0] != key:
            yield key, value
    while change is not None:
        if change[1] is not None:
            yield change[0], change[1]
        change = next(pending, None)
