"""Encodes columns as JSON with Spark expressions only: no Python function per row.

`keyfold.statestore.schema.json_codec` defines the form. The result does not depend on the session: its time
zone, ANSI mode, `spark.sql.legacy.*` or the defaults of `to_json`. So dates and timestamps are not formatted
by `to_json`, whose formatters depend on the legacy time parser policy.
"""

from __future__ import annotations

import datetime
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

Floats = Literal["number", "text"]
Kinds = tuple[type[T.DataType], ...]
Leaf = Callable[[Column, T.DataType], Column]

FLOATS = (T.FloatType, T.DoubleType)
TIMES = (T.DateType, T.TimestampType, T.TimestampNTZType)
_REWRITTEN = (*TIMES, T.BinaryType, T.MapType)
_FLOAT_MAX = {T.FloatType: 3.4028234663852886e38, T.DoubleType: 1.7976931348623157e308}
_DAY_MICROS = 86_400_000_000
# Days of 0001-01-01 and 9999-12-31 since 1970: the range of ISO 8601, SQL and Python.
_DAYS = (-719_162, 2_932_896)
# Only Spark's formatter for timestamps without a time zone ignores all session settings. So timestamps are
# converted to it, in UTC.
_OPTIONS = {"ignoreNullFields": "true", "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'"}

#: An error that Spark raises for a row begins with `MARK`. The remedy follows after `REMEDY`.
MARK = "keyfold: "
REMEDY = "\n  what to do: "


class Part(NamedTuple):
    """A column of a key or value: its name, and its source column and type."""

    name: str
    column: Column
    kind: T.DataType


def value_object(parts: Sequence[Part]) -> Column:
    """The text of a value. With NaN or an infinity it begins with a space, and its floats are strings."""
    plain = _object([(name, _written(col, kind, "number")) for name, col, kind in parts])
    special = [_any(col, kind, _not_finite) for _, col, kind in parts if _contains(kind, FLOATS)]
    if not special:
        return plain
    text = _object([(name, _written(col, kind, "text")) for name, col, kind in parts])
    return F.when(either(special), F.concat(F.lit(" "), text)).otherwise(plain)


def refusing(encoded: Column, parts: Sequence[Part]) -> Column:
    """`encoded`, or an error for a row in which one of its columns cannot be written exactly."""
    refused = [
        (_any(col, kind, wrong), raised(f"Column {name!r} {problem}.", remedy))
        for name, col, kind in parts
        for kinds, wrong, problem, remedy in _UNWRITABLE
        if _contains(kind, kinds)
    ]
    if not refused:
        return encoded
    # One CASE WHEN with many branches: the time to plan nested ones grows with the square of their depth.
    case = F.when(*refused[0])
    for condition, error in refused[1:]:
        case = case.when(condition, error)
    return case.otherwise(encoded)


def refusing_key(part: Part) -> Column:
    """A key column as it is, or an error for a row in which it has a string that is not UTF-8.

    Arrow does not check the strings that Spark hands to Python.
    """
    name, col, kind = part
    if not _contains(kind, (T.StringType,)):
        return col
    wrong = _any(col, kind, _not_utf8)
    return F.when(wrong, raised(f"Column {name!r} {_NOT_UTF8}.", _UTF8_REMEDY, kind)).otherwise(col)


_BINARY = T.BinaryType()


def raised(what: str, remedy: str, kind: T.DataType = _BINARY) -> Column:
    """An expression of type `kind` that raises an error, without the row's content."""
    return F.raise_error(F.lit(f"{MARK}{what}{REMEDY}{remedy}")).cast(kind)


def either(conditions: Sequence[Column]) -> Column:
    return functools.reduce(operator.or_, conditions)


# -- how a column is written ---------------------------------------------------------------------------------


def _object(members: Sequence[tuple[str, Column]]) -> Column:
    """The JSON object of these members, without those that are null."""
    if not members:
        return F.lit("{}")
    return F.to_json(F.struct(*(col.alias(name) for name, col in members)), _OPTIONS)


def _written(col: Column, kind: T.DataType, floats: Floats) -> Column:
    """`col` converted so that Spark's `to_json` writes it in keyfold's form."""
    if not _contains(kind, _REWRITTEN if floats == "number" else (*_REWRITTEN, *FLOATS)):
        return col
    if isinstance(kind, FLOATS):
        return col.cast("string")
    if isinstance(kind, T.BinaryType):
        return F.hex(col)
    if isinstance(kind, T.DateType):
        return _date_text(col)
    if isinstance(kind, T.TimestampType):
        return _utc(col)
    if isinstance(kind, T.TimestampNTZType):
        return _ntz_text(col)
    if isinstance(kind, T.ArrayType):
        return F.transform(col, lambda item: _written(item, kind.elementType, floats))
    if isinstance(kind, T.MapType):
        return F.transform(F.map_entries(col), lambda entry: _entry(entry, kind, floats))
    assert isinstance(kind, T.StructType)
    members = [
        _written(inner, f.dataType, floats).alias(f.name)
        for f, inner in zip(kind, _members(col, kind), strict=True)
    ]
    return F.when(col.isNotNull(), F.struct(*members))


