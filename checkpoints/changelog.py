"""`Changelog`: one keyed table's log of changes and its last values. No Spark needed."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

import pyarrow as pa

from keyfold.checkpoints import engine as engines
from keyfold.checkpoints.engine import Engine
from keyfold.checkpoints.log import ingest, reader
from keyfold.checkpoints.log.processes import OwnProcess
from keyfold.checkpoints.log.reader_marks import ViewLock, now_ms
from keyfold.checkpoints.log.recovery import NewChangelog, View
from keyfold.checkpoints.log.rereading import state_batches
from keyfold.checkpoints.maintained import Maintained
from keyfold.checkpoints.manifest import idempotence
from keyfold.checkpoints.manifest.config import LogConfig
from keyfold.checkpoints.manifest.identity import (
    ChangelogMeta,
    check_partitions,
    check_same_partitions,
    read_identity,
)
from keyfold.checkpoints.manifest.resolve import check_no_missed_delete
from keyfold.checkpoints.manifest.state import Commit, State
from keyfold.checkpoints.snapshot.repository import newest
from keyfold.checkpoints.snapshot.snapshot import Location, clone
from keyfold.checkpoints.transaction import Transaction
from keyfold.statestore import arguments, filenames
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.keys.partitioner import partition_of
from keyfold.statestore.kv.api import check_key
from keyfold.statestore.kv.arrow import ArrowStore
from keyfold.statestore.kv.stores import ReadOnlyStore
from keyfold.statestore.paths import AnyPath
from keyfold.statestore.remote_files import located, writable
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.segment.block import RECORD_SCHEMA

_KEY_AND_VALUE: Final = pa.schema([RECORD_SCHEMA.field("key"), RECORD_SCHEMA.field("value")])


class Changelog(Maintained):
    """A changelog that is open, to write (`mode="w"`) or to read (`mode="r"`). Use it as a context manager.

    One writer exists per changelog: every `open` to write in one process shares it, another process is
    refused. A reader, in any process, sees the last durable commit of the moment it was opened until
    `refresh` or `close`.

    Offsets are per partition, begin at 0 and are dense as written. A record is in partition
    `pmod(xxhash64(key), partitions)` (XXH64 with seed 42, signed, as Spark computes it).
    """

    def __init__(
        self, path: Path, engine: Engine | None, view: View | None, view_lock: ViewLock | None
    ) -> None:
        self.path = path
        self._process = OwnProcess(path)
        self._host = engine
        self._view = view
        self._view_lock = view_lock
        self._closed = False
        self._store: ArrowStore | None = None

    @classmethod
    def open(
        cls,
        path: AnyPath,
        *,
        mode: Literal["w", "r"] = "w",
        partitions: int | None = None,
        columns: Columns | None = None,
        config: Mapping[str, object] | None = None,
        steal: bool = False,
        files: Files = LOCAL,
        clock_ms: Callable[[], int] = now_ms,
    ) -> Changelog:
        """Open the changelog at `path`; to write, it is created where there is none.

        Args:
            path: on a local disk; to read also the URL of a snapshot elsewhere.
            mode: "w" to write (and read), "r" to read beside a writer.
            partitions: of a new changelog (default 1); an existing one must have as many.
            columns: the typed columns of a new changelog; None for raw bytes.
            config: settings by Kafka's names, kept in the changelog; see `LogConfig`.
            steal: take over from a living writer, which is fenced.
            files, clock_ms: for tests.

        Raises:
            ConfigError: a setting or the number of partitions is refused.
            NotAChangelog, FormatTooNew, Damaged, ChangelogLocked, StorageFailed: see there.
        """
        arguments.flag("steal", steal)
        files, root = located(path, None, files) if mode == "r" else (files, writable(path, files))
        if partitions is not None:
            check_partitions(partitions)
        if columns is not None and not isinstance(columns, Columns):
            raise arguments.wrong_type("columns", columns, "a Columns")
        changes = LogConfig().with_changes({} if config is None else config)
        if mode == "r":
            if config or partitions is not None or steal:
                raise ConfigError(
                    "A reader has no settings.", path=root, expected='only path= with mode="r"',
                    found="config=, partitions= or steal=", remedy='leave them out, or open with mode="w"',
                )  # fmt: skip
            return cls._open_reader(files, root)
        if mode != "w":
            raise ConfigError(
                "There is no such mode.", expected="w or r", found=repr(mode), remedy="correct it"
            )
        with reader.looked_at(root):
            if files.exists(root / filenames.IDENTITY):
                check_same_partitions(root, read_identity(files, root), partitions)
        creation = NewChangelog(partitions or 1, columns, changes)
        engine = engines.acquire(files, root, creation, clock_ms, steal=steal)
        try:
            check_same_partitions(root, engine.writer.identity, partitions)
            if config:
                engine.configure(config)
        except BaseException:
            engines.release(engine)
            raise
        return cls(engine.writer.root, engine, None, None)

    @classmethod
    def _open_reader(cls, files: Files, root: Path) -> Changelog:
        with reader.looked_at(root):
            read_identity(files, root)
        lock = ViewLock(files, root)
        try:
            view = View(files, root)
            lock.record(view.state.n)
        except BaseException:
            lock.close()
            raise
        return cls(root, None, view, lock)

    # -- what it is --------------------------------------------------------------------------------

    @property
    def identity(self) -> ChangelogMeta:
        return self._open_host().writer.identity if self._view is None else self._view.identity

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
        """What the manifest says: as of now for a writer, as of the view for a reader."""
        return self._open_host().writer.state if self._view is None else self._view.state

    @property
    def engine(self) -> Engine:
        """The writer and what works behind it. Raises `ConfigError` for a reader."""
        return self._open_host()

    @property
    def is_writer(self) -> bool:
        """Whether it is open to write."""
        return self._view is None

    @property
    def files(self) -> Files:
        """Its file operations."""
        return self._open_host().writer.files if self._view is None else self._view.files

    def partition(self, key: bytes) -> int:
        """The partition that records of this key are in."""
        check_key(key)
        return partition_of(key, self.partitions)

    def start_offsets(self) -> dict[int, int]:
        """Partition → the first offset that can be read."""
        return {i: p.start for i, p in enumerate(self.state.partitions)}

    def end_offsets(self) -> dict[int, int]:
        """Partition → one past the last committed offset."""
        return {i: p.end for i, p in enumerate(self.state.partitions)}

    def last_commit(self, app_id: str) -> Commit | None:
        """The last commit of an app, None where it has made none."""
        return self.state.apps.get(arguments.text("app_id", app_id))

    def last_batch(self, app_id: str) -> int | None:
        """The id of the last committed batch of an app, None where it has committed none."""
        last = self.last_commit(app_id)
        return None if last is None else last.batch

    # -- writing -----------------------------------------------------------------------------------

    def append(self, table: ingest.Tabular, *, app_id: str = "append", batch_id: int | None = None) -> Commit:
        """Commit the rows of `table` as one batch, durable when this returns. Delivered again, it adds
        nothing.

        Args:
            table: columns `key`, `value` (null: a delete), perhaps `timestamp`, `headers`; in log order.
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
        engine = self._open_host()
        engine.transactions.check()
        return engine.append(table, app_id, batch_id, engine.transactions)

    @contextmanager
    def transaction(self, *, app_id: str, batch_id: int) -> Iterator[Transaction]:
        """A store over the last values whose reads see its own writes; leaving the block commits them as one
        batch.

        An exception inside commits nothing. Where the batch was committed before, `applied` is True and what
        the block writes is dropped: delivering a batch again adds nothing.

        One transaction is open at a time: another thread that appends, rolls back or begins a transaction
        waits until the block is left, so that no change comes between what it reads and what it writes.

        Raises:
            ConfigError: a transaction of this thread is open. What `append` raises.
        """
        engine, app_id = self._open_host(), idempotence.checked_app(app_id)
        batch_id = idempotence.checked_batch(batch_id)
        with engine.transactions:
            applied = idempotence.appended(engine.writer.state, app_id, batch_id, "") is not None
            with engine.transaction(applied=applied) as transaction:
                yield transaction
                if not applied:
                    self._open_host().append(transaction.changes(), app_id, batch_id, nullcontext())

    @classmethod
    def clone(
        cls, snapshot: AnyPath, path: AnyPath, *, filesystem: Any = None, files: Files = LOCAL
    ) -> Changelog:
        """A new changelog at `path` from a snapshot, open to write: the same log, state and apps, with an
        identity of its own. `resume` works on it as on the one that was lost.

        Args:
            snapshot: a snapshot, or a folder of them, of which it is the newest; a directory or a URL.
            path: an empty or missing directory.

        Raises:
            NotAChangelog: there is no whole snapshot. ConfigError: `path` is taken.
            Damaged: a file of the snapshot is not as it was written. StorageFailed: see there.
        """
        root = writable(path, files)
        source = newest(Location(*located(snapshot, filesystem, files)))
        clone(source, Location(files, root), uuid.uuid4().hex)
        return cls.open(root, files=files)

    # -- reading -----------------------------------------------------------------------------------

    @contextmanager
    def pinned(self) -> Iterator[State]:
        """The state of now, whose files stay until the context is left."""
        self._check_open()
        if self._view is not None:
            yield self._view.state
        else:
            with self._open_host().writer.pin() as state:
                yield state

    def read(
        self, partition: int, offset: int | None = None, to: int | None = None, *, follow: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Committed records of a partition from `offset` on (default: the log's start), as of this call.

        Args:
            follow: the caller has applied everything below `offset` before and keeps something in step: then
                it is told if a delete that it has not seen was compacted away.

        Yields:
            Arrow batches with columns offset, timestamp (ms), key, value (null: a delete), headers; offsets
            ascend, with gaps where the cleaner has folded.

        Raises:
            ConfigError: no such partition, or an offset beyond the end.
            CompactedAway: an offset below the log's start, or with `follow` a delete that would be missed.
            Damaged: bytes do not match their checksum.
        """
        partition = arguments.whole("partition", partition)
        offset = None if offset is None else arguments.whole("offset", offset, least=0)
        to = None if to is None else arguments.whole("to", to, least=offset or 0)
        with ExitStack() as stack:
            state = stack.enter_context(self.pinned())
            if follow and offset is not None:
                check_no_missed_delete(state, self.path, partition, offset)
            batches = reader.read_partition(self.files, self.path, state, partition, offset, to)
            return reader.Records(batches, stack.pop_all())

    def get(self, key: bytes) -> bytes | None:
        """The last committed value of a key, None where it has none.

        A writer asks its last-value store, which first catches up with the commit that is current now, in
        the key's partition. A reader looks through that partition, newest block first, unless it has asked
        for its `store`.
        """
        if self._view is None:
            return self._open_host().last_values().get(key)
        self._check_open()
        if self._store is not None:
            return self._store.get(key)
        return reader.last_value(self.files, self.path, self.state, self.partition(key), key)

    def store(self) -> ReadOnlyStore:
        """The last values: get, get_all, range, prefix, all.

        A writer's are in RocksDB, and each read of them first catches up with the commit that is current
        then. A reader's are those of its view, which are read into memory with the first call.
        """
        if self._view is None:
            return self._open_host().last_values()
        self._check_open()
        if self._store is None:
            parts = (
                batch.select(["key", "value"])
                for number, p in enumerate(self.state.partitions)
                for batch in state_batches(
                    self.files,
                    filenames.partition(self.path, number),
                    p.segments,
                    p.end,
                    p.unique_below,
                )
            )
            self._store = ArrowStore(pa.Table.from_batches(parts, schema=_KEY_AND_VALUE))
        return self._store

    def refresh(self) -> None:
        """Let a reader see the newest durable commit. Nothing to do for a writer."""
        self._check_open()
        if self._view is not None:
            self._store = None
            state = self._view.refresh()
            if self._view_lock is not None:
                self._view_lock.record(state.n)

    # -- end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give up the writer (the last of this process seals the log and gives up the lock) or the view. Does
        nothing in a process that was forked.

        Raises:
            ConfigError: the last of this process, inside a transaction of this thread.
        """
        if self._closed or not self._process.is_this():
            return
        if self._host is not None:
            engines.release(self._host)
        self._closed = True
        if self._view_lock is not None:
            self._view_lock.close()

    def __enter__(self) -> Changelog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        self._process.check()
        if self._closed:
            raise ConfigError("This changelog was closed.", path=self.path, remedy="open it again")

    def _open_host(self) -> Engine:
        self._check_open()
        if self._host is None:
            raise ConfigError(
                "This changelog is open to read only.", path=self.path, expected='mode="w"', found='mode="r"',
                remedy="open it to write",
            )  # fmt: skip
        return self._host
