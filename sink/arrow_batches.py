"""A DataFrame's rows on the driver as Arrow batches, one partition at a time. Tasks import this module too.

`DataFrame.toArrow` holds the whole micro-batch, and `__arrow_c_stream__` fails if a column is a timestamp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PACKED: Final = pa.schema([pa.field("batch", pa.binary(), nullable=False)])


def arrow_batches(df: DataFrame) -> Iterator[pa.RecordBatch]:
    """The batches of `df` in partition order, with at most `spark.sql.execution.arrow.maxRecordsPerBatch`
    rows each.

    If the iterator is read to its end, every partition is computed exactly once. The next partition is
    fetched while the current one is processed.
    """
    packed = df.mapInArrow(_pack, "batch binary not null")
    for row in packed.toLocalIterator(prefetchPartitions=True):
        with pa.ipc.open_stream(pa.py_buffer(row[0])) as reader:
            yield from reader


def _pack(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Each batch as one row, the bytes of an Arrow stream."""
    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.RecordBatch.from_arrays(
            [pa.array([sink.getvalue().to_pybytes()], pa.binary())], schema=_PACKED
        )
