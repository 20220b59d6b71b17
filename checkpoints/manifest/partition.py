"""The manifest's state of one partition."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from keyfold.checkpoints.manifest.segment_lines import Line, segment_from, segment_line
from keyfold.statestore.segment.writer import Segment


@dataclass(frozen=True, slots=True)
class CleanMark:
    """A completed cleaner pass: it reached `clean_end` at `time_ms`, which dates the tombstones below."""

    clean_end: int
    time_ms: int


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition's log.

    These invariants hold after every line, whatever was folded, aborted, rolled back, retained or configured:

    1. `start` <= `unique_end` <= `clean_end` <= `end`, and `start` < every split < `clean_end`.
    2. **Dense**: every offset in [`clean_end`, `end`) has the record that was committed there.
    3. **Exact**: for every position from `clean_end` on, and for every split, the records below it fold to
       the same state as all records that were committed in [`start`, position).
    4. **Unique**: below `unique_end` no key occurs twice between two neighbouring splits, or between one of
       them and `start` or `unique_end`.

    So a position may cut a pass only if it `is_exact`. Another position is no split, and records on its two
    sides would both be kept where invariant 4 promises one.

    Attributes:
        segments: in offset order; the last may be active.
        start, end: log start offset and log end offset (one past the last committed record).
        clean_end: records below may have been folded by the cleaner (Kafka: first dirty offset).
        unique_end: keys are unique up to here. Less than `clean_end` after an aborted pass, or after a pass
            that began lower because of a split that no anchor needs any more, and had no memory for all later
            keys.
        passes: date the tombstones for their delete horizons; ascending.
        splits: anchor offsets that kept older records of a key inside the clean section, ascending. A split
            that no anchor needs any more remains until a pass has gone over it.
        swept_end: at most `unique_end`. The last pass removed the tombstones below that were past their
            delete horizon. For those that remain, a split keeps an older record of their key.
        dropped_tombstones: the highest offset of a dropped tombstone between each two neighbouring splits,
            ascending. So the highest one below any position that `is_exact` is always known.
        dropped_at: the line that dropped the last tombstone, whichever its offset.
        cuts: where each rollback has cut the log. A swap made before a cut is void, and so is the position of
            a reader beyond it.
        uncleanable: why the cleaner gave up this partition; empty if it did not.
    """

    segments: tuple[Segment, ...] = ()
    start: int = 0
    end: int = 0
    clean_end: int = 0
    unique_end: int = 0
    passes: tuple[CleanMark, ...] = ()
    splits: tuple[int, ...] = ()
    swept_end: int = 0
    dropped_tombstones: tuple[int, ...] = ()
    dropped_at: int = 0
    cuts: tuple[int, ...] = ()
    uncleanable: str = ""

    @property
    def generation(self) -> int:
        """Number of rollbacks."""
        return len(self.cuts)

    @property
    def bytes(self) -> int:
        return sum(s.size for s in self.segments)

    @property
    def records(self) -> int:
        return sum(s.records for s in self.segments)

    @property
    def dropped_tombstone(self) -> int:
        """The highest offset of a dropped tombstone, -1 for none."""
        return max(self.dropped_tombstones, default=-1)

    def is_exact(self, offset: int) -> bool:
        """Whether the records from `start` up to an offset still fold to the state of the time when the
        offset was the log's end.
        """
        at = bisect_left(self.splits, offset)
        return offset >= self.clean_end or self.splits[at : at + 1] == (offset,)

    # -- what a line makes of it -----------------------------------------------------------------------------

    def retained(self, start: int, out: set[str]) -> PartitionState:
        """Without the segments `out`: the log begins at `start`. States are folds from there on, so the
        invariants remain true. A tombstone that a record below kept may be dropped now.
        """
        splits = tuple(x for x in self.splits if x > start)
        return replace(
            self,
            segments=tuple(s for s in self.segments if s.name not in out),
            start=start,
            clean_end=max(self.clean_end, start),
            unique_end=max(self.unique_end, start),
            splits=splits,
            swept_end=start if splits != self.splits else max(self.swept_end, start),
            dropped_tombstones=highest_between(splits, self.dropped_tombstones),
        )

    def truncated(self, end: int, segments: tuple[Segment, ...]) -> PartitionState:
        """As of `end`, which `is_exact`. All records from there on exist, and the state at `end` is exact, so
        `end` need not be a split any more.
        """
        passes = {min(x.clean_end, end): x.time_ms for x in reversed(self.passes)}
        return replace(
            self,
            segments=segments,
            end=end,
            clean_end=min(self.clean_end, end),
            unique_end=min(self.unique_end, end),
            passes=tuple(CleanMark(*x) for x in sorted(passes.items())),
            splits=tuple(x for x in self.splits if x < end),
            swept_end=min(self.swept_end, end),
            dropped_tombstones=tuple(x for x in self.dropped_tombstones if x < end),
        )

    @property
    def unique_below(self) -> int:
        """How far passes have come, or the first split below that. No key occurs twice before it."""
        return min((self.unique_end, *self.splits))

    def may_miss_delete(self, offset: int, to: int | None = None) -> bool:
        """Whether a reader that continues from `offset` to `to` may miss the delete of a key that it has
        seen: the tombstone came later and was dropped. From the start of the log nothing can be missed.

        Args:
            to: an offset at which the state is exact; None for the end of the log.
        """
        return 0 < offset <= self.last_dropped(to)

    def last_dropped(self, to: int | None = None) -> int:
        """The highest offset below `to` of a dropped tombstone, -1 for none."""
        return max((x for x in self.dropped_tombstones if to is None or x < to), default=-1)

    # -- as JSON ---------------------------------------------------------------------------------------------

    def to_json(self, marks: int) -> Line:
        """As a checkpoint has it. Args: marks: at most this many of each segment without index."""
        return {
            "start": self.start,
            "end": self.end,
            **cleaned_line(self),
            "dropped_at": self.dropped_at,
            "cuts": list(self.cuts),
            "uncleanable": self.uncleanable,
            "segments": [segment_line(s, marks) for s in self.segments],
        }

    @classmethod
    def from_json(cls, line: Line) -> PartitionState:
        return cls(
            segments=tuple(segment_from(s) for s in line["segments"]),
            start=line["start"],
            end=line["end"],
            **cleaned_from(line),
            dropped_at=line["dropped_at"],
            cuts=tuple(line["cuts"]),
            uncleanable=line["uncleanable"],
        )


