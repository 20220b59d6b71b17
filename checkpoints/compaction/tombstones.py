"""Tombstones whose delete horizon has passed, and whether an older record of their key is still there.

A tombstone may go only if nothing of its key is left in front of it; else an older value would come back.
Without anchors nothing can be left. With anchors, an older interval may hold a value. A key's kept
tombstones in front of its first kept value go together, so what counts is where the first kept value of
each such key lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keyfold.checkpoints.compaction.key_index import BYTES_PER_KEY, Hold, KeyHasher, KeyIndex
from keyfold.checkpoints.compaction.offset_map import Source, offsets_of
from keyfold.statestore.keys.buffers import Bools, Ints
from keyfold.statestore.keys.key_table import KeyTable

_NONE: Final = np.iinfo(np.int64).max
#: Beside an entry of the map, the offset of a key's first kept value.
_BYTES_PER_KEY: Final = BYTES_PER_KEY + 8


def has_value(batch: pa.RecordBatch) -> Bools:
    """Which records are not tombstones."""
    valid: Bools = batch.column("value").is_valid().to_numpy(zero_copy_only=False)
    return valid


class ExpiredTombstones:
    """The keys of tombstones between two offsets, and the first kept value of each as the log is gone over.

    Args:
        source: the log from its start.
        above: tombstones below need not be looked for.
        below: tombstones from here on stay.
        cuts: ascending offsets.
        budget_bytes: 24 for every distinct key; where it does not suffice, the younger tombstones stay for
            now. None for no limit.
        hash_keys, hold: as for `OffsetMap.build`.

    Attributes:
        end: every tombstone below was looked at. At most `below`, and at least the first one is.
        dropped: how many have been dropped so far.
    """

    def __init__(
        self, source: Source, above: int, below: int, cuts: Sequence[int], budget_bytes: int | None,
        hash_keys: KeyHasher, hold: Hold,
    ) -> None:  # fmt: skip
        self._above = above
        self._below = below
        self._source = source
        capacity = None if budget_bytes is None else max(1, budget_bytes // _BYTES_PER_KEY)
        held = KeyTable()
        self._keys = KeyIndex(held, capacity, hash_keys, hold)
        for _, keys in self._tombstones():
            if not self._keys.add(keys):
                break
        self._keys.finish()
        self.end = below
        if self._keys.end is not None:
            self.end = self._offset_of(held.ordinal(self._keys.end))
        self._first_value = np.full(self._keys.distinct, _NONE, np.int64)
        self.dropped = 0
        self._cuts = np.array(cuts, np.int64)
        self._highest = np.full(len(cuts) + 1, -1, np.int64)

    @property
    def highest_dropped(self) -> tuple[int, ...]:
        """The highest offset that was dropped so far between each two neighbouring cuts, ascending."""
        return tuple(self._highest[self._highest >= 0].tolist())

    def _tombstones(self) -> Iterator[tuple[Ints, pa.Array]]:
        """Offsets and keys of the tombstones that are looked for."""
        for batch in self._source() if self._above < self._below else ():
            offsets = offsets_of(batch)
            if len(offsets) and offsets[0] >= self._below:
                break
            if batch.column("value").null_count:
                start, stop = np.searchsorted(offsets, [self._above, self._below]).tolist()
                rows = start + np.flatnonzero(~has_value(batch)[start:stop])
                if len(rows):
                    yield offsets[rows], batch.column("key").take(pa.array(rows))

    def _offset_of(self, number: int) -> int:
        """The offset of a tombstone by its number."""
        for offsets, _ in self._tombstones():
            if number < len(offsets):
                return int(offsets[number])
            number -= len(offsets)
        return self._below

    def without(
        self, batch: pa.RecordBatch, kept: Ints | None, hashes: Callable[[], npt.NDArray[np.int64]]
    ) -> Ints | None:
        """Take the tombstones that go out of the `kept` rows of the log's next batch (None: all rows)."""
        count = int(np.searchsorted(offsets_of(batch), self._below))
        if count == 0 or self._keys.distinct == 0:
            return kept
        rows = np.arange(batch.num_rows) if kept is None else kept
        entries = self._keys.find(batch.column("key").slice(0, count), hashes()[:count])
        early = rows[: np.searchsorted(rows, count)]
        known = early[entries[early] >= 0]
        values = has_value(batch)[known]
        offsets = offsets_of(batch)
        with_value, tombstones = known[values], known[~values]
        np.minimum.at(self._first_value, entries[with_value], offsets[with_value])
        gone = tombstones[self._first_value[entries[tombstones]] > offsets[tombstones]]
        if len(gone) == 0:
            return kept
        self.dropped += len(gone)
        between = np.searchsorted(self._cuts, offsets[gone], side="right")
        np.maximum.at(self._highest, between, offsets[gone])
        staying = np.ones(batch.num_rows, np.bool_)
        staying[gone] = False
        return rows[staying[rows]]
