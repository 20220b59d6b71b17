"""The bytes of keys: those of docs/encoding.md, in the order of the columns, and back."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfold.statestore.errors import BadRecord, SchemaMismatch
from keyfold.statestore.schema import key_decoder
from keyfold.statestore.schema.key_codec import encode
from keyfold.statestore.schema.key_decoder import decode, first_misfit
from keyfold.statestore.schema.key_values import encode_beginning, encode_values
from keyfold.statestore.schema.spark_types import arrow_schema
from support.key_kinds import (
    ATOMIC,
    KINDS,
    Kind,
    columns_of,
    field,
    ordered,
    parsed_types,
    parsed_value,
    schema_of,
)

PAGE = Path(__file__).resolve().parents[3] / "docs/encoding.md"
UTC = dt.timezone.utc


def _vectors() -> list[tuple[str, str, bytes]]:
    table = PAGE.read_text().split("### Test vectors")[1].split("\n## ")[0]
    rows = [line[1:-1].split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    return [
        (types.strip(), values.strip(" `"), bytes.fromhex(key.strip(" `").replace("no bytes", "")))
        for types, values, key in rows
    ]


VECTORS = _vectors()
KEYS = st.lists(KINDS, min_size=1, max_size=3)


def rows_of(kinds: list[Kind], least: int = 0) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    return st.lists(st.tuples(*(kind.values for kind in kinds)), min_size=least, max_size=8)


def encoded(kinds: list[Kind], rows: list[tuple[Any, ...]]) -> list[bytes]:
    keys: list[bytes] = encode(columns_of(kinds, rows)).to_pylist()
    return keys


def test_the_page_has_a_vector_for_every_type() -> None:
    assert len(VECTORS) >= 40
    text = " ".join(types for types, _, _ in VECTORS)
    for kind in ATOMIC:
        name = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint"}.get(
            kind.json, kind.json
        )
        assert name.partition("(")[0] in text


@pytest.mark.parametrize(("types", "values", "key"), VECTORS)
def test_each_vector_of_the_page_is_written_and_read(types: str, values: str, key: bytes) -> None:
    schema = arrow_schema([field(f"k{i}", kind) for i, kind in enumerate(parsed_types(types))])
    row = [parsed_value(v, f.type) for v, f in zip(json.loads(f"[{values}]"), schema, strict=True)]
    columns = [pa.array([value], f.type) for value, f in zip(row, schema, strict=True)]
    assert encode(columns).to_pylist() == [key]
    assert encode_values(schema, row) == key
    read = decode(pa.array([key], pa.binary()), schema)
    read.validate(full=True)
    assert ordered(list(read.to_pylist()[0].values())) == ordered([c[0].as_py() for c in columns])


# -- order, equality, round trip -----------------------------------------------------------------------------


@given(st.data())
def test_the_order_of_bytes_is_the_order_of_columns(data: st.DataObject) -> None:
    """Also: keys are equal if and only if their bytes are."""
    kinds = data.draw(KEYS)
    rows = data.draw(rows_of(kinds, 2))
    keys = encoded(kinds, rows)
    values = [[ordered(value) for value in row] for row in rows]
    for one in range(len(rows)):
        for other in range(one):
            assert (keys[one] < keys[other]) == (values[one] < values[other])
            assert (keys[one] == keys[other]) == (values[one] == values[other])


@given(st.data())
def test_keys_give_the_columns_back(data: st.DataObject) -> None:
    kinds = data.draw(KEYS)
    rows = data.draw(rows_of(kinds))
    columns = columns_of(kinds, rows)
    found = decode(encode(columns), schema_of(kinds))
    found.validate(full=True)
    assert found.schema == schema_of(kinds)
    for column, name in zip(columns, found.column_names, strict=True):
        assert ordered(found[name].to_pylist()) == ordered(column.to_pylist())


@given(st.data())
def test_a_single_key_has_the_bytes_that_it_has_in_a_batch(data: st.DataObject) -> None:
    kinds = data.draw(KEYS)
    rows = data.draw(rows_of(kinds))
    assert [encode_values(schema_of(kinds), row) for row in rows] == encoded(kinds, rows)


@given(st.data())
def test_slices_and_chunks_of_any_offset_give_the_same(data: st.DataObject) -> None:
    kinds = data.draw(KEYS)
    rows = data.draw(rows_of(kinds, 2))
    start = data.draw(st.integers(0, len(rows) - 1))
    count = data.draw(st.integers(0, len(rows) - start))
    keys = encode(columns_of(kinds, rows))
    part = encode([column.slice(start, count) for column in columns_of(kinds, rows)])
    assert part.equals(keys.slice(start, count))
    whole = decode(keys, schema_of(kinds)).slice(start, count)
    assert ordered(decode(keys.slice(start, count), schema_of(kinds)).to_pylist()) == ordered(
        whole.to_pylist()
    )


@given(st.data())
def test_leading_columns_are_never_the_beginning_of_others(data: st.DataObject) -> None:
    """So the keys with the same leading columns are one range, and no others are in it."""
    kinds = data.draw(st.lists(KINDS, min_size=2, max_size=3))
    rows = data.draw(rows_of(kinds, 2))
    leading = data.draw(st.integers(1, len(kinds) - 1))
    schema = schema_of(kinds)
    for row, key in zip(rows, encoded(kinds, rows), strict=True):
        for other in rows:
            begins = key.startswith(encode_values(schema, other[:leading]))
            assert begins == (ordered(list(row[:leading])) == ordered(list(other[:leading])))


@given(st.data())
def test_a_string_begins_with_another_if_and_only_if_their_keys_do(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([kind for kind in ATOMIC if kind.json in ("string", "binary")]))
    after = data.draw(st.lists(st.sampled_from(ATOMIC), max_size=1))
    kinds = [kind, *after]
    rows = data.draw(rows_of(kinds, 1))
    begins = data.draw(kind.values | st.sampled_from([row[0][:2] for row in rows]))
    beginning = encode_beginning(schema_of(kinds), 0, begins)
    for row, key in zip(rows, encoded(kinds, rows), strict=True):
        assert key.startswith(beginning) == row[0].startswith(begins)


@given(st.data())
def test_a_lone_string_or_binary_is_its_own_bytes(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([kind for kind in ATOMIC if kind.json in ("string", "binary")]))
    rows = data.draw(rows_of([kind]))
    plain = [value.encode() if isinstance(value, str) else value for (value,) in rows]
    assert encoded([kind], rows) == plain


def test_every_integer_of_time_is_kept() -> None:
    """Also those that Python's datetime does not have."""
    edges = np.array([-(1 << 63), -1, 0, 1, (1 << 63) - 1], np.int64)
    for kind in (pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.duration("us")):
        column = pa.array(edges).cast(kind)
        keys = encode([column])
        assert keys.to_pylist() == sorted(keys.to_pylist())
        assert decode(keys, pa.schema([pa.field("t", kind)]))["t"].combine_chunks().equals(column)


