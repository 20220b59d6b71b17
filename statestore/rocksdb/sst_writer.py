"""Writes sorted RocksDB files (SST) directly from Arrow columns, for `ingest_external_file`.

rocksdict's `SstFileWriter` needs one call and two Python objects per row. A file that RocksDB's
`BlockBasedTable` reads is simple if it has no shortened keys, no compression and no filter. RocksDB's next
compaction adds all of these.

    file        = data block…, properties, index, metaindex, footer
    block       = entry…, restart uint32…, count of restarts uint32, trailer
    entry       = varint 0, varint key length, varint value length, key, value
    key         = the user's key, sequence number 0 and type in 8 bytes: 1 is a value, 0 a delete
    trailer     = 0 (uncompressed), the lower half of the block's XXH3 hash, uint32

Source: RocksDB's `table/format.h`, `table/block_based/block_builder.cc` and
`db/external_sst_file_ingestion_job.cc`. No I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64_intdigest

from keyfold.statestore.keys.buffers import Bools, Ints

#: A block ends with the entry that reaches this size. A lookup reads and checks a whole block: among a
#: million keys, lookups were a seventh faster than with 8 KiB. Smaller blocks take longer to write.
BLOCK_BYTES: Final = 2 << 10
#: A search in a block scans at most this many entries one by one.
_RESTART_INTERVAL: Final = 4
#: The number of rows, and of bytes of values, to encode at a time; they fit the caches.
_ROWS: Final = 16_384
_ROWS_BYTES: Final = 8 << 20

_VALUE: Final = struct.pack("<Q", 1)
_DELETE: Final = struct.pack("<Q", 0)
_MAGIC: Final = 0x88E241B785F4CFF7
_FORMAT_VERSION: Final = 5
#: RocksDB's default. It also reads CRC32C, but at a third of the speed in a build for generic processors.
_XXH3: Final = 4
_FOOTER_HANDLES_BYTES: Final = 40
_NOT_COMPRESSED: Final = b"\0"
_LOWER_HALF: Final = 0xFFFFFFFF
_CHECKSUM_BYTES: Final = 4
_TRAILER_BYTES: Final = 1 + _CHECKSUM_BYTES

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Rows:
    """Rows in ascending order of unique keys.

    Attributes:
        keys: Binary, without nulls; a stored key is `key_prefix` followed by one of these.
        values: Binary; a null is a delete.
        value_heads: (rows, n) bytes that precede each value.
    """

    key_prefix: bytes
    keys: pa.Array
    value_heads: Bytes
    values: pa.Array

    def parts(self) -> Iterator[Rows]:
        """The same rows in parts."""
        ends = np.cumsum(_lengths(self.values) + self.value_heads.shape[1])
        start = 0
        while start < len(self.keys):
            limit = (ends[start - 1] if start else 0) + _ROWS_BYTES
            stop = min(start + _ROWS, max(start + 1, int(np.searchsorted(ends, limit, side="right"))))
            at = slice(start, stop)
            yield Rows(
                self.key_prefix,
                self.keys.slice(start, stop - start),
                self.value_heads[at],
                self.values.slice(start, stop - start),
            )
            start = stop

    def entries(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Stored key and value, row by row; None for a delete."""
        heads = self.value_heads.tobytes()
        width = self.value_heads.shape[1]
        for n, (key, value) in enumerate(zip(self.keys.to_pylist(), self.values.to_pylist(), strict=True)):
            head = heads[n * width : (n + 1) * width]
            yield self.key_prefix + key, None if value is None else head + value


