"""Keeps the last-value stores of a changelog up with its log, behind the commits and off their path: the
writer's, or those of a standby, which follows a writer in another process.

The backlog is not held in memory: what a store lacks is read back from the log, folded, and applied in steps
of bounded bytes. The log is the truth; a store that is missing, stale, damaged or ahead of the log is built
anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final, Protocol

import pyarrow as pa

from keyfold.checkpoints import reading
from keyfold.checkpoints.fold import gathered, last_per_key
from keyfold.checkpoints.identity import Identity as LogIdentity
from keyfold.checkpoints.partition import PartitionState
from keyfold.checkpoints.state import State
from keyfold.checkpoints.store_places import BesideTheLog, StorePlace
from keyfold.checkpoints.writer import Writer
from keyfold.statestore import names
from keyfold.statestore.blocks import RECORD_SCHEMA
from keyfold.statestore.errors import StorageFailed, WriterFenced
from keyfold.statestore.files import Files
from keyfold.statestore.hashing import partition_of, partitions_of
from keyfold.statestore.kv import PartitionedStore, ReadOnlyStore
from keyfold.statestore.lastvalues import Identity, LastValues, StoreUnusable

log = logging.getLogger("keyfold")

#: One step reads about this many bytes of the log, folds them and applies the result.
_STEP_BYTES: Final = 64 << 20
_STEP_ROWS: Final = 1 << 24
_NO_RECORDS: Final = pa.RecordBatch.from_pylist([], schema=RECORD_SCHEMA)
#: Small commits are let pile up for so long, or so many bytes, before they are applied together.
_LINGER_SECONDS: Final = 0.5
_LINGER_BYTES: Final = 32 << 20
_REBUILDS_MAX: Final = 3
#: After a failure nothing is tried again for so long, unless somebody waits.
_REST_SECONDS: Final = 5.0
_MOVING_THREADS: Final = 4


class Followed(Protocol):
    """What a keeper follows: the writer of this process, or what it publishes to other processes."""

    @property
    def files(self) -> Files: ...
    @property
    def root(self) -> Path: ...
    @property
    def identity(self) -> LogIdentity: ...
    @property
    def state(self) -> State: ...

    def pin(self) -> AbstractContextManager[State]:
        """The current state; its files stay until the context is left."""

    def on_change(self, listener: Callable[[State], None]) -> None:
        """Call `listener` with every newer state."""


class Keeper:
    """The last values of all partitions. One thread applies; `current` waits until it has reached the present
    commit.

    Without a `compact` policy nobody is expected to ask for last values, so they are only followed once
    somebody does.

    Args:
        place: where the stores lie.
        eager: follow although nobody has asked for last values yet.
        linger_seconds: small commits pile up for so long before they are applied together.
    """

    def __init__(
        self, followed: Followed, place: StorePlace, *, eager: bool, linger_seconds: float = _LINGER_SECONDS
    ) -> None:
        self._followed = followed
        self._place = place
        self._linger_seconds = linger_seconds
        count = len(followed.state.partitions)
        self._stores: list[LastValues | None] = [None] * count
        #: the manifest line of the state that a store was last read from, -1 where that is not known
        self._seen = [-1] * count
        self._started_at = [0] * count
        self._generations = [p.generation for p in followed.state.partitions]
        self._wanted: tuple[int, ...] | None = None
        self._eager = eager
        self._failure: BaseException | None = None
        self._rests_until = 0.0
        self._stop = False
        #: partitions with stores of earlier writers, to be removed when there is time
        self._unswept: set[int] = set()
        self._behind_since: float | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        followed.on_change(self._notice)
        if self._eager and any(followed.state.ends):
            self._notice(followed.state)

    @classmethod
    def of_writer(cls, writer: Writer) -> Keeper:
        """The keeper of a writer, which goes on with the stores of the writer before."""
        eager = "compact" in writer.identity.config.cleanup_policy
        return cls(writer, BesideTheLog(writer), eager=eager)

    # -- for readers -------------------------------------------------------------------------------

    def current(self) -> ReadOnlyStore:
        """The last values as of the commit that is current at this call, or a later one.

        Raises:
            Damaged: the log cannot be read. StorageFailed: the stores cannot be written.
        """
        with self._followed.pin() as state:
            target = state.ends
        while True:
            if self.wait(target, 1.0):
                stores = [s for s in self._stores if s is not None]
                if len(stores) == len(target):
                    break
        count = len(stores)
        return PartitionedStore(
            stores, lambda key: partition_of(key, count), lambda keys: partitions_of(keys, count)
        )

    def wait(self, target: tuple[int, ...], seconds: float) -> bool:
        """Whether the stores have reached these offsets; waits that long for it. Raises as `current` does."""
        if self._eager and self._reached(target):
            return True
        until = time.monotonic() + seconds
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
                        "The changelog was closed.", path=self._followed.root, remedy="open it again"
                    )
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
                self._start()
        return True

    def lag(self) -> dict[int, int]:
        """Partition → how many offsets the store has not applied yet."""
        pairs = enumerate(zip(self._followed.state.partitions, self._stores, strict=True))
        return {i: max(0, p.end - (p.start if s is None else max(s.applied, p.start))) for i, (p, s) in pairs}

    def lag_bytes(self) -> int:
        """About how many bytes of the log the stores have not applied yet."""
        pairs = zip(self._followed.state.partitions, self.lag().values(), strict=True)
        return sum(records * p.bytes // max(1, p.end - p.start) for p, records in pairs)

    def wait_for_room(self) -> None:
        """Hold a writer back while the stores are more than `store.backlog.bytes` behind."""
        bound = self._followed.identity.config.store_backlog_bytes
        while self._eager and not self._stop and self._failure is None and self.lag_bytes() > bound:
            with self._changed:
                self._wanted = self._followed.state.ends
                self._start()
                self._changed.notify_all()
                self._changed.wait(0.2)

    def hand_over(self, writer: Writer) -> None:
        """Go on behind `writer`, which has taken over the changelog that was followed, with the same stores
        in the place of a writer's.
        """
        self._halt()
        place = BesideTheLog(writer)
        with ThreadPoolExecutor(_MOVING_THREADS) as pool:
            moved = pool.map(lambda number: self._moved(number, place), range(len(self._stores)))
            self._stores = list(moved)
        self._unswept = {number for number, store in enumerate(self._stores) if store is not None}
        self._followed, self._place, self._linger_seconds = writer, place, _LINGER_SECONDS
        self._failure, self._stop = None, False
        writer.on_change(self._notice)
        with self._changed:
            self._start()

    def close(self) -> None:
        self._halt()
        for i, store in enumerate(self._stores):
            if store is not None:
                with suppress(StoreUnusable):
                    store.close()
                self._stores[i] = None

    def _halt(self) -> None:
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _moved(self, number: int, place: StorePlace) -> LastValues | None:
        """The store of a partition, opened in another place; None where that failed: it is built again."""
        store, generation = self._stores[number], self._generations[number]
        if store is None:
            return None
        files, identity = self._followed.files, self._followed.identity
        try:
            store.close()
            path = place.new(number)
            files.rename(self._place.new(number), path)
            return LastValues.open(path, Identity(identity.uuid, number, generation), files=files)
        except (StoreUnusable, OSError) as e:
            self._warn_of_rebuild(number, e)
            self._forget(number)
            return None

    # -- the thread --------------------------------------------------------------------------------

    def _notice(self, state: State) -> None:
        if self._eager and not self._stop and time.monotonic() >= self._rests_until:
            with self._changed:
                self._start()
                self._changed.notify_all()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="keyfold-last-values", daemon=True)
            self._thread.start()

    def _reached(self, target: tuple[int, ...]) -> bool:
        """Whether all is applied below these offsets, or below the end where a rollback has cut the log."""
        state = self._followed.state
        return all(
            s is not None and s.applied >= min(t, end)
            for s, t, end in zip(self._stores, target, state.ends, strict=True)
        ) and not self._stale(state)

    def _run(self) -> None:
        try:
            while not self._stop:
                with self._changed:
                    if not self._due():
                        self._changed.wait(self._linger_seconds / 2)
                        continue
                with self._followed.pin() as state:
                    for number in range(len(self._stores)):
                        self._follow(state, number)
                with self._changed:
                    self._behind_since = None
                    if self._wanted is not None and self._reached(self._wanted):
                        self._wanted = None
                    self._changed.notify_all()
                self._sweep()
        except BaseException as e:
            log.error("changelog %s: last values stopped: %s", self._followed.root, type(e).__name__)
            with self._changed:
                self._failure = e
                self._rests_until = time.monotonic() + _REST_SECONDS
                self._changed.notify_all()

    def _due(self) -> bool:
        state = self._followed.state
        if self._wanted is not None or self._unswept:
            return True
        if self._reached(state.ends):
            return False
        now = time.monotonic()
        self._behind_since = self._behind_since or now
        return now - self._behind_since >= self._linger_seconds or self.lag_bytes() >= _LINGER_BYTES

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
        missed_delete = p.dropped_at > self._seen[number] and reading.misses_delete(p, store.applied)
        return missed_delete or (store.applied > self._started_at[number] < p.start)

    def _follow(self, state: State, number: int) -> None:
        """Bring one partition's store to the end of `state`, building it anew where it cannot be used."""
        for attempt in range(_REBUILDS_MAX + 1):
            try:
                self._apply(state, number)
                return
            except StoreUnusable as e:
                self._warn_of_rebuild(number, e)
                self._discard(number)
                if attempt == _REBUILDS_MAX:
                    raise StorageFailed(
                        "The last values cannot be built.", path=names.partition(self._followed.root, number),
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
        self._seen[number] = state.n
        self._generations[number] = p.generation
        if store.applied == 0:
            self._started_at[number] = p.start
        self._stores[number] = store
        steps = 0
        for batch, end in self._steps(p, number, max(store.applied, p.start)):
            store.apply(batch, end)
            steps += 1
            if self._stop:
                return
        if store.applied < p.end:
            # Retention has removed everything: without a note that this is applied, it would be waited for.
            store.apply(_NO_RECORDS, p.end)
        if steps > 1:
            # Much at once, so that nothing like it may come soon.
            store.rest()

    def _steps(self, p: PartitionState, number: int, offset: int) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Last records per key of consecutive stretches of the log, and where each stretch ends."""
        directory = names.partition(self._followed.root, number)
        yield from steps(
            reading.read_segments(self._followed.files, directory, p.segments, offset, p.end), offset, p.end
        )

    def _open(self, state: State, number: int) -> LastValues:
        """The first store of the partition that can be used, or a new one; the others are removed."""
        p, files, root = state.partitions[number], self._followed.files, self._followed.root
        identity = Identity(self._followed.identity.uuid, number, p.generation)
        usable: LastValues | None = None
        for path in self._place.found(number):
            if usable is None:
                try:
                    usable = LastValues.open(path, identity, files=files)
                    self._started_at[number] = 0 if p.start == 0 else -1
                    continue
                except StoreUnusable as e:
                    log.info("changelog %s: last values in %s cannot be used: %s", root, path.name, e)
            files.remove_tree(path)
        if usable is None:
            usable = LastValues.open(self._place.new(number), identity, files=files)
        self._stores[number] = usable
        return usable

    def _discard(self, number: int) -> None:
        store, self._stores[number] = self._stores[number], None
        self._forget(number)
        if store is not None:
            store.destroy()

    def _warn_of_rebuild(self, number: int, why: Exception) -> None:
        root = self._followed.root
        log.warning("changelog %s: last values of partition %d are rebuilt: %s", root, number, why)

    def _forget(self, number: int) -> None:
        self._seen[number] = -1
        self._started_at[number] = 0

    def _sweep(self) -> None:
        """Remove the stores of earlier writers, whose place was taken over."""
        while self._unswept:
            for older in self._place.found(self._unswept.pop())[1:]:
                self._followed.files.remove_tree(older)


def steps(batches: Iterable[pa.RecordBatch], offset: int, end: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """The records of [offset, end) as last records per key of consecutive stretches, and where each ends.

    A stretch has a bounded size, or is one batch: several together never exceed what an Arrow column holds.
    """
    applied = offset
    for few in gathered(batches, _STEP_ROWS, _STEP_BYTES):
        applied = few[-1].column("offset")[-1].as_py() + 1
        yield last_per_key(few[0] if len(few) == 1 else pa.concat_batches(few)), applied
    if applied < end:
        # What compaction has left out at the end of the log is done with, too.
        yield _NO_RECORDS, end
