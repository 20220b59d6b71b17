"""Decodes keys to their columns. The inverse of `key_codec.encode`, for exactly the bytes that it gives.

A cursor holds the position in every key. Reading a column moves it. Each step is one numpy or Arrow call over
all keys; only the elements of arrays are read in turn, the first of all keys, then the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.errors import SchemaMismatch
from keyfold.statestore.schema.key_codec import (
    END,
    ESCAPE,
    ESCAPES,
    LONG_DIGITS,
    NANOS_PER_DAY,
    NANS,
    NULL,
    VALUE,
    is_integral,
)

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

#: The positions of the zero bytes of this many keys are in memory at a time.
_PIECE_ROWS: Final = 1 << 16
_INT32_MAX: Final = (1 << 31) - 1


class Misfit(NamedTuple):
    """A key that is not an encoding of the columns: its row, the column's path, and what was expected."""

    row: int
    column: str
    expected: str


class _Refused(Exception):
    def __init__(self, row: int, column: str, expected: str) -> None:
        super().__init__(column)
        self.misfit = Misfit(row, column, expected)


def decode(keys: pa.Array, schema: pa.Schema) -> pa.Table:
    """The columns of `schema` from binary keys without nulls.

    Raises:
        SchemaMismatch: A key is not what `encode` gives for any values; `position` names the record.
    """
    with suppress(_Refused):
        return _decoded(keys, schema)
    found = first_misfit(keys, schema)
    assert found is not None
    row, column, expected = found
    raise SchemaMismatch(
        "The key of a record does not have the changelog's key columns.",
        position=f"record {row} of the batch, column {column!r}",
        expected=expected,
        found=f"other bytes, {len(keys[row].as_py())} in all",
        remedy="`keyfold verify` lists partition and offset of every such record; append the keys again, "
        "encoded with `columns.encode_key`",
    )


def first_misfit(keys: pa.Array, schema: pa.Schema) -> Misfit | None:
    """The first key that `decode` refuses, None if it refuses none."""
    found: Misfit | None = None
    while True:
        try:
            _decoded(keys, schema)
        except _Refused as refused:
            # A key before it may be refused for a later column.
            found = refused.misfit
            keys = keys[: found.row]
        else:
            return found


def _decoded(keys: pa.Array, schema: pa.Schema) -> pa.Table:
    pieces = [_piece(keys, start, schema) for start in range(0, len(keys), _PIECE_ROWS)]
    return pa.Table.from_batches(pieces, schema)


def _piece(keys: pa.Array, start: int, schema: pa.Schema) -> pa.RecordBatch:
    cursor = _Cursor.of(keys.slice(start, _PIECE_ROWS), start)
    columns = []
    for i, field in enumerate(schema):
        last = i == len(schema) - 1
        if last and _is_bytes(field.type):
            column = _text(cursor.rest(), field.type, cursor, field.name)
        else:
            column = _read(field.type, cursor, field.name)
        columns.append(column)
    cursor.refuse(cursor.at != cursor.end, schema.names[-1], "the end of the key after its value")
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class _Cursor:
    """The position in each of some keys.

    Attributes:
        values: The bytes of all keys, as Arrow's buffer.
        data: The same as numbers.
        at, end: For each key the next position in `data`, and the one after its last byte.
        rows: For each key its row, for errors.
        zeros: The positions of all zero bytes, ascending.
    """

    def __init__(
        self, values: pa.Buffer, data: npt.NDArray[np.uint8], at: Ints, end: Ints, rows: Ints, zeros: Ints
    ) -> None:
        self.values = values
        self.data = data
        self.at = at
        self.end = end
        self.rows = rows
        self.zeros = zeros

    @classmethod
    def of(cls, keys: pa.Array, first_row: int) -> _Cursor:
        _, offsets, values = keys.buffers()
        values = pa.py_buffer(b"") if values is None else values
        wide = pa.types.is_large_binary(keys.type)
        ends = np.frombuffer(offsets, np.int64 if wide else np.int32)[keys.offset :][: len(keys) + 1]
        ends = ends.astype(np.int64)
        data = np.frombuffer(values, np.uint8)
        zeros = np.flatnonzero(data[ends[0] : ends[-1]] == END) + ends[0]
        rows = np.arange(first_row, first_row + len(keys))
        return cls(values, data, ends[:-1].copy(), ends[1:], rows, zeros)

    def of_rows(self, chosen: Bools) -> _Cursor:
        """A cursor on some of the keys. It moves by itself."""
        at, end, rows = self.at[chosen], self.end[chosen], self.rows[chosen]
        return _Cursor(self.values, self.data, at, end, rows, self.zeros)

    def refuse(self, wrong: Bools, column: str, expected: str) -> None:
        if wrong.any():
            raise _Refused(int(self.rows[int(np.argmax(wrong))]), column, expected)

    def number(self, width: int, column: str) -> npt.NDArray[Any]:
        """The next `width` bytes of each key as an unsigned big-endian integer."""
        self.refuse(self.end - self.at < width, column, f"{width} more bytes")
        if not len(self.at):
            return np.zeros(0, f"u{width}")
        # An integer for each position in the data, of which the wanted ones are taken.
        every = np.ndarray((len(self.data) - width + 1,), f">u{width}", self.data, strides=(1,))
        numbers: npt.NDArray[Any] = every[self.at].astype(f"u{width}")
        self.at += width
        return numbers

    def until_zero(self, column: str) -> pa.Array:
        """The bytes of each key before the next zero byte, which is passed."""
        found = np.searchsorted(self.zeros, self.at)
        stop = np.append(self.zeros, len(self.data))[found]
        self.refuse(stop >= self.end, column, "a byte 00 at its end")
        return self._to(stop, 1)

    def rest(self) -> pa.Array:
        return self._to(self.end, 0)

    def _to(self, stop: Ints, skipped: int) -> pa.Array:
        """The bytes up to `stop`. Moves `skipped` bytes further."""
        # The bytes between two of them become elements too, so that no byte has to be moved before `take`.
        count = len(stop)
        large = len(self.data) > _INT32_MAX
        offsets = np.empty(2 * count + 1, np.int64 if large else np.int32)
        offsets[0:-1:2], offsets[1::2] = self.at, stop
        offsets[-1] = stop[-1] if count else 0
        self.at = stop + skipped
        buffers = [None, pa.py_buffer(offsets), self.values]
        kind = pa.large_binary() if large else pa.binary()
        alternating = pa.Array.from_buffers(kind, 2 * count, buffers)
        return alternating.take(pa.array(np.arange(0, 2 * count, 2)))