def highest_between(splits: Iterable[int], offsets: Iterable[int]) -> tuple[int, ...]:
    """The highest of `offsets` between each two neighbouring splits, ascending."""
    ends = sorted(splits)
    return tuple(sorted({bisect_right(ends, x): x for x in sorted(offsets)}.values()))


class Cleaned(Protocol):
    """How far a partition is clean. The same in a swap and in a checkpoint."""

    @property
    def clean_end(self) -> int: ...
    @property
    def unique_end(self) -> int: ...
    @property
    def passes(self) -> tuple[CleanMark, ...]: ...
    @property
    def splits(self) -> tuple[int, ...]: ...
    @property
    def swept_end(self) -> int: ...
    @property
    def dropped_tombstones(self) -> tuple[int, ...]: ...


def cleaned_line(of: Cleaned) -> Line:
    """How far a partition is clean, as swaps and checkpoints say it."""
    return {
        "clean_end": of.clean_end,
        "unique_end": of.unique_end,
        "passes": [[x.clean_end, x.time_ms] for x in of.passes],
        "splits": list(of.splits),
        "swept_end": of.swept_end,
        "dropped_tombstones": list(of.dropped_tombstones),
    }


def cleaned_from(line: Line) -> dict[str, Any]:
    return {
        "clean_end": line["clean_end"],
        "unique_end": line["unique_end"],
        "passes": tuple(CleanMark(*x) for x in line["passes"]),
        "splits": tuple(line["splits"]),
        "swept_end": line["swept_end"],
        "dropped_tombstones": tuple(line["dropped_tombstones"]),
    }
