"""What a cleaner pass may touch of one partition, and in which groups of segments it is replaced."""

from __future__ import annotations

from dataclasses import dataclass

from keyfold.checkpoints.state import State
from keyfold.checkpoints.writer import Writer
from keyfold.statestore.segment import Segment


@dataclass(frozen=True)
class Section:
    """The cleanable section of a partition.

    Attributes:
        segments: they cover [start, end); the active segment and what is too young are not among them.
        unique_end: where the last pass came to; what lies behind is dirty.
        first_dirty: `unique_end`, or lower where an anchor is gone that kept older records in front of it,
            and no pass has come through since. Below, keys are unique between `anchors`.
        anchors: the offsets in [start, end) at which the state must stay exact, ascending.
        tombstones_below: the horizon of the tombstones below has passed; 0 for none.
    """

    segments: tuple[Segment, ...]
    unique_end: int
    first_dirty: int
    end: int
    anchors: tuple[int, ...]
    tombstones_below: int

    @property
    def dirty(self) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.next > self.unique_end)

    @property
    def dirty_bytes(self) -> int:
        return sum(s.size for s in self.dirty)

    @property
    def dirty_ratio(self) -> float:
        """Dirty bytes / all bytes that could be cleaned (Kafka's `min.cleanable.dirty.ratio`)."""
        total = sum(s.size for s in self.segments)
        return self.dirty_bytes / total if total else 0.0

    @property
    def droppable_tombstones(self) -> bool:
        return any(s.tombstones for s in self.segments if s.base < self.tombstones_below)

    @property
    def needs_pass(self) -> bool:
        """Whether a pass would find anything to do."""
        return bool(self.segments) and (self.first_dirty < self.end or self.droppable_tombstones)

    def groups(self, segment_bytes: int, below: int | None = None) -> list[tuple[Segment, ...]]:
        """Neighbouring segments that become one, as long as they are not larger than `segment_bytes` together
        (Kafka's `groupSegmentsBySize`).

        Args:
            below: only the segments that begin below this offset.
        """
        groups: list[list[Segment]] = []
        size = 0
        for segment in self.segments:
            if below is not None and segment.base >= below:
                break
            if not groups or size + segment.size > segment_bytes:
                groups.append([])
                size = 0
            groups[-1].append(segment)
            size += segment.size
        return [tuple(group) for group in groups]


def section_of(writer: Writer, state: State, number: int) -> Section:
    """The cleanable section of a partition: everything below the active segment and
    `min.compaction.lag.ms`.
    """
    config = writer.identity.config
    p = state.partitions[number]
    now = writer.clock_ms()
    segments: list[Segment] = []
    for segment in p.segments:
        young = segment.max_timestamp > now - config.min_compaction_lag_ms
        if (not segment.sealed and writer.is_active(number, segment.name)) or (
            config.min_compaction_lag_ms and young
        ):
            break
        segments.append(segment)
    end = segments[-1].next if segments else p.start
    anchors = anchor_offsets(state, number, config.anchors_auto)
    gone = [s for s in p.splits if s not in anchors]
    expired = [x.clean_end for x in p.passes if x.time_ms + config.delete_retention_ms <= now]
    return Section(
        tuple(segments),
        p.unique_end,
        max(min([p.unique_end, *gone]), p.start),
        end,
        tuple(sorted(a for a in anchors if p.start < a < end)),
        max(expired, default=0),
    )


def anchor_offsets(state: State, number: int, auto: int) -> set[int]:
    """The offsets of a partition at which the state must stay exact: named anchors, and the last `auto`
    commits.
    """
    found = {a.ends[number] for a in state.anchors.values()}
    if auto:
        found |= {c.ends[number] for c in state.commits[-auto:]}
    return found
