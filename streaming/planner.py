"""Plans: the committed bytes that a read covers, cut into pieces for Spark's tasks, under a lease that keeps
their files.

Spark plans in one Python process and reads in others, so a piece carries all that a task needs: it opens no
manifest.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from keyfold.checkpoints.log.reader_marks import now_ms
from keyfold.checkpoints.log.recovery import View
from keyfold.checkpoints.manifest.identity import ChangelogMeta
from keyfold.checkpoints.manifest.state import State
from keyfold.checkpoints.restore.view_token import ViewToken
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.files import Files
from keyfold.statestore.segment.writer import Segment
from keyfold.streaming import leases
from keyfold.streaming.leases import Lease
from keyfold.streaming.pieces import Piece

if TYPE_CHECKING:
    from keyfold.checkpoints.log.key_filter import Selection

#: A piece of a log is about this many bytes of segments.
_PIECE_BYTES: Final = 32 << 20


class Planner:
    """A reader's look at the changelog: the newest state, and plans, whose files one lease keeps.

    Args:
        selection: plans are for these keys; None for all.
    """

    def __init__(
        self, files: Files, root: Path, view_timeout_ms: int, selection: Selection | None = None
    ) -> None:
        self._selection = selection
        self.root = root
        self.files = files
        self._timeout_ms = view_timeout_ms
        self._view: View | None = None
        self._lease: Lease | None = None

    @property
    def identity(self) -> ChangelogMeta:
        if self._view is None:
            self._view = View(self.files, self.root)
        return self._view.identity

    def state(self) -> State:
        """The newest durable state; none of its files is kept."""
        if self._view is None:
            self._view = View(self.files, self.root)
            return self._view.state
        return self._view.refresh()

    def leased(self) -> State:
        """The newest durable state, whose files stay for `view_timeout_ms`, and longer while tasks renew the
        lease.

        A lease that holds already is on this state or on an older one: on that it keeps more.
        """
        if self._lease is not None and not self._lease.is_due(now_ms()):
            return self.state()
        with leases.looking(self.files, self.root) as lock:
            state = self.state()
            if lock is not None:
                lock.record(state.seq)
            self._lease = self._renewed(state.seq)
        return state

    def _renewed(self, seq: int) -> Lease | None:
        if self._lease is not None:
            try:
                renewed = leases.renew(self.files, self.root, self._lease, seq)
            except OSError:
                renewed = None
            if renewed is not None:
                return renewed
        return leases.take(self.files, self.root, seq, self._timeout_ms)

    def log_pieces(self, state: State, begin: Sequence[int], end: Sequence[int]) -> list[Piece]:
        """Pieces with the records of each partition from `begin` to `end`, in order; a large range is cut."""
        held = self._partitions(len(begin))
        return [
            self._piece(partition, tuple(_trimmed(s, first, last) for s in segments), first, last)
            for partition, p in enumerate(state.partitions)
            if partition in held
            for segments, first, last in pieces_of(p.segments, begin[partition], end[partition])
        ]

    def state_pieces(self, state: State, ends: Sequence[int], partitions: Container[int]) -> list[Piece]:
        """One piece for each partition: the last record of every key below its end."""
        found = []
        held = self._partitions(len(ends))
        for partition, (p, end) in enumerate(zip(state.partitions, ends, strict=True)):
            if partition in partitions and partition in held and end > p.start:
                segments = tuple(s for s in p.segments if s.base < end)
                whole = self._piece(partition, segments, p.start, end)
                found.append(replace(whole, folded=True, unique_below=p.unique_below))
        return found

    def handed_pieces(self, view: ViewToken, ends: Sequence[int], partitions: Container[int]) -> list[Piece]:
        """The same of an older view, whose own lease keeps the files; this planner's lease is not needed.

        Raises:
            ConfigError: the view is of another changelog.
        """
        if view.changelog != self.identity.uuid:
            raise ConfigError(
                "This view is of another changelog.", path=self.root, expected=self.identity.uuid,
                found=view.changelog, remedy="restore again",
            )  # fmt: skip
        self.close()
        lease = None
        if view.lease is not None:
            lease = Lease(view.lease, view.seq, view.expires_ms, view.timeout_ms)
            if lease.is_due(now_ms()):
                lease = self._prolonged(lease)
        held = self._partitions(len(ends))
        return [
            Piece(
                self.root,
                view.changelog,
                partition,
                segments,
                view.starts[partition],
                ends[partition],
                True,
                lease,
                view.unique_below[partition],
                self._selection,
            )
            for partition, segments in view.segments.items()
            if partition in partitions and partition in held and ends[partition] > view.starts[partition]
        ]

    def _prolonged(self, lease: Lease) -> Lease | None:
        """None where it is gone; the files may be held by other means, and a task that misses one says so."""
        try:
            return leases.renew(self.files, self.root, lease, lease.seq)
        except OSError:
            return lease

    def _piece(self, partition: int, segments: tuple[Segment, ...], begin: int, end: int) -> Piece:
        uuid, selection = self.identity.uuid, self._selection
        return Piece(
            self.root, uuid, partition, segments, begin, end, False, self._lease, selection=selection
        )

    def _partitions(self, count: int) -> frozenset[int]:
        """Those that can hold a wanted key."""
        return frozenset(range(count) if self._selection is None else self._selection.partitions(count))

    def close(self) -> None:
        """Give the lease up."""
        if self._lease is not None:
            leases.drop(self.files, self.root, self._lease)
            self._lease = None


def pieces_of(
    segments: Sequence[Segment], begin: int, end: int, piece_bytes: int = _PIECE_BYTES
) -> Iterator[tuple[tuple[Segment, ...], int, int]]:
    """Cut the offsets [begin, end) into ranges of about `piece_bytes`, each with the segments that hold it.

    Small segments go together, a large one is cut at offsets that share it out evenly.
    """
    held: list[Segment] = []
    first, size = begin, 0
    for segment in segments:
        low, high = max(begin, segment.base), min(end, segment.next)
        if low >= high or not segment.records:
            continue
        held.append(segment)
        span = segment.next - segment.base
        taken = segment.size * (high - low) // span
        while size + taken >= piece_bytes + piece_bytes // 2:
            cut = low + max(1, (piece_bytes - size) * span // segment.size)
            if cut >= high:
                break
            yield tuple(held), first, cut
            held, first, size = [segment], cut, 0
            low, taken = cut, segment.size * (high - cut) // span
        size += taken
        if size >= piece_bytes:
            yield tuple(held), first, high
            held, first, size = [], high, 0
    if held:
        yield tuple(held), first, end


def _trimmed(segment: Segment, begin: int, end: int) -> Segment:
    """The segment with only those marks that reading [begin, end) needs; there can be hundreds."""
    if len(segment.marks) < 3:
        return segment
    first = max((i for i, m in enumerate(segment.marks) if m.next_offset <= begin), default=0)
    last = next((i for i, m in enumerate(segment.marks) if m.next_offset >= end), len(segment.marks) - 1)
    return replace(segment, marks=segment.marks[first : last + 1])
