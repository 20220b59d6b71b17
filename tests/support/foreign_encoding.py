"""A reader of keys and rows from docs/encoding.md alone: nothing of keyfold.

One value at a time, from Spark's types as JSON. Values are those of JSON and Python's `datetime`, as Arrow's
`to_pylist` gives them, except that a float in a key is the key's one.
"""

from __future__ import annotations

import datetime as dt
import re
import struct
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa

UTC = dt.timezone.utc
DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)$")
INTS = {
    "byte": 1, "short": 2, "integer": 4, "long": 8, "date": 4, "timestamp": 8, "timestamp_ntz": 8,
    "interval": 8, "time": 8,
}  # fmt: skip

ARROW = {
    "boolean": pa.bool_(), "byte": pa.int8(), "short": pa.int16(), "integer": pa.int32(), "long": pa.int64(),
    "float": pa.float32(), "double": pa.float64(), "string": pa.utf8(), "binary": pa.binary(),
    "date": pa.date32(), "timestamp": pa.timestamp("us", "UTC"), "timestamp_ntz": pa.timestamp("us"),
    "void": pa.null(), "interval": pa.duration("us"), "time": pa.time64("ns"),
}  # fmt: skip


class Misfit(Exception):
    """Bytes that no value has."""


def _name(kind: Any) -> str:
    """Without the parts of an interval and the digits of a time."""
    name = str(kind if isinstance(kind, str) else kind["type"])
    return next((prefix for prefix in ("interval", "time") if re.match(rf"{prefix}[ (]", name)), name)


def _fields(kind: Any) -> list[dict[str, Any]]:
    """Of a struct, or of a variant, which is one."""
    if kind == "variant":
        return [{"name": name, "type": "binary", "nullable": False} for name in ("value", "metadata")]
    fields: list[dict[str, Any]] = kind["fields"]
    return fields


