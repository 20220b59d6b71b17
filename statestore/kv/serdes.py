"""Types at the edge of a store of bytes: a few serdes, and the stores that use them.

    BytesSerde     bytes as they are
    StringSerde    UTF-8; the order of code points
    Int64Serde     8 bytes, big-endian, sign bit flipped: ranges come in the order of the numbers
    JsonSerde      compact JSON in UTF-8

A serde is any object with `serialize`, `deserialize` and `keeps_prefix`. `serialize` must give the same bytes
for the same value at any time: a key that is written two ways is two keys.

One that can do it for whole Arrow arrays has `to_binary` and `from_binary` too, which give the same bytes and
values; nulls stay nulls. Of those above all but `JsonSerde` have them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.kv.api import (
    Entries,
    KeyValueStore,
    ReadOnlyStore,
    check_arrow,
    check_arrow_rows,
    is_arrow,
    pairs,
)

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
W = TypeVar("W", bound="TypedView[Any, Any]")

_INT64_MIN = -(1 << 63)
_INT64_MAX = (1 << 63) - 1
_SIGN = np.uint64(1 << 63)


class Serde(Protocol[T]):
    """How values of one type become bytes and come back.

    Raises `TypeError` for a value of another type, `ValueError` for a value or bytes that cannot be
    converted; neither shows the content.
    """

    @property
    def keeps_prefix(self) -> bool:
        """True where the bytes of a value's beginning are the beginning of its bytes: what `prefix` needs."""

    def serialize(self, value: T) -> bytes: ...

    def deserialize(self, data: bytes) -> T: ...


class ArrowSerde(Protocol):
    """What a serde has besides, if it can convert Arrow arrays. Raises as a `Serde` does."""

    def to_binary(self, values: pa.Array) -> pa.Array: ...

    def from_binary(self, data: pa.Array) -> pa.Array: ...


class BytesSerde:
    """Bytes as they are; in Arrow `binary`."""

    keeps_prefix = True

    def serialize(self, value: bytes) -> bytes:
        return _typed(value, bytes)

    def deserialize(self, data: bytes) -> bytes:
        return data

    def to_binary(self, values: pa.Array) -> pa.Array:
        return check_arrow(values, "value")

    def from_binary(self, data: pa.Array) -> pa.Array:
        return data


class StringSerde:
    """UTF-8; in Arrow `string`. The order of the bytes is that of the code points. Half surrogate pairs are
    refused.
    """

    keeps_prefix = True

    def serialize(self, value: str) -> bytes:
        try:
            return _typed(value, str).encode()
        except UnicodeEncodeError:
            raise ValueError("UTF-8 has no half surrogate pairs, the string has: use BytesSerde") from None

    def deserialize(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"not UTF-8 at byte {error.start}: read it with the serde it was written with"
            ) from None

    def to_binary(self, values: pa.Array) -> pa.Array:
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            raise TypeError(f"expected an Arrow array of string, not {values.type}: cast it")
        return values.cast(pa.binary())

    def from_binary(self, data: pa.Array) -> pa.Array:
        try:
            return data.cast(pa.string())
        except pa.ArrowInvalid:
            raise ValueError("a value is not UTF-8: read it with the serde it was written with") from None


