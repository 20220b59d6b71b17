"""Encodes a key from Python values, to the same bytes as `key_codec`. For single lookups, not for batches."""

from __future__ import annotations

import datetime
import decimal
import math
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from keyfold.statestore.errors import BadRecord
from keyfold.statestore.schema.key_codec import END, ESCAPES, LONG_DIGITS, NULL, VALUE, is_integral

_END = bytes([END])
_NULL = bytes([NULL])
_VALUE = bytes([VALUE])
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_EPOCH_DAY = datetime.date(1970, 1, 1).toordinal()
_MICROSECOND = datetime.timedelta(microseconds=1)
_FLOATS = {4: struct.Struct(">f"), 8: struct.Struct(">d")}


def encode_values(schema: pa.Schema, values: Sequence[object], *, whole: bool = True) -> bytes:
    """The bytes of the first key columns of `schema`.

    Args:
        values: At least one, at most one per column.
        whole: Whether this is a whole key. A bound of a range may have nulls in fields of structs that are
            not nullable.

    Raises:
        BadRecord: A value does not fit its column; `position` names the column.
    """
    encoded = b""
    for i, value in enumerate(values):
        field = schema.field(i)
        try:
            if i == len(schema) - 1 and (pa.types.is_string(field.type) or pa.types.is_binary(field.type)):
                encoded += _plain_bytes(value, field.type)
            else:
                encoded += _bytes(value, field.type, whole)
        except (TypeError, ValueError, ArithmeticError):
            raise _unfit(field, value) from None
    return encoded