# -- columns -------------------------------------------------------------------------------------------------


def _read(kind: pa.DataType, cursor: _Cursor, name: str) -> pa.Array:
    """The next column of each key: all values, no nulls."""
    if _is_bytes(kind):
        return _text(_unescaped(cursor, name), kind, cursor, name)
    if pa.types.is_struct(kind):
        rows = len(cursor.at)
        children = [_marked(field, cursor, f"{name}.{field.name}") for field in kind]
        return pa.Array.from_buffers(kind, rows, [None], children=children)
    if pa.types.is_list(kind):
        return _list(kind, cursor, f"{name}[]")
    if pa.types.is_decimal(kind):
        return _decimal(kind, cursor, name)
    return _number(kind, cursor, name)


def _number(kind: pa.DataType, cursor: _Cursor, name: str) -> pa.Array:
    if pa.types.is_boolean(kind):
        flags = cursor.number(1, name)
        cursor.refuse(flags > 1, name, "00 or 01")
        return pa.array(flags.astype(np.bool_))
    width = kind.bit_width // 8
    numbers = cursor.number(width, name)
    sign = numbers.dtype.type(1 << (8 * width - 1))
    if is_integral(kind):
        values = (numbers ^ sign).view(f"i{width}")
        if pa.types.is_time64(kind):
            cursor.refuse((values < 0) | (values >= NANOS_PER_DAY), name, "a time within one day")
        return _array(kind, values)
    bits = numbers ^ np.where(numbers & sign, sign, ~numbers.dtype.type(0))
    values = bits.view(f"f{width}")
    cursor.refuse((np.isnan(values) & (bits != NANS[width])) | (bits == sign), name, "the only NaN or zero")
    return _array(kind, values)


def _decimal(kind: pa.Decimal128Type, cursor: _Cursor, name: str) -> pa.Array:
    sign = np.uint64(1 << 63)
    limit = 10**kind.precision
    if kind.precision <= LONG_DIGITS:
        low = cursor.number(8, name) ^ sign
        signed = low.view(np.int64)
        high = (signed >> 63).view(np.uint64)
        wrong = (signed >= limit) | (signed <= -limit)
    else:
        high, low = cursor.number(8, name) ^ sign, cursor.number(8, name)
        wrong = ~_less(_halves(-limit), (high, low)) | ~_less((high, low), _halves(limit))
    cursor.refuse(wrong, name, f"a decimal of at most {kind.precision} digits")
    words = np.empty((len(low), 2), "<u8")
    words[:, 0], words[:, 1] = low, high
    return _array(kind, words)


