"""Cuts a table into slices of bounded size, with columns in a plain layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.schema.casting import plain

#: Maximum rows and bytes per slice when partitioning, so that memory does not grow with the table. A single
#: row may be larger. Bytes are those of the given columns: a row of a store may need eight times as many, for
#: booleans, a key twice as many, and one column of Arrow holds 2 GiB.
SLICE_ROWS: Final = 1 << 17
SLICE_BYTES: Final = 128 << 20

#: The types of columns that hold bytes: keys and values of records, texts.
HOLDS_BYTES: Final = (
    pa.types.is_binary,
    pa.types.is_string,
    pa.types.is_large_binary,
    pa.types.is_large_string,
    pa.types.is_fixed_size_binary,
)


def slices(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """The rows in slices, with columns in a plain layout."""
    for batch in table.to_batches(max_chunksize=SLICE_ROWS):
        # A dictionary is small, whatever the size of its rows.
        for piece in _cut(batch):
            columns = [plain(column) for column in piece.columns]
            yield from _cut(pa.RecordBatch.from_arrays(columns, piece.schema.names))


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch in pieces of at most `SLICE_BYTES`, or of one row."""
    half = batch.num_rows // 2
    if not half or sum(map(_size, batch.columns)) <= SLICE_BYTES:
        yield batch
        return
    yield from _cut(batch.slice(0, half))
    yield from _cut(batch.slice(half))


def _size(column: pa.Array) -> int:
    """The bytes of a column in a plain layout; 0 for a layout that must be plain before that can be said."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        values = plain(column.dictionary)
        if not any(holds(values.type) for holds in HOLDS_BYTES):
            return 0
        return int(pc.sum(pc.binary_length(values).take(column.indices), min_count=0).as_py() or 0)
    views = pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)
    return 0 if views or pa.types.is_run_end_encoded(kind) else int(column.nbytes)
