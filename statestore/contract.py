"""What a key-value store is: the names of Samza's `KeyValueStore`, on bytes, and the rules of every store.

    ReadOnlyStore        get, get_all, range, prefix, all, snapshot, close
    KeyValueStore        … and put, put_all, delete, delete_all, flush

- Keys and values are `bytes`, anything else is a `TypeError`; `statestore/serdes.py` puts types at the edge.
  The empty key and the empty value are legal. `None` is no value: `delete` removes a key.
- Keys come in the order of their bytes (unsigned, shorter first). `range(from_, to)` includes `from_` and
  **excludes** `to`, as Samza's does; Kafka Streams' `range` includes both. `None` leaves that end open.
- `get_all` gives a list in the order asked, where Samza gives a map of the keys that were found.
- An iterator sees the store as it was when the iterator was made. It is a context manager; close it before
  its store. One left open when its store is closed raises `StoreClosed` when it needs the store again: it
  never ends early in silence.
- A store that wraps others does not close them, except snapshots that it took itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from keyfold.statestore.errors import KeyfoldError

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

    def get_all(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of `keys`, one each, in their order; None where there is none."""

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

    def put_all(self, entries: Mapping[bytes, bytes] | Iterable[tuple[bytes, bytes]]) -> None:
        """All of `entries`, or none of them where one is refused. The last one of a key counts."""

    def delete(self, key: bytes) -> None:
        """Remove `key`; nothing happens where it is not there."""

    def delete_all(self, keys: Iterable[bytes]) -> None: ...

    def flush(self) -> None: ...


_ENCODE = "encode it, or use a TypedStore with a serde"


def closed(what: str) -> StoreClosed:
    return StoreClosed(f"this {what} is closed", remedy="open it again, or use it before it is closed")


def check_key(key: object) -> None:
    if not isinstance(key, bytes):
        raise TypeError(f"a key must be bytes, not {type(key).__name__}: {_ENCODE}")


def check_keys(keys: Iterable[object]) -> list[bytes]:
    checked = list(keys)
    if set(map(type, checked)) - {bytes}:
        for key in checked:
            check_key(key)
    return checked  # type: ignore[return-value]


def check_bounds(from_: object, to: object) -> None:
    for bound in (from_, to):
        if bound is not None:
            check_key(bound)


def check_value(value: object) -> None:
    if value is None:
        raise TypeError("a value must be bytes, not None: to remove a key call delete(key)")
    if not isinstance(value, bytes):
        raise TypeError(f"a value must be bytes, not {type(value).__name__}: {_ENCODE}")


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

    def get_all(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self._check_open()
        return [self.get(key) for key in check_keys(keys)]

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

    def put_all(self, entries: Mapping[bytes, bytes] | Iterable[tuple[bytes, bytes]]) -> None:
        self._check_open()
        checked = pairs(entries)
        for key, value in checked:
            check_key(key)
            check_value(value)
        for key, value in checked:
            self.put(key, value)

    def delete_all(self, keys: Iterable[bytes]) -> None:
        self._check_open()
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

    def get_all(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self._check_open()
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