class SortedFile:
    """The bytes of one file. `add` and `finish` return the bytes to write next."""

    def __init__(self) -> None:
        self._position = 0
        self._index: list[tuple[pa.Array, Ints, Ints]] = []
        self._blocks = self._entries = self._deletes = self._key_bytes = self._value_bytes = 0

    def add(self, rows: Rows) -> Iterator[memoryview]:
        """Append rows with keys above all earlier ones. Returns bytes to write, some blocks at a time."""
        for part in rows.parts():
            yield self._add_blocks(part)

    def finish(self) -> list[bytes]:
        """The end of the file."""
        data_bytes = self._position
        index = self._index_block()
        pieces: list[bytes] = []
        index_handle = self._place(index, pieces)
        properties = self._properties(data_bytes, len(index))
        handles = {b"rocksdb.properties": self._place(_block(sorted(properties.items())), pieces)}
        metaindex_handle = self._place(_block(sorted(handles.items())), pieces)
        footer = (metaindex_handle + index_handle).ljust(_FOOTER_HANDLES_BYTES, b"\0")
        pieces.append(bytes([_XXH3]) + footer + struct.pack("<IQ", _FORMAT_VERSION, _MAGIC))
        return pieces

    def _place(self, block: bytes, pieces: list[bytes]) -> bytes:
        """Append a block and return its handle."""
        handle = _varint(self._position) + _varint(len(block))
        pieces += [block, _trailer(block)]
        self._position += len(block) + _TRAILER_BYTES
        return handle

    def _add_blocks(self, rows: Rows) -> memoryview:
        data, ends = self._encode(rows)
        # An entry belongs to the block in which it begins.
        begins = ends - np.diff(ends, prepend=0)
        cuts = np.flatnonzero(np.diff(begins // BLOCK_BYTES)) + 1
        firsts, behind = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(ends)]])
        starts, stops = begins[firsts], ends[behind - 1]
        counts = -(-(behind - firsts) // _RESTART_INTERVAL)
        sizes = stops - starts + 4 * (counts + 1)
        next_places = np.cumsum(sizes + _TRAILER_BYTES)
        places = next_places - _TRAILER_BYTES - sizes
        out = np.zeros(int(next_places[-1]), np.uint8)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        restarts = begins[np.repeat(firsts, counts) + _RESTART_INTERVAL * within] - np.repeat(starts, counts)
        _put(out, np.repeat(places + stops - starts, counts) + 4 * within, restarts)
        _put(out, places + sizes - 4, counts)
        entries, blocks = memoryview(data).cast("B"), memoryview(out.data)
        checksums = []
        columns = (starts, stops, places, places + stops - starts, places + sizes)
        for start, stop, place, entries_end, end in zip(*(c.tolist() for c in columns), strict=True):
            blocks[place:entries_end] = entries[start:stop]
            checksums.append(xxh3_64_intdigest(blocks[place:end]))
        _put(out, next_places - _CHECKSUM_BYTES, np.array(checksums, np.uint64) & np.uint64(_LOWER_HALF))
        last = pa.array(behind - 1)
        kinds = pc.if_else(rows.values.take(last).is_valid(), _VALUE, _DELETE)
        keys = pc.binary_join_element_wise(rows.key_prefix, rows.keys.take(last), kinds, b"")
        self._index.append((keys, self._position + places, sizes))
        self._position += len(out)
        self._blocks += len(sizes)
        return blocks

    def _encode(self, rows: Rows) -> tuple[pa.Buffer, Ints]:
        """All entries, concatenated, and where each ends."""
        deleted = rows.values.is_null().to_numpy(zero_copy_only=False) if rows.values.null_count else None
        heads = rows.value_heads
        key_lengths = _lengths(rows.keys) + (len(rows.key_prefix) + 8)
        value_lengths = _lengths(rows.values) + heads.shape[1]
        middle = np.empty((len(rows.keys), 8 + heads.shape[1]), np.uint8)
        middle[:, :8] = np.frombuffer(_VALUE, np.uint8)
        middle[:, 8:] = heads
        values, chosen = rows.values, None
        if deleted is not None:
            value_lengths[deleted] = 0
            middle[deleted, :8] = np.frombuffer(_DELETE, np.uint8)
            chosen = np.ones(middle.shape, np.bool_)
            chosen[deleted, 8:] = False
            values = pc.fill_null(values, b"")
            self._deletes += int(deleted.sum())
        self._entries += len(rows.keys)
        self._key_bytes += int(key_lengths.sum())
        self._value_bytes += int(value_lengths.sum())
        return _entries(key_lengths, value_lengths, rows.key_prefix, rows.keys, _flat(middle, chosen), values)

    def _index_block(self) -> bytes:
        """The last key of every block and the block's handle. Each entry is a restart."""
        keys = pa.concat_arrays([keys for keys, _, _ in self._index])
        places = np.concatenate([places for _, places, _ in self._index])
        sizes = np.concatenate([sizes for _, _, sizes in self._index])
        handles = _flat(*_varints(places, sizes))
        data, ends = _entries(_lengths(keys), _lengths(handles), b"", keys, handles)
        restarts = np.concatenate([[0], ends[:-1], [len(ends)]]).astype("<u4")
        return bytes(data) + restarts.tobytes()

    def _properties(self, data_bytes: int, index_bytes: int) -> dict[bytes, bytes]:
        """The properties that RocksDB requires of an external file, and those that its statistics need."""
        return {
            b"rocksdb.block.based.table.index.type": struct.pack("<I", 0),
            b"rocksdb.block.based.table.prefix.filtering": b"0",
            b"rocksdb.block.based.table.whole.key.filtering": b"1",
            b"rocksdb.comparator": b"leveldb.BytewiseComparator",
            b"rocksdb.compression": b"NoCompression",
            b"rocksdb.data.size": _varint(data_bytes),
            b"rocksdb.deleted.keys": _varint(self._deletes),
            b"rocksdb.external_sst_file.global_seqno": struct.pack("<Q", 0),
            b"rocksdb.external_sst_file.version": struct.pack("<I", 2),
            b"rocksdb.filter.size": _varint(0),
            b"rocksdb.fixed.key.length": _varint(0),
            b"rocksdb.format.version": _varint(_FORMAT_VERSION),
            b"rocksdb.index.key.is.user.key": _varint(0),
            b"rocksdb.index.size": _varint(index_bytes),
            b"rocksdb.index.value.is.delta.encoded": _varint(0),
            b"rocksdb.merge.operands": _varint(0),
            b"rocksdb.num.data.blocks": _varint(self._blocks),
            b"rocksdb.num.entries": _varint(self._entries),
            b"rocksdb.num.range-deletions": _varint(0),
            b"rocksdb.raw.key.size": _varint(self._key_bytes),
            b"rocksdb.raw.value.size": _varint(self._value_bytes),
        }


def _entries(
    key_lengths: Ints, value_lengths: Ints, prefix: bytes, *columns: pa.Array
) -> tuple[pa.Buffer, Ints]:
    """Entries without shared prefixes, concatenated, and where each ends."""
    uniform = (key_lengths == key_lengths[0]).all() and (value_lengths == value_lengths[0]).all()
    if uniform:
        front: pa.Scalar | pa.Array = pa.scalar(
            b"\0" + _varint(int(key_lengths[0])) + _varint(int(value_lengths[0])) + prefix
        )
    else:
        numbers, chosen = _varints(np.zeros(1, np.int64), key_lengths, value_lengths)
        with_prefix = np.empty((len(numbers), numbers.shape[1] + len(prefix)), np.uint8)
        with_prefix[:, : numbers.shape[1]] = numbers
        with_prefix[:, numbers.shape[1] :] = np.frombuffer(prefix, np.uint8)
        front = _flat(with_prefix, np.pad(chosen, ((0, 0), (0, len(prefix))), constant_values=True))
    joined = pc.binary_join_element_wise(front, *columns, b"")
    _, places, data = joined.buffers()
    ends: Ints = np.frombuffer(places, np.int32, len(joined) + 1)[1:].astype(np.int64)
    return data, ends


def _varints(*columns: Ints) -> tuple[Bytes, Bools]:
    """Numbers as varints, column by column: the bytes, and which of them are used."""
    rows = max(len(numbers) for numbers in columns)
    found = []
    for numbers in columns:
        width = max(1, -(-int(numbers.max()).bit_length() // 7))
        shifted = numbers[:, None] >> np.arange(0, 7 * width, 7)
        field = (shifted & 0x7F | (shifted > 0x7F).astype(np.int64) << 7).astype(np.uint8)
        counts = shifted > 0
        counts[:, 0] = True
        found.append((np.broadcast_to(field, (rows, width)), np.broadcast_to(counts, (rows, width))))
    return np.hstack([field for field, _ in found]), np.hstack([counts for _, counts in found])


def _put(out: Bytes, places: Ints, numbers: Ints) -> None:
    """Write numbers as uint32 at these positions."""
    out[places[:, None] + np.arange(4)] = numbers.astype("<u4").view(np.uint8).reshape(-1, 4)


def _lengths(values: pa.Array) -> Ints:
    """The length of every value; 0 for a null."""
    lengths: Ints = pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def _flat(fields: Bytes, chosen: Bools | None) -> pa.Array:
    """Rows of bytes as binary: each whole row, or the chosen bytes of it."""
    rows, width = fields.shape
    if chosen is None:
        ends = np.arange(rows + 1, dtype=np.int32) * np.int32(width)
        data = fields.reshape(-1)
    else:
        ends = np.concatenate([[0], np.cumsum(chosen.sum(axis=1))]).astype(np.int32)
        data = fields[chosen]
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(data)])


def _block(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A block of a few entries, each a restart."""
    out = bytearray()
    restarts = []
    for key, value in entries:
        restarts.append(len(out))
        out += b"\0" + _varint(len(key)) + _varint(len(value)) + key + value
    restarts = restarts or [0]
    return bytes(out) + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _trailer(block: bytes) -> bytes:
    """The type and checksum that follow a block."""
    return _NOT_COMPRESSED + struct.pack("<I", _checksum(block))


def _checksum(block: bytes | memoryview) -> int:
    """The checksum of an uncompressed block, which its type does not change."""
    return xxh3_64_intdigest(block) & _LOWER_HALF
