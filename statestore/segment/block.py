"""Blocks: one Arrow record batch as bytes. Codecs only, no I/O.

A block is one *encapsulated message* of Arrow's IPC format, so blocks after a schema message form an Arrow
stream:

    0          4               8                        8 + metadata length      8 + metadata length + body
    length
    | FFFFFFFF | metadata len  | flatbuffer (RecordBatch) | body: the column buffers, 8-byte aligned |
      4 bytes    int32, padded

`message` reads and changes a block without decoding it.

Arrow's format has no checksum. The caller verifies the CRC32C of all bytes before they are given to Arrow.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keyfold.statestore.errors import UnsupportedFormat
from keyfold.statestore.segment.message import PREFIX_BYTES, is_compressed

FORMAT_VERSION: Final = 2


def check_version(found: int, path: Path, position: str | None = None) -> None:
    """Raises `UnsupportedFormat` for any other version of the format than `FORMAT_VERSION`."""
    if found == FORMAT_VERSION:
        return
    later = found > FORMAT_VERSION
    raise UnsupportedFormat(
        f"This version of keyfold does not read version {found} of the format.", path=path, position=position,
        expected=f"format version {FORMAT_VERSION}",
        found=f"format version {found}, of {'a later' if later else 'an earlier'} version of keyfold",
        remedy="upgrade keyfold" if later
        else "read it with a keyfold that writes this version, and append its state to a new changelog",
    )  # fmt: skip


HEADERS_TYPE: Final = pa.list_(
    pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())])
)

_METADATA: Final = {"keyfold.magic": "segment", "keyfold.version": str(FORMAT_VERSION)}


@functools.lru_cache(maxsize=64)
def record_schema(values: pa.DataType) -> pa.Schema:
    """The schema of a segment whose values have this type: `binary`, or a struct of typed columns. Its
    metadata holds the magic and the version.
    """
    return pa.schema(
        [
            pa.field("offset", pa.int64(), nullable=False),
            pa.field("timestamp", pa.timestamp("ms"), nullable=False),
            pa.field("key", pa.binary(), nullable=False),
            pa.field("value", values),
            pa.field("headers", HEADERS_TYPE),
        ],
        metadata=_METADATA,
    )


#: The schema of the segments of a changelog of raw bytes.
RECORD_SCHEMA: Final = record_schema(pa.binary())


def stream_header(schema: pa.Schema) -> bytes:
    """The schema message at the start of every segment."""
    header: bytes = schema.serialize().to_pybytes()
    return header


def schema_of(header: pa.Buffer) -> pa.Schema:
    """The schema in the schema message of a segment. Raises `ValueError` if it is not that of a segment."""
    try:
        schema = pa.ipc.read_schema(header)
        expected = record_schema(schema.field("value").type)
    except (pa.ArrowInvalid, KeyError, OSError) as e:
        raise ValueError("not the schema message of a segment") from e
    if not schema.equals(expected, check_metadata=True):
        raise ValueError("the schema message of something else")
    return expected


#: Arrow's end-of-stream mark, written when a segment is sealed.
END_OF_STREAM: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"

#: A block holds about this many bytes of keys and values, and at most this many records.
BLOCK_BYTES: Final = 2 << 20
BLOCK_RECORDS_MAX: Final = 1 << 20

#: A block cannot be larger: Arrow's `binary` has 32-bit offsets.
VALUE_BYTES_MAX: Final = (1 << 31) - (1 << 20)

#: Records with fewer bytes are not compressed: the block would be larger, and take 50 times as long.
_COMPRESSED_FROM: Final = 1 << 10

#: A compressed block up to this size is decoded by the calling thread alone.
_SMALL_BYTES: Final = 64 << 10


def no_headers(count: int) -> pa.Array:
    """The headers column of records without headers.

    `pa.nulls` would also fill the children's offsets and add 50 useless bytes per record to every block.
    """
    bitmap, offsets = np.zeros((count + 7) // 8, np.uint8), np.zeros(count + 1, np.int32)
    items = pa.array([], HEADERS_TYPE.value_type)
    return pa.Array.from_buffers(
        HEADERS_TYPE, count, [pa.py_buffer(bitmap), pa.py_buffer(offsets)], count, children=[items]
    )


def record_batch(
    offsets: npt.NDArray[np.int64], timestamps: pa.Array, keys: pa.Array, values: pa.Array, headers: pa.Array
) -> pa.RecordBatch:
    """A batch of `record_schema` from columns of equal length."""
    if headers.null_count == len(headers):
        headers = no_headers(len(headers))
    return pa.RecordBatch.from_arrays(
        [pa.array(offsets, pa.int64()), timestamps, keys, values, headers], schema=record_schema(values.type)
    )


def binary_bytes(column: pa.Array) -> int:
    """Bytes of data in a binary column, without offsets and validity."""
    if len(column) == 0:
        return 0
    offsets = np.frombuffer(column.buffers()[1], np.int32, 2 + len(column) - 1, column.offset * 4)
    return int(offsets[-1]) - int(offsets[0])


def _data_bytes(column: pa.Array) -> int:
    """Bytes of data in a column of keys or values."""
    return binary_bytes(column) if pa.types.is_binary(column.type) else int(column.nbytes)


def _data_ends(column: pa.Array) -> npt.NDArray[np.int64]:
    """Where the data of each row ends, in bytes. What is nested is taken as equally large in each row."""
    rows, kind = len(column), column.type
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        offsets = np.frombuffer(column.buffers()[1], np.int32, rows + 1, column.offset * 4)
        return offsets[1:].astype(np.int64) - int(offsets[0])
    if pa.types.is_struct(kind):
        ends = np.zeros(rows, np.int64)
        for i in range(kind.num_fields):
            ends += _data_ends(column.field(i))
        return ends
    return np.arange(1, rows + 1) * int(column.nbytes) // max(rows, 1)


def split(batch: pa.RecordBatch, block_bytes: int = BLOCK_BYTES) -> Iterator[pa.RecordBatch]:
    """Slices of `batch` in order, each with about `block_bytes` of keys and values, at least one record."""
    count = batch.num_rows
    if count == 0:
        return
    columns = [batch.column("key"), batch.column("value")]
    total = sum(map(_data_bytes, columns))
    if total <= block_bytes + block_bytes // 2 and count <= BLOCK_RECORDS_MAX:
        yield batch
        return
    ends = np.zeros(count, np.int64)
    for column in columns:
        ends += _data_ends(column)
    start, before = 0, 0
    while start < count:
        stop = int(np.searchsorted(ends, before + block_bytes, side="right"))
        stop = min(max(stop, start + 1), start + BLOCK_RECORDS_MAX, count)
        yield batch.slice(start, stop - start)
        start, before = stop, int(ends[stop - 1])


def encode(batch: pa.RecordBatch, compression: str | None = None) -> pa.Buffer:
    """One block. `compression` is None, "lz4" or "zstd", applied to each column buffer as in Arrow IPC. Few
    bytes are not compressed.
    """
    if compression is None or batch.nbytes < _COMPRESSED_FROM:
        return batch.serialize()
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
        stream.write_batch(batch)
    whole = sink.getvalue()
    header = PREFIX_BYTES + int.from_bytes(memoryview(whole)[4:8], "little")
    return whole.slice(header, whole.size - header - len(END_OF_STREAM))


def decode(block: pa.Buffer, schema: pa.Schema = RECORD_SCHEMA, *, own: bool = True) -> pa.RecordBatch:
    """The records of one block whose checksum was verified. Zero-copy for an uncompressed block.

    Args:
        schema: That of its segment.
        own: False for bytes from an untrusted source: then every offset and length in them is also validated.
    """
    if own and block.size <= _SMALL_BYTES and is_compressed(block):
        # Only a stream can be decoded without Arrow's threads, for which a small block would mostly wait.
        header = stream_header(schema)
        return next(decode_stream(pa.py_buffer(header + block.to_pybytes()), len(header)))
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(block), schema)
    if not own:
        batch.validate(full=True)
    return batch


def decode_stream(data: pa.Buffer, position: int, columns: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
    """The records of each block, starting with the block at `position`, in bytes that begin with
    a schema message. A block is read only when it is requested.

    Unlike `decode` of a large block, this does not decompress the buffers of a block on several threads: most
    bytes are in one buffer, so that costs more than it saves.

    Args:
        columns: The names of the columns to read; empty for all. Other columns are not decompressed.
    """
    fields = [RECORD_SCHEMA.get_field_index(name) for name in columns]
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields)
    reader = pa.BufferReader(data)
    with pa.ipc.open_stream(reader, options=options) as stream:
        # This reads the schema and nothing after it.
        reader.seek(position)
        yield from stream


def block_lengths(data: pa.Buffer) -> Iterator[tuple[int, int]]:
    """`(position, length)` of each block, in bytes that consist of complete blocks."""
    reader = pa.BufferReader(data)
    position = 0
    while position < data.size:
        pa.ipc.read_message(reader)
        end = reader.tell()
        yield position, end - position
        position = end
