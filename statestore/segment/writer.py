"""Segments: files of consecutive blocks, and what vouches for their bytes.

A segment is an Arrow IPC stream: the schema message, blocks, and once it is sealed the end-of-stream mark.
What counts of it is said by a `Segment`, which the manifest keeps. A segment is vouched for in one of two
ways:

- by **marks**, while it is active and after a crash: each mark says that the CRC32C of bytes [0, position) is
  `crc`, so the bytes between two marks are checked by going on from the first mark's CRC. Marks can be
  thinned out at will.
- by its **index**, once it is sealed: one entry per block with its own CRC32C; the index's CRC32C is in the
  manifest.

The index:

    0      4     6     8               16              24              28           32             32 + 48·n
    | KFIX | ver |  0  | segment bytes | blocks n      | header bytes  | header crc | entry 0 … entry n-1 |
      4      u16   u16   u64             u64             u32             u32

    entry: | base i64 | last i64 | position i64 | length i64 | max timestamp i64 | records u32 | crc u32 |
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from keyfold.statestore import filenames
from keyfold.statestore.files import Data, Files, OpenFile
from keyfold.statestore.segment.block import END_OF_STREAM, FORMAT_VERSION, STREAM_HEADER

INDEX_MAGIC: Final = b"KFIX"
INDEX_HEADER: Final = struct.Struct("<4sHHQQII")
ENTRY: Final = np.dtype(
    [
        ("base", "<i8"),
        ("last", "<i8"),
        ("position", "<i8"),
        ("length", "<i8"),
        ("max_timestamp", "<i8"),
        ("records", "<u4"),
        ("crc", "<u4"),
    ]
)
_ENTRY_PACK: Final = struct.Struct("<qqqqqII")


@dataclass(frozen=True, slots=True)
class Mark:
    """Bytes [0, position) of a segment have this CRC32C and hold the records below `next_offset`."""

    position: int
    next_offset: int
    crc: int


@dataclass(frozen=True, slots=True)
class Segment:
    """What counts of one segment file. It covers the offsets [base, next), with gaps once it was compacted.

    Attributes:
        name: file name in the partition's directory.
        size: bytes that count; anything behind them is dead.
        records: how many there are, of which `tombstones` are deletes.
        max_timestamp: largest record timestamp in ms, -1 without records.
        created_ms: when the first record was appended (`segment.ms`, `max.compaction.lag.ms`).
        index_crc: CRC32C of the index file, None while marks vouch.
        marks: for a segment without index; the first is behind the schema message.
    """

    name: str
    base: int
    next: int
    size: int
    records: int
    tombstones: int
    max_timestamp: int
    created_ms: int
    index_crc: int | None = None
    marks: tuple[Mark, ...] = ()

    @property
    def sealed(self) -> bool:
        return self.index_crc is not None


@dataclass(frozen=True, slots=True)
class Block:
    """One encoded block on its way into a segment. `data` is an Arrow buffer or anything like bytes."""

    data: Data
    base: int
    last: int
    records: int
    tombstones: int
    max_timestamp: int


def block_of(batch: pa.RecordBatch, data: Data) -> Block:
    """Describe an encoded batch of at least one record."""
    offsets = batch.column("offset")
    timestamps = np.frombuffer(batch.column("timestamp").buffers()[1], np.int64)
    start = batch.column("timestamp").offset
    return Block(
        data=data,
        base=offsets[0].as_py(),
        last=offsets[-1].as_py(),
        records=batch.num_rows,
        tombstones=batch.column("value").null_count,
        max_timestamp=int(timestamps[start : start + batch.num_rows].max()),
    )


#: Behind so many unsynced bytes a sync is begun in the background, so that the disk works while blocks are
#: made.
_EARLY_SYNC_BYTES: Final = 16 << 20


@functools.cache
def _early_syncs() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="keyfold-sync")


# Threads do not survive a fork.
os.register_at_fork(after_in_child=_early_syncs.cache_clear)


class SegmentWriter:
    """Appends blocks to one new segment file. The caller says when to sync, and what became part of a
    commit.
    """

    def __init__(self, files: Files, directory: Path, name: str, base: int, now_ms: int) -> None:
        self._files = files
        self._directory = directory
        self._file: OpenFile = files.create(directory / name)
        self._entries = bytearray()
        self._unsynced = 0
        self._early: Future[None] | None = None
        self._crc = crc32c(STREAM_HEADER)
        try:
            files.append(self._file, [STREAM_HEADER])
        except BaseException:
            files.close(self._file)
            raise
        start = Mark(len(STREAM_HEADER), base, self._crc)
        #: what was appended so far, whether committed or not
        self.segment = Segment(name, base, base, start.position, 0, 0, -1, now_ms, None, (start,))

    def append(self, blocks: Sequence[Block], next_offset: int) -> Segment:
        """Write blocks one after the other; returns the segment with its first mark and one after these.

        `next_offset`: one past their last record.
        """
        before = self.segment
        position, crc = before.size, self._crc
        records, tombstones, newest = before.records, before.tombstones, before.max_timestamp
        for b in blocks:
            length = memoryview(b.data).nbytes
            self._entries += _ENTRY_PACK.pack(
                b.base, b.last, position, length, b.max_timestamp, b.records, crc32c(b.data)
            )
            crc = crc32c(b.data, crc)
            position += length
            records += b.records
            tombstones += b.tombstones
            newest = max(newest, b.max_timestamp)
        self._files.append(self._file, [b.data for b in blocks])
        self._crc = crc
        self._unsynced += position - before.size
        if self._unsynced >= _EARLY_SYNC_BYTES and (self._early is None or self._early.done()):
            self._settle()
            self._early, self._unsynced = _early_syncs().submit(self._files.sync, self._file), 0
        # The manifest keeps those between: here their number would make every append cost more.
        marks = (before.marks[0], Mark(position, next_offset, crc))
        self.segment = Segment(
            before.name, before.base, next_offset, position, records, tombstones, newest, before.created_ms,
            None, marks,
        )  # fmt: skip
        return self.segment

    def sync(self) -> None:
        """Everything appended so far survives a power loss. Raises `OSError`, also of a sync begun
        earlier.
        """
        self._settle()
        self._files.sync(self._file)
        self._unsynced = 0

    def _settle(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            early.result()

    def seal(self, committed: Segment) -> Segment:
        """End the stream behind what was committed, write and sync index and file; returns the sealed
        segment.

        Bytes of an abandoned batch behind `committed.size` are cut off: no reader can name them.
        """
        self._settle()
        if self._file.position > committed.size:
            self._files.truncate(self._file, committed.size)
        self._files.append(self._file, [END_OF_STREAM])
        self._files.sync(self._file)
        self._files.close(self._file)
        blocks = np.frombuffer(bytes(self._entries), ENTRY)
        blocks = blocks[blocks["position"] < committed.size]
        index = encode_index(committed.size, blocks)
        write_index(self._files, self._directory / filenames.segment_index(committed.name), index)
        return Segment(
            committed.name,
            committed.base,
            committed.next,
            committed.size,
            committed.records,
            committed.tombstones,
            committed.max_timestamp,
            committed.created_ms,
            crc32c(index),
            (),
        )

    def abandon(self, committed: Segment | None) -> None:
        """Stop appending. Bytes behind `committed` go, the whole file goes where nothing of it was
        committed.
        """
        try:
            self._settle()
            if committed is None:
                # In a directory that was made again, another writer may have a file of that name.
                if self._files.is_in_place(self._file):
                    self._files.unlink(self._file.path)
            elif self._file.position > committed.size:
                self._files.truncate(self._file, committed.size)
        finally:
            self._files.close(self._file)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._settle()
        self._files.close(self._file)


def encode_index(segment_bytes: int, blocks: npt.NDArray[np.void]) -> bytes:
    """The bytes of an index file, see the ruler at the top of the module."""
    head = INDEX_HEADER.pack(
        INDEX_MAGIC, FORMAT_VERSION, 0, segment_bytes, len(blocks), len(STREAM_HEADER), crc32c(STREAM_HEADER)
    )
    return head + blocks.tobytes()


def write_index(files: Files, path: Path, index: bytes) -> None:
    """A new index file, synced; the directory is synced by the caller."""
    file = files.create(path)
    try:
        files.append(file, [index])
        files.sync(file)
    finally:
        files.close(file)
