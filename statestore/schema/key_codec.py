"""Encodes the columns of typed keys to bytes whose order is the order of the columns.

`docs/encoding.md` defines the bytes. Both directions are vectorised: each step is one numpy or Arrow call
over a column. `key_decoder` is the inverse, `key_values` encodes single keys.

A column without null becomes a sequence of parts, and the key is the parts of all its columns, joined row by
row. A part is an array of unsigned integers, written big-endian, or a binary array. A null has no bytes
except its mark: nulls are left out of what is encoded, and put back as empty parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.errors import BadRecord

Numbers: TypeAlias = npt.NDArray[Any]
Part: TypeAlias = "Numbers | pa.Array"

#: A mark stands before each field of a struct and each element of an array.
NULL: Final = 1
VALUE: Final = 2
#: Ends an array, and a string or binary that is not the last column.
END: Final = 0
ESCAPE: Final = b"\x01"
#: The bytes to replace and those that replace them, in this order.
ESCAPES: Final = ((b"\x01", b"\x01\x02"), (b"\x00", b"\x01\x01"))

#: Decimals of at most this many digits are 8 bytes, others 16.
LONG_DIGITS: Final = 18
NANOS_PER_DAY: Final = 86_400 * 10**9

#: The highest bit of an integer, by its width in bytes.
_SIGNS: Final = {width: np.array(1 << (8 * width - 1), f"u{width}")[()] for width in (1, 2, 4, 8)}
#: The only NaN, as an unsigned integer.
NANS: Final = {4: np.uint32(0x7FC00000), 8: np.uint64(0x7FF8000000000000)}


def encode(columns: Sequence[pa.Array]) -> pa.Array:
    """The keys as one binary array.

    Args:
        columns: The key columns in their order, of the Arrow types that Spark gives them, without nulls.

    Raises:
        BadRecord: A column has a null or a type that cannot be in a key, or the keys exceed 2 GiB.
    """
    rows = len(columns[0])
    parts: list[Part] = []
    for i, column in enumerate(columns):
        if column.null_count:
            raise BadRecord(
                "A key column is null.", position=f"key column {i}", expected="no nulls",
                found=f"{column.null_count} nulls of {rows}", remedy="filter out these rows",
            )  # fmt: skip
        last = i == len(columns) - 1
        parts += [_plain_bytes(column)] if last and _is_bytes(column.type) else _parts(column)
    try:
        return _joined(parts, rows).cast(pa.binary())
    except (pa.ArrowInvalid, pa.ArrowCapacityError):
        raise BadRecord(
            "The keys of one batch are too large.", expected="less than 2 GiB", found="more",
            remedy="write smaller batches: see spark.sql.execution.arrow.maxRecordsPerBatch",
        ) from None  # fmt: skip


# -- columns to parts ----------------------------------------------------------------------------------------


def _parts(column: pa.Array) -> list[Part]:
    kind = column.type
    if _is_bytes(kind):
        return [_escaped(_plain_bytes(column)), _constant(END, len(column))]
    if pa.types.is_struct(kind):
        return [part for field in column.flatten() for part in _marked(field)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        elements = column.flatten()
        ends = np.cumsum(np.concatenate(([0], pc.list_value_length(column).to_numpy())))
        joined = _joined(_marked(elements), len(elements)).cast(pa.large_binary())
        lists = pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), joined)
        return [pc.binary_join(lists, pa.scalar(b"", pa.large_binary())), _constant(END, len(column))]
    if pa.types.is_decimal(kind):
        return _decimal(column)
    return [_number(column)]


def _marked(column: pa.Array) -> list[Part]:
    """A column that may have nulls, with a mark before each of its values."""
    if not column.null_count:
        return [_constant(VALUE, len(column)), *_parts(column)]
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    values = column.drop_null()
    encoded = _joined(_parts(values), len(values))
    # The last place is an empty part, for the nulls.
    ended = pa.concat_arrays([encoded, pa.array([b""], encoded.type)])
    places = np.where(valid, np.cumsum(valid) - 1, len(values))
    return [np.where(valid, VALUE, NULL).astype(np.uint8), ended.take(pa.array(places))]


def _constant(byte: int, rows: int) -> Numbers:
    return np.full(rows, byte, np.uint8)


def _number(column: pa.Array) -> Numbers:
    kind = column.type
    if pa.types.is_boolean(kind):
        return np.asarray(column.cast(pa.uint8()).to_numpy())
    if pa.types.is_float32(kind) or pa.types.is_float64(kind):
        return _float(column)
    if is_integral(kind):
        width = kind.bit_width // 8
        flipped: Numbers = _raw(column, f"u{width}") ^ _SIGNS[width]
        return flipped
    raise BadRecord(
        "The type of a key column is not supported.", expected="a type that docs/encoding.md lists",
        found=str(kind), remedy="cast the column",
    )  # fmt: skip


def _float(column: pa.Array) -> Numbers:
    width = column.type.bit_width // 8
    with np.errstate(invalid="ignore"):  # a signalling NaN
        numbers = _raw(column, f"f{width}") + 0.0  # adding zero removes the sign of a negative zero
    bits = numbers.view(f"u{width}")
    bits[np.isnan(numbers)] = NANS[width]
    negative = (bits.view(f"i{width}") >> (8 * width - 1)).view(f"u{width}")
    flipped: Numbers = bits ^ (negative | _SIGNS[width])
    return flipped


def _decimal(column: pa.Array) -> list[Part]:
    words = _raw(column, "<u8", 2)
    sign = _SIGNS[8]
    low, high = words[0::2], words[1::2]
    return [low ^ sign] if column.type.precision <= LONG_DIGITS else [high ^ sign, low]


def _raw(column: pa.Array, dtype: str, per_row: int = 1) -> Numbers:
    """The values of a fixed-width column without nulls, as they are in its buffer."""
    if not len(column):
        return np.zeros(0, dtype)
    size = np.dtype(dtype).itemsize * per_row
    return np.frombuffer(column.buffers()[1], dtype, len(column) * per_row, column.offset * size)


def _plain_bytes(column: pa.Array) -> pa.Array:
    large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    return column.cast(pa.large_binary() if large else pa.binary())


def _escaped(column: pa.Array) -> pa.Array:
    data = _data(column)
    for byte, written in ESCAPES:
        if (data == byte[0]).any():
            column = pc.replace_substring(column, byte, written)
    return column


def _data(column: pa.Array) -> npt.NDArray[np.uint8]:
    """All bytes of a binary column."""
    _, offsets, data = column.buffers()
    if not len(column) or data is None:
        return np.zeros(0, np.uint8)
    wide = pa.types.is_large_binary(column.type)
    ends = np.frombuffer(offsets, np.int64 if wide else np.int32)[column.offset :]
    return np.frombuffer(data, np.uint8)[ends[0] : ends[len(column)]]


def _is_bytes(kind: pa.DataType) -> bool:
    return any(test(kind) for test in _BYTES)


_BYTES: Final = (
    pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary,
)  # fmt: skip


def is_integral(kind: pa.DataType) -> bool:
    """Whether the values are signed integers of the type's width."""
    is_timestamp = pa.types.is_timestamp(kind) and kind.unit == "us"
    return is_timestamp or pa.types.is_signed_integer(kind) or kind in _TIMES


