"""Writes segment files: consecutive blocks, and the checksums that protect their bytes.

A segment is an Arrow IPC stream: the schema message, the blocks, and once it is sealed the end-of-stream
mark. A `Segment` in the manifest says which of its bytes are committed. They are protected in one of two
ways:

- by **marks**, while the segment is active and after a crash. Each mark holds the CRC32C `crc` of the bytes
  [0, position), so the bytes between two marks are verified by continuing from the first mark's CRC. Marks
  can be dropped freely.
- by its **index**, once the segment is sealed: one entry per block with its own CRC32C. The CRC32C of the
  index is in the manifest.

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
from keyfold.statestore.segment.block import END_OF_STREAM, FORMAT_VERSION, RECORD_SCHEMA, stream_header

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
    """The bytes [0, position) of a segment have this CRC32C and hold the records below `next_offset`."""

    position: int
    next_offset: int
    crc: int


@dataclass(frozen=True, slots=True)
class Segment:
    """The committed part of one segment file. It covers the offsets [base, next), with gaps after compaction.

    Attributes:
        name: File name in the partition's directory.
        size: Number of committed bytes; bytes after them are ignored.
        records: Number of records, of which `tombstones` are deletes.
        max_timestamp: Largest record timestamp in ms; -1 without records.
        created_ms: When the first record was appended (`segment.ms`, `max.compaction.lag.ms`).
        index_crc: CRC32C of the index file; None while the segment has marks.
        marks: For a segment without an index. The first mark is after the schema message.
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
    """One encoded block to be appended to a segment. `data` is an Arrow buffer or bytes-like."""

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


#: After this many unsynced bytes a sync starts in the background, so that the disk works while blocks are
#: encoded.
_EARLY_SYNC_BYTES: Final = 16 << 20


@functools.cache
def _early_syncs() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="keyfold-sync")


# Threads do not survive a fork.
os.register_at_fork(after_in_child=_early_syncs.cache_clear)


class SegmentWriter:
    """Appends blocks to one new segment file. The caller decides when to sync and what is committed."""

    def __init__(
        self,
        files: Files,
        directory: Path,
        name: str,
        base: int,
        now_ms: int,
        schema: pa.Schema = RECORD_SCHEMA,
    ) -> None:
        #: of every block
        self.schema = schema
        self._header = stream_header(schema)
        self._files = files
        self._directory = directory
        self._file: OpenFile = files.create(directory / name)
        self._entries = bytearray()
        self._unsynced = 0
        self._early: Future[None] | None = None
        self._crc = crc32c(self._header)
        try:
            files.append(self._file, [self._header])
        except BaseException:
            files.close(self._file)
            raise
        start = Mark(len(self._header), base, self._crc)
        #: everything appended so far, committed or not
        self.segment = Segment(name, base, base, start.position, 0, 0, -1, now_ms, None, (start,))

    def append(self, blocks: Sequence[Block], next_offset: int) -> Segment:
        """Append blocks. Returns the segment with its first mark and a mark after these blocks.

        `next_offset` is one past their last record.
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
        # The manifest keeps the marks between: keeping them here would make every append more expensive.
        marks = (before.marks[0], Mark(position, next_offset, crc))
        self.segment = Segment(
            before.name, before.base, next_offset, position, records, tombstones, newest, before.created_ms,
            None, marks,
        )  # fmt: skip
        return self.segment

    def sync(self) -> None:
        """Make everything appended so far durable. Raises `OSError`, also from a sync started earlier."""
        self._settle()
        self._files.sync(self._file)
        self._unsynced = 0

    def _settle(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            early.result()

    def seal(self, committed: Segment) -> Segment:
        """End the stream after the committed bytes, then write and sync the index and the file. Returns the
        sealed segment.

        Bytes of an abandoned batch after `committed.size` are truncated: no reader references them.
        """
        self._settle()
        if self._file.position > committed.size:
            self._files.truncate(self._file, committed.size)
        self._files.append(self._file, [END_OF_STREAM])
        self._files.sync(self._file)
        self._files.close(self._file)
        blocks = np.frombuffer(bytes(self._entries), ENTRY)
        blocks = blocks[blocks["position"] < committed.size]
        index = encode_index(committed.size, blocks, self._header)
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
        """Stop appending. Truncates bytes after `committed`; removes the file if nothing was committed."""
        try:
            self._settle()
            if committed is None:
                # In a directory that was created again, another writer may have a file with this name.
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


def encode_index(segment_bytes: int, blocks: npt.NDArray[np.void], header: bytes) -> bytes:
    """The bytes of an index file, in the layout at the top of the module.

    Args:
        header: The schema message of the segment.
    """
    head = INDEX_HEADER.pack(
        INDEX_MAGIC, FORMAT_VERSION, 0, segment_bytes, len(blocks), len(header), crc32c(header)
    )
    return head + blocks.tobytes()


def write_index(files: Files, path: Path, index: bytes) -> None:
    """Write and sync a new index file. The caller syncs the directory."""
    file = files.create(path)
    try:
        files.append(file, [index])
        files.sync(file)
    finally:
        files.close(file)
