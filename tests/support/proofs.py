"""What `PartitionState` promises, proved by folding the raw records beside all that was committed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from keyfold import Changelog

#: Key, and value or None.
Record = tuple[bytes, bytes | None]


def prove(log: Changelog, number: int, committed: Sequence[Record]) -> list[int]:
    """Raises AssertionError where a partition is not what the manifest promises; returns the offsets that are
    there.

    Args:
        committed: every record that was ever committed to the partition and not rolled back, by its offset.
    """
    p = log.state.partitions[number]
    rows = [r for b in log.read(number) for r in b.to_pylist()]
    offsets = [r["offset"] for r in rows]
    # The frame.
    assert p.end == len(committed)
    assert 0 <= p.start <= p.unique_end <= p.clean_end <= p.end
    assert list(p.splits) == sorted(set(p.splits))
    assert all(p.start < s < p.clean_end for s in p.splits)
    assert p.swept_end <= p.unique_end
    assert sum(s.records for s in p.segments) == len(rows)
    # Every record is one that was committed, in its place.
    assert offsets == sorted(set(offsets))
    assert all(p.start <= o < p.end for o in offsets)
    assert [(r["key"], r["value"]) for r in rows] == [committed[o] for o in offsets]
    # Dense.
    assert [o for o in offsets if o >= p.clean_end] == list(range(p.clean_end, p.end))
    # Exact: at the clean end and at every split; from the clean end on it follows from the above.
    for position in (*p.splits, p.clean_end, p.end):
        there = _folded([committed[o] for o in offsets if o < position])
        assert there == _folded(committed[p.start : position]), (position, p)
    # Unique.
    seen = {(bisect_right(p.splits, o), committed[o][0]): o for o in reversed(offsets) if o < p.unique_end}
    assert len(seen) == sum(o < p.unique_end for o in offsets), (p, offsets)
    # One lost tombstone is known in each interval, at most.
    between = [bisect_right(p.splits, o) for o in p.dropped_tombstones]
    assert all(a < b for a, b in pairwise(between))
    return offsets


def _folded(records: Sequence[Record]) -> dict[bytes, bytes]:
    last = dict(records)
    return {key: value for key, value in last.items() if value is not None}
