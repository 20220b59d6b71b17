"""Input that `append` takes as a table: anything that exports Arrow, a dict of columns, a list of dicts.

Nothing is guessed: ambiguous input is refused. No error shows a value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import pyarrow as pa

from keyfold.statestore.errors import BadRecord


class ArrowStream(Protocol):
    """Arrow's PyCapsule interface for tables. pyarrow, pandas, polars, DuckDB and others implement it."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


class ArrowArray(Protocol):
    """Arrow's PyCapsule interface for one batch, an array of structs."""

    def __arrow_c_array__(self, requested_schema: object | None = None) -> Any: ...


#: Rows to write: any table with Arrow's PyCapsule interface, a dict of columns, or a list of dicts.
Tabular: TypeAlias = (
    "pa.Table | pa.RecordBatch | ArrowStream | ArrowArray | Mapping[str, Any] | Sequence[Mapping[str, Any]]"
)

_EXPECTED: Final = (
    "a table with Arrow's PyCapsule interface (pyarrow, pandas, polars, DuckDB, ...), a dict of columns, "
    "or a list of dicts"
)
#: The names that pandas gives to an unnamed DataFrame index in Arrow.
_PANDAS_INDEX: Final = re.compile(r"__index_level_\d+__")


def table_of(data: object) -> pa.Table:
    """`data` as an Arrow table. Raises `BadRecord` if it is not a table."""
    if isinstance(data, pa.Table):
        table = data
    elif isinstance(data, pa.RecordBatch):
        table = pa.Table.from_batches([data])
    elif isinstance(data, Mapping):
        table = _of_columns(data)
    elif hasattr(data, "__arrow_c_stream__"):
        with_stream = _imported(data, pa.RecordBatchReader.from_stream)
        table = with_stream.read_all()
    elif hasattr(data, "__arrow_c_array__"):
        table = pa.Table.from_batches([_imported(data, pa.record_batch)])
    elif isinstance(data, list | tuple):
        table = _of_rows(data)
    else:
        raise _no_table(data)
    if b"pandas" in (table.schema.metadata or {}):
        names = enumerate(table.column_names)
        table = table.select([i for i, name in names if not _PANDAS_INDEX.fullmatch(name)])
    return table


def _imported(data: object, take: Any) -> Any:
    try:
        return take(data)
    except (pa.ArrowException, TypeError, ValueError) as e:
        raise BadRecord(
            "Not a table: the input cannot be read through its Arrow interface.",
            expected="record batches: Arrow arrays of structs",
            found=f"{_kind(data)}, whose Arrow interface fails with {type(e).__name__}",
            remedy="pass a table; a stream can be read only once",
        ) from e  # fmt: skip


def _of_rows(rows: Sequence[object]) -> pa.Table:
    names: list[object] = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise BadRecord(
                "A row in the list is not a dict.", position=f"row {number}",
                expected="a dict with a value for each column", found=_kind(row),
                remedy="pass each row as a dict, or pass a dict of columns",
            )  # fmt: skip
        if number == 0:
            names = list(row)
        elif set(names) != set(row):
            raise BadRecord(
                "The rows do not have the same columns.", position=f"row {number}",
                expected=", ".join(map(str, names)), found=", ".join(map(str, row)) or "none",
                remedy="give every row all columns; None as `value` is a delete",
            )  # fmt: skip
    if not rows:
        return pa.table({"key": pa.array([], pa.binary()), "value": pa.array([], pa.binary())})
    return _of_columns({name: [row[name] for row in rows] for name in names})  # type: ignore[index]


def _of_columns(columns: Mapping[Any, object]) -> pa.Table:
    if any(not isinstance(name, str) for name in columns):
        raise BadRecord(
            "A column name is not a string.", expected='{"key": [...], "value": [...]}',
            found="a dict with keys of type " + ", ".join(sorted({_kind(name) for name in columns})),
            remedy="pass a list of keys and a list of values",
        )  # fmt: skip
    arrays = {name: _column(name, values) for name, values in columns.items()}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise BadRecord(
            "The columns do not have the same length.", expected="one value per row in every column",
            found=", ".join(f"{name}: {length}" for name, length in lengths.items()),
            remedy="pass one value per row in every column",
        )  # fmt: skip
    return pa.table(arrays)


def _column(name: str, values: object) -> pa.Array | pa.ChunkedArray:
    try:
        if isinstance(values, pa.Array | pa.ChunkedArray):
            return values
        if hasattr(values, "__arrow_c_stream__"):
            return pa.chunked_array(values)
        if hasattr(values, "__arrow_c_array__") or hasattr(values, "__array__"):
            return pa.array(values)
        if isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray | memoryview):
            return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as e:
        raise BadRecord(
            f"The values of column {name!r} have no common type that is supported.",
            expected="bytes or str" if name in ("key", "value") else "values of one type",
            found=f"{type(e).__name__} from Arrow",
            remedy="encode the values to bytes",
        ) from None  # fmt: skip
    raise BadRecord(
        "A column of the dict is not a list of values.", expected="a list, or an Arrow or numpy array",
        found=_kind(values), remedy='pass one value per row: {"key": [...], "value": [...]}',
    )  # fmt: skip


def _kind(value: object) -> str:
    return type(value).__name__


def _no_table(data: object) -> BadRecord:
    remedy = "pass a table"
    if hasattr(data, "collect"):
        remedy = "collect it first"
    elif hasattr(data, "toArrow"):
        remedy = "pass df.toArrow(), or write it with ChangelogSink"
    elif hasattr(data, "__next__") or hasattr(data, "__iter__"):
        remedy = "pass a list of dicts, or a table"
    return BadRecord("Not a table.", expected=_EXPECTED, found=_kind(data), remedy=remedy)
