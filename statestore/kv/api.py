"""The key-value store interface: the names of Samza's `KeyValueStore`, on bytes, and the common rules.

    ReadOnlyStore        get, get_all, range, prefix, all, snapshot, close
    KeyValueStore        adds put, put_all, delete, delete_all, flush
    RecordStore          a ReadOnlyStore that also returns the offset and timestamp of each key's last record

- Keys and values are `bytes`. Anything else raises `WrongType`, which is a `TypeError`.
  `statestore/kv/serdes.py` adds types.
  The empty key and the empty value are valid. `None` is not a value: call `delete` to remove a key.
- Keys are ordered by their bytes (unsigned, shorter first). `range(from_, to)` includes `from_` and
  **excludes** `to`, as in Samza; Kafka Streams' `range` includes both. `None` leaves that end open.
- `get_all` returns a list in the order of the keys. Samza returns a map of the keys that were found.
- Many keys at once can be Arrow arrays of `binary`, chunked or not, without null keys. Then `get_all` returns
  an array, and `put_all` takes two, in which a null value is a delete. Stores avoid turning rows into Python
  objects.
- An iterator sees the store as of its creation. It is a context manager; close it before its store. An
  iterator whose store was closed raises `StoreClosed` when it needs the store again: it never ends early
  without an error.
- A store that wraps others does not close them, except snapshots that it took itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, overload

import pyarrow as pa

from keyfold.statestore import arguments
from keyfold.statestore.closing import Closing
from keyfold.statestore.errors import ConfigError, KeyfoldError, WrongType

K = TypeVar("K")
V = TypeVar("V")
S = TypeVar("S", bound="ReadOnlyStore")


class StoreClosed(KeyfoldError, ValueError):
    """A store, a snapshot or an iterator was used after it was closed."""


class Entries(Closing, Iterator[tuple[K, V]], Generic[K, V]):
    """Entries in key order. The iterator closes itself at the end; close it if you stop earlier.

    After a failure or `close` it raises `StoreClosed`, so neither is mistaken for the end.
    """

    __slots__ = ("_close", "_closed", "_rows")

    def __init__(self, rows: Iterator[tuple[K, V]], close: Callable[[], None] | None = None) -> None:
        self._rows = rows
        self._close = close
        self._closed = False

    def __iter__(self) -> Entries[K, V]:
        return self

    def __next__(self) -> tuple[K, V]:
        try:
            return next(self._rows)
        except StopIteration:
            if self._closed:
                raise closed("iterator") from None
            self._release()
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._closed = True
        self._release()

    def _release(self) -> None:
        self._rows = iter(())
        close, self._close = self._close, None
        if close is not None:
            close()


class ReadOnlyStore(Protocol):
    """The methods of every store."""

    def get(self, key: bytes) -> bytes | None: ...

    @overload
    def get_all(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of `keys`, in the same order; None for a missing key."""

    @overload
    def get_all(self, keys: pa.Array) -> pa.Array:
        """The same for Arrow arrays, with at most 2 GiB of values at once."""

    def range(self, from_: bytes | None = None, to: bytes | None = None) -> Entries[bytes, bytes]:
        """Entries with `from_` <= key < `to`."""

    def prefix(self, prefix: bytes) -> Entries[bytes, bytes]:
        """Entries whose key begins with `prefix`."""

    def all(self) -> Entries[bytes, bytes]: ...

    def snapshot(self) -> ReadOnlyStore:
        """A read-only view of the store as it is now. Later writes do not change it. Close it after use."""

    def close(self) -> None: ...

    def __enter__(self: S) -> S: ...

    def __exit__(self, *error: object) -> None: ...


class KeyValueStore(ReadOnlyStore, Protocol):
    """A store that can be written."""

    def put(self, key: bytes, value: bytes) -> None: ...

    @overload
    def put_all(self, entries: Mapping[bytes, bytes] | Iterable[tuple[bytes, bytes]]) -> None:
        """Write all `entries`, or none if one is refused. If a key occurs twice, its last entry counts."""

    @overload
    def put_all(self, entries: pa.Array, values: pa.Array) -> None:
        """`entries` are the keys, with one value each; a null value deletes its key."""

    def delete(self, key: bytes) -> None:
        """Remove `key` if it exists."""

    def delete_all(self, keys: Iterable[bytes] | pa.Array) -> None: ...

    def flush(self) -> None: ...


