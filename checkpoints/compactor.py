"""One cleaner pass over one partition: which segments, what becomes of them, and the one manifest line that
swaps them.

What a record must be to be dropped is decided in `fold`, without files. Here is the rest: the section that
may be cleaned, the files, and the publication. Nothing of a pass exists until its line is in the manifest, so
a pass that is aborted or dies at any point leaves no trace but files that nobody names.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from keyfold.checkpoints import reading
from keyfold.checkpoints.fold import FoldCounts, OffsetMap, compact
from keyfold.checkpoints.offset_map import Source
from keyfold.checkpoints.state import PartitionState, Pass, State, segment_line
from keyfold.checkpoints.writer import Writer
from keyfold.statestore import names
from keyfold.statestore.blocks import BLOCK_BYTES, BLOCK_RECORDS_MAX, encode, split
from keyfold.statestore.errors import StorageFailed
from keyfold.statestore.segment import Segment, SegmentWriter, block_of


@dataclass(frozen=True)
class PassStatistics:
    """What one pass did. Bytes are file bytes, seconds are wall time."""

    partition: int
    records_read: int
    records_kept: int
    bytes_read: int
    bytes_kept: int
    tombstones_dropped: int
    map_utilisation: float
    seconds: float


class Aborted(Exception):
    """The pass was told to stop; nothing of it counts."""


@dataclass(frozen=True)
class Section:
    """What a pass may touch: `segments` cover [start, end); below `first_dirty` keys are unique between
    `anchors`.

    `first_dirty` is `clean_end`, or lower where an anchor is gone that kept older records in the clean
    section, and no pass has come through it since.
    """

    segments: tuple[Segment, ...]
    clean_end: int
    first_dirty: int
    end: int
    anchors: tuple[int, ...]
    tombstones_below: int

    @property
    def dirty_bytes(self) -> int:
        return sum(s.size for s in self.segments if s.next > self.clean_end)

    @property
    def dirty_ratio(self) -> float:
        """Dirty bytes / all bytes that could be cleaned (Kafka's `min.cleanable.dirty.ratio`)."""
        total = sum(s.size for s in self.segments)
        return self.dirty_bytes / total if total else 0.0

    @property
    def droppable_tombstones(self) -> bool:
        return any(s.tombstones for s in self.segments if s.base < self.tombstones_below)


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
        p.clean_end,
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


def clean_partition(
    writer: Writer, number: int, aborted: Callable[[], bool] = lambda: False
) -> PassStatistics | None:
    """One pass over a partition, None where nothing is to be done.

    Raises:
        StorageFailed: the disk has no room for the copy (found before it is begun), or failed.
        Damaged: a segment's bytes do not match their checksum; the pass leaves everything as it is.
        Aborted: `aborted` became true, or the partition was rolled back meanwhile.
    """
    began = time.monotonic()
    with writer.pin() as state:
        section = section_of(writer, state, number)
        if not section.segments or (section.first_dirty >= section.end and not section.droppable_tombstones):
            return None
        made: list[SegmentWriter] = []
        try:
            _check_room(writer, section)
            source = _source(writer, number, section, aborted)
            offset_map = OffsetMap.build(
                source,
                section.first_dirty,
                section.anchors,
                writer.identity.config.cleaner_dedupe_buffer_size,
                dirty_end=section.end,
            )
            end = offset_map.end_offset
            taken = tuple(s for s in section.segments if s.base < end)
            counts = FoldCounts()
            kept = compact(
                _source(writer, number, replace(section, segments=taken), aborted),
                offset_map,
                section.tombstones_below,
                counts,
            )
            added = _write(writer, number, taken, kept, made)
            _publish(writer, state, number, section, end, taken, added, counts, made)
        except BaseException as e:
            for segment in made:
                with contextlib.suppress(OSError):
                    segment.abandon(None)
            if isinstance(e, OSError):
                raise StorageFailed(
                    "A cleaner pass could not write its copy; the log is as it was.",
                    path=e.filename or names.partition(writer.root, number), expected="a write that succeeds",
                    found=f"{type(e).__name__}: {e.strerror or e}", remedy="free or repair the disk",
                ) from e  # fmt: skip
            raise
    writer.garbage.collect()
    return PassStatistics(
        number,
        counts.records_read,
        counts.records_kept,
        sum(s.size for s in taken),
        sum(s.size for s in added),
        counts.tombstones_dropped,
        offset_map.utilisation,
        time.monotonic() - began,
    )


def _check_room(writer: Writer, section: Section) -> None:
    """The copy can be as large as what it replaces, which goes only afterwards."""
    needed = sum(s.size for s in section.segments)
    free = writer.files.free_bytes(writer.root)
    if free < needed:
        raise StorageFailed(
            "There is no room for a cleaner pass.", path=writer.root, expected=f"{needed} bytes free",
            found=f"{free} bytes", remedy="free disk space; the log is as it was, and appends go on",
        )  # fmt: skip


def _source(writer: Writer, number: int, section: Section, aborted: Callable[[], bool]) -> Source:
    directory = names.partition(writer.root, number)

    def source() -> Iterator[pa.RecordBatch]:
        for batch in reading.read_segments(writer.files, directory, section.segments, 0, section.end):
            if aborted():
                raise Aborted
            yield batch

    return source


def _write(
    writer: Writer,
    number: int,
    taken: tuple[Segment, ...],
    kept: Iterator[pa.RecordBatch],
    made: list[SegmentWriter],
) -> list[Segment]:
    """The kept records as sealed segments of up to `segment.bytes`, which together cover what the taken ones
    covered.
    """
    config = writer.identity.config
    base, end = taken[0].base, taken[-1].next
    sealed: list[Segment] = []
    current: SegmentWriter | None = None
    for batch in _blocks(kept):
        first = batch.column("offset")[0].as_py()
        if current is not None and current.segment.size + batch.nbytes > config.segment_bytes:
            sealed.append(current.seal(replace(current.segment, next=first)))
            base, current = first, None
        if current is None:
            current = writer.new_segment(number, base)
            made.append(current)
        data = encode(batch, config.codec)
        current.append([block_of(batch, data)], batch.column("offset")[-1].as_py() + 1)
    if current is not None:
        sealed.append(current.seal(replace(current.segment, next=end)))
    writer.files.sync_directory(names.partition(writer.root, number))
    created = min(s.created_ms for s in taken)
    return [replace(s, created_ms=created) for s in sealed]


def _blocks(kept: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches of about a block's size: what is left of several small or thinned-out blocks is put
    together.
    """
    waiting: list[pa.RecordBatch] = []
    size = rows = 0
    for batch in kept:
        if batch.num_rows == 0:
            continue
        if waiting and (size + batch.nbytes > BLOCK_BYTES or rows + batch.num_rows > BLOCK_RECORDS_MAX):
            yield from _joined(waiting)
            waiting, size, rows = [], 0, 0
        waiting.append(batch)
        size += batch.nbytes
        rows += batch.num_rows
    yield from _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if len(batches) == 1:
        yield from split(batches[0])
    elif batches:
        yield from split(pa.concat_batches(batches))


def _publish(
    writer: Writer,
    seen: State,
    number: int,
    section: Section,
    end: int,
    taken: tuple[Segment, ...],
    added: list[Segment],
    counts: FoldCounts,
    made: list[SegmentWriter],
) -> None:
    """The swap: one manifest line, if nothing that the pass relied on has changed since it began."""
    with writer.exclusive:
        now = writer.state.partitions[number]
        before = seen.partitions[number]
        present = {s.name for s in now.segments}
        anchors = {a for a in anchor_offsets(writer.state, number, 0) if before.start < a < end}
        if (
            now.generation != before.generation
            or (now.clean_end, now.unique_end) != (before.clean_end, before.unique_end)
            or not all(s.name in present for s in taken)
            or not anchors <= set(section.anchors)
        ):
            raise Aborted
        time_ms = writer.clock_ms()
        after = _after(before, section, end, counts, time_ms)
        # From here on the line may be in the journal even if writing it fails, and then it names these files.
        made.clear()
        writer.write_line(
            {
                "t": "swap",
                "partition": number,
                "out": [s.name for s in taken],
                "in": [segment_line(s) for s in added],
                "clean_end": after.clean_end,
                "unique_end": after.unique_end,
                "passes": [[x.clean_end, x.time_ms] for x in after.passes],
                "splits": list(after.splits),
                "dropped_tombstone": after.dropped_tombstone,
            }
        )
        directory = names.partition(writer.root, number)
        old = [directory / s.name for s in taken]
        old += [directory / names.segment_index(s.name) for s in taken if s.sealed]
        writer.garbage.add(writer.state.n, old)


def _after(
    before: PartitionState, section: Section, end: int, counts: FoldCounts, time_ms: int
) -> PartitionState:
    """Progress, the dates of tombstones, the anchors that are inside the clean section, the highest lost
    tombstone.
    """
    clean_end = max(before.clean_end, end)
    passes = [x for x in before.passes if x.clean_end > section.tombstones_below]
    if section.tombstones_below:
        expired = [x for x in before.passes if x.clean_end == section.tombstones_below]
        passes = expired[:1] + passes
    if not passes or passes[-1].clean_end < clean_end:
        passes.append(Pass(clean_end, time_ms))
    honoured = set(before.splits) | {a for a in section.anchors if a >= before.clean_end}
    return replace(
        before,
        clean_end=clean_end,
        unique_end=end,
        passes=tuple(passes),
        splits=tuple(a for a in section.anchors if a < clean_end and a in honoured),
        dropped_tombstone=max(before.dropped_tombstone, counts.highest_dropped_tombstone),
    )
