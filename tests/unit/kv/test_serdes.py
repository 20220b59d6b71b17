"""Serdes keep values exactly, keep the order where they say so, and typed stores use them on every call."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold.statestore.kv.serdes import BytesSerde, Int64Serde, JsonSerde, StringSerde
from keyfold.statestore.kv.stores import MemoryStore, TypedStore, TypedView

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.binary(), TEXT, INT64, JSON)
def test_every_value_comes_back(data: bytes, text: str, number: int, tree: Any) -> None:
    pairs: list[tuple[Any, Any]] = [
        (BytesSerde(), data),
        (StringSerde(), text),
        (Int64Serde(), number),
        (JsonSerde(), tree),
    ]
    for serde, value in pairs:
        assert isinstance(serde.serialize(value), bytes)
        assert serde.deserialize(serde.serialize(value)) == value


@given(st.lists(st.none() | INT64), st.lists(st.none() | TEXT), st.lists(st.none() | st.binary()))
def test_arrays_become_the_same_bytes_as_single_values_and_come_back(
    numbers: list[int | None], texts: list[str | None], data: list[bytes | None]
) -> None:
    columns: list[tuple[Any, list[Any], pa.DataType]] = [
        (Int64Serde(), numbers, pa.int64()),
        (StringSerde(), texts, pa.string()),
        (BytesSerde(), data, pa.binary()),
    ]
    for serde, values, kind in columns:
        for column in (
            pa.array(values, kind),
            pa.concat_arrays([pa.nulls(1, kind), pa.array(values, kind)]).slice(1),
        ):
            stored = serde.to_binary(column)
            assert stored.type == pa.binary()
            assert stored.to_pylist() == [None if v is None else serde.serialize(v) for v in values]
            assert serde.from_binary(stored).equals(pa.array(values, kind))


def test_arrays_that_cannot_be_converted_are_refused() -> None:
    for serde, wrong in (
        (Int64Serde(), pa.array([1.5])),
        (StringSerde(), pa.array([b"a"])),
        (BytesSerde(), pa.array(["a"])),
    ):
        with pytest.raises(TypeError):
            serde.to_binary(wrong)
    with pytest.raises(ValueError, match="64 bits"):
        Int64Serde().to_binary(pa.array([2**63], pa.uint64()))
    with pytest.raises(ValueError, match="8 bytes"):
        Int64Serde().from_binary(pa.array([b"12345678", b"1234567"]))
    with pytest.raises(ValueError, match="UTF-8"):
        StringSerde().from_binary(pa.array([b"ok", b"\xff"]))


@given(INT64, INT64)
def test_the_bytes_of_integers_sort_as_the_integers(a: int, b: int) -> None:
    serde = Int64Serde()
    assert (serde.serialize(a) < serde.serialize(b)) == (a < b)


def test_the_bytes_of_an_integer_are_those_documented() -> None:
    serde = Int64Serde()
    assert serde.serialize(0) == b"\x80" + bytes(7)
    assert serde.serialize(-1) == b"\x7f" + b"\xff" * 7
    assert serde.serialize(-(2**63)) == bytes(8)
    assert serde.serialize(2**63 - 1) == b"\xff" * 8


@given(TEXT, TEXT)
def test_the_bytes_of_strings_sort_by_code_point_and_keep_prefixes(a: str, b: str) -> None:
    serde = StringSerde()
    assert (serde.serialize(a) < serde.serialize(b)) == (a < b)
    assert serde.serialize(a + b).startswith(serde.serialize(a))


def test_json_is_compact_unescaped_and_in_the_given_order() -> None:
    assert JsonSerde().serialize({"b": [1, 2.5, None], "a": "é"}) == '{"b":[1,2.5,null],"a":"é"}'.encode()


@pytest.mark.parametrize(
    ("serde", "value", "error"),
    [
        (BytesSerde(), "secret", TypeError),
        (StringSerde(), b"secret", TypeError),
        (StringSerde(), "secret\ud800", ValueError),
        (Int64Serde(), "secret", TypeError),
        (Int64Serde(), True, TypeError),
        (Int64Serde(), 1.0, TypeError),
        (Int64Serde(), 2**63, ValueError),
        (Int64Serde(), -(2**63) - 1, ValueError),
        (JsonSerde(), {"a": b"secret"}, TypeError),
        (JsonSerde(), {"secret": math.nan}, ValueError),
        (JsonSerde(), math.inf, ValueError),
        (JsonSerde(), "secret\ud800", ValueError),
    ],
)
def test_what_cannot_be_written_is_refused_without_showing_it(
    serde: Any, value: object, error: type[Exception]
) -> None:
    with pytest.raises(error) as refused:
        serde.serialize(value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("serde", "data"),
    [
        (StringSerde(), b"secret\xff"),
        (Int64Serde(), b"secret"),
        (JsonSerde(), b"secret"),
        (JsonSerde(), b'"secret\xff"'),
        (JsonSerde(), b""),
    ],
)
def test_what_cannot_be_read_is_refused_without_showing_it(serde: Any, data: bytes) -> None:
    with pytest.raises(ValueError, match="serde that wrote it") as refused:
        serde.deserialize(data)
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None


def numbers() -> TypedStore[int, Any]:
    return TypedStore(MemoryStore(), Int64Serde(), JsonSerde())


def test_a_typed_store_takes_and_gives_types_on_every_call() -> None:
    store = numbers()
    store.put(-5, {"n": 1})
    store.put_all({3: [1], -7: "x"})
    store.put_all([(4, 1.5)])
    store.delete(4)
    assert store.get(-5) == {"n": 1}
    assert store.get(99) is None
    assert store.get_all([3, 4, -7]) == [[1], None, "x"]
    assert list(store.all()) == [(-7, "x"), (-5, {"n": 1}), (3, [1])]
    assert list(store.range(-5, 3)) == [(-5, {"n": 1})]
    assert list(store.range(None, 3)) == [(-7, "x"), (-5, {"n": 1})]
    assert list(store.range(-5)) == [(-5, {"n": 1}), (3, [1])]
    snapshot = store.snapshot()
    store.delete_all([-5, 3])
    assert list(store.all()) == [(-7, "x")]
    assert list(snapshot.range(-5, 4)) == [(-5, {"n": 1}), (3, [1])]
    assert not hasattr(snapshot, "put")
    snapshot.close()


def test_prefix_works_for_strings_and_is_refused_for_keys_that_have_none() -> None:
    store: TypedStore[str, bytes] = TypedStore(MemoryStore(), StringSerde(), BytesSerde())
    store.put_all({"é1": b"1", "é2": b"2", "e": b"3"})
    assert list(store.prefix("é")) == [("é1", b"1"), ("é2", b"2")]
    for serde in (Int64Serde(), JsonSerde()):
        view: TypedView[Any, bytes] = TypedView(MemoryStore(), serde, BytesSerde())
        with pytest.raises(TypeError, match="range"):
            view.prefix(1)


def test_none_is_refused_although_json_could_write_it() -> None:
    store = numbers()
    with pytest.raises(TypeError, match="delete"):
        store.put(1, None)
    with pytest.raises(TypeError, match="delete"):
        store.put_all({1: 1, 2: None})
    assert list(store.all()) == []


def test_an_entry_that_cannot_be_read_raises_and_the_scan_does_not_look_ended() -> None:
    below = MemoryStore({Int64Serde().serialize(1): b"1", Int64Serde().serialize(2): b"not json"})
    rows = TypedView(below, Int64Serde(), JsonSerde()).all()
    assert next(rows) == (1, 1)
    for _ in range(2):
        with pytest.raises(ValueError):
            next(rows)
