"""What a cleaner pass keeps of a group of segments, as new segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

import pyarrow as pa

from keyfold.checkpoints.writer import Writer
from keyfold.statestore import names
from keyfold.statestore.blocks import BLOCK_BYTES, BLOCK_RECORDS_MAX, encode, split
from keyfold.statestore.segment import Segment, SegmentWriter, block_of

#: Told of bytes read or written, as they are in the files; may sleep, and may end the pass by raising.
Pace: TypeAlias = Callable[[int], None]


def copied(
    writer: Writer,
    number: int,
    group: tuple[Segment, ...],
    kept: Iterator[pa.RecordBatch],
    pace: Pace,
    made: list[SegmentWriter],
) -> list[Segment]:
    """The kept records as sealed, durable segments of up to `segment.bytes`, which together cover what the
    group covered.

    Args:
        made: gets every file that is begun, for whoever has to remove it.

    Raises:
        OSError, and whatever `kept` and `pace` raise.
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
            current = writer.new_segment(number, base)
            made.append(current)
        data = encode(batch, config.codec)
        pace(data.size)
        current.append([block_of(batch, data)], batch.column("offset")[-1].as_py() + 1)
    if current is not None:
        sealed.append(current.seal(replace(current.segment, next=end)))
        writer.files.sync_directory(names.partition(writer.root, number))
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
