"""Serdes, and the typed stores that use them over a store of bytes.

    BytesSerde     bytes, unchanged
    StringSerde    UTF-8; sorted by code point
    Int64Serde     8 bytes, big-endian, sign bit flipped: sorted by number
    JsonSerde      compact JSON in UTF-8

A serde is any object with `serialize`, `deserialize` and `keeps_prefix`. `serialize` must always return the
same bytes for the same value: a key that is written in two ways is two keys.

A serde that converts whole Arrow arrays also has `to_binary` and `from_binary`, which produce the same bytes
and values and keep nulls. All of the above except `JsonSerde` have them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore import arguments
from keyfold.statestore.closing import Closing
from keyfold.statestore.errors import WrongType
from keyfold.statestore.kv.api import (
    Entries,
    KeyValueStore,
    ReadOnlyStore,
    check_arrow,
    check_arrow_rows,
    is_arrow,
    needs_arrow_values,
    pairs,
)

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

_INT64_MIN = -(1 << 63)
_INT64_MAX = (1 << 63) - 1
_SIGN = np.uint64(1 << 63)


class Serde(Protocol[T]):
    """Converts values of one type to bytes and back.

    Raises `TypeError` for a value of another type and `ValueError` for a value or bytes that cannot be
    converted. Neither message shows the content.
    """

    @property
    def keeps_prefix(self) -> bool:
        """Whether a prefix of a value serializes to a prefix of its bytes, as `prefix` requires."""

    def serialize(self, value: T) -> bytes: ...

    def deserialize(self, data: bytes) -> T: ...


class ArrowSerde(Protocol):
    """The additional methods of a serde that converts Arrow arrays. Raises the same errors as a `Serde`."""

    def to_binary(self, values: pa.Array) -> pa.Array: ...

    def from_binary(self, data: pa.Array) -> pa.Array: ...


class _Named:
    """Shows itself as it is written in code."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class BytesSerde(_Named):
    """Bytes, unchanged; in Arrow `binary`."""

    keeps_prefix = True

    def serialize(self, value: bytes) -> bytes:
        return _typed(value, bytes)

    def deserialize(self, data: bytes) -> bytes:
        return data

    def to_binary(self, values: pa.Array) -> pa.Array:
        return check_arrow(values, "value")

    def from_binary(self, data: pa.Array) -> pa.Array:
        return data


class StringSerde(_Named):
    """UTF-8; in Arrow `string`. Byte order is code point order. Unpaired surrogates are refused."""

    keeps_prefix = True

    def serialize(self, value: str) -> bytes:
        try:
            return _typed(value, str).encode()
        except UnicodeEncodeError:
            raise ValueError("UTF-8 cannot encode the string's unpaired surrogate: use BytesSerde") from None

    def deserialize(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"not UTF-8 at byte {error.start}: read it with the serde that wrote it"
            ) from None

    def to_binary(self, values: pa.Array) -> pa.Array:
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            raise TypeError(f"expected an Arrow array of string, not {values.type}: cast it")
        return values.cast(pa.binary())

    def from_binary(self, data: pa.Array) -> pa.Array:
        try:
            return data.cast(pa.string())
        except pa.ArrowInvalid:
            raise ValueError("a value is not UTF-8: read it with the serde that wrote it") from None


class Int64Serde(_Named):
    """A 64-bit integer whose bytes sort in numeric order; in Arrow `int64`.

    0                                                       8
    +-------------------------------------------------------+
    | value + 2**63, unsigned, big-endian                   |
    +-------------------------------------------------------+
    """

    keeps_prefix = False

    def serialize(self, value: int) -> bytes:
        if isinstance(value, bool):
            raise TypeError("expected int, not bool: use int(value)")
        if not _INT64_MIN <= _typed(value, int) <= _INT64_MAX:
            raise ValueError("the integer does not fit in 64 bits: use StringSerde or JsonSerde")
        return (value - _INT64_MIN).to_bytes(8, "big")

    def deserialize(self, data: bytes) -> int:
        if len(data) != 8:
            raise ValueError(f"expected 8 bytes, not {len(data)}: read it with the serde that wrote it")
        return int.from_bytes(data, "big") + _INT64_MIN

    def to_binary(self, values: pa.Array) -> pa.Array:
        if not pa.types.is_integer(values.type):
            raise TypeError(f"expected an Arrow array of int64, not {values.type}: cast it")
        try:
            numbers = values.cast(pa.int64())
        except pa.ArrowInvalid:
            raise ValueError("an integer does not fit in 64 bits: use StringSerde") from None
        flipped = (numbers.fill_null(0).to_numpy().view(np.uint64) ^ _SIGN).astype(">u8")
        packed = pa.Array.from_buffers(pa.binary(8), len(flipped), [None, pa.py_buffer(flipped)])
        return pc.if_else(numbers.is_valid(), packed.cast(pa.binary()), None)

    def from_binary(self, data: pa.Array) -> pa.Array:
        absent = data.is_null().to_numpy(zero_copy_only=False)
        whole = pc.drop_null(data)
        lengths = pc.min_max(pc.binary_length(whole)).as_py() if len(whole) else {"min": 8, "max": 8}
        if lengths != {"min": 8, "max": 8}:
            raise ValueError("a value does not have 8 bytes: read it with the serde that wrote it")
        numbers = np.zeros(len(data), np.int64)
        if len(whole):
            flipped = np.frombuffer(whole.cast(pa.binary(8)).buffers()[1], ">u8", len(whole))
            numbers[~absent] = (flipped.astype(np.uint64) ^ _SIGN).view(np.int64)
        return pa.array(numbers, pa.int64(), mask=absent)


