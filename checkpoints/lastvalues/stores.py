"""The last-value stores of all partitions, in one RocksDB: opened, updated to a state, rebuilt.

The log is the source of truth. Records that a store lacks are read from it and applied in steps of bounded
size. A store that is missing, stale, damaged or ahead of the log is rebuilt from the start of the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import pyarrow as pa

from keyfold.checkpoints.compaction.fold import last_per_key
from keyfold.checkpoints.lastvalues.directories import StoreDirs
from keyfold.checkpoints.log import descriptors
from keyfold.checkpoints.manifest.identity import ChangelogMeta
from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.checkpoints.manifest.state import State
from keyfold.statestore import filenames
from keyfold.statestore.errors import StorageFailed, storage_errors
from keyfold.statestore.files import Files
from keyfold.statestore.kv.api import joined
from keyfold.statestore.rocksdb.database import Database
from keyfold.statestore.rocksdb.db import too_many_files
from keyfold.statestore.rocksdb.format import stored_keys
from keyfold.statestore.rocksdb.store import LastValues, StoreId, StoreUnusable, apply_together
from keyfold.statestore.segment.block import RECORD_SCHEMA
from keyfold.statestore.segment.reader import read_segments

log = logging.getLogger("keyfold")

#: Approximate bytes of the log per step, and maximum number of partitions. A step folds and applies them.
_STEP_BYTES: Final = 64 << 20
_STEP_PARTITIONS: Final = 64
_REBUILDS_MAX: Final = 3

_NO_LAST_VALUES: Final = "the last values cannot be read or written"
_COLUMNS: Final = ["offset", "timestamp", "key", "value"]
_NO_RECORDS: Final = pa.RecordBatch.from_pylist(
    [], schema=pa.schema([RECORD_SCHEMA.field(n) for n in _COLUMNS])
)


class Followed(Protocol):
    """What stores follow: the writer of this process, or what it publishes to other processes."""

    @property
    def files(self) -> Files: ...
    @property
    def root(self) -> Path: ...
    @property
    def identity(self) -> ChangelogMeta: ...
    @property
    def state(self) -> State: ...

    def pin(self) -> AbstractContextManager[State]:
        """The current state. Its files are kept until the context is left."""

    def on_change(self, listener: Callable[[State], None]) -> None:
        """Call `listener` with every newer state."""


class KeptStores:
    """The stores of all partitions. One thread opens, follows and closes; any number may ask and read.

    Attributes:
        clearings: goes up before rows of any store are removed to build them again. Who reads a store that is
            `ready`, and sees the same number before that and after, has read last values.
    """

    def __init__(self, followed: Followed, place: StoreDirs) -> None:
        self.clearings = 0
        self._followed = followed
        self._place = place
        self._database: Database | None = None
        self._stores: Sequence[LastValues] = ()
        count = len(followed.state.partitions)
        #: the last state that each store was brought to
        self._done: list[PartitionState | None] = [None] * count
        #: the manifest line of the state that a store was last read from, -1 where that is not known
        self._seen = [-1] * count
        self._started_at = [0] * count

    # -- asking ------------------------------------------------------------------------------------

    def ready(self, partition: int, p: PartitionState, below: int) -> LastValues | None:
        """The store of a partition if it has applied what is below this offset, or all of the log where a
        rollback has cut it.
        """
        stores = self._stores
        if not stores:
            return None
        store = stores[partition]
        if self._done[partition] is p:
            return store
        if store.applied < min(below, p.end) or self._must_rebuild(partition, store, p):
            return None
        return store

    def behind(self, state: State) -> list[int]:
        """The partitions whose stores must be updated."""
        pairs = zip(self._done, state.partitions, strict=True)
        return [partition for partition, (done, p) in enumerate(pairs) if done is not p]

    def below(self, state: State, ends: Sequence[int]) -> list[int]:
        """The partitions whose stores have not reached these offsets."""
        pairs = zip(state.partitions, ends, strict=True)
        return [n for n, (p, end) in enumerate(pairs) if self.ready(n, p, end) is None]

    def lag(self, partition: int, p: PartitionState) -> int:
        """How many offsets a store has not applied yet."""
        stores = self._stores  # another thread may remove them meanwhile
        applied = stores[partition].applied if stores else 0
        return max(0, p.end - max(applied, p.start))

    @property
    def database(self) -> Database | None:
        """Where all of them are, None where they are not open."""
        return self._database

    def _must_rebuild(self, partition: int, store: LastValues, p: PartitionState) -> bool:
        """Ahead of the log, of another generation, or possibly blind to a delete whose tombstone is gone, or
        to keys that retention dropped.
        """
        if store.applied > p.end or store.identity.generation != p.generation:
            return True
        missed_delete = p.dropped_at > self._seen[partition] and p.may_miss_delete(store.applied)
        return missed_delete or (store.applied > self._started_at[partition] < p.start)

    # -- following ---------------------------------------------------------------------------------

    def follow(self, state: State, partitions: Sequence[int]) -> Iterator[None]:
        """Bring stores to a state whose files are pinned, in this order, and build again what cannot be used.

        It stops after every step, and may be left there.

        Raises:
            Damaged: the log cannot be read. StorageFailed: the stores cannot be written.
        """
        for attempt in range(_REBUILDS_MAX + 1):
            try:
                yield from self._follow(state, partitions)
                return
            except StoreUnusable as e:
                exhausted = out_of_files(e, self._followed.root)
                if exhausted is not None:
                    self._release()
                    raise exhausted from e
                log.warning("changelog %s: rebuilding the last values: %s", self._followed.root, e)
                self.discard()
                if attempt == _REBUILDS_MAX:
                    raise StorageFailed(
                        "The last values cannot be written.", path=self._followed.root,
                        expected="a writable RocksDB database", found=str(e),
                        remedy="free or repair the disk; the log itself is not affected",
                    ) from e  # fmt: skip

    def _follow(self, state: State, partitions: Sequence[int]) -> Iterator[None]:
        database = self._database or self._open(state)
        step = Step(database, self._stores)
        large = 0
        for partition in partitions:
            p = state.partitions[partition]
            for batch, end in self._pieces(state, partition):
                size = 0 if batch is None else batch.nbytes
                if not step.has_room(partition, size):
                    large += step.is_large
                    step.apply()
                    yield
                step.add(partition, batch, size, end)
            step.finishes(partial(self._done.__setitem__, partition, p))
        step.apply()
        if large:
            # Much at once, so that nothing like it may come soon.
            database.rest(True)
        yield

    def _pieces(self, state: State, partition: int) -> Iterator[tuple[pa.RecordBatch | None, int]]:
        """What the store lacks, and the end of each piece; the last one says where the log ends."""
        p, store = state.partitions[partition], self._stores[partition]
        if self._must_rebuild(partition, store, p):
            log.info(
                "changelog %s: rebuilding the last values of partition %d", self._followed.root, partition
            )
            self._clear(partition, p.generation)
        self._seen[partition] = state.seq
        if store.applied == 0:
            self._started_at[partition] = p.start
        offset = max(store.applied, p.start)
        reached = store.applied
        directory = filenames.partition(self._followed.root, partition)
        identity = self._followed.identity
        columns, values = identity.columns, identity.value_type
        for batch in read_segments(self._followed.files, directory, p.segments, offset, p.end, values):
            if batch.num_rows:
                reached = batch.column("offset")[-1].as_py() + 1
                rows = batch.select(_COLUMNS)
                yield rows if columns is None else columns.packed(rows), reached
        if reached < p.end:
            # What compaction or retention has left out at the end of the log is done with, too.
            yield None, p.end

    def _clear(self, partition: int, generation: int) -> None:
        self._done[partition] = None
        store = self._stores[partition]
        store.invalidate()
        self.clearings += 1
        store.begin_again(generation)
        self._seen[partition] = -1
        self._started_at[partition] = 0

    # -- opening and closing -----------------------------------------------------------------------

    def _open(self, state: State) -> Database:
        """The first store that can be used, or a new one; the others are removed."""
        files, root = self._followed.files, self._followed.root
        self._place.prove()
        database: Database | None = None
        for path in self._place.found():
            if database is None:
                try:
                    database = self._opened(path, state)
                    continue
                except StoreUnusable as e:
                    if out_of_files(e, root) is not None:
                        raise
                    log.info("changelog %s: cannot use the last values in %s: %s", root, path.name, e)
            files.remove_tree(path)
        return database or self._opened(self._place.new(), state)

    def _opened(self, path: Path, state: State) -> Database:
        uuid = self._followed.identity.uuid
        database = Database.open(path, files=self._followed.files)
        try:
            folds = database.folds()
            other = next((f for f, _ in folds.values() if f.changelog != uuid), None)
            if other is not None:
                raise database.refused(uuid, other.changelog)
            stores = []
            for partition, p in enumerate(state.partitions):
                identity, applied = folds.get(partition, (StoreId(uuid, partition, p.generation), 0))
                stores.append(LastValues(database, identity, applied))
                self._seen[partition] = -1
                self._started_at[partition] = 0 if p.start == 0 or applied == 0 else -1
        except BaseException:
            database.release()
            raise
        self._done = [None] * len(stores)
        self._stores, self._database = tuple(stores), database
        return database

    def discard(self) -> None:
        """Remove the stores; they are built again when they are next brought to a state.

        Raises `WriterFenced` where they are another's by now.
        """
        database = self._release()
        if database is not None:
            self._place.prove()
            database.destroy()

    def _release(self) -> Database | None:
        """Close the stores without a flush. They are opened again when they are next brought to a state: a
        RocksDB that could not write accepts no more writes.
        """
        database, self._database = self._database, None
        self._done = [None] * len(self._done)
        self.clearings += 1
        self._stores = ()
        if database is not None:
            with suppress(StoreUnusable):
                database.release()
        return database

    def move(self, followed: Followed, place: StoreDirs) -> None:
        """Follow another source of the same log, with the same stores in another directory."""
        database, before = self._database, self._place
        self.clearings += 1
        self._followed, self._place = followed, place
        self._database, self._stores = None, ()
        self._done = [None] * len(self._done)
        if database is None:
            return
        seen, started_at = list(self._seen), list(self._started_at)
        try:
            database.close()
            for older in place.found():
                followed.files.remove_tree(older)
            followed.files.rename(before.new(), place.new())
            self._opened(place.new(), followed.state)
            self._seen, self._started_at = seen, started_at
        except (StoreUnusable, OSError) as e:
            log.warning("changelog %s: rebuilding the last values: %s", followed.root, e)

    def close(self) -> None:
        """Close the stores. The next writer opens them again."""
        if self._database is not None:
            with suppress(StoreUnusable):
                self._database.close()


def out_of_files(error: StoreUnusable, root: Path) -> StorageFailed | None:
    """The error to raise if too many files are open: the store is not damaged, so it is not rebuilt."""
    found = too_many_files(str(error.found))
    if found is None:
        return None
    return descriptors.too_many_files(found, root, _NO_LAST_VALUES)


@contextmanager
def files_told(root: Path) -> Iterator[None]:
    """Raises `StorageFailed` if a file of the log or of the stores cannot be read or written."""
    failed = storage_errors(
        "The last values cannot be brought up to date.", root,
        expected="a disk from which the log can be read", remedy="repair the disk, then read again",
    )  # fmt: skip
    with failed, descriptors.limit_told(root, _NO_LAST_VALUES):
        yield


class Step:
    """Records of some partitions that are folded and applied together."""

    def __init__(self, database: Database, stores: Sequence[LastValues]) -> None:
        self._database = database
        self._stores = stores
        self._clear()

    def _clear(self) -> None:
        self._pieces: list[tuple[int, pa.RecordBatch]] = []
        self._ends: dict[int, int] = {}
        self._bytes = 0
        self._finished: list[Callable[[], None]] = []

    @property
    def is_large(self) -> bool:
        """Whether it took about as many bytes as one step takes."""
        return self._bytes >= _STEP_BYTES // 2

    def has_room(self, partition: int, size: int) -> bool:
        if partition not in self._ends and len(self._ends) >= _STEP_PARTITIONS:
            return False
        # A larger one is applied alone: an Arrow column could not hold it together with others.
        return not self._pieces or self._bytes + size <= _STEP_BYTES

    def add(self, partition: int, batch: pa.RecordBatch | None, size: int, end: int) -> None:
        self._ends[partition] = end
        if batch is not None:
            self._pieces.append((partition, batch))
            self._bytes += size

    def finishes(self, then: Callable[[], None]) -> None:
        """Call `then` when all added records are applied."""
        self._finished.append(then)

    def apply(self) -> None:
        if self._ends:
            batches = [batch for _, batch in self._pieces] or [_NO_RECORDS]
            rows = joined(batches)
            if len(self._ends) == 1:
                ((partition, end),) = self._ends.items()
                self._stores[partition].apply(last_per_key(rows), end)
            else:
                numbers = np.array([partition for partition, _ in self._pieces], np.uint16)
                of_rows = np.repeat(numbers, [batch.num_rows for _, batch in self._pieces])
                keys = stored_keys(of_rows, rows.column("key"))
                stored = pa.RecordBatch.from_arrays(
                    [rows.column("offset"), rows.column("timestamp"), keys, rows.column("value")], _COLUMNS
                )
                ends = [(self._stores[partition], end) for partition, end in self._ends.items()]
                apply_together(self._database, last_per_key(stored), ends)
        for then in self._finished:
            then()
        self._clear()
