"""The one writer of a changelog in a process: a micro-batch in, durable and visible in all partitions at
once.

Follow one write: `Writer.commit` → `_append_partition` (blocks into each touched partition's active segment,
synced in parallel) → `_acknowledge` (one manifest line, synced: **this is the commit**; no higher claim; the
head).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from keyfold.checkpoints import state as states
from keyfold.checkpoints.identity import Identity, replace_identity
from keyfold.checkpoints.journal import JournalWriter, begin_journal
from keyfold.checkpoints.ownership import Ownership, remove_journals_below
from keyfold.checkpoints.segment_lines import Line, piece_line
from keyfold.checkpoints.state import Commit, State
from keyfold.checkpoints.views import Garbage
from keyfold.statestore import names
from keyfold.statestore.errors import StorageFailed, WriterFenced
from keyfold.statestore.files import Files
from keyfold.statestore.segment import Block, Segment, SegmentWriter

#: Given the offset of the first record, the blocks that a batch adds to one partition, in order.
Blocks = Callable[[int], Iterable[Block]]

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
        identity: Identity,
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
        self._active: dict[int, SegmentWriter] = {}
        self._segment_number = 0
        self._number_lock = threading.Lock()
        self.pool = ThreadPoolExecutor(4, thread_name_prefix="keyfold-append")
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
        active = self._active.get(partition)
        return active is not None and active.segment.name == name

    @property
    def fenced(self) -> bool:
        """Whether every further write will be refused."""
        return self.ownership.fenced

    def seal_active(self) -> None:
        """Seal all active segments, so that the next batch begins new ones."""
        with self.exclusive:
            self.ownership.check_usable()
            self._seal_active()

    def seal_overdue(self) -> None:
        """Seal active segments that are older than `segment.ms` or `max.compaction.lag.ms`, so that they can
        be cleaned and deleted although nothing is appended any more.
        """
        with self.exclusive:
            self.ownership.check_usable()
            due = [
                p for p, active in self._active.items()
                if active.segment.records and self._is_overdue(self.state.partitions[p].segments[-1])
            ]  # fmt: skip
            if due:
                self._seal_active(due)

    def on_change(self, listener: Callable[[State], None]) -> None:
        """Call `listener` with the new state behind every line; it must return at once."""
        self._listeners.append(listener)

    # -- writing -----------------------------------------------------------------------------------

    def commit(self, parts: Mapping[int, Blocks], batch: Batch) -> Commit:
        """Make one micro-batch durable and visible; returns when it is both.

        Raises:
            StorageFailed: a write or sync failed; this writer is fenced now. WriterFenced: another writer has
            taken over, or the directory is not there any more. Both say whether nothing of the batch counts,
            or whether that is not known, because its line may be durable.
            Anything that producing the blocks raises: then nothing of the batch counts, and the writer goes
            on.

        A failure after the batch has come to count, such as in rolling the journal, fences the writer and is
        not raised here.
        """
        with self.exclusive:
            self.ownership.check_usable("nothing of this batch counts")
            pieces = self._append(parts)
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
            self._acknowledge({"n": self.state.n + 1, **line})
            self._roll_if_long()

    def new_segment(self, partition: int, base: int) -> SegmentWriter:
        """A new file in a partition's directory; it does not exist until a line names it."""
        with self._number_lock:
            self._segment_number += 1
            number = self._segment_number
        directory = names.partition(self.root, partition)
        self.ownership.check_place("nothing of this batch counts")
        if not self.state.partitions[partition].segments and not self.files.is_directory(directory):
            self.files.make_directory(directory, below=self.root)
            self.files.sync_directory(self.root)
        name = names.segment_name(base, self.state.epoch, number)
        return SegmentWriter(self.files, directory, name, base, self.clock_ms())

    def replace_identity(self, identity: Identity) -> None:
        """Replace `changelog.json`, as long as nobody has taken over."""
        with self.exclusive:
            own = self.ownership
            own.prove()
            with own.failures(names.IDENTITY):
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
                    self._seal_active()
                    self.garbage.collect()
            finally:
                self.pool.shutdown()
                for active in self._active.values():
                    active.close()
                self._journal.close()
                self.ownership.close()

    # -- one commit, step by step ------------------------------------------------------------------

    def _append(self, parts: Mapping[int, Blocks]) -> dict[int, list[Line]]:
        """Blocks into the active segments, synced; returns what the commit line says of each partition."""
        futures: dict[int, Future[list[Line]]] = {}
        try:
            with self.ownership.failures("a segment", "nothing of this batch counts"):
                if len(parts) == 1:
                    return {p: self._append_partition(p, blocks) for p, blocks in parts.items()}
                futures = {p: self.pool.submit(self._append_partition, p, b) for p, b in parts.items()}
                return {p: future.result() for p, future in futures.items()}
        except BaseException:
            for future in futures.values():
                future.cancel()
            for future in futures.values():
                with contextlib.suppress(BaseException):
                    future.result()
            self._abandon(parts)
            raise

    def _append_partition(self, partition: int, blocks: Blocks) -> list[Line]:
        p = self.state.partitions[partition]
        # Only the last segment can be one that is appended to.
        named = p.segments[-1].name if p.segments else ""
        active = self._active.get(partition)
        current = p.segments[-1] if active is not None else None
        pieces: list[Line] = []
        next_offset = p.end
        grown = new_file = False
        for block in blocks(next_offset):
            if active is not None and current is not None and self._is_full(current):
                pieces.append(piece_line(active.seal(current), begun=current.name != named))
                active = None
                new_file = True
            if active is None:
                active = self._active[partition] = self.new_segment(partition, next_offset)
                new_file = True
            next_offset = block.last + 1
            current = active.append([block], next_offset)
            grown = True
        if grown and active is not None and current is not None:
            active.sync()
            pieces.append(piece_line(current, begun=current.name != named))
        if new_file:
            self.files.sync_directory(names.partition(self.root, partition))
        return pieces

    def _is_full(self, segment: Segment) -> bool:
        return segment.size >= self.identity.config.segment_bytes or self._is_overdue(segment)

    def _is_overdue(self, segment: Segment) -> bool:
        config = self.identity.config
        lag = min(config.segment_ms, config.max_compaction_lag_ms)
        return segment.records > 0 and self.clock_ms() - segment.created_ms >= lag

    def _abandon(self, parts: Iterable[int]) -> None:
        """Nothing of a batch counts: its bytes are dead, its segments are not appended to any more."""
        abandoned = [(p, self._active.pop(p)) for p in parts if p in self._active]
        for partition, active in abandoned:
            segments = self.state.partitions[partition].segments
            committed = next((s for s in segments if s.name == active.segment.name), None)
            # Only so that plain Arrow tools do not see the dead bytes; the manifest does not count them
            # anyway.
            with contextlib.suppress(OSError):
                active.abandon(committed)

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
            listener(after)

    # -- rolling -----------------------------------------------------------------------------------

    def _seal_active(self, only: Iterable[int] | None = None) -> None:
        parts: dict[str, list[Line]] = {}
        chosen = sorted(self._active if only is None else only)
        with self.ownership.failures("a segment"):
            for partition in chosen:
                active = self._active[partition]
                segment = self.state.partitions[partition].segments[-1]
                parts[str(partition)] = [piece_line(active.seal(segment), begun=False)]
                self.files.sync_directory(names.partition(self.root, partition))
        for partition in chosen:
            del self._active[partition]
        if parts:
            self._acknowledge({"n": self.state.n + 1, "t": "seal", "parts": parts})

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
