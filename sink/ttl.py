"""Which entries have outlived their ttl, found by reading the log once from its start.

Records come in the order of the writer's clock, so those that are old enough are the beginning of each
partition. A cursor goes over them as they get old; a key whose *last* record is old enough, which the
last-value store tells, is due for a tombstone. Nothing else decides: a clock that went backwards, or an
append with timestamps of its own, can only make the tombstone later, because a cursor waits in front of the
first record that is too young.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.checkpoints.manifest.state import State
from keyfold.statestore import filenames
from keyfold.statestore.files import Files
from keyfold.statestore.keys.buffers import Bools, Ints
from keyfold.statestore.kv.api import RecordStore
from keyfold.statestore.segment.reader import read_segments

#: So many records at least are gone over in one batch, in all partitions together, if so many are old enough;
#: and twice as many as came in since the last time, so that the cursors keep up whatever the rate.
_RECORDS_MIN: Final = 32_768
#: The same for one partition, where there are many.
_PARTITION_RECORDS_MIN: Final = 1_024


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the search for old records of one ttl stands in one partition.

    Attributes:
        offset: records below were old, and are done.
        generation: of the partition; after a rollback older records may be the last of their keys again.
        looked_ms, due_ms: when it was looked last, and before when there is nothing to find.
    """

    offset: int = 0
    generation: int = 0
    looked_ms: int = 0
    due_ms: int = 0


@dataclass(frozen=True)
class Sweep:
    """What one look found: keys for which a tombstone is due, and where the cursors stand once it is
    committed.
    """

    keys: pa.Array
    cursors: Mapping[tuple[int, int], Cursor]


class Sweeper:
    """The cursors of one changelog, one for each ttl and partition. They begin anew with every opening.

    Args:
        files, root: the changelog.
        ttls_ms: what the keys of a store begin with → its ttl.
    """

    def __init__(self, files: Files, root: Path, ttls_ms: Mapping[bytes, int]) -> None:
        self._files = files
        self._root = root
        self._prefixes: dict[int, list[bytes]] = {}
        for prefix, ttl_ms in ttls_ms.items():
            self._prefixes.setdefault(ttl_ms, []).append(prefix)
        self._cursors: dict[tuple[int, int], Cursor] = {}
        self._ends: tuple[int, ...] = ()

    def look(self, state: State, base: RecordStore, now_ms: int) -> Sweep:
        """Go over what has become old, in bounded steps.

        Args:
            state: of the log; its files must stay meanwhile.
            base: the last values as of `state` or later.
        """
        found: list[pa.Array] = []
        cursors = {}
        least = max(_RECORDS_MIN // len(state.partitions), _PARTITION_RECORDS_MIN)
        came = [end - last for end, last in zip(state.ends, self._ends or state.ends, strict=True)]
        self._ends = state.ends
        for ttl_ms, prefixes in self._prefixes.items():
            for number, p in enumerate(state.partitions):
                cursor = self._cursors.get((ttl_ms, number), Cursor(generation=p.generation))
                if cursor.looked_ms <= now_ms < cursor.due_ms and cursor.generation == p.generation:
                    continue
                scan = _Scan(p, cursor, prefixes, ttl_ms, now_ms, max(least, 2 * came[number]))
                directory = filenames.partition(self._root, number)
                log = read_segments(self._files, directory, p.segments, scan.offset, p.end)
                found += scan.expired(log, base)
                cursors[ttl_ms, number] = scan.cursor()
        keys = pa.concat_arrays(found).unique() if found else pa.array([], pa.binary())
        return Sweep(keys, cursors)

    def done(self, sweep: Sweep) -> None:
        """The tombstones are committed: go on behind them."""
        self._cursors.update(sweep.cursors)


class _Scan:
    """One look at one partition."""

    def __init__(
        self, p: PartitionState, cursor: Cursor, prefixes: list[bytes], ttl_ms: int, now_ms: int, budget: int
    ) -> None:
        self.offset = cursor.offset if cursor.generation == p.generation else 0
        self._p = p
        self._prefixes = prefixes
        self._ttl_ms = ttl_ms
        self._now_ms = now_ms
        self._budget = budget
        self._due_ms = now_ms

    def cursor(self) -> Cursor:
        return Cursor(self.offset, self._p.generation, self._now_ms, self._due_ms)

    def expired(self, log: Iterable[pa.RecordBatch], base: RecordStore) -> Iterator[pa.Array]:
        """Keys whose last record is old enough, among those of the records gone over."""
        cutoff_ms = self._now_ms - self._ttl_ms
        for whole in log:
            batch = whole.slice(0, self._budget)
            rows = self._old(batch, cutoff_ms)
            keys = batch.column("key").take(pa.array(rows))
            if len(keys):
                last = base.get_records(keys).column("timestamp")
                yield keys.filter(pc.less_equal(last, cutoff_ms))
            self._budget -= batch.num_rows
            if self._due_ms > self._now_ms or self._budget <= 0:
                return
        self.offset = self._p.end
        self._due_ms = self._now_ms + self._ttl_ms

    def _old(self, batch: pa.RecordBatch, cutoff_ms: int) -> Ints:
        """The rows with values of these stores in front of the first that is too young; the cursor goes
        there.
        """
        offsets = batch.column("offset").to_numpy()
        rows = np.flatnonzero(self._own(batch.column("key")))
        times = batch.column("timestamp").cast(pa.int64()).to_numpy()[rows]
        young = np.flatnonzero(times > cutoff_ms)
        if len(young):
            self._due_ms = int(times[young[0]]) + self._ttl_ms
            self.offset = int(offsets[rows[young[0]]])
            rows = rows[: young[0]]
        elif len(offsets):
            self.offset = int(offsets[-1]) + 1
        valued = batch.column("value").is_valid().to_numpy(zero_copy_only=False)
        old: Ints = rows[valued[rows]]
        return old

    def _own(self, keys: pa.Array) -> Bools:
        own = np.zeros(len(keys), np.bool_)
        for prefix in self._prefixes:
            begins = pc.equal(pc.binary_slice(keys, 0, len(prefix)), pa.scalar(prefix))
            own |= begins.to_numpy(zero_copy_only=False)
        return own
