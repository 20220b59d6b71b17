"""The first table of a typed changelog gives its columns, and all of its rows are written."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import keyfold
from keyfold.checkpoints.log import ingest
from keyfold.statestore.errors import BadRecord, SchemaMismatch
from support.changelogs import BY_HAND

TABLE = pa.table({"k": [1, 2, 3], "v": ["a", "b", None]})

#: What holds rows; some of it can be read only once.
SOURCES: dict[str, Callable[[], Any]] = {
    "a table": lambda: TABLE,
    "a batch": lambda: TABLE.to_batches()[0],
    "a stream": lambda: TABLE.to_reader(max_chunksize=1),
    "polars": lambda: pl.from_arrow(TABLE),
    "a dict": TABLE.to_pydict,
    "rows": TABLE.to_pylist,
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_row_of_the_first_table_is_written(source: str, tmp_path: Path) -> None:
    with keyfold.open(tmp_path / "log", keys="k", config=BY_HAND) as log:
        log.append(SOURCES[source]())
        assert dict(log.store().all()) == {1: {"v": "a"}, 2: {"v": "b"}, 3: {"v": None}}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"k": [1, None], "v": ["a", "b"]}, BadRecord),
        ({"k": [1], "v": pa.array([1], pa.timestamp("ns"))}, BadRecord),
        ({"k": [1], "v": pa.array([None], pa.month_day_nano_interval())}, SchemaMismatch),
    ],
)
def test_a_table_that_is_refused_gives_no_columns(wrong: Any, error: Any, tmp_path: Path) -> None:
    with keyfold.open(tmp_path / "log", keys="k", config=BY_HAND) as log:
        with pytest.raises(error):
            log.append(wrong)
        assert log.columns is None
        log.append({"k": [1], "v": [1.5]})
        assert log.get(1) == {"v": 1.5}


def test_a_first_table_that_another_one_has_overtaken_does_not_change_the_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_came, overtaken = threading.Barrier(2), threading.Event()
    tables: list[dict[str, Any]] = [{"k": [1], "x": [1]}, {"k": [2], "y": ["a"]}]
    table_of, outcomes = ingest.table_of, dict[int, object]()

    def in_turn(data: object) -> pa.Table:
        if not isinstance(data, pa.Table) and not overtaken.is_set():
            both_came.wait(10)
            assert data is tables[0] or overtaken.wait(10)
        return table_of(data)

    monkeypatch.setattr(ingest, "table_of", in_turn)

    def append(number: int) -> None:
        try:
            outcomes[number] = log.append(tables[number])
        except BadRecord as refused:
            outcomes[number] = refused
        overtaken.set()

    with keyfold.open(tmp_path / "log", keys="k", config=BY_HAND) as log:
        threads = [threading.Thread(target=append, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert isinstance(outcomes[1], BadRecord)
        assert log.columns is not None
        assert log.columns.arrow_schema().names == ["k", "x"]
        assert (log.get(1), log.get(2)) == ({"x": 1}, None)


#: Values of Arrow types, and the type of the column that they make.
TYPES: list[tuple[pa.Array, Any]] = [
    (pa.array([dt.timedelta(1)], pa.duration("s")), "interval day to second"),
    (pa.array([dt.timedelta(1)], pa.duration("ns")), "interval day to second"),
    (pa.array([dt.time(1, 2, 3)], pa.time32("s")), "time(0)"),
    (pa.array([dt.time(1, 2, 3, 4000)], pa.time32("ms")), "time(3)"),
    (pa.array([dt.time(1, 2, 3, 4)], pa.time64("us")), "time(6)"),
    (pa.array([2**64 - 1], pa.uint64()), "decimal(20,0)"),
    (pa.array([Decimal("1.5")], pa.decimal256(38, 1)), "decimal(38,1)"),
    (pa.array(["x"]).dictionary_encode(), "string"),
    (pc.run_end_encode(pa.array(["x"])), "string"),
    (pa.array(["x"], pa.string_view()), "string"),
    (
        pa.array([["x"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
        {"type": "array", "elementType": "string", "containsNull": True},
    ),
    (
        pa.array([["x", "y"]], pa.list_(pa.string(), 2)),
        {"type": "array", "elementType": "string", "containsNull": True},
    ),
]


@pytest.mark.parametrize(("values", "kind"), TYPES, ids=lambda x: str(getattr(x, "type", "")))
def test_a_column_gets_the_smallest_type_that_holds_it(values: pa.Array, kind: Any, tmp_path: Path) -> None:
    with keyfold.open(tmp_path / "log", keys="k", config=BY_HAND) as log:
        log.append(pa.table({"k": pa.array(["a"]), "v": values}))
        assert log.columns is not None
        assert log.columns.schema_json["fields"][1]["type"] == kind
        assert log.get("a") == {"v": values.to_pylist()[0]}
    assert keyfold.restore(tmp_path / "log").to_dict() == {"a": {"v": values.to_pylist()[0]}}
