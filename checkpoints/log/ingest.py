"""Incoming records: checks a user's Arrow table, converts it to the log's columns and splits it into blocks
per partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from keyfold.checkpoints.log import typed_rows
from keyfold.checkpoints.log.slices import HOLDS_BYTES, SLICE_BYTES, slices
from keyfold.checkpoints.log.tabular import Tabular, table_of
from keyfold.checkpoints.log.writer import BlockFactory, Writer
from keyfold.statestore.errors import BadRecord
from keyfold.statestore.keys.partitioner import partitions_of
from keyfold.statestore.projection import as_type
from keyfold.statestore.schema import rows
from keyfold.statestore.schema.casting import check_values, values_in
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.segment.block import (
    HEADERS_TYPE,
    VALUE_BYTES_MAX,
    encode,
    no_headers,
    record_batch,
    split,
)
from keyfold.statestore.segment.writer import Block, block_of
from keyfold.statestore.timestamps import WRONG_TIMESTAMP, timestamps_ms

__all__ = [
    "Tabular",
    "assign_offsets",
    "blocks_of",
    "digest",
    "given_timestamps",
    "normalize",
    "null_key",
    "partition_blocks",
    "table_of",
    "unplaced",
]

_COLUMNS: Final = ("key", "value", "timestamp", "headers")
_INT32_MAX: Final = (1 << 31) - 1


def normalize(
    data: Tabular, now_ms: int, columns: Columns | None = None, *, packed: bool = False
) -> list[pa.RecordBatch]:
    """The rows of `data` with columns key, value, timestamp, headers, in order. A missing timestamp (null, or
    -1 ms as in Kafka) becomes `now_ms`.

    Args:
        data: with `columns`, a table of the key columns and of value columns; those that are missing are
            null, and a row whose boolean column `_deleted` is true deletes its key. Without, `key` and
            `value` as binary or string of any layout, optionally `timestamp` (a timestamp, or int64 ms) and
            `headers` (list of struct of key and value).
        columns: the typed columns of the changelog.
        packed: keys and values are bytes as in the last-value stores, also with `columns`.

    Raises:
        BadRecord: not a table; a missing, duplicate or unknown column; a wrong type, or a value that does not
            fit the changelog's; a null key; a record of more than 2 GiB; a timestamp before 1970 or after the
            year 294246.
    """
    table = table_of(data)
    names = table.column_names
    typed = columns is not None and not packed and typed_rows.are_columns(names, columns)
    if typed and columns is not None:
        typed_rows.check_names(names, columns)
    elif {"key", "value"} - set(names) or set(names) - set(_COLUMNS) or len(set(names)) < len(names):
        expected = "key, value, and optionally timestamp, headers, each once"
        if columns is not None:
            expected = f"columns of the changelog: {', '.join(columns.arrow_schema().names)}"
        raise BadRecord(
            "Wrong columns for records.", expected=expected,
            found=", ".join(names) or "none", remedy="select and rename the columns",
        )  # fmt: skip
    row = 0
    result = []
    for batch in slices(table):
        # Only a single row can be so large.
        large = batch.nbytes > SLICE_BYTES
        if large:
            _check_columns(batch, row)
        if typed and columns is not None:
            for name, column in zip(names, batch.columns, strict=True):
                check_values(column, name, row)
            keys = typed_rows.keys_of(batch, columns, row)
            values = typed_rows.values_of(batch, columns, row)
            timestamps = pa.array(np.full(batch.num_rows, now_ms, np.int64), pa.timestamp("ms"))
            arrays = [keys, values, timestamps, no_headers(batch.num_rows)]
        else:
            keys = _binary(batch, "key")
            if keys.null_count:
                position = row + int(np.flatnonzero(pc.is_null(keys).to_numpy(zero_copy_only=False))[0])
                raise null_key(position)
            values = _values(batch, columns, packed, row)
            if columns is not None and not packed:
                typed_rows.check_keys(keys, columns, row)
            arrays = [keys, values, _timestamps(batch, now_ms, row), _headers(batch)]
        if large:
            _check_record(keys, values, row)
        result.append(pa.RecordBatch.from_arrays(arrays, list(_COLUMNS)))
        row += batch.num_rows
    return result


def _check_columns(batch: pa.RecordBatch, row: int) -> None:
    """Raises `BadRecord` if a column does not fit one of Arrow's with 32-bit offsets."""
    largest = max(batch.columns, key=lambda column: column.nbytes).nbytes
    if largest > _INT32_MAX:
        raise _too_large(row, f"{largest} bytes")


def _check_record(key: pa.Array, value: pa.Array, row: int) -> None:
    """Raises `BadRecord` for a record that no store can hold."""
    try:
        packed = rows.encode(value, 0) if pa.types.is_struct(value.type) else value
    except pa.ArrowCapacityError:
        raise _too_large(row, "more than 2 GiB") from None
    largest = max(_longest(key), _longest(packed))
    if largest > VALUE_BYTES_MAX:
        raise _too_large(row, f"{largest} bytes")


