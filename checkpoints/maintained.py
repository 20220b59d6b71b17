"""What is done to a changelog besides appending and reading: compaction, anchors, rollback, snapshots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from keyfold.checkpoints import anchors as anchoring
from keyfold.checkpoints.cleaner import pool
from keyfold.checkpoints.cleaner.clean_pass import PassStatistics
from keyfold.checkpoints.engine import Engine
from keyfold.checkpoints.manifest.identity import ChangelogMeta
from keyfold.checkpoints.manifest.resolve import At, partition_state, resolve_commit
from keyfold.checkpoints.manifest.state import Anchor, Commit, State
from keyfold.checkpoints.rollback import roll_back
from keyfold.checkpoints.snapshot.repository import KeptSnapshot, kept_snapshots, set_pin
from keyfold.checkpoints.snapshot.snapshot import Location, Snapshot, check_destination, take
from keyfold.statestore import arguments
from keyfold.statestore.errors import ConfigError, StorageFailed
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.paths import AnyPath
from keyfold.statestore.remote_files import located

T = TypeVar("T")


class Maintained(ABC):
    """The part of `Changelog` that looks after it."""

    path: Path

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The writer and what works behind it. Raises `ConfigError` for a reader."""

    @property
    @abstractmethod
    def is_writer(self) -> bool:
        """Whether it is open to write."""

    @property
    @abstractmethod
    def files(self) -> Files:
        """Its file operations."""

    @property
    @abstractmethod
    def identity(self) -> ChangelogMeta:
        """What `changelog.json` says."""

    @property
    @abstractmethod
    def state(self) -> State:
        """What the manifest says."""

    @abstractmethod
    def pinned(self) -> AbstractContextManager[State]:
        """The state of now, whose files stay until the context is left."""

    def compact(self, *, full: bool = False) -> list[PassStatistics]:
        """Fold what every partition holds now, whatever its dirty ratio; what each pass did. Nothing where
        nothing can be folded.

        Args:
            full: take no record for folded, and go over the log from its start. It repairs a changelog in
                which `verify` has found a key twice where the manifest says that none is.

        Raises:
            ConfigError: `cleanup.policy` has no "compact": folding would lose events that should stay.
        """
        return self.engine.compact(full=full)

    @contextmanager
    def cleaning_paused(self, partitions: Iterable[int] | None = None) -> Iterator[None]:
        """No cleaner pass goes over these partitions (None: all) inside the block; passes under way are
        stopped first. Blocks may overlap: a partition is cleaned again when the last one has ended.
        """
        chosen: Iterable[int] = range(len(self.state.partitions))
        if partitions is not None:
            chosen = [
                arguments.whole("partitions", p)
                for p in arguments.several("partitions", partitions, "numbers")
            ]
        for number in chosen:
            partition_state(self.state, self.path, number)
        with self.engine.cleaning.paused(chosen):
            yield

    def cleaner_metrics(self) -> dict[str, float]:
        """How the cleaner of this changelog stands, under the names of Kafka's metrics; see
        `CleanerManager.metrics`. `DeadThreadCount` is of the whole process.
        """
        found = self.engine.cleaning.metrics()
        return {**found, "DeadThreadCount": float(pool.POOL.dead_threads)}

    # -- anchors -----------------------------------------------------------------------------------

    def anchors(self) -> dict[str, Anchor]:
        """Name → the commit whose exact state it keeps restorable; those of `resume` are among them."""
        return dict(self.state.anchors)

    def anchor(self, name: str, at: At = None) -> Anchor:
        """Keep the exact state of a commit restorable under a name until `drop_anchor`; durable when this
        returns.

        Args:
            at: the commit, as in `restore`; None for the last one.

        Raises:
            ConfigError: the name cannot be used, or another commit has it; or there is no such commit.
            CompactedAway: the exact state at that commit no longer exists.
        """
        return anchoring.add_anchor(self.engine.writer, name, at)

    def drop_anchor(self, name: str) -> Anchor:
        """Let the commit go that has this name; returns what it named. Raises `ConfigError` where none has
        it.
        """
        return anchoring.drop_anchor(self.engine.writer, name)

    def rollback(self, to: At) -> Commit:
        """Take everything behind a commit back, durably; returns the commit, which is the last one now.

        Offsets behind it are given again to what is appended next. A query whose batches were taken back is
        refused until it starts from `resume`, which gives its state and source position as of the commit.

        Args:
            to: the commit, as in `restore`.

        Raises:
            CompactedAway: the exact state at that commit no longer exists.
            ConfigError: there is no such commit, or a named anchor lies behind it; or a transaction of this
                thread is open.
        """
        engine = self.engine
        with engine.transactions:
            return roll_back(engine.writer, engine.cleaning, to)

    def snapshot(self, to: AnyPath, at: At = None, *, filesystem: Any = None) -> Snapshot:
        """A copy as of a commit, self-contained and only to be read: `restore`, `Changelog.open(mode="r")`
        and the data source take it as it is, `Changelog.clone` makes a changelog of it.

        Args:
            to: a directory, or a URL of pyarrow.fs or fsspec; empty, or with an earlier snapshot of this
                changelog, which the new one replaces once it is complete. Files that are there are not
                written again. What only earlier ones held goes once no reader of theirs is open; where there
                are no locks, as on object stores, once the next one is complete.
            at: the commit, as in `restore`; None for the last one.
            filesystem: a `pyarrow.fs.FileSystem` or an fsspec one, in which `to` is a path.

        Raises:
            CompactedAway, ConfigError: there is no such commit, or its state is not exact any more; or
                something else is at `to`.
            Damaged: a file does not match its checksums. StorageFailed: `to` cannot be written.
        """
        place = Location(*located(to, filesystem, self.files if self.files.has_locks else LOCAL))
        check_destination(place, self.identity)
        if self.is_writer and at is None:
            self.engine.writer.seal_active()
        with self.pinned() as state:
            commit = resolve_commit(state, self.path, at)
            return take(Location(self.files, self.path), self.identity, state, commit, place)

    # -- the policy's snapshots --------------------------------------------------------------------

    def snapshots(self) -> list[KeptSnapshot]:
        """The whole snapshots in `snapshot.dest`, ascending by commit; none without that setting. Raises
        `StorageFailed`.
        """
        return self._at_dest(lambda dest: kept_snapshots(dest, self.identity.uuid)) or []

    def pin_snapshot(self, commit: int) -> KeptSnapshot:
        """Keep the policy's snapshot of this commit until `unpin_snapshot`; durable when this returns.

        Raises:
            ConfigError: there is none of it. StorageFailed: `snapshot.dest` cannot be read or written.
        """
        return self._pinned(commit, True)

    def unpin_snapshot(self, commit: int) -> KeptSnapshot:
        """Let the policy remove a snapshot again. Raises as `pin_snapshot` does."""
        return self._pinned(commit, False)

    def snapshot_status(self) -> dict[str, object]:
        """How the policy stands: `dest`; `last_commit`, 0 where there is no snapshot; `commits_behind`;
        `taken` and `failed` since it was opened; `failure`, why the last try came to nothing.
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
                "This changelog has no snapshots of a policy.", path=self.path,
                expected="a setting snapshot.dest", found="none", remedy="set it",
            )  # fmt: skip
        return found

    def _at_dest(self, work: Callable[[Location], T]) -> T | None:
        """What `work` gives for the place of the policy's snapshots, None where there is no such place."""
        dest = self.identity.config.snapshot_dest
        if not dest:
            return None
        try:
            return work(Location(*located(dest, None, self.files)))
        except OSError as e:
            raise StorageFailed(
                "The snapshots cannot be looked at.", path=e.filename or self.path,
                expected="a snapshot.dest that can be read and written",
                found=f"{type(e).__name__}: {e.strerror or e}", remedy="repair it, or set another one",
            ) from e  # fmt: skip
