"""Log compaction as a pure function: batches of records in, batches of records out. No files, no clock.

A record is **obsolete** if a later record of the same key lies in the same interval between anchors, within
what the offset map covers. `compact` drops obsolete records, and tombstones that are older than their
horizon and have nothing of their key left in front of them. So:

1. The state at every anchor, and at every offset from the map's end on, is the same before and after.
2. Order, offsets, timestamps and headers never change.
3. Two keys are one only if their bytes are equal, whatever their hashes do.
4. Compacting the result again, with nothing dirty and no later horizon, changes nothing.

Batches have the columns of `RECORD_SCHEMA` (others pass through), offsets ascend over all batches, with
gaps or without.
Memory: the map's budget, and that of a few batches. A map serves one going over the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keyfold.checkpoints.compaction.key_index import Hold, KeyHasher, KeyIndex
from keyfold.checkpoints.compaction.offset_map import OffsetMap, Source
from keyfold.checkpoints.compaction.tombstones import ExpiredTombstones, has_value
from keyfold.statestore.keys.buffers import Ints
from keyfold.statestore.keys.group_hash import group_hash
from keyfold.statestore.keys.key_table import KeyTable

__all__ = ["FoldCounts", "OffsetMap", "compact", "compacted_pairs", "gathered", "last_per_key", "last_values"]

#: Smaller neighbouring batches are merged first, up to this many records and bytes, because every call
#: costs.
_SMALL_ROWS: Final = 4096
_SMALL_BYTES: Final = 1 << 20
#: The tombstones' keys get what the map leaves of its budget, but at least this share of it.
_TOMBSTONE_SHARE: Final = 8

Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)


@dataclass
class FoldCounts:
    """What a pass has done so far.

    Attributes:
        dropped_tombstones: the highest offset of those between each two neighbouring anchors, ascending.
        swept_end: no tombstone below is left that could go.
    """

    records_read: int = 0
    records_kept: int = 0
    tombstones_dropped: int = 0
    dropped_tombstones: tuple[int, ...] = ()
    swept_end: int = 0


def compact(
    source: Source,
    offset_map: OffsetMap,
    tombstones_below: int,
    counts: FoldCounts | None = None,
    *,
    swept_end: int = 0,
    hold: Hold = lambda keys: keys,
) -> Iterator[pa.RecordBatch]:
    """The records that stay, in order; a batch of which all records stay is passed on as it is.

    Args:
        source: the log from its start; called twice if there are tombstones to be dropped. The records that
            the map was built of must be in it. Records at and after the map's end pass through unchanged.
        tombstones_below: the horizon of the tombstones below this offset has passed. 0 for none.
        counts: is kept up to date while the result is iterated.
        swept_end: no tombstone below this offset could go, unless by what the map makes obsolete.
        hold: as for `OffsetMap.build`.

    Raises:
        BadRecord: a key is null or not `binary`.
        ValueError: the source does not hold the records of the map; raised at the end, the result is void.
    """
    counts = FoldCounts() if counts is None else counts
    for _, staying in compacted_pairs(
        source, offset_map, tombstones_below, counts, swept_end=swept_end, hold=hold
    ):
        if staying.num_rows:
            yield staying


def compacted_pairs(
    source: Source,
    offset_map: OffsetMap,
    tombstones_below: int,
    counts: FoldCounts,
    *,
    swept_end: int = 0,
    hold: Hold = lambda keys: keys,
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """As `compact`, beside each batch what stays of it, be it nothing.

    Small batches are merged, but never across an empty batch.
    """
    below = min(tombstones_below, offset_map.end_offset)
    above = min(swept_end, offset_map.first_dirty)
    expired = ExpiredTombstones(
        source, above, below, offset_map.cuts, _spare_bytes(offset_map), offset_map.hash_keys, hold
    )
    counts.swept_end = max(above, expired.end)
    cursor = offset_map.cursor()
    for batch in _joined(source()):
        hashes = _Hashes(batch, offset_map.hash_keys)
        rows = expired.without(batch, cursor.kept(batch, hashes), hashes)
        counts.records_read += batch.num_rows
        staying = _select(batch, rows)
        counts.records_kept += staying.num_rows
        counts.tombstones_dropped = expired.dropped
        counts.dropped_tombstones = expired.highest_dropped
        yield batch, staying
    cursor.finish()


def last_values(
    source: Source,
    unique_below: int = 0,
    hash_keys: KeyHasher = group_hash,
    *,
    dirty: Source | None = None,
    deletes: bool = False,
    hold: Hold = lambda keys: keys,
) -> Iterator[pa.RecordBatch]:
    """The last record of every key, unless it is a tombstone, in the order of offsets.

    Args:
        source: all records of the log up to the point whose state is wanted; called twice.
        unique_below: the caller vouches that no two records below this offset have the same key (a clean
            section without anchors inside). Those keys are then only looked up: memory is 16 bytes for
            every distinct key from here on.
        dirty: only those from `unique_below` on, where these can be had for less.
        deletes: last records that are tombstones too.
        hash_keys, hold: as for `OffsetMap.build`.

    Raises:
        As `compact`.
    """
    maps = [OffsetMap.build(dirty or source, unique_below, (), None, hash_keys, hold=hold)]
    while not maps[-1].complete:
        # Positions have run out: what follows gets a map of its own, for which this is the clean section.
        maps.append(OffsetMap.build(dirty or source, maps[-1].end_offset, (), None, hash_keys, hold=hold))
    anything = any(one.distinct_keys for one in maps)
    cursors = [one.cursor() for one in maps]
    del maps
    # Small batches cost where keys are looked up, and nothing else.
    for batch in _joined(source()) if anything else source():
        left = batch
        for cursor in cursors[:-1]:
            left = _select(left, cursor.kept(left, _Hashes(left, hash_keys)))
        rows = cursors[-1].kept(left, _Hashes(left, hash_keys))
        if not deletes and left.column("value").null_count:
            values = has_value(left)
            rows = np.flatnonzero(values) if rows is None else rows[values[rows]]
        staying = _select(left, rows)
        if staying.num_rows:
            yield staying
    for cursor in cursors:
        cursor.finish()


def last_per_key(rows: Rows, hash_keys: KeyHasher = group_hash) -> Rows:
    """The rows that are the last of their key, tombstones too, in order. `rows` needs a column `key`.

    Raises:
        ValueError: there are more rows than can be told apart, 2^32 or few less.
    """
    column = rows.column("key")
    held = KeyTable()
    last = KeyIndex(held, None, hash_keys)
    for keys in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        last.add(keys)
    last.finish()
    if last.end is not None:
        raise ValueError(f"The last rows per key of more than {held.ordinal(last.end)} rows are wanted.")
    if last.distinct == rows.num_rows:
        return rows
    return rows.take(pa.array(held.ordinals(last.positions().astype(np.int64))))


class _Hashes:
    """The hashes of a batch's keys, computed when first asked for."""

    def __init__(self, batch: pa.RecordBatch, hash_keys: KeyHasher) -> None:
        self._batch = batch
        self._hash_keys = hash_keys
        self._hashes: npt.NDArray[np.int64] | None = None

    def __call__(self) -> npt.NDArray[np.int64]:
        if self._hashes is None:
            self._hashes = self._hash_keys(self._batch.column("key"))
        return self._hashes


