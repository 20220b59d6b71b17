"""Tombstones whose delete horizon has passed, and whether an older record of their key is still there.

A tombstone may go only if nothing of its key is left in front of it; else an older value would come back.
Without anchors nothing can be left. With anchors, an older interval may hold a value. A key's kept
tombstones in front of its first kept value go together, so what counts is where the first kept value of
each such key lies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keyfold.checkpoints.held_keys import HeldKeys
from keyfold.checkpoints.last_keys import BYTES_PER_KEY, HashKeys, LastKeys
from keyfold.checkpoints.offset_map import Hold, Source, offsets_of
from keyfold.statestore.keybytes import Bools, Ints

_NONE: Final = np.iinfo(np.int64).max
#: Beside an entry of the map, the offset of a key's first kept value.
_BYTES_PER_KEY: Final = BYTES_PER_KEY + 8


def has_value(batch: pa.RecordBatch) -> Bools:
    """Which records are not tombstones."""
    valid: Bools = batch.column("value").is_valid().to_numpy(zero_copy_only=False)
    return valid


class ExpiredTombstones:
    """The keys of tombstones below an offset, and the first kept value of each as the log is gone over.

    Args:
        source: the log from its start.
        below: tombstones from here on stay.
        budget_bytes: 24 for every distinct key; where it does not suffice, the younger tombstones stay for
            now. None for no limit.
        hash_keys, hold: as for `OffsetMap.build`.

    Attributes:
        dropped: how many have been dropped so far.
        highest_dropped: the highest offset of those, or -1.
    """

    def __init__(
        self, source: Source, below: int, budget_bytes: int | None, hash_keys: HashKeys, hold: Hold
    ) -> None:
        self._below = below
        capacity = None if budget_bytes is None else max(1, budget_bytes // _BYTES_PER_KEY)
        self._keys = LastKeys(HeldKeys(), capacity, hash_keys)
        self.dropped = 0
        self.highest_dropped = -1
        for batch in source() if below > 0 else ():
            if batch.num_rows and offsets_of(batch)[0] >= below:
                break
            if batch.column("value").null_count:
                count = int(np.searchsorted(offsets_of(batch), below))
                rows = np.flatnonzero(~has_value(batch)[:count])
                if len(rows) and not self._keys.add(hold(batch.column("key").take(pa.array(rows)))):
                    break
        self._keys.finish()
        self._first_value = np.full(self._keys.distinct, _NONE, np.int64)

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
        self.highest_dropped = int(offsets[gone[-1]])
        staying = np.ones(batch.num_rows, np.bool_)
        staying[gone] = False
        return rows[staying[rows]]
