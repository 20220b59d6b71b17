"""Decodes JSON objects, one per record, to Arrow columns. They are the bytes of typed values.

How a column is written:

    boolean, integers  as themselves
    decimal            a number with all its digits: `1.50`, `1E-38`
    float, double      a number, or a string (see below)
    string             as itself; valid UTF-8
    binary             a string of upper-case hexadecimal digits
    date               `"2013-01-31"`
    timestamp          `"2013-01-31T10:00:00.000000Z"`, in UTC, always six digits; a timestamp_ntz has no Z
    array              an array; its null elements are `null`
    map                an array of `{"key": ..., "value": ...}` in the map's order
    struct             an object
    null               the field is left out

A value that begins with one space contains NaN or an infinity; all its floats and doubles are strings
(`"NaN"`, `"Infinity"`, `"-Infinity"`, `"1.5"`). So every column of a text has one JSON type, and Arrow parses
whole batches without a loop over records. Any other text is refused. The error gives the position of the
first bad record, never its content.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from keyfold.statestore.errors import SchemaMismatch

Floats = Literal["number", "text"]
#: How to treat fields that are not columns.
Others = Literal["error", "ignore"]
#: What Arrow's parser and the conversions here raise for invalid text.
_REFUSALS = (pa.ArrowException, binascii.Error, ValueError)

_SPACE, _BRACE, _END = b" {}"
_PIECE_BYTES = 1 << 28
_BLOCK_BYTES = 1 << 22


def decode_objects(records: pa.Array, schema: pa.Schema) -> pa.Table:
    """The columns of `schema` from one JSON object per record.

    Args:
        records: Binary; a null record becomes null in every column.

    Raises:
        SchemaMismatch: A record is not JSON of this schema; `position` names the record.
    """
    try:
        return _decoded(records, schema)
    except _REFUSALS:
        row = _first_bad(records, lambda part: _decoded(part, schema))
    raise SchemaMismatch(
        "A record is not a JSON object of the changelog's columns.",
        position=f"record {row} of the batch",
        expected=", ".join(f"{field.name}: {field.type}" for field in schema),
        remedy="reopen the changelog if a column was just added; else `keyfold verify` lists such records",
    )


def first_bad(records: pa.Array, decode: Callable[[pa.Array], object]) -> int | None:
    """The position of the first record that `decode` refuses; None if it accepts all."""
    try:
        decode(records)
    except _REFUSALS:
        return _first_bad(records, decode)
    return None


def _first_bad(records: pa.Array, decode: Callable[[pa.Array], object]) -> int:
    """Binary search; one of these records is known to be bad."""
    low, high = 0, len(records)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            decode(records[low:middle])
        except _REFUSALS:
            high = middle
        else:
            low = middle
    return low


def first_misfit(records: pa.Array, schema: pa.Schema) -> tuple[int, str | None] | None:
    """Row and column of the first record that `decode_objects` refuses.

    The column is None if the record is not an object or has fields that are not columns.
    """
    row = first_bad(records, lambda part: _decoded(part, schema))
    return None if row is None else (row, _bad_column(records[row : row + 1], schema))


def _bad_column(record: pa.Array, schema: pa.Schema) -> str | None:
    def is_bad(part: pa.Schema) -> bool:
        return first_bad(record, lambda one: _decoded(one, part, "ignore")) is not None

    if is_bad(pa.schema([pa.field("\0", pa.bool_())])):  # not an object, or more than one
        return None
    return next((str(field.name) for field in schema if is_bad(pa.schema([field]))), None)


def _pieces(records: pa.Array) -> Iterable[pa.Array]:
    """Slices of about 256 MB: a JSON text is one Arrow buffer, which holds at most 2 GB."""
    if not len(records):
        return
    offsets = _offsets(records)
    cuts = np.arange(offsets[0] + _PIECE_BYTES, offsets[-1], _PIECE_BYTES, dtype=np.int64)
    rows = np.unique(np.concatenate(([0], np.searchsorted(offsets, cuts), [len(records)])))
    for start, end in zip(rows[:-1].tolist(), rows[1:].tolist(), strict=True):
        yield records.slice(start, end - start)


def _decoded(records: pa.Array, schema: pa.Schema, others: Others = "error") -> pa.Table:
    pieces = [_decode_piece(piece, schema, others) for piece in _pieces(records)]
    return pa.concat_tables([*pieces, schema.empty_table()])


def _decode_piece(records: pa.Array, schema: pa.Schema, others: Others) -> pa.Table:
    if records.null_count:
        records = records.fill_null(pa.scalar(b"{}", pa.binary()))
    offsets = _offsets(records)
    if (np.diff(offsets) < 2).any():
        raise ValueError("an empty record")
    data = np.frombuffer(records.buffers()[2], dtype=np.uint8)
    marked = data[offsets[:-1]] == _SPACE
    if (data[offsets[:-1] + marked] != _BRACE).any() or (data[offsets[1:] - 1] != _END).any():
        raise ValueError("a record is not one object")
    if not marked.any():
        return _parse(records, schema, "number", others)
    plain = np.flatnonzero(~marked)
    special = np.flatnonzero(marked)
    kinds: list[tuple[npt.NDArray[np.int64], Floats]] = [(plain, "number"), (special, "text")]
    tables = [
        _parse(records.take(pa.array(rows)), schema, floats, others) for rows, floats in kinds if len(rows)
    ]
    place = np.empty(len(records), dtype=np.int64)
    place[np.concatenate((plain, special))] = np.arange(len(records))
    return pa.concat_tables(tables).take(pa.array(place))


def _parse(records: pa.Array, schema: pa.Schema, floats: Floats, others: Others) -> pa.Table:
    """`records` of one kind, each known to begin with "{", optionally after a space, and to end with "}"."""
    rows = len(records)
    joined = pc.binary_join_element_wise(records, pa.scalar(b"", pa.binary()), pa.scalar(b"\n", pa.binary()))
    joined.cast(pa.string())  # raises if it is not UTF-8; the parser does not check
    text = joined.buffers()[2]
    # No object continues from "}" to "{", so none spans two records. With as many objects as records (checked
    # below), each record is one object.
    columns = [field for field in schema if not pa.types.is_null(field.type)]
    longest = int(np.diff(_offsets(records)).max())
    table = pj.read_json(
        pa.BufferReader(text),
        read_options=pj.ReadOptions(block_size=max(_BLOCK_BYTES, longest + 1)),
        parse_options=pj.ParseOptions(
            explicit_schema=pa.schema([pa.field(f.name, _json_type(f.type, floats)) for f in columns]),
            unexpected_field_behavior=others,
        ),
    )
    if table.num_rows != rows and columns:
        raise ValueError("a record is not one object")
    parsed = {name: table.column(i) for i, name in enumerate(table.column_names)}
    return pa.Table.from_arrays(
        [
            pa.chunked_array([_typed(chunk, f.type) for chunk in parsed[f.name].chunks], f.type)
            if f.name in parsed
            else pa.chunked_array([pa.nulls(rows)])
            for f in schema
        ],
        schema=schema,
    )


def _json_type(kind: pa.DataType, floats: Floats) -> pa.DataType:
    """The Arrow type to which the JSON of a column is parsed. `_typed` converts it to the column's type."""
    if pa.types.is_null(kind):
        return pa.bool_()  # Arrow's JSON reader loses the length of arrays of nulls
    if pa.types.is_date32(kind):
        return pa.timestamp("s")
    if pa.types.is_binary(kind) or (pa.types.is_floating(kind) and floats != "number"):
        return pa.string()
    if pa.types.is_map(kind):
        entry = [
            ("key", _json_type(kind.key_type, floats)),
            ("value", _json_type(kind.item_type, floats)),
        ]
        return pa.list_(pa.struct(entry))
    if pa.types.is_list(kind):
        return pa.list_(_json_type(kind.value_type, floats))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _json_type(f.type, floats)) for f in kind])
    return kind


