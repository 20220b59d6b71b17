"""Log compaction over plain Python records, one at a time: what `checkpoints.fold` must agree with."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keyfold.statestore.keys.group_hash import group_hash
from keyfold.statestore.keys.partitioner import xxh64
from keyfold.statestore.segment.block import RECORD_SCHEMA


class Record(NamedTuple):
    offset: int
    key: bytes
    value: bytes | None


def batches(records: Sequence[Record], sizes: Iterable[int] = ()) -> list[pa.RecordBatch]:
    """Records as batches of these sizes, the rest as one. Every batch is a slice of a longer one."""
    result, start = [], 0
    for size in [*sizes, len(records)]:
        part = records[start : start + size]
        if part or size == 0:
            result.append(
                _batch([Record(part[0].offset - 1 if part else 0, b"before", None), *part]).slice(1)
            )
        start += size
    return result


def _batch(records: Sequence[Record]) -> pa.RecordBatch:
    offsets = [r.offset for r in records]
    columns = [offsets, [o * 10 for o in offsets], [r.key for r in records], [r.value for r in records]]
    headers = [[("n", b"%d" % o)] if o % 3 == 0 else None for o in offsets]
    arrays = [pa.array(c, t) for c, t in zip([*columns, headers], RECORD_SCHEMA.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=RECORD_SCHEMA)


def records(found: Iterable[pa.RecordBatch]) -> list[Record]:
    """The records of batches as `batches` makes them; checks that all their columns are untouched."""
    result = []
    for batch in found:
        batch.validate(full=True)
        columns = [batch.column(name).to_pylist() for name in ("offset", "key", "value")]
        part = [Record(*row) for row in zip(*columns, strict=True)]
        assert batch.equals(_batch(part))
        result += part
    return result


def map_end(dirty: Sequence[Record], anchors: Sequence[int], capacity: int | None, dirty_end: int) -> int:
    """Where a map with room for `capacity` keys ends."""
    seen: set[tuple[bytes, int]] = set()
    for r in dirty:
        seen.add((r.key, bisect_right(anchors, r.offset)))
        if capacity is not None and len(seen) > max(capacity, 1):
            return r.offset
    return dirty_end


def compacted(
    log: Sequence[Record], first_dirty: int, end: int, anchors: Sequence[int], tombstones_below: int
) -> tuple[list[Record], list[Record]]:
    """The records that stay and the tombstones that go because of their age, by the rule's own words."""
    anchors = sorted(anchors)
    covered = {
        (r.key, bisect_right(anchors, r.offset)): r.offset for r in log if first_dirty <= r.offset < end
    }
    horizon = min(tombstones_below, end)
    kept: list[Record] = []
    expired: list[Record] = []
    kept_keys: set[bytes] = set()
    for r in log:
        last = covered.get((r.key, bisect_right(anchors, r.offset)), -1)
        if r.offset < end and last > r.offset:
            continue
        if r.value is None and r.offset < horizon and r.key not in kept_keys:
            expired.append(r)
            continue
        kept.append(r)
        kept_keys.add(r.key)
    return kept, expired


def folded(log: Iterable[Record], end: int | None = None) -> dict[bytes, bytes]:
    """The state of the records below `end`."""
    state: dict[bytes, bytes] = {}
    for r in log:
        if end is not None and r.offset >= end:
            break
        if r.value is None:
            state.pop(r.key, None)
        else:
            state[r.key] = r.value
    return state


def same_hash(keys: pa.Array) -> npt.NDArray[np.int64]:
    """The worst hash: every key collides with every other."""
    return np.zeros(len(keys), np.int64)


def two_bits(keys: pa.Array) -> npt.NDArray[np.int64]:
    """Four hashes only."""
    return xxh64(keys) >> 62 << 62


HASHES: Final[list[Callable[[pa.Array], npt.NDArray[np.int64]]]] = [group_hash, xxh64, two_bits, same_hash]