def _entry(entry: Column, kind: T.MapType, floats: Floats) -> Column:
    return F.struct(
        _written(entry.getField("key"), kind.keyType, floats).alias("key"),
        _written(entry.getField("value"), kind.valueType, floats).alias("value"),
    )


def _members(col: Column, kind: T.StructType) -> list[Column]:
    """The fields of a struct by name. If names differ only in case, Spark needs temporary names."""
    names = kind.names
    if len({name.lower() for name in names}) < len(names):
        names = [f"f{i}" for i in range(len(names))]
        col = col.cast(T.StructType([T.StructField(n, f.dataType) for n, f in zip(names, kind, strict=True)]))
    return [col.getField(name) for name in names]


def _date_text(date: Column) -> Column:
    return F.substring(date.cast("timestamp_ntz").cast("string"), 1, 10)


def _utc(timestamp: Column) -> Column:
    """The timestamp's date and time in UTC. `to_json` writes it with a Z."""
    epoch = F.lit("1970-01-01").cast("timestamp_ntz")
    return epoch + F.lit(datetime.timedelta(microseconds=1)) * F.unix_micros(timestamp)


def _ntz_text(timestamp: Column) -> Column:
    """`2013-01-31T10:00:00.500000`. Spark's own text drops trailing zeros."""
    text = timestamp.cast("string")
    pointed = F.when(F.length(text) == 19, F.concat(text, F.lit("."))).otherwise(text)
    return F.replace(F.rpad(pointed, 26, F.lit("0")), F.lit(" "), F.lit("T"))


# -- what is in a column -------------------------------------------------------------------------------------


def _contains(kind: T.DataType, kinds: Kinds) -> bool:
    """Whether a type is one of `kinds` or contains one."""
    if isinstance(kind, T.ArrayType):
        return _contains(kind.elementType, kinds)
    if isinstance(kind, T.MapType):
        return T.MapType in kinds or _contains(kind.keyType, kinds) or _contains(kind.valueType, kinds)
    if isinstance(kind, T.StructType):
        return any(_contains(f.dataType, kinds) for f in kind)
    return isinstance(kind, kinds)


def _any(col: Column, kind: T.DataType, leaf: Leaf) -> Column:
    """Whether `leaf` holds anywhere in `col`; never null."""
    if isinstance(kind, T.ArrayType):
        found = F.exists(col, lambda item: _any(item, kind.elementType, leaf))
    elif isinstance(kind, T.MapType):
        in_keys = F.exists(F.map_keys(col), lambda key: _any(key, kind.keyType, leaf))
        found = in_keys | F.exists(F.map_values(col), lambda value: _any(value, kind.valueType, leaf))
    elif isinstance(kind, T.StructType):
        members = zip(kind, _members(col, kind), strict=True)
        found = either([F.lit(False), *(_any(inner, f.dataType, leaf) for f, inner in members)])
    else:
        found = leaf(col, kind)
    return F.coalesce(found, F.lit(False))


def _not_finite(col: Column, kind: T.DataType) -> Column:
    # In Spark, NaN is larger than any number.
    return F.abs(col) > F.lit(_FLOAT_MAX[type(kind)]) if isinstance(kind, FLOATS) else F.lit(False)


def _not_utf8(col: Column, kind: T.DataType) -> Column:
    return ~F.is_valid_utf8(col) if isinstance(kind, T.StringType) else F.lit(False)


def _not_iso(col: Column, kind: T.DataType) -> Column:
    first, last = _DAYS
    if isinstance(kind, T.TimestampType):
        return ~F.unix_micros(col).between(first * _DAY_MICROS, (last + 1) * _DAY_MICROS - 1)
    if isinstance(kind, (T.DateType, T.TimestampNTZType)):
        return ~F.unix_date(col.cast("date")).between(first, last)
    return F.lit(False)


_NOT_UTF8 = "has a string that is not valid UTF-8"
_UTF8_REMEDY = "cast it to binary, or use make_valid_utf8(column)"
_UNWRITABLE: tuple[tuple[Kinds, Leaf, str, str], ...] = (
    (
        (T.StringType,),
        _not_utf8,
        _NOT_UTF8,
        _UTF8_REMEDY,
    ),
    (
        TIMES,
        _not_iso,
        "has a date or time outside the years 0001 to 9999",
        "set it to null, or store it as a number",
    ),
)
