"""Encodes a key from Python values, to the same bytes that Spark writes. `json_codec` defines the form."""

from __future__ import annotations

import datetime
import decimal
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.errors import BadRecord
from keyfold.statestore.schema.json_codec import decode_objects

_ESCAPED = re.compile(r'[\x00-\x1f"\\]')
_SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def encode_object(schema: pa.Schema, values: Sequence[object]) -> bytes:
    """One key as JSON, equal to the bytes that Spark writes. For single lookups, not for batches.

    Raises:
        BadRecord: A value does not fit its column; `position` names the column.
    """
    members = (_member(field, value) for field, value in zip(schema, values, strict=True))
    return ("{" + ",".join(members) + "}").encode()


def encode_raw(field: pa.Field, value: object) -> bytes:
    """One key of a single string or binary column. Raises the same errors as `encode_object`."""
    if pa.types.is_string(field.type) and isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise _unfit(field, value) from None
    if pa.types.is_binary(field.type) and isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise _unfit(field, value)


def first_other_form(keys: pa.Array, schema: pa.Schema) -> int | None:
    """The first key that is not in Spark's form: Spark writes the same key with other bytes, as a second key.

    Args:
        keys: Each is known to be JSON of `schema`.
    """
    plain = pc.match_substring_regex(keys, _plain_pattern(schema)).to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(~plain)
    if not len(rows):
        return None
    # Keys with escapes, fractions of decimals, nulls in structs and so on are encoded again, one by one.
    others = keys.take(pa.array(rows))
    for row, key, values in zip(rows, others, _rows(decode_objects(others, schema, keys=True)), strict=True):
        if values is not None and encode_object(schema, values) != key.as_py():
            return int(row)
    return None


def _rows(table: pa.Table) -> Iterator[list[object] | None]:
    """The values of each row; None if Python cannot represent a date in it."""
    for row in range(table.num_rows):
        try:
            yield [column[row].as_py() for column in table.columns]
        except (ValueError, OverflowError):
            yield None


def _plain_pattern(schema: pa.Schema) -> str:
    """A pattern that matches only keys in Spark's form: not all of them, but all common ones."""
    members = [f"{re.escape(_string(field.name))}:{_plain(field.type)}" for field in schema]
    return r"\A\{" + ",".join(members) + r"\}\z"


def _plain(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "(?:true|false)"
    if pa.types.is_integer(kind):
        return "(?:0|-?[1-9][0-9]*)"
    if pa.types.is_string(kind):
        return r'"[^"\\\x00-\x1f]*"'
    if pa.types.is_binary(kind):
        return '"(?:[0-9A-F][0-9A-F])*"'
    if pa.types.is_date(kind):
        return '"[0-9]{4}-[0-9]{2}-[0-9]{2}"'
    if pa.types.is_timestamp(kind):
        return (
            r'"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}'
            + ("Z" if kind.tz else "")
            + '"'
        )
    if pa.types.is_floating(kind):
        return r'"-?0x1\.(?:0|[0-9a-f]*[1-9a-f])p(?:0|-?[1-9][0-9]*)"'
    if pa.types.is_decimal(kind):
        return "-?[1-9][0-9]*" + (rf"\.[0-9]{{{kind.scale}}}" if kind.scale else "")
    if pa.types.is_list(kind):
        item = _plain(kind.value_type)
        return rf"\[(?:{item}(?:,{item})*)?\]"
    return _plain_pattern(pa.schema(list(kind))).removeprefix(r"\A").removesuffix(r"\z")


def _member(field: pa.Field, value: object) -> str:
    try:
        return f"{_string(field.name)}:{_text(value, field.type)}"
    except (TypeError, ValueError, ArithmeticError):
        raise _unfit(field, value) from None


def _unfit(field: pa.Field, value: object) -> BadRecord:
    return BadRecord(
        "A value does not fit its key column.",
        position=f"column {field.name!r}",
        expected=field.type,
        found=f"a {type(value).__name__}",
        remedy="give a value of the column's type, within its range",
    )


def _text(value: object, kind: pa.DataType) -> str:
    if value is None:
        return "null"
    if pa.types.is_string(kind) and isinstance(value, str):
        value.encode()
        return _string(value)
    if pa.types.is_boolean(kind) and isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if pa.types.is_integer(kind) and not isinstance(value, bool):
        return str(pa.scalar(operator.index(value), kind).as_py())  # type: ignore[arg-type]
    if pa.types.is_floating(kind) and isinstance(value, (int, float, np.floating)):
        return _string(_bits(float(np.float32(value)) if pa.types.is_float32(kind) else float(value)))
    if pa.types.is_decimal(kind) and isinstance(value, (int, decimal.Decimal)):
        return _decimal(decimal.Decimal(value), kind)
    if pa.types.is_binary(kind) and isinstance(value, (bytes, bytearray, memoryview)):
        return f'"{bytes(value).hex().upper()}"'
    if pa.types.is_temporal(kind):
        return f'"{_time(value, kind)}"'
    if pa.types.is_list(kind) and isinstance(value, (list, tuple)):
        return "[" + ",".join(_text(item, kind.value_type) for item in value) + "]"
    if pa.types.is_struct(kind):
        return _struct(value, kind)
    raise TypeError


def _struct(value: object, kind: pa.StructType) -> str:
    names = [field.name for field in kind]
    if isinstance(value, Mapping):
        if not set(value) <= set(names):
            raise ValueError
        items = [value.get(name) for name in names]
    elif isinstance(value, (list, tuple)) and len(value) == len(names):
        items = list(value)
    else:
        raise TypeError
    members = zip(kind, items, strict=True)
    return "{" + ",".join(f"{_string(f.name)}:{_text(v, f.type)}" for f, v in members if v is not None) + "}"


def _string(value: str) -> str:
    return '"' + _ESCAPED.sub(lambda found: _SHORT.get(found[0], f"\\u{ord(found[0]):04X}"), value) + '"'


def _bits(value: float) -> str:
    """The form of Java's `%a`: `0x1.8p0`. Zero has no sign, and there is one NaN."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if value == 0:
        return "0x0.0p0"
    mantissa, exponent = value.hex().split("p")
    whole, fraction = mantissa.split(".")
    return f"{whole}.{fraction.rstrip('0') or '0'}p{int(exponent)}"


def _decimal(value: decimal.Decimal, kind: pa.Decimal128Type) -> str:
    if not value.is_finite():
        raise ValueError
    context = decimal.Context(prec=kind.precision, traps=[decimal.Inexact, decimal.InvalidOperation])
    exact = value.quantize(decimal.Decimal((0, (1,), -kind.scale)), context=context)
    return str(exact if exact else exact.copy_abs())


def _time(value: object, kind: pa.DataType) -> str:
    if pa.types.is_date32(kind):
        if not isinstance(value, datetime.date) or isinstance(value, datetime.datetime):
            raise TypeError
        return value.isoformat()
    if not isinstance(value, datetime.datetime) or (value.tzinfo is None) != (kind.tz is None):
        raise TypeError
    if value.tzinfo is None:
        return value.isoformat(timespec="microseconds")
    utc = value.astimezone(datetime.timezone.utc).replace(tzinfo=None)
    return utc.isoformat(timespec="microseconds") + "Z"
