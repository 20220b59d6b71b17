"""Gives values of an earlier or later schema the columns of another one."""

from __future__ import annotations

import pyarrow as pa


def as_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column as another type that can hold its values. Fields of structs are matched by name: what the
    column lacks is null, what `kind` lacks is left out.

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
