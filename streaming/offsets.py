"""Positions in a changelog: where a reader is, whether it may continue from there, and how far one trigger
reads.

A reader that continues from position p of a partition has seen records below p. Three things can have
happened since:

- retention has moved the log's start beyond p: records are gone that it has never seen;
- the cleaner has dropped a tombstone at p or above, whose key it may have seen below p: it would keep that
  key for ever;
- the log was rolled back to below p: it has seen records that no longer exist.

`PartitionState.dropped_tombstone` is the highest offset of such a tombstone, so above it, and at 0, every
position is safe. A reader that began at the log's start and is not above it yet (a rate limit, a restart) is
safe too as long as no tombstone was dropped since its position was written. The manifest line of that moment
is therefore part of its position.

Spark stores where each batch ends. If it has to run the first batch again, it asks the source again where
that batch begins. By then "latest", or the options that `resume` gave, can mean another position. So the end
offset of the first batch also records where it began.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.checkpoints.manifest.state import State
from keyfold.statestore import filenames
from keyfold.statestore.errors import CompactedAway, ConfigError
from keyfold.statestore.files import Files
from keyfold.statestore.segment.reader import SegmentReader
from keyfold.statestore.segment.writer import Segment
from keyfold.streaming.options import EARLIEST, Offsets

log = logging.getLogger("keyfold")

_REMEDY = (
    'begin again with startingOffsets "earliest" and a new checkpoint, which gives the whole state and then '
    "the changes; or go on without what is gone: failOnDataLoss=false"
)


def resolved(wanted: str | Offsets, state: State, uuid: str, root: Path) -> Offsets:
    """The position that "earliest", "latest" or the source's own JSON means now.

    Raises:
        ConfigError: the JSON is of another changelog, or of other partitions.
        CompactedAway: the log was rolled back to below that position.
    """
    if isinstance(wanted, Offsets):
        check_same(wanted.uuid, uuid, root)
        if set(wanted.offsets) != set(range(len(state.partitions))):
            raise ConfigError(
                "Offsets do not match the partitions of this changelog.", path=root,
                expected=f"an offset for each of 0 to {len(state.partitions) - 1}",
                found=", ".join(str(p) for p in sorted(wanted.offsets)) or "none",
                remedy="give one offset for each partition",
            )  # fmt: skip
        _check_generations(wanted, state, root)
        return wanted
    return marked(uuid, [p.start if wanted == EARLIEST else p.end for p in state.partitions], state)


def _check_generations(position: Offsets, state: State, root: Path) -> None:
    for partition, p in enumerate(state.partitions):
        offset, known = position.offsets[partition], position.generations.get(partition, 0)
        if known > p.generation or offset > min(p.cuts[known:], default=offset):
            raise CompactedAway(
                "The log was rolled back: this reader has read records that no longer exist.",
                path=filenames.partition(root, partition), position=f"partition {partition}, offset {offset}",
                expected=f"a position of generation {p.generation}", found=f"generation {known}",
                remedy='begin again with startingOffsets "earliest" and a new checkpoint, or by resume(...)',
            )  # fmt: skip


def check_same(found: object, uuid: str, root: Path) -> None:
    """Raises `ConfigError` where a position is another changelog's."""
    if found != uuid:
        raise ConfigError(
            "These offsets are of another changelog.", path=root, expected=f"keyfold {uuid}",
            found=f"keyfold {found}",
            remedy="correct the path, or begin with a new checkpoint if the changelog was created again",
        )  # fmt: skip


def marked(
    uuid: str, offsets: Sequence[int], state: State, begun: Mapping[int, int] | None = None
) -> Offsets:
    """A position as it is to be kept: with the line of `state` where the highest dropped tombstone is not
    passed yet, by it or by where the query began.
    """
    began = begun or {}
    marks = {
        partition: state.seq
        for partition, (p, offset) in enumerate(zip(state.partitions, offsets, strict=True))
        if p.may_miss_delete(offset) or p.may_miss_delete(began.get(partition, offset))
    }
    generations = {partition: p.generation for partition, p in enumerate(state.partitions) if p.generation}
    return Offsets(uuid, dict(enumerate(offsets)), marks, generations, dict(began))


def beginning(position: Offsets) -> Offsets:
    """Where a query begins, as it is to be kept until its first batch has been planned."""
    return replace(position, begun=position.offsets)


def begun_by(start: Offsets) -> Mapping[int, int]:
    """What the end of a batch has to say of where it began: something, if it is a query's first one."""
    return start.begun if start.begun == start.offsets else {}


