"""Finds expired entries by reading the log once from its start.

Records are in the order of the writer's clock, so the old records are at the beginning of each partition. A
cursor passes over records as they get old. A key whose *last* record, according to the last-value store, is
old enough is due for a tombstone. If the clock goes backwards, or an append has its own timestamps, the
tombstone can only come later, because a cursor waits at the first record that is too young.
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

#: The minimum number of old records to pass over in one batch, in all partitions together. The limit is at
#: least twice the number of new records since the last batch, so that the cursors keep up at any rate.
_RECORDS_MIN: Final = 32_768
#: The minimum for each partition if there are many.
_PARTITION_RECORDS_MIN: Final = 1_024


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position of the search for old records of one ttl in one partition.

    Attributes:
        offset: Records below this offset were old and are processed.
        generation: Generation of the partition. After a rollback, older records may again be the last of
            their keys.
        looked_ms, due_ms: The time of the last search, and the time before which there is nothing to find.
    """

    offset: int = 0
    generation: int = 0
    looked_ms: int = 0
    due_ms: int = 0


@dataclass(frozen=True)
class Sweep:
    """The result of one search: the keys that are due for a tombstone, and the cursors after its commit."""

    keys: pa.Array
    cursors: Mapping[tuple[int, int], Cursor]


class Sweeper:
    """The cursors of one changelog, one for each ttl and partition. They start over whenever it is opened.

    Args:
        files, root: The changelog.
        ttls_ms: Prefix of the keys of a store → its ttl.
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
        """Search the records that have become old, in bounded steps.

        Args:
            state: State of the log. Its files must be kept during the search.
            base: The last values as of `state` or later.
        """
        found: list[pa.Array] = []
        cursors = {}
        least = max(_RECORDS_MIN // len(state.partitions), _PARTITION_RECORDS_MIN)
        came = [end - last for end, last in zip(state.ends, self._ends or state.ends, strict=True)]
        self._ends = state.ends
        for ttl_ms, prefixes in self._prefixes.items():
            for partition, p in enumerate(state.partitions):
                cursor = self._cursors.get((ttl_ms, partition), Cursor(generation=p.generation))
                if cursor.looked_ms <= now_ms < cursor.due_ms and cursor.generation == p.generation:
                    continue
                scan = _Scan(p, cursor, prefixes, ttl_ms, now_ms, max(least, 2 * came[partition]))
                directory = filenames.partition(self._root, partition)
                log = read_segments(self._files, directory, p.segments, scan.offset, p.end)
                found += scan.expired(log, base)
                cursors[ttl_ms, partition] = scan.cursor()
        keys = pa.concat_arrays(found).unique() if found else pa.array([], pa.binary())
        return Sweep(keys, cursors)

    def done(self, sweep: Sweep) -> None:
        """Advance the cursors after the tombstones are committed."""
        self._cursors.update(sweep.cursors)


class _Scan:
    """One search in one partition."""

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
        """Keys whose last record is old enough, among the records passed over."""
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
        """The rows with values of these stores before the first one that is too young. Moves the cursor to
        that row.
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