def _halves(number: int) -> tuple[Any, Any]:
    """A 128-bit integer as two unsigned halves, the higher one first."""
    return np.uint64((number >> 64) & ((1 << 64) - 1)), np.uint64(number & ((1 << 64) - 1))


def _less(a: tuple[Any, Any], b: tuple[Any, Any]) -> Bools:
    """Whether one signed 128-bit integer is less than another one."""
    a_high, b_high = (half[0].view(np.int64) for half in (a, b))
    less: Bools = (a_high < b_high) | ((a_high == b_high) & (a[1] < b[1]))
    return less


def _array(kind: pa.DataType, values: npt.NDArray[Any]) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _unescaped(cursor: _Cursor, name: str) -> pa.Array:
    written = cursor.until_zero(name)
    escaped = pc.match_substring(written, ESCAPE).to_numpy(zero_copy_only=False)
    if not escaped.any():
        return written
    plain = written
    for byte, pair in reversed(ESCAPES):
        plain = pc.replace_substring(plain, pair, byte)
    again = plain
    for byte, pair in ESCAPES:
        again = pc.replace_substring(again, byte, pair)
    wrong = pc.not_equal(again, written).to_numpy(zero_copy_only=False)
    cursor.refuse(wrong, name, "01 only before 01 or 02")
    return plain


def _text(found: pa.Array, kind: pa.DataType, cursor: _Cursor, name: str) -> pa.Array:
    if pa.types.is_binary(kind):
        return found.cast(kind)
    try:
        return found.cast(pa.binary()).cast(kind)
    except pa.ArrowInvalid:
        bad = np.zeros(len(found), np.bool_)
        bad[_first_bad_text(found, kind)] = True
        cursor.refuse(bad, name, "valid UTF-8")
        raise


def _first_bad_text(found: pa.Array, kind: pa.DataType) -> int:
    """Binary search; one of these is known not to be UTF-8."""
    low, high = 0, len(found)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            found[low:middle].cast(pa.binary()).cast(kind)
        except pa.ArrowInvalid:
            high = middle
        else:
            low = middle
    return low


def _marked(field: pa.Field, cursor: _Cursor, name: str) -> pa.Array:
    """The next column, each value after a mark."""
    marks = cursor.number(1, name)
    if field.nullable:
        cursor.refuse((marks != NULL) & (marks != VALUE), name, "the mark 01 or 02")
    else:
        cursor.refuse(marks != VALUE, name, "the mark 02: a value that is not null")
    return _where(marks == VALUE, field.type, cursor, name)


def _where(valid: Bools, kind: pa.DataType, cursor: _Cursor, name: str) -> pa.Array:
    """The next value of the keys that have one, null for the others."""
    if valid.all():
        return _read(kind, cursor, name)
    chosen = cursor.of_rows(valid)
    values = _read(kind, chosen, name)
    cursor.at[valid] = chosen.at
    if not len(values):
        return pa.nulls(len(valid), kind)
    return values.take(pa.array(np.maximum(np.cumsum(valid) - 1, 0), mask=~valid))


def _list(kind: pa.ListType, cursor: _Cursor, name: str) -> pa.Array:
    owners: list[Ints] = [np.zeros(0, np.int64)]
    elements: list[pa.Array] = [pa.array([], kind.value_type)]
    for rows, values in _rounds(kind.value_field, cursor, name):
        owners.append(rows)
        elements.append(values)
    owner = np.concatenate(owners)
    # A stable sort keeps the elements of one array in their order.
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=len(cursor.at))
    ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    values = pa.concat_arrays(elements).take(pa.array(order))
    return pa.Array.from_buffers(kind, len(counts), [None, pa.py_buffer(ends)], children=[values])


def _rounds(field: pa.Field, cursor: _Cursor, name: str) -> Iterator[tuple[Ints, pa.Array]]:
    """The rows that have a further element, and these elements, until no row has one."""
    rows = np.arange(len(cursor.at))
    left = cursor.of_rows(np.ones(len(rows), np.bool_))
    while len(rows):
        marks = left.number(1, name)
        left.refuse(marks > VALUE, name, "the mark 01 or 02, or 00 at the end")
        ended = marks == END
        cursor.at[rows[ended]] = left.at[ended]
        left, rows, marks = left.of_rows(~ended), rows[~ended], marks[~ended]
        if not field.nullable:
            left.refuse(marks != VALUE, name, "the mark 02: a value that is not null")
        if len(rows):
            yield rows, _where(marks == VALUE, field.type, left, name)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))