def test_there_is_one_zero_and_one_nan() -> None:
    for bits, floats in ((64, np.float64), (32, np.float32)):
        sign, exponent = 1 << (bits - 1), 0x7FF << 52 if bits == 64 else 0xFF << 23
        nans = [exponent | 1, exponent | (1 << (22 if bits == 32 else 51)), exponent | 12345, (sign - 1)]
        words = np.array([*nans, *(sign | nan for nan in nans)], f"u{bits // 8}")
        assert len(set(encode([pa.array(words.view(floats))]).to_pylist())) == 1
        zeros = encode([pa.array(np.array([0.0, -0.0], floats))]).to_pylist()
        assert zeros[0] == zeros[1]


def test_strings_of_any_layout_and_any_time_zone_are_the_same_keys() -> None:
    text, moment = ["a\0", "", "é\1"], [dt.datetime(2020, 1, day, tzinfo=UTC) for day in (1, 2, 3)]
    for last in (False, True):
        keys = []
        for string, zone in ((pa.string(), "UTC"), (pa.large_string(), "Asia/Kolkata")):
            columns = [pa.array(text, string), pa.array(moment, pa.timestamp("us", zone))]
            keys.append(encode(columns[::-1] if last else columns))
        assert keys[0].type == keys[1].type == pa.binary()
        assert keys[0].equals(keys[1])


