"""The one writer of a changelog in a process. A micro-batch becomes durable and visible in all partitions at
once.

Follow one write: `Writer.commit` → `ActiveSegments.append` (blocks into the active segment of each touched
partition, synced in parallel) → `_acknowledge` (one manifest line, synced: **this is the commit**; then the
proof that there is no higher claim; then the head).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from keyfold.checkpoints.log.active_segments import NOTHING_COMMITTED, ActiveSegments, BlockFactory
from keyfold.checkpoints.log.descriptors import Reserve
from keyfold.checkpoints.log.ownership import Ownership, remove_journals_below
from keyfold.checkpoints.log.reader_marks import Garbage
from keyfold.checkpoints.manifest.entries import CommitEntry, Entry, SealEntry, line_of
from keyfold.checkpoints.manifest.identity import ChangelogMeta, replace_identity
from keyfold.checkpoints.manifest.journal import JournalWriter, begin_journal
from keyfold.checkpoints.manifest.state import Commit, State
from keyfold.statestore import filenames
from keyfold.statestore.errors import StorageFailed, WriterFenced
from keyfold.statestore.files import Files
from keyfold.statestore.segment.writer import SegmentWriter

__all__ = ["Batch", "BlockFactory", "Writer"]

log = logging.getLogger("keyfold")

#: Number of threads that write the partitions of a batch.
_THREADS: Final = 4
#: A journal longer than this, and than this many times its checkpoint, is rolled: the writer succeeds itself.
_JOURNAL_BYTES: Final = 4 << 20
_JOURNAL_CHECKPOINTS: Final = 4
#: Minimum number of old commits that are forgotten at a time.
_PRUNED_MIN: Final = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch of a commit. `source`: the source position up to which the batch was read."""

    app: str
    batch: int
    query: str = ""
    source: tuple[str, ...] = ()
    digest: str = ""
    unanchor: tuple[str, ...] = ()


