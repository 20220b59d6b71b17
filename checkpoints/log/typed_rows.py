"""Incoming rows of typed columns: checks and casts a user's Arrow table to the columns of a changelog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.errors import BadRecord
from keyfold.statestore.projection import empty_structs
from keyfold.statestore.schema import spark_types
from keyfold.statestore.schema.casting import cast, null_in_key
from keyfold.statestore.schema.columns import Columns

#: A column of this name says which rows delete their key.
DELETED: Final = "_deleted"


def columns_of(table: pa.Table, keys: tuple[str, ...]) -> Columns:
    """The columns of a new changelog whose first table this is.

    Raises:
        SchemaMismatch: a column has a type that cannot be stored, or not in a key.
        ConfigError: a key column does not exist, or two columns have the same name.
    """
    fields = [spark_types.field_of(field) for field in table.schema if field.name != DELETED]
    return Columns({"type": "struct", "fields": fields}, keys)


def are_columns(names: Sequence[str], columns: Columns) -> bool:
    """Whether a table with these names holds columns of the changelog, not records."""
    return set(names) <= {*columns.arrow_schema().names, DELETED}


def check_names(names: Sequence[str], columns: Columns) -> None:
    """Raises `BadRecord` if a key column is missing, or a column is there twice."""
    missing = [name for name in columns.keys if name not in names]
    if missing or len(set(names)) < len(names):
        raise BadRecord(
            "Wrong columns for rows of this changelog.",
            expected=f"the key columns ({', '.join(columns.keys)}) and value columns, each once",
            found=", ".join(names), remedy="select and rename the columns",
        )  # fmt: skip


def keys_of(batch: pa.RecordBatch, columns: Columns, row: int) -> pa.Array:
    """The bytes of the keys. `row` is the number of the batch's first row, for errors."""
    parts = []
    for name in columns.keys:
        column = cast(batch.column(name), name, columns.arrow_schema().field(name).type, row)
        if column.null_count:
            raise null_in_key(name, row + pc.index(column.is_null(), True).as_py())
        parts.append(column)
    return columns.encode_keys(parts)


def values_of(batch: pa.RecordBatch, columns: Columns, row: int) -> pa.StructArray:
    """The values as structs of the value columns that the batch has. Null where the row deletes its key."""
    fields = [field for field in columns.value_type if field.name in batch.schema.names]
    arrays = [cast(batch.column(field.name), field.name, field.type, row) for field in fields]
    values = pa.StructArray.from_arrays(arrays, fields=fields) if fields else empty_structs(batch.num_rows)
    gone = _deleted(batch, columns, row)
    if gone is None:
        return values
    # A null place also makes the fields null: nothing of a deleted value is written.
    places = pa.array(np.arange(len(values)), mask=gone.to_numpy(zero_copy_only=False))
    return values.take(places)


def check_keys(keys: pa.Array, columns: Columns, row: int) -> None:
    """Raises `BadRecord` for bytes that are not a key of the changelog."""
    misfit = columns.misfit(keys)
    if misfit is not None:
        raise BadRecord(
            "A record does not match the changelog's columns.",
            position=f"row {row + misfit.row}, {misfit.part}", expected=misfit.expected, found="other bytes",
            remedy="give a table of these columns, from which the keys are made",
        )  # fmt: skip


def _deleted(batch: pa.RecordBatch, columns: Columns, row: int) -> pa.Array | None:
    """Which rows delete their key. None if no column says so: a column of the changelog is a value."""
    if DELETED not in batch.schema.names or DELETED in columns.arrow_schema().names:
        return None
    return cast(batch.column(DELETED), DELETED, pa.bool_(), row).fill_null(False)