#: The columns of `RecordStore.get_records`: one row per requested key, all null for a missing key.
LAST_RECORDS = pa.schema(
    [pa.field("offset", pa.int64()), pa.field("timestamp", pa.int64()), pa.field("value", pa.binary())]
)


class RecordStore(ReadOnlyStore, Protocol):
    """A store of last records, not only of their values."""

    def get_record(self, key: bytes) -> tuple[int, int, bytes] | None:
        """Offset, timestamp in ms and value of the last record of `key`; None if the key is missing."""

    def get_records(self, keys: pa.Array) -> pa.RecordBatch:
        """The last records of `keys` (`binary`, without nulls), with the columns of `LAST_RECORDS`."""

    def records(
        self, from_: bytes | None = None, to: bytes | None = None
    ) -> Entries[bytes, tuple[int, int, bytes]]:
        """The same as `range`, with complete records."""


_ENCODE = "encode it as bytes, or use a TypedStore with a serde"


def _wrong(what: str, expected: str, found: object, remedy: str = _ENCODE) -> WrongType:
    return WrongType(what, expected=expected, found=found, remedy=remedy)


def closed(what: str) -> StoreClosed:
    return StoreClosed(
        f"This {what} is closed.", expected=f"an open {what}",
        found=f"the {what}, or what it belongs to, was closed",
        remedy="open it again, or use it before it is closed",
    )  # fmt: skip


def check_key(key: object) -> None:
    if not isinstance(key, bytes):
        raise _wrong("A key must be bytes.", "bytes", type(key).__name__)


def check_keys(keys: Iterable[object]) -> list[bytes]:
    checked = list(arguments.several("keys", keys, "keys"))
    if set(map(type, checked)) - {bytes}:
        for key in checked:
            check_key(key)
    return checked


def is_arrow(keys: object) -> bool:
    return isinstance(keys, pa.Array | pa.ChunkedArray)


def check_arrow(column: Any, what: str = "key") -> pa.Array:
    """The column as one array of `binary`. Raises `TypeError` for another type or a null key."""
    kind = column.type
    if not (
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    ):
        raise _wrong(f"An Arrow {what} must be binary.", "an Arrow array of binary", kind)
    if what == "key" and column.null_count:
        raise _wrong("An Arrow key is null.", "no null keys", "a null key", "filter out rows with a null key")
    if isinstance(column, pa.ChunkedArray):
        column = binary_array(column.cast(pa.binary()))
    return column.cast(pa.binary())


def check_arrow_rows(keys: Any, values: Any) -> tuple[pa.Array, pa.Array]:
    """Keys and values of `put_all`. Raises `TypeError`, and `ValueError` for columns of different length."""
    if not is_arrow(values):
        raise needs_arrow_values(values)
    if len(keys) != len(values):
        raise ConfigError(
            "The numbers of keys and values differ.", expected=f"{len(keys)} values", found=len(values),
            remedy="give each key one value; null deletes the key",
        )  # fmt: skip
    return check_arrow(keys), check_arrow(values, "value")


def needs_arrow_values(values: object) -> WrongType:
    return _wrong(
        "Keys in an Arrow array need values in an Arrow array.", "an Arrow array", type(values).__name__,
        "give both in Arrow arrays, or neither",
    )  # fmt: skip


def binary_array(values: Any) -> pa.Array:
    """One array of `binary` from Python's bytes and None. Raises `ValueError` beyond 2 GiB."""
    column = values if is_arrow(values) else pa.array(values, pa.binary())
    if isinstance(column, pa.ChunkedArray):
        column = joined(column.chunks) if column.num_chunks else pa.array([], pa.binary())
    return column


def joined(parts: Sequence[Any]) -> Any:
    """Concatenate at least one array or batch of one type. Raises `ValueError` beyond 2 GiB."""
    if len(parts) == 1:
        return parts[0]
    try:
        is_batch = isinstance(parts[0], pa.RecordBatch)
        return pa.concat_batches(parts) if is_batch else pa.concat_arrays(parts)
    except pa.ArrowInvalid as e:
        raise ValueError("an Arrow array cannot hold more than 2 GiB: request fewer keys at a time") from e