def _too_large(row: int, found: str) -> BadRecord:
    return BadRecord(
        "A record is too large.", position=f"row {row}",
        expected=f"a key and a value of at most {VALUE_BYTES_MAX} bytes each", found=found,
        remedy="split the value, or keep it elsewhere and write its place",
    )  # fmt: skip


def _longest(column: pa.Array) -> int:
    return int(pc.max(pc.binary_length(column)).as_py() or 0)


def _values(batch: pa.RecordBatch, columns: Columns | None, packed: bool, row: int) -> pa.Array:
    """The values of a table of records."""
    if columns is None:
        return _binary(batch, "value")
    if packed:
        return columns.decode_rows(_binary(batch, "value"))
    column = batch.column("value")
    if not pa.types.is_struct(column.type):
        raise BadRecord(
            "The values are bytes, but the changelog has typed columns.",
            expected=f"columns {', '.join(columns.arrow_schema().names)}", found=str(column.type),
            remedy="give a table of these columns",
        )  # fmt: skip
    return values_in(column, columns.value_type, row)


def unplaced(records: pa.RecordBatch) -> pa.RecordBatch:
    """Records of a log of the same columns, as `normalize` gives them."""
    return records.select(list(_COLUMNS))


def null_key(row: int, batch_id: int | None = None) -> BadRecord:
    """The error for a record without a key. `row` counts from 0 within the batch."""
    where = f"row {row}" if batch_id is None else f"row {row} of batch {batch_id}"
    return BadRecord(
        "The key of a record is null.", position=where, expected="a key that is not null", found="null",
        remedy="filter out these rows, or set their key, before you write them",
    )  # fmt: skip


def given_timestamps(table: pa.Table, columns: Columns | None = None) -> npt.NDArray[np.int64]:
    """The timestamps of the rows, in ms; -1 for rows that get the writer's time."""
    names = table.column_names
    if "timestamp" not in names or (columns is not None and typed_rows.are_columns(names, columns)):
        return np.full(table.num_rows, -1, np.int64)
    parts = [timestamps_ms(chunk, -1)[0] for chunk in table.column("timestamp").chunks]
    return np.concatenate([np.empty(0, np.int64), *(part.cast(pa.int64()).to_numpy() for part in parts)])


def digest(batches: Iterable[pa.RecordBatch], timestamps: npt.NDArray[np.int64]) -> str:
    """A digest of a batch in 32 hexadecimal digits: its rows in order, independent of chunking.

    Args:
        timestamps: the result of `given_timestamps`. The writer's own time is not part of the digest: it
            differs when the batch is delivered again.
    """
    hashes = _Hashes()
    for batch in batches:
        hashes.add("key", batch.column("key"))
        values = batch.column("value")
        hashes.add("value", rows.encode(values, 0) if pa.types.is_struct(values.type) else values)
        headers = batch.column("headers")
        counts = pc.fill_null(pc.list_value_length(headers), -1).to_numpy()
        hashes.update("headers", counts.astype(np.int32).data)
        for part, column in zip(("header key", "header value"), headers.flatten().flatten(), strict=True):
            hashes.add(part, column.cast(pa.binary()))
    hashes.update("timestamps", timestamps.data)
    return hashes.digest()


class _Hashes:
    """One hash per byte stream of a batch, in a fixed order; see docs/format.md."""

    _COLUMNS: Final = ("key", "value", "header key", "header value")
    _STREAMS: Final = (
        *(f"{part} {name}" for name in _COLUMNS for part in ("lengths of", "bytes of")),
        *("headers", "timestamps"),
    )

    def __init__(self) -> None:
        self._hashes = {name: xxhash.xxh3_128() for name in self._STREAMS}

    def update(self, stream: str, data: memoryview) -> None:
        self._hashes[stream].update(data)

    def add(self, name: str, column: pa.Array) -> None:
        """Add the lengths (-1 for null) and the bytes of a binary column."""
        offsets, data = _parts(column)
        lengths = np.diff(offsets)
        if column.null_count:
            lengths[pc.is_null(column).to_numpy(zero_copy_only=False)] = -1
        self.update(f"lengths of {name}", lengths.data)
        self.update(f"bytes of {name}", data)

    def digest(self) -> str:
        return xxhash.xxh3_128(b"".join(h.digest() for h in self._hashes.values())).hexdigest()


def _parts(column: pa.Array) -> tuple[npt.NDArray[np.int32], memoryview]:
    if len(column) == 0:
        return np.zeros(1, np.int32), memoryview(b"")
    _, offsets_buffer, data = column.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32, len(column) + 1, column.offset * 4)
    if data is None:
        return offsets, memoryview(b"")
    return offsets, memoryview(data)[int(offsets[0]) : int(offsets[-1])]


