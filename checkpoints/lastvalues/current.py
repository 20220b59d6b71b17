"""The last values as a store: each read as of the commit that is current then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar, overload

import pyarrow as pa

from keyfold.statestore.errors import KeyfoldError
from keyfold.statestore.keys.partitioner import partition_of, partitions_of
from keyfold.statestore.kv.api import Entries, Frozen, ReadOnlyStore, check_bounds
from keyfold.statestore.kv.stores import PartitionedStore
from keyfold.statestore.rocksdb.snapshot import LastValuesSnapshot, RecordCursor
from keyfold.statestore.rocksdb.store import LastValues, StoreUnusable

T = TypeVar("T")


class _Updater(Protocol):
    def reach(self, partition: int) -> LastValues:
        """The store of a partition, once it has reached the present commit."""

    def whole_cursor(self) -> RecordCursor:
        """All partitions as of one commit, the present one or a later one."""

    def read(self, ask: Callable[[], T]) -> T:
        """What `ask` reads, again where stores were built again meanwhile."""

    @property
    def clearings(self) -> int:
        """Goes up before rows are removed."""

    def distrust(self, error: StoreUnusable, clearings: int) -> KeyfoldError:
        """Have stores that cannot be read built again; returns the error to raise."""


class CurrentValues(PartitionedStore):
    """A read of one key waits for the store of its partition alone; a range, and a snapshot, see all
    partitions as of one commit.
    """

    def __init__(self, updater: _Updater, count: int) -> None:
        super().__init__(
            _Stores(updater.reach, count),
            lambda key: partition_of(key, count),
            lambda keys: partitions_of(keys, count),
        )
        self._updater = updater
        self._count = count

    def get(self, key: bytes) -> bytes | None:
        get = super().get
        return self._updater.read(lambda: get(key))

    def _get_list(self, keys: Sequence[bytes]) -> list[bytes | None]:
        get_list = super()._get_list
        return self._updater.read(lambda: get_list(keys))

    def _get_array(self, keys: pa.Array) -> pa.Array:
        get_array = super()._get_array
        return self._updater.read(lambda: get_array(keys))

    def get_record(self, key: bytes) -> tuple[int, int, bytes] | None:
        get_record = super().get_record
        return self._updater.read(lambda: get_record(key))

    def range(self, from_: bytes | None = None, to: bytes | None = None) -> Entries[bytes, bytes]:
        check_bounds(from_, to)
        moment = self.snapshot()
        return Entries(moment.range(from_, to), moment.close)

    def snapshot(self) -> ReadOnlyStore:
        return _Moment(self._updater, self._updater.read(self._updater.whole_cursor), self._count)

    def close(self) -> None:
        """Nothing: the changelog closes it."""


class _Stores(Sequence[LastValues]):
    """The store of each partition, which is waited for when it is asked for."""

    def __init__(self, reach: Callable[[int], LastValues], count: int) -> None:
        self._reach = reach
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, partition: int) -> LastValues: ...
    @overload
    def __getitem__(self, partition: slice) -> Sequence[LastValues]: ...
    def __getitem__(self, partition: int | slice) -> LastValues | Sequence[LastValues]:
        if isinstance(partition, slice):
            return [self._reach(n) for n in range(self._count)[partition]]
        return self._reach(partition)


class _Moment(PartitionedStore):
    """All partitions as they were at one commit. Where they cannot be read on, nobody can: the rows of that
    commit are in no other place.
    """

    def __init__(self, updater: _Updater, cursor: RecordCursor, count: int) -> None:
        super().__init__(
            [LastValuesSnapshot(cursor, partition, owns=False) for partition in range(count)],
            lambda key: partition_of(key, count),
            lambda keys: partitions_of(keys, count),
        )
        self._updater = updater
        self._clearings = updater.clearings
        self._cursor = cursor

    def get(self, key: bytes) -> bytes | None:
        get = super().get
        return self._read(lambda: get(key))

    def _get_list(self, keys: Sequence[bytes]) -> list[bytes | None]:
        get_list = super()._get_list
        return self._read(lambda: get_list(keys))

    def _get_array(self, keys: pa.Array) -> pa.Array:
        get_array = super()._get_array
        return self._read(lambda: get_array(keys))

    def get_record(self, key: bytes) -> tuple[int, int, bytes] | None:
        get_record = super().get_record
        return self._read(lambda: get_record(key))

    def get_records(self, keys: pa.Array) -> pa.RecordBatch:
        get_records = super().get_records
        return self._read(lambda: get_records(keys))

    def range(self, from_: bytes | None = None, to: bytes | None = None) -> Entries[bytes, bytes]:
        return self._scanned(super().range(from_, to))

    def records(
        self, from_: bytes | None = None, to: bytes | None = None
    ) -> Entries[bytes, tuple[int, int, bytes]]:
        return self._scanned(super().records(from_, to))

    def _scanned(self, entries: Entries[bytes, T]) -> Entries[bytes, T]:
        def rows() -> Iterator[tuple[bytes, T]]:
            try:
                yield from entries
            except StoreUnusable as e:
                failure = self._updater.distrust(e, self._clearings)
            else:
                return
            raise failure

        return Entries(rows(), entries.close)

    def _read(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except StoreUnusable as e:
            failure = self._updater.distrust(e, self._clearings)
        # Out here, and alone: the frames of the first error refer to an iterator, and RocksDB keeps its lock
        # while there is one.
        raise failure

    def snapshot(self) -> ReadOnlyStore:
        """Itself again; it lives no longer than this one."""
        self._check_open()
        return Frozen(self, owns=False)

    def close(self) -> None:
        self._cursor.close()
        super().close()
