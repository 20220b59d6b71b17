"""Verifies compaction: the uniqueness of keys that the manifest claims is proved from the records themselves.

In the section that passes have cleaned, no key may occur twice between two neighbouring splits below
`unique_end`: a restore takes those records as they are. This is counted here by comparing key bytes, in
bounded memory: if an interval has more keys than fit, they are checked in turns by their hash, each with one
reading of the interval. (`segments` proves that no record is missing from `clean_end` on. Whether the records
that were dropped below were obsolete cannot be seen from the remaining ones.)
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
#: Overhead of an array of keys in addition to its bytes.
_ARRAY_BYTES: Final = 1 << 10
_REMEDY: Final = (
    "`keyfold compact --full`, or compact(full=True), compacts the log from its start and repairs this. "
    "Clone a snapshot first. States that were restored meanwhile may contain deleted or duplicate keys"
)


@dataclass(frozen=True)
class _Interval:
    """A section of a partition in which no key may occur twice, and the share of the keys in this turn."""

    files: Files
    directory: Path
    p: PartitionState
    start: int
    end: int
    turn: int = 0
    turns: int = 1

    def keys(self) -> Iterator[tuple[Ints, pa.Array]]:
        """Offsets and keys of the records whose turn it is."""
        read = Rereading(self.files, self.directory, self.p.segments)
        for batch in read.between(self.start, self.end, keys_only=True):
            offsets, keys = offsets_of(batch), batch.column("key")
            if self.turns > 1:
                chosen = np.flatnonzero((group_hash(keys) & (self.turns - 1)) == self.turn)
                offsets, keys = offsets[chosen], keys.take(pa.array(chosen))
            if len(offsets):
                yield offsets, keys

    def first_twice(self) -> tuple[int, int, int] | None:
        """The offset of a record whose key occurs again, the offset of the next record with this key, and the
        number of such records. None if there is none.

        It is the first such record and their total number, unless the keys do not fit in memory: then it is
        based on the keys read up to that point.

        Raises `MemoryError` if not all keys of the turn fit in memory.
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
        """The offset of a record by its number, and that of the next record with its key."""
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


def check_folds(files: Files, directory: Path, partition: int, p: PartitionState, damages: Damages) -> None:
    """Check that the keys of a partition are as unique as its manifest says.

    Raises:
        Damaged, ViewExpired: a segment cannot be read; `segments` has reported it.
    """
    cuts = [p.start, *(s for s in p.splits if p.start < s < p.unique_end), p.unique_end]
    for start, end in pairwise(cuts):
        if start < end:
            _check_interval(_Interval(files, directory, p, start, end), partition, damages)


def _check_interval(interval: _Interval, partition: int, damages: Damages) -> None:
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
            interval.directory, f"partition {partition}, offset {first}",
            "A key occurs twice in a section where the manifest says that keys are unique.",
            f"one record of each key in offsets {interval.start} to {interval.end}",
            f"its key again at offset {again}; {count} duplicate records", _REMEDY,
        )  # fmt: skip