class Int64Serde:
    """An integer of 64 bits whose bytes sort as the numbers do; in Arrow `int64`.

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
            raise ValueError("the integer does not fit into 64 bits: use StringSerde or JsonSerde")
        return (value - _INT64_MIN).to_bytes(8, "big")

    def deserialize(self, data: bytes) -> int:
        if len(data) != 8:
            raise ValueError(f"expected 8 bytes, not {len(data)}: read it with the serde it was written with")
        return int.from_bytes(data, "big") + _INT64_MIN

    def to_binary(self, values: pa.Array) -> pa.Array:
        if not pa.types.is_integer(values.type):
            raise TypeError(f"expected an Arrow array of int64, not {values.type}: cast it")
        try:
            numbers = values.cast(pa.int64())
        except pa.ArrowInvalid:
            raise ValueError("an integer does not fit into 64 bits: use StringSerde") from None
        flipped = (numbers.fill_null(0).to_numpy().view(np.uint64) ^ _SIGN).astype(">u8")
        packed = pa.Array.from_buffers(pa.binary(8), len(flipped), [None, pa.py_buffer(flipped)])
        return pc.if_else(numbers.is_valid(), packed.cast(pa.binary()), None)

    def from_binary(self, data: pa.Array) -> pa.Array:
        absent = data.is_null().to_numpy(zero_copy_only=False)
        whole = pc.drop_null(data)
        lengths = pc.min_max(pc.binary_length(whole)).as_py() if len(whole) else {"min": 8, "max": 8}
        if lengths != {"min": 8, "max": 8}:
            raise ValueError("a value has not 8 bytes: read it with the serde it was written with")
        numbers = np.zeros(len(data), np.int64)
        if len(whole):
            flipped = np.frombuffer(whole.cast(pa.binary(8)).buffers()[1], ">u8", len(whole))
            numbers[~absent] = (flipped.astype(np.uint64) ^ _SIGN).view(np.int64)
        return pa.array(numbers, pa.int64(), mask=absent)


class JsonSerde:
    """Compact JSON: no spaces, UTF-8 unescaped, the fields of an object in the order they have.

    Fields are not sorted, so for keys build the objects always in the same order. NaN and infinities,
    which JSON does not have, are refused.
    """

    keeps_prefix = False

    def serialize(self, value: Any) -> bytes:
        try:
            return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            raise ValueError("UTF-8 has no half surrogate pairs, a string has: replace them") from None

    def deserialize(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError:
            raise ValueError("not JSON: read it with the serde it was written with") from None


def _in_arrow(serde: Any) -> ArrowSerde:
    if not (hasattr(serde, "to_binary") and hasattr(serde, "from_binary")):
        name = type(serde).__name__
        raise TypeError(f"{name} cannot convert Arrow arrays: give a list, or take a serde that can")
    found: ArrowSerde = serde
    return found


def _typed(value: T, kind: type[T]) -> T:
    if not isinstance(value, kind):
        found = type(value).__name__
        raise TypeError(f"expected {kind.__name__}, not {found}: convert it, or use another serde")
    return value


class TypedView(Generic[K, V]):
    """A store that is read with serdes. Methods as in `ReadOnlyStore`, the order is that of the keys' bytes.

    It does not close the store that it was given; a snapshot it took itself it does.
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
        """Of Arrow arrays, those whose types the serdes name: `TypeError` where one of them cannot."""
        if is_arrow(keys):
            keys_of, values_of = _in_arrow(self._keys), _in_arrow(self._values)
            return values_of.from_binary(self._reads.get_all(check_arrow(keys_of.to_binary(keys))))
        values = self._reads.get_all([self._keys.serialize(key) for key in keys])
        return [self._value(value) for value in values]

    def range(self, from_: K | None = None, to: K | None = None) -> Entries[K, V]:
        return self._typed(self._reads.range(self._bound(from_), self._bound(to)))

    def prefix(self, prefix: K) -> Entries[K, V]:
        """Raises `TypeError` where the serde's bytes do not keep prefixes (`Int64Serde`, `JsonSerde`)."""
        if not self._keys.keeps_prefix:
            name = type(self._keys).__name__
            raise TypeError(f"keys of {name} have no prefixes: use range, or a serde that keeps prefixes")
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

    def __enter__(self: W) -> W:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
                found = type(values).__name__
                raise TypeError(f"values for an Arrow array of keys must be another one, not {found}")
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
        self._writes.delete_all([self._keys.serialize(key) for key in keys])

    def flush(self) -> None:
        self._writes.flush()

    def _serialized(self, value: V) -> bytes:
        # Also where the serde could write it (JSON's null): `get` gives None for a key that is not there.
        if value is None:
            raise TypeError("None is not a value: to remove a key call delete(key)")
        return self._values.serialize(value)