def begin_of(start: Offsets, end: Offsets) -> Offsets:
    """Where a batch begins: where it began, if it is run again and `start` was asked for again."""
    if not end.begun or end.begun == start.offsets:
        return start
    return replace(end, offsets=end.begun)


def readable(position: Offsets, state: State, root: Path, *, fail_on_data_loss: bool) -> list[int]:
    """The offsets to read from, one per partition: those of `position`, or higher ones where data is gone.

    Raises:
        CompactedAway: data is gone, and `fail_on_data_loss` is True.
        ConfigError: the position is beyond the log's end.
    """
    check_reached(position, state, root)
    return [
        _readable(p, partition, position, filenames.partition(root, partition), fail_on_data_loss)
        for partition, p in enumerate(state.partitions)
    ]


def _readable(p: PartitionState, partition: int, position: Offsets, path: Path, fail: bool) -> int:
    offset = position.offsets[partition]
    where = f"partition {partition}, offset {offset}"
    if offset < p.start:
        what = "Records that this reader has not seen are gone: retention has moved the log's start."
        expected = f"an offset from {p.start} to {p.end}"
    elif p.may_miss_delete(offset) and p.dropped_at > position.snapshot.get(partition, -1):
        what = "A delete that this reader has not seen may be gone: it is older than delete.retention.ms."
        expected = f"an offset above {p.dropped_tombstone}, that of the last delete that was dropped"
    else:
        return offset
    if fail:
        raise CompactedAway(what, path=path, position=where, expected=expected, found=offset, remedy=_REMEDY)
    log.warning("changelog %s, %s: %s Reading goes on without it.", path.parent, where, what)
    return max(offset, p.start)


def check_reached(position: Offsets, state: State, root: Path) -> None:
    """Raises `ConfigError` where a position is beyond the log's end."""
    for partition, p in enumerate(state.partitions):
        offset = position.offsets[partition]
        if offset > p.end:
            raise ConfigError(
                "The log ends before that offset.", path=filenames.partition(root, partition),
                position=f"partition {partition}, offset {offset}",
                expected=f"an offset from {p.start} to {p.end}", found=offset,
                remedy="correct the offsets; if the changelog was put back from an older copy, begin again "
                "with a new checkpoint",
            )  # fmt: skip


# -- how far one trigger goes --------------------------------------------------------------------------------


def limited(
    files: Files, root: Path, state: State, begin: Sequence[int], target: Sequence[int], rows: int
) -> list[int]:
    """End offsets, at most `target`, with at most `rows` records after `begin` in all partitions together.

    The rows are shared out in proportion to what waits in each partition.
    """
    lags = [
        sum(_records(s, b, t) for s in p.segments)
        for p, b, t in zip(state.partitions, begin, target, strict=True)
    ]
    shares = _shares(lags, rows)
    return [
        advanced(
            files,
            filenames.partition(root, partition),
            p.segments,
            begin[partition],
            target[partition],
            shares[partition],
        )
        for partition, p in enumerate(state.partitions)
    ]


def _shares(lags: Sequence[int], rows: int) -> list[int]:
    """Split `rows` by the method of largest remainders; nobody gets more than waits."""
    total = sum(lags)
    if total <= rows:
        return list(lags)
    shares = [rows * lag // total for lag in lags]
    by_remainder = sorted(range(len(lags)), key=lambda i: -(rows * lags[i] % total))
    for i in by_remainder[: rows - sum(shares)]:
        shares[i] += 1
    return shares


def _records(s: Segment, begin: int, end: int) -> int:
    """How many records of a segment are in [begin, end), at most; exact where it was not compacted."""
    return max(0, min(s.records, min(end, s.next) - max(begin, s.base)))


def advanced(
    files: Files, directory: Path, segments: Sequence[Segment], begin: int, end: int, rows: int
) -> int:
    """The highest offset, at most `end`, with no more than `rows` records from `begin` up to it.

    Only a compacted segment that is taken in part is read for that: elsewhere offsets are dense.
    """
    for segment in segments:
        first, last = max(begin, segment.base), min(end, segment.next)
        if first >= last:
            continue
        if segment.records == segment.next - segment.base:
            if last - first > rows:
                return first + rows
            rows -= last - first
        elif (first, last) == (segment.base, segment.next) and segment.records <= rows:
            rows -= segment.records
        else:
            for batch in SegmentReader(files, directory, segment).batches(first, last):
                if batch.num_rows > rows:
                    return int(batch.column("offset")[rows].as_py())
                rows -= batch.num_rows
    return end
