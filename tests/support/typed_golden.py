"""The exact bytes of every type in a row of a store: the format, pinned. What Spark writes must come back as
these values. The bytes of keys are in the test vectors of `docs/encoding.md`.

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
    """A value: its type in Spark's JSON and as SQL, the row with it alone in hexadecimal digits, and whether
    a key can have this type.
    """

    kind: Any
    sql: str
    value: Any
    row: str
    in_key: bool = True


def array(kind: Any, contains_null: bool = True) -> dict[str, Any]:
    return {"type": "array", "elementType": kind, "containsNull": contains_null}


def struct(**fields: Any) -> dict[str, Any]:
    members = [{"name": n, "type": kind, "nullable": True, "metadata": {}} for n, kind in fields.items()]
    return {"type": "struct", "fields": members}


def map_of(key: Any, value: Any) -> dict[str, Any]:
    return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}


GOLDEN = [
    Golden("boolean", "true", True, "01000001"),
    Golden("byte", "cast(-128 as tinyint)", -128, "01000080"),
    Golden("short", "cast(32767 as smallint)", 32767, "010000ff7f"),
    Golden("integer", "-2147483648", -2147483648, "01000000000080"),
    Golden("long", "9223372036854775807", 9223372036854775807, "010000ffffffffffffff7f"),
    Golden("float", "float(0.1)", 0.10000000149011612, "010000cdcccc3d"),
    Golden("float", "float(1.4E-45)", 1.401298464324817e-45, "01000001000000"),
    Golden("double", "double(0.1)", 0.1, "0100009a9999999999b93f"),
    Golden("double", "1e10D", 1e10, "010000000000205fa00242"),
    Golden("double", "double(-12)", -12.0, "01000000000000000028c0"),
    Golden("double", "4.9E-324D", 5e-324, "0100000100000000000000"),
    Golden("double", "1.7976931348623157E308D", 1.7976931348623157e308, "010000ffffffffffffef7f"),
    Golden("double", "double('-0.0')", -0.0, "0100000000000000000080"),
    Golden("double", "double(0)", 0.0, "0100000000000000000000"),
    Golden(
        "decimal(5,2)",
        "cast(-1.5 as decimal(5,2))",
        Decimal("-1.50"),
        "0100006affffffffffffffffffffffffffffff",
    ),
    Golden(
        "decimal(38,0)",
        "cast(repeat('9', 38) as decimal(38,0))",
        Decimal("9" * 38),
        "010000ffffffff3f228a097ac4865aa84c3b4b",
    ),
    Golden(
        "decimal(38,38)",
        "cast('1E-38' as decimal(38,38))",
        Decimal("1E-38"),
        "01000001000000000000000000000000000000",
    ),
    Golden(
        "decimal(20,10)",
        "cast(0 as decimal(20,10))",
        Decimal("0E-10"),
        "01000000000000000000000000000000000000",
    ),
    Golden(
        "string",
        r"'a\"b\\c/d\u0000\u001F\n\t\u007Fé😀'",
        'a"b\\c/d\0\x1f\n\t\x7fé😀',
        "010000120000006122625c632f64001f0a097fc3a9f09f9880",
    ),
    Golden("string", "''", "", "01000000000000"),
    Golden("binary", "x'00fF7f'", b"\x00\xff\x7f", "0100000300000000ff7f"),
    Golden("date", "date'0001-01-01'", dt.date(1, 1, 1), "010000c606f5ff"),
    Golden("date", "date'1582-10-10'", dt.date(1582, 10, 10), "01000088d7fdff"),
    Golden("date", "date'9999-12-31'", dt.date(9999, 12, 31), "010000a0c02c00"),
    Golden(
        "timestamp",
        "timestamp'2013-01-31 10:00:00.000001Z'",
        dt.datetime(2013, 1, 31, 10, 0, 0, 1, UTC),
        "010000016899b092d40400",
    ),
    Golden(
        "timestamp",
        "timestamp'0001-01-01 00:00:00Z'",
        dt.datetime(1, 1, 1, tzinfo=UTC),
        "0100000040d400014023ff",
    ),
    Golden(
        "timestamp",
        "timestamp'1582-10-10 23:59:59.999999Z'",
        dt.datetime(1582, 10, 10, 23, 59, 59, 999999, UTC),
        "010000ff5fe2b94d96d4ff",
    ),
    Golden(
        "timestamp",
        "timestamp'9999-12-31 23:59:59.999999Z'",
        dt.datetime(9999, 12, 31, 23, 59, 59, 999999, UTC),
        "010000ff5f73cc0c448403",
    ),
    Golden(
        "timestamp_ntz",
        "timestamp_ntz'0001-01-01 00:00:00'",
        dt.datetime(1, 1, 1),  # noqa: DTZ001
        "0100000040d400014023ff",
    ),
    Golden(
        "timestamp_ntz",
        "timestamp_ntz'1582-10-10 23:59:59.999999'",
        dt.datetime(1582, 10, 10, 23, 59, 59, 999999),  # noqa: DTZ001
        "010000ff5fe2b94d96d4ff",
    ),
    Golden(
        "timestamp_ntz",
        "timestamp_ntz'9999-12-31 23:59:59.999999'",
        dt.datetime(9999, 12, 31, 23, 59, 59, 999999),  # noqa: DTZ001
        "010000ff5f73cc0c448403",
    ),
    Golden(
        "interval day to second",
        "interval '-1 0:0:2.000003' day to second",
        dt.timedelta(-1, -2, -3),
        "0100007d1b0ae2ebffffff",
    ),
    Golden(array("integer"), "array(1, null)", [1, None], "0100000d00000002000000020100000000000000"),
    Golden(array("integer"), "cast(array() as array<int>)", [], "0100000400000000000000"),
    Golden(array("void"), "array(null, null)", [None, None], "010000050000000200000003", False),
    Golden(
        array(array("string")),
        "array(array('a', null), null)",
        [["a", None], None],
        "0100001b00000002000000020e0000000e0000000200000002010000000100000061",
    ),
    Golden(
        struct(x="integer", y="string"),
        "named_struct('x', cast(null as int), 'y', 'b')",
        {"x": None, "y": "b"},
        "0100000a00000001000000000100000062",
    ),
    Golden(
        struct(x="integer"), "named_struct('x', cast(null as int))", {"x": None}, "010000050000000100000000"
    ),
    Golden(
        struct(x="date", X="integer"),
        "named_struct('x', date'2013-01-31', 'X', 1)",
        {"x": dt.date(2013, 1, 31), "X": 1},
        "0100000900000000783d000001000000",
    ),
    Golden(
        array(struct(d="date", v="void")),
        "array(named_struct('d', date'2013-01-31', 'v', null), null)",
        [{"d": dt.date(2013, 1, 31), "v": None}, None],
        "010000120000000200000002050000000500000002783d0000",
        False,
    ),
    Golden(
        array("double"),
        "array(1.5D, null)",
        [1.5, None],
        "010000150000000200000002000000000000f83f0000000000000000",
    ),
    Golden(
        map_of("string", "integer"),
        "map('b', 1, 'a', null)",
        [("b", 1), ("a", None)],
        "0100002100000002000000000a000000140000000001000000010000006202010000000000000061",
        False,
    ),
    Golden(
        map_of("binary", array("date")),
        "map(x'0a', array(date'2013-01-31'))",
        [(b"\n", [dt.date(2013, 1, 31)])],
        "0100001c00000001000000001300000000010000000a0000000a0100000000783d0000",
        False,
    ),
    Golden(map_of("integer", "integer"), "cast(map() as map<int,int>)", [], "0100000400000000000000", False),
    Golden("double", "double('NaN')", float("nan"), "010000000000000000f87f"),
    Golden("float", "float('-Infinity')", float("-inf"), "010000000080ff"),
    Golden("double", "double('Infinity')", float("inf"), "010000000000000000f07f"),
    Golden(
        map_of("string", array("double")),
        "map('a', array(-0.0D, null))",
        [("a", [-0.0, None])],
        "0100002800000001000000001f00000000010000001600000061020000000200000000000000800000000000000000",
        False,
    ),
    Golden("string", "'NaN'", "NaN", "010000030000004e614e"),
    Golden(
        "interval day to second",
        "interval '-1 02:03:04.5' day to second",
        -dt.timedelta(days=1, hours=2, minutes=3, seconds=4.5),
        "010000e018022aeaffffff",
    ),
    Golden("interval hour", "interval '7' hour", dt.timedelta(hours=7), "010000007c09de05000000"),
    Golden("time(6)", "time'23:59:59.999999'", dt.time(23, 59, 59, 999999), "01000018fc4e91944e0000"),
    Golden(
        "variant",
        "parse_json('{\"a\":1}')",
        {"value": b"\2\1\0\0\2\x0c\1", "metadata": b"\1\1\0\1a"},
        "0100001500000000070000000c00000002010000020c010101000161",
        False,
    ),
    Golden("void", "null", None, "010001", False),
    Golden(
        array("variant"),
        "array(parse_json('1'), null)",
        [{"value": b"\x0c\1", "metadata": b"\1\0\0"}, None],
        "0100001b00000002000000020e0000000e0000000002000000050000000c01010000",
        False,
    ),
    Golden(
        array("double"),
        "array(-0.0D, double('NaN'), null)",
        [-0.0, float("nan"), None],
        "0100001d00000003000000040000000000000080000000000000f87f0000000000000000",
        False,
    ),
]


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
