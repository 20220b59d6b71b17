"""The engine: one writer per changelog and process, shared by all who open it, and its background work: last
values and cleaner.

`Engine.commit` is the one door to a commit: appends and all sinks use it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from keyfold.checkpoints import anchors
from keyfold.checkpoints.cleaner import pool as cleaner
from keyfold.checkpoints.cleaner.clean_pass import Aborted, PassStatistics
from keyfold.checkpoints.cleaner.manager import CleanerManager
from keyfold.checkpoints.cleaner.retention import apply_retention
from keyfold.checkpoints.lastvalues.updater import StateUpdater
from keyfold.checkpoints.log import compact_requests, ingest
from keyfold.checkpoints.log.recovery import NewChangelog, open_writer
from keyfold.checkpoints.log.writer import Batch, BlockFactory, Writer
from keyfold.checkpoints.manifest import idempotence
from keyfold.checkpoints.manifest.identity import ChangelogMeta, check_same_keys
from keyfold.checkpoints.manifest.resolve import At
from keyfold.checkpoints.manifest.state import Anchor, Commit, State
from keyfold.checkpoints.rollback import roll_back
from keyfold.checkpoints.snapshot.policy import SnapshotPolicy
from keyfold.checkpoints.transaction import Transaction, Turn
from keyfold.statestore.errors import ChangelogLocked, ConfigError, KeyfoldError
from keyfold.statestore.files import Files
from keyfold.statestore.kv.stores import ReadOnlyStore
from keyfold.statestore.schema.columns import Columns

#: How often a pass is restarted that was aborted because the log changed.
_PASSES_BROKEN_OFF_MAX: Final = 20

__all__ = ["Admit", "Engine", "PassStatistics", "acquire", "release"]

T = TypeVar("T")

#: What the commit of a batch will say; or the commit that holds the batch already. See `Engine.commit`.
Admit: TypeAlias = Callable[[State], Batch | Commit]


class Engine:
    """The writer of a changelog and its background work. `acquire` opens it, `release` gives it back."""

    def __init__(self, writer: Writer, updater: StateUpdater | None = None) -> None:
        self.writer = writer
        #: held by the thread that changes the records, from its first read to its commit
        self.transactions = Turn(writer.root, writer.ownership.process)
        self.cleaning = CleanerManager(writer)
        self.snapshots = SnapshotPolicy(writer)
        #: held by the cleaner's thread that does the chores
        self.chores = threading.Lock()
        self._updater = StateUpdater.of_writer(writer) if updater is None else updater
        cleaner.POOL.add(self)

    # -- what it is --------------------------------------------------------------------------------

    @property
    def identity(self) -> ChangelogMeta:
        return self.writer.identity

    @property
    def state(self) -> State:
        """What the manifest says now."""
        return self.writer.state

    @property
    def files(self) -> Files:
        return self.writer.files

    @property
    def root(self) -> Path:
        return self.writer.root

    @property
    def fenced(self) -> bool:
        """Whether every further write will be refused."""
        return self.writer.fenced

    @property
    def opened_epoch(self) -> int:
        """The epoch that its writer was opened with."""
        return self.writer.opened_epoch

    @property
    def exclusive(self) -> AbstractContextManager[object]:
        """Held by a caller that must see no commit between a look and an action."""
        return self.writer.exclusive

    def clock_ms(self) -> int:
        """The writer's time."""
        return self.writer.clock_ms()

    def pin(self) -> AbstractContextManager[State]:
        """The state of now, whose files stay until the context is left."""
        return self.writer.pin()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have `work` done on a thread of the writer."""
        return self.writer.pool.submit(work)

    # -- the last values ---------------------------------------------------------------------------

    def last_values(self) -> ReadOnlyStore:
        """The last values. Each read waits until the stores that it needs have reached the current commit."""
        return self._updater.current()

    def catch_up(self) -> None:
        """Wait until the last values have reached the commit that is current now."""
        self._updater.catch_up()

    @contextmanager
    def transaction(self, *, applied: bool = False) -> Iterator[Transaction]:
        """A transaction on the last values as of now; what becomes of its changes is the caller's."""
        base = self.last_values().snapshot()
        try:
            with Transaction(base, applied=applied) as transaction:
                yield transaction
        finally:
            base.close()

    def append(
        self,
        table: ingest.Tabular,
        app: str,
        batch: int | None,
        *,
        takes_turn: bool = True,
        packed: bool = False,
    ) -> Commit:
        """See `Changelog.append`; `takes_turn` as in `commit`, `packed` as in `ingest.normalize`."""
        writer = self.writer
        writer.ownership.check_usable("nothing of this batch was committed")
        self.wait_for_room()
        rows = ingest.table_of(table)
        columns = writer.identity.columns
        batches = ingest.normalize(rows, writer.clock_ms(), columns, packed=packed)
        digesting = writer.pool.submit(ingest.digest, batches, ingest.given_timestamps(rows, columns))
        parts = ingest.blocks_of(writer, batches)
        digest = digesting.result()

        def admit(state: State) -> Batch | Commit:
            last = state.apps.get(app)
            following = 0 if last is None else last.batch + 1
            new = Batch(app, following if batch is None else batch, digest=digest)
            return idempotence.appended(state, app, new.batch, digest) or new

        return self.commit(parts, admit, takes_turn=takes_turn)

    def blocks_of(self, table: ingest.Tabular) -> dict[int, BlockFactory]:
        """The rows of a table as `commit` takes them. Raises `BadRecord`."""
        columns = self.writer.identity.columns
        batches = ingest.normalize(table, self.writer.clock_ms(), columns, packed=columns is not None)
        return ingest.blocks_of(self.writer, batches)

    def commit(
        self,
        parts: Mapping[int, BlockFactory],
        admit: Admit,
        *,
        then: Callable[[], None] | None = None,
        takes_turn: bool = True,
    ) -> Commit:
        """Make a batch durable and visible. If it was committed before, return that commit, with `applied`
        False.

        Args:
            parts: the blocks, for each partition that gets records.
            admit: called with the state that the commit will follow. What it raises refuses the batch.
            then: called after the commit, before another one can be made.
            takes_turn: False where the caller's turn to change the records lasts from what it has read, or
                where there is nothing to change.

        Raises:
            ConfigError: it is this thread's turn already. What `admit` and `Writer.commit` raise.
        """
        with self.transactions if takes_turn else nullcontext(), self.writer.exclusive:
            admitted = admit(self.writer.state)
            if isinstance(admitted, Commit):
                return replace(admitted, applied=False)
            commit = self.writer.commit(parts, admitted)
            if then is not None:
                then()
            return commit

    def wait_for_room(self) -> None:
        """Wait while the last-value stores lag by more than `store.backlog.bytes`."""
        self._updater.wait_for_room()

    # -- which commits stay ------------------------------------------------------------------------

    def add_anchor(self, name: str, at: At) -> Anchor:
        """See `Changelog.anchor`."""
        return anchors.add_anchor(self.writer, name, at)

    def drop_anchor(self, name: str) -> Anchor:
        """See `Changelog.drop_anchor`."""
        return anchors.drop_anchor(self.writer, name)

    def pin_for_resume(self, commit: Commit) -> str:
        """See `anchors.pin_for_resume`."""
        return anchors.pin_for_resume(self.writer, commit)

    def roll_back(self, to: At) -> Commit:
        """See `Changelog.rollback`."""
        with self.transactions:
            return roll_back(self.writer, self.cleaning, to)

    # -- the cleaner -------------------------------------------------------------------------------

    def seal_active(self) -> None:
        """Seal all active segments, so that the next batch begins new ones."""
        self.writer.seal_active()

    def compact(self, *, full: bool = False) -> list[PassStatistics]:
        """Seal the active segments and clean every partition until nothing more can be folded, with
        `cleaner.threads` partitions at a time.

        Args:
            full: fold everything, see `Changelog.compact`.

        Raises:
            ConfigError: the cleanup policy does not compact, or cleaning is paused.

        An error of one partition's pass is raised when the other partitions are done.
        """
        config = self.writer.identity.config
        if "compact" not in config.cleanup_policy:
            raise ConfigError(
                "Compaction is disabled: the cleanup.policy keeps every change.",
                path=self.writer.root,
                expected="a cleanup.policy with compact",
                found=config.cleanup_policy,
                remedy="set cleanup.policy to compact if only last values should be kept",
            )
        self.writer.seal_active()
        partitions = range(len(self.writer.state.partitions))
        with ThreadPoolExecutor(max(1, min(config.cleaner_threads, len(partitions)))) as pool:
            passes = [pool.submit(self._clean_now, partition, full) for partition in partitions]
        return [one for done in passes for one in done.result()]

    def _clean_now(self, partition: int, full: bool) -> list[PassStatistics]:
        """Retention, or a new anchor, aborts a pass. Then another one begins."""
        for _ in range(_PASSES_BROKEN_OFF_MAX):
            try:
                return self.cleaning.clean_now(partition, full=full)
            except Aborted:
                if self.cleaning.is_stopped(partition):
                    break
        raise ConfigError(
            "The compaction was stopped.", path=self.writer.root, position=f"partition {partition}",
            expected="an open changelog with cleaning not paused, and few retention passes and rollbacks",
            found="the changelog was closed or paused, or retention or rollbacks aborted each attempt",
            remedy="compact again",
        )  # fmt: skip

    def do_chores(self) -> None:
        """What is due apart from passes: retention, segments too old to stay active, snapshots, requests. For
        the cleaner.
        """
        if not self.chores.acquire(blocking=False):
            return
        try:
            if not self.writer.fenced:
                apply_retention(self.writer, self.cleaning.is_stopped)
                self.writer.seal_overdue()
                self.snapshots.look()
                for request in compact_requests.open_requests(self.writer.files, self.writer.root):
                    compact_requests.serve(self.writer.files, self.writer.root, request, self._answer)
        finally:
            self.chores.release()

    def is_asked(self) -> bool:
        """Whether another process waits for an answer."""
        return not self.writer.fenced and bool(
            compact_requests.open_requests(self.writer.files, self.writer.root)
        )

    def _answer(self, full: bool) -> dict[str, object]:
        try:
            return {"passes": [asdict(p) for p in self.compact(full=full)]}
        except KeyfoldError as e:
            return {"error": str(e)}

    # -- settings ----------------------------------------------------------------------------------

    def configure(self, changes: Mapping[str, object]) -> None:
        """Change settings, durably. Raises `ConfigError`."""
        writer = self.writer
        with writer.exclusive:
            config = writer.identity.config.with_changes(changes)
            if config != writer.identity.config:
                identity = replace(writer.identity, config=config)
                writer.replace_identity(identity)
        cleaner.POOL.wake()

    def set_columns(self, columns: Columns) -> None:
        """Take added columns into `changelog.json`, before a line names a segment that has them. The caller
        has checked that they fit (`Columns.accepts`). A changelog without commits may get its first ones.

        Raises:
            ConfigError: it holds raw bytes.
        """
        writer = self.writer
        with writer.exclusive:
            if writer.identity.columns is None:
                check_same_keys(
                    writer.root, writer.identity, columns.keys, empty=writer.state.next_commit == 1
                )
            if columns != writer.identity.columns:
                identity = replace(writer.identity, columns=columns)
                writer.replace_identity(identity)

    def close(self) -> None:
        cleaner.POOL.remove(self)
        self.snapshots.close()
        self._updater.close()
        self.writer.close()


