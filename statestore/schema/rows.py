"""Rows: the typed values of one record as bytes, as the last-value stores keep them.

All numbers are little-endian. A row begins with the id of the schema it was written with:

    row      = schema id u16 | struct
    struct   = nulls | fixed part | bytes of its variable fields, in order
    nulls    = one bit per field, the lowest bit of the first byte first; set if the field is null
    fixed    = for each field in order: its bytes, or for a variable field where its bytes end (u32, counted
               from the end of the fixed part). Zero, or the end before, where the field is null.
    array    = number of elements u32 | nulls, one bit per element | for each element its bytes, or where its
               bytes end (u32) | bytes of variable elements

| type | bytes |
|---|---|
| boolean | 1: 0 or 1 |
| tinyint, smallint, int, bigint | 1, 2, 4, 8, two's complement |
| float, double | 4, 8: IEEE 754, every bit |
| decimal | 16, two's complement of the unscaled value |
| date | 4: days since 1970-01-01 |
| timestamp, timestamp_ntz, day-time interval | 8: microseconds |
| time | 8: nanoseconds |
| year-month interval | 4: months |
| string, binary | variable: its bytes |
| struct | variable: a struct |
| array | variable: an array |
| map | variable: an array of structs of key and value |
| void | 0: always null |

`encode` and `decode` work on whole columns, without a loop over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.projection import where_present

_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Ints: TypeAlias = npt.NDArray[np.int64]
_Bools: TypeAlias = npt.NDArray[np.bool_]

SCHEMA_ID_BYTES: Final = 2
SCHEMAS_MAX: Final = (1 << 8 * SCHEMA_ID_BYTES) - 1
_END: Final = np.dtype("<u4")


def encode(values: pa.StructArray, schema_id: int) -> pa.Array:
    """The rows of typed values, as `binary`. Null where the value is null (a tombstone).

    Raises:
        pa.ArrowCapacityError: The rows need more than 2 GiB.
    """
    head = schema_id.to_bytes(SCHEMA_ID_BYTES, "little")
    return where_present(
        values, lambda present: _joined([pa.scalar(head), *_struct_pieces(present)], len(present))
    )


def decode(rows: pa.Array, kind: pa.StructType) -> pa.StructArray:
    """The typed values of rows that were written with one schema. Null where the row is null.

    Args:
        rows: `binary`.
        kind: The type of the values in that schema.

    Raises:
        ValueError: The bytes are not rows of this type.
    """
    return where_present(rows, lambda present: _read_struct(_Spans.of(present, SCHEMA_ID_BYTES), kind))


def schema_ids(rows: pa.Array) -> npt.NDArray[np.uint16]:
    """The id of the schema of each row. Raises `ValueError` if a row is null or has none."""
    spans = _Spans.of(rows, 0)
    spans.check(SCHEMA_ID_BYTES)
    ids: npt.NDArray[np.uint16] = spans.first(SCHEMA_ID_BYTES).view("<u2")[:, 0]
    return ids


# -- encoding ------------------------------------------------------------------------------------------------


def _width(kind: pa.DataType) -> int | None:
    """The bytes of a value; None for a variable type."""
    if pa.types.is_null(kind):
        return 0
    if pa.types.is_boolean(kind):
        return 1
    if pa.types.is_binary(kind) or pa.types.is_string(kind) or pa.types.is_nested(kind):
        return None
    return int(kind.bit_width) // 8


def _struct_pieces(values: pa.StructArray) -> list[pa.Array]:
    """The parts of each row after its head: the fixed part, and the variable fields. No value is null."""
    rows, fields = len(values), [values.field(i) for i in range(values.type.num_fields)]
    nulls = np.zeros((rows, len(fields)), np.bool_)
    fixed, variable = [], []
    end = np.zeros(rows, np.int64)
    for i, column in enumerate(fields):
        if column.null_count:
            nulls[:, i] = column.is_null().to_numpy(zero_copy_only=False)
        if _width(column.type) is None:
            packed = _bytes_of(column)
            end = end + _lengths(packed)
            fixed.append(end.astype(_END).view(np.uint8).reshape(rows, _END.itemsize))
            variable.append(packed)
        else:
            fixed.append(_fixed(column))
    parts = [np.packbits(nulls, axis=1, bitorder="little").reshape(rows, -(-len(fields) // 8)), *fixed]
    return [_packed(np.concatenate(parts, axis=1)), *variable]


def _fixed(column: pa.Array) -> _Bytes:
    """The values of a fixed width, one row each. Nulls are zero."""
    rows, kind = len(column), column.type
    if pa.types.is_null(kind):
        return np.zeros((rows, 0), np.uint8)
    if pa.types.is_boolean(kind):
        flags: _Bytes = column.fill_null(False).cast(pa.uint8()).to_numpy()
        return flags.reshape(rows, 1)
    width = int(kind.bit_width) // 8
    data = np.frombuffer(column.buffers()[1] or b"", np.uint8)
    found = data[column.offset * width : (column.offset + rows) * width].reshape(rows, width)
    if column.null_count:
        found = found * column.is_valid().cast(pa.uint8()).to_numpy(zero_copy_only=False)[:, None]
    return found


def _bytes_of(column: pa.Array) -> pa.Array:
    """The bytes of a variable type, as `binary`. Null where the value is."""
    kind = column.type
    if pa.types.is_struct(kind):
        return where_present(column, lambda present: _joined(_struct_pieces(present), len(present)))
    if pa.types.is_nested(kind):
        return where_present(column, _arrays)
    return column.cast(pa.binary())


def _arrays(lists: pa.Array) -> pa.Array:
    """The bytes of arrays or maps of which none is null."""
    offsets = np.asarray(lists.offsets).astype(np.int64)
    elements = _elements(lists).slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    offsets -= offsets[0]
    counts = np.diff(offsets)
    pieces = [_packed(counts.astype("<u4").view(np.uint8).reshape(-1, 4)), _null_bits(elements, offsets)]
    width = _width(elements.type)
    if width is not None:
        pieces.append(_sliced(_fixed(elements), offsets * width))
    else:
        packed = _bytes_of(elements)
        packed = packed.fill_null(b"") if packed.null_count else packed
        ends = np.concatenate([[0], np.cumsum(_lengths(packed))])
        within = ends[1:] - np.repeat(ends[offsets[:-1]], counts)
        pieces.append(_sliced(within.astype(_END).view(np.uint8), offsets * _END.itemsize))
        start, data = _parts(packed)
        pieces.append(_sliced(data, start[0] + ends[offsets]))
    return _joined(pieces, len(lists))


def _elements(lists: pa.Array) -> pa.Array:
    if not pa.types.is_map(lists.type):
        return lists.values
    return pa.StructArray.from_arrays([lists.keys, lists.items], ["key", "value"])


def _null_bits(elements: pa.Array, offsets: _Ints) -> pa.Array:
    """One bit per element, in whole bytes for each array."""
    counts = np.diff(offsets)
    starts = np.concatenate([[0], np.cumsum(-(-counts // 8))])
    bits = np.zeros(8 * int(starts[-1]), np.bool_)
    if elements.null_count:
        bits[_bit_places(counts, starts)] = elements.is_null().to_numpy(zero_copy_only=False)
    return _sliced(np.packbits(bits, bitorder="little"), starts)


def _bit_places(counts: _Ints, starts: _Ints) -> _Ints:
    """Where the bit of each element is, if the bits of each array begin at byte `starts`."""
    before = np.cumsum(counts) - counts
    places: _Ints = np.arange(int(counts.sum())) + np.repeat(8 * starts[:-1] - before, counts)
    return places


# -- decoding ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Spans:
    """Bytes of several rows: of each those from `starts` to `stops` in `data`, in ascending order."""

    data: _Bytes
    starts: _Ints
    stops: _Ints

    @classmethod
    def of(cls, rows: pa.Array, skip: int) -> _Spans:
        """All bytes of rows that are not null, without the first `skip` of each."""
        offsets, data = _parts(rows)
        spans = cls(data, offsets[:-1], offsets[1:])
        spans.check(skip)
        return cls(data, offsets[:-1] + skip, offsets[1:])

    def check(self, least: int | _Ints) -> None:
        if (self.stops - self.starts < least).any():
            raise ValueError("a row is too short")

    def first(self, size: int) -> _Bytes:
        """The first bytes of each, which has at least as many."""
        found = self.between(self.starts, self.starts + size)
        _, data = _parts(found)
        return data[: size * len(self.starts)].reshape(len(self.starts), size)

    def between(self, starts: _Ints, stops: _Ints) -> pa.Array:
        """The bytes from `starts` to `stops` as `binary`. The boundaries become the offsets of an array."""
        count = len(starts)
        if not count:
            return pa.array([], pa.binary())
        bounds = np.empty(2 * count + 1, np.int32)
        bounds[: 2 * count : 2], bounds[1 : 2 * count : 2], bounds[-1] = starts, stops, stops[-1]
        pieces = pa.Array.from_buffers(
            pa.binary(), 2 * count, [None, pa.py_buffer(bounds), pa.py_buffer(self.data)]
        )
        return pieces.take(pa.array(np.arange(0, 2 * count, 2)))


def _read_struct(rows: _Spans, kind: pa.StructType) -> pa.StructArray:
    fields = [kind.field(i) for i in range(kind.num_fields)]
    widths = [_width(field.type) for field in fields]
    bits = -(-len(fields) // 8)
    size = bits + sum(_END.itemsize if width is None else width for width in widths)
    rows.check(size)
    fixed = rows.first(size)
    nulls = np.unpackbits(fixed[:, :bits], axis=1, count=len(fields), bitorder="little").astype(np.bool_)
    place, start = bits, rows.starts + size
    base, columns = start, []
    for i, (field, width) in enumerate(zip(fields, widths, strict=True)):
        missing = nulls[:, i] if nulls[:, i].any() else None
        if width is not None:
            columns.append(_fixed_column(fixed[:, place : place + width], field.type, missing))
            place += width
        else:
            stop = base + _numbers(fixed[:, place : place + _END.itemsize])
            _check_ends(start, stop, rows.stops)
            columns.append(_variable_column(rows.between(start, stop), field.type, missing))
            place, start = place + _END.itemsize, stop
    if (start != rows.stops).any():
        raise ValueError("a row is too long")
    if not fields:
        return pa.array([{}] * len(fixed), kind)
    return pa.StructArray.from_arrays(columns, fields=fields)


def _check_ends(starts: _Ints, stops: _Ints, limits: _Ints) -> None:
    if (stops < starts).any() or (stops > limits).any():
        raise ValueError("a field ends outside its row")


def _numbers(raw: _Bytes) -> _Ints:
    return np.ascontiguousarray(raw).view(_END).ravel().astype(np.int64)


def _fixed_column(raw: _Bytes, kind: pa.DataType, missing: _Bools | None) -> pa.Array:
    if pa.types.is_null(kind):
        return pa.nulls(len(raw))
    validity = None if missing is None else _bitmap(~missing)
    if pa.types.is_boolean(kind):
        if (raw > 1).any():
            raise ValueError("a boolean is neither 0 nor 1")
        data = _bitmap(raw[:, 0].astype(np.bool_))
    else:
        data = pa.py_buffer(np.ascontiguousarray(raw))
    return pa.Array.from_buffers(kind, len(raw), [validity, data])


def _variable_column(packed: pa.Array, kind: pa.DataType, missing: _Bools | None) -> pa.Array:
    if missing is not None:
        _, offsets, data = packed.buffers()
        packed = pa.Array.from_buffers(pa.binary(), len(packed), [_bitmap(~missing), offsets, data])
    if pa.types.is_struct(kind):
        return where_present(packed, lambda present: _read_struct(_Spans.of(present, 0), kind))
    if pa.types.is_nested(kind):
        return where_present(packed, lambda present: _read_arrays(_Spans.of(present, 0), kind))
    try:
        return packed.cast(kind)
    except pa.ArrowInvalid:
        raise ValueError("a string is not valid UTF-8") from None


def _read_arrays(rows: _Spans, kind: pa.DataType) -> pa.Array:
    element = pa.struct([kind.key_field, kind.item_field]) if pa.types.is_map(kind) else kind.value_type
    rows.check(4)
    counts = _numbers(rows.first(4))
    width, flags = _width(element), rows.starts + 4
    first = flags + -(-counts // 8)
    last = first + counts * (_END.itemsize if width is None else width)
    _check_ends(first, last, rows.stops)
    missing = _missing(rows.between(flags, first), counts)
    _, values = _parts(rows.between(first, last))
    if width is not None:
        if (last != rows.stops).any():
            raise ValueError("an array is too long")
        total = int(counts.sum())
        elements = _fixed_column(values[: total * width].reshape(total, width), element, missing)
    else:
        elements = _variable_elements(rows, last, values, counts, element, missing)
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    if pa.types.is_map(kind):
        return pa.MapArray.from_arrays(offsets, elements.field(0), elements.field(1), type=kind)
    return pa.ListArray.from_arrays(offsets, elements, type=kind)


def _variable_elements(
    rows: _Spans, base: _Ints, ends: _Bytes, counts: _Ints, kind: pa.DataType, missing: _Bools | None
) -> pa.Array:
    """The elements whose bytes of each array begin at `base`, and end at `ends` after it."""
    stops = np.repeat(base, counts) + ends[: int(counts.sum()) * _END.itemsize].view(_END).astype(np.int64)
    starts = np.concatenate([[0], stops[:-1]])[: len(stops)]
    firsts = (np.cumsum(counts) - counts)[counts > 0]
    starts[firsts] = base[counts > 0]
    _check_ends(starts, stops, np.repeat(rows.stops, counts))
    finals = np.where(counts > 0, stops[np.cumsum(counts) - 1] if len(stops) else 0, base)
    if (finals != rows.stops).any():
        raise ValueError("an array is too long")
    return _variable_column(rows.between(starts, stops), kind, missing)


def _missing(packed: pa.Array, counts: _Ints) -> _Bools | None:
    """Which elements are null, of arrays with these null bits; None if none is."""
    offsets, data = _parts(packed)
    data = data[: offsets[-1]]
    if not data.any():
        return None
    bits = np.unpackbits(data, bitorder="little").astype(np.bool_)
    return bits[_bit_places(counts, offsets)]


# -- Arrow's buffers -----------------------------------------------------------------------------------------


def _parts(packed: pa.Array) -> tuple[_Ints, _Bytes]:
    """The offsets and the data of a `binary` array."""
    _, offsets, data = packed.buffers()
    if offsets is None or not len(packed):
        return np.zeros(len(packed) + 1, np.int64), np.zeros(0, np.uint8)
    found = np.frombuffer(offsets, np.int32, len(packed) + 1, 4 * packed.offset).astype(np.int64)
    return found, np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)


def _lengths(packed: pa.Array) -> _Ints:
    """Of `binary`; 0 for null."""
    lengths = pc.binary_length(packed)
    found: npt.NDArray[np.int32] = (lengths.fill_null(0) if lengths.null_count else lengths).to_numpy()
    return found.astype(np.int64)


def _packed(rows: _Bytes) -> pa.Array:
    """Each row as `binary`."""
    if not rows.shape[1]:
        return pa.array([b""] * len(rows), pa.binary())
    kind = pa.binary(rows.shape[1])
    return pa.Array.from_buffers(kind, len(rows), [None, pa.py_buffer(np.ascontiguousarray(rows))]).cast(
        pa.binary()
    )


def _sliced(data: _Bytes, offsets: _Ints) -> pa.Array:
    """`data` as `binary` with these offsets."""
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def _joined(pieces: Sequence[pa.Array | pa.Scalar], rows: int) -> pa.Array:
    """The pieces of each row, one after the other. A null piece has no bytes."""
    if not rows:
        return pa.array([], pa.binary())
    return pc.binary_join_element_wise(*pieces, b"", null_handling="replace", null_replacement="")


def _bitmap(flags: _Bools) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))