_TIMES: Final = (pa.date32(), pa.duration("us"), pa.time64("ns"))


# -- parts to keys -------------------------------------------------------------------------------------------


def _joined(parts: Sequence[Part], rows: int) -> pa.Array:
    """The parts of each row, one after the other."""
    groups: list[pa.Array] = []
    fixed: list[Numbers] = []
    for part in [*parts, None]:
        if isinstance(part, np.ndarray):
            fixed.append(part)
            continue
        if fixed:
            groups.append(_packed(fixed, rows))
            fixed = []
        if part is not None:
            groups.append(part)
    if not groups:
        return pa.array([b""] * rows, pa.binary())
    if len(groups) == 1:
        return groups[0]
    if any(pa.types.is_large_binary(group.type) for group in groups):
        groups = [group.cast(pa.large_binary()) for group in groups]
    return pc.binary_join_element_wise(*groups, pa.scalar(b"", groups[0].type))


def _packed(parts: Sequence[Numbers], rows: int) -> pa.Array:
    layout = np.dtype([(str(i), part.dtype.newbyteorder(">")) for i, part in enumerate(parts)])
    packed = np.empty(rows, layout)
    for i, part in enumerate(parts):
        packed[str(i)] = part
    width = layout.itemsize
    return pa.Array.from_buffers(pa.binary(width), rows, [None, pa.py_buffer(packed)]).cast(pa.binary())
