"""One cleaner pass over one partition: its files, and the manifest lines that swap them.

`fold` decides which records are dropped, without files. A pass works on one group of segments at a time. When
the copy of a group is durable, one manifest line swaps it in, and the replaced files are deleted as soon as
no reader needs them. The disk overhead is therefore one group, whatever the size of the log. The first line
already states up to where exact states between commits are gone; the last one states up to where keys are
unique. An aborted pass leaves every swapped group valid, and files that no line names. The next pass begins
at the same first dirty offset.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Final, TypeAlias

import pyarrow as pa

from keyfold.checkpoints.cleaner.disk_room import Room
from keyfold.checkpoints.cleaner.log_to_clean import LogToClean, anchor_offsets, cutting, find_log_to_clean
from keyfold.checkpoints.cleaner.progress import after_group, dated
from keyfold.checkpoints.compaction.fold import FoldCounts, OffsetMap, compacted_pairs
from keyfold.checkpoints.log.recovery import lost
from keyfold.checkpoints.log.rewrite import Pace, discard_segments, rewrite_segments
from keyfold.checkpoints.log.spill import KeySpill
from keyfold.checkpoints.log.writer import Writer
from keyfold.checkpoints.manifest.entries import SwapEntry
from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.statestore import filenames
from keyfold.statestore.errors import StorageFailed, ViewExpired, reason
from keyfold.statestore.segment.block import record_schema
from keyfold.statestore.segment.reader import SegmentReader
from keyfold.statestore.segment.writer import Segment, SegmentWriter

#: A batch that was read, and the part of it that is kept.
Pair: TypeAlias = tuple[pa.RecordBatch, pa.RecordBatch]

#: Keys beyond this size that cannot remain at their address are moved to files.
_SPILL_FROM_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class PassStatistics:
    """What one pass did. Bytes are file bytes, seconds are wall time.

    Attributes:
        bytes_kept: the part of the read bytes that is kept; `bytes_written` of it were copied, the rest
            remained in place.
        io_bytes: all bytes read, some of them twice, and written: the throttle counts them.
        recopy_percent: bytes kept / bytes read (Kafka's `cleaner-recopy-percent`).
        complete: whether the pass reached the end of the cleanable section. If not,
            `cleaner.dedupe.buffer.size` was too small for one pass.
        map_utilisation: the share of `cleaner.dedupe.buffer.size` that was used.
        dirty_percent: dirty bytes / all bytes of the section, before (Kafka's `max-dirty-percent`).
    """

    partition: int
    records_read: int
    records_kept: int
    bytes_read: int
    bytes_kept: int
    bytes_written: int
    io_bytes: int
    recopy_percent: float
    tombstones_dropped: int
    complete: bool
    map_utilisation: float
    dirty_percent: float
    seconds: float


class Aborted(Exception):
    """The pass was stopped, or the partition changed in a way that makes it void."""


def clean_partition(
    writer: Writer,
    partition: int,
    pace: Pace = lambda size: None,
    *,
    until: int | None = None,
    full: bool = False,
    spill_all: bool = False,
) -> PassStatistics | None:
    """Run one pass over a partition. None if there is nothing to do.

    Args:
        until, full: as for `find_log_to_clean`.
        spill_all: keep no keys in place or in memory; for tests.

    Raises:
        StorageFailed: the disk has no room for the copy (checked before it begins), or failed.
        Damaged: a segment's bytes do not match their checksum. Nothing of its group is swapped.
        Aborted: by `pace`; or the partition was rolled back, retention removed a part of it, or it got an
            anchor below the section's end.
    """
    began = time.monotonic()
    with writer.pin() as state:
        section = find_log_to_clean(writer, state, partition, until=until, full=full)
        if not section.needs_pass:
            return None
        cleaning = CleanPass(writer, partition, state.partitions[partition], section, pace, spill_all)
        # The pass has its own view, which advances with each group.
        cleaning.move_view()
    with cleaning:
        done = cleaning.run()
    writer.garbage.collect()
    return replace(done, seconds=time.monotonic() - began)


class CleanPass:
    """One pass, as a context manager. Leaving it removes the files that were not published."""

    def __init__(
        self,
        writer: Writer,
        partition: int,
        p: PartitionState,
        section: LogToClean,
        pace: Pace,
        spill_all: bool,
    ) -> None:
        self._writer = writer
        self._partition = partition
        self._section = section
        self._told = pace
        self._io_bytes = 0
        self._spill_all = spill_all
        self._config = writer.identity.config
        self._directory = filenames.partition(writer.root, partition)
        #: a column may be added during the pass; what it writes does not have it then
        self._values = writer.identity.value_type
        #: the partition must still be this, except for new segments, when a group is published
        self._expected = p
        self._mapped = (0, 0)
        self._readers: dict[str, SegmentReader] = {}
        owner = f"cleaner-{partition}-{uuid.uuid4().hex}"
        directory = filenames.work(writer.root, writer.opened_epoch, owner)
        self._spill = KeySpill(writer.files, directory, memory_bytes=0 if spill_all else _SPILL_FROM_BYTES)
        self._room = Room(self._reader, self._config.codec)
        self._made: list[SegmentWriter] = []
        self._replaced: set[str] = set()
        self._view = contextlib.ExitStack()

    def _pace(self, size: int) -> None:
        self._io_bytes += size
        self._told(size)

    def move_view(self) -> None:
        """Protect the files of the current state, and no longer those of an older one."""
        view = contextlib.ExitStack()
        view.enter_context(self._writer.pin())
        self._view.close()
        self._view = view

    def __enter__(self) -> CleanPass:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._view.close()
        discard_segments(self._made)
        with contextlib.suppress(OSError):
            self._spill.close()
        if isinstance(error, ViewExpired | OSError):
            # A writer that has taken over deletes the files that this writer still names, and its work.
            self._writer.ownership.prove()
        if isinstance(error, ViewExpired):
            if not self._all_named():
                raise Aborted from error
            raise lost(self._writer.files, self._writer.root, error) or error
        if isinstance(error, OSError):
            raise StorageFailed(
                "A cleaner pass could not write its copy. The groups that it has not swapped are unchanged.",
                path=error.filename or self._directory, expected="a write that succeeds",
                found=reason(error),
                remedy="free or repair the disk",
            ) from error  # fmt: skip

    def run(self) -> PassStatistics:
        """Run the pass, group by group."""
        section, config = self._section, self._config
        copies = map(self._room.of_copy, section.groups(config.segment_bytes))
        self._check_room(max(copies) + self._room.of_spill(section, spill_all=self._spill_all))
        offset_map = OffsetMap.build(
            self._keys,
            section.first_dirty,
            section.anchors,
            config.cleaner_dedupe_buffer_size,
            dirty_end=section.end,
            hold=self._held,
        )
        utilisation, end, whole = offset_map.utilisation, offset_map.end_offset, offset_map.complete
        groups = section.groups(config.segment_bytes, end)
        if not section.sweeps:
            # Below an anchor nothing becomes obsolete.
            groups = [g for g in groups if len(g) > 1 or g[0].next > offset_map.obsolete_from]
        counts = FoldCounts()
        # Only the generator may refer to the map, so that the keys are freed when they are not needed any
        # more.
        pairs = compacted_pairs(
            self._source(groups), offset_map, section.tombstones_below, counts,
            swept_end=section.swept_end, hold=self._spill.hold,
        )  # fmt: skip
        del offset_map
        kept = written = 0
        for group, own in _by_group(groups, pairs):
            added = self._copy(group, own)
            self._publish(group, added, end, counts, last=group is groups[-1])
            kept += sum(s.size for s in (group if added is None else added))
            written += sum(s.size for s in added or ())
        read = sum(s.size for group in groups for s in group)
        return PassStatistics(
            partition=self._partition,
            records_read=counts.records_read,
            records_kept=counts.records_kept,
            bytes_read=read,
            bytes_kept=kept,
            bytes_written=written,
            io_bytes=self._io_bytes,
            recopy_percent=100 * kept / read,
            tombstones_dropped=counts.tombstones_dropped,
            complete=whole and counts.swept_end >= min(section.tombstones_below, end),
            map_utilisation=utilisation,
            dirty_percent=100 * section.dirty_ratio,
            seconds=0.0,
        )

    # -- reading ---------------------------------------------------------------------------------------------

    def _source(self, groups: list[tuple[Segment, ...]]) -> Callable[[], Iterator[pa.RecordBatch]]:
        """The records of the groups, with an empty batch after each group."""
        empty = pa.RecordBatch.from_pylist([], schema=record_schema(self._values))

        def source() -> Iterator[pa.RecordBatch]:
            for group in groups:
                for segment in group:
                    yield from self._read(segment, segment.base, segment.next)
                yield empty

        return source

    def _keys(self) -> Iterator[pa.RecordBatch]:
        """Offsets and keys of the dirty section. The mappings are kept for the full reading later."""
        for segment in self._section.segments:
            if segment.next > self._section.first_dirty:
                reader = self._readers.setdefault(segment.name, self._reader(segment))
                for batch in reader.batches(segment.base, segment.next, keys_only=True):
                    self._account(segment, batch)
                    self._mapped = reader.mapped
                    yield batch

    def _read(self, segment: Segment, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        reader = self._readers.pop(segment.name, None) or self._reader(segment)
        for batch in reader.batches(start, stop):
            self._account(segment, batch)
            yield batch

    def _reader(self, segment: Segment) -> SegmentReader:
        return SegmentReader(self._writer.files, self._directory, segment, self._values)

    def _account(self, segment: Segment, batch: pa.RecordBatch) -> None:
        self._pace(round(segment.size / max(segment.records, 1) * batch.num_rows))

    def _held(self, keys: pa.Array) -> pa.Array:
        """Keys of the last batch read, at an address that remains valid for the whole pass."""
        low, high = self._mapped
        buffers = [b for b in keys.buffers() if b is not None and b.size]
        if not self._spill_all and all(low <= b.address and b.address + b.size <= high for b in buffers):
            return keys
        return self._spill.hold(keys)

    # -- writing ---------------------------------------------------------------------------------------------

    def _copy(self, group: tuple[Segment, ...], pairs: Iterable[Pair]) -> list[Segment] | None:
        """The sealed replacement of the group. None if the group remains unchanged."""
        kept = self._changed(group, pairs)
        if kept is None:
            return None
        self._check_room(self._room.of_copy(group))
        return rewrite_segments(self._writer, self._partition, group, kept, self._pace, self._made)

    def _changed(self, group: tuple[Segment, ...], pairs: Iterable[Pair]) -> Iterator[pa.RecordBatch] | None:
        """The records that are kept of a group. None if that is all of a single segment.

        The part before the first dropped record is read again if there is such a record: buffered, it could
            be
        the whole segment.
        """
        pairs = iter(pairs)
        if len(group) > 1 or not group[0].sealed:
            return (staying for _, staying in pairs)
        seen = group[0].base
        for batch, staying in pairs:
            if staying.num_rows < batch.num_rows:
                front = self._read(group[0], group[0].base, seen)
                return chain(front, [staying], (more for _, more in pairs))
            seen = batch.column("offset")[-1].as_py() + 1
        return None

    def _check_room(self, needed: int) -> None:
        free = self._writer.files.free_bytes(self._writer.root)
        if free < needed:
            raise StorageFailed(
                "Not enough disk space for a cleaner pass.", path=self._writer.root,
                expected=f"{needed} bytes free, the most that the pass can use", found=f"{free} bytes",
                remedy="free disk space; the log is unchanged, and appends continue",
            )  # fmt: skip

    # -- publishing ------------------------------------------------------------------------------------------

    def _publish(
        self,
        group: tuple[Segment, ...],
        added: list[Segment] | None,
        end: int,
        counts: FoldCounts,
        *,
        last: bool,
    ) -> None:
        """The swap: one manifest line, if nothing that the pass depends on has changed since it began."""
        writer = self._writer
        if added is None and not last:
            return
        out = () if added is None else group
        with writer.exclusive:
            self._check_unchanged(group, end)
            after = after_group(self._expected, self._section, end, counts, last=last)
            if last:
                passes = dated(after, end, self._section, writer.clock_ms(), self._config.delete_retention_ms)
                after = replace(after, passes=passes)
            # From here on the line may be in the journal even if writing it fails, and names these files.
            self._made.clear()
            writer.write_line(
                SwapEntry(
                    partition=self._partition,
                    out=tuple(s.name for s in out),
                    added=tuple(added or ()),
                    clean_end=after.clean_end,
                    unique_end=after.unique_end,
                    passes=after.passes,
                    splits=after.splits,
                    swept_end=after.swept_end,
                    dropped_tombstones=after.dropped_tombstones,
                    # Perhaps an earlier line dropped it: the fold is a batch ahead.
                    drops=counts.tombstones_dropped > 0,
                )
            )
            self._expected = after
            self._replaced.update(s.name for s in out)
            writer.garbage.add_segments(writer.state.seq, self._partition, out)
        self.move_view()
        writer.garbage.collect()

    def _check_unchanged(self, group: tuple[Segment, ...], end: int) -> None:
        expected, now = self._expected, self._writer.state.partitions[self._partition]
        anchors = cutting(expected, anchor_offsets(self._writer.state, self._partition, 0), end)
        present = {s.name for s in now.segments}
        if (
            (now.generation, now.start, now.clean_end, now.unique_end)
            != (expected.generation, expected.start, expected.clean_end, expected.unique_end)
            or not all(s.name in present for s in group)
            or not anchors <= set(self._section.anchors)
        ):
            raise Aborted

    def _all_named(self) -> bool:
        present = {s.name for s in self._writer.state.partitions[self._partition].segments}
        return all(s.name in present for s in self._section.segments if s.name not in self._replaced)


def _by_group(
    groups: list[tuple[Segment, ...]], pairs: Iterator[Pair]
) -> Iterator[tuple[tuple[Segment, ...], Iterable[Pair]]]:
    """Each group with its records, which must be consumed before the next group is requested."""
    bases = [group[0].base for group in groups]
    parted = groupby(pairs, lambda pair: bisect_right(bases, pair[0].column("offset")[0].as_py()) - 1)
    found = next(parted, None)
    for number, group in enumerate(groups):
        if found is None or found[0] != number:
            yield group, ()
            continue
        yield group, found[1]
        found = next(parted, None)