class KeyEncoder:
    """`encode_values` for whole keys, fast where every value has exactly the usual Python type: for lookups
    one by one.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._usual = [_usual(field.type, last=i == len(schema) - 1) for i, field in enumerate(schema)]

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyEncoder, (self._schema,)

    def __call__(self, values: Sequence[object]) -> bytes:
        """The bytes of a key with one value per column. Raises `BadRecord`."""
        encoded = b""
        try:
            for (kind, encode), value in zip(self._usual, values, strict=True):
                if type(value) is not kind:
                    return encode_values(self._schema, values)
                encoded += encode(value)
        except (ValueError, OverflowError):
            # Says which value does not fit, and why.
            return encode_values(self._schema, values)
        return encoded


def _usual(kind: pa.DataType, *, last: bool) -> tuple[type, Callable[[Any], bytes]]:
    """The Python type of values of one column, and how one is encoded."""
    if pa.types.is_integer(kind):
        width = kind.bit_width // 8
        zero = 1 << (8 * width - 1)
        return int, lambda number: (number + zero).to_bytes(width, "big")
    if pa.types.is_string(kind):
        return str, str.encode if last else lambda text: _escaped(text.encode()) + _END
    if pa.types.is_binary(kind):
        return bytes, bytes if last else lambda data: _escaped(data) + _END
    return type(None), bytes


def encode_beginning(schema: pa.Schema, column: int, begins: bytes | str) -> bytes:
    """The bytes with which every key begins whose string or binary in `column` begins with `begins`.

    Raises:
        BadRecord: The column is not a string or binary.
    """
    field = schema.field(column)
    if not (pa.types.is_string(field.type) or pa.types.is_binary(field.type)):
        raise _unfit(field, begins)
    try:
        data = begins.encode() if isinstance(begins, str) else bytes(begins)
    except UnicodeEncodeError:
        raise _unfit(field, begins) from None
    return data if column == len(schema) - 1 else _escaped(data)


def _unfit(field: pa.Field, value: object) -> BadRecord:
    return BadRecord(
        "A value does not fit its key column.",
        position=f"column {field.name!r}",
        expected=field.type,
        found=f"a {type(value).__name__}",
        remedy="give a value of the column's type, within its range",
    )


def _bytes(value: object, kind: pa.DataType, whole: bool) -> bytes:
    """Raises `TypeError`, `ValueError` or `ArithmeticError` for a value that does not fit."""
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _escaped(_plain_bytes(value, kind)) + _END
    if pa.types.is_boolean(kind) and isinstance(value, (bool, np.bool_)):
        return b"\x01" if value else b"\x00"
    if pa.types.is_floating(kind) and isinstance(value, (int, float, np.floating)):
        return _float(float(value), kind.bit_width // 8)
    if pa.types.is_decimal(kind) and isinstance(value, (int, decimal.Decimal)):
        return _integer(_unscaled(decimal.Decimal(value), kind), 8 if kind.precision <= LONG_DIGITS else 16)
    if pa.types.is_struct(kind):
        members = zip(kind, _fields(value, kind), strict=True)
        return b"".join(_marked(item, field, whole) for field, item in members)
    if pa.types.is_list(kind) and isinstance(value, (list, tuple)):
        return b"".join(_marked(item, kind.value_field, whole) for item in value) + _END
    if is_integral(kind):
        return _integer(_number(value, kind), kind.bit_width // 8)
    raise TypeError


def _marked(value: object, field: pa.Field, whole: bool) -> bytes:
    if value is not None:
        return _VALUE + _bytes(value, field.type, whole)
    if whole and not field.nullable:
        raise ValueError
    return _NULL


def _plain_bytes(value: object, kind: pa.DataType) -> bytes:
    if pa.types.is_string(kind) and isinstance(value, str):
        return value.encode()
    if pa.types.is_binary(kind) and isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError


def _escaped(data: bytes) -> bytes:
    for byte, written in ESCAPES:
        data = data.replace(byte, written)
    return data


def _integer(value: int, width: int) -> bytes:
    return (value + (1 << (8 * width - 1))).to_bytes(width, "big")


def _float(value: float, width: int) -> bytes:
    # Adding zero removes the sign of a negative zero. A number out of range raises OverflowError.
    packed = _FLOATS[width].pack(math.nan if math.isnan(value) else value + 0.0)
    bits = int.from_bytes(packed, "big")
    sign = 1 << (8 * width - 1)
    return (bits ^ (2 * sign - 1 if bits & sign else sign)).to_bytes(width, "big")


def _unscaled(value: decimal.Decimal, kind: pa.Decimal128Type) -> int:
    if not value.is_finite():
        raise ValueError
    context = decimal.Context(prec=kind.precision, traps=[decimal.Inexact, decimal.InvalidOperation])
    exact = value.quantize(decimal.Decimal((0, (1,), -kind.scale)), context=context)
    return int(exact.scaleb(kind.scale, decimal.Context(prec=kind.precision)))


def _number(value: object, kind: pa.DataType) -> int:
    """The integer that stands for the value."""
    if pa.types.is_integer(kind) and not isinstance(value, bool):
        return operator.index(value)  # type: ignore[arg-type]
    if (
        pa.types.is_date(kind)
        and isinstance(value, datetime.date)
        and not isinstance(value, datetime.datetime)
    ):
        return value.toordinal() - _EPOCH_DAY
    if pa.types.is_timestamp(kind) and isinstance(value, datetime.datetime):
        if (value.tzinfo is None) != (kind.tz is None):
            raise TypeError
        return _microseconds(value - (_EPOCH if kind.tz else _EPOCH.replace(tzinfo=None)))
    if pa.types.is_duration(kind) and isinstance(value, datetime.timedelta):
        return _microseconds(value)
    if pa.types.is_time(kind) and isinstance(value, datetime.time) and value.tzinfo is None:
        seconds = (value.hour * 60 + value.minute) * 60 + value.second
        return (seconds * 1_000_000 + value.microsecond) * 1000
    raise TypeError


def _microseconds(value: datetime.timedelta) -> int:
    """Raises `ValueError` for a part of one, which times of pandas can have."""
    count, rest = divmod(value, _MICROSECOND)
    if rest:
        raise ValueError
    return count


def _fields(value: object, kind: pa.StructType) -> list[object]:
    names = [field.name for field in kind]
    if isinstance(value, Mapping):
        if not set(value) <= set(names):
            raise ValueError
        return [value.get(name) for name in names]
    if isinstance(value, (list, tuple)) and len(value) == len(names):
        return list(value)
    raise TypeError
