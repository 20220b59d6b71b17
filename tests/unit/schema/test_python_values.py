"""Dates and times that Python cannot represent: ways to Python refuse them, ways to Arrow give them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

import keyfold
from keyfold import Changelog
from keyfold.checkpoints.cli.group import cli
from keyfold.statestore.errors import BadRecord
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.schema.python_values import to_python
from support.changelogs import BY_HAND

DATE, ZONED, LOCAL, TIME = pa.date32(), pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.time64("ns")
#: Spark's type: Arrow's, and the numbers of values that Python has not: before the year 1, after 9999,
#: nanoseconds.
KINDS: dict[str, tuple[pa.DataType, list[int]]] = {
    "date": (DATE, [-800_000, 2_932_897]),
    "timestamp": (ZONED, [-(1 << 62), 253_402_300_800_000_000]),
    "timestamp_ntz": (LOCAL, [-(1 << 62), 253_402_300_800_000_000]),
    "time(6)": (TIME, [1_001, 86_399_999_999_999]),
}


def values(kind: pa.DataType, numbers: list[int]) -> pa.Array:
    width = pa.int32() if kind == DATE else pa.int64()
    return pa.array(numbers, width).cast(kind)


def field(name: str, kind: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": True, "metadata": {}}


#: Where in a value it is: Spark's type and the array.
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[pa.Array], pa.Array]]] = {
    "a column": (lambda kind: kind, lambda a: a),
    "a struct": (
        lambda kind: {"type": "struct", "fields": [field("x", kind), field("n", "long")]},
        lambda a: pa.StructArray.from_arrays([a, pa.array(range(len(a)))], ["x", "n"]),
    ),
    "an array": (
        lambda kind: {"type": "array", "elementType": kind, "containsNull": True},
        lambda a: pa.ListArray.from_arrays(pa.array(range(len(a) + 1), pa.int32()), a),
    ),
    "a map": (
        lambda kind: {"type": "map", "keyType": "string", "valueType": kind, "valueContainsNull": True},
        lambda a: pa.MapArray.from_arrays(
            pa.array(range(len(a) + 1), pa.int32()), pa.array(["k"] * len(a)), a
        ),
    ),
}

#: Every way to Python, of a changelog with the key 1 of which the value cannot be represented.
TO_PYTHON: dict[str, Callable[[Path], Any]] = {
    "get": lambda path: with_log(path, "w", lambda log: log.get(1)),
    "get of a reader": lambda path: with_log(path, "r", lambda log: log.get(1)),
    "store": lambda path: with_log(path, "w", lambda log: log.store().get(1)),
    "store of a reader": lambda path: with_log(path, "r", lambda log: log.store().get(1)),
    "get_all": lambda path: with_log(path, "w", lambda log: log.store().get_all([1])),
    "range": lambda path: with_log(path, "w", lambda log: list(log.store().range(0, 5))),
    "all": lambda path: with_log(path, "r", lambda log: list(log.store().all())),
    "transaction": lambda path: with_log(path, "w", in_transaction),
    "to_dict": lambda path: keyfold.restore(path).to_dict(),
    "to_store": lambda path: with_store(path, lambda store: store.get(1)),
    "all of to_store": lambda path: with_store(path, lambda store: list(store.all())),
}


def with_log(path: Path, mode: Any, use: Callable[[Changelog], Any]) -> Any:
    with keyfold.open(path, mode=mode) as log:
        return use(log)


def with_store(path: Path, use: Callable[[Any], Any]) -> Any:
    with keyfold.restore(path).to_store(path.with_name("store")) as store:
        return use(store)


def in_transaction(log: Changelog) -> Any:
    with log.transaction(app_id="a", batch_id=9) as store:
        return store.get(1)


def made(path: Path, kind: Any, column: pa.Array) -> Path:
    """A changelog with the keys 1, 2, … and these values."""
    fields = [field("k", "long"), field("n", "long"), field("when", kind)]
    columns = Columns({"type": "struct", "fields": fields}, ("k",))
    numbers = pa.array(range(1, len(column) + 1))
    with Changelog.open(path, columns=columns, config=BY_HAND) as log:
        log.append(pa.table({"k": numbers, "n": numbers, "when": column}))
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_every_way_to_python_names_the_column(kind: str, place: str, tmp_path: Path) -> None:
    type_, numbers = KINDS[kind]
    for n, number in enumerate(numbers):
        spark, array = PLACES[place]
        path = made(tmp_path / str(n) / "log", spark(kind), array(values(type_, [number])))
        for way in TO_PYTHON.values():
            with pytest.raises(BadRecord, match="column 'when'") as refused:
                way(path)
            assert "Arrow" in str(refused.value.remedy)
            assert str(number) not in str(refused.value)
            shutil.rmtree(path.with_name("store"), ignore_errors=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_arrow_gives_the_value(kind: str, tmp_path: Path) -> None:
    column = values(*KINDS[kind])
    path = made(tmp_path / "log", kind, column)
    assert keyfold.restore(path).to_arrow()["when"].combine_chunks().equals(column)
    assert keyfold.dataset(path).to_table()["when"].combine_chunks().equals(column)
    for mode in ("w", "r"):
        found = with_log(path, mode, lambda log: log.store().get_all(pa.array([1, 2])))
        assert found.field("when").equals(column)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("several", [False, True])
def test_a_key_that_python_cannot_represent_is_named(kind: str, several: bool, tmp_path: Path) -> None:
    column = values(*KINDS[kind])
    fields = [field("k", kind), field("j", "long"), field("v", "long")]
    columns = Columns({"type": "struct", "fields": fields}, ("k", "j") if several else ("k",))
    with Changelog.open(tmp_path / "log", columns=columns, config=BY_HAND) as log:
        log.append(pa.table({"k": column, "j": [1, 2], "v": [1, 2]}))
        with pytest.raises(BadRecord, match="column 'k'"):
            list(log.store().all())
        with pytest.raises(BadRecord, match="column 'k'"):
            keyfold.restore(tmp_path / "log").to_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_shows_the_bytes(kind: str, tmp_path: Path) -> None:
    path = made(tmp_path / "log", kind, values(*KINDS[kind]))
    for words in (["dump", str(path)], ["get", str(path), "1"], ["tail", str(path)]):
        for flags in ([], ["--json"]):
            done = CliRunner().invoke(cli, [*words, *flags])
            assert done.exit_code == 0, done.output


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_given_is_not_looked_at(kind: str, place: str) -> None:
    """Neither the elements of other rows in a slice, nor what Arrow keeps where a value is null."""
    type_, numbers = KINDS[kind]
    column = PLACES[place][1](values(type_, [numbers[0], 0, numbers[1]]))
    assert to_python(column.slice(1, 1), "c") == column.slice(1, 1).to_pylist()
    assert to_python(column.slice(0, 0), "c") == []
    gone = pa.array([True, False, True])
    hidden = pa.StructArray.from_arrays([column], ["c"], mask=gone)
    assert to_python(hidden, "") == [None, {"c": column[1].as_py()}, None]
    with pytest.raises(BadRecord, match="column 'c'"):
        to_python(column, "c")
