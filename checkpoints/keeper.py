"""Keeps the last-value stores of a changelog up with its log, behind the commits and off their path.

The backlog is not held in memory: what a store lacks is read back from the log, folded, and applied in steps
of bounded bytes. The log is the truth; a store that is missing, stale, damaged or ahead of the log is built
anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa

from keyfold.checkpoints import reading
from keyfold.checkpoints.fold import last_per_key
from keyfold.checkpoints.state import PartitionState, State
from keyfold.checkpoints.writer import Writer
from keyfold.statestore import names
from keyfold.statestore.blocks import RECORD_SCHEMA
from keyfold.statestore.errors import StorageFailed, WriterFenced
from keyfold.statestore.hashing import partition_of
from keyfold.statestore.kv import PartitionedStore, ReadOnlyStore
from keyfold.statestore.lastvalues import Identity, LastValues, StoreUnusable

log = logging.getLogger("keyfold")

#: One step reads about this many bytes of the log, folds them and applies the result.
_STEP_BYTES: Final = 64 << 20
#: Small commits are let pile up for so long, or so many bytes, before they are applied together.
_LINGER_SECONDS: Final = 0.5
_LINGER_BYTES: Final = 32 << 20
_REBUILDS_MAX: Final = 3


class Keeper:
    """The last values of all partitions. One thread applies; `current` waits until it has reached the present
    commit.

    Without a `compact` policy nobody is expected to ask for last values, so they are only followed once
    somebody does.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        count = len(writer.state.partitions)
        self._stores: list[LastValues | None] = [None] * count
        self._dropped_seen = [-1] * count
        self._started_at = [0] * count
        self._generations = [p.generation for p in writer.state.partitions]
        self._wanted: tuple[int, ...] | None = None
        self._eager = "compact" in writer.identity.config.cleanup_policy
        self._failure: BaseException | None = None
        self._stop = False
        self._behind_since: float | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        writer.on_change(self._notice)
        if self._eager and any(writer.state.ends):
            self._notice(writer.state)

    # -- for readers -------------------------------------------------------------------------------

    def current(self) -> ReadOnlyStore:
        """The last values as of the commit that is current at this call, or a later one.

        Raises:
            Damaged: the log cannot be read. StorageFailed: the stores cannot be written.
        """
        with self._writer.pin() as state:
            target = state.ends
        with self._changed:
            self._eager = True
            self._wanted = target
            self._start()
            self._changed.notify_all()
            while not self._reached(target):
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
                if self._stop:
                    raise WriterFenced(
                        "The changelog was closed.", path=self._writer.root, remedy="open it again"
                    )
                self._changed.wait(1.0)
                self._start()
            stores = [s for s in self._stores if s is not None]
        count = len(stores)
        return PartitionedStore(stores, lambda key: partition_of(key, count), owns=False)

    def lag_bytes(self) -> int:
        """About how many bytes of the log the stores have not applied yet."""
        total = 0
        for p, store in zip(self._writer.state.partitions, self._stores, strict=True):
            records = p.end - (store.applied if store is not None else p.start)
            total += records * p.bytes // max(1, p.end - p.start)
        return total

    def wait_for_room(self) -> None:
        """Hold a writer back while the stores are more than `store.backlog.bytes` behind."""
        bound = self._writer.identity.config.store_backlog_bytes
        while self._eager and not self._stop and self._failure is None and self.lag_bytes() > bound:
            with self._changed:
                self._wanted = self._writer.state.ends
                self._start()
                self._changed.notify_all()
                self._changed.wait(0.2)

    def close(self) -> None:
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for i, store in enumerate(self._stores):
            if store is not None:
                with suppress(StoreUnusable):
                    store.close()
                self._stores[i] = None

    # -- the thread --------------------------------------------------------------------------------

    def _notice(self, state: State) -> None:
        if self._eager and not self._stop:
            with self._changed:
                self._start()
                self._changed.notify_all()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="keyfold-last-values", daemon=True)
            self._thread.start()

    def _reached(self, target: tuple[int, ...]) -> bool:
        return all(
            s is not None and s.applied >= t for s, t in zip(self._stores, target, strict=True)
        ) and not self._stale(self._writer.state)

    def _run(self) -> None:
        try:
            while not self._stop:
                with self._changed:
                    if not self._due():
                        self._changed.wait(_LINGER_SECONDS / 2)
                        continue
                with self._writer.pin() as state:
                    for number in range(len(self._stores)):
                        self._follow(state, number)
                with self._changed:
                    self._behind_since = None
                    if self._wanted is not None and self._reached(self._wanted):
                        self._wanted = None
                    self._changed.notify_all()
        except BaseException as e:
            log.error("changelog %s: last values stopped: %s", self._writer.root, type(e).__name__)
            with self._changed:
                self._failure = e
                self._changed.notify_all()

    def _due(self) -> bool:
        state = self._writer.state
        if self._wanted is not None:
            return True
        if self._reached(state.ends):
            return False
        now = time.monotonic()
        self._behind_since = self._behind_since or now
        return now - self._behind_since >= _LINGER_SECONDS or self.lag_bytes() >= _LINGER_BYTES

    def _stale(self, state: State) -> bool:
        return any(
            s is not None and self._must_rebuild(i, s, p)
            for i, (s, p) in enumerate(zip(self._stores, state.partitions, strict=True))
        )

    def _must_rebuild(self, number: int, store: LastValues, p: PartitionState) -> bool:
        """Ahead of the log, of another generation, or possibly blind to a delete whose tombstone is gone, or
        to keys that retention dropped.
        """
        if store.applied > p.end or self._generations[number] != p.generation:
            return True
        missed_delete = p.dropped_tombstone > self._dropped_seen[number] and reading.misses_delete(
            p, store.applied
        )
        return missed_delete or (store.applied > self._started_at[number] < p.start)

    def _follow(self, state: State, number: int) -> None:
        """Bring one partition's store to the end of `state`, building it anew where it cannot be used."""
        for attempt in range(_REBUILDS_MAX + 1):
            try:
                self._apply(state, number)
                return
            except StoreUnusable as e:
                log.warning(
                    "changelog %s: last values of partition %d are rebuilt: %s", self._writer.root, number, e
                )
                self._discard(number)
                if attempt == _REBUILDS_MAX:
                    raise StorageFailed(
                        "The last values cannot be built.", path=names.partition(self._writer.root, number),
                        expected="a RocksDB that can be written", found=str(e),
                        remedy="free or repair the disk; the log itself is not affected",
                    ) from e  # fmt: skip

    def _apply(self, state: State, number: int) -> None:
        p = state.partitions[number]
        store = self._stores[number]
        if store is None:
            store = self._open(state, number)
        if self._must_rebuild(number, store, p):
            self._discard(number)
            store = self._open(state, number)
        self._dropped_seen[number] = p.dropped_tombstone
        self._generations[number] = p.generation
        if store.applied == 0:
            self._started_at[number] = p.start
        self._stores[number] = store
        for batch, end in self._steps(p, number, max(store.applied, p.start)):
            store.apply(batch, end)
            if self._stop:
                return

    def _steps(self, p: PartitionState, number: int, offset: int) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Last records per key of consecutive stretches of the log, and where each stretch ends."""
        directory = names.partition(self._writer.root, number)
        pending: list[pa.RecordBatch] = []
        size = 0
        for batch in reading.read_segments(self._writer.files, directory, p.segments, offset, p.end):
            pending.append(batch)
            size += batch.get_total_buffer_size()
            if size >= _STEP_BYTES:
                yield _folded(pending), batch.column("offset")[-1].as_py() + 1
                pending, size = [], 0
        if pending or offset < p.end:
            yield _folded(pending), p.end

    def _open(self, state: State, number: int) -> LastValues:
        """The newest store of the partition that can be used, or a new one; the others are removed."""
        writer = self._writer
        directory = names.partition(writer.root, number)
        p = state.partitions[number]
        identity = Identity(writer.identity.uuid, number, p.generation)
        found = (names.store_epoch(n) for n in writer.files.list_directory(directory))
        usable: LastValues | None = None
        for epoch in sorted((e for e in found if e is not None), reverse=True):
            path = names.store(writer.root, number, epoch)
            if usable is None:
                try:
                    usable = LastValues.open(path, identity, files=writer.files)
                    self._started_at[number] = 0 if p.start == 0 else -1
                    continue
                except StoreUnusable as e:
                    log.info("changelog %s: last values in %s cannot be used: %s", writer.root, path.name, e)
            writer.files.remove_tree(path)
        if usable is None:
            path = self._new_path(number, state.epoch)
            usable = LastValues.open(path, identity, files=writer.files)
        self._stores[number] = usable
        return usable

    def _new_path(self, number: int, epoch: int) -> Path:
        directory = names.partition(self._writer.root, number)
        if not self._writer.files.is_directory(directory):
            self._writer.files.make_directory(directory)
        return names.store(self._writer.root, number, epoch)

    def _discard(self, number: int) -> None:
        store, self._stores[number] = self._stores[number], None
        self._dropped_seen[number] = -1
        self._started_at[number] = 0
        if store is not None:
            store.destroy()


def _folded(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if not batches:
        return pa.RecordBatch.from_pylist([], schema=RECORD_SCHEMA)
    table = pa.Table.from_batches(batches, schema=RECORD_SCHEMA)
    return last_per_key(table.combine_chunks().to_batches()[0])
