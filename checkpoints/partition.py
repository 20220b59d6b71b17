"""What the manifest says of one partition."""

from __future__ import annotations

from dataclasses import dataclass

from keyfold.checkpoints.segment_lines import Line, segment_from, segment_line
from keyfold.statestore.segment import Segment


@dataclass(frozen=True, slots=True)
class Pass:
    """A finished cleaner pass reached `clean_end` at `time_ms`: it dates the tombstones below `clean_end`."""

    clean_end: int
    time_ms: int


@dataclass(frozen=True, slots=True)
class PartitionState:
    """One partition's log.

    Attributes:
        segments: in offset order; the last may be active.
        start, end: log start offset, and one past the last committed record.
        clean_end: records below were folded by the cleaner (Kafka: first dirty offset).
        unique_end: below, no key occurs twice between two anchors; less than `clean_end` only while a pass is
            under way or was broken off.
        passes: for tombstones' delete horizons, ascending.
        splits: anchor offsets that kept older records of a key inside the clean section.
        dropped_tombstone: highest offset of a tombstone that is gone, -1 for none.
        dropped_at: the line that took the last tombstone, whichever its offset.
        cuts: where each rollback has cut the log; a swap that was made before one is void, and so is the
            position of a reader behind it.
        uncleanable: why the cleaner has given this partition up, empty if it has not.
    """

    segments: tuple[Segment, ...] = ()
    start: int = 0
    end: int = 0
    clean_end: int = 0
    unique_end: int = 0
    passes: tuple[Pass, ...] = ()
    splits: tuple[int, ...] = ()
    dropped_tombstone: int = -1
    dropped_at: int = 0
    cuts: tuple[int, ...] = ()
    uncleanable: str = ""

    @property
    def generation(self) -> int:
        """Counts rollbacks."""
        return len(self.cuts)

    @property
    def bytes(self) -> int:
        return sum(s.size for s in self.segments)

    @property
    def records(self) -> int:
        return sum(s.records for s in self.segments)


def partition_line(p: PartitionState, marks: int) -> Line:
    return {
        "start": p.start,
        "end": p.end,
        "clean_end": p.clean_end,
        "unique_end": p.unique_end,
        "passes": [[x.clean_end, x.time_ms] for x in p.passes],
        "splits": list(p.splits),
        "dropped_tombstone": p.dropped_tombstone,
        "dropped_at": p.dropped_at,
        "cuts": list(p.cuts),
        "uncleanable": p.uncleanable,
        "segments": [segment_line(s, marks) for s in p.segments],
    }


def partition_from(line: Line) -> PartitionState:
    return PartitionState(
        segments=tuple(segment_from(s) for s in line["segments"]),
        start=line["start"],
        end=line["end"],
        clean_end=line["clean_end"],
        unique_end=line["unique_end"],
        passes=tuple(Pass(*x) for x in line["passes"]),
        splits=tuple(line["splits"]),
        dropped_tombstone=line["dropped_tombstone"],
        dropped_at=line.get("dropped_at", 0),
        cuts=tuple(line.get("cuts", ())),
        uncleanable=line.get("uncleanable", ""),
    )
