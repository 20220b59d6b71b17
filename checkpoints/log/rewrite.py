"""Writes the records that a cleaner pass keeps of a group of segments as new segments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

import pyarrow as pa

from keyfold.checkpoints.compaction.fold import gathered
from keyfold.checkpoints.log.writer import Writer
from keyfold.statestore import filenames
from keyfold.statestore.segment.block import BLOCK_BYTES, BLOCK_RECORDS_MAX, encode, split
from keyfold.statestore.segment.writer import Segment, SegmentWriter, block_of

#: Called with the number of bytes read or written, as in the files. May sleep; raises to abort the pass.
Pace: TypeAlias = Callable[[int], None]


def rewrite_segments(
    writer: Writer,
    partition: int,
    group: tuple[Segment, ...],
    kept: Iterator[pa.RecordBatch],
    pace: Pace,
    made: list[SegmentWriter],
) -> list[Segment]:
    """Write the kept records to sealed, durable segments of up to `segment.bytes`, which together cover the
    offsets of the group.

    Args:
        made: gets every file that is created, so that `discard_segments` can remove them if the pass fails.

    Raises:
        OSError, and any error of `kept` and `pace`.
    """
    config = writer.identity.config
    largest = max(config.segment_bytes, group[0].size)
    base, end = group[0].base, group[-1].next
    created = min(s.created_ms for s in group)
    sealed: list[Segment] = []
    current: SegmentWriter | None = None
    for batch in _blocks(kept):
        first = batch.column("offset")[0].as_py()
        if current is not None and current.segment.records and current.segment.size + batch.nbytes > largest:
            sealed.append(current.seal(replace(current.segment, next=first)))
            base, current = first, None
        if current is None:
            current = writer.new_segment(partition, base, batch.schema)
            made.append(current)
        data = encode(batch, config.codec)
        pace(data.size)
        current.append([block_of(batch, data)], batch.column("offset")[-1].as_py() + 1)
    if current is not None:
        sealed.append(current.seal(replace(current.segment, next=end)))
        writer.files.sync_directory(filenames.partition(writer.root, partition))
    return [replace(s, created_ms=created) for s in sealed]


def discard_segments(made: Iterable[SegmentWriter]) -> None:
    """Remove the files that `rewrite_segments` created and that no manifest line names."""
    for segment in made:
        with contextlib.suppress(OSError):
            segment.abandon(None)


def _blocks(kept: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches of about a block's size: small or thinned-out blocks are merged."""
    for batches in gathered((b for b in kept if b.num_rows), BLOCK_RECORDS_MAX, BLOCK_BYTES):
        yield from split(batches[0] if len(batches) == 1 else pa.concat_batches(batches))
