"""The folds' part of a verification: what the manifest says is clean is proved from the records themselves.

Where passes have been, no key may occur twice between two neighbouring splits below `unique_end`: whoever
restores takes those records as they are. That is counted here, key bytes decide, in bounded memory: where an
interval has more keys than have room, they are taken in turns by their hash, each with a reading of the
interval. (`segments` proves that no record is missing from `clean_end` on. Whether what was dropped
below was obsolete, the records that are left cannot show.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keyfold.checkpoints.compaction.key_index import BYTES_PER_KEY, KeyIndex
from keyfold.checkpoints.compaction.offset_map import offsets_of
from keyfold.checkpoints.log.rereading import Rereading
from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.checkpoints.verify.findings import Damages
from keyfold.statestore.files import Files
from keyfold.statestore.keys.buffers import Ints
from keyfold.statestore.keys.group_hash import group_hash
from keyfold.statestore.keys.key_table import KeyTable

#: Memory for the keys of one turn.
_BUDGET_BYTES: Final = 128 << 20
#: What an array of keys costs beside its bytes.
_ARRAY_BYTES: Final = 1 << 10
_REMEDY: Final = (
    "`keyfold compact --full`, or compact(full=True), folds the log from its start and repairs this; of a "
    "snapshot make a clone first. What was restored meanwhile may have deleted keys, or a key twice"
)


@dataclass(frozen=True)
class _Interval:
    """Where the keys of a partition may not occur twice, and the share of them whose turn it is."""

    files: Files
    directory: Path
    p: PartitionState
    start: int
    end: int
    turn: int = 0
    turns: int = 1

    def keys(self) -> Iterator[tuple[Ints, pa.Array]]:
        """Offsets and keys of the records, those whose turn it is."""
        read = Rereading(self.files, self.directory, self.p.segments)
        for batch in read.between(self.start, self.end, keys_only=True):
            offsets, keys = offsets_of(batch), batch.column("key")
            if self.turns > 1:
                chosen = np.flatnonzero((group_hash(keys) & (self.turns - 1)) == self.turn)
                offsets, keys = offsets[chosen], keys.take(pa.array(chosen))
            if len(offsets):
                yield offsets, keys

    def first_twice(self) -> tuple[int, int, int] | None:
        """The offset of a record whose key comes again, where it does, and how many there are such. None if
        there is none.

        It is the first such record and their number, unless the keys have no room: then of those that were
        read until there was none.

        Raises `MemoryError` where there is no room for all keys of the turn.
        """
        held = KeyTable()
        last, size = KeyIndex(held), 0
        for offsets, keys in self.keys():
            size += keys.nbytes + _ARRAY_BYTES + BYTES_PER_KEY * len(offsets)
            last.add(keys)
            if size > _BUDGET_BYTES:
                break
        last.finish()
        if last.distinct == held.count:
            if size > _BUDGET_BYTES:
                raise MemoryError
            return None
        kept = held.ordinals(last.positions().astype(np.int64))
        number = int(np.searchsorted(kept - np.arange(len(kept)), 0, side="right"))
        first, again = self._offsets_of(number)
        return first, again, held.count - last.distinct

    def _offsets_of(self, number: int) -> tuple[int, int]:
        """The offset of a record by its number, and that of the next one with its key."""
        key: pa.Scalar | None = None
        first = -1
        for offsets, keys in self.keys():
            start = 0
            if key is None:
                if number >= len(offsets):
                    number -= len(offsets)
                    continue
                key, first, start = keys[number], int(offsets[number]), number + 1
            found = pc.index(keys.slice(start), key).as_py()
            if found >= 0:
                return first, int(offsets[start + found])
        return first, -1


def check_folds(files: Files, directory: Path, number: int, p: PartitionState, damages: Damages) -> None:
    """Whether keys are as unique in a partition as its manifest says.

    Raises:
        Damaged, ViewExpired: a segment cannot be read; `segments` has said so.
    """
    cuts = [p.start, *(s for s in p.splits if p.start < s < p.unique_end), p.unique_end]
    for start, end in pairwise(cuts):
        if start < end:
            _check_interval(_Interval(files, directory, p, start, end), number, damages)


def _check_interval(interval: _Interval, number: int, damages: Damages) -> None:
    turns = 1
    while True:
        try:
            turn_of = (replace(interval, turn=turn, turns=turns) for turn in range(turns))
            found = [twice for one in turn_of if (twice := one.first_twice()) is not None]
            break
        except MemoryError:
            turns *= 4
    if found:
        first, again, _ = min(found)
        count = sum(records for _, _, records in found)
        damages.add(
            interval.directory, f"partition {number}, offset {first}",
            "A key is twice where the manifest says that no key is.",
            f"one record of each key in offsets {interval.start} to {interval.end}",
            f"its key again at offset {again}; {count} records too many", _REMEDY,
        )  # fmt: skip
