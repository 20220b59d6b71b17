"""Gives values of an earlier or later schema the columns of another one."""

from __future__ import annotations

import pyarrow as pa

from keyfold.statestore.segment.block import record_schema

_VALUE = "value"


def projected(batch: pa.RecordBatch, values: pa.DataType) -> pa.RecordBatch:
    """Records with their values as `values`. Columns are matched by name, in structs within them too: what a
    record lacks is null, what `values` lacks is left out.
    """
    i = batch.schema.get_field_index(_VALUE)
    column = batch.column(i)
    if column.type.equals(values):
        return batch
    columns = batch.columns
    columns[i] = as_type(column, values)
    return pa.RecordBatch.from_arrays(columns, schema=record_schema(values))


def as_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column as another type that can hold its values.

    Raises:
        pa.ArrowInvalid: A value does not fit.
    """
    if column.type.equals(kind):
        return column
    if not (pa.types.is_struct(kind) and pa.types.is_struct(column.type)):
        return column.cast(kind)
    known = {column.type.field(i).name: i for i in range(column.type.num_fields)}
    fields = [kind.field(i) for i in range(kind.num_fields)]
    children = [
        as_type(column.field(known[field.name]), field.type)
        if field.name in known
        else pa.nulls(len(column), field.type)
        for field in fields
    ]
    mask = column.is_null() if column.null_count else None
    if not fields:
        return pa.array([None if gone else {} for gone in column.is_null().to_pylist()], kind)
    return pa.StructArray.from_arrays(children, fields=fields, mask=mask)
