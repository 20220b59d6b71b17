"""`append` takes whatever speaks Arrow, dicts and lists; what could mean two things it refuses, in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from keyfold import Changelog, restore
from keyfold.statestore.errors import BadRecord
from support.changelogs import BY_HAND

KEYS = ["a", "b", "a"]
VALUES = ["1", "2", None]
TABLE = pa.table({"key": KEYS, "value": VALUES})
SECRET = "hunter2"


class Capsule:
    """A table of another library: nothing but the interface."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


class ArrayCapsule:
    """One batch of another library."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch

    def __arrow_c_array__(self, requested_schema: object | None = None) -> Any:
        return self._batch.__arrow_c_array__(requested_schema)


def cast(key: pa.DataType, value: pa.DataType) -> Callable[[], pa.Table]:
    return lambda: pa.table({"key": TABLE["key"].cast(key), "value": TABLE["value"].cast(value)})


def _nanoarrow_like() -> ArrayCapsule:
    return ArrayCapsule(TABLE.combine_chunks().to_batches()[0])


def _runs() -> pa.Table:
    runs = [pc.run_end_encode(TABLE[name].combine_chunks()) for name in ("key", "value")]
    return pa.table(runs, names=["key", "value"])


def _chunked() -> pa.Table:
    return pa.concat_tables([TABLE.slice(i, 1) for i in range(3)] + [TABLE.slice(0, 0)])


def _of_pandas_with_an_index() -> pd.DataFrame:
    return pd.DataFrame({"key": ["x", *KEYS], "value": [float("nan"), *VALUES]}).iloc[1:]


def _relation() -> Any:
    return duckdb.sql("select * from (values ('a', '1'), ('b', '2'), ('a', null)) t(key, value)")


TAKEN: dict[str, Callable[[], Any]] = {
    "pyarrow.Table": lambda: TABLE,
    "pyarrow.RecordBatch": lambda: TABLE.combine_chunks().to_batches()[0],
    "pyarrow.RecordBatchReader": lambda: TABLE.to_reader(),
    "pyarrow.StructArray": lambda: TABLE.to_struct_array().combine_chunks(),
    "pyarrow.ChunkedArray of structs": lambda: TABLE.to_struct_array(),
    "many chunks": _chunked,
    "large": cast(pa.large_binary(), pa.large_string()),
    "views": cast(pa.string_view(), pa.binary_view()),
    "dictionaries": cast(pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.large_binary())),
    "dictionaries of views": lambda: pa.table(
        {
            "key": pa.DictionaryArray.from_arrays([0, 1, 0], pa.array(["a", "b"], pa.string_view())),
            "value": VALUES,
        }
    ),
    "runs": _runs,
    "fixed size": cast(pa.binary(1), pa.binary(1)),
    "a sliced table": lambda: pa.table({"key": ["x", *KEYS], "value": ["x", *VALUES]}).slice(1),
    "a PyCapsule stream": lambda: Capsule(TABLE),
    "a PyCapsule array": _nanoarrow_like,
    "pandas": lambda: pd.DataFrame({"key": KEYS, "value": VALUES}),
    "pandas with bytes": lambda: pd.DataFrame({"key": [b"a", b"b", b"a"], "value": [b"1", b"2", None]}),
    "pandas, filtered": _of_pandas_with_an_index,
    "pandas, the key is the index": lambda: pd.DataFrame({"key": KEYS, "value": VALUES}).set_index("key"),
    "pandas in Arrow": lambda: pa.Table.from_pandas(_of_pandas_with_an_index()),
    "polars": lambda: pl.DataFrame({"key": KEYS, "value": VALUES}),
    "polars with bytes": lambda: pl.DataFrame({"key": [b"a", b"b", b"a"], "value": [b"1", b"2", None]}),
    "polars, categorical": lambda: pl.DataFrame({"key": KEYS, "value": VALUES}).cast({"key": pl.Categorical}),
    "DuckDB": _relation,
    "a dict of lists": lambda: {"key": KEYS, "value": VALUES},
    "a dict of tuples": lambda: {"key": tuple(KEYS), "value": tuple(VALUES)},
    "a dict of bytes": lambda: {"key": [b"a", b"b", b"a"], "value": [b"1", b"2", None]},
    "a dict of arrays": lambda: {
        "key": np.array(KEYS),
        "value": pa.array(VALUES),
    },
    "a dict of series": lambda: {"key": pd.Series(KEYS), "value": pl.Series(VALUES)},
    "a dict of chunks": lambda: {"key": TABLE["key"], "value": TABLE["value"]},
    "a list of dicts": lambda: TABLE.to_pylist(),
    "a tuple of dicts": lambda: tuple(TABLE.to_pylist()),
    "dicts in another order": lambda: [
        {"key": "a", "value": "1"}, {"value": "2", "key": "b"}, {"key": "a", "value": None}
    ],
}  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with Changelog.open(tmp_path / "log", config=BY_HAND) as log:
        yield log


@pytest.mark.parametrize("name", TAKEN)
def test_a_table_of_any_kind_becomes_the_same_records(name: str, log: Changelog) -> None:
    log.append(TAKEN[name]())
    read = pa.Table.from_batches(log.read(0))
    assert read["key"].to_pylist() == [b"a", b"b", b"a"]
    assert read["value"].to_pylist() == [b"1", b"2", None]


@pytest.mark.parametrize(
    "empty", [[], {"key": [], "value": []}, TABLE.slice(0, 0), TABLE.slice(0, 0).to_reader()]
)
def test_no_rows_are_a_commit_without_records(empty: Any, log: Changelog) -> None:
    assert log.append(empty).number == 1
    assert log.end_offsets() == {0: 0}


def test_timestamps_and_headers_come_with_dicts(log: Changelog) -> None:
    log.append([{"key": "a", "value": "1", "timestamp": 12, "headers": [{"key": "h", "value": b"x"}]}])
    (batch,) = log.read(0)
    assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [12]
    assert batch.column("headers").to_pylist() == [[{"key": "h", "value": b"x"}]]


def test_a_large_batch_is_cut_whatever_it_comes_in(log: Changelog) -> None:
    count = 200_000
    keys = pa.array(np.arange(count).astype(str))
    log.append(pa.record_batch({"key": keys, "value": keys}))
    assert restore(log.path).to_arrow().num_rows == count


REFUSED: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "text": lambda: SECRET,
    "bytes": lambda: SECRET.encode(),
    "a number": lambda: 7,
    "a path": lambda: Path(SECRET),
    "a set": lambda: {SECRET},
    "a generator": lambda: (row for row in TABLE.to_pylist()),
    "numpy": lambda: np.array([[SECRET]]),
    "an array of text": lambda: pa.array([SECRET]),
    "chunks of text": lambda: pa.chunked_array([[SECRET]]),
    "a schema": lambda: TABLE.schema,
    "a pandas series": lambda: pd.Series([SECRET], name="key"),
    "keys to values": lambda: {SECRET.encode(): b"v"},
    "text keys to values": lambda: {SECRET: "v"},
    "numbers as names": lambda: {1: [SECRET]},
    "single values": lambda: {"key": SECRET, "value": SECRET},
    "single bytes": lambda: {"key": SECRET.encode(), "value": b""},
    "columns of different lengths": lambda: {"key": [SECRET, "b"], "value": ["1"]},
    "a dict without columns": dict,
    "a set as a column": lambda: {"key": {SECRET}, "value": ["1"]},
    "an iterator as a column": lambda: {"key": iter([SECRET]), "value": ["1"]},
    "mixed values": lambda: {"key": [1, SECRET], "value": ["1", "2"]},
    "objects": lambda: {"key": [object()], "value": ["1"]},
    "numbers": lambda: {"key": [1], "value": [2]},
    "a float": lambda: {"key": ["a"], "value": [1.5]},
    "nested": lambda: {"key": ["a"], "value": [[SECRET]]},
    "a list of text": lambda: [SECRET],
    "a list of pairs": lambda: [(SECRET, "v")],
    "a list with None": lambda: [{"key": "a", "value": "1"}, None],
    "a list of tables": lambda: [TABLE],
    "rows without a value": lambda: [{"key": "a", "value": "1"}, {"key": SECRET}],
    "rows with more": lambda: [{"key": "a", "value": "1"}, {"key": "b", "value": "2", "x": SECRET}],
    "rows without anything": lambda: [{}],
    "duplicate names": lambda: pa.table([pa.array([SECRET])] * 3, names=["key", "value", "key"]),
    "duplicate values": lambda: pa.table([pa.array([SECRET])] * 3, names=["key", "value", "value"]),
    "unknown columns": lambda: pa.table({"key": ["a"], "value": ["b"], "x": [SECRET]}),
    "no value": lambda: pa.table({"key": [SECRET]}),
    "a null key": lambda: {"key": ["a", None], "value": ["1", SECRET]},
    "null as all keys": lambda: {"key": [None], "value": [SECRET]},
    "wrong headers": lambda: {"key": ["a"], "value": ["b"], "headers": [SECRET]},
    "a header without a key": lambda: {
        "key": ["a"], "value": ["b"], "headers": [[{"key": None, "value": SECRET}]]
    },
    "a time in text": lambda: {"key": ["a"], "value": ["b"], "timestamp": [SECRET]},
    "a polars LazyFrame": lambda: pl.LazyFrame({"key": [SECRET], "value": ["1"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_table_of_records_is_refused_in_words_without_its_contents(
    name: str, log: Changelog
) -> None:
    with pytest.raises(BadRecord) as refused:
        log.append(REFUSED[name]())
    error = refused.value
    assert error.what
    assert error.expected is not None
    assert error.found is not None
    assert error.remedy
    assert SECRET not in str(error)
    assert log.end_offsets() == {0: 0}
    assert log.append(TABLE).number == 1, "the refusal must leave the writer usable"