def check_bounds(from_: object, to: object) -> None:
    for bound in (from_, to):
        if bound is not None:
            check_key(bound)


def check_value(value: object) -> None:
    if value is None:
        raise _wrong("A value must be bytes.", "bytes", "None", "to remove a key, call delete(key)")
    if not isinstance(value, bytes):
        raise _wrong("A value must be bytes.", "bytes", type(value).__name__)


def pairs(entries: Mapping[K, V] | Iterable[tuple[K, V]]) -> list[tuple[K, V]]:
    """Raises `WrongType` if it is neither a dict nor pairs."""
    found = list(
        entries.items() if isinstance(entries, Mapping) else arguments.several("entries", entries, "pairs")
    )
    for entry in found:
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise arguments.wrong_type("entries", entry, "a dict, or pairs of a key and a value")
    return found


def prefix_end(prefix: bytes) -> bytes | None:
    """The first key after all keys that begin with `prefix`; None if no key can follow (only 0xff bytes)."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


class StoreBase(Closing):
    """The methods that need only `get` and `range`."""

    _closed = False

    @abstractmethod
    def get(self, key: bytes) -> bytes | None: ...

    @abstractmethod
    def range(self, from_: bytes | None = None, to: bytes | None = None) -> Entries[bytes, bytes]: ...

    @overload
    def get_all(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    @overload
    def get_all(self, keys: pa.Array) -> pa.Array: ...

    def get_all(self, keys: Any) -> Any:
        self._check_open()
        return self._get_array(check_arrow(keys)) if is_arrow(keys) else self._get_list(check_keys(keys))

    def _get_list(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def _get_array(self, keys: pa.Array) -> pa.Array:
        return binary_array(self._get_list(keys.to_pylist()))

    def prefix(self, prefix: bytes) -> Entries[bytes, bytes]:
        check_key(prefix)
        return self.range(prefix, prefix_end(prefix))

    def all(self) -> Entries[bytes, bytes]:
        return self.range(None, None)

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise closed("store")


class WritableBase(StoreBase):
    """The methods that need only `put` and `delete`."""

    @abstractmethod
    def put(self, key: bytes, value: bytes) -> None: ...

    @abstractmethod
    def delete(self, key: bytes) -> None: ...

    @overload
    def put_all(self, entries: Mapping[bytes, bytes] | Iterable[tuple[bytes, bytes]]) -> None: ...

    @overload
    def put_all(self, entries: pa.Array, values: pa.Array) -> None: ...

    def put_all(self, entries: Any, values: Any = None) -> None:
        self._check_open()
        if is_arrow(entries):
            self._put_arrays(*check_arrow_rows(entries, values))
            return
        checked = pairs(entries)
        for key, value in checked:
            check_key(key)
            check_value(value)
        for key, value in checked:
            self.put(key, value)

    def _put_arrays(self, keys: pa.Array, values: pa.Array) -> None:
        for key, value in zip(keys.to_pylist(), values.to_pylist(), strict=True):
            if value is None:
                self.delete(key)
            else:
                self.put(key, value)

    def delete_all(self, keys: Iterable[bytes] | pa.Array) -> None:
        self._check_open()
        if is_arrow(keys):
            keys = check_arrow(keys).to_pylist()
        for key in check_keys(keys):
            self.delete(key)

    def flush(self) -> None:
        """Does nothing: the data is in memory."""
        self._check_open()


class Frozen(StoreBase):
    """A read-only view of a store. With `owns` it closes that store."""

    def __init__(self, store: ReadOnlyStore, *, owns: bool) -> None:
        self._store = store
        self._owns = owns

    def get(self, key: bytes) -> bytes | None:
        self._check_open()
        return self._store.get(key)

    def _get_list(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._store.get_all(keys)

    def _get_array(self, keys: pa.Array) -> pa.Array:
        return self._store.get_all(keys)

    def range(self, from_: bytes | None = None, to: bytes | None = None) -> Entries[bytes, bytes]:
        self._check_open()
        return self._store.range(from_, to)

    def snapshot(self) -> ReadOnlyStore:
        """A view of the same store, which cannot change. It is valid as long as this one."""
        self._check_open()
        return Frozen(self, owns=False)

    def close(self) -> None:
        if not self._closed and self._owns:
            self._store.close()
        super().close()
