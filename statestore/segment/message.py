"""Reads and changes the metadata of a block, an Arrow message, without decoding its data. No I/O.

The metadata is a flatbuffer with the place and the length of every buffer in the body. A compressed buffer
begins with its uncompressed length as int64. The offset column is the first one and has no nulls, so its
values are the second buffer and begin where the body begins.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keyfold.statestore.errors import BadRecord

#: A marker and the length of the metadata, before the metadata.
PREFIX_BYTES: Final = 8

_CODECS: Final = ("lz4", "zstd")
#: Reads a signed number, by its size in bytes.
_NUMBERS: Final = {kind.size: kind.unpack_from for kind in map(struct.Struct, ("<h", "<i", "<q"))}
#: The number of the buffer with the offsets. The one before it is their validity.
_OFFSETS: Final = 1
#: The position of the key column's buffers: validity and values of each column before it, then its validity.
_KEY_BUFFERS: Final = slice(5, 7)


@dataclass(frozen=True)
class BlockSize:
    """The sizes of a block in bytes (stored, uncompressed, and its uncompressed keys with their offsets), its
    codec (None if uncompressed), and its number of records.
    """

    stored: int
    raw: int
    raw_keys: int
    codec: str | None
    records: int


def size_of(block: pa.Buffer) -> BlockSize:
    """Read from the block's metadata and eight bytes of each compressed buffer. Nothing is decoded.

    Raises:
        ValueError: The bytes are not a block. Their checksum need not have been verified.
    """
    data = memoryview(block)
    message = _Message.of(data)
    try:
        if message.codec is None:
            sizes = [stored for _, stored in message.buffers]
        else:
            sizes = [_raw(data, message.body + place, stored) for place, stored in message.buffers]
    except (IndexError, OverflowError) as e:
        raise ValueError("not an Arrow record batch") from e
    return BlockSize(
        len(data),
        message.body + sum(_padded(n) for n in sizes),
        sum(sizes[_KEY_BUFFERS]),
        message.codec,
        message.records,
    )


def rebase(block: pa.Buffer, base_offset: int) -> npt.NDArray[np.uint8]:
    """A copy of a block with its offsets 0, 1, 2, … replaced by `base_offset` + 0, 1, 2, … Of a compressed
    block, only the offsets are compressed again.

    Raises:
        BadRecord: The block's offsets are not 0, 1, 2, …: it is not a staged block.
    """
    placed: npt.NDArray[np.uint8] = np.frombuffer(block, np.uint8).copy()
    message = _Message.of(memoryview(block))
    records = message.records
    if not records:
        return placed
    place, stored = message.buffers[_OFFSETS]
    start = message.body + place
    held = _decompressed(block.slice(start, stored), message.codec)
    offsets = placed[start : start + stored].view("<i8") if held is None else np.frombuffer(held, "<i8")
    if int(offsets[0]) != 0 or int(offsets[-1]) != records - 1:
        raise BadRecord(
            "The offsets of a staged block do not start at 0.",
            expected=f"offsets 0 to {records - 1}",
            found=f"{int(offsets[0])} to {int(offsets[-1])}",
            remedy="write the batch again",
        )
    if held is None:
        offsets += base_offset
        return placed
    return _with_offsets(placed, message, np.arange(base_offset, base_offset + records, dtype="<i8"))


def selected(block: pa.Buffer, nodes: Sequence[int], buffers: Sequence[int]) -> bytes:
    """A block with only these nodes and buffers, which are given by their numbers, ascending.

    Raises:
        ValueError: The bytes are not a block that has them.
    """
    data = memoryview(block)
    message = _Message.of(data)
    if max(nodes) >= message.nodes_count or max(buffers) >= len(message.buffers):
        raise ValueError("not an Arrow record batch of these columns")
    metadata = np.frombuffer(data[: message.body], np.uint8).copy()
    pairs = metadata[message.nodes : message.nodes + 16 * message.nodes_count].view("<i8").reshape(-1, 2)
    pairs[: len(nodes)] = pairs[list(nodes)]
    metadata[message.nodes - 4 : message.nodes].view("<u4")[:] = len(nodes)
    chosen = [message.buffers[i] for i in buffers]
    padded = [_padded(stored) for _, stored in chosen]
    ends = np.cumsum(padded)
    pairs = metadata[message.table : message.table + 16 * len(message.buffers)].view("<i8").reshape(-1, 2)
    pairs[: len(chosen), 0] = ends - padded
    pairs[: len(chosen), 1] = [stored for _, stored in chosen]
    metadata[message.table - 4 : message.table].view("<u4")[:] = len(chosen)
    metadata[message.length : message.length + 8].view("<i8")[:] = ends[-1]
    starts = [message.body + place for place, _ in chosen]
    parts = [data[start : start + size] for start, size in zip(starts, padded, strict=True)]
    return b"".join([metadata.data, *parts])


def _with_offsets(
    block: npt.NDArray[np.uint8], message: _Message, offsets: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """A compressed block with other offsets. The buffers after them move, so their places change too."""
    raw = offsets.tobytes()
    data = len(raw).to_bytes(8, "little") + pa.compress(raw, message.codec, asbytes=True)
    place, after = message.buffers[_OFFSETS][0], message.buffers[_OFFSETS + 1][0]
    changed = np.concatenate(
        [
            block[: message.body + place],
            np.frombuffer(data.ljust(_padded(len(data)), b"\0"), np.uint8),
            block[message.body + after :],
        ]
    )
    moved = len(changed) - len(block)
    table = changed[message.table : message.table + 16 * len(message.buffers)].view("<i8").reshape(-1, 2)
    table[_OFFSETS, 1] = len(data)
    table[_OFFSETS + 1 :, 0] += moved
    changed[message.length : message.length + 8].view("<i8")[:] += moved
    return changed


def _decompressed(data: pa.Buffer, codec: str | None) -> pa.Buffer | None:
    """A compressed buffer without compression; None if it is not compressed."""
    if codec is None:
        return None
    said = _number(memoryview(data), 0, 8)
    return data.slice(8) if said == -1 else pa.decompress(data.slice(8), said, codec)


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def is_compressed(block: pa.Buffer) -> bool:
    try:
        return bool(_Table.root(memoryview(block), PREFIX_BYTES).table(2).field(3))
    except IndexError:
        return False


def _raw(data: memoryview, place: int, length: int) -> int:
    """A compressed buffer begins with its uncompressed length, or with -1 if it is not compressed."""
    if length == 0:
        return 0
    said = _number(data, place, 8)
    return length - 8 if said == -1 else said


def _number(data: memoryview, place: int, size: int) -> int:
    if not 0 <= place <= len(data) - size:
        raise IndexError
    number: int = _NUMBERS[size](data, place)[0]
    return number


@dataclass(frozen=True)
class _Message:
    """What the metadata of a block says. `body`, `length` and `table` are positions in the block: of the
    body, of the body's length, and of the places and lengths in `buffers`. Places count from the body.
    """

    body: int
    length: int
    nodes: int
    nodes_count: int
    table: int
    buffers: tuple[tuple[int, int], ...]
    codec: str | None
    records: int

    @classmethod
    def of(cls, data: memoryview) -> _Message:
        """Raises `ValueError` if the bytes are not a block."""
        try:
            body = PREFIX_BYTES + int.from_bytes(data[4:8], "little")
            message = _Table.root(data, PREFIX_BYTES)
            batch = message.table(2)
            nodes, nodes_count = batch.vector(1)
            table, count = batch.vector(2)
            length = batch.field(0)
            records = _number(data, length, 8) if length else 0
            if not 0 <= table <= table + 16 * count <= len(data):
                raise IndexError
            numbers = struct.unpack_from(f"<{2 * count}q", data, table)
            buffers = tuple(zip(numbers[::2], numbers[1::2], strict=True))
            codec = None
            if batch.field(3):
                field = batch.table(3).field(0)
                codec = _CODECS[data[field] if field else 0]
        except (IndexError, OverflowError) as e:
            raise ValueError("not an Arrow record batch") from e
        return cls(body, message.field(3), nodes, nodes_count, table, buffers, codec, records)


class _Table(NamedTuple):
    """A table of a flatbuffer. Positions are absolute; the position of a missing field is 0."""

    data: memoryview
    place: int

    @classmethod
    def root(cls, data: memoryview, place: int) -> _Table:
        return cls(data, place + _number(data, place, 4))

    def field(self, number: int) -> int:
        fields = self.place - _number(self.data, self.place, 4)
        if 4 + 2 * number >= _number(self.data, fields, 2):
            return 0
        offset = _number(self.data, fields + 4 + 2 * number, 2)
        return self.place + offset if offset else 0

    def _follow(self, number: int) -> int:
        field = self.field(number)
        if not field:
            raise IndexError
        return field + _number(self.data, field, 4)

    def table(self, number: int) -> _Table:
        return _Table(self.data, self._follow(number))

    def vector(self, number: int) -> tuple[int, int]:
        """The position of its first element, and the number of elements."""
        place = self._follow(number)
        return place + 4, _number(self.data, place, 4)