_engines: dict[Path, tuple[Engine, int]] = {}
_engines_lock = threading.Lock()


def acquire(
    files: Files,
    root: Path,
    creation: NewChangelog | None,
    clock_ms: Callable[[], int],
    *,
    steal: bool = False,
) -> Engine:
    """This process's writer of the changelog at `root`. Opens it, and creates the changelog, if necessary.

    A fenced writer is not returned again, nor a writer whose directory was moved, removed or created again.
    It is closed, and the changelog is opened again, which recovers it. A relative path is resolved now.
    """
    with _engines_lock:
        real = root.resolve()
        _close_misplaced(real)
        engine, users = _engines.get(real, (None, 0))
        if engine is not None and (engine.writer.fenced or engine.writer.files is not files):
            if not engine.writer.fenced:
                raise ChangelogLocked(
                    "This process has opened the changelog through another file system.", path=root,
                    expected="one writer", found="two", remedy="close the other one",
                )  # fmt: skip
            engine.close()
            engine = None
        if engine is None:
            engine, users = _engine_of(_opened(files, real, creation, clock_ms, steal)), 0
        _engines[real] = (engine, users + 1)
        return engine


def _engine_of(writer: Writer) -> Engine:
    try:
        return Engine(writer)
    except BaseException:
        writer.close()
        raise


