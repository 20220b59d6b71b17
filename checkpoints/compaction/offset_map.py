"""Which records of the dirty section are the last of their key, and which older ones they make obsolete.

Anchors cut a partition's offsets into intervals: the state must stay exact at every anchor, so a record is
obsolete only if a later record of its key lies in the same interval. Below the first dirty offset, keys are
unique in every interval. Of the intervals that the map covers, only the first can reach down into the clean
section; what the others decide concerns dirty records alone and is settled when the map is built. So only
the first interval's keys are kept for looking up, and of the others no more than the numbers of the records
that stay.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keyfold.checkpoints.compaction.key_index import BYTES_PER_KEY, Hold, KeyHasher, KeyIndex
from keyfold.statestore.keys.buffers import Ints
from keyfold.statestore.keys.group_hash import group_hash
from keyfold.statestore.keys.key_table import KeyTable

#: Gives the same batches each time it is called.
Source: TypeAlias = Callable[[], Iterable[pa.RecordBatch]]
#: Numbers of dirty records, the first being 0.
Numbers: TypeAlias = npt.NDArray[np.uint32]


def offsets_of(batch: pa.RecordBatch) -> Ints:
    """The offsets of a batch's records, without a copy."""
    offsets: Ints = batch.column("offset").to_numpy()
    return offsets