def _spare_bytes(offset_map: OffsetMap) -> int | None:
    budget = offset_map.budget_bytes
    if budget is None:
        return None
    return max(int(budget * (1 - offset_map.utilisation)), budget // _TOMBSTONE_SHARE)


def gathered(
    batches: Iterable[pa.RecordBatch], rows_max: int, bytes_max: int
) -> Iterator[list[pa.RecordBatch]]:
    """Neighbours in lists of at most `rows_max` rows and `bytes_max` bytes, or of one batch that is larger.
    No list spans an empty batch, which is in none.
    """
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        more_rows, more_bytes = batch.num_rows, batch.nbytes
        full = rows + more_rows > rows_max or size + more_bytes > bytes_max
        if waiting and (full or not more_rows):
            yield waiting
            waiting, rows, size = [], 0, 0
        if more_rows:
            waiting.append(batch)
            rows += more_rows
            size += more_bytes
        if rows >= rows_max or size >= bytes_max:
            # Nothing more fits, so it need not wait until something more comes.
            yield waiting
            waiting, rows, size = [], 0, 0
    if waiting:
        yield waiting


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same records, with small batches put together."""
    for few in gathered(batches, _SMALL_ROWS, _SMALL_BYTES):
        yield few[0] if len(few) == 1 else pa.concat_batches(few)


def _select(batch: pa.RecordBatch, rows: Ints | None) -> pa.RecordBatch:
    """Some rows of a batch; a view where they lie together."""
    if rows is None:
        return batch
    if len(rows) == 0:
        return batch.slice(0, 0)
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return batch.slice(first, len(rows))
    return batch.take(pa.array(rows))
