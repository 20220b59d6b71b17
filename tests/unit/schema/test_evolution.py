"""Columns that change: what the changelog has afterwards, and that nothing written before is lost."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold import Changelog, restore
from keyfold.checkpoints.log.reader import read_partition
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import SchemaMismatch
from keyfold.statestore.projection import as_type
from keyfold.statestore.schema import spark_types
from keyfold.statestore.schema.columns import Columns

Field = dict[str, Any]


def field(name: str, kind: Any, nullable: bool = True) -> Field:
    return {"name": name, "type": kind, "nullable": nullable, "metadata": {}}


def struct(*fields: Field) -> Field:
    return {"type": "struct", "fields": list(fields)}


def array(kind: Any) -> Field:
    return {"type": "array", "elementType": kind, "containsNull": True}


def map_of(kind: Any) -> Field:
    return {"type": "map", "keyType": "string", "valueType": kind, "valueContainsNull": True}


def columns(*fields: Field) -> Columns:
    return Columns(struct(field("k", "string"), *fields), ("k",))


WIDER = [
    ("byte", "short", 7),
    ("short", "integer", -5),
    ("integer", "long", 2**31 - 1),
    ("byte", "long", -128),
    ("float", "double", 0.5),
    ("decimal(5,2)", "decimal(10,4)", Decimal("-1.25")),
    ("decimal(5,0)", "decimal(7,2)", Decimal(12345)),
    ("date", "timestamp_ntz", dt.date(2020, 2, 29)),
    ("void", "string", None),
]
INSIDE: list[Callable[[Any], Any]] = [
    lambda kind: kind,
    array,
    map_of,
    lambda kind: struct(field("a", kind), field("b", "string")),
    lambda kind: array(struct(field("a", kind))),
]
PUT: list[Callable[[Any], Any]] = [
    lambda value: value,
    lambda value: [value, None],
    lambda value: [("x", value), ("y", None)],
    lambda value: {"a": value, "b": "b"},
    lambda value: [{"a": value}, None],
]


@pytest.mark.parametrize(("narrow", "wide", "value"), WIDER)
@pytest.mark.parametrize("depth", range(len(INSIDE)))
def test_the_wider_type_counts_at_any_depth_and_keeps_what_was_written(
    narrow: str, wide: str, value: Any, depth: int, tmp_path: Path
) -> None:
    before, after = columns(field("v", INSIDE[depth](narrow))), columns(field("v", INSIDE[depth](wide)))
    merged = before.accepts(after)
    assert merged.value_type == after.value_type == after.accepts(before).value_type
    assert merged.accepts(before) is merged  # a deploy can be rolled back
    with Changelog.open(tmp_path / "log", columns=before) as log:
        column = pa.array([PUT[depth](value), None], before.value_type.field("v").type)
        log.append(pa.table({"k": ["a", "b"], "v": column}))
        log.engine.set_columns(merged)
        wider = as_type(column, merged.value_type.field("v").type).to_pylist()
        log.append(pa.table({"k": ["c"], "v": pa.nulls(1, merged.value_type.field("v").type)}))
        assert [log.get(key) for key in "abc"] == [{"v": wider[0]}, {"v": None}, {"v": None}]
        log.compact()
    assert restore(tmp_path / "log").to_arrow()["v"].to_pylist() == [*wider, None]
    assert verify(tmp_path / "log").sound


#: Nulls where the schema says that there are none, as in Spark's `array()`: nothing else is in a void.
VOIDS: list[tuple[Callable[[Any], Any], Any]] = [
    (lambda kind: {**array(kind), "containsNull": False}, [None]),
    (lambda kind: {**map_of(kind), "valueContainsNull": False}, [("x", None)]),
    (lambda kind: struct(field("a", kind, nullable=False)), {"a": None}),
]


@pytest.mark.parametrize(("of", "value"), VOIDS)
def test_nulls_of_a_void_can_be_read_when_it_has_got_a_type(
    of: Callable[[Any], Any], value: Any, tmp_path: Path
) -> None:
    before, after = columns(field("v", of("void"))), columns(field("v", of("string")))
    merged = before.accepts(after)
    assert merged.value_type == after.accepts(before).value_type
    with Changelog.open(tmp_path / "log", columns=before) as log:
        log.append(pa.table({"k": ["a"], "v": pa.array([value], before.value_type.field("v").type)}))
        log.engine.set_columns(merged)
        assert log.get("a") == {"v": value}
        log.compact()
    assert restore(tmp_path / "log").to_dict() == {"a": {"v": value}}
    assert verify(tmp_path / "log").sound


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("integer", "string"),
        ("integer", "double"),
        ("long", "decimal(20,0)"),
        ("timestamp", "timestamp_ntz"),
        ("date", "timestamp"),
        ("decimal(38,0)", "decimal(38,2)"),
        ("string", "string collate UTF8_LCASE"),
        (array("integer"), "integer"),
        (array("integer"), array("string")),
        (struct(field("a", "integer")), struct(field("a", "string"))),
        (map_of("integer"), map_of("string")),
    ],
)
def test_every_other_change_is_refused_and_the_column_is_named(old: Any, new: Any) -> None:
    for one, other in ((old, new), (new, old)):
        with pytest.raises(SchemaMismatch) as refused:
            columns(field("v", one)).accepts(columns(field("v", other)))
        assert "v " in str(refused.value.expected)
        assert "v " in str(refused.value.found)


def test_key_columns_keep_their_type_and_place() -> None:
    """Other types are other bytes: the same key would be two."""
    old = Columns(struct(field("k", "integer"), field("v", "string")), ("k",))
    for new in (
        Columns(struct(field("k", "long"), field("v", "string")), ("k",)),
        Columns(struct(field("k", "integer"), field("v", "string")), ("v",)),
        Columns(struct(field("k", "integer"), field("v", "string")), ("k", "v")),
        Columns(struct(field("v", "string")), ("v",)),
    ):
        with pytest.raises(SchemaMismatch):
            old.accepts(new)


def test_an_added_column_is_last_and_nullable_and_one_left_out_becomes_nullable() -> None:
    old = columns(field("a", "long", False), field("s", struct(field("x", "long", False))))
    new = columns(field("b", "string", False), field("s", struct(field("y", "long", False))))
    merged = old.accepts(new)
    assert merged.schema_json["fields"] == [
        field("k", "string"),
        field("a", "long"),
        field("s", struct(field("x", "long"), field("y", "long"))),
        field("b", "string"),
    ]
    assert merged.earlier == (old.schema_json,)


KINDS = st.recursive(
    st.sampled_from(sorted({kind for narrow, wide, _ in WIDER for kind in (narrow, wide)})),
    lambda inner: (
        inner.map(array)
        | inner.map(map_of)
        | st.lists(inner, max_size=3).map(
            lambda kinds: struct(*(field(f"f{i}", kind) for i, kind in enumerate(kinds)))
        )
    ),
    max_leaves=5,
)


@given(KINDS, KINDS)
def test_merging_is_the_same_in_either_order_and_again(one: Any, other: Any) -> None:
    try:
        merged = spark_types.merged_type(one, other)
    except spark_types.Incompatible:
        with pytest.raises(spark_types.Incompatible):
            spark_types.merged_type(other, one)
        return
    assert spark_types.sql_text(merged) == spark_types.sql_text(spark_types.merged_type(other, one))
    assert spark_types.merged_type(merged, one) == merged
    assert spark_types.merged_type(merged, other) == merged


def test_a_reader_of_before_says_what_to_do_with_a_value_that_does_not_fit(tmp_path: Path) -> None:
    before, after = columns(field("v", "integer")), columns(field("v", "long"))
    with Changelog.open(tmp_path / "log", columns=before) as log:
        log.append(pa.table({"k": ["a"], "v": [1]}))
        state = restore(tmp_path / "log")
        log.engine.set_columns(before.accepts(after))
        log.append(pa.table({"k": ["b"], "v": [2**40]}))
        assert state.to_dict() == {"a": {"v": 1}}
        with Changelog.open(tmp_path / "log", mode="r") as reader:
            assert reader.get("b") == {"v": 2**40}


def test_the_last_number_that_fits_a_row_is_used_and_no_further_schema() -> None:
    first = columns(field("v", "integer"))
    # Each of the earlier ones had the same columns, which is enough to be counted.
    many = Columns(first.schema_json, first.keys, (first.schema_json,) * 65_533)
    last = many.accepts(columns(field("v", "long")))
    row = last.encode_row({"v": 1 << 40})
    assert int.from_bytes(row[:2], "little") == 65_535
    assert last.decode_row(row) == {"v": 1 << 40}
    assert last.decode_rows(pa.array([row, many.encode_row({"v": 5})])).to_pylist() == [
        {"v": 1 << 40},
        {"v": 5},
    ]
    assert last.accepts(first) is last
    with pytest.raises(SchemaMismatch, match="changed too often") as refused:
        last.accepts(columns(field("w", "long")))
    assert "65535" in str(refused.value.expected)


NOON = dt.datetime(2020, 2, 29, 12)  # noqa: DTZ001 (timestamp_ntz)
#: A type, the wider one, and a value of it that the narrow one does not have.
BEYOND = [
    ("byte", "long", 2**40),
    ("date", "timestamp_ntz", NOON),
    ("decimal(5,2)", "decimal(10,4)", Decimal("1.2345")),
    ("float", "double", 1e300),
    ("void", "string", "x"),
    ("void", array("integer"), [1]),
    ("void", struct(field("x", "date")), {"x": None}),
    (struct(field("x", "integer", nullable=False)), struct(field("x", "integer")), {"x": None}),
    ({**array("integer"), "containsNull": False}, array("integer"), [1, None]),
    ({**map_of("integer"), "valueContainsNull": False}, map_of("integer"), [("x", None)]),
]


@pytest.mark.parametrize(("narrow", "wide", "value"), BEYOND)
@pytest.mark.parametrize("depth", range(len(INSIDE)))
def test_a_reader_of_before_never_gives_another_value(
    narrow: Any, wide: Any, value: Any, depth: int, tmp_path: Path
) -> None:
    before, after = columns(field("v", INSIDE[depth](narrow))), columns(field("v", INSIDE[depth](wide)))
    with Changelog.open(tmp_path / "log", columns=before.accepts(after)) as log:
        log.append(pa.table({"k": ["a"], "v": pa.nulls(1, after.value_type.field("v").type)}))
        end = log.end_offsets()[0]
        log.append(
            pa.table({"k": ["b"], "v": pa.array([PUT[depth](value)], after.value_type.field("v").type)})
        )

        def read(to: int) -> list[Any]:
            found = read_partition(log.files, log.path, log.state, 0, to=to, values=before.value_type)
            return [one for batch in found for one in batch.column("value").to_pylist()]

        assert read(end) == [{"v": None}]
        with pytest.raises(SchemaMismatch, match="open the changelog again"):
            read(end + 1)
