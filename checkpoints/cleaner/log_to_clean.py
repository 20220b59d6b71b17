"""The section of a partition that a cleaner pass may touch, and the groups of segments that it replaces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keyfold.checkpoints.log.writer import Writer
from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.checkpoints.manifest.state import State
from keyfold.statestore.segment.writer import Segment


@dataclass(frozen=True)
class LogToClean:
    """The cleanable section of a partition.

    Attributes:
        segments: they cover [start, end), without the active segment and segments that are too young.
        unique_end: where the last pass ended; records from here on are dirty.
        first_dirty: `unique_end`, or lower if there is a split that no anchor needs any more, and no pass has
            gone over it since. Below, keys are unique between `anchors`.
        anchors: the offsets in [start, end) at which the state is exact and must remain so, ascending.
        swept_end: tombstones below need not be checked again.
        tombstones_below: the delete horizon of the tombstones below has passed; 0 for none.
    """

    segments: tuple[Segment, ...]
    unique_end: int
    first_dirty: int
    end: int
    anchors: tuple[int, ...]
    swept_end: int
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
    def sweeps(self) -> bool:
        """Whether the delete horizon of some tombstones may have passed since the last pass checked them."""
        from_, below = min(self.swept_end, self.first_dirty), min(self.tombstones_below, self.end)
        return from_ < below and any(s.tombstones for s in self.segments if s.next > from_ and s.base < below)

    @property
    def needs_pass(self) -> bool:
        """Whether a pass would have anything to do. It would not if the last one was complete and nothing has
        changed since: no record, no anchor, no delete horizon that has passed.
        """
        return bool(self.segments) and (self.first_dirty < self.end or self.sweeps)

    def groups(self, segment_bytes: int, below: int | None = None) -> list[tuple[Segment, ...]]:
        """Adjacent segments that become one segment, if together they are at most `segment_bytes` (Kafka's
        `groupSegmentsBySize`).

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


def find_log_to_clean(
    writer: Writer, state: State, partition: int, *, until: int | None = None, full: bool = False
) -> LogToClean:
    """The cleanable section of a partition: everything below the active segment and
    `min.compaction.lag.ms`.

    Args:
        until: only segments that begin below this offset.
        full: treat all records as dirty, whatever the manifest says.
    """
    config = writer.identity.config
    p = state.partitions[partition]
    now = writer.clock_ms()
    segments = cleanable(writer, p, partition, until)
    end = segments[-1].next if segments else p.start
    wanted = anchor_offsets(state, partition, config.anchors_auto)
    gone = [s for s in p.splits if s not in wanted and s < end]
    expired = [x.clean_end for x in p.passes if x.time_ms + config.delete_retention_ms <= now]
    return LogToClean(
        segments,
        p.unique_end,
        p.start if full else max(min([p.unique_end, *gone]), p.start),
        end,
        tuple(sorted(cutting(p, wanted, end))),
        p.swept_end,
        max(expired, default=0),
    )


def cleanable(
    writer: Writer, p: PartitionState, partition: int, until: int | None = None
) -> tuple[Segment, ...]:
    """The segments of a partition's cleanable section; `until` as for `find_log_to_clean`."""
    lag_ms = writer.identity.config.min_compaction_lag_ms
    oldest = writer.clock_ms() - lag_ms
    segments: list[Segment] = []
    for segment in p.segments:
        if (
            (not segment.sealed and writer.is_active(partition, segment.name))
            or (lag_ms and segment.max_timestamp > oldest)
            or (until is not None and segment.base >= until)
        ):
            break
        segments.append(segment)
    return tuple(segments)


def anchor_offsets(state: State, partition: int, auto: int) -> set[int]:
    """The offsets of a partition at which anchors need the exact state: named anchors, and the last `auto`
    commits.
    """
    found = {a.ends[partition] for a in state.anchors.values()}
    if auto:
        found |= {c.ends[partition] for c in state.commits[-auto:]}
    return found


def cutting(p: PartitionState, wanted: Iterable[int], end: int) -> set[int]:
    """The `wanted` offsets that cut a pass up to `end`: those at which the state is exact.

    The state at a commit no longer exists if a pass ended inside the commit, or if an anchor was first
    requested (`anchors.auto` was raised, a rollback made older commits the last ones) after a pass had gone
    over it.
    """
    return {a for a in wanted if p.start < a < end and p.is_exact(a)}
