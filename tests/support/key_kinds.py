"""Types that can be in a key: their values, and the order that Spark gives the values."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from keyfold.statestore.schema.spark_types import arrow_schema

SQL_NAMES = {"tinyint": "byte", "smallint": "short", "int": "integer", "bigint": "long"}


@dataclass(frozen=True)
class Kind:
    """A type in Spark's JSON, and its values as Python has them."""

    json: Any
    values: st.SearchStrategy[Any]

    @property
    def arrow(self) -> pa.DataType:
        return arrow_schema([field("k", self.json)]).field(0).type


def field(name: str, kind: Any, nullable: bool = True) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": nullable, "metadata": {}}


def _integers(bits: int) -> st.SearchStrategy[int]:
    least, most = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return st.sampled_from([least, least + 1, -1, 0, 1, 255, 256, most]).map(
        lambda n: min(max(n, least), most)
    ) | st.integers(least, most)


def _decimals(digits: int, scale: int) -> st.SearchStrategy[Decimal]:
    most = 10**digits - 1
    edges = st.sampled_from([-most, -(1 << 63), -(1 << 64), -1, 0, 1, 1 << 63, 1 << 64, most])
    whole = edges.filter(lambda n: abs(n) <= most) | st.integers(-most, most)
    return whole.map(lambda n: Decimal((n < 0, tuple(map(int, str(abs(n)))), -scale)))


#: Few characters, among them those that are escaped, so that equal beginnings are common.
TEXTS = st.text("\0\1\2a\x7fé￿😀", max_size=5) | st.text(st.characters(exclude_categories=["Cs"]))
BYTES = st.lists(st.sampled_from([0, 1, 2, 97, 255]), max_size=5).map(bytes) | st.binary()
NAIVE = st.datetimes() | st.sampled_from([dt.datetime.min, dt.datetime.max])  # noqa: DTZ901
_MICROS = st.timedeltas(dt.timedelta(microseconds=-(1 << 63)), dt.timedelta(microseconds=(1 << 63) - 1))

ATOMIC = [
    Kind("boolean", st.booleans()),
    Kind("byte", _integers(8)),
    Kind("short", _integers(16)),
    Kind("integer", _integers(32)),
    Kind("long", _integers(64)),
    Kind("float", st.floats(width=32) | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf])),
    Kind("double", st.floats() | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf])),
    Kind("decimal(5,2)", _decimals(5, 2)),
    Kind("decimal(18,18)", _decimals(18, 18)),
    Kind("decimal(19,0)", _decimals(19, 0)),
    Kind("decimal(38,10)", _decimals(38, 10)),
    Kind("string", TEXTS),
    Kind("binary", BYTES),
    Kind("date", st.dates()),
    Kind("timestamp", NAIVE.map(lambda t: t.replace(tzinfo=dt.timezone.utc))),
    Kind("timestamp_ntz", NAIVE),
    Kind("interval day to second", _MICROS),
    Kind("time(6)", st.times()),
]


def _array(inner: Kind) -> Kind:
    kind = {"type": "array", "elementType": inner.json, "containsNull": True}
    return Kind(kind, st.lists(st.none() | inner.values, max_size=4))


def _struct(inner: list[Kind]) -> Kind:
    fields = [field(f"f{i}", kind.json) for i, kind in enumerate(inner)]
    values = {f"f{i}": st.none() | kind.values for i, kind in enumerate(inner)}
    return Kind({"type": "struct", "fields": fields}, st.fixed_dictionaries(values))


KINDS = st.recursive(
    st.sampled_from(ATOMIC),
    lambda inner: inner.map(_array) | st.lists(inner, max_size=3).map(_struct),
    max_leaves=4,
)


def ordered(value: Any) -> Any:
    """A value that Python orders as Spark orders the columns: null first, NaN last, one zero."""
    if value is None:
        return (0,)
    if isinstance(value, float):
        return (1, math.isnan(value), 0.0 if math.isnan(value) else value + 0.0)
    if isinstance(value, str):
        return (1, value.encode())
    if isinstance(value, dict):
        return (1, *(ordered(item) for _, item in sorted(value.items())))
    if isinstance(value, list):
        return (1, [ordered(item) for item in value])
    return (1, value)


def schema_of(kinds: list[Kind]) -> pa.Schema:
    return arrow_schema([field(f"k{i}", kind.json) for i, kind in enumerate(kinds)])


def columns_of(kinds: list[Kind], rows: list[tuple[Any, ...]]) -> list[pa.Array]:
    return [pa.array([row[i] for row in rows], kind.arrow) for i, kind in enumerate(kinds)]


# -- the test vectors of docs/encoding.md --------------------------------------------------------------------


def parsed_types(text: str) -> list[Any]:
    """Types in SQL, separated by commas, as Spark's JSON."""
    return [_parsed_type(part) for part in _split(text)]


def _split(text: str) -> list[str]:
    """The parts between the commas that are in no brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "<(") - (c in ">)")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]


def _parsed_type(text: str) -> Any:
    if text.startswith("array<"):
        return {"type": "array", "elementType": _parsed_type(text[6:-1]), "containsNull": True}
    if text.startswith("map<"):
        key, value = parsed_types(text[4:-1])
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
    if text.startswith("struct<"):
        members = (member.split(":", 1) for member in _split(text[7:-1]))
        return {"type": "struct", "fields": [field(n.strip(), _parsed_type(t.strip())) for n, t in members]}
    return SQL_NAMES.get(text, text)


def parsed_value(value: Any, kind: pa.DataType) -> Any:
    """What the JSON of a test vector stands for."""
    if value is None or isinstance(value, bool):
        return value
    if pa.types.is_map(kind):
        return [(parsed_value(k, kind.key_type), parsed_value(v, kind.item_type)) for k, v in value]
    if pa.types.is_list(kind):
        return [parsed_value(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {f.name: parsed_value(value[f.name], f.type) for f in kind}
    if pa.types.is_floating(kind):
        return float(value)
    if pa.types.is_decimal(kind):
        return Decimal(value)
    if pa.types.is_binary(kind):
        return bytes.fromhex(value)
    if pa.types.is_date(kind):
        return dt.date.fromisoformat(value)
    if pa.types.is_timestamp(kind):
        return dt.datetime.fromisoformat(value.replace("Z", "+00:00"))
    if pa.types.is_time(kind):
        return dt.time.fromisoformat(value)
    return dt.timedelta(microseconds=value) if pa.types.is_duration(kind) else value
