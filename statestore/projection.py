"""Gives values of an earlier or later schema the columns of another one."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


def as_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column as another type that can hold its values. Fields of structs are matched by name: what the
    column lacks is null, what `kind` lacks is left out.

    Raises:
        pa.ArrowInvalid: A value does not fit.
    """
    if column.type.equals(kind):
        return column
    if pa.types.is_struct(kind) and pa.types.is_struct(column.type):
        return _as_struct(column, kind)
    if pa.types.is_map(kind) and pa.types.is_map(column.type):
        dense = _dense(column)
        keys, items = as_type(dense.keys, kind.key_type), as_type(dense.items, kind.item_type)
        return _with_nulls_of(column, pa.MapArray.from_arrays(dense.offsets, keys, items, type=kind))
    if pa.types.is_list(kind) and pa.types.is_list(column.type):
        dense = _dense(column)
        values = as_type(dense.values, kind.value_type)
        return _with_nulls_of(column, pa.ListArray.from_arrays(dense.offsets, values, type=kind))
    return column.cast(kind)


def _as_struct(column: pa.StructArray, kind: pa.StructType) -> pa.StructArray:
    known = {column.type.field(i).name: i for i in range(column.type.num_fields)}
    fields = [kind.field(i) for i in range(kind.num_fields)]
    if not fields:
        return pa.array([None if gone else {} for gone in column.is_null().to_pylist()], kind)
    children = [
        as_type(column.field(known[field.name]), field.type)
        if field.name in known
        else pa.nulls(len(column), field.type)
        for field in fields
    ]
    mask = column.is_null() if column.null_count else None
    return pa.StructArray.from_arrays(children, fields=fields, mask=mask)


def _dense(column: pa.Array) -> pa.Array:
    """The lists or maps that are not null."""
    return column.drop_null() if column.null_count else column


def _with_nulls_of(column: pa.Array, dense: pa.Array) -> pa.Array:
    """`dense` with nulls where `column` has them."""
    if not column.null_count:
        return dense
    places = pc.subtract(pc.cumulative_sum(column.is_valid().cast(pa.int64())), 1)
    return dense.take(pc.if_else(column.is_valid(), places, None))
