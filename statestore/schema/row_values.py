"""One row at a time: the same bytes as `rows`, from and to Python values, without the cost of Arrow's arrays.

The usual types are converted here, the others by `rows`. Python values are those of Arrow's `as_py`.
"""

from __future__ import annotations

import datetime as dt
import math
import struct
from collections.abc import Callable, Mapping, Set
from typing import Any, Final

import pyarrow as pa

from keyfold.statestore.projection import check_nulls
from keyfold.statestore.schema import rows
from keyfold.statestore.schema.python_values import no_python_value, to_python

_UTC_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_EPOCH: Final = _UTC_EPOCH.replace(tzinfo=None)
_EPOCH_DAY: Final = dt.date(1970, 1, 1).toordinal()
_MICROSECOND: Final = dt.timedelta(microseconds=1)

#: Type of the Python value, its struct format, and how the number in the row becomes the value and back.
_Fixed = tuple[type, str, Callable[[Any], Any] | None, Callable[[Any], Any] | None]


class _Other(Exception):
    """A value of a type that is left to Arrow."""


class RowValues:
    """Converts the rows of one type of values.

    Args:
        kind: The type of the values.
    """

    def __init__(self, kind: pa.StructType) -> None:
        self._kind = kind
        self._plan = _plan(kind)

    def __reduce__(self) -> tuple[Any, ...]:
        return RowValues, (self._kind,)

    def decode(self, data: bytes) -> dict[str, Any]:
        """The values in a row.

        Raises:
            ValueError: The bytes are not a row of this type.
            BadRecord: A date or a time has no equivalent in Python.
        """
        if self._plan is not None:
            return self._plan.decode(data)
        found: dict[str, Any] = to_python(rows.decode(pa.array([data], pa.binary()), self._kind), "")[0]
        return found

    def encode(self, value: Mapping[str, Any], schema_id: int) -> bytes:
        """The row with these values; a field that is left out is null.

        Raises:
            pa.ArrowInvalid, pa.ArrowTypeError, OverflowError: A value does not have its field's type.
        """
        if self._plan is not None:
            try:
                return self._plan.encode(value, schema_id)
            except (_Other, struct.error):
                pass
        given = pa.array([dict(value)], self._kind)
        if not _is_kept(value, given[0].as_py()):
            raise pa.ArrowInvalid("a value would change")
        check_nulls(given)
        packed: bytes = rows.encode(given, schema_id)[0].as_py()
        return packed


def _is_kept(value: Any, kept: Any) -> bool:
    """Whether Arrow has kept a value. It cuts fractions off, takes a time without a zone as UTC and text for
    its letters, leaves out fields that it does not know, and so on. A float is the nearest one.
    """
    if value is None or kept is None:
        return value is kept
    if isinstance(kept, dict):
        known = isinstance(value, Mapping) and value.keys() <= kept.keys()
        return known and all(_is_kept(value.get(name), kept[name]) for name in kept)
    if isinstance(kept, list | tuple):
        if isinstance(value, str | bytes | bytearray | Set):
            return False
        items = list(value.items() if isinstance(value, Mapping) else value)
        return len(items) == len(kept) and all(map(_is_kept, items, kept))
    if isinstance(kept, float) and isinstance(value, float):
        return math.isfinite(kept) or not math.isfinite(value)
    return isinstance(value, bool) == isinstance(kept, bool) and bool(value == kept)


def _plan(kind: pa.StructType) -> _Plan | None:
    fields = [kind.field(i) for i in range(kind.num_fields)]
    known = [_FIXED.get(field.type) for field in fields]
    if any(k is None and field.type not in _VARIABLE for k, field in zip(known, fields, strict=True)):
        return None
    return _Plan([f.name for f in fields], [f.type for f in fields], known)


