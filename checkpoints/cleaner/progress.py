"""What a cleaner pass has proved of a partition after each of its groups, as pure functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from keyfold.checkpoints.cleaner.log_to_clean import LogToClean
from keyfold.checkpoints.compaction.fold import FoldCounts
from keyfold.checkpoints.manifest.partition import CleanMark, PartitionState, highest_between

#: Passes that are closer to each other than `delete.retention.ms` divided by this count as one.
_DATES: Final = 64


def after_group(
    before: PartitionState, section: LogToClean, end: int, counts: FoldCounts, *, last: bool
) -> PartitionState:
    """What holds once a group is swapped, but for its segments; the invariants are in `PartitionState`.

    From the first group on, the states between anchors are gone up to `end`, those at splits that no anchor
    wants any more too. From `end` on nothing changes, so every split that is not below is kept, whether or
    not an anchor needs it. Below `first_dirty` keys stay unique as they were: what a pass takes out can only
    help. Below `end` they are so when it has come through. Further on they are if they were and the pass has
    removed no split; else a key from there may now be in one interval with a key below `end`.

    Args:
        before: the state when the group is swapped; the first group's is that of the section.
        end: where the whole pass ends.
        last: whether it is the last group.
    """
    splits = sorted({a for a in section.anchors if a < end} | {s for s in before.splits if s >= end})
    unique_end, swept_end = section.first_dirty, min(section.swept_end, section.first_dirty)
    if last:
        unique_end = end if section.first_dirty < section.unique_end else max(end, section.unique_end)
        swept_end = counts.swept_end
    return replace(
        before,
        clean_end=max(before.clean_end, end),
        unique_end=unique_end,
        splits=tuple(splits),
        swept_end=swept_end,
        dropped_tombstones=highest_between(splits, (*before.dropped_tombstones, *counts.dropped_tombstones)),
    )


def dated(
    before: PartitionState, end: int, section: LogToClean, now_ms: int, retention_ms: int
) -> tuple[CleanMark, ...]:
    """The passes that date tombstones, with one that has come to its `end` now, without those that say no
    more than another.

    It dates what it has come through, and nothing beyond: there may be tombstones further on that only a pass
    has met that was broken off. Passes within a 64th of `delete.retention.ms` count as one, the last of them,
    so there are never many more than 64.
    """
    below, step = section.tombstones_below, max(1, retention_ms // _DATES)
    passes = [x for x in before.passes if x.clean_end == below][:1] if below else []
    passes += [x for x in before.passes if x.clean_end > below]
    if not passes or passes[-1].clean_end < end:
        if passes and passes[-1].clean_end > below and passes[-1].time_ms // step == now_ms // step:
            del passes[-1]
        passes.append(CleanMark(end, now_ms))
    return tuple(passes)