class JsonSerde(_Named):
    """Compact JSON: no spaces, unescaped UTF-8, object fields in their given order.

    Fields are not sorted, so always build keys with their fields in the same order. NaN and infinities are
    refused because JSON does not have them.
    """

    keeps_prefix = False

    def serialize(self, value: Any) -> bytes:
        try:
            return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            raise ValueError("UTF-8 cannot encode a string's unpaired surrogate: replace it") from None

    def deserialize(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError:
            raise ValueError("not JSON: read it with the serde that wrote it") from None


def _in_arrow(serde: Any) -> ArrowSerde:
    if not (hasattr(serde, "to_binary") and hasattr(serde, "from_binary")):
        name = type(serde).__name__
        raise TypeError(f"{name} cannot convert Arrow arrays: give a list, or use a serde that can")
    found: ArrowSerde = serde
    return found


def _typed(value: T, kind: type[T]) -> T:
    if not isinstance(value, kind):
        found = type(value).__name__
        raise TypeError(f"expected {kind.__name__}, not {found}: convert it, or use another serde")
    return value


class TypedView(Closing, Generic[K, V]):
    """A store that is read with serdes. Methods as in `ReadOnlyStore`; the order is that of the keys' bytes.

    It does not close the store that it was given, but it closes a snapshot that it took itself.
    """

    def __init__(
        self, store: ReadOnlyStore, key_serde: Serde[K], value_serde: Serde[V], *, owns: bool = False
    ) -> None:
        self._reads = store
        self._keys = key_serde
        self._values = value_serde
        self._owns = owns

    def get(self, key: K) -> V | None:
        return self._value(self._reads.get(self._keys.serialize(key)))

    @overload
    def get_all(self, keys: Sequence[K]) -> list[V | None]: ...

    @overload
    def get_all(self, keys: pa.Array) -> pa.Array: ...

    def get_all(self, keys: Any) -> Any:
        """Arrow arrays have the types of the serdes. Raises `TypeError` if a serde cannot convert them."""
        if is_arrow(keys):
            keys_of, values_of = _in_arrow(self._keys), _in_arrow(self._values)
            return values_of.from_binary(self._reads.get_all(check_arrow(keys_of.to_binary(keys))))
        checked = arguments.several("keys", keys, "keys")
        values = self._reads.get_all([self._keys.serialize(key) for key in checked])
        return [self._value(value) for value in values]

    def range(self, from_: K | None = None, to: K | None = None) -> Entries[K, V]:
        return self._typed(self._reads.range(self._bound(from_), self._bound(to)))

    def prefix(self, prefix: K) -> Entries[K, V]:
        """Raises `TypeError` if the key serde does not keep prefixes (`Int64Serde`, `JsonSerde`)."""
        if not self._keys.keeps_prefix:
            name = type(self._keys).__name__
            raise TypeError(f"{name} does not keep prefixes: use range, or a key serde that keeps prefixes")
        return self._typed(self._reads.prefix(self._keys.serialize(prefix)))

    def all(self) -> Entries[K, V]:
        return self._typed(self._reads.all())

    def snapshot(self) -> TypedView[K, V]:
        return TypedView(self._reads.snapshot(), self._keys, self._values, owns=True)

    def close(self) -> None:
        if self._owns:
            self._reads.close()

    def _bound(self, key: K | None) -> bytes | None:
        return None if key is None else self._keys.serialize(key)

    def _value(self, data: bytes | None) -> V | None:
        return None if data is None else self._values.deserialize(data)

    def _typed(self, below: Entries[bytes, bytes]) -> Entries[K, V]:
        rows: Iterator[tuple[K, V]] = (
            (self._keys.deserialize(key), self._values.deserialize(value)) for key, value in below
        )
        return Entries(rows, below.close)


class TypedStore(TypedView[K, V]):
    """A store that is read and written with serdes. Methods as in `KeyValueStore`."""

    def __init__(
        self, store: KeyValueStore, key_serde: Serde[K], value_serde: Serde[V], *, owns: bool = False
    ) -> None:
        super().__init__(store, key_serde, value_serde, owns=owns)
        self._writes = store

    def put(self, key: K, value: V) -> None:
        self._writes.put(self._keys.serialize(key), self._serialized(value))

    @overload
    def put_all(self, entries: Mapping[K, V] | Iterable[tuple[K, V]]) -> None: ...

    @overload
    def put_all(self, entries: pa.Array, values: pa.Array) -> None: ...

    def put_all(self, entries: Any, values: Any = None) -> None:
        if is_arrow(entries):
            if not is_arrow(values):
                raise needs_arrow_values(values)
            keys_of, values_of = _in_arrow(self._keys), _in_arrow(self._values)
            rows = check_arrow_rows(keys_of.to_binary(entries), values_of.to_binary(values))
            self._writes.put_all(*rows)
            return
        serialize = self._keys.serialize
        self._writes.put_all([(serialize(key), self._serialized(value)) for key, value in pairs(entries)])

    def delete(self, key: K) -> None:
        self._writes.delete(self._keys.serialize(key))

    def delete_all(self, keys: Iterable[K] | pa.Array) -> None:
        if is_arrow(keys):
            self._writes.delete_all(check_arrow(_in_arrow(self._keys).to_binary(keys)))
            return
        checked = arguments.several("keys", keys, "keys")
        self._writes.delete_all([self._keys.serialize(key) for key in checked])

    def flush(self) -> None:
        self._writes.flush()

    def _serialized(self, value: V) -> bytes:
        # Even if the serde could write it (JSON's null): `get` returns None for a missing key.
        if value is None:
            raise WrongType(
                "None is not a value.", expected="a value", found="None",
                remedy="to remove a key, call delete(key)",
            )  # fmt: skip
        return self._values.serialize(value)
