"""Arrow columns that a user gives to typed stores and to `append`: what is not the changelog's is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from keyfold import Changelog
from keyfold.statestore.errors import BadRecord, KeyfoldError, WrongType
from keyfold.statestore.schema.columns import Columns
from support.changelogs import BY_HAND
from support.key_kinds import field

COLUMNS = Columns(
    {
        "type": "struct",
        "fields": [
            *(field("a", "integer"), field("b", "string"), field("n", "integer"), field("s", "string")),
            field("l", {"type": "array", "elementType": "string", "containsNull": True}),
            field("d", "decimal(5,2)"),
        ],
    },
    ("a", "b"),
)
ROW = {"n": 1, "s": "x", "l": None, "d": None}

#: Buffers that Arrow takes as they are: a string that is not UTF-8, and a decimal with too many digits.
NOT_UTF8 = pa.Array.from_buffers(
    pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
)
TOO_LARGE = pa.Array.from_buffers(
    pa.decimal128(5, 2), 1, pa.array([Decimal("9999999.00")], pa.decimal128(20, 2)).buffers()
)


def structs(**columns: Any) -> pa.StructArray:
    return pa.StructArray.from_arrays([pa.array(c) for c in columns.values()], list(columns))


KEY = structs(a=pa.array([1], pa.int32()), b=["k"])


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Changelog]:
    with Changelog.open(tmp_path / "log", columns=COLUMNS, config=BY_HAND) as opened:
        opened.append({"a": [1], "b": ["k"], "n": [1], "s": ["x"]})
        yield opened


#: Keys in another layout, which are that key.
LAYOUTS: dict[str, Any] = {
    "fields in another order": structs(b=["k"], a=[1]),
    "a wider number": structs(a=pa.array([1], pa.int64()), b=pa.array(["k"], pa.large_string())),
    "a dictionary": structs(a=[1], b=pa.array(["k"]).dictionary_encode()),
    "run ends": structs(a=pc.run_end_encode(pa.array([1])), b=["k"]),
    "a view": structs(a=[1], b=pa.array(["k"], pa.string_view())),
    "chunks": pa.chunked_array([KEY]),
    "a slice": pa.concat_arrays([structs(a=pa.array([2], pa.int32()), b=["?"]), KEY]).slice(1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_key_is_found_whatever_the_layout_of_its_columns(layout: str, log: Changelog) -> None:
    assert log.store().get_all(LAYOUTS[layout]).to_pylist() == [ROW]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_value_is_put_whatever_the_layout_of_its_key(layout: str, log: Changelog) -> None:
    with log.transaction(app_id="t", batch_id=0) as store:
        store.put_all(LAYOUTS[layout], structs(s=pa.array(["y"]).dictionary_encode(), n=[2]))
    assert log.get((1, "k")) == {**ROW, "n": 2, "s": "y"}


#: Keys that are not keys of the columns `a` integer, `b` string.
NO_KEYS: dict[str, Any] = {
    "other names": structs(x=[1], y=["k"]),
    "a field too many": structs(a=[1], b=["k"], c=[1]),
    "a field twice": pa.StructArray.from_arrays([pa.array([1]), pa.array(["k"])], ["a", "a"]),
    "no struct": pa.array([1]),
    "nulls": pa.nulls(1),
    "a null": structs(a=[1], b=pa.array([None], pa.string())),
    "text for a number": structs(a=["1"], b=["k"]),
    "a boolean for a number": structs(a=[True], b=["k"]),
    "a number for text": structs(a=[1], b=[1]),
    "a number that is too large": structs(a=[1 << 40], b=["k"]),
    "a string that is not UTF-8": structs(a=[1], b=NOT_UTF8),
}


@pytest.mark.parametrize("what", NO_KEYS)
def test_what_is_not_a_key_is_refused(what: str, log: Changelog) -> None:
    with pytest.raises(BadRecord):
        log.store().get_all(NO_KEYS[what])
    with log.transaction(app_id="t", batch_id=0) as store:
        with pytest.raises(BadRecord):
            store.put_all(NO_KEYS[what], structs(n=[2]))
        with pytest.raises(BadRecord):
            store.delete_all(NO_KEYS[what])
    assert log.get((1, "k")) == ROW


#: Values that are not values of the columns.
NO_VALUES: dict[str, Any] = {
    "an unknown column": structs(n=[2], other=[1]),
    "a column twice": pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["n", "n"]),
    "no struct": pa.array([1]),
    "text for a number": structs(n=["2"]),
    "a number for text": structs(s=[2]),
    "a boolean for a number": structs(n=[True]),
    "a fraction": structs(n=[1.5]),
    "a number that is too large": structs(n=[1 << 40]),
    "a string that is not UTF-8": structs(s=NOT_UTF8),
    "one in a list": structs(l=pa.ListArray.from_arrays([0, 1], NOT_UTF8)),
    "a decimal with too many digits": structs(d=TOO_LARGE),
}


@pytest.mark.parametrize("what", NO_VALUES)
def test_what_is_not_a_value_is_refused(what: str, log: Changelog) -> None:
    values = NO_VALUES[what]
    with log.transaction(app_id="t", batch_id=0) as store, pytest.raises(BadRecord):
        store.put_all(KEY, values)
    if pa.types.is_struct(values.type):
        columns = zip(values.type.names, values.flatten(), strict=True)
        names = ["a", "b", *values.type.names]
        with pytest.raises(BadRecord):
            log.append(pa.table([pa.array([1]), pa.array(["k"]), *(c for _, c in columns)], names))
    assert log.get((1, "k")) == ROW


def test_append_names_the_row_of_a_string_that_is_not_utf8(log: Changelog) -> None:
    text = pa.concat_arrays([pa.array(["a", "b", "c"]), NOT_UTF8, pa.array(["d"])])
    with pytest.raises(BadRecord, match="row 3") as refused:
        log.append(pa.table({"a": range(5), "b": ["k"] * 5, "s": text}))
    assert "UTF-8" in str(refused.value)
    with pytest.raises(BadRecord, match="row 3"):
        log.append(pa.table({"a": range(5), "b": text}))


#: Calls with arguments that are neither rows nor Arrow.
MISUSE: dict[str, Callable[[Any], object]] = {
    "values that are not in Arrow": lambda store: store.put_all(KEY, [{"n": 1}]),
    "no entries": lambda store: store.put_all(5),
    "entries that are no pairs": lambda store: store.put_all([5]),
    "no keys to delete": lambda store: store.delete_all(5),
    "no keys to get": lambda store: store.get_all(5),
    "text instead of keys": lambda store: store.get_all("ab"),
}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse_is_an_error_of_keyfold_and_of_python(what: str, log: Changelog) -> None:
    with log.transaction(app_id="t", batch_id=0) as store, pytest.raises(KeyfoldError) as refused:
        MISUSE[what](store)
    assert isinstance(refused.value, WrongType)
    assert refused.value.remedy
