"""Incoming rows of typed columns: checks and casts a user's Arrow table to the columns of a changelog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.errors import BadRecord
from keyfold.statestore.projection import as_type, empty_structs, is_list
from keyfold.statestore.schema import spark_types
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
        column = _cast(batch.column(name), name, columns.arrow_schema().field(name).type, row)
        if column.null_count:
            raise BadRecord(
                f"The key column {name!r} of a row is null.",
                position=f"row {row + pc.index(column.is_null(), True).as_py()}",
                expected="a key that is not null", found="null",
                remedy="filter out these rows, or set their key, before you write them",
            )  # fmt: skip
        parts.append(column)
    return columns.encode_keys(parts)


def values_of(batch: pa.RecordBatch, columns: Columns, row: int) -> pa.StructArray:
    """The values as structs of the value columns that the batch has. Null where the row deletes its key."""
    fields = [field for field in columns.value_type if field.name in batch.schema.names]
    arrays = [_cast(batch.column(field.name), field.name, field.type, row) for field in fields]
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


def values_in(values: pa.StructArray, columns: Columns, row: int) -> pa.StructArray:
    """Structs of value columns, as records have them, with the types of the changelog."""
    names = [field.name for field in values.type]
    unknown = [name for name in names if columns.value_type.get_field_index(name) < 0]
    if unknown or len(set(names)) < len(names):
        raise BadRecord(
            "Wrong columns in the values of records.",
            expected=", ".join(field.name for field in columns.value_type), found=", ".join(names),
            remedy="select and rename the columns",
        )  # fmt: skip
    fields = [columns.value_type.field(name) for name in names]
    if not fields:
        return values
    arrays = [_cast(a, f.name, f.type, row) for a, f in zip(values.flatten(), fields, strict=True)]
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=values.is_null())


def _deleted(batch: pa.RecordBatch, columns: Columns, row: int) -> pa.Array | None:
    """Which rows delete their key. None if no column says so: a column of the changelog is a value."""
    if DELETED not in batch.schema.names or DELETED in columns.arrow_schema().names:
        return None
    return _cast(batch.column(DELETED), DELETED, pa.bool_(), row).fill_null(False)


def _cast(column: pa.Array, name: str, kind: pa.DataType, row: int) -> pa.Array:
    """The column as `kind`, if that keeps every value. Raises `BadRecord`."""
    if not _is_alike(column.type, kind):
        raise BadRecord(
            f"Column {name!r} has another type than in the changelog.", expected=str(kind),
            found=str(column.type), remedy="cast the column",
        )  # fmt: skip
    try:
        return as_type(column, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        pass
    raise BadRecord(
        f"A value of column {name!r} does not fit the type in the changelog.",
        position=f"row {row + _first_misfit(column, kind)}", expected=str(kind),
        found=f"a value of type {column.type} that would change", remedy="cast or round the column",
    )  # fmt: skip


def _first_misfit(column: pa.Array, kind: pa.DataType) -> int:
    start, stop = 0, len(column)
    while stop - start > 1:
        middle = (start + stop) // 2
        try:
            as_type(column.slice(start, middle - start), kind)
            start = middle
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            stop = middle
    return start


def _is_alike(found: pa.DataType, kind: pa.DataType) -> bool:
    """Whether values of a type may be taken as those of another: numbers as numbers, text as text."""
    t = pa.types
    if found.equals(kind) or t.is_null(found):
        return True
    if t.is_struct(kind) and t.is_struct(found):
        names = {found.field(i).name: found.field(i).type for i in range(found.num_fields)}
        wanted = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
        return names.keys() == wanted.keys() and all(_is_alike(names[n], wanted[n]) for n in wanted)
    if t.is_map(kind) or t.is_map(found):
        return (
            t.is_map(kind) and t.is_map(found)
            and _is_alike(found.key_type, kind.key_type) and _is_alike(found.item_type, kind.item_type)
        )  # fmt: skip
    if t.is_list(kind):
        return is_list(found) and _is_alike(found.value_type, kind.value_type)
    if t.is_timestamp(kind):
        aware = kind.tz is not None
        return (t.is_timestamp(found) and (found.tz is not None) == aware) or (t.is_date(found) and not aware)
    return any(holds(found) and holds(kind) for holds in _FAMILIES)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind) or pa.types.is_binary_view(kind)
    )  # fmt: skip


_FAMILIES: Final = (
    _is_number,
    _is_text,
    _is_bytes,
    pa.types.is_boolean,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_duration,
)
