"""The one writer of a changelog in a process: a micro-batch in, durable and visible in all partitions at
once.

Follow one write: `Writer.commit` → `ActiveSegments.append` (blocks into each touched partition's active
segment, synced in parallel) → `_acknowledge` (one manifest line, synced: **this is the commit**; no higher
claim; the head).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from keyfold.checkpoints.log.active_segments import NOTHING_COUNTS, ActiveSegments, BlockFactory
from keyfold.checkpoints.log.descriptors import Reserve
from keyfold.checkpoints.log.ownership import Ownership, remove_journals_below
from keyfold.checkpoints.log.reader_marks import Garbage
from keyfold.checkpoints.manifest import state as states
from keyfold.checkpoints.manifest.identity import ChangelogMeta, replace_identity
from keyfold.checkpoints.manifest.journal import JournalWriter, begin_journal
from keyfold.checkpoints.manifest.segment_lines import Line
from keyfold.checkpoints.manifest.state import Commit, State
from keyfold.statestore import filenames
from keyfold.statestore.errors import StorageFailed, WriterFenced
from keyfold.statestore.files import Files
from keyfold.statestore.segment.writer import SegmentWriter

__all__ = ["Batch", "BlockFactory", "Writer"]

log = logging.getLogger("keyfold")

#: At work on the partitions of a batch.
_THREADS: Final = 4
#: A journal longer than this, and than so many times its checkpoint, is rolled: the writer succeeds itself.
_JOURNAL_BYTES: Final = 4 << 20
_JOURNAL_CHECKPOINTS: Final = 4
#: Commits are let go of by so many or more at a time.
_PRUNED_MIN: Final = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """What a commit says of the batch it makes durable. `source`: the position the batch was read up to."""

    app: str
    batch: int
    query: str = ""
    source: tuple[str, ...] = ()
    digest: str = ""
    unanchor: tuple[str, ...] = ()


class Writer:
    """Appends commits and manifest lines for one epoch at a time. Thread-safe; one exists per changelog and
    process.

    Invariants:
        - `state` is what the manifest says up to its last line that was synced and not overtaken by a higher
          epoch.
        - After the first failed write or sync, or once it is not provably the writer any more, every further
          call raises, see `ownership`.
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
        #: held over a whole commit; also by callers that must see no commit between a look and an action
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
        """The current state; its files stay until the context is left."""
        self.garbage.hold(0)
        state = self.state
        self.garbage.hold(state.n)
        self.garbage.release(0)
        try:
            yield state
        finally:
            self.garbage.release(state.n)

    def is_active(self, partition: int, name: str) -> bool:
        """Whether the named segment is being appended to."""
        return partition in self._active and self._active[partition].segment.name == name

    @property
    def fenced(self) -> bool:
        """Whether every further write will be refused."""
        return self.ownership.fenced

    def seal_active(self) -> None:
        """Seal all active segments, so that the next batch begins new ones."""
        with self.exclusive:
            self.ownership.check_usable()
            self._seal_active(self._active.partitions)

    def seal_overdue(self) -> None:
        """Seal active segments that are older than `segment.ms` or `max.compaction.lag.ms`, so that they can
        be cleaned and deleted although nothing is appended any more.
        """
        with self.exclusive:
            self.ownership.check_usable()
            self._seal_active(self._active.overdue())

    def on_change(self, listener: Callable[[State], None]) -> None:
        """Call `listener` with the new state behind every line; it must return at once."""
        self._listeners.append(listener)

    # -- writing -----------------------------------------------------------------------------------

    def commit(self, parts: Mapping[int, BlockFactory], batch: Batch) -> Commit:
        """Make one micro-batch durable and visible; returns when it is both.

        Raises:
            StorageFailed: a write or sync failed; this writer is fenced now. WriterFenced: another writer has
            taken over, or the directory is not there any more. Both say whether nothing of the batch counts,
            or whether that is not known, because its line may be durable.
            StorageFailed because too many files are open, and anything that producing the blocks raises: then
            nothing of the batch counts, and the writer goes on.

        A failure after the batch has come to count, such as in rolling the journal, fences the writer and is
        not raised here.
        """
        with self.exclusive:
            self.ownership.check_usable(NOTHING_COUNTS)
            with self._active.too_many_files(NOTHING_COUNTS):
                self._reserve.fill()
            pieces = self._active.append(parts)
            line: Line = {
                "n": self.state.n + 1,
                "t": "commit",
                "commit": self.state.next_commit,
                "time": self.clock_ms(),
                "app": batch.app,
                "query": batch.query,
                "batch": batch.batch,
                "source": list(batch.source),
                "digest": batch.digest,
                "parts": {str(p): lines for p, lines in sorted(pieces.items()) if lines},
            }
            if batch.unanchor:
                line["unanchor"] = list(batch.unanchor)
            if len(self.state.commits) >= self._prune_at:
                line["keep"] = self.identity.config.commits_retained
            with self._reserve.released():
                self._acknowledge(line)
                if "keep" in line:
                    self._prune_at = self._next_pruning()
                commit = self.state.commits[-1]
                self._roll_if_long()
        return commit

    def write_line(self, line: Line) -> None:
        """Write one manifest line that is no commit; its `n` is filled in."""
        with self.exclusive:
            self.ownership.check_usable()
            with self._reserved("nothing was changed"):
                self._acknowledge({"n": self.state.n + 1, **line})
                self._roll_if_long()

    def new_segment(self, partition: int, base: int) -> SegmentWriter:
        """A new file beside other segments of a partition; it does not exist until a line names it."""
        return self._active.begin(partition, base)

    def replace_identity(self, identity: ChangelogMeta) -> None:
        """Replace `changelog.json`, as long as nobody has taken over."""
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
        """Seal the active segments, give up the lock. A fenced writer leaves everything as it is."""
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

    def _acknowledge(self, line: Line) -> None:
        after = states.apply(self.state, line)
        thing = "batch" if line["t"] == "commit" else "change"
        unknown = f"whether this {thing} counts is not known, its line may be durable"
        nothing = f"nothing of this {thing} counts"
        own = self.ownership
        with own.failures("the manifest", nothing):
            own.check_place(nothing)
        try:
            with own.failures("the manifest", unknown):
                self._journal.append(line)
                own.prove(unknown)
        except BaseException:
            # Whether the line is in the journal is not known, so nothing may follow it.
            own.fence("a manifest line may be incomplete")
            raise
        # It counts from here on: whoever takes over reads it. Readers may see it later.
        self.state = after
        try:
            with contextlib.suppress(StorageFailed), own.failures("the head of the manifest"):
                self._journal.publish(line["n"])
        except BaseException:
            own.fence("the head of the manifest may be incomplete")
            raise
        for listener in self._listeners:
            try:
                listener(after)
            except Exception as e:
                # An error here would say of a line that counts that it does not.
                log.error("changelog %s: what follows it was not told of line %d: %s", self.root, after.n, e)

    # -- rolling -----------------------------------------------------------------------------------

    def _seal_active(self, partitions: list[int]) -> None:
        if partitions:
            with self._active.too_many_files("nothing was sealed"):
                self._reserve.fill()
            lines = self._active.seal(partitions)
            parts = {str(p): [line] for p, line in lines.items()}
            with self._reserve.released():
                self._acknowledge({"n": self.state.n + 1, "t": "seal", "parts": parts})

    @contextlib.contextmanager
    def _reserved(self, outcome: str) -> Iterator[None]:
        """Some files can be opened in here. Raises `StorageFailed` with this outcome if none are left."""
        with self._active.too_many_files(outcome):
            self._reserve.fill()
        with self._reserve.released():
            yield

    def _next_pruning(self) -> int:
        """How many commits are kept when some are let go: many at a time, so that each costs little."""
        keep = self.identity.config.commits_retained
        return max(keep, len(self.state.commits)) + max(_PRUNED_MIN, keep // 2)

    def _roll_if_long(self) -> None:
        """What was acknowledged before counts, whatever becomes of this: a failure only fences."""
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