def blocks_of(writer: Writer, batches: Sequence[pa.RecordBatch]) -> dict[int, BlockFactory]:
    """What `normalize` has given, as `Writer.commit` takes it."""
    identity = writer.identity
    # Asked when the blocks are made: a column may be added until then.
    return partition_blocks(
        batches, identity.partitions, identity.config.codec, writer.pool, lambda: writer.identity.value_type
    )


def partition_blocks(
    batches: Sequence[pa.RecordBatch],
    partitions: int,
    compression: str | None,
    pool: Executor,
    value_type: Callable[[], pa.DataType] = pa.binary,
) -> dict[int, BlockFactory]:
    """For each partition that gets records: a function that takes the first offset and makes its blocks."""
    if partitions == 1:
        rows: list[list[npt.NDArray[np.intp] | None]] = [[None] for _ in batches]
    else:
        rows = list(pool.map(lambda batch: _rows_by_partition(batch, partitions), batches))
    touched = [
        p
        for p in range(partitions)
        if any(_some(batch, r[p]) for batch, r in zip(batches, rows, strict=True))
    ]
    return {p: _blocks(batches, [r[p] for r in rows], compression, value_type) for p in touched}


def _some(batch: pa.RecordBatch, rows: npt.NDArray[np.intp] | None) -> bool:
    return batch.num_rows > 0 if rows is None else len(rows) > 0


def _rows_by_partition(batch: pa.RecordBatch, partitions: int) -> list[npt.NDArray[np.intp] | None]:
    numbers = partitions_of(batch.column("key"), partitions).astype(np.uint16)
    order = np.argsort(numbers, kind="stable")
    ends = np.cumsum(np.bincount(numbers, minlength=partitions))
    return list(np.split(order, ends[:-1]))


def _blocks(
    batches: Sequence[pa.RecordBatch],
    rows: Sequence[npt.NDArray[np.intp] | None],
    compression: str | None,
    value_type: Callable[[], pa.DataType],
) -> Callable[[int], Iterator[Block]]:
    def blocks(offset: int) -> Iterator[Block]:
        kind = value_type()
        for batch, indices in zip(batches, rows, strict=True):
            part = batch if indices is None else batch.take(pa.array(indices)) if len(indices) else None
            if part is None or part.num_rows == 0:
                continue
            placed = assign_offsets(part, offset, kind)
            offset += part.num_rows
            for piece in split(placed):
                yield block_of(piece, encode(piece, compression))

    return blocks


def assign_offsets(
    unplaced: pa.RecordBatch, offset: int, values: pa.DataType | None = None
) -> pa.RecordBatch:
    """Records from rows with key, value, timestamp and headers, at the offsets `offset`, `offset` + 1, …

    `values`: the type to give the values.
    """
    offsets = np.arange(offset, offset + unplaced.num_rows, dtype=np.int64)
    key, value, timestamp, headers = (unplaced.column(name) for name in _COLUMNS)
    return record_batch(offsets, timestamp, key, value if values is None else as_type(value, values), headers)


def _binary(batch: pa.RecordBatch, name: str) -> pa.Array:
    column = batch.column(name)
    kind = column.type
    if pa.types.is_null(kind):
        return pa.nulls(len(column), pa.binary())
    if not any(holds(kind) for holds in HOLDS_BYTES):
        raise BadRecord(
            f"The type of column {name!r} is not supported.",
            expected="binary or string",
            found=str(kind),
            remedy="encode the column to bytes, or write it with ChangelogSink, which encodes columns",
        )
    return as_type(column, pa.binary())


def _timestamps(batch: pa.RecordBatch, now_ms: int, row: int) -> pa.Array:
    if "timestamp" not in batch.schema.names:
        return pa.array(np.full(batch.num_rows, now_ms, np.int64), pa.timestamp("ms"))
    column = batch.column("timestamp")
    if not (pa.types.is_timestamp(column.type) or pa.types.is_int64(column.type)):
        raise BadRecord(
            "The type of column 'timestamp' is not supported.",
            expected="a timestamp, or int64 with milliseconds since 1970-01-01 UTC", found=str(column.type),
            remedy="cast the column",
        )  # fmt: skip
    timestamps, wrong = timestamps_ms(column, now_ms)
    if wrong >= 0:
        raise BadRecord(
            WRONG_TIMESTAMP[0], position=f"row {row + wrong}", expected=WRONG_TIMESTAMP[1],
            found="another time", remedy=WRONG_TIMESTAMP[2],
        )  # fmt: skip
    return timestamps


def _headers(batch: pa.RecordBatch) -> pa.Array:
    if "headers" not in batch.schema.names or pa.types.is_null(batch.column("headers").type):
        return no_headers(batch.num_rows)
    try:
        return batch.column("headers").cast(HEADERS_TYPE)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        raise BadRecord(
            "The type of column 'headers' is not supported.", expected=str(HEADERS_TYPE),
            found=str(batch.column("headers").type), remedy="cast the column",
        ) from None  # fmt: skip