def test_many_keys_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_decoder, "_PIECE_ROWS", 7)
    columns = [pa.array(["x" * (n % 5) for n in range(100)]), pa.array(range(100))]
    schema = pa.schema([("s", pa.string()), ("n", pa.int64())])
    keys = encode(columns)
    assert decode(keys, schema).equals(pa.Table.from_arrays(columns, schema=schema))
    bad = pa.array([*keys.to_pylist()[:30], b"\0", *keys.to_pylist()[31:]])
    assert first_misfit(bad, schema) == (30, "n", "8 more bytes")


# -- bytes that are no key -----------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples * 3)
@given(st.data())
def test_only_the_bytes_that_encode_gives_are_read(data: st.DataObject) -> None:
    """Else one key could be written in two ways, which would be two keys."""
    kinds = data.draw(KEYS)
    schema = schema_of(kinds)
    key = bytearray(encoded(kinds, data.draw(rows_of(kinds, 1)))[0])
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(key)))
        length = data.draw(st.integers(0, 2))
        key[place : place + length] = data.draw(
            st.binary(max_size=2) | st.sampled_from([b"\0", b"\1", b"\2", b"\xff"])
        )
    keys = pa.array([bytes(key)], pa.binary())
    if first_misfit(keys, schema) is None:
        assert encode([column.combine_chunks() for column in decode(keys, schema).columns]).equals(keys)
    else:
        with pytest.raises(SchemaMismatch):
            decode(keys, schema)


BAD: list[tuple[str, str, str, str]] = [
    ("boolean", "02", "k0", "00 or 01"),
    ("int", "80 00 00", "k0", "4 more bytes"),
    ("int", "80 00 00 00 00", "k0", "the end of the key"),
    ("int, boolean", "80 00 00 00", "k1", "1 more bytes"),
    ("float", "7F FF FF FF", "k0", "the only NaN or zero"),
    ("double", "FF F0 00 00 00 00 00 01", "k0", "the only NaN or zero"),
    ("double", "00 00 00 00 00 00 00 00", "k0", "the only NaN or zero"),
    ("decimal(5,2)", "80 00 00 00 00 01 86 A0", "k0", "at most 5 digits"),
    ("decimal(5,2)", "7F FF FF FF FF FE 79 60", "k0", "at most 5 digits"),
    ("decimal(38,0)", "FF" * 16, "k0", "at most 38 digits"),
    ("decimal(38,0)", "00" * 16, "k0", "at most 38 digits"),
    ("decimal(38,0)", "CB3B4CA85A86C47A098A224000000000", "k0", "at most 38 digits"),
    ("decimal(38,0)", "34C4B357A5793B85F675DDC000000000", "k0", "at most 38 digits"),
    ("time(6)", "80 00 4E 94 91 4F 00 00", "k0", "within one day"),
    ("time(6)", "7F FF FF FF FF FF FF FF", "k0", "within one day"),
    ("string", "61 FF", "k0", "valid UTF-8"),
    ("string, int", "61 FF 00 80 00 00 00", "k0", "valid UTF-8"),
    ("string, int", "61 80", "k0", "a byte 00 at its end"),
    ("string, int", "61 01 00 80 00 00 00", "k0", "01 only before 01 or 02"),
    ("string, int", "61 01 03 00 80 00 00 00", "k0", "01 only before 01 or 02"),
    ("binary, int", "01 01 01 00 80 00 00 00", "k0", "01 only before 01 or 02"),
    ("struct<x:int>", "00 80 00 00 00", "k0.x", "the mark 01 or 02"),
    ("struct<x:int>", "03 80 00 00 00", "k0.x", "the mark 01 or 02"),
    ("struct<x:boolean,y:string>", "02 01 02 61", "k0.y", "a byte 00 at its end"),
    ("array<boolean>", "02 01 02", "k0[]", "1 more bytes"),
    ("array<boolean>", "02 01 03", "k0[]", "00 at the end"),
]


def _zero(kind: pa.DataType) -> pa.Array:
    if pa.types.is_nested(kind):
        return pa.array([[] if pa.types.is_list(kind) else {}], kind)
    if pa.types.is_decimal(kind):
        return pa.array([Decimal(0)], kind)
    return pa.array([b"" if pa.types.is_binary(kind) or pa.types.is_string(kind) else 0]).cast(kind)


