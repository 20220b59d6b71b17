"""What typed keys and values are, without Spark: their Arrow types, the rows of stores, single keys."""

from __future__ import annotations

import datetime as dt
import json
import math
import random
import struct as packing
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from keyfold.statestore.errors import BadRecord, ConfigError, SchemaMismatch
from keyfold.statestore.schema.columns import RAW, Columns
from support.typed_golden import GOLDEN, UTC, Golden, array, exact, map_of, struct


def field(name: str, kind: Any, nullable: bool = True) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": nullable, "metadata": {}}


def columns(*fields: dict[str, Any], keys: tuple[str, ...] = ("k",)) -> Columns:
    """Columns with a string key "k" unless others are given."""
    if keys == ("k",) and all(f["name"] != "k" for f in fields):
        fields = (field("k", "string", False), *fields)
    return Columns({"type": "struct", "fields": list(fields)}, keys)


def decoded(of: Columns, *values: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The value columns of a table that is decoded from these values, as they are and as rows of a store."""
    keys, typed = pa.array([b"k"] * len(values), pa.binary()), pa.array(values, of.value_type)
    table = of.decode(keys, typed)
    table.validate(full=True)
    assert table.schema == of.arrow_schema()
    again = of.decode(keys, of.decode_rows(of.encode_rows(typed)))
    assert exact(again.to_pylist()) == exact(table.to_pylist())
    found: list[dict[str, Any]] = table.drop_columns(["k"]).to_pylist()
    return found


# -- the format ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: f"{g.sql[:40]}")
def test_the_bytes_of_a_row_give_the_value(golden: Golden) -> None:
    of = columns(field("v", golden.kind))
    row = bytes.fromhex(golden.row)
    expected = exact({"v": golden.value})
    assert exact(of.decode_row(row)) == expected
    assert exact(of.decode_rows(pa.array([row], pa.binary())).to_pylist()) == f"[{expected}]"
    assert of.encode_row({"v": golden.value}) == row
    assert of.encode_rows(pa.array([{"v": golden.value}], of.value_type)).to_pylist() == [row]


def test_every_type_of_arrow_comes_back_from_a_table_of_records() -> None:
    for golden in GOLDEN:
        of = columns(field("v", golden.kind))
        rows = [{"v": golden.value}, None, {"v": None}]
        assert exact(decoded(of, *rows)) == exact([{"v": golden.value}, {"v": None}, {"v": None}])


def test_a_key_has_its_columns_in_the_order_of_keys() -> None:
    of = columns(field("k", "string"), field("n", "long"), keys=("n", "k"))
    key = b"\x80\0\0\0\0\0\0\7a\0"
    table = of.decode(pa.array([key], pa.binary()), pa.array([{}], of.value_type))
    table.validate(full=True)
    assert table.to_pylist() == [{"k": "a\0", "n": 7}]
    assert of.encode_key(7, "a\0") == key
    assert of.encode_key({"k": "a\0", "n": 7}) == key


def test_a_key_of_one_string_or_binary_is_its_bytes() -> None:
    of = columns(field("v", "binary"), field("k", "string"))
    values = pa.array([{"v": b"\xff"}, None], of.value_type)
    table = of.decode(pa.array(["é".encode(), b""], pa.binary()), values)
    assert table.to_pylist() == [{"v": b"\xff", "k": "é"}, {"v": None, "k": ""}]
    assert of.encode_key("é") == "é".encode()


def test_columns_come_in_the_order_of_the_dataframe() -> None:
    of = columns(field("b", "long"), field("k", "string"), field("a", "long"))
    table = of.decode(pa.array([b"x"]), pa.array([{"a": 1, "b": 2}], of.value_type))
    assert table.column_names == ["b", "k", "a"]
    assert table.to_pylist() == [{"b": 2, "k": "x", "a": 1}]


def test_absent_null_and_empty_are_three_things() -> None:
    of = columns(field("s", struct(x="integer")), field("a", array("integer")))
    rows: list[dict[str, Any] | None] = [{}, {"s": {}, "a": []}, {"s": {"x": 1}, "a": [None]}, None]
    assert decoded(of, *rows) == [
        {"s": None, "a": None},
        {"s": {"x": None}, "a": []},
        {"s": {"x": 1}, "a": [None]},
        {"s": None, "a": None},
    ]


def test_names_may_hold_dots_quotes_and_differ_in_case() -> None:
    of = columns(field('a."b', "long"), field("é\n", "long"), field("x", "long"), field("X", "long"))
    value = {'a."b': 1, "é\n": 2, "x": 3, "X": 4}
    assert decoded(of, value) == [value]


def test_nullability_inside_a_column_is_kept() -> None:
    kind = {
        "type": "struct",
        "fields": [field("x", "integer", False), field("a", array("date", False), False)],
    }
    of = columns(field("s", kind))
    expected = pa.struct(
        [
            pa.field("x", pa.int32(), nullable=False),
            pa.field("a", pa.list_(pa.field("element", pa.date32(), nullable=False)), nullable=False),
        ]
    )
    assert of.arrow_schema().field("s").type.equals(expected)
    assert decoded(of, {"s": {"x": 1, "a": []}}, {}) == [{"s": {"x": 1, "a": []}}, {"s": None}]


def test_no_records_give_an_empty_table_of_all_columns() -> None:
    of = columns(field("d", "double"), field("v", "void"), field("m", map_of("string", "date")))
    assert decoded(of) == []
    assert of.decode(pa.chunked_array([], pa.binary()), pa.chunked_array([], of.value_type)).num_rows == 0


def test_a_value_without_columns_is_an_empty_struct() -> None:
    of = columns()
    values = pa.array([{}, None], of.value_type)
    assert of.decode(pa.array([b"a", b"b"]), values).to_pylist() == [{"k": "a"}, {"k": "b"}]
    rows = of.encode_rows(values)
    assert rows.to_pylist() == [b"\1\0", None]
    assert of.decode_rows(rows).to_pylist() == [{}, None]
    assert of.encode_row({}) == b"\1\0"
    assert of.decode_row(b"\1\0") == {}


def test_a_column_of_nulls_only_needs_no_bytes() -> None:
    of = columns(field("v", "void"))
    assert of.arrow_schema().field("v").type == pa.null()
    assert decoded(of, {}, None) == [{"v": None}, {"v": None}]
    assert of.encode_row({"v": None}) == b"\1\0\1"


def test_slices_and_chunks_are_decoded_where_they_begin() -> None:
    of = columns(field("b", "binary"), field("d", "double"))
    blobs = [{"b": b"\1"}, {"b": b"\2"}, None, {"d": math.nan, "b": b"\3\4"}, {"b": b"\5"}]
    values = pa.array(blobs, of.value_type)
    keys = pa.array([b"0", b"1", b"2", b"3", b"4"], pa.binary())
    whole = of.decode(keys, values).select(["k", "b"]).to_pylist()
    assert [row["b"] for row in whole] == [b"\1", b"\2", None, b"\3\4", b"\5"]
    for start in range(5):
        for end in range(start, 5):
            part = of.decode(keys[start:end], values[start:end])
            assert part.select(["k", "b"]).to_pylist() == whole[start:end]
    chunked = of.decode(pa.chunked_array([keys[:2], keys[2:]]), pa.chunked_array([values[:3], values[3:]]))
    assert chunked.select(["k", "b"]).to_pylist() == whole


def test_the_bits_of_any_double_and_float_come_back() -> None:
    of = columns(field("d", "double"), field("f", "float"), keys=("d", "f"))
    chance = random.Random(7)
    doubles = [packing.unpack("<d", chance.randbytes(8))[0] for _ in range(3000)]
    floats = [packing.unpack("<f", chance.randbytes(4))[0] for _ in range(3000)]
    # Subnormals are rare among random bits.
    doubles += [packing.unpack("<d", packing.pack("<Q", chance.getrandbits(52)))[0] for _ in range(500)]
    floats += [packing.unpack("<f", packing.pack("<I", chance.getrandbits(23)))[0] for _ in range(500)]
    keys = [of.encode_key(d, f) for d, f in zip(doubles, floats, strict=True)]
    table = of.decode(pa.array(keys), pa.nulls(len(keys), of.value_type))
    np.testing.assert_array_equal(table["d"].to_numpy(), np.array(doubles))
    np.testing.assert_array_equal(table["f"].to_numpy(), np.array(floats, dtype=np.float32))


# -- bytes that are not of the columns -----------------------------------------------------------------------


def test_values_of_other_columns_are_given_these_columns() -> None:
    """As a segment has them that was written before, or after, a column was added."""
    of = columns(field("a", "long"), field("b", "string"))
    other = pa.array([{"b": "x", "c": 1}, None], pa.struct({"b": pa.string(), "c": pa.int64()}))
    table = of.decode(pa.array([b"k", b"l"]), other)
    assert table.to_pylist() == [{"k": "k", "a": None, "b": "x"}, {"k": "l", "a": None, "b": None}]


@pytest.mark.parametrize("number", [0, 2, 65535])
def test_a_row_of_a_schema_that_the_changelog_does_not_have_is_refused(number: int) -> None:
    of = columns(field("n", "long"))
    good = of.encode_row({"n": 1})
    bad = number.to_bytes(2, "little") + good[2:]
    with pytest.raises(ValueError, match="a schema"):
        of.decode_row(bad)
    with pytest.raises(ValueError, match="a schema"):
        of.decode_rows(pa.array([good, bad]))


def test_rows_of_several_schemas_are_decoded_in_their_order() -> None:
    first = columns(field("a", "integer"))
    second = first.accepts(columns(field("a", "long"), field("b", "string")))
    third = second.accepts(columns(field("s", struct(x="date"))))
    rows = [
        first.encode_row({"a": 1}),
        third.encode_row({"a": 2, "s": {"x": dt.date(2020, 1, 1)}}),
        None,
        second.encode_row({"a": 1 << 40, "b": "x"}),
        first.encode_row({}),
    ]
    expected = [
        {"a": 1, "b": None, "s": None},
        {"a": 2, "b": None, "s": {"x": dt.date(2020, 1, 1)}},
        None,
        {"a": 1 << 40, "b": "x", "s": None},
        {"a": None, "b": None, "s": None},
    ]
    assert third.decode_rows(pa.array(rows, pa.binary())).to_pylist() == expected
    assert [row and third.decode_row(row) for row in rows] == expected
    with pytest.raises(ValueError, match="a schema"):
        first.decode_row(rows[3] or b"")


def test_a_string_key_that_is_not_utf8_is_refused() -> None:
    of = columns(field("n", "long"))
    with pytest.raises(SchemaMismatch, match="UTF-8"):
        of.decode(pa.array([b"\xff"]), pa.array([{}], of.value_type))


# -- which types ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("interval year to month", "v"),
        ("interval", "v"),
        ("char(3)", "v"),
        ("varchar(3)", "v"),
        ("geometry(SRID:0)", "v"),
        ("decimal(5,-2)", "v"),
        ("decimal(39,0)", "v"),
        ("decimal(5,6)", "v"),
        ("something", "v"),
        ({"type": "udt", "sqlType": "double"}, "v"),
        (array("interval"), "v[]"),
        (map_of("interval", "string"), "v[key]"),
        (map_of("string", struct(x=array("char(1)"))), "v[value].x[]"),
    ],
    ids=str,
)
def test_a_type_that_cannot_be_kept_is_refused_by_path_with_a_remedy(kind: Any, path: str) -> None:
    with pytest.raises(SchemaMismatch) as caught:
        columns(field("v", kind))
    assert caught.value.position == f"column {path!r}"
    assert caught.value.remedy


@pytest.mark.parametrize("kind", ["interval day to second", "interval hour", "time(6)"])
def test_keys_and_values_can_hold_times_of_day_and_intervals(kind: str) -> None:
    of = columns(field("k", kind), field("v", kind), keys=("k",))
    value = dt.time(1, 2, 3, 4) if kind.startswith("time") else dt.timedelta(-1, 2, 3)
    keys = pa.array([of.encode_key(value)])
    typed = pa.array([{"v": value}], of.value_type)
    assert of.decode(keys, typed).to_pylist() == [{"k": value, "v": value}]
    assert of.decode_rows(of.encode_rows(typed)).equals(typed)
    assert of.decode_row(of.encode_row({"v": value})) == {"v": value}
    for wrong in ("interval year to month", "char(3)", "interval"):
        with pytest.raises(SchemaMismatch, match="cannot be stored exactly"):
            columns(field("k", wrong), keys=("k",))


def test_a_variant_is_its_two_binaries_and_no_key() -> None:
    of = columns(field("v", "variant"))
    assert decoded(of, {"v": {"value": b"\x0c\x01", "metadata": b"\1\0\0"}}, {}) == [
        {"v": {"value": b"\x0c\x01", "metadata": b"\1\0\0"}},
        {"v": None},
    ]
    with pytest.raises(SchemaMismatch, match="A key cannot contain"):
        columns(field("k", "variant"), keys=("k",))


@pytest.mark.parametrize("kind", [map_of("string", "long"), array(map_of("string", "long")), "void"], ids=str)
def test_a_key_cannot_hold_a_map_or_only_nulls(kind: Any) -> None:
    with pytest.raises(SchemaMismatch, match="A key cannot contain"):
        columns(field("k", kind))
    columns(field("v", kind))


def test_a_collated_string_is_kept_in_a_value_and_refused_in_any_key() -> None:
    def collated(name: str, kind: Any, path: str) -> dict[str, Any]:
        return {**field(name, kind), "metadata": {"__COLLATIONS": {path: "spark.UTF8_LCASE"}}}

    of = columns(
        collated("v", array("string"), "v.element"), collated("m", map_of("string", "string"), "m.value")
    )
    assert of.schema_json["fields"][1]["type"]["elementType"] == "string collate UTF8_LCASE"
    assert decoded(of, {"v": ["A"], "m": [("B", "C")]}) == [{"v": ["A"], "m": [("B", "C")]}]
    assert Columns.from_json(of.to_json()) == of
    inner = struct(x="string")
    inner["fields"] = [collated("x", "string", "x")]
    for bad in (
        field("v", map_of(inner, "long")),
        collated("v", map_of("string", "string"), "v.key"),
        collated("v", map_of(array("string"), "string"), "v.key.element"),
        collated("k", "string", "k"),
        field("k", array(inner)),
    ):
        with pytest.raises(SchemaMismatch, match="collation"):
            columns(bad)


def test_fields_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="the same name"):
        columns(field("a", "long"), field("a", "string"))
    twice = struct(x="long")
    twice["fields"] *= 2
    with pytest.raises(SchemaMismatch, match="the same name"):
        columns(field("a", twice))


@pytest.mark.parametrize("keys", [(), ("x",), ("b", "b"), "b", (1,)])
def test_keys_have_to_be_columns_each_named_once(keys: Any) -> None:
    schema = {"type": "struct", "fields": [field("a", "long"), field("b", "string"), field("c", "string")]}
    with pytest.raises(ConfigError):
        Columns(schema, keys)


def test_keys_of_another_encoding_are_refused_and_not_misread() -> None:
    """Such as those of a directory that an earlier version of the format made."""
    kept = columns(field("n", "long"), keys=("n",)).to_json()
    assert kept["key_encoding"] == "ordered"
    del kept["key_encoding"]
    for other, found in (({"key_format": "json"}, "none"), ({"key_encoding": "later"}, "'later'")):
        with pytest.raises(SchemaMismatch, match="cannot read the keys") as refused:
            Columns.from_json({**kept, **other}, path=Path("x/changelog.json"))
        assert (refused.value.path, refused.value.found) == ("x/changelog.json", found)
        assert refused.value.expected == "'ordered'"
        assert refused.value.remedy


def test_columns_survive_json_and_lose_what_belongs_to_one_query() -> None:
    watermarked = {**field("t", "timestamp"), "metadata": {"spark.watermarkDelayMs": 1, "comment": "when"}}
    of = columns(watermarked, field("s", struct(x="decimal(5,2)", y=map_of("string", "void"))))
    of = of.accepts(columns(watermarked, field("new", "long")))
    again = Columns.from_json(json.loads(json.dumps(of.to_json())))
    assert again == of
    assert len(again.earlier) == 1
    assert again.earlier == of.earlier
    assert again.arrow_schema() == of.arrow_schema()
    assert of.schema_json["fields"][1]["metadata"] == {"comment": "when"}
    assert RAW is None


MOMENT = dt.datetime(2013, 1, 31, 10, tzinfo=UTC)

# -- single keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("boolean", 1),
        ("byte", 128),
        ("long", True),
        ("long", 1.0),
        ("long", "1"),
        ("double", "1.5"),
        ("decimal(5,2)", Decimal("1.005")),
        ("decimal(5,2)", Decimal(1000)),
        ("decimal(5,2)", 1.5),
        ("decimal(5,2)", Decimal("NaN")),
        ("string", b"a"),
        ("string", "\ud800"),
        ("binary", "a"),
        ("date", "2013-01-31"),
        ("date", MOMENT),
        ("timestamp", MOMENT.replace(tzinfo=None)),
        ("timestamp_ntz", MOMENT),
        ("timestamp_ntz", pd.Timestamp("2013-01-31 10:00:00.000000001")),
        ("timestamp", pd.Timestamp("2013-01-31 10:00:00.000001001", tz="UTC")),
        ("interval day to second", pd.Timedelta(1, "ns")),
        (array("long"), 1),
        (struct(x="long"), {"y": 1}),
        (struct(x="long"), (1, 2)),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_its_key_column_is_refused_by_column(kind: Any, value: Any) -> None:
    of = columns(field("n", "long"), field("a b", kind), keys=("n", "a b"))
    with pytest.raises(BadRecord) as caught:
        of.encode_key(1, value)
    assert caught.value.position == "column 'a b'"


def test_a_raw_key_takes_its_own_type_only() -> None:
    of = columns(field("n", "long"))
    for bad in (b"a", 1, "\ud800"):
        with pytest.raises(BadRecord, match="column 'k'"):
            of.encode_key(bad)
    binary = columns(field("k", "binary"), field("n", "long"))
    assert binary.encode_key(b"\xff") == b"\xff"
    with pytest.raises(BadRecord):
        binary.encode_key("a")


def test_a_key_needs_every_part_and_no_null() -> None:
    of = columns(field("a", "long"), field("b", "long"), keys=("a", "b"))
    for parts in ((), (1,), (1, None), (1, 2, 3), ({"a": 1},)):
        with pytest.raises(BadRecord):
            of.encode_key(*parts)


def test_equal_keys_of_different_python_types_have_the_same_bytes() -> None:
    of = columns(field("d", "double"), field("e", "decimal(6,2)"), keys=("d", "e"))
    expected = b"\x80" + b"\0" * 7 + b"\x80" + b"\0" * 7
    for d, e in ((0, 0), (-0.0, Decimal("-0.000")), (np.float64(0), Decimal("0E+3"))):
        assert of.encode_key(d, e) == expected


def test_a_timestamp_of_any_zone_is_the_same_moment_in_utc() -> None:
    of = columns(field("t", "timestamp"), keys=("t",))
    for hours in (-11, 0, 5.5):
        moment = dt.datetime(2013, 1, 31, 20, 0, 0, 5, UTC).astimezone(dt.timezone(dt.timedelta(hours=hours)))
        assert of.encode_key(moment) == bytes.fromhex("8004D49B125DD005")


def test_a_number_in_a_float_key_is_the_nearest_float() -> None:
    of = columns(field("f", "float"), keys=("f",))
    assert of.encode_key(0.1) == of.encode_key(np.float32(0.1)) == b"\xbd\xcc\xcc\xcd"
    with pytest.raises(BadRecord):
        of.encode_key(1e40)


def test_a_range_of_window_starts_is_a_range_of_bytes() -> None:
    def window(minute: int) -> dict[str, dt.datetime]:
        start = dt.datetime(2024, 1, 1, 0, minute, tzinfo=UTC)
        return {"start": start, "end": start + dt.timedelta(minutes=5)}

    kind = struct(start="timestamp", end="timestamp")
    kind["fields"] = [{**f, "nullable": False} for f in kind["fields"]]
    of = columns(field("w", kind), field("word", "string"), keys=("w", "word"))
    keys = {of.encode_key(window(m), word): (m, word) for m in range(0, 60, 5) for word in ("", "a", "\xff")}
    low, high = (of.key_bound({"start": window(m)["start"]}) for m in (10, 30))
    assert [keys[key] for key in sorted(keys) if low <= key < high] == [
        (m, word) for m in (10, 15, 20, 25) for word in ("", "a", "\xff")
    ]
    prefix = of.key_prefix(window(10))
    assert [value for key, value in keys.items() if key.startswith(prefix)] == [
        (10, w) for w in ("", "a", "\xff")
    ]
    begins = of.key_prefix(window(10), begins="a")
    assert [value for key, value in keys.items() if key.startswith(begins)] == [(10, "a")]
    assert of.key_bound(window(10), "a") == of.encode_key(window(10), "a")


def test_a_bound_needs_values_of_the_first_columns() -> None:
    of = columns(field("a", "long"), field("b", "string"), keys=("a", "b"))
    for wrong in ((), (None,), (1, None), (1, "b", 2), ("b",)):
        with pytest.raises(BadRecord):
            of.key_bound(*wrong)
    for too_many in ((), (1, "b"), ("b",)):
        with pytest.raises(BadRecord):
            of.key_prefix(*too_many)
    with pytest.raises(BadRecord):
        of.key_prefix(begins="1")  # the first column is a number
    with pytest.raises(BadRecord):
        of.key_prefix(1, begins="\ud800")
    assert of.key_prefix(1) == of.encode_key(1, "")
    assert of.key_prefix(1, begins="b\0") == of.encode_key(1, "b\0")