class Writer:
    """Appends commits and other manifest lines, for one epoch at a time. Thread-safe. There is one per
    changelog and process.

    Invariants:
        - `state` is the manifest up to its last line that was synced and is not superseded by a higher epoch.
        - After the first failed write or sync, or when this is not provably the writer any more, every
          further call raises, see `ownership`.
    """

    def __init__(
        self,
        files: Files,
        root: Path,
        identity: ChangelogMeta,
        ownership: Ownership,
        journal: JournalWriter,
        state: State,
        clock_ms: Callable[[], int],
    ) -> None:
        self.files = files
        self.root = root
        self.identity = identity
        self.clock_ms = clock_ms
        self.state = state
        self.ownership = ownership
        self.garbage = Garbage(files, root, ownership)
        #: the epoch this writer was opened with; rolled journals have higher ones
        self.opened_epoch = state.epoch
        #: held during a whole commit, and by callers that must see no commit between a look and an action
        self.exclusive = ownership.exclusive
        self._journal = journal
        self._checkpoint_bytes = journal.size
        self._prune_at = self._next_pruning()
        self.pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="keyfold-append")
        self._active = ActiveSegments(self, self.pool)
        self._reserve = Reserve()
        self._listeners: list[Callable[[State], None]] = []

    # -- views -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def pin(self) -> Iterator[State]:
        """The current state. Its files are kept until the context is left."""
        self.garbage.hold(0)
        state = self.state
        self.garbage.hold(state.seq)
        self.garbage.release(0)
        try:
            yield state
        finally:
            self.garbage.release(state.seq)

    def is_active(self, partition: int, name: str) -> bool:
        """Whether the named segment is being appended to."""
        return partition in self._active and self._active[partition].segment.name == name

    @property
    def fenced(self) -> bool:
        """Whether every further write is refused."""
        return self.ownership.fenced

    def seal_active(self) -> None:
        """Seal all active segments, so that the next batch begins new ones."""
        with self.exclusive:
            self.ownership.check_usable()
            self._seal_active(self._active.partitions)

    def seal_overdue(self) -> None:
        """Seal active segments that are older than `segment.ms` or `max.compaction.lag.ms`. Then they can be
        cleaned and deleted even if nothing is appended any more.
        """
        with self.exclusive:
            self.ownership.check_usable()
            self._seal_active(self._active.overdue())

    def on_change(self, listener: Callable[[State], None]) -> None:
        """Call `listener` with the new state after every line. It must return at once."""
        self._listeners.append(listener)

    # -- writing -----------------------------------------------------------------------------------

    def commit(self, parts: Mapping[int, BlockFactory], batch: Batch) -> Commit:
        """Make one micro-batch durable and visible. Returns when it is both.

        Raises:
            StorageFailed: a write or sync failed, and this writer is fenced now. The message says whether the
                batch was not committed, or whether that is unknown because its line may be durable.
            WriterFenced: another writer has taken over, or the directory was removed or moved. The message
                says the same.
            StorageFailed: too many files are open. The batch was not committed, and the writer is not fenced.

        Errors raised while the blocks are produced pass through: the batch was not committed, and the writer
        is not fenced. A failure after the commit, such as in rolling the journal, fences the writer and is
        not raised here.
        """
        with self.exclusive:
            self.ownership.check_usable(NOTHING_COMMITTED)
            with self._active.too_many_files(NOTHING_COMMITTED):
                self._reserve.fill()
            pieces = self._active.append(parts)
            prunes = len(self.state.commits) >= self._prune_at
            entry = CommitEntry(
                self.state.next_commit, self.clock_ms(), batch.app, batch.query, batch.batch, batch.source,
                batch.digest, {p: grown for p, grown in sorted(pieces.items()) if grown}, batch.unanchor,
                keep=self.identity.config.commits_retained if prunes else None,
            )  # fmt: skip
            with self._reserve.released():
                self._acknowledge(entry)
                if prunes:
                    self._prune_at = self._next_pruning()
                commit = self.state.commits[-1]
                self._roll_if_long()
        return commit

    def write_line(self, entry: Entry) -> None:
        """Write one manifest line other than a commit."""
        with self.exclusive:
            self.ownership.check_usable()
            with self._reserved("nothing was changed"):
                self._acknowledge(entry)
                self._roll_if_long()

    def new_segment(self, partition: int, base: int, schema: pa.Schema) -> SegmentWriter:
        """A new, not active segment file of a partition. It is not in the log until a line names it."""
        return self._active.begin(partition, base, schema)

    def replace_identity(self, identity: ChangelogMeta) -> None:
        """Replace `changelog.json`, if no other writer has taken over."""
        with self.exclusive:
            own = self.ownership
            with self._reserved("nothing was changed"):
                own.prove()
                with own.failures(filenames.IDENTITY):
                    replace_identity(self.files, self.root, identity, self.state.epoch, own.prove)
            self.identity = identity

    def fence(self, reason: str) -> None:
        """Refuse every further write."""
        self.ownership.fence(reason)

    def close(self) -> None:
        """Seal the active segments and release the lock. A fenced writer changes nothing."""
        with self.exclusive:
            try:
                if not self.fenced and self.ownership.is_proven():
                    self._seal_active(self._active.partitions)
                    self.garbage.collect()
            finally:
                self.pool.shutdown()
                self._reserve.close()
                self._active.close()
                self._journal.close()
                self.ownership.close()

    # -- the manifest --------------------------------------------------------------------------------

    def _acknowledge(self, entry: Entry) -> None:
        after = self.state.apply(entry)
        line = line_of(after.seq, entry)
        done = "batch was committed" if isinstance(entry, CommitEntry) else "change was applied"
        unknown = f"whether this {done} is unknown: its manifest line may be durable"
        nothing = f"nothing of this {done}"
        own = self.ownership
        with own.failures("the manifest", nothing):
            own.check_place(nothing)
        try:
            with own.failures("the manifest", unknown):
                self._journal.append(line)
                own.prove(unknown)
        except BaseException:
            # It is unknown whether the line is in the journal, so nothing may follow it.
            own.fence("a manifest line may be incomplete")
            raise
        # The line is committed from here on: the next writer reads it. Readers may see it later.
        self.state = after
        try:
            with contextlib.suppress(StorageFailed), own.failures("the head of the manifest"):
                self._journal.publish(after.seq)
        except BaseException:
            own.fence("the head of the manifest may be incomplete")
            raise
        for listener in self._listeners:
            try:
                listener(after)
            except Exception as e:
                # An error raised here would claim that a committed line was not committed.
                log.error("changelog %s: a listener failed for manifest line %d: %s", self.root, after.seq, e)

    # -- rolling -----------------------------------------------------------------------------------

    def _seal_active(self, partitions: list[int]) -> None:
        if partitions:
            with self._active.too_many_files("nothing was sealed"):
                self._reserve.fill()
            sealed = self._active.seal(partitions)
            with self._reserve.released():
                self._acknowledge(SealEntry({p: (one,) for p, one in sealed.items()}))

    @contextlib.contextmanager
    def _reserved(self, outcome: str) -> Iterator[None]:
        """Reserve some open files inside this context. Raises `StorageFailed` with `outcome` if none are
        left.
        """
        with self._active.too_many_files(outcome):
            self._reserve.fill()
        with self._reserve.released():
            yield

    def _next_pruning(self) -> int:
        """How many commits to keep before some are forgotten: many at a time, so that each costs little."""
        keep = self.identity.config.commits_retained
        return max(keep, len(self.state.commits)) + max(_PRUNED_MIN, keep // 2)

    def _roll_if_long(self) -> None:
        """Roll a long journal. Earlier lines are acknowledged, so a failure only fences the writer."""
        if self._journal.size > max(_JOURNAL_BYTES, _JOURNAL_CHECKPOINTS * self._checkpoint_bytes):
            with contextlib.suppress(StorageFailed, WriterFenced):
                self._roll()

    def _roll(self) -> None:
        own, epoch = self.ownership, self.state.epoch + 1
        with own.failures("the manifest"):
            try:
                journal = JournalWriter(self.files, self.root, epoch)
            except FileExistsError:
                own.prove()
                raise
            try:
                state = begin_journal(
                    journal, self.state, epoch, self.identity, lambda: own.prove_claim(epoch, journal)
                )
            except BaseException:
                journal.close()
                raise
            self._journal.close()
            self._journal, self._checkpoint_bytes = journal, journal.size
            self.state, self._prune_at = state, self._next_pruning()
            own.enter(epoch, journal)
            remove_journals_below(self.files, self.root, epoch, own.directory)