@pytest.mark.parametrize(("types", "key", "column", "expected"), BAD)
def test_bytes_that_are_no_key_are_refused_with_row_and_column(
    types: str, key: str, column: str, expected: str
) -> None:
    schema = arrow_schema([field(f"k{i}", kind) for i, kind in enumerate(parsed_types(types))])
    good = encode([_zero(f.type) for f in schema])[0].as_py()
    keys = pa.array([good, bytes.fromhex(key), good, b"\x05\x05\x05"], pa.binary())
    found = first_misfit(keys, schema)
    assert found is not None
    assert (found.row, found.column) == (1, column)
    assert expected in found.expected
    with pytest.raises(SchemaMismatch) as refused:
        decode(keys, schema)
    assert refused.value.position == f"record 1 of the batch, column {column!r}"
    assert expected in str(refused.value.expected)
    assert refused.value.found == f"other bytes, {len(bytes.fromhex(key))} in all"
    assert refused.value.remedy


def test_the_first_bad_key_is_named_even_if_a_later_one_is_bad_in_an_earlier_column() -> None:
    schema = pa.schema([("a", pa.string()), ("b", pa.bool_())])
    keys = pa.array([b"a\0\1", b"a\0\2", b"a", b"a\0\1"], pa.binary())
    assert first_misfit(keys, schema) == (1, "b", "00 or 01")
    assert first_misfit(keys[2:], schema) == (0, "a", "a byte 00 at its end")


def test_a_null_in_a_field_that_is_not_nullable_is_refused() -> None:
    for kind in (
        pa.struct([pa.field("x", pa.int32(), nullable=False)]),
        pa.list_(pa.field("element", pa.int32(), nullable=False)),
    ):
        schema = pa.schema([pa.field("k", kind)])
        value: Any = {"x": None} if pa.types.is_struct(kind) else [None]
        key = b"\1" if pa.types.is_struct(kind) else b"\1\0"
        found = first_misfit(pa.array([key]), schema)
        assert found is not None
        assert "not null" in found.expected
        with pytest.raises(BadRecord, match="does not fit its key column"):
            encode_values(schema, [value])
        assert encode_values(schema, [value], whole=False) == key


def test_nullability_does_not_change_the_bytes() -> None:
    values = [{"x": 1}, {"x": 2}]
    nullable = pa.array(values, pa.struct([pa.field("x", pa.int32())]))
    not_null = pa.array(values, pa.struct([pa.field("x", pa.int32(), nullable=False)]))
    assert encode([nullable]).equals(encode([not_null]))


def test_a_null_column_and_a_type_that_is_no_key_are_refused() -> None:
    with pytest.raises(BadRecord, match="key column 1") as refused:
        encode([pa.array([1, 2]), pa.array([1, None])])
    assert refused.value.found == "1 nulls of 2"
    for column in (
        pa.array([(1, 2)]).cast(pa.list_(pa.uint8())),
        pa.array([[("a", 1)]], pa.map_("string", "int8")),
    ):
        with pytest.raises(BadRecord, match="not supported"):
            encode([column])


def test_a_null_struct_hides_what_its_fields_hold() -> None:
    fields = [pa.array([1, 2], pa.int32())]
    hidden = pa.StructArray.from_arrays(fields, ["x"], mask=pa.array([False, True]))
    outer = pa.StructArray.from_arrays([hidden], ["s"])
    assert encode([outer]).to_pylist() == [b"\2\2\x80\0\0\1", b"\1"]
    lists = pa.ListArray.from_arrays(
        pa.array([0, 1, 2]), pa.array([7, 8], pa.int8()), mask=pa.array([True, False])
    )
    outer = pa.StructArray.from_arrays([lists], ["s"])
    assert encode([outer]).to_pylist() == [b"\1", b"\2\2\x88\0"]


def test_no_keys_are_no_columns() -> None:
    for kind in ATOMIC:
        schema = schema_of([kind, kind])
        none = encode([pa.array([], f.type) for f in schema])
        assert none.type == pa.binary()
        assert decode(none, schema).equals(schema.empty_table())
