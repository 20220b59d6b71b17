"""Record timestamps: in ms since 1970-01-01 UTC, never negative, as in Kafka."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

#: In ms. Later timestamps do not fit into Spark's timestamps, which are in microseconds.
_TIMESTAMP_MAX: Final = ((1 << 63) - 1) // 1000
_UNITS_PER_MS: Final = {"ms": 1, "us": 1000, "ns": 1_000_000}

#: The parts of the error: what, expected, remedy.
WRONG_TIMESTAMP: Final = (
    "The timestamp of a record is out of range.",
    f"0 to {_TIMESTAMP_MAX} ms since 1970-01-01 UTC, or null",
    "correct its unit or its value, or leave it null to use the time of writing",
)


def timestamps_ms(column: pa.Array, now_ms: int) -> tuple[pa.Array, int]:
    """The timestamps of records, with `now_ms` for missing ones, and the first row whose timestamp is out of
    range (-1 if all are in range).

    Args:
        column: Any timestamp type, or int64 in ms. A missing timestamp is null or -1 ms, Kafka's
            "no timestamp".
    """
    unit = column.type.unit if pa.types.is_timestamp(column.type) else "ms"
    values = column.cast(pa.int64()).fill_null(0).to_numpy()
    none = column.is_null().to_numpy(zero_copy_only=False)
    if unit == "s":
        wrong = (values < 0) | (values > _TIMESTAMP_MAX // 1000)
    else:
        none |= values == -_UNITS_PER_MS[unit]
        wrong = (values < 0) | (values // _UNITS_PER_MS[unit] > _TIMESTAMP_MAX)
    wrong &= ~none
    if wrong.any():
        return column, int(wrong.argmax())
    ms = values * 1000 if unit == "s" else values // _UNITS_PER_MS[unit]
    return pa.array(np.where(none, now_ms, ms), pa.timestamp("ms")), -1