def _opened(
    files: Files, real: Path, creation: NewChangelog | None, clock_ms: Callable[[], int], steal: bool
) -> Writer:
    """The writer at a path. A writer of this process may hold its lock under the name that the directory had
    before: then that one is closed first.
    """
    try:
        return open_writer(files, real, creation, clock_ms, steal=steal)
    except ChangelogLocked:
        elsewhere = [known for known, (engine, _) in _engines.items() if engine.writer.files is files]
        if not sum(map(_close_misplaced, elsewhere)):
            raise
        return open_writer(files, real, creation, clock_ms, steal=steal)


def _close_misplaced(real: Path) -> bool:
    """Close the writer of a path that leads elsewhere now: it could not write any more. Whether it did."""
    engine, _ = _engines.get(real, (None, 0))
    with suppress(OSError):
        if engine is not None and not engine.writer.ownership.is_placed():
            del _engines[real]
            engine.close()
            return True
    return False


def install(root: Path, make: Callable[[], Engine]) -> Engine:
    """The engine that `make` gives, as this process's only one of the changelog at `root`.

    The caller has the writer's lock, so an engine that is there has lost it.
    """
    with _engines_lock:
        real = root.resolve()
        _close_misplaced(real)
        engine = make()
        before, _ = _engines.get(real, (None, 0))
        if before is not None:
            before.writer.fence("another writer of this process has taken over")
            before.close()
        _engines[real] = (engine, 1)
        return engine


def release(engine: Engine) -> None:
    """Give an engine back; the last one closes it, once a transaction of another thread has ended.

    Raises `ConfigError` for the last one inside a transaction of this thread: then it is not given back.
    """
    with _engines_lock:
        if _has_others(engine):
            return
    with engine.transactions, _engines_lock:
        if not _has_others(engine):
            for real in [real for real, (known, _) in _engines.items() if known is engine]:
                del _engines[real]
                engine.close()


def _has_others(engine: Engine) -> bool:
    """Whether others still use it; then there is one user less now."""
    for real, (known, users) in _engines.items():
        if known is engine and users > 1:
            _engines[real] = (engine, users - 1)
            return True
    return False


def _after_fork() -> None:
    """A child starts without any of its parent's writers; what it has of them is never closed."""
    global _engines, _engines_lock
    _inherited.append(_engines)
    _engines, _engines_lock = {}, threading.Lock()


_inherited: list[object] = []
os.register_at_fork(after_in_child=_after_fork)