def _typed(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert `array`, as parsed from JSON, to type `kind`. Equal buffers are shared."""
    if array.type == kind:
        return array
    if pa.types.is_null(kind):
        return pa.nulls(len(array))
    if pa.types.is_binary(kind):
        return _from_hexadecimal(array)
    if pa.types.is_nested(kind):
        return _typed_nested(array, kind)
    return array.cast(kind)


def _typed_nested(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Arrays from the JSON reader begin at offset 0, so their buffers can be used directly."""
    if pa.types.is_struct(kind):
        children = []
        for i, field in enumerate(kind):
            child = _typed(array.field(i), field.type)
            _refuse_nulls(child, field, array)
            children.append(child)
        buffers = array.buffers()[:1]
    elif pa.types.is_map(kind):
        entries = pa.struct([kind.key_field, kind.item_field])
        children = [_typed(array.values, entries)]
        _refuse_nulls(children[0], pa.field("entries", entries, nullable=False), None)
        buffers = array.buffers()[:2]
    else:
        children = [_typed(array.values, kind.value_type)]
        _refuse_nulls(children[0], kind.value_field, None)
        buffers = array.buffers()[:2]
    return pa.Array.from_buffers(kind, len(array), buffers, array.null_count, 0, children)


def _refuse_nulls(child: pa.Array, field: pa.Field, parent: pa.Array | None) -> None:
    if field.nullable or not child.null_count:
        return
    missing = child.is_null() if parent is None else pc.and_(child.is_null(), parent.is_valid())
    if pc.any(missing).as_py():
        raise ValueError("null in a column that is not nullable")


def _from_hexadecimal(text: pa.Array) -> pa.Array:
    offsets = _offsets(text)
    if (np.diff(offsets) & 1).any():
        raise ValueError("an odd number of hexadecimal digits")
    data = binascii.unhexlify(memoryview(text.buffers()[2] or b"")[offsets[0] : offsets[-1]])
    ends = pa.py_buffer(((offsets - offsets[0]) // 2).astype(np.int32))
    return pa.Array.from_buffers(
        pa.binary(), len(text), [text.buffers()[0], ends, pa.py_buffer(data)], text.null_count
    )


def _offsets(array: pa.Array) -> npt.NDArray[np.int32]:
    """The `len + 1` offsets into the data of a binary or string array, sliced or not."""
    buffer = array.buffers()[1]
    if buffer is None or not buffer.size:
        return np.zeros(1, dtype=np.int32)
    return np.frombuffer(buffer, dtype=np.int32)[array.offset : array.offset + len(array) + 1]