def _of_number(kind: str, number: int) -> Any:
    if kind == "date":
        return dt.date(1970, 1, 1) + dt.timedelta(number)
    if kind == "timestamp":
        return dt.datetime(1970, 1, 1, tzinfo=UTC) + dt.timedelta(microseconds=number)
    if kind == "interval":
        return dt.timedelta(microseconds=number)
    if kind == "time":
        return (dt.datetime(1970, 1, 1, tzinfo=UTC) + dt.timedelta(microseconds=number // 1000)).time()
    if kind == "timestamp_ntz":
        return dt.datetime(1970, 1, 1, tzinfo=UTC).replace(tzinfo=None) + dt.timedelta(microseconds=number)
    if found := DECIMAL.match(kind):
        return Decimal(number).scaleb(-int(found[2]), Context(prec=38))
    return number


def value_type(fields: list[dict[str, Any]]) -> pa.DataType:
    """The type of `value` in a segment with these value columns, all of which may be null."""
    return pa.struct([pa.field(f["name"], arrow_type(f["type"])) for f in fields])


def arrow_type(kind: Any) -> pa.DataType:
    name = _name(kind)
    if found := DECIMAL.match(name):
        return pa.decimal128(int(found[1]), int(found[2]))
    if name in ("struct", "variant"):
        return pa.struct([pa.field(f["name"], arrow_type(f["type"]), f["nullable"]) for f in _fields(kind)])
    if name == "array":
        return pa.list_(pa.field("element", arrow_type(kind["elementType"]), kind["containsNull"]))
    if name == "map":
        value = pa.field("value", arrow_type(kind["valueType"]), kind["valueContainsNull"])
        return pa.map_(pa.field("key", arrow_type(kind["keyType"]), nullable=False), value)
    return ARROW[name.partition(" ")[0]]


# -- keys ----------------------------------------------------------------------------------------------------


class _Key:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) < count:
            raise Misfit("a key that is too short")
        self.at += count
        return found

    def value(self, kind: Any, *, last: bool = False) -> Any:
        name = _name(kind)
        if name == "boolean":
            return {b"\0": False, b"\1": True}[self.take(1)]
        if name in INTS or DECIMAL.match(name):
            size = INTS.get(name) or (8 if int(DECIMAL.match(name)[1]) <= 18 else 16)  # type: ignore[index]
            return _of_number(name, int.from_bytes(self.take(size), "big") - (1 << (8 * size - 1)))
        if name in ("float", "double"):
            return self.number(4 if name == "float" else 8)
        if name in ("string", "binary"):
            raw = self.take(len(self.data) - self.at) if last else self.escaped()
            return raw.decode() if name == "string" else raw
        if name == "struct":
            return {f["name"]: self.marked(f["type"]) for f in kind["fields"]}
        if name != "array":
            raise Misfit(name)
        items = []
        while self.data[self.at : self.at + 1] != b"\0":
            items.append(self.marked(kind["elementType"]))
        self.take(1)
        return items

    def marked(self, kind: Any) -> Any:
        mark = self.take(1)
        if mark not in (b"\1", b"\2"):
            raise Misfit("a mark")
        return None if mark == b"\1" else self.value(kind)

    def number(self, size: int) -> float:
        bits = int.from_bytes(self.take(size), "big")
        top = 1 << (8 * size - 1)
        bits = bits ^ top if bits & top else bits ^ (2 * top - 1)
        found: float = struct.unpack(">f" if size == 4 else ">d", bits.to_bytes(size, "big"))[0]
        return found

    def escaped(self) -> bytes:
        found = bytearray()
        while (c := self.take(1)) != b"\0":
            if c == b"\1":
                found += {b"\1": b"\0", b"\2": b"\1"}[self.take(1)]
            else:
                found += c
        return bytes(found)


def read_key(data: bytes, kinds: list[Any]) -> list[Any]:
    """The values of the key columns with these types."""
    key = _Key(data)
    values = [key.value(kind, last=i == len(kinds) - 1) for i, kind in enumerate(kinds)]
    if key.at != len(data):
        raise Misfit("a key that is too long")
    return values


# -- rows ----------------------------------------------------------------------------------------------------


def read_row(data: bytes, schemas: list[list[dict[str, Any]]]) -> tuple[int, dict[str, Any]]:
    """The number of the row's schema, and its values. `schemas` are the value columns of schema 1, 2, …"""
    number = int.from_bytes(data[:2], "little")
    if not 1 <= number <= len(schemas) or len(data) < 2:
        raise Misfit("a number of no schema")
    return number, _struct(data[2:], schemas[number - 1])


def _struct(data: bytes, fields: list[dict[str, Any]]) -> dict[str, Any]:
    values = _values(data, 0, [f["type"] for f in fields])
    return {f["name"]: value for f, value in zip(fields, values, strict=True)}


def _array(data: bytes, kind: Any) -> list[Any]:
    count = int.from_bytes(data[:4], "little")
    return _values(data, 4, [kind] * count)


def _values(data: bytes, at: int, kinds: list[Any]) -> list[Any]:
    """The values of a struct or array: null bits from `at` on, fixed parts, variable bytes."""
    nulls = int.from_bytes(data[at : at + -(-len(kinds) // 8)], "little")
    at += -(-len(kinds) // 8)
    fixed = []
    for kind in kinds:
        size = _size(kind)
        fixed.append(data[at : at + size])
        at += size
    if at > len(data):
        raise Misfit("too short")
    start, base, found = at, at, []
    for i, (kind, part) in enumerate(zip(kinds, fixed, strict=True)):
        raw = part
        if _is_variable(kind):
            end = base + int.from_bytes(part, "little")
            if not start <= end <= len(data):
                raise Misfit("an end")
            raw, start = data[start:end], end
        found.append(None if nulls >> i & 1 else _value(raw, kind))
    if start != len(data):
        raise Misfit("too long")
    return found


def _is_variable(kind: Any) -> bool:
    return _name(kind) in ("binary", "struct", "variant", "array", "map") or _name(kind).startswith("string")


def _size(kind: Any) -> int:
    name = _name(kind)
    if name in INTS:
        return INTS[name]
    return {"void": 0, "boolean": 1, "float": 4, "double": 8}.get(name, 16 if DECIMAL.match(name) else 4)


def _value(raw: bytes, kind: Any) -> Any:
    name = _name(kind)
    if name in ("struct", "variant"):
        return _struct(raw, _fields(kind))
    if name == "array":
        return _array(raw, kind["elementType"])
    if name == "map":
        entry = [{"name": "key", "type": kind["keyType"]}, {"name": "value", "type": kind["valueType"]}]
        entries = _array(raw, {"type": "struct", "fields": entry})
        return [(pair["key"], pair["value"]) for pair in entries]
    if name == "boolean":
        return {b"\0": False, b"\1": True}[raw]
    if name in ("float", "double"):
        return struct.unpack("<f" if name == "float" else "<d", raw)[0]
    if name == "binary":
        return raw
    if name.startswith("string"):
        return raw.decode()
    return _of_number(name, int.from_bytes(raw, "little", signed=True))
