"""Typed values as Python objects. Python has no dates outside the years 1 to 9999, and no nanoseconds."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.errors import BadRecord

#: Nanoseconds per microsecond: the smallest unit of `datetime.time`.
_MICROSECOND: Final = 1000


def to_python(values: pa.Array | pa.ChunkedArray, name: str) -> list[Any]:
    """The values as `to_pylist` gives them.

    Args:
        name: The column, for the message; of structs with the name "" the field.

    Raises:
        BadRecord: A date or a time has no equivalent in Python.
    """
    chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    try:
        if _has_nanoseconds(values.type) and any(map(_cuts_nanoseconds, chunks)):
            raise ValueError
        found: list[Any] = values.to_pylist()
        return found
    except (OverflowError, ValueError):
        pass
    raise no_python_value(*_culprit(values, name))


def no_python_value(name: str, kind: pa.DataType) -> BadRecord:
    """The error for a value of a column."""
    return BadRecord(
        f"Python cannot represent a value of column {name!r}.",
        expected="a date in the years 1 to 9999, a time in whole microseconds",
        found=f"another value of type {kind}",
        remedy="read it as Arrow: get_all with an Arrow array, to_arrow, or keyfold.dataset",
    )  # fmt: skip


def _culprit(values: pa.Array | pa.ChunkedArray, name: str) -> tuple[str, pa.DataType]:
    """The column that cannot be converted, and its type."""
    if name == "" and pa.types.is_struct(values.type):
        for i, field in enumerate(values.type):
            try:
                to_python(pc.struct_field(values, [i]), field.name)
            except BadRecord:
                return field.name, field.type
    return name, values.type


@lru_cache(maxsize=64)
def _has_nanoseconds(kind: pa.DataType) -> bool:
    return bool(pa.types.is_time64(kind)) or any(
        _has_nanoseconds(kind.field(i).type) for i in range(kind.num_fields)
    )


def _cuts_nanoseconds(values: pa.Array) -> bool:
    """Whether `to_pylist`, which cuts nanoseconds off, would change a time."""
    kind = values.type
    if pa.types.is_time64(kind):
        numbers = values.drop_null().cast(pa.int64()).to_numpy()
        return bool((numbers % _MICROSECOND).any())
    if not _has_nanoseconds(kind):
        return False
    if pa.types.is_map(kind):
        present = values.drop_null()
        first, last = (present.offsets[0].as_py(), present.offsets[-1].as_py()) if len(present) else (0, 0)
        parts = [part.slice(first, last - first) for part in (present.keys, present.items)]
    else:
        flat = values.flatten()
        parts = flat if pa.types.is_struct(kind) else [flat]
    return any(map(_cuts_nanoseconds, parts))