class OffsetMap:
    """The keys of the records in [first_dirty, end_offset), each with its last record per interval.

    Attributes:
        first_dirty: where it begins.
        end_offset: where it ends: the dirty section's end, or the offset of the first record for whose key
            there was no room. The first record always has room.
        complete: whether it reaches the dirty section's end.
        cuts: the anchors it was made with, ascending.
        records: how many records it covers.
        distinct_keys: how many of them are the last of their key in their interval.
        budget_bytes: what it was allowed, None for no limit.
        hash_keys: what keys must be hashed with to be looked up in it.
    """

    def __init__(
        self, first_dirty: int, end_offset: int, cuts: Sequence[int], head: KeyIndex, kept: Numbers,
        records: int, budget_bytes: int | None, hash_keys: KeyHasher, *, complete: bool,
    ) -> None:  # fmt: skip
        self.first_dirty = first_dirty
        self.end_offset = end_offset
        self.records = records
        self.budget_bytes = budget_bytes
        self.hash_keys = hash_keys
        self.distinct_keys = len(kept)
        self._head: KeyIndex | None = head
        self.complete = complete
        self.cuts = tuple(cuts)
        self._head_start = max((a for a in cuts if a <= first_dirty), default=0)
        self._kept = kept

    @classmethod
    def build(
        cls,
        dirty: Source,
        first_dirty: int,
        anchors: Sequence[int],
        budget_bytes: int | None,
        hash_keys: KeyHasher = group_hash,
        *,
        dirty_end: int | None = None,
        hold: Hold = lambda keys: keys,
    ) -> OffsetMap:
        """The map of as much of the dirty section as the budget allows, oldest records first.

        Args:
            dirty: the dirty records, in order; records outside [first_dirty, dirty_end) are passed over.
            anchors: offsets, in any order: records below one are in another interval than those from it on.
            budget_bytes: 16 for every distinct key of every interval, however long the keys are.
            hash_keys: only brings equal keys together. With a bad one the result is the same, later.
            dirty_end: None for one past the last record.
            hold: by default batches are referred to for the life of the map, which is right where they are
                views of mapped files. For decoded copies give a function that moves keys, say to a mapped
                temporary file.

        Raises:
            BadRecord: a key is null or not `binary`.
            ValueError: offsets do not ascend.
        """
        cuts = sorted(a for a in set(anchors) if a > first_dirty)
        capacity = None if budget_bytes is None else max(1, budget_bytes // BYTES_PER_KEY)
        pieces = _Pieces(capacity, hash_keys, hold, cuts)
        for offsets, keys in _dirty_keys(dirty, first_dirty, dirty_end):
            if not pieces.add(offsets, keys):
                break
        head, kept, records, complete = pieces.finish()
        if not complete:
            dirty_end = _offset_of(dirty, first_dirty, records)
        elif dirty_end is None:
            dirty_end = max(first_dirty, pieces.last_offset + 1)
        return cls(
            first_dirty, dirty_end, sorted(set(anchors)), head, kept, records, budget_bytes, hash_keys,
            complete=complete,
        )  # fmt: skip

    @property
    def utilisation(self) -> float:
        """The share of the budget that was used."""
        if self.budget_bytes is None:
            return 0.0
        return self.distinct_keys / max(1, self.budget_bytes // BYTES_PER_KEY)

    @property
    def obsolete_from(self) -> int:
        """No record below this offset is made obsolete: an anchor is between."""
        return self._head_start

    def cursor(self) -> Cursor:
        """For one reading of the log: it takes the keys of the map, and releases them after the clean
        section, together with the files that they are mapped from.
        """
        head, self._head = self._head, None
        if head is None:
            raise ValueError("This offset map was used already.")
        return Cursor(self, head, self._head_start, self._kept)


class Cursor:
    """Goes over all records of a log from its start; says of each batch which are not obsolete."""

    def __init__(self, offset_map: OffsetMap, head: KeyIndex, head_start: int, kept: Numbers) -> None:
        self._map = offset_map
        self._head: KeyIndex | None = head
        self._head_start = head_start
        self._kept = kept
        self._seen = 0
        self._used = 0

    def kept(self, batch: pa.RecordBatch, hashes: Callable[[], npt.NDArray[np.int64]]) -> Ints | None:
        """The rows of the next batch that are kept, ascending; None for all of them.

        Args:
            hashes: of the batch's keys; called only when needed.
        """
        if not self._map.records:
            return None
        offsets, first_dirty = offsets_of(batch), self._map.first_dirty
        if len(offsets) == 0 or offsets[0] >= self._map.end_offset:
            return None
        head, clean, end = np.searchsorted(
            offsets, [self._head_start, first_dirty, self._map.end_offset]
        ).tolist()
        if clean == 0:
            self._head = None
        parts = [np.arange(head)]
        if head < clean and self._head is not None and self._head.distinct:
            among = self._head.find(batch.column("key").slice(head, clean - head), hashes()[head:clean])
            parts.append(np.flatnonzero(among < 0) + head)
        else:
            parts.append(np.arange(head, clean))
        if clean < end:
            numbers = self._kept[self._used : self._used + end - clean].astype(np.int64) - self._seen
            numbers = numbers[: np.searchsorted(numbers, end - clean)]
            parts.append(numbers + clean)
            self._seen += end - clean
            self._used += len(numbers)
        parts.append(np.arange(end, len(offsets)))
        rows = np.concatenate(parts)
        return None if len(rows) == len(offsets) else rows

    def finish(self) -> None:
        """Call it after the last batch. Raises ValueError if these were not the records of the map."""
        if self._seen != self._map.records:
            raise ValueError(
                f"The log has {self._seen} records in [{self._map.first_dirty}, {self._map.end_offset});"
                f" the offset map was made of {self._map.records}."
            )


class _Pieces:
    """The dirty section, cut at anchors: the last keys of each interval."""

    def __init__(self, capacity: int | None, hash_keys: KeyHasher, hold: Hold, cuts: list[int]) -> None:
        self._held = KeyTable()
        self._hash_keys = hash_keys
        self._hold = hold
        self._left = capacity
        self._cuts = cuts
        self._piece = KeyIndex(self._held, capacity, hash_keys, hold)
        self._number = 0
        self._head = self._piece
        self._kept: list[Numbers] = []
        self.last_offset = -1

    def add(self, offsets: Ints, keys: pa.Array) -> bool:
        """The next records. False if the budget is exhausted."""
        start = 0
        while start < len(offsets):
            number = bisect_right(self._cuts, int(offsets[start]))
            if number != self._number:
                self._piece.finish()
                if self._piece.end is not None:
                    return False
                self._settle()
                self._number = number
                self._piece = KeyIndex(self._held, self._left, self._hash_keys, self._hold)
            stop = len(offsets)
            if number < len(self._cuts):
                stop = int(np.searchsorted(offsets, self._cuts[number]))
            if not self._piece.add(keys.slice(start, stop - start)):
                return False
            start = stop
        self.last_offset = int(offsets[-1])
        return True

    def finish(self) -> tuple[KeyIndex, Numbers, int, bool]:
        """The first interval's keys, the numbers of the records that stay, how many it covers, if all."""
        self._piece.finish()
        self._settle()
        end = self._piece.end
        records = self._held.count if end is None else self._held.ordinal(end)
        kept = self._kept[0] if len(self._kept) == 1 else np.concatenate(self._kept)
        return self._head, kept, records, end is None

    def _settle(self) -> None:
        """Note which records of a finished interval stay."""
        if self._left is not None:
            self._left -= self._piece.distinct
        positions = self._piece.positions()
        for start in range(0, len(positions), 1 << 16):
            some = positions[start : start + (1 << 16)]
            some[:] = self._held.ordinals(some.astype(np.int64))
        self._kept.append(positions)


def _dirty_keys(dirty: Source, first_dirty: int, dirty_end: int | None) -> Iterable[tuple[Ints, pa.Array]]:
    """Offsets and keys of the dirty records, batch by batch."""
    last = -1
    for batch in dirty():
        offsets = offsets_of(batch)
        if len(offsets) == 0:
            continue
        if int(offsets[0]) <= last or int(offsets[-1]) - int(offsets[0]) < len(offsets) - 1:
            raise ValueError(f"Offsets do not ascend after offset {last}.")
        last = int(offsets[-1])
        start = int(np.searchsorted(offsets, first_dirty))
        stop = len(offsets) if dirty_end is None else int(np.searchsorted(offsets, dirty_end))
        if start < stop:
            yield offsets[start:stop], batch.column("key").slice(start, stop - start)
        if dirty_end is not None and last >= dirty_end:
            return


def _offset_of(dirty: Source, first_dirty: int, number: int) -> int:
    """The offset of a dirty record by its number."""
    seen = 0
    for offsets, _ in _dirty_keys(dirty, first_dirty, None):
        if number < seen + len(offsets):
            return int(offsets[number - seen])
        seen += len(offsets)
    raise ValueError("The dirty records are not the same as when the offset map was built.")
