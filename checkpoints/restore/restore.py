"""`restore`: the exact state of a changelog as of a commit. The compacted section and the tail are folded to
the last values.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from keyfold.checkpoints.compaction.fold import last_values
from keyfold.checkpoints.log import reader as reading
from keyfold.checkpoints.log.ahead import ahead
from keyfold.checkpoints.log.key_filter import Selection
from keyfold.checkpoints.log.reader_marks import ViewLock
from keyfold.checkpoints.log.recovery import View
from keyfold.checkpoints.log.rereading import Rereading, state_batches
from keyfold.checkpoints.manifest.identity import check_partitions, read_identity
from keyfold.checkpoints.manifest.resolve import At, apps_at, partition_state, resolve_ends, resolve_since
from keyfold.checkpoints.manifest.state import Commit
from keyfold.checkpoints.restore.listener import Bar, RestoreListener
from keyfold.checkpoints.restore.targets import write_changelog, write_store
from keyfold.checkpoints.restore.view_token import hand_over
from keyfold.checkpoints.snapshot.repository import newest
from keyfold.checkpoints.snapshot.snapshot import Location
from keyfold.statestore import arguments, filenames
from keyfold.statestore.closing import Closing
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.kv.typed_columns import LastValuesView
from keyfold.statestore.paths import AnyPath
from keyfold.statestore.remote_files import located, writable
from keyfold.statestore.schema.python_values import to_python
from keyfold.statestore.segment.block import RECORD_SCHEMA
from keyfold.statestore.segment.reader import read_segments
from keyfold.statestore.segment.writer import Segment

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    from pyspark.sql import DataFrame, SparkSession

#: The column that distinguishes deletes from upserts in changes, as in the data source.
DELETED = "_deleted"


def restore(
    path: AnyPath,
    *,
    at: At = None,
    since: At = None,
    partitions: Sequence[int] | None = None,
    keys: Collection[object] | None = None,
    prefix: bytes | str | tuple[object, ...] | None = None,
    listener: RestoreListener | None = None,
    progress: bool = False,
    filesystem: Any = None,
    files: Files = LOCAL,
) -> RestoredState:
    """The state of the changelog at `path`, as of `at`. Nothing is read before one of its `to_…` methods is
    called.

    The files of the view are kept until the result is closed or garbage collected. A writer may continue
    meanwhile.

    Args:
        path: a changelog, or a snapshot, which may also be a URL of pyarrow.fs or fsspec. For a folder of
            snapshots (`snapshot.dest`) the newest one. A relative path is resolved now.
        at: a commit number, `(app_id, batch_id)`, an anchor's name, a time (the last commit not after it;
            without a time zone: UTC), an end offset for each partition as `{partition: offset}`, or None for
            the last commit.
        since: only the changes after this point, including deletes. Tables then have a column `_deleted`, and
            `to_dict` has None for a deleted key. A key that was set back to its old value counts as changed.
        partitions: only these partitions.
        keys: only these keys: bytes, or for typed columns the key's value, a tuple if it has several columns.
        prefix: only keys that begin with this prefix: bytes or text, which the first key column then begins
            with, or for several key columns a tuple with the values of the first ones.
        listener: receives the progress.
        progress: show a progress bar while reading.
        filesystem: a `pyarrow.fs.FileSystem` or an fsspec one, in which `path` is a path.

    Raises:
        NotAChangelog, Damaged, UnsupportedFormat: the changelog cannot be read, see `keyfold.errors`.
        CompactedAway: the exact state at `at` no longer exists, or a delete between `since` and `at` was
            dropped.
        ConfigError: the commit, anchor or partition does not exist, or arguments contradict each other.
    """
    target_files = files
    place = newest(Location(*located(path, filesystem, files)))
    files, root = place.files, place.root
    with ExitStack() as stack:
        # Raises if there is no changelog, before a lock is looked for there.
        with reading.looked_at(root):
            read_identity(files, root)
            lock = ViewLock(files, root)
            stack.callback(lock.close)
            view = View(files, root)
            lock.record(view.state.seq)
        ends = resolve_ends(view.state, root, at)
        begins = None if since is None else resolve_since(view.state, root, since, ends)
        selection = Selection.of(root, view.identity.columns, keys, prefix)
        wanted = set(selection.partitions(len(ends)) if partitions is None else _partitions(root, partitions))
        for partition in wanted:
            partition_state(view.state, root, partition)
        listeners = ([] if listener is None else [listener], progress)
        restored = RestoredState(
            files, target_files, root, view, ends, begins, tuple(sorted(wanted)), selection, listeners
        )
        restored.hold(lock)
        stack.pop_all()
        return restored


class RestoredState(Closing):
    """The state of a changelog as of one commit. A context manager. Closing it allows the cleaner to delete
    its files, and makes calls that are still reading it fail.

    A changelog with typed columns returns them as they were written. Others return `key` and `value` as
    bytes.
    """

    def __init__(
        self,
        files: Files,
        target_files: Files,
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
        self._values = view.identity.value_type
        self._begins = begins
        self._selection = selection
        self._files = files
        #: the file operations for directories that targets are written to
        self._target_files = target_files if target_files.has_locks else LOCAL
        self._identity = view.identity
        self._state = view.state
        self._listeners, self._progress = listeners
        self._finalizer: weakref.finalize[[], RestoredState] | None = None

    def __repr__(self) -> str:
        closed = self._finalizer is None or not self._finalizer.alive
        fields = [] if self.columns is None else self.columns.schema_json["fields"]
        columns = f", columns {', '.join(f['name'] for f in fields)}" if fields else ""
        return (
            f"<RestoredState of {str(self.path)!r}, ends {list(self.ends)}{columns}"
            f"{', closed' if closed else ''}>"
        )

    def hold(self, lock: ViewLock) -> None:
        """Release `lock` when this is closed or garbage collected."""
        self._finalizer = weakref.finalize(self, lock.close)

    def close(self) -> None:
        """Release the view. A second call does nothing, also from another thread."""
        if self._finalizer is not None:
            self._finalizer()

    def _check_open(self) -> None:
        if self._finalizer is None or not self._finalizer.alive:
            raise ConfigError("This state was closed.", path=self.path, remedy="restore it again")

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The last record of each key, as bytes, partition by partition: offset, timestamp, key, value,
        headers. With `since`, a null value is a delete. After `close`, this and every other method that reads
        the state raises `ConfigError`.
        """
        with self._listening() as listeners:
            for partition in self.partitions:
                yield from self._told(partition, listeners)

    def records(
        self, partition: int, names: Sequence[str], values: pa.DataType, *, every: bool
    ) -> Iterator[pa.RecordBatch]:
        """The last record of each key of one partition, or `every` record of the log. `names` and `values`
        are the columns to read: see `SegmentReader`, and `state_batches` for those that it needs.
        """
        p, end = self._state.partitions[partition], self.ends[partition]
        directory = filenames.partition(self.path, partition)
        self._check_open()
        if every:
            found = read_segments(self._files, directory, p.segments, p.start, end, values, names)
        else:
            below = p.unique_below
            found = state_batches(
                self._files, directory, p.segments, end, values, below, self._selection, names
            )
        for batch in found:
            self._check_open()
            yield batch

    def count(self, *, every: bool) -> int | None:
        """The number of records that `records` gives, if the manifest says it; else None."""
        self._check_open()
        parts = [(self._state.partitions[n], self.ends[n]) for n in self.partitions]
        known = all(p.end == end and (every or p.unique_below >= end) for p, end in parts)
        if not known or not self._selection.is_whole:
            return None
        return sum(s.records - (0 if every else s.tombstones) for p, _ in parts for s in p.segments)

    def to_arrow(self) -> pa.Table:
        """One row per key: the typed columns, or `key` and `value` as binary. Row order has no meaning.

        Raises:
            ConfigError: with `since`, if the changelog has a column `_deleted` of its own.
        """
        if self._begins is None:
            return self._table(self._all())
        if self.columns is not None and DELETED in self.columns.arrow_schema().names:
            raise ConfigError(
                f"A table of changes needs a column {DELETED!r}, and the changelog already has one.",
                path=self.path, expected="no column of this name", found=DELETED,
                remedy="use to_dict() or batches(), which need no such column",
            )  # fmt: skip
        batches = self._all()
        return self._table(batches).append_column(DELETED, _deleted(batches))

    def _table(self, batches: Sequence[pa.RecordBatch]) -> pa.Table:
        columns = self.columns
        if columns is None:
            return pa.Table.from_batches(batches, RECORD_SCHEMA).select(["key", "value"])
        tables = [columns.decode(b.column("key"), b.column("value")) for b in batches]
        return pa.concat_tables([columns.arrow_schema().empty_table(), *tables])

    def to_pandas(self) -> pd.DataFrame:
        """`to_arrow` as a pandas DataFrame, with Arrow's own type conversion."""
        return self.to_arrow().to_pandas()

    def to_polars(self) -> pl.DataFrame:
        """`to_arrow` as a polars DataFrame, mostly without a copy. polars must be installed."""
        import polars as pl

        table = pl.from_arrow(self.to_arrow())
        assert isinstance(table, pl.DataFrame)
        return table

    def to_dict(self) -> dict[Any, Any]:
        """Raw: key bytes → value bytes. Typed: the key (a tuple if it has several columns) → column → value.
        A struct or an array in a key is a tuple, which `keys=` accepts too.

        Raises:
            BadRecord: a date or a time has no equivalent in Python.
        """
        batches = self._all()
        table = self._table(batches)
        if self.columns is None:
            return dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
        keys = [[_hashable(value) for value in to_python(table[name], name)] for name in self.columns.keys]
        values = table.drop_columns(list(self.columns.keys))
        rows: list[Any] = [{} for _ in range(table.num_rows)]
        if values.num_columns:
            rows = to_python(values.to_struct_array(), "")
        if self._begins is not None:
            deleted = _deleted(batches).to_pylist()
            rows = [None if gone else row for row, gone in zip(rows, deleted, strict=True)]
        return dict(zip(keys[0] if len(keys) == 1 else zip(*keys, strict=True), rows, strict=True))

    def to_spark(self, spark: SparkSession) -> DataFrame:
        """The state as a DataFrame, with the types it was written with, read by Spark's tasks in parallel.

        It is this state even if it is compacted away later, if Spark computes it within ten minutes or while
        this object is open.
        """
        self._check_open()
        if self._begins is not None or not self._selection.is_whole:
            raise ConfigError(
                "Spark can only read the whole state.", path=self.path,
                expected="no since=, keys= or prefix=",
                found="one of them",
                remedy='filter the DataFrame, or read format("keyfold") with mode "changes"',
            )  # fmt: skip
        if not self._files.has_locks:
            raise ConfigError(
                "Spark's tasks can only read from a local disk.", path=self.path,
                expected="a local directory",
                found="another file system",
                remedy="clone it here with Changelog.clone, or use to_arrow",
            )  # fmt: skip
        offsets = ",".join(str(e) for e in self.ends)
        reader = spark.read.format("keyfold").option("endOffsets", offsets)
        # A pass may compact this state away before Spark has planned.
        identity = self._identity.uuid
        view = hand_over(self._files, self.path, identity, self._state, self.ends, self.partitions)
        reader = reader.option("view", view.to_text())
        if len(self.partitions) < len(self.ends):
            reader = reader.option("partitions", ",".join(str(p) for p in self.partitions))
        return reader.load(str(self.path.resolve()))

    def to_store(self, path: AnyPath) -> LastValuesView:
        """Write the state to a new RocksDB store in the directory `path`. Returns it open: get, get_all,
        range, prefix, all, close. `open_store(path)` opens it again.
        """
        target = writable(path)
        self._check_state("A store", target)
        with self._ahead() as batches:
            return write_store(self._target_files, target, self._identity.uuid, batches, self.columns)

    def to_changelog(
        self, path: AnyPath, *, partitions: int | None = None, config: Mapping[str, object] | None = None
    ) -> Path:
        """Create a changelog at `path` with the state and with the last commit of every app, so that `resume`
        works on it. The number of partitions may differ. A part of a state (`keys`, `prefix`, or not all
        `partitions`) is written without apps, because a job that resumed from it would take it for the whole
        state. To copy a whole log, take a snapshot and use `Changelog.clone`.

        Args:
            path: an empty directory, or a path that does not exist.
            partitions, config: by default those of this changelog, but with an empty `snapshot.dest`.
                `config` changes single settings.

        Raises:
            ConfigError: `path` is not empty. StorageFailed: the changelog cannot be written.
        """
        target = writable(path)
        self._check_state("A changelog", target)
        if partitions is not None:
            check_partitions(partitions)
        with self._ahead() as batches:
            write_changelog(
                self._target_files, target, self._identity, batches, self._apps(),
                partitions=partitions, config=arguments.mapping("config", {} if config is None else config),
            )  # fmt: skip
        return target

    def _apps(self) -> list[Commit]:
        """The last commit of every app, if this is the whole state."""
        if not self._selection.is_whole or len(self.partitions) < len(self.ends):
            return []
        return apps_at(self._state, self.path, self.ends)

    def _check_state(self, what: str, target: Path) -> None:
        self._check_open()
        if self._begins is not None:
            raise ConfigError(
                f"{what} cannot be written from changes.", path=target, expected="a state", found="since=",
                remedy="leave since= out",
            )  # fmt: skip

    @contextmanager
    def _listening(self) -> Iterator[list[RestoreListener]]:
        """The listeners, including a progress bar if one is to be shown."""
        self._check_open()
        with Bar() if self._progress else nullcontext() as bar:
            yield [*self._listeners, *([] if bar is None else [bar])]

    @contextmanager
    def _ahead(self) -> Iterator[Iterator[pa.RecordBatch]]:
        """Like `batches`, but two partitions at a time, while earlier batches are being written."""
        with self._listening() as listeners:
            sources = [partial(self._told, partition, listeners) for partition in self.partitions]
            with closing(ahead(sources)) as batches:
                yield batches

    def _told(self, partition: int, listeners: Sequence[RestoreListener]) -> Iterator[pa.RecordBatch]:
        """One partition. Notifies the listeners."""
        start = self._state.partitions[partition].start if self._begins is None else self._begins[partition]
        start, end, restored = min(start, self.ends[partition]), self.ends[partition], 0
        for listener in listeners:
            listener.on_restore_start(self.path, partition, start, end)
        for batch in self._partition(partition):
            self._check_open()
            yield batch
            restored += batch.num_rows
            if not listeners:
                continue
            behind = batch.column("offset")[-1].as_py() + 1
            for listener in listeners:
                listener.on_batch_restored(self.path, partition, behind, batch.num_rows, batch.nbytes)
        for listener in listeners:
            listener.on_restore_end(self.path, partition, restored)

    def _partition(self, partition: int) -> Iterator[pa.RecordBatch]:
        if self._begins is None:
            return self.records(partition, RECORD_SCHEMA.names, self._values, every=False)
        p, end = self._state.partitions[partition], self.ends[partition]
        directory = filenames.partition(self.path, partition)
        begin = min(self._begins[partition], end)
        return self._changes(directory, p.segments, begin, end)

    def _changes(
        self, directory: Path, segments: tuple[Segment, ...], begin: int, end: int
    ) -> Iterator[pa.RecordBatch]:
        with Rereading(self._files, directory, segments, self._values) as read:

            def source() -> Iterator[pa.RecordBatch]:
                return read.between(begin, end, wanted=self._selection.filter)

            yield from last_values(source, begin, hold=read.hold, deletes=True)

    def _all(self) -> list[pa.RecordBatch]:
        """All partitions, two at a time."""
        with self._listening() as listeners, ThreadPoolExecutor(2) as pool:
            parts = pool.map(lambda partition: list(self._told(partition, listeners)), self.partitions)
            return [batch for part in parts for batch in part]


def _partitions(root: Path, partitions: Sequence[int]) -> list[int]:
    found = [arguments.whole("partitions", p) for p in arguments.several("partitions", partitions, "numbers")]
    if not found:
        raise ConfigError(
            "The list of partitions is empty.", path=root, expected="one or more partitions", found="none",
            remedy="leave `partitions=` out for all of them",
        )  # fmt: skip
    return found


def _deleted(batches: Sequence[pa.RecordBatch]) -> pa.ChunkedArray:
    return pa.chunked_array([b.column("value").is_null() for b in batches], pa.bool_())


def _hashable(value: Any) -> Any:
    """A component of a key as a key of a dict."""
    if isinstance(value, dict):
        return tuple(_hashable(item) for item in value.values())
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value
