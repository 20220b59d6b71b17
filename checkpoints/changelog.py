"""`Changelog`: the log of changes of one keyed table, and its last values. Needs no Spark."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import pyarrow as pa

from keyfold.checkpoints import engine as engines
from keyfold.checkpoints.cleaner import pool
from keyfold.checkpoints.cleaner.clean_pass import PassStatistics
from keyfold.checkpoints.engine import Engine
from keyfold.checkpoints.log import ingest, reader, typed_rows
from keyfold.checkpoints.log.processes import OwnProcess
from keyfold.checkpoints.log.reader_marks import ViewLock, now_ms
from keyfold.checkpoints.log.recovery import NewChangelog, View
from keyfold.checkpoints.log.rereading import state_batches
from keyfold.checkpoints.manifest import idempotence
from keyfold.checkpoints.manifest.config import LogConfig
from keyfold.checkpoints.manifest.identity import (
    ChangelogMeta,
    check_partitions,
    check_same_keys,
    check_same_partitions,
    merged_config,
    read_identity,
)
from keyfold.checkpoints.manifest.resolve import At, check_no_missed_delete, partition_state, resolve_commit
from keyfold.checkpoints.manifest.state import Anchor, Commit, State
from keyfold.checkpoints.snapshot.repository import KeptSnapshot, kept_snapshots, newest, set_pin
from keyfold.checkpoints.snapshot.snapshot import Location, Snapshot, check_destination, clone, take
from keyfold.checkpoints.transaction import ColumnsTransaction
from keyfold.statestore import arguments, filenames
from keyfold.statestore.closing import Closing
from keyfold.statestore.errors import ConfigError, storage_errors
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.keys.partitioner import partition_of
from keyfold.statestore.kv.api import check_key
from keyfold.statestore.kv.arrow import ArrowStore
from keyfold.statestore.kv.stores import ReadOnlyStore
from keyfold.statestore.kv.typed_columns import ColumnsView, KeySerde, LastValuesView
from keyfold.statestore.paths import AnyPath
from keyfold.statestore.remote_files import located, writable
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.schema.python_values import to_python
from keyfold.statestore.segment.block import RECORD_SCHEMA

_KEY_AND_VALUE: Final = pa.schema([RECORD_SCHEMA.field("key"), RECORD_SCHEMA.field("value")])

T = TypeVar("T")


class Changelog(Closing):
    """An open changelog, to write (`mode="w"`) or to read (`mode="r"`). Use it as a context manager.

    A changelog has one writer: every `open` to write in one process shares it, and another process is
    refused. A reader, in any process, sees the last durable commit of the moment when it was opened, until
    `refresh` or `close`.

    Offsets are per partition. They begin at 0 and are dense as written. A record is in partition
    `pmod(xxhash64(key), partitions)` (XXH64 with seed 42, signed, as Spark computes it).
    """

    def __init__(
        self,
        path: Path,
        engine: Engine | None,
        view: View | None,
        view_lock: ViewLock | None,
        keys: tuple[str, ...] = (),
    ) -> None:
        self.path = path
        self._keys = keys
        self._process = OwnProcess(path)
        self._engine = engine
        self._view = view
        self._view_lock = view_lock
        self._closed = False
        self._store: ArrowStore | None = None

    def __repr__(self) -> str:
        if self._closed or not self._process.is_this():
            return f"<Changelog {str(self.path)!r}, closed>"
        state = self.state
        commit = state.commits[-1].number if state.commits else 0
        mode = "w" if self.is_writer else "r"
        records = sum(p.records for p in state.partitions)
        return (
            f"<Changelog {str(self.path)!r}, mode={mode!r}, {len(state.partitions)} partitions, "
            f"{records} records, commit {commit}>"
        )

    @classmethod
    def open(
        cls,
        path: AnyPath,
        *,
        mode: Literal["w", "r"] = "w",
        partitions: int | None = None,
        keys: str | Sequence[str] | None = None,
        columns: Columns | None = None,
        config: Mapping[str, object] | None = None,
        steal: bool = False,
        files: Files = LOCAL,
        clock_ms: Callable[[], int] = now_ms,
    ) -> Changelog:
        """Open the changelog at `path`. To write, it is created if it does not exist.

        Args:
            path: on a local disk. To read, also the URL of a snapshot elsewhere.
            mode: "w" to write (and read), "r" to read while another process may write.
            partitions: number of partitions for a new changelog (default 1). For an existing one it must
                match.
            keys: the key columns, for typed columns. A new changelog gets the columns of the first table that
                is appended. None for raw bytes, or to take an existing changelog as it is.
            columns: the typed columns of a new changelog, if they are known already.
            config: settings under Kafka's names, stored in the changelog; see `LogConfig`.
            steal: take over from a living writer, which is fenced.
            files, clock_ms: for tests.

        Raises:
            ConfigError: an invalid setting, another number of partitions, or other keys.
            NotAChangelog: the path does not hold a changelog, and none can be created there.
            UnsupportedFormat: the changelog has another version of the format.
            Damaged: the manifest or `changelog.json` does not match its checksum.
            ChangelogLocked: another process writes the changelog.
            StorageFailed: the disk is read-only, full or failed, or too many files are open.
        """
        arguments.flag("steal", steal)
        files, root = located(path, None, files) if mode == "r" else (files, writable(path, files))
        if partitions is not None:
            check_partitions(partitions)
        if columns is not None and not isinstance(columns, Columns):
            raise arguments.wrong_type("columns", columns, "a Columns")
        named = (keys,) if isinstance(keys, str) else tuple(arguments.several("keys", keys or (), "names"))
        config = {} if config is None else config
        LogConfig.parsed(config)
        if mode == "r":
            if config or partitions is not None or steal or named:
                raise ConfigError(
                    "A reader does not accept settings.", path=root, expected='only path= with mode="r"',
                    found="config=, partitions=, keys= or steal=",
                    remedy='leave them out, or open with mode="w"',
                )  # fmt: skip
            return cls._open_reader(files, root)
        if mode != "w":
            raise ConfigError(
                f"Unknown mode: {mode!r}.", expected="w or r", found=repr(mode), remedy="correct `mode=`"
            )
        with reader.looked_at(root):
            if files.exists(root / filenames.IDENTITY):
                check_same_partitions(root, read_identity(files, root), partitions)
            creation = NewChangelog(partitions or 1, columns, merged_config(files, root, config))
        engine = engines.acquire(files, root, creation, clock_ms, steal=steal)
        try:
            check_same_partitions(root, engine.identity, partitions)
            check_same_keys(root, engine.identity, named, empty=engine.state.next_commit == 1)
            if config:
                engine.configure(config)
        except BaseException:
            engines.release(engine)
            raise
        return cls(engine.root, engine, None, None, named)

    @classmethod
    def _open_reader(cls, files: Files, root: Path) -> Changelog:
        with reader.looked_at(root):
            read_identity(files, root)
            lock = ViewLock(files, root)
            try:
                view = View(files, root)
                lock.record(view.state.seq)
            except BaseException:
                lock.close()
                raise
        return cls(root, None, view, lock)

    # -- what it is --------------------------------------------------------------------------------

    @property
    def identity(self) -> ChangelogMeta:
        return self._open_engine().identity if self._view is None else self._view.identity

    @property
    def columns(self) -> Columns | None:
        """The typed columns, None for raw bytes."""
        return self.identity.columns

    @property
    def config(self) -> LogConfig:
        return self.identity.config

    @property
    def partitions(self) -> int:
        return self.identity.partitions

    @property
    def state(self) -> State:
        """The state of the manifest: as of now for a writer, as of the view for a reader."""
        return self._open_engine().state if self._view is None else self._view.state

    @property
    def engine(self) -> Engine:
        """The writer and its background work. Raises `ConfigError` for a reader."""
        return self._open_engine()

    @property
    def is_writer(self) -> bool:
        """Whether it is open to write."""
        return self._view is None

    @property
    def files(self) -> Files:
        """Its file operations."""
        return self._open_engine().files if self._view is None else self._view.files

    def partition(self, key: bytes) -> int:
        """The partition of a key's records."""
        check_key(key)
        return partition_of(key, self.partitions)

    def start_offsets(self) -> dict[int, int]:
        """Partition → log start offset."""
        return {i: p.start for i, p in enumerate(self.state.partitions)}

    def end_offsets(self) -> dict[int, int]:
        """Partition → log end offset (one past the last committed offset)."""
        return {i: p.end for i, p in enumerate(self.state.partitions)}

    def last_commit(self, app_id: str) -> Commit | None:
        """The last commit of an app, None if it has not committed anything."""
        return self.state.apps.get(arguments.text("app_id", app_id))

    def last_batch(self, app_id: str) -> int | None:
        """The id of the last committed batch of an app, None if it has not committed anything."""
        last = self.last_commit(app_id)
        return None if last is None else last.batch

    # -- writing -----------------------------------------------------------------------------------

    def append(self, table: ingest.Tabular, *, app_id: str = "append", batch_id: int | None = None) -> Commit:
        """Commit the rows of `table` as one batch, durable when this returns. Delivered again, it adds
        nothing.

        Args:
            table: columns `key`, `value` (null: a delete), perhaps `timestamp`, `headers`; in log order. For
                typed columns the changelog's own, value columns that are left out are null; a row with a true
                `_deleted` deletes its key.
            app_id: whose batch it is; batch ids are compared within one app.
            batch_id: rises from batch to batch; None takes the next one.

        Returns:
            The commit; the one from before (if not kept, the app's last), not `applied`, for a batch again.

        Raises:
            BadRecord: a null key (its row is named), a wrong column or type.
            BatchConflict: the batch id again with other rows, or passed over by a later one; a query's app.
            ConfigError: a transaction of this thread is open (one of another thread is waited for).
            StorageFailed, WriterFenced: see there.
        """
        app_id = idempotence.checked_app(app_id)
        batch_id = None if batch_id is None else idempotence.checked_batch(batch_id)
        engine = self._open_engine()
        engine.transactions.check()
        if not self._keys or engine.identity.columns is not None:
            return engine.append(table, app_id, batch_id)
        # A stream can be read only once.
        rows = ingest.table_of(table)
        with engine.transactions:
            # Another thread may have appended the first table while this one waited.
            if engine.identity.columns is None:
                columns = typed_rows.columns_of(rows, self._keys)
                # A table that is refused gives no columns.
                ingest.normalize(rows, engine.clock_ms(), columns)
                engine.set_columns(columns)
            return engine.append(rows, app_id, batch_id, takes_turn=False)

    @contextmanager
    def transaction(self, *, app_id: str, batch_id: int) -> Iterator[Any]:
        """A store over the last values whose reads see its own writes. Leaving the block commits the writes
        as one batch.

        If the block raises, nothing is committed. If the batch was committed before, `applied` is True and
        the writes of the block are discarded: delivering a batch again adds nothing.

        One transaction is open at a time. Other threads that append, roll back or begin a transaction wait
        until the block is left, so that no change comes between its reads and its writes.

        The store is a `Transaction`. With typed columns it takes and gives keys and dicts: see
        `ColumnsTransaction`.

        Raises:
            ConfigError: a transaction of this thread is open. See `append` for the other errors.
        """
        engine, app_id = self._open_engine(), idempotence.checked_app(app_id)
        batch_id = idempotence.checked_batch(batch_id)
        with engine.transactions:
            applied = idempotence.appended(engine.state, app_id, batch_id, "") is not None
            with engine.transaction(applied=applied) as transaction:
                # Known now: columns may have been added by a batch that this one has waited for, and while
                # its rows were read from the log. They may be in rows of the schema of now.
                columns = self._known_columns()
                yield transaction if columns is None else ColumnsTransaction(transaction, columns)
                if not applied:
                    changes = transaction.changes()
                    packed = columns is not None
                    self._open_engine().append(changes, app_id, batch_id, takes_turn=False, packed=packed)

    @classmethod
    def clone(
        cls, snapshot: AnyPath, path: AnyPath, *, filesystem: Any = None, files: Files = LOCAL
    ) -> Changelog:
        """Create a changelog at `path` from a snapshot, and open it to write: the same log, state and apps,
        with its own identity. `resume` works on it as on the lost changelog.

        Args:
            snapshot: a snapshot, or a folder of snapshots, of which the newest is used; a directory or a URL.
            path: an empty directory, or a path that does not exist.

        Raises:
            NotAChangelog: there is no complete snapshot. ConfigError: `path` is not empty.
            Damaged: a file of the snapshot does not match its checksum. StorageFailed: the disk failed or is
                full.
        """
        root = writable(path, files)
        source = newest(Location(*located(snapshot, filesystem, files)))
        clone(source, Location(files, root), uuid.uuid4().hex)
        return cls.open(root, files=files)

    # -- reading -----------------------------------------------------------------------------------

    @contextmanager
    def pinned(self) -> Iterator[State]:
        """The current state. Its files are kept until the context is left."""
        self._check_open()
        if self._view is not None:
            yield self._view.state
        else:
            with self._open_engine().pin() as state:
                yield state

    def read(
        self, partition: int, offset: int | None = None, to: int | None = None, *, follow: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Committed records of a partition from `offset` on (default: the log start offset), as of this call.

        Args:
            follow: the caller has applied every record below `offset` before and maintains a copy. Then an
                error is raised if a delete that it has not seen was compacted away.

        Yields:
            Arrow batches with columns offset, timestamp (ms), key, value (null: a delete), headers. Offsets
            ascend, with gaps if the cleaner has compacted the log.

        Raises:
            ConfigError: the partition does not exist, or the offset is beyond the end.
            CompactedAway: an offset below the log start offset, or with `follow` a delete that would be
                missed.
            Damaged: bytes do not match their checksum.
        """
        partition = arguments.whole("partition", partition)
        offset = None if offset is None else arguments.whole("offset", offset, least=0)
        to = None if to is None else arguments.whole("to", to, least=offset or 0)
        with ExitStack() as stack:
            state = stack.enter_context(self.pinned())
            if follow and offset is not None:
                check_no_missed_delete(state, self.path, partition, offset)
            batches = reader.read_partition(
                self.files, self.path, state, partition, offset, to, values=self.identity.value_type
            )
            return reader.Records(batches, stack.pop_all())

    def get(self, key: Any) -> Any:
        """The last committed value of a key, None if it has none.

        A writer reads its last-value store, after the store has caught up with the current commit in the
        key's partition. A reader searches the partition, newest block first, unless its `store` was used.

        Args:
            key: bytes. With typed columns the value of the key column, or a tuple if there are several.

        Returns:
            bytes. With typed columns a dict of the value columns.

        Raises:
            BadRecord: not a key of these columns; or a date or time that Python cannot represent.
        """
        columns = self.columns
        if columns is None and self._keys:
            return None
        raw = key if columns is None else KeySerde(columns).serialize(key)
        if self._view is None or self._store is not None:
            store = self._open_engine().last_values() if self._store is None else self._store
            found = store.get(raw)
            # A column may have been added until the row was read.
            columns = self.columns
            return found if found is None or columns is None else columns.decode_row(found)
        self._check_open()
        values = self.identity.value_type
        last = reader.last_value(self.files, self.path, self.state, self.partition(raw), raw, values)
        if last is None or columns is None:
            return None if last is None else last[0].as_py()
        return to_python(last, "")[0]

    def store(self) -> LastValuesView:
        """The last values: get, get_all, range, prefix, all. With typed columns keys and values are those of
        `get`; see `ColumnsView`.

        A writer's are in RocksDB; each read first catches up with the commit that is current then. A reader's
        are those of its view; the first call reads them into memory.
        """
        columns = self._known_columns()
        if self._view is None:
            engine = self._open_engine()
            store: ReadOnlyStore = engine.last_values()
            if columns is not None:
                return ColumnsView(store, columns, current=lambda: engine.identity.columns or columns)
        else:
            self._check_open()
            if self._store is None:
                self._store = self._in_memory(columns)
            store = self._store
        return store if columns is None else ColumnsView(store, columns)

    def _known_columns(self) -> Columns | None:
        """The typed columns, None for raw bytes. Raises `ConfigError` if the first table is not there yet."""
        columns = self.columns
        if columns is None and self._keys:
            raise ConfigError(
                "The changelog has no columns yet.", path=self.path,
                expected="a table with the keys " + ", ".join(self._keys), found="no commit",
                remedy="append a table first: it gives the columns",
            )  # fmt: skip
        return columns

    def _in_memory(self, columns: Columns | None) -> ArrowStore:
        """The last values of the view."""
        parts = []
        for partition, p in enumerate(self.state.partitions):
            directory = filenames.partition(self.path, partition)
            values = self.identity.value_type
            for batch in state_batches(self.files, directory, p.segments, p.end, values, p.unique_below):
                value = batch.column("value")
                packed = value if columns is None else columns.encode_rows(value)
                parts.append(pa.RecordBatch.from_arrays([batch.column("key"), packed], schema=_KEY_AND_VALUE))
        return ArrowStore(pa.Table.from_batches(parts, schema=_KEY_AND_VALUE))

    def refresh(self) -> None:
        """Move a reader to the newest durable commit. Does nothing for a writer."""
        self._check_open()
        if self._view is not None:
            self._store = None
            state = self._view.refresh(columns=True)
            if self._view_lock is not None:
                self._view_lock.record(state.seq)

    # -- compaction --------------------------------------------------------------------------------

    def compact(self, *, full: bool = False) -> list[PassStatistics]:
        """Compact what every partition holds now, whatever its dirty ratio. Returns the statistics of each
        pass; empty if there was nothing to compact.

        Args:
            full: treat all records as dirty and compact from the start of the log. This repairs a changelog
                in which `verify` has found a duplicate key in a section that the manifest says is unique.

        Raises:
            ConfigError: `cleanup.policy` does not contain "compact": events that must be kept would be lost.
        """
        return self.engine.compact(full=full)

    @contextmanager
    def cleaning_paused(self, partitions: Iterable[int] | None = None) -> Iterator[None]:
        """Inside the block, no cleaner pass runs over these partitions (None: all), and retention removes
        nothing of them. Running passes are stopped first. Blocks may overlap: a partition is cleaned again
        when the last block has ended.
        """
        chosen: Iterable[int] = range(len(self.state.partitions))
        if partitions is not None:
            chosen = [
                arguments.whole("partitions", p)
                for p in arguments.several("partitions", partitions, "numbers")
            ]
        for partition in chosen:
            partition_state(self.state, self.path, partition)
        with self.engine.cleaning.paused(chosen):
            yield

    def cleaner_metrics(self) -> dict[str, float]:
        """Metrics of this changelog's cleaner, under the names of Kafka's metrics; see
        `CleanerManager.metrics`. `DeadThreadCount` covers the whole process.
        """
        found = self.engine.cleaning.metrics()
        return {**found, "DeadThreadCount": float(pool.POOL.dead_threads)}

    # -- anchors -----------------------------------------------------------------------------------

    def anchors(self) -> dict[str, Anchor]:
        """Name → the commit whose exact state it keeps restorable. Includes the anchors of `resume`."""
        return dict(self.state.anchors)

    def anchor(self, name: str, at: At = None) -> Anchor:
        """Keep the exact state of a commit restorable under a name until `drop_anchor`. Durable when this
        returns.

        Args:
            at: the commit, as in `restore`; None for the last one.

        Raises:
            ConfigError: the name is invalid, or names another commit; or the commit does not exist.
            CompactedAway: the exact state at that commit no longer exists.
        """
        return self.engine.add_anchor(name, at)

    def drop_anchor(self, name: str) -> Anchor:
        """Drop the anchor of this name. Returns its commit. Raises `ConfigError` if the anchor does not
        exist.
        """
        return self.engine.drop_anchor(name)

    def rollback(self, to: At) -> Commit:
        """Remove all records and commits after a commit, durably. Returns the commit, which is the last one
        now.

        Their offsets are assigned again to the next records. A query whose batches were removed is refused
        until it starts from `resume`, which gives its state and source position as of the commit.

        Args:
            to: the commit, as in `restore`.

        Raises:
            CompactedAway: the exact state at that commit no longer exists.
            ConfigError: the commit does not exist, or a later commit has a named anchor; or a transaction of
                this thread is open.
        """
        return self.engine.roll_back(to)

    def snapshot(self, to: AnyPath, at: At = None, *, filesystem: Any = None) -> Snapshot:
        """Take a snapshot: a self-contained, read-only copy as of a commit. `restore`,
        `Changelog.open(mode="r")` and the data source read it directly; `Changelog.clone` creates a changelog
        from it.

        Args:
            to: a directory, or a URL of pyarrow.fs or fsspec. It is empty, or holds an earlier snapshot of
                this changelog, which the new one replaces when it is complete. Existing files are not written
                again. Files of earlier snapshots only are removed when they have no open readers; on stores
                without locks, such as object stores, when the next snapshot is complete.
            at: the commit, as in `restore`; None for the last one.
            filesystem: a `pyarrow.fs.FileSystem` or an fsspec one, in which `to` is a path.

        Raises:
            ConfigError: the commit does not exist, or `to` holds something else.
            CompactedAway: the exact state at that commit no longer exists.
            Damaged: a file does not match its checksums. StorageFailed: `to` cannot be written.
        """
        place = Location(*located(to, filesystem, self.files if self.files.has_locks else LOCAL))
        check_destination(place, self.identity)
        if self.is_writer and at is None:
            self.engine.seal_active()
        with self.pinned() as state:
            commit = resolve_commit(state, self.path, at)
            return take(Location(self.files, self.path), self.identity, state, commit, place)

    # -- the policy's snapshots --------------------------------------------------------------------

    def snapshots(self) -> list[KeptSnapshot]:
        """The complete snapshots in `snapshot.dest`, ascending by commit; empty without that setting. Raises
        `StorageFailed`.
        """
        return self._at_dest(lambda dest: kept_snapshots(dest, self.identity.uuid)) or []

    def pin_snapshot(self, commit: int) -> KeptSnapshot:
        """Keep the policy's snapshot of this commit until `unpin_snapshot`. Durable when this returns.

        Raises:
            ConfigError: there is no snapshot of it. StorageFailed: `snapshot.dest` cannot be read or written.
        """
        return self._pinned(commit, True)

    def unpin_snapshot(self, commit: int) -> KeptSnapshot:
        """Allow the policy to remove a snapshot again. Raises the errors of `pin_snapshot`."""
        return self._pinned(commit, False)

    def snapshot_status(self) -> dict[str, object]:
        """Status of the snapshot policy: `dest`; `last_commit`, 0 if there is no snapshot; `commits_behind`;
        `taken` and `failed` since the changelog was opened; `failure`, why the last attempt failed.
        """
        policy, state = self.engine.snapshots, self.state
        newest = state.commits[-1].number if state.commits else 0
        return {
            "dest": self.identity.config.snapshot_dest,
            "last_commit": policy.last_commit,
            "commits_behind": max(0, newest - policy.last_commit),
            "taken": policy.taken,
            "failed": policy.failed,
            "failure": policy.failure,
        }

    def _pinned(self, commit: int, pinned: bool) -> KeptSnapshot:
        found = self._at_dest(lambda dest: set_pin(dest, self.identity.uuid, commit, pinned))
        if found is None:
            raise ConfigError(
                "No snapshot policy is configured.", path=self.path,
                expected="a setting snapshot.dest", found="none", remedy="set snapshot.dest",
            )  # fmt: skip
        return found

    def _at_dest(self, work: Callable[[Location], T]) -> T | None:
        """The result of `work` for the location of the policy's snapshots. None if there is no location."""
        dest = self.identity.config.snapshot_dest
        if not dest:
            return None
        with storage_errors(
            "snapshot.dest cannot be accessed.", self.path,
            expected="a location that can be read and written",
            remedy="repair it, or set another snapshot.dest",
        ):  # fmt: skip
            return work(Location(*located(dest, None, self.files)))

    # -- end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the changelog. The last close of a writer in this process seals the log and releases the
        lock; a reader releases its view. Does nothing in a forked process.

        Raises:
            ConfigError: this is the last one of this process, and a transaction of this thread is open.
        """
        if self._closed or not self._process.is_this():
            return
        if self._engine is not None:
            engines.release(self._engine)
        self._closed = True
        if self._view_lock is not None:
            self._view_lock.close()

    def _check_open(self) -> None:
        self._process.check()
        if self._closed:
            raise ConfigError("This changelog was closed.", path=self.path, remedy="open it again")

    def _open_engine(self) -> Engine:
        self._check_open()
        if self._engine is None:
            raise ConfigError(
                "This changelog is open to read only.", path=self.path, expected='mode="w"', found='mode="r"',
                remedy="open it to write",
            )  # fmt: skip
        return self._engine
