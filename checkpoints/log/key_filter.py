"""Selects a part of a state: some keys, or all keys with a prefix."""

from __future__ import annotations

import functools
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore import arguments
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.keys.partitioner import partition_of
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.segment.reader import KeyFilter


@dataclass(frozen=True)
class Selection:
    """The wanted keys, as bytes: those that meet all conditions that are not None.

    Dropping the records of other keys before the fold does not change the result for the wanted ones, and is
    cheaper.

    Attributes:
        low, high: from `low` on, below `high`.
    """

    keys: pa.Array | None = None
    prefix: bytes | None = None
    low: bytes | None = None
    high: bytes | None = None

    @classmethod
    def of(
        cls, root: Path, columns: Columns | None, keys: Collection[object] | None, prefix: object
    ) -> Selection:
        """Raises `ConfigError`, and `BadRecord` for a value that is not a key of these columns."""
        if keys is not None and prefix is not None:
            raise ConfigError(
                "keys and prefix exclude each other.", path=root, remedy="give only one of them"
            )
        if keys is not None:
            arguments.several("keys", keys, "keys")
        if keys is None:
            return cls(None, None if prefix is None else _prefix(columns, prefix))
        return cls(pa.array([_encoded(root, columns, key) for key in keys], pa.binary()), None)

    @property
    def is_whole(self) -> bool:
        """Whether every key is wanted."""
        return self.keys is None and not self.prefix and not self.low and self.high is None

    def partitions(self, count: int) -> list[int]:
        """The partitions that can hold a wanted key."""
        if self.keys is None:
            return list(range(count))
        return sorted({partition_of(key, count) for key in self.keys.to_pylist()})

    @property
    def filter(self) -> KeyFilter | None:
        """Says which keys are wanted; None for every key."""
        return None if self.is_whole else self._wanted

    def _wanted(self, keys: pa.Array) -> pa.Array:
        conditions = []
        if self.keys is not None:
            conditions.append(pc.is_in(keys, value_set=self.keys))
        if self.prefix:
            begins = pc.binary_slice(keys, 0, len(self.prefix))
            conditions.append(pc.equal(begins, pa.scalar(self.prefix, pa.binary())))
        if self.low:
            conditions.append(pc.greater_equal(keys, pa.scalar(self.low, pa.binary())))
        if self.high is not None:
            conditions.append(pc.less(keys, pa.scalar(self.high, pa.binary())))
        return functools.reduce(pc.and_, conditions)


def _prefix(columns: Columns | None, prefix: object) -> bytes:
    if columns is not None:
        return columns.prefix(prefix)
    if isinstance(prefix, bytes):
        return prefix
    with suppress(UnicodeEncodeError):
        if isinstance(prefix, str):
            return prefix.encode()
    raise arguments.wrong_type("prefix", prefix, "bytes, or text without lone surrogates")


def _encoded(root: Path, columns: Columns | None, key: object) -> bytes:
    if columns is not None:
        # A single key column may be a struct or an array. A tuple can be its value.
        whole = len(columns.keys) == 1 and pa.types.is_nested(
            columns.arrow_schema().field(columns.keys[0]).type
        )
        return columns.encode_key(*key) if isinstance(key, tuple) and not whole else columns.encode_key(key)
    if isinstance(key, bytes):
        return key
    raise ConfigError(
        "Not a key of this changelog: its keys are bytes.", path=root, expected="bytes",
        found=type(key).__name__, remedy="encode the keys to bytes",
    )  # fmt: skip
