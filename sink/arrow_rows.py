"""The rows of a DataFrame as Spark hands them to a task: checked, and made into the columns of records.

Spark's Arrow types need not be those of the log: timestamps are in the session's time zone, strings and
binaries may have 64-bit offsets, and nothing has checked that strings are UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.projection import as_type, empty_structs
from keyfold.statestore.schema import key_codec
from keyfold.statestore.segment.block import HEADERS_TYPE, no_headers
from keyfold.statestore.timestamps import WRONG_TIMESTAMP, timestamps_ms

Places: TypeAlias = npt.NDArray[np.int64]

NO_KEY: Final = 1
NO_HEADER_KEY: Final = 2
NO_SEQUENCE: Final = 3
WRONG_TIME: Final = 4
NOT_UTF8: Final = 5

#: What, expected, found and remedy of the error for each problem of a row. `{column}` is the column's name.
PROBLEMS: Final = {
    NO_KEY: (
        "A record has no key.",
        "a key that is not null",
        "null",
        "filter out such rows, or give them a key, before you write them",
    ),
    NO_HEADER_KEY: (
        "A header of a record has no key.",
        "headers whose keys are not null",
        "null",
        "filter out such headers, or drop the column headers",
    ),
    NO_SEQUENCE: (
        "A record has a null in sequence_by.",
        "values of sequence_by that are not null",
        "null",
        "filter out such rows, or use columns that are never null in sequence_by",
    ),
    WRONG_TIME: (WRONG_TIMESTAMP[0], WRONG_TIMESTAMP[1], "a timestamp out of range", WRONG_TIMESTAMP[2]),
    NOT_UTF8: (
        "Column {column!r} has a string that is not valid UTF-8.",
        "strings in UTF-8",
        "other bytes",
        "cast it to binary, or use make_valid_utf8(column)",
    ),
}


class Problem(NamedTuple):
    """A row that cannot be written: its place in the batch, and the number of the column in `Shape.names`."""

    kind: int
    row: int
    column: int = 0


@dataclass(frozen=True)
class Shape:
    """Which records the rows become.

    Rows of typed columns have `key_0`, `key_1`, …, `value_0`, `value_1`, … and perhaps `deletes` (boolean:
    whether the row deletes its key). Others have `key` and `value`, and perhaps `headers`. Both may have
    `timestamp` (int64 ms), and after a sort `row` (the position before the sort) and `unordered` (whether a
    value to sort by is null).

    Attributes:
        keys: The names of the key columns, in the order of the numbers.
        values: The names of the value columns.
        value_type: The type of the values of the records. A field that is not in `values` becomes null.
    """

    keys: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    value_type: pa.DataType = pa.binary()  # noqa: RUF009 (types do not change)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.keys, *self.values)


#: Rows of a changelog of raw bytes.
RAW: Final = Shape()


def key_columns(names: Sequence[str]) -> list[str]:
    """The names of the columns of a key, in their order."""
    return [name for name in names if name == "key" or name.startswith("key_")]


def keys_of(rows: pa.RecordBatch) -> pa.Array:
    """The bytes of the keys of rows that have no null in a key column."""
    names = key_columns(rows.schema.names)
    if names == ["key"]:
        return as_type(rows.column("key"), pa.binary())
    return key_codec.encode([rows.column(name) for name in names])


def values_of(rows: pa.RecordBatch, shape: Shape) -> pa.Array:
    """The values; those of rows that delete their key (see `deleted`) too.

    Raises:
        pa.ArrowInvalid: The strings or binaries of one column exceed 2 GiB.
    """
    if not pa.types.is_struct(shape.value_type):
        return as_type(rows.column("value"), shape.value_type)
    fields = list(shape.value_type)
    if not fields:
        return empty_structs(rows.num_rows)
    places = {name: f"value_{i}" for i, name in enumerate(shape.values)}
    columns = [
        as_type(rows.column(places[field.name]), field.type)
        if field.name in places
        else pa.nulls(rows.num_rows, field.type)
        for field in fields
    ]
    return pa.StructArray.from_arrays(columns, fields=fields)


def deleted(rows: pa.RecordBatch) -> npt.NDArray[np.bool_] | None:
    """Which rows of typed columns delete their key; None if none does."""
    if "deletes" not in rows.schema.names:
        return None
    column = rows.column("deletes")
    if not column.true_count:
        return None
    found: npt.NDArray[np.bool_] = column.fill_null(False).to_numpy(zero_copy_only=False)
    return found


def records_of(rows: pa.RecordBatch, shape: Shape, now_ms: int) -> pa.RecordBatch:
    """Rows as the columns key, value, timestamp and headers of records. Rows without a timestamp get
    `now_ms`.
    """
    names = rows.schema.names
    if "timestamp" in names:
        timestamps, _ = timestamps_ms(rows.column("timestamp"), now_ms)
    else:
        timestamps = pa.array(np.full(rows.num_rows, now_ms, np.int64), pa.timestamp("ms"))
    headers = rows.column("headers").cast(HEADERS_TYPE) if "headers" in names else no_headers(rows.num_rows)
    columns = {
        "key": keys_of(rows), "value": values_of(rows, shape), "timestamp": timestamps, "headers": headers,
    }  # fmt: skip
    return pa.RecordBatch.from_pydict(columns)


def in_order(
    records: pa.RecordBatch, order: Places | None, gone: npt.NDArray[np.bool_] | None
) -> pa.RecordBatch:
    """The records in another order, with a null value where `gone`: not even a hidden value stays there."""
    if order is None and gone is None:
        return records
    order = np.arange(records.num_rows) if order is None else order
    kept = pa.array(order)
    # A null place also makes the fields of a struct null.
    values = kept if gone is None else pa.array(order, mask=gone[order])
    names = records.schema.names
    columns = [records.column(name).take(values if name == "value" else kept) for name in names]
    return pa.RecordBatch.from_arrays(columns, names)


# -- rows that cannot be written -----------------------------------------------------------------------------


def problem_of(rows: pa.RecordBatch) -> Problem | None:
    """A row that cannot be written; the first one with its problem. None if all can be."""
    names = rows.schema.names
    keys = [rows.column(name) for name in key_columns(names)]
    if any(key.null_count for key in keys):
        return Problem(NO_KEY, min(_first_null(key) for key in keys if key.null_count))
    if "headers" in names and (found := _header_without_key(rows.column("headers"))) >= 0:
        return Problem(NO_HEADER_KEY, found)
    if "unordered" in names and (found := pc.index(rows.column("unordered"), True).as_py()) >= 0:
        return Problem(NO_SEQUENCE, found)
    if "timestamp" in names and (found := timestamps_ms(rows.column("timestamp"), 0)[1]) >= 0:
        return Problem(WRONG_TIME, found)
    return min(_texts(rows), key=lambda problem: problem.row, default=None)


def _first_null(column: pa.Array) -> int:
    return int(pc.index(pc.is_null(column), True).as_py())


def _header_without_key(headers: pa.Array) -> int:
    """The first row with a header without a key; -1 if there is none."""
    items = headers.flatten()
    if not items.null_count and not items.field("key").null_count:
        return -1
    missing = pc.or_(pc.is_null(items), pc.is_null(items.field("key")))
    first = pc.index(missing, True).as_py()
    return -1 if first < 0 else int(pc.list_parent_indices(headers)[first].as_py())


def _texts(rows: pa.RecordBatch) -> Iterator[Problem]:
    """For each column with a string that is not UTF-8, the first row with one that is to be written."""
    names = [name for name in rows.schema.names if name.startswith(("key_", "value_"))]
    for number, name in enumerate(names):
        column = rows.column(name)
        if not _has_wrong_text(column):
            continue
        gone = deleted(rows) if name.startswith("value_") else None
        places = np.arange(len(column)) if gone is None else np.flatnonzero(~gone)
        found = _first_wrong_text(column.take(pa.array(places)))
        if found >= 0:
            yield Problem(NOT_UTF8, int(places[found]), number)


def _first_wrong_text(column: pa.Array) -> int:
    """The first row with a string that is not UTF-8; -1 if there is none."""
    if not _has_wrong_text(column):
        return -1
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        if _has_wrong_text(column.slice(low, middle - low)):
            high = middle
        else:
            low = middle
    return low


def _has_wrong_text(column: pa.Array) -> bool:
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            return True
        return False
    if pa.types.is_struct(kind):
        return any(_has_wrong_text(column.field(i)) for i in range(kind.num_fields))
    if pa.types.is_map(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
        return _has_wrong_text(column.values.slice(first, last - first))
    return False
