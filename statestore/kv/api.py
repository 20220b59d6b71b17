"""What a key-value store is: the names of Samza's `KeyValueStore`, on bytes, and the rules of every store.

    ReadOnlyStore        get, get_all, range, prefix, all, snapshot, close
    KeyValueStore        … and put, put_all, delete, delete_all, flush
    RecordStore          a ReadOnlyStore that also tells offset and timestamp of every entry's last record

- Keys and values are `bytes`, anything else is a `WrongType`, which is a `TypeError`.
  `statestore/kv/serdes.py` puts types at the edge.
  The empty key and the empty value are legal. `None` is no value: `delete` removes a key.
- Keys come in the order of their bytes (unsigned, shorter first). `range(from_, to)` includes `from_` and
  **excludes** `to`, as Samza's does; Kafka Streams' `range` includes both. `None` leaves that end open.
- `get_all` gives a list in the order asked, where Samza gives a map of the keys that were found.
- Many keys at once can be Arrow arrays of `binary`, chunked or not, without nulls among the keys: `get_all`
  then gives an array, `put_all` takes two, of which a null value is a delete. Rows are not Python objects
  where a store can avoid it.
- An iterator sees the store as it was when the iterator was made. It is a context manager; close it before
  its store. One left open when its store is closed raises `StoreClosed` when it needs the store again: it
  never ends early in silence.
- A store that wraps others does not close them, except snapshots that it took itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, overload

import pyarrow as pa

from keyfold.statestore import arguments
from keyfold.statestore.errors import ConfigError, KeyfoldError, WrongType

K = TypeVar("K")
V = TypeVar("V")
S = TypeVar("S", bound="StoreBase")


class StoreClosed(KeyfoldError, ValueError):
    """A store, a snapshot or an iterator was used after it was closed."""


class Entries(Iterator[tuple[K, V]], Generic[K, V]):
    """Entries in the order of their keys. Closes itself at its end; close it where you stop earlier.

    An iterator that failed or was closed raises `StoreClosed` from then on: neither looks like the end.
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

    def __enter__(self) -> Entries[K, V]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ReadOnlyStore(Protocol):
    """What every store can do."""

    def get(self, key: bytes) -> bytes | None: ...

    @overload
    def get_all(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of `keys`, one each, in their order; None where there is none."""

    @overload
    def get_all(self, keys: pa.Array) -> pa.Array:
        """The same of Arrow arrays: at most 2 GiB of values at once."""

    def range(self, from_: bytes | None = None, to: bytes | None = None) -> Entries[bytes, bytes]:
        """Entries with `from_` <= key < `to`."""

    def prefix(self, prefix: bytes) -> Entries[bytes, bytes]:
        """Entries whose key begins with `prefix`."""

    def all(self) -> Entries[bytes, bytes]: ...

    def snapshot(self) -> ReadOnlyStore:
        """The store as it is now, read-only, whatever is written later. To be closed."""

    def close(self) -> None: ...


class KeyValueStore(ReadOnlyStore, Protocol):
    """A store that can be written."""

    def put(self, key: bytes, value: bytes) -> None: ...

    @overload
    def put_all(self, entries: Mapping[bytes, bytes] | Iterable[tuple[bytes, bytes]]) -> None:
        """All of `entries`, or none of them where one is refused. The last one of a key counts."""

    @overload
    def put_all(self, entries: pa.Array, values: pa.Array) -> None:
        """`entries` are the keys, a value for each; a null value deletes its key."""

    def delete(self, key: bytes) -> None:
        """Remove `key`; nothing happens where it is not there."""

    def delete_all(self, keys: Iterable[bytes] | pa.Array) -> None: ...

    def flush(self) -> None: ...


#: What `RecordStore.get_records` gives: one row for each key asked, of nulls where there is none.
LAST_RECORDS = pa.schema(
    [pa.field("offset", pa.int64()), pa.field("timestamp", pa.int64()), pa.field("value", pa.binary())]
)


class RecordStore(ReadOnlyStore, Protocol):
    """A store of last records, of which the values are only a part."""

    def get_record(self, key: bytes) -> tuple[int, int, bytes] | None:
        """Offset, timestamp in ms and value of the last record of `key`; None where there is none."""

    def get_records(self, keys: pa.Array) -> pa.RecordBatch:
        """The last records of `keys` (`binary`, without nulls), with the columns of `LAST_RECORDS`."""

    def records(
        self, from_: bytes | None = None, to: bytes | None = None
    ) -> Entries[bytes, tuple[int, int, bytes]]:
        """As `range`, with the whole records."""


_ENCODE = "encode it, or use a TypedStore with a serde"


def _wrong(what: str, expected: str, found: object, remedy: str = _ENCODE) -> WrongType:
    return WrongType(what, expected=expected, found=found, remedy=remedy)


def closed(what: str) -> StoreClosed:
    return StoreClosed(
        f"This {what} is closed.", expected=f"an open {what}",
        found="closed, by whoever has opened it or with what it belongs to",
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
    """The column as one array of `binary`. `TypeError`: of another type, or keys among which there is a
    null.
    """
    kind = column.type
    if not (
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    ):
        raise _wrong(f"An Arrow {what} must be binary.", "an Arrow array of binary", kind)
    if what == "key" and column.null_count:
        raise _wrong("An Arrow key must not be null.", "keys", "null among them", "filter such rows out")
    if isinstance(column, pa.ChunkedArray):
        column = binary_array(column.cast(pa.binary()))
    return column.cast(pa.binary())


def check_arrow_rows(keys: Any, values: Any) -> tuple[pa.Array, pa.Array]:
    """Keys and values of `put_all`. Raises `TypeError`, and `ValueError` for columns of different length."""
    if not is_arrow(values):
        found = type(values).__name__
        raise _wrong("Values for an Arrow array of keys must be another one.", "an Arrow array", found)
    if len(keys) != len(values):
        raise ConfigError(
            "There are not as many values as keys.", expected=f"{len(keys)} values", found=len(values),
            remedy="give each key a value; null deletes it",
        )  # fmt: skip
    return check_arrow(keys), check_arrow(values, "value")


def binary_array(values: Any) -> pa.Array:
    """A column of `binary` from Python's bytes and None, in one piece. `ValueError`: beyond 2 GiB."""
    column = values if is_arrow(values) else pa.array(values, pa.binary())
    if isinstance(column, pa.ChunkedArray):
        column = joined(column.chunks) if column.num_chunks else pa.array([], pa.binary())
    return column


def joined(parts: Sequence[Any]) -> Any:
    """Arrays, or batches, of one type in one piece; at least one. `ValueError`: beyond 2 GiB."""
    if len(parts) == 1:
        return parts[0]
    try:
        is_batch = isinstance(parts[0], pa.RecordBatch)
        return pa.concat_batches(parts) if is_batch else pa.concat_arrays(parts)
    except pa.ArrowInvalid as e:
        raise ValueError("an Arrow array cannot hold more than 2 GiB: take fewer keys at a time") from e


def check_bounds(from_: object, to: object) -> None:
    for bound in (from_, to):
        if bound is not None:
            check_key(bound)


def check_value(value: object) -> None:
    if value is None:
        raise _wrong("A value must be bytes.", "bytes", "None", "to remove a key call delete(key)")
    if not isinstance(value, bytes):
        raise _wrong("A value must be bytes.", "bytes", type(value).__name__)


def pairs(entries: Mapping[K, V] | Iterable[tuple[K, V]]) -> list[tuple[K, V]]:
    return list(entries.items() if isinstance(entries, Mapping) else entries)


def prefix_end(prefix: bytes) -> bytes | None:
    """The first key after all keys that begin with `prefix`; None where none can follow (only 0xff bytes)."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


class StoreBase(ABC):
    """What follows from `get` and `range` alone."""

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

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WritableBase(StoreBase):
    """What follows from `put` and `delete` alone."""

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
        """Nothing: what is written here lives in memory."""
        self._check_open()


class Frozen(StoreBase):
    """A store that can only be read, over one that could be written. With `owns` it closes that one."""

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
        """Itself again: nobody can change it. It lives no longer than this one."""
        self._check_open()
        return Frozen(self, owns=False)

    def close(self) -> None:
        if not self._closed and self._owns:
            self._store.close()
        super().close()
