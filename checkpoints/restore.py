"""`restore`: the state of a changelog as of a commit, exactly: compacted section plus tail, folded to the
last values.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from keyfold.checkpoints import reading
from keyfold.checkpoints.fold import OffsetMap, compact, last_values
from keyfold.checkpoints.opening import View
from keyfold.checkpoints.points import At, ends_at, since_at
from keyfold.checkpoints.restore_listener import Bar, RestoreListener
from keyfold.checkpoints.selection import Selection
from keyfold.checkpoints.state import PartitionState
from keyfold.checkpoints.views import ViewLock
from keyfold.statestore import names
from keyfold.statestore.blocks import RECORD_SCHEMA
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.hashing import partition_of
from keyfold.statestore.kv import PartitionedStore
from keyfold.statestore.lastvalues import Identity as StoreIdentity
from keyfold.statestore.lastvalues import LastValues
from keyfold.statestore.remote import located
from keyfold.statestore.segment import Segment

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession

#: The column that tells deletes from upserts where changes are asked for, as in the data source.
DELETED = "_deleted"


def restore(
    path: str | Path,
    *,
    at: At = None,
    since: At = None,
    partitions: Sequence[int] | None = None,
    keys: Collection[object] | None = None,
    prefix: bytes | str | None = None,
    listener: RestoreListener | None = None,
    progress: bool = False,
    filesystem: Any = None,
    files: Files = LOCAL,
) -> RestoredState:
    """The state of the changelog at `path`, as of `at`; nothing is read before one of its `to_…` methods is
    called.

    The files of the view stay until the result is closed or forgotten. A writer may go on meanwhile.

    Args:
        path: a changelog, or a snapshot, which may also be a URL of pyarrow.fs or fsspec.
        at: a commit number, `(app_id, batch_id)`, an anchor's name, a time (the last commit not after it;
            without a time zone: UTC), an end offset for every partition as `{partition: offset}`, or None for
            the last commit.
        since: only what changed behind this point, deletes too: tables then have a column `_deleted`, and
            `to_dict` has None for a deleted key. What was put back to its old value counts as changed.
        partitions: only these.
        keys: only these: bytes, or for typed columns the key's value, a tuple where it has several columns.
        prefix: only keys that begin so.
        listener: is told how far it has come.
        progress: show a bar while reading.
        filesystem: a `pyarrow.fs.FileSystem` or an fsspec one, in which `path` is a path.

    Raises:
        NotAChangelog, Damaged, FormatTooNew: see there.
        CompactedAway: the exact state at `at` no longer exists, or a delete behind `since` is gone.
        ConfigError: there is no such commit, anchor or partition, or arguments contradict each other.
    """
    files, root = located(path, filesystem, files)
    with ExitStack() as stack:
        lock = ViewLock(files, root) if files.exists(root / names.IDENTITY) else None
        if lock is not None:
            stack.callback(lock.close)
        view = View(files, root)
        if lock is not None:
            lock.record(view.state.n)
        ends = ends_at(view.state, root, at)
        begins = None if since is None else since_at(view.state, root, since)
        selection = Selection.of(root, view.identity.columns, keys, prefix)
        wanted = set(selection.partitions(len(ends)) if partitions is None else partitions)
        for number in wanted:
            reading.partition_state(view.state, root, number)
        listeners = ([] if listener is None else [listener], progress)
        restored = RestoredState(files, root, view, ends, begins, tuple(sorted(wanted)), selection, listeners)
        stack.pop_all()
        restored.hold(lock)
        return restored


def state_batches(
    files: Files, directory: Path, segments: tuple[Segment, ...], end: int, unique_below: int = 0
) -> Iterator[pa.RecordBatch]:
    """The last record of every key of one partition below offset `end`, deletes left out, in offset order.

    `unique_below`: no two records below that offset have the same key, see `unique_below_of`.
    """
    return last_values(
        lambda: reading.read_segments(files, directory, segments, 0, end), min(unique_below, end)
    )


def unique_below_of(p: PartitionState) -> int:
    """How far passes have come, or the first anchor inside the clean section: below, no key occurs twice."""
    return min((p.unique_end, *p.splits))


class RestoredState:
    """The state of a changelog as of one commit. A context manager; closing it lets the cleaner delete its
    files.

    A changelog with typed columns gives them back as they were written, others give `key` and `value` bytes.
    """

    def __init__(
        self,
        files: Files,
        root: Path,
        view: View,
        ends: tuple[int, ...],
        begins: tuple[int, ...] | None,
        partitions: tuple[int, ...],
        selection: Selection,
        listeners: tuple[list[RestoreListener], bool],
    ) -> None:
        self.path = root
        #: end offset of each partition: the state is the fold of the records below
        self.ends = ends
        self.partitions = partitions
        self.columns = view.identity.columns
        self._begins = begins
        self._selection = selection
        self._files = files
        self._identity = view.identity
        self._state = view.state
        self._listeners, self._progress = listeners
        self._finalizer: weakref.finalize[[], RestoredState] | None = None

    def hold(self, lock: ViewLock | None) -> None:
        """Let go of `lock` when this is closed or forgotten."""
        self._finalizer = weakref.finalize(self, lock.close) if lock is not None else None

    def close(self) -> None:
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> RestoredState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The last record of every key, as bytes, partition by partition: offset, timestamp, key, value,
        headers. With `since` a null value is a delete.
        """
        with Bar(self._progress) as bar:
            for number in self.partitions:
                yield from self._told(number, [bar, *self._listeners])

    def to_arrow(self) -> pa.Table:
        """One row per key: the typed columns, or `key` and `value` as binary. Row order has no meaning."""
        batches = self._all()
        if self.columns is None:
            table = pa.Table.from_batches(batches, RECORD_SCHEMA).select(["key", "value"])
        else:
            columns = self.columns
            tables = [columns.decode(b.column("key"), b.column("value")) for b in batches]
            table = pa.concat_tables([columns.arrow_schema().empty_table(), *tables])
        if self._begins is None:
            return table
        deleted = [b.column("value").is_null() for b in batches]
        return table.append_column(DELETED, pa.chunked_array(deleted, pa.bool_()))

    def to_pandas(self) -> pd.DataFrame:
        """`to_arrow` as a pandas DataFrame, by Arrow's own conversion of types."""
        return self.to_arrow().to_pandas()

    def to_dict(self) -> dict[Any, Any]:
        """Raw: key bytes → value bytes. Typed: the key (a tuple where it has several columns) → column →
        value.
        """
        table = self.to_arrow()
        if self.columns is None:
            return dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
        keys = [table[name].to_pylist() for name in self.columns.keys]
        rows: list[Any] = table.drop_columns(list(self.columns.keys)).to_pylist()
        if not rows:
            rows = [{} for _ in range(table.num_rows)]
        if self._begins is not None:
            rows = [None if row.pop(DELETED) else row for row in rows]
        return dict(zip(keys[0] if len(keys) == 1 else zip(*keys, strict=True), rows, strict=True))

    def to_spark(self, spark: SparkSession) -> DataFrame:
        """The state as a DataFrame, with the types it was written with, read by Spark's tasks in parallel."""
        if self._begins is not None or self._selection != Selection():
            raise ConfigError(
                "Spark reads whole states.", path=self.path, expected="no since=, keys= and prefix=",
                found="one of them",
                remedy='filter the DataFrame, or read format("keyfold") with mode "changes"',
            )  # fmt: skip
        offsets = ",".join(str(e) for e in self.ends)
        reader = spark.read.format("keyfold").option("endOffsets", offsets)
        if len(self.partitions) < len(self.ends):
            reader = reader.option("partitions", ",".join(str(p) for p in self.partitions))
        return reader.load(str(self.path.resolve()))

    def to_store(self, path: str | Path) -> PartitionedStore:
        """A new RocksDB store of the state in the directory `path`, open: get, get_all, range, prefix, all,
        close.
        """
        target = Path(path)
        if self._begins is not None:
            raise ConfigError("A store holds a state, not changes.", path=target, remedy="leave since= out")
        if self._files.list_directory(target):
            raise ConfigError(
                "A store cannot be made there.", path=target, expected="an empty or missing directory",
                found="a directory with entries", remedy="choose another path",
            )  # fmt: skip
        self._files.make_directory(target)
        stores: dict[int, LastValues] = {}
        for number in self.partitions:
            identity = StoreIdentity(self._identity.uuid, number, self._state.partitions[number].generation)
            store = LastValues.open(target / f"partition-{number}", identity, files=self._files)
            pending = list(self._told(number, self._listeners))
            if pending:
                store.apply(pa.concat_batches(pending), self.ends[number])
            stores[number] = store
        count = len(self.ends)
        ordered = list(stores.values())
        place = {number: i for i, number in enumerate(stores)}
        return PartitionedStore(ordered, lambda key: place[partition_of(key, count)])

    def _told(self, number: int, listeners: Sequence[RestoreListener]) -> Iterator[pa.RecordBatch]:
        """One partition, with everybody told how far it has come."""
        start = self._state.partitions[number].start if self._begins is None else self._begins[number]
        start, end, restored = min(start, self.ends[number]), self.ends[number], 0
        for listener in listeners:
            listener.on_restore_start(self.path, number, start, end)
        for batch in self._partition(number):
            yield batch
            restored += batch.num_rows
            behind = batch.column("offset")[-1].as_py() + 1
            for listener in listeners:
                listener.on_batch_restored(self.path, number, behind, batch.num_rows, batch.nbytes)
        for listener in listeners:
            listener.on_restore_end(self.path, number, restored)

    def _partition(self, number: int) -> Iterator[pa.RecordBatch]:
        p, end = self._state.partitions[number], self.ends[number]
        directory = names.partition(self.path, number)
        begin = 0 if self._begins is None else min(self._begins[number], end)

        def source() -> Iterator[pa.RecordBatch]:
            read = reading.read_segments(self._files, directory, p.segments, begin, end)
            return self._selection.of_batches(read)

        if self._begins is None:
            return last_values(source, min(unique_below_of(p), end))
        return compact(source, OffsetMap.build(source, begin, (), None), 0)

    def _all(self) -> list[pa.RecordBatch]:
        """All partitions, two at a time."""
        with Bar(self._progress) as bar, ThreadPoolExecutor(2) as pool:
            listeners = [bar, *self._listeners]
            parts = pool.map(lambda number: list(self._told(number, listeners)), self.partitions)
            return [batch for part in parts for batch in part]
