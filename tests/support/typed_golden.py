"""The exact bytes of every type in a value: the format, pinned. Spark has to write them, and the decoder to
read them. The bytes of keys are in the test vectors of `docs/encoding.md`.

A change here is a change of the format on disk.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

UTC = dt.timezone.utc


@dataclass(frozen=True)
class Golden:
    """A value: its type in Spark's JSON and as SQL, its text, and whether a key can have this type."""

    kind: Any
    sql: str
    value: Any
    text: str
    in_key: bool = True


def array(kind: Any, contains_null: bool = True) -> dict[str, Any]:
    return {"type": "array", "elementType": kind, "containsNull": contains_null}


def struct(**fields: Any) -> dict[str, Any]:
    members = [{"name": n, "type": kind, "nullable": True, "metadata": {}} for n, kind in fields.items()]
    return {"type": "struct", "fields": members}


def map_of(key: Any, value: Any) -> dict[str, Any]:
    return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}


GOLDEN = [
    Golden("boolean", "true", True, "true"),
    Golden("byte", "cast(-128 as tinyint)", -128, "-128"),
    Golden("short", "cast(32767 as smallint)", 32767, "32767"),
    Golden("integer", "-2147483648", -2147483648, "-2147483648"),
    Golden("long", "9223372036854775807", 9223372036854775807, "9223372036854775807"),
    Golden("float", "float(0.1)", 0.10000000149011612, "0.1"),
    Golden("float", "float(1.4E-45)", 1.401298464324817e-45, "1.4E-45"),
    Golden("double", "double(0.1)", 0.1, "0.1"),
    Golden("double", "1e10D", 1e10, "1.0E10"),
    Golden("double", "double(-12)", -12.0, "-12.0"),
    Golden("double", "4.9E-324D", 5e-324, "4.9E-324"),
    Golden("double", "1.7976931348623157E308D", 1.7976931348623157e308, "1.7976931348623157E308"),
    Golden("double", "double('-0.0')", -0.0, "-0.0"),
    Golden("double", "double(0)", 0.0, "0.0"),
    Golden("decimal(5,2)", "cast(-1.5 as decimal(5,2))", Decimal("-1.50"), "-1.50"),
    Golden("decimal(38,0)", "cast(repeat('9', 38) as decimal(38,0))", Decimal("9" * 38), "9" * 38),
    Golden("decimal(38,38)", "cast('1E-38' as decimal(38,38))", Decimal("1E-38"), "1E-38"),
    Golden("decimal(20,10)", "cast(0 as decimal(20,10))", Decimal("0E-10"), "0E-10"),
    Golden("string", r"'a\"b\\c/d\u0000\u001F\n\t\u007Fé😀'", 'a"b\\c/d\0\x1f\n\t\x7fé😀',
           r'"a\"b\\c/d\u0000\u001F\n\t' + '\x7fé😀"'),
    Golden("string", "''", "", '""'),
    Golden("binary", "x'00fF7f'", b"\x00\xff\x7f", '"00FF7F"'),
    Golden("date", "date'0001-01-01'", dt.date(1, 1, 1), '"0001-01-01"'),
    Golden("date", "date'1582-10-10'", dt.date(1582, 10, 10), '"1582-10-10"'),
    Golden("date", "date'9999-12-31'", dt.date(9999, 12, 31), '"9999-12-31"'),
    Golden("timestamp", "timestamp'2013-01-31 10:00:00.000001Z'", dt.datetime(2013, 1, 31, 10, 0, 0, 1, UTC),
           '"2013-01-31T10:00:00.000001Z"'),
    Golden("timestamp", "timestamp'0001-01-01 00:00:00Z'", dt.datetime(1, 1, 1, tzinfo=UTC),
           '"0001-01-01T00:00:00.000000Z"'),
    Golden("timestamp", "timestamp'1582-10-10 23:59:59.999999Z'",
           dt.datetime(1582, 10, 10, 23, 59, 59, 999999, UTC), '"1582-10-10T23:59:59.999999Z"'),
    Golden("timestamp", "timestamp'9999-12-31 23:59:59.999999Z'",
           dt.datetime(9999, 12, 31, 23, 59, 59, 999999, UTC), '"9999-12-31T23:59:59.999999Z"'),
    Golden("timestamp_ntz", "timestamp_ntz'0001-01-01 00:00:00'", dt.datetime(1, 1, 1),  # noqa: DTZ001
           '"0001-01-01T00:00:00.000000"'),
    Golden("timestamp_ntz", "timestamp_ntz'1582-10-10 23:59:59.999999'",
           dt.datetime(1582, 10, 10, 23, 59, 59, 999999), '"1582-10-10T23:59:59.999999"'),  # noqa: DTZ001
    Golden("timestamp_ntz", "timestamp_ntz'9999-12-31 23:59:59.999999'",
           dt.datetime(9999, 12, 31, 23, 59, 59, 999999), '"9999-12-31T23:59:59.999999"'),  # noqa: DTZ001
    Golden(array("integer"), "array(1, null)", [1, None], "[1,null]"),
    Golden(array("integer"), "cast(array() as array<int>)", [], "[]"),
    Golden(array("void"), "array(null, null)", [None, None], "[null,null]", False),
    Golden(array(array("string")), "array(array('a', null), null)", [["a", None], None], '[["a",null],null]'),
    Golden(struct(x="integer", y="string"), "named_struct('x', cast(null as int), 'y', 'b')",
           {"x": None, "y": "b"}, '{"y":"b"}'),
    Golden(struct(x="integer"), "named_struct('x', cast(null as int))", {"x": None}, "{}"),
    Golden(struct(x="date", X="integer"), "named_struct('x', date'2013-01-31', 'X', 1)",
           {"x": dt.date(2013, 1, 31), "X": 1}, '{"x":"2013-01-31","X":1}'),
    Golden(array(struct(d="date", v="void")), "array(named_struct('d', date'2013-01-31', 'v', null), null)",
           [{"d": dt.date(2013, 1, 31), "v": None}, None], '[{"d":"2013-01-31"},null]', False),
    Golden(array("double"), "array(1.5D, null)", [1.5, None], "[1.5,null]"),
    Golden(map_of("string", "integer"), "map('b', 1, 'a', null)", [("b", 1), ("a", None)],
           '[{"key":"b","value":1},{"key":"a"}]', False),
    Golden(map_of("binary", array("date")), "map(x'0a', array(date'2013-01-31'))",
           [(b"\n", [dt.date(2013, 1, 31)])], '[{"key":"0A","value":["2013-01-31"]}]', False),
    Golden(map_of("integer", "integer"), "cast(map() as map<int,int>)", [], "[]", False),
]  # fmt: skip

#: Values that are not finite: their record begins with a space and has every float as a string.
NOT_FINITE = [
    Golden("double", "double('NaN')", float("nan"), '"NaN"'),
    Golden("float", "float('-Infinity')", float("-inf"), '"-Infinity"'),
    Golden("double", "double('Infinity')", float("inf"), '"Infinity"'),
    Golden("double", "double(0.1)", 0.1, '"0.1"'),
    Golden("float", "float(0.1)", 0.10000000149011612, '"0.1"'),
    Golden(map_of("string", array("double")), "map('a', array(-0.0D, null))", [("a", [-0.0, None])],
           '[{"key":"a","value":["-0.0",null]}]', False),
    Golden("string", "'NaN'", "NaN", '"NaN"'),
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
