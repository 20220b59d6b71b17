"""Gives values of an earlier or later schema the columns of another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

#: Of the largest 64-bit integer.
_DIGITS_OF_INTEGERS: Final = 20
_INT32_MAX: Final = (1 << 31) - 1


def as_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column as another type that can hold its values. Fields of structs are matched by name: what the
    column lacks is null, what `kind` lacks is left out. A struct without fields keeps only what is null.

    Raises:
        pa.ArrowInvalid: A value does not fit.
    """
    if column.type.equals(kind):
        return column
    if pa.types.is_struct(kind) and (pa.types.is_struct(column.type) or not kind.num_fields):
        return _as_struct(column, kind)
    if pa.types.is_map(kind) and pa.types.is_map(column.type):
        return where_present(column, lambda present: _as_map(present, kind))
    if pa.types.is_list(kind) and is_list(column.type):
        return where_present(column, lambda present: _as_list(present, kind))
    if pa.types.is_null(kind) and column.null_count == len(column):
        return pa.nulls(len(column))
    if pa.types.is_null(kind):
        raise pa.ArrowInvalid("a value for a column that is always null")
    if pa.types.is_decimal(kind) and pa.types.is_integer(column.type):
        # Arrow casts an integer only to a decimal that holds all values of its type.
        return column.cast(pa.decimal128(_DIGITS_OF_INTEGERS, 0)).cast(kind)
    found = _from_zero(column).cast(kind)
    if pa.types.is_floating(column.type) or pa.types.is_floating(kind):
        _check_rounding(column, found)
    if pa.types.is_date(kind) and pa.types.is_timestamp(column.type):
        _check_midnight(column, found)
    return found


def _from_zero(column: pa.Array) -> pa.Array:
    """The same bytes or texts with offsets from 0: Arrow casts no slice of an array from beyond 2 GiB."""
    is_large = pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type)
    if not is_large or not len(column):
        return column
    end = np.frombuffer(column.buffers()[1], np.int64)[column.offset + len(column)]
    return column if end <= _INT32_MAX else pa.concat_arrays([column, column.slice(0, 0)])


def _check_rounding(column: pa.Array, found: pa.Array) -> None:
    """Arrow rounds a number to a decimal, and a large one to infinity. A float may be the nearest one of a
    double, and the nearest one of a decimal if the decimal is also the nearest one of the float.
    """
    if pa.types.is_decimal(column.type) or pa.types.is_decimal(found.type):
        changed = pc.not_equal(found.cast(column.type, safe=False), column)
    elif pa.types.is_floating(column.type) and pa.types.is_floating(found.type):
        changed = pc.and_(pc.is_inf(found), pc.is_finite(column))
    else:
        return
    if pc.any(changed).as_py():
        raise pa.ArrowInvalid("a number is rounded")


def _check_midnight(column: pa.Array, found: pa.Array) -> None:
    """Arrow leaves out the time of day."""
    times = column.cast(pa.timestamp(column.type.unit))
    if pc.any(pc.not_equal(found.cast(times.type), times)).as_py():
        raise pa.ArrowInvalid("a time of day is left out")


def check_nulls(column: pa.Array) -> None:
    """Check that nothing within the values is null that the type says is never null. Arrow does not.

    Raises:
        pa.ArrowInvalid: Something is.
    """
    kind = column.type
    if not _has_required(kind):
        return
    present = column.drop_null() if column.null_count else column
    parts = present.flatten() if pa.types.is_struct(kind) else _elements(present)[1:]
    for field, part in zip(_fields(kind), parts, strict=True):
        if part.null_count and not field.nullable:
            raise pa.ArrowInvalid("a null within a value")
        check_nulls(part)


def _has_required(kind: pa.DataType) -> bool:
    """Whether something within the values is never null, other than the keys of maps, which Arrow checks."""
    fields = _fields(kind)
    if pa.types.is_map(kind):
        return _has_required(kind.key_type) or not kind.item_field.nullable or _has_required(kind.item_type)
    return any(not field.nullable or _has_required(field.type) for field in fields)


def _fields(kind: pa.DataType) -> list[pa.Field]:
    """Of a struct, a map or a list; none of other types."""
    if pa.types.is_map(kind):
        return [kind.key_field, kind.item_field]
    return [kind.field(i) for i in range(kind.num_fields)]


def _as_struct(column: pa.StructArray, kind: pa.StructType) -> pa.StructArray:
    fields = [kind.field(i) for i in range(kind.num_fields)]
    if not fields:
        places = pa.array(np.arange(len(column)), mask=column.is_null().to_numpy(zero_copy_only=False))
        return empty_structs(len(column)).take(places)
    known = {column.type.field(i).name: i for i in range(column.type.num_fields)}
    children = [
        as_type(column.field(known[field.name]), field.type)
        if field.name in known
        else pa.nulls(len(column), field.type)
        for field in fields
    ]
    mask = column.is_null() if column.null_count else None
    return pa.StructArray.from_arrays(children, fields=fields, mask=mask)


def _as_map(maps: pa.MapArray, kind: pa.MapType) -> pa.MapArray:
    offsets, keys, items = _elements(maps)
    keys, items = as_type(keys, kind.key_type), as_type(items, kind.item_type)
    return pa.MapArray.from_arrays(offsets, keys, items, type=kind)


def _as_list(lists: pa.Array, kind: pa.ListType) -> pa.ListArray:
    offsets, values = _elements(lists)
    return pa.ListArray.from_arrays(offsets, as_type(values, kind.value_type), type=kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether it is one of Arrow's types of lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _elements(dense: pa.Array) -> tuple[pa.Array, ...]:
    """The offsets of lists or maps of which none is null, and the elements of these lists alone: of a slice,
    Arrow gives those of the whole array.
    """
    if pa.types.is_fixed_size_list(dense.type):
        size = dense.type.list_size
        return pa.array(np.arange(len(dense) + 1) * size, pa.int32()), dense.flatten()
    first, last = dense.offsets[0].as_py(), dense.offsets[-1].as_py()
    offsets = pc.subtract(dense.offsets, first).cast(pa.int32())
    parts = (dense.keys, dense.items) if pa.types.is_map(dense.type) else (dense.values,)
    return offsets, *(part.slice(first, last - first) for part in parts)


def empty_structs(count: int) -> pa.StructArray:
    """Structs without fields, none of them null."""
    return pa.Array.from_buffers(pa.struct([]), count, [None])


def where_present(array: pa.Array, convert: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """`convert` applied to the elements that are not null. The others are null in the result."""
    if not array.null_count:
        return convert(array)
    present = array.is_valid().to_numpy(zero_copy_only=False)
    places = np.cumsum(present, dtype=np.int64) - 1
    return convert(array.drop_null()).take(pa.array(places, mask=~present))
