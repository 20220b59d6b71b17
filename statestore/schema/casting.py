"""A user's Arrow columns as the types of a changelog: only what keeps every value, and nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.errors import BadRecord
from keyfold.statestore.projection import as_type, check_nulls, is_list


def plain(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The same values as one array in a plain layout: no dictionary, no run-end encoding, no views."""
    if isinstance(column, pa.ChunkedArray):
        return plain(pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type))
    kind = column.type
    if pa.types.is_dictionary(kind):
        # Arrow cannot take values out of a dictionary of views, so convert the dictionary first.
        return plain(
            pa.DictionaryArray.from_arrays(column.indices, plain(column.dictionary)).dictionary_decode()
        )
    if pa.types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(column))
    if pa.types.is_string_view(kind):
        return column.cast(pa.large_string())
    if pa.types.is_binary_view(kind):
        return column.cast(pa.large_binary())
    return _plain_within(column) if pa.types.is_nested(kind) else column


def _plain_within(column: pa.Array) -> pa.Array:
    """Structs, lists or maps with what is in them in a plain layout."""
    kind, rows = column.type, len(column)
    plain_kind = _plain_type(kind)
    if plain_kind == kind:
        return column
    if pa.types.is_struct(kind):
        fields = [plain(column.field(i)) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(fields, fields=list(plain_kind), mask=column.is_null())
    if not rows:
        return pa.array([], plain_kind)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    buffers = [pa.py_buffer(np.packbits(valid, bitorder="little")) if column.null_count else None]
    # Of a slice, Arrow gives the elements of the whole array.
    if pa.types.is_fixed_size_list(kind):
        first, last = column.offset * kind.list_size, (column.offset + rows) * kind.list_size
    else:
        width = np.dtype(np.int64 if pa.types.is_large_list(kind) else np.int32)
        offsets = np.frombuffer(column.buffers()[1], width, rows + 1, column.offset * width.itemsize)
        first, last = int(offsets[0]), int(offsets[-1])
        buffers.append(pa.py_buffer(offsets - offsets[0]))
    if pa.types.is_map(kind):
        parts = [plain(part.slice(first, last - first)) for part in (column.keys, column.items)]
        elements = pa.StructArray.from_arrays(parts, fields=list(plain_kind.field(0).type))
    else:
        elements = plain(column.values.slice(first, last - first))
    return pa.Array.from_buffers(plain_kind, rows, buffers, children=[elements])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of `plain` of a column of this type."""
    t = pa.types
    if t.is_dictionary(kind) or t.is_run_end_encoded(kind):
        return _plain_type(kind.value_type)
    if t.is_string_view(kind):
        return pa.large_string()
    if t.is_binary_view(kind):
        return pa.large_binary()
    if t.is_map(kind):
        parts = (kind.key_field, kind.item_field)
        return pa.map_(*(part.with_type(_plain_type(part.type)) for part in parts))
    if t.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    if is_list(kind):
        element = kind.value_field.with_type(_plain_type(kind.value_type))
        if t.is_fixed_size_list(kind):
            return pa.list_(element, kind.list_size)
        return pa.large_list(element) if t.is_large_list(kind) else pa.list_(element)
    return kind


def check_values(column: pa.Array, name: str, row: int = 0) -> None:
    """Check every value: Arrow trusts the program that made the buffers.

    Args:
        row: The number of the column's first row, for errors.

    Raises:
        BadRecord: A string is not UTF-8, a decimal has too many digits, or an offset is wrong.
    """
    try:
        column.validate(full=True)
    except pa.ArrowException:
        wrong = row + _first(column, lambda part: part.validate(full=True))
        raise BadRecord(
            f"A value of column {name!r} is not one of its type.", position=f"row {wrong}",
            expected=f"{column.type}: strings in UTF-8, decimals of at most their digits, offsets in order",
            found="another value", remedy="cast it to binary, or repair it where it was made",
        ) from None  # fmt: skip


def key_columns(keys: pa.Array, names: Sequence[str], kinds: Sequence[pa.DataType]) -> list[pa.Array]:
    """The key columns of keys that are one column, or structs of the key columns in any order.

    Raises:
        BadRecord: They are not; a key is null, or a value does not fit its column.
    """
    columns = [keys]
    if len(names) > 1:
        found = [field.name for field in keys.type] if pa.types.is_struct(keys.type) else []
        if sorted(found) != sorted(names):
            raise BadRecord(
                "These are not keys of this changelog.", expected=f"structs of {', '.join(names)}",
                found=f"structs of {', '.join(found)}" if found else str(keys.type),
                remedy="give an Arrow struct with one field for each key column",
            )  # fmt: skip
        fields = keys.flatten()
        columns = [fields[found.index(name)] for name in names]
    for name, column in zip(names, columns, strict=True):
        if column.null_count:
            raise null_in_key(name, pc.index(column.is_null(), True).as_py())
    return [_fitted(c, name, kind) for c, name, kind in zip(columns, names, kinds, strict=True)]


def values_in(values: pa.Array, kind: pa.StructType, row: int = 0) -> pa.Array:
    """Structs of value columns, with the types of the changelog's values, `kind`. A column that is left out
    is null.

    Args:
        row: The number of the first row, for errors.

    Raises:
        BadRecord: They are not structs, or have other columns; or a value does not fit its column.
    """
    if pa.types.is_null(values.type):
        return pa.nulls(len(values), kind)
    if not pa.types.is_struct(values.type):
        raise BadRecord(
            "The values are not structs of the changelog's columns.",
            expected="structs of " + ", ".join(field.name for field in kind), found=str(values.type),
            remedy="give an Arrow struct with a field for each value column",
        )  # fmt: skip
    names = [field.name for field in values.type]
    unknown = [name for name in names if kind.get_field_index(name) < 0]
    if unknown or len(set(names)) < len(names):
        raise BadRecord(
            "Wrong columns in the values of records.",
            expected=", ".join(field.name for field in kind), found=", ".join(names),
            remedy="select and rename the columns",
        )  # fmt: skip
    fields = [kind.field(name) for name in names]
    if not fields:
        return values
    columns = [_fitted(c, f.name, f.type, row) for c, f in zip(values.flatten(), fields, strict=True)]
    return pa.StructArray.from_arrays(columns, fields=fields, mask=values.is_null())


def null_in_key(name: str, row: int) -> BadRecord:
    """The error for a null in a key column."""
    return BadRecord(
        f"The key column {name!r} of a row is null.", position=f"row {row}",
        expected="a key that is not null", found="null",
        remedy="filter out these rows, or set their key, before you write them",
    )  # fmt: skip


def _fitted(column: pa.Array, name: str, kind: pa.DataType, row: int = 0) -> pa.Array:
    check_values(column, name, row)
    return cast(plain(column), name, kind, row)


def cast(column: pa.Array, name: str, kind: pa.DataType, row: int = 0) -> pa.Array:
    """The column as `kind`, if that keeps every value.

    Args:
        row: The number of the column's first row, for errors.

    Raises:
        BadRecord: Its type is another one, not only wider or narrower, or a value would change.
    """
    if not _is_alike(column.type, kind):
        raise BadRecord(
            f"Column {name!r} has another type than in the changelog.", expected=str(kind),
            found=str(column.type), remedy="cast the column",
        )  # fmt: skip
    try:
        return _kept(column, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        pass
    raise BadRecord(
        f"A value of column {name!r} does not fit the type in the changelog.",
        position=f"row {row + _first(column, lambda part: _kept(part, kind))}", expected=str(kind),
        found=f"a value of type {column.type} that would change", remedy="cast or round the column",
    )  # fmt: skip


def _kept(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Raises one of Arrow's errors if a value would change."""
    found = as_type(column, kind)
    check_nulls(found)
    return found


def _first(column: pa.Array, check: Callable[[pa.Array], object]) -> int:
    """The first row for which `check` raises an error of Arrow. There is one."""
    start, stop = 0, len(column)
    while stop - start > 1:
        middle = (start + stop) // 2
        try:
            check(column.slice(start, middle - start))
            start = middle
        except pa.ArrowException:
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