class _Plan:
    """How a row of a flat struct is read and written."""

    def __init__(self, names: list[str], kinds: list[pa.DataType], known: list[_Fixed | None]) -> None:
        self._names = names
        self._fields = list(zip(names, kinds, known, strict=True))
        self._null_bytes = -(-len(names) // 8)
        formats = "".join("I" if k is None else k[1] for k in known)
        self._fixed = struct.Struct(f"<H{self._null_bytes}s{formats}")
        self._no_nulls = bytes(self._null_bytes)
        # What is left to do with the numbers of the fixed part, by their place in it.
        self._variable = [(i, pa.types.is_string(kind)) for i, kind in enumerate(kinds) if known[i] is None]
        self._converted = [(i, k[2]) for i, k in enumerate(known) if k is not None and k[2] is not None]

    def decode(self, data: bytes) -> dict[str, Any]:
        base = start = self._fixed.size
        if len(data) < base:
            raise ValueError("a row is too short")
        _, bits, *values = self._fixed.unpack_from(data)
        for i, is_text in self._variable:
            stop = base + values[i]
            if not start <= stop <= len(data):
                raise ValueError("a field ends outside its row")
            values[i] = data[start:stop].decode() if is_text else data[start:stop]
            start = stop
        if start != len(data):
            raise ValueError("a row is too long")
        if bits != self._no_nulls:
            nulls = int.from_bytes(bits, "little")
            values = [None if nulls >> i & 1 else value for i, value in enumerate(values)]
        for i, convert in self._converted:
            if values[i] is not None:
                try:
                    values[i] = convert(values[i])
                except (OverflowError, ValueError):
                    raise no_python_value(self._names[i], self._fields[i][1]) from None
        return dict(zip(self._names, values, strict=True))

    def encode(self, value: Mapping[str, Any], schema_id: int) -> bytes:
        nulls = end = 0
        numbers: list[Any] = []
        variable: list[bytes] = []
        for i, (name, kind, known) in enumerate(self._fields):
            part: Any = value.get(name)
            if part is None:
                nulls |= 1 << i
                numbers.append(end if known is None else 0)
            elif known is None:
                data = _bytes(part, kind)
                end += len(data)
                numbers.append(end)
                variable.append(data)
            elif type(part) is not known[0]:
                raise _Other
            else:
                numbers.append(part if known[3] is None else known[3](part))
        head = self._fixed.pack(schema_id, nulls.to_bytes(self._null_bytes, "little"), *numbers)
        return b"".join([head, *variable])


def _bytes(value: Any, kind: pa.DataType) -> bytes:
    if pa.types.is_string(kind):
        if type(value) is not str:
            raise _Other
        return value.encode()
    if type(value) is not bytes:
        raise _Other
    return value


def _microseconds(value: dt.datetime) -> int:
    if value.tzinfo is None:
        return (value - _EPOCH) // _MICROSECOND
    return (value - _UTC_EPOCH) // _MICROSECOND


def _aware(value: dt.datetime) -> int:
    if value.tzinfo is None:
        raise _Other
    return _microseconds(value)


def _naive(value: dt.datetime) -> int:
    if value.tzinfo is not None:
        raise _Other
    return _microseconds(value)


_VARIABLE: Final = (pa.string(), pa.binary())
_FIXED: Final[dict[pa.DataType, _Fixed]] = {
    pa.bool_(): (bool, "?", None, None),
    pa.int8(): (int, "b", None, None),
    pa.int16(): (int, "h", None, None),
    pa.int32(): (int, "i", None, None),
    pa.int64(): (int, "q", None, None),
    pa.float64(): (float, "d", None, None),
    pa.date32(): (
        dt.date,
        "i",
        lambda days: dt.date.fromordinal(days + _EPOCH_DAY),
        lambda day: day.toordinal() - _EPOCH_DAY,
    ),
    pa.timestamp("us", "UTC"): (dt.datetime, "q", lambda us: _UTC_EPOCH + dt.timedelta(0, 0, us), _aware),
    pa.timestamp("us"): (dt.datetime, "q", lambda us: _EPOCH + dt.timedelta(0, 0, us), _naive),
}
