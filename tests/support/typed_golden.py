"""Values of every type: in Spark's SQL, and as Arrow gives them to Python."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

UTC = dt.timezone.utc


@dataclass(frozen=True)
class Golden:
    """A value: its type in Spark's JSON, the value as SQL, and whether a key can have this type."""

    kind: Any
    sql: str
    value: Any
    in_key: bool = True


def array(kind: Any, contains_null: bool = True) -> dict[str, Any]:
    return {"type": "array", "elementType": kind, "containsNull": contains_null}


def struct(**fields: Any) -> dict[str, Any]:
    members = [{"name": n, "type": kind, "nullable": True, "metadata": {}} for n, kind in fields.items()]
    return {"type": "struct", "fields": members}


def map_of(key: Any, value: Any) -> dict[str, Any]:
    return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}


GOLDEN = [
    Golden("boolean", "true", True),
    Golden("byte", "cast(-128 as tinyint)", -128),
    Golden("short", "cast(32767 as smallint)", 32767),
    Golden("integer", "-2147483648", -2147483648),
    Golden("long", "9223372036854775807", 9223372036854775807),
    Golden("float", "float(0.1)", 0.10000000149011612),
    Golden("float", "float(1.4E-45)", 1.401298464324817e-45),
    Golden("float", "float('-Infinity')", float("-inf")),
    Golden("double", "double(0.1)", 0.1),
    Golden("double", "4.9E-324D", 5e-324),
    Golden("double", "1.7976931348623157E308D", 1.7976931348623157e308),
    Golden("double", "double('-0.0')", -0.0, False),
    Golden("double", "double('NaN')", float("nan")),
    Golden("decimal(5,2)", "cast(-1.5 as decimal(5,2))", Decimal("-1.50")),
    Golden("decimal(38,0)", "cast(repeat('9', 38) as decimal(38,0))", Decimal("9" * 38)),
    Golden("decimal(38,38)", "cast('1E-38' as decimal(38,38))", Decimal("1E-38")),
    Golden("decimal(20,10)", "cast(0 as decimal(20,10))", Decimal("0E-10")),
    Golden("string", r"'a\"b\\c/d\u0000\u001F\n\t\u007Fé😀'", 'a"b\\c/d\0\x1f\n\t\x7fé😀'),
    Golden("string", "''", ""),
    Golden("binary", "x'00fF7f'", b"\x00\xff\x7f"),
    Golden("date", "date'0001-01-01'", dt.date(1, 1, 1)),
    Golden("date", "date'1582-10-10'", dt.date(1582, 10, 10)),
    Golden("date", "date'9999-12-31'", dt.date(9999, 12, 31)),
    Golden("timestamp", "timestamp'2013-01-31 10:00:00.000001Z'", dt.datetime(2013, 1, 31, 10, 0, 0, 1, UTC)),
    Golden("timestamp", "timestamp'0001-01-01 00:00:00Z'", dt.datetime(1, 1, 1, tzinfo=UTC)),
    Golden("timestamp", "timestamp'1582-10-10 23:59:59.999999Z'",
           dt.datetime(1582, 10, 10, 23, 59, 59, 999999, UTC)),
    Golden("timestamp", "timestamp'9999-12-31 23:59:59.999999Z'",
           dt.datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)),
    Golden("timestamp_ntz", "timestamp_ntz'0001-01-01 00:00:00'", dt.datetime(1, 1, 1)),  # noqa: DTZ001
    Golden("timestamp_ntz", "timestamp_ntz'9999-12-31 23:59:59.999999'",
           dt.datetime(9999, 12, 31, 23, 59, 59, 999999)),  # noqa: DTZ001
    Golden("interval day to second", "interval '-1 02:03:04.5' day to second",
           -dt.timedelta(days=1, hours=2, minutes=3, seconds=4.5)),
    Golden("interval hour", "interval '7' hour", dt.timedelta(hours=7)),
    Golden("time(6)", "time'23:59:59.999999'", dt.time(23, 59, 59, 999999)),
    Golden("variant", "parse_json('{\"a\":1}')",
           {"value": b"\2\1\0\0\2\x0c\1", "metadata": b"\1\1\0\1a"}, False),
    Golden("void", "null", None, False),
    Golden(array("integer"), "array(1, null)", [1, None]),
    Golden(array("integer"), "cast(array() as array<int>)", []),
    Golden(array("void"), "array(null, null)", [None, None], False),
    Golden(array(array("string")), "array(array('a', null), null)", [["a", None], None]),
    Golden(array("variant"), "array(parse_json('1'), null)",
           [{"value": b"\x0c\1", "metadata": b"\1\0\0"}, None], False),
    Golden(struct(x="integer", y="string"), "named_struct('x', cast(null as int), 'y', 'b')",
           {"x": None, "y": "b"}),
    Golden(struct(x="integer"), "named_struct('x', cast(null as int))", {"x": None}),
    Golden(struct(x="date", X="integer"), "named_struct('x', date'2013-01-31', 'X', 1)",
           {"x": dt.date(2013, 1, 31), "X": 1}),
    Golden(array(struct(d="date", v="void")), "array(named_struct('d', date'2013-01-31', 'v', null), null)",
           [{"d": dt.date(2013, 1, 31), "v": None}, None], False),
    Golden(array("double"), "array(-0.0D, double('NaN'), null)", [-0.0, float("nan"), None], False),
    Golden(map_of("string", "integer"), "map('b', 1, 'a', null)", [("b", 1), ("a", None)], False),
    Golden(map_of("binary", array("date")), "map(x'0a', array(date'2013-01-31'))",
           [(b"\n", [dt.date(2013, 1, 31)])], False),
    Golden(map_of("integer", "integer"), "cast(map() as map<int,int>)", [], False),
]  # fmt: skip


def exact(value: Any) -> str:
    """A text that is equal for equal values only: NaN is NaN, -0.0 is not 0.0, zones are UTC."""
    return repr(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    return value
