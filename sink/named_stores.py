r"""Several stores of one task in one changelog, each with serdes and an optional time to live.

A key of the store `clock` is `b"clock\0" + key` in the changelog. Names have no NUL, so keys of different
stores never collide. An entry expires when its last record is older than its store's ttl; then no read
returns it. `keyfold.sink.ttl` gradually replaces expired entries by tombstones. Until then, direct reads of
the changelog (`restore`, `Changelog.get`) still find them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.errors import ConfigError
from keyfold.statestore.keys.buffers import prefixed
from keyfold.statestore.kv.api import (
    Entries,
    ReadOnlyStore,
    RecordStore,
    StoreBase,
    check_bounds,
    check_key,
    prefix_end,
)
from keyfold.statestore.kv.serdes import BytesSerde, Serde
from keyfold.statestore.kv.stores import CHANGES_SCHEMA, Overlay, TypedStore

_NAME: Final = re.compile(r"[a-z0-9_.-]{1,64}")
_SERDE: Final = ("serialize", "deserialize", "keeps_prefix")
_BYTES: Final = BytesSerde()


@dataclass(frozen=True)
class Store:
    """A named store of a task.

    Attributes:
        key, value: The serdes of keys and values; bytes by default.
        ttl: An entry expires if it was not written for this long. None: entries are kept until deleted.

    Raises `ConfigError`.
    """

    key: Serde[Any] = _BYTES
    value: Serde[Any] = _BYTES
    ttl: timedelta | None = None

    def __post_init__(self) -> None:
        for which in ("key", "value"):
            serde = getattr(self, which)
            if isinstance(serde, type) or not all(hasattr(serde, name) for name in _SERDE):
                found = serde.__name__ if isinstance(serde, type) else type(serde).__name__
                raise ConfigError(
                    f"The {which} serde of a store is invalid.",
                    expected=f"an object with {', '.join(_SERDE)}, such as StringSerde()",
                    found=f"the class {found}" if isinstance(serde, type) else found,
                    remedy=f"write {found}()"
                    if isinstance(serde, type)
                    else "see keyfold.statestore.kv.serdes",
                )
        if self.ttl is not None and not (
            isinstance(self.ttl, timedelta) and self.ttl >= timedelta(milliseconds=1)
        ):
            raise ConfigError(
                "The ttl of a store is invalid.", expected="a timedelta of 1 ms or more, or None",
                found=repr(self.ttl), remedy="write for example ttl=timedelta(days=30)",
            )  # fmt: skip

    @property
    def ttl_ms(self) -> int | None:
        return None if self.ttl is None else self.ttl // timedelta(milliseconds=1)


def checked_stores(stores: object) -> dict[str, Store]:
    """The `stores` of a task. Raises `ConfigError`."""
    if not isinstance(stores, Mapping) or not stores:
        raise ConfigError(
            "The `stores` of a task are invalid.", expected='a dict such as {"counts": Store()}',
            found="an empty dict" if stores == {} else type(stores).__name__,
            remedy="leave out `stores` for a single store of bytes",
        )  # fmt: skip
    for name, store in stores.items():
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ConfigError(
                "The name of a store is invalid.", expected="1 to 64 of the characters a-z 0-9 _ . -",
                found=repr(name), remedy="rename it",
            )  # fmt: skip
        if not isinstance(store, Store):
            raise ConfigError(
                f"The store {name!r} is not a Store.", expected="Store(key=…, value=…, ttl=…)",
                found=type(store).__name__, remedy="create it with keyfold.Store",
            )  # fmt: skip
    return dict(stores)


def prefix_of(name: str) -> bytes:
    """The prefix of all keys of a store."""
    return name.encode() + b"\0"


def has_other_keys(base: ReadOnlyStore, stores: Mapping[str, Store]) -> bool:
    """Whether `base` has a key that belongs to none of these stores."""
    start: bytes | None = None
    for prefix in [*sorted(map(prefix_of, stores)), None]:
        with base.range(start, prefix) as between:
            if next(between, None) is not None:
                return True
        start = prefix_end(prefix) if prefix is not None else None
    return False


class LivingView(StoreBase):
    """A read-only view of one store: the entries whose keys begin with `prefix` (which is stripped) and whose
    last record is newer than `cutoff_ms`.

    Args:
        base: A snapshot with the entries of all stores. It is not closed.
        cutoff_ms: Entries with this timestamp or a lower one have expired. None: entries never expire.
    """

    def __init__(self, base: RecordStore, prefix: bytes, cutoff_ms: int | None) -> None:
        self._base = base
        self._prefix = prefix
        self._cutoff_ms = cutoff_ms

    def get(self, key: bytes) -> bytes | None:
        self._check_open()
        check_key(key)
        if self._cutoff_ms is None:
            return self._base.get(self._prefix + key)
        record = self._base.get_record(self._prefix + key)
        return None if record is None or record[1] <= self._cutoff_ms else record[2]

    def _get_list(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if self._cutoff_ms is None:
            return self._base.get_all([self._prefix + key for key in keys])
        values: list[bytes | None] = self._get_array(pa.array(keys, pa.binary())).to_pylist()
        return values

    def _get_array(self, keys: pa.Array) -> pa.Array:
        stored = prefixed(self._prefix, keys)
        if self._cutoff_ms is None:
            return self._base.get_all(stored)
        found = self._base.get_records(stored)
        living = pc.greater(found.column("timestamp"), self._cutoff_ms)
        return pc.if_else(living, found.column("value"), None)

    def range(self, from_: bytes | None = None, to: bytes | None = None) -> Entries[bytes, bytes]:
        self._check_open()
        check_bounds(from_, to)
        first = self._prefix + (from_ or b"")
        end = prefix_end(self._prefix) if to is None else self._prefix + to
        skip, cutoff_ms = len(self._prefix), self._cutoff_ms
        if cutoff_ms is None:
            rows = self._base.range(first, end)
            return Entries(((key[skip:], value) for key, value in rows), rows.close)
        records = self._base.records(first, end)
        living = ((key[skip:], record[2]) for key, record in records if record[1] > cutoff_ms)
        return Entries(living, records.close)

    def snapshot(self) -> ReadOnlyStore:
        """The same entries, valid as long as the base is open."""
        self._check_open()
        return LivingView(self._base, self._prefix, self._cutoff_ms)


class NamedStores:
    """The stores of a task by name, during one micro-batch: `stores["clock"].get(key)`.

    Each is a `TypedStore`: get, get_all, put, put_all, delete, delete_all, range, prefix, all, snapshot.
    Reads see the writes of the batch. All writes to all stores form one commit.
    """

    def __init__(
        self, base: RecordStore, stores: Mapping[str, Store], now_ms: int, expired: pa.Array
    ) -> None:
        """`expired` are keys, with prefixes, that become tombstones unless the task writes them."""
        self._expired = expired
        self._overlays = {}
        self._typed: dict[str, TypedStore[Any, Any]] = {}
        for name, store in stores.items():
            cutoff_ms = None if store.ttl_ms is None else now_ms - store.ttl_ms
            overlay = Overlay(LivingView(base, prefix_of(name), cutoff_ms))
            self._overlays[name] = overlay
            self._typed[name] = TypedStore(overlay, store.key, store.value)

    def __getitem__(self, name: str) -> TypedStore[Any, Any]:
        """Raises `ConfigError` if the task does not declare the store."""
        with suppress(KeyError):
            return self._typed[name]
        near = get_close_matches(str(name), self._typed, n=1, cutoff=0.4)
        raise ConfigError(
            f"Store {name!r} does not exist.", expected=", ".join(map(repr, self._typed)), found=repr(name),
            remedy=f"did you mean {near[0]!r}?" if near else "declare it in the `stores` of the task's class",
        )  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        return iter(self._typed)

    def __len__(self) -> int:
        return len(self._typed)

    def __contains__(self, name: object) -> bool:
        return name in self._typed

    def changes(self) -> pa.Table:
        """The tombstones of expired entries, then the changes of all stores, as in `Overlay.changes`."""
        written = []
        for name, overlay in self._overlays.items():
            changes = overlay.changes()
            columns = [prefixed(prefix_of(name), changes.column("key")), changes.column("value")]
            written.append(pa.table(columns, schema=CHANGES_SCHEMA))
        whole = pa.concat_tables(written)
        gone = self._expired
        if len(gone) and whole.num_rows:
            gone = gone.filter(pc.invert(pc.is_in(gone, value_set=whole.column("key"))))
        tombstones = pa.table([gone, pa.nulls(len(gone), pa.binary())], schema=CHANGES_SCHEMA)
        return pa.concat_tables([tombstones, whole])

    def close(self) -> None:
        for overlay in self._overlays.values():
            overlay.close()
