"""Rows in any of Arrow's layouts are the same rows: also inside of structs, lists and maps, and in slices."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

import keyfold
from keyfold.statestore.errors import BadRecord
from keyfold.statestore.schema.casting import plain
from support.changelogs import BY_HAND

LONG = "longer than a view holds by itself"


def views(values: list[str | None]) -> pa.Array:
    return pa.array(values, pa.string_view())


ELEMENTS = {
    "plain": pa.array(["a", None, LONG, ""]),
    "views": views(["a", None, LONG, ""]),
    "binary views": pa.array([b"a", None, LONG.encode(), b""], pa.binary_view()),
    "dictionary": pa.array(["a", LONG, None, "a"]).dictionary_encode(),
    "dictionary of views": pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 1]), views(["a", LONG])),
    "run ends": pa.RunEndEncodedArray.from_arrays(np.array([2, 4], np.int32), pa.array(["a", LONG])),
}


NO_STRUCT = pa.array([False, True, False, False])


def nested(elements: pa.Array) -> Iterator[pa.Array]:
    """Arrays of the nested types with these four elements."""
    ends = [0, 1, None, 2, 4]
    keys = views(["p", "q", "r", LONG])
    yield pa.ListArray.from_arrays(pa.array(ends, pa.int32()), elements)
    yield pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), elements)
    yield pa.FixedSizeListArray.from_arrays(elements, 2)
    yield pa.MapArray.from_arrays(pa.array(ends, pa.int32()), keys, elements)
    yield pa.StructArray.from_arrays([elements, pa.array(range(4))], ["a", "b"], mask=NO_STRUCT)


@pytest.mark.parametrize("layout", ELEMENTS)
def test_what_is_inside_becomes_plain_and_stays_what_it_is(layout: str) -> None:
    for outer in nested(ELEMENTS[layout]):
        four = pa.concat_arrays([outer, outer]).slice(0, 4)
        for column in (outer, *nested(four)):
            for part in (column, column.slice(1), column.slice(1, 1), column.slice(len(column))):
                found = plain(part)
                found.validate(full=True)
                assert found.to_pylist() == part.to_pylist()
                assert not any(word in str(found.type) for word in ("view", "dictionary", "run_end"))


def test_a_slice_costs_what_it_holds() -> None:
    words = views([LONG] * 10_000)
    column = pa.ListArray.from_arrays(pa.array(range(10_001), pa.int32()), words)
    assert plain(column.slice(5_000, 10)).get_total_buffer_size() < 2_000


def of_polars(series: pl.Series) -> pa.Array:
    return pa.chunked_array(series).combine_chunks()


COLUMNS = {
    **{name: column.slice(0, 2) for name, column in ELEMENTS.items()},
    **{
        f"{column.type.id} of {name}": column.slice(0, 2)
        for name, elements in ELEMENTS.items()
        for column in nested(elements)
    },
    "polars categories": pa.chunked_array(
        pl.Series([["a"], None], dtype=pl.List(pl.Categorical))
    ).combine_chunks(),
    "polars structs": pa.chunked_array(pl.Series([{"x": ["a", None]}, None])).combine_chunks(),
    "time in s": pa.array([dt.time(1, 2, 3), None], pa.time32("s")),
    "duration in us": pa.array([dt.timedelta(-1, 2, 3), None], pa.duration("us")),
    "duration in ns": pa.array([1000, None], pa.duration("ns"))
    .cast(pa.duration("us"))
    .cast(pa.duration("ns")),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_of_any_layout_can_be_the_first_and_is_kept(name: str, tmp_path: Path) -> None:
    column = COLUMNS[name]
    expected = column.to_pylist()
    if pa.types.is_duration(column.type) and column.type.unit == "ns":
        expected = column.cast(pa.duration("us")).to_pylist()
    with keyfold.open(tmp_path / "log", keys="k", config=BY_HAND) as log:
        log.append(pa.table({"k": [0, 1], "v": column}))
        log.append(pa.table({"k": [2, 3], "v": column}))
        log.compact()
        assert [log.get(key)["v"] for key in range(4)] == expected * 2


def map_of(kind: pa.DataType) -> pa.DataType:
    return pa.map_(pa.string(), kind)


REQUIRED = pa.struct([pa.field("x", pa.int32(), nullable=False)])
NULLABLE = pa.struct([pa.field("x", pa.int32())])
WITHIN = {
    "a struct": (REQUIRED, NULLABLE, {"x": 1}, {"x": None}),
    "a struct of the same type": (REQUIRED, REQUIRED, {"x": 1}, {"x": None}),
    "an array": (pa.list_(REQUIRED), pa.list_(NULLABLE), [{"x": 1}, None], [{"x": 1}, {"x": None}]),
    "a map": (
        pa.map_(pa.string(), REQUIRED),
        pa.map_(pa.string(), NULLABLE),
        [("k", {"x": 1})],
        [("k", {"x": None})],
    ),
}


@pytest.mark.parametrize("what", WITHIN)
def test_a_null_where_the_columns_have_none_is_refused_by_column_and_row(what: str, tmp_path: Path) -> None:
    required, given, good, bad = WITHIN[what]
    with keyfold.open(tmp_path / "log", keys="k", config=BY_HAND) as log:
        log.append(pa.table({"k": [1, 2], "v": pa.array([good, None], required)}))
        with pytest.raises(BadRecord, match=r"(?s)'v'.*row 2"):
            log.append(pa.table({"k": [3, 4, 5], "v": pa.array([good, None, bad], given)}))
        with log.transaction(app_id="t", batch_id=0) as store:
            with pytest.raises(BadRecord):
                store.put(5, {"v": bad})
            store.put(3, {"v": good})
        assert [log.get(key) for key in (1, 2, 3, 5)] == [{"v": good}, {"v": None}, {"v": good}, None]
