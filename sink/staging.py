"""Staging: tasks write blocks to staging files, and the driver assigns their offsets.

A task splits its rows by partition of the log and writes encoded blocks, compressed and with offsets that
start at 0, to its own file in the writer's working directory. It returns a few numbers per block to the
driver, never a row. The driver reads each block back, verifies its checksum, shifts its offsets and appends
it. Rows are neither decoded nor collected, and a batch of any size needs the memory of one block per
partition.

A file is used only if its task reported it to the driver: failed or duplicate attempts leave files that are
ignored. Spark's Python workers import this module, so it imports nothing from `keyfold.checkpoints`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from crc32c import crc32c
from py4j.protocol import Py4JJavaError
from pyspark import TaskContext
from pyspark.errors import PythonException
from pyspark.errors.exceptions.captured import convert_exception
from pyspark.sql import types as T

from keyfold.sink.arrow_rows import PROBLEMS, RAW, Shape, deleted, in_order, problem_of, records_of
from keyfold.sink.python_worker import freeze_loaded, without_delays
from keyfold.statestore import filenames
from keyfold.statestore.errors import BadRecord, ConfigError, Damaged, storage_errors
from keyfold.statestore.files import LOCAL, Files, OpenFile
from keyfold.statestore.keys.partitioner import partitions_of
from keyfold.statestore.projection import as_type
from keyfold.statestore.segment.block import (
    BLOCK_BYTES,
    decode,
    encode,
    record_batch,
    record_schema,
    split,
)
from keyfold.statestore.segment.message import rebase
from keyfold.statestore.segment.writer import Block, block_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The number of bytes of rows that a task buffers per partition of the log, and the maximum in total.
_KEPT_BYTES_MAX: Final = 64 << 20
#: Arrow's binary columns hold 2 GiB; batches are combined only up to half of that.
_TOGETHER_BYTES_MAX: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Staged:
    """One staged block, as a task reports it to the driver.

    `position` and `length` are bytes in the file of this attempt. If `problem` is not 0, this is not a block
    but the row that stopped the task: `records` is the number of that row, `column` that of its column.
    """

    task: int
    attempt: int
    partition: int
    position: int
    length: int
    records: int
    tombstones: int
    max_timestamp: int
    crc: int
    problem: int = 0
    column: int = 0


_NAMES: Final = tuple(f.name for f in fields(Staged))
_FACTS: Final = pa.schema([pa.field(name, pa.int64()) for name in _NAMES])


@dataclass(frozen=True)
class Stage:
    """Stages the rows of a task; the function for `DataFrame.mapInArrow`.

    Attributes:
        directory: The directory of the task's file. It exists, and is removed with the batch.
        now_ms: The timestamp of rows without one.
        shape: The columns of the rows, and the type of the values in the blocks.
        codec: The compression of the blocks: None, "lz4" or "zstd".
    """

    directory: str
    batch: int
    partitions: int
    now_ms: int
    shape: Shape = RAW
    codec: str | None = None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Called in a Spark task: the result of `run` as one Arrow batch."""
        context = TaskContext.get()
        assert context is not None
        freeze_loaded()
        staged = self.run(LOCAL, without_delays(batches), context.partitionId(), context.taskAttemptId())
        rows = np.array([astuple(s) for s in staged], np.int64).reshape(-1, len(_NAMES))
        yield pa.RecordBatch.from_arrays([pa.array(column) for column in rows.T.copy()], schema=_FACTS)

    def run(self, files: Files, batches: Iterable[pa.RecordBatch], task: int, attempt: int) -> list[Staged]:
        """Write the rows to the staging file. Returns the blocks, those of one partition in record order.

        Raises:
            StorageFailed: The file cannot be written.
        """
        path = filenames.staged(Path(self.directory), self.batch, task, attempt)
        writing = _Writing(files, path, task, attempt, self.codec)
        try:
            with storage_errors(
                "A task failed to write its part of the batch.",
                path,
                expected="a directory that every task can write to",
                remedy='free or repair the disk; if tasks run on other machines, use placement="driver"',
            ):
                return self._run(writing, batches)
        finally:
            writing.close()

    def _run(self, writing: _Writing, batches: Iterable[pa.RecordBatch]) -> list[Staged]:
        kept: list[pa.RecordBatch] = []
        size = row = 0
        kept_max = min(self.partitions * BLOCK_BYTES, _KEPT_BYTES_MAX)
        for batch in batches:
            problem = _problem(batch, row, writing)
            if problem is not None:
                return [problem]
            if kept and size + batch.nbytes > _TOGETHER_BYTES_MAX:
                self._flush(writing, kept)
                kept, size = [], 0
            kept.append(batch)
            size += batch.nbytes
            row += batch.num_rows
            if size >= kept_max:
                self._flush(writing, kept)
                kept, size = [], 0
        if row and kept:
            self._flush(writing, kept)
        return writing.staged

    def _flush(self, writing: _Writing, kept: Sequence[pa.RecordBatch]) -> None:
        rows = pa.concat_batches(kept)
        records = records_of(rows, self.shape, self.now_ms)
        numbers = partitions_of(records.column("key"), self.partitions)
        counts = np.bincount(numbers, minlength=self.partitions)
        touched = np.flatnonzero(counts).tolist()
        # Partitions fit in 16 bits, for which numpy's stable sort is a radix sort.
        order = np.argsort(numbers.astype(np.uint16), kind="stable") if len(touched) > 1 else None
        records = in_order(records, order, deleted(rows))
        start = 0
        for partition in touched:
            count = int(counts[partition])
            for piece in split(records.slice(start, count)):
                writing.write(partition, piece)
            start += count


class _Writing:
    """The staging file of one task, created with the first block."""

    def __init__(self, files: Files, path: Path, task: int, attempt: int, codec: str | None) -> None:
        self.task = task
        self.attempt = attempt
        self.staged: list[Staged] = []
        self._codec = codec
        self._files = files
        self._path = path
        self._file: OpenFile | None = None

    def write(self, partition: int, rows: pa.RecordBatch) -> None:
        columns = (rows.column(name) for name in ("timestamp", "key", "value", "headers"))
        batch = record_batch(np.arange(rows.num_rows, dtype=np.int64), *columns)
        data = encode(batch, self._codec)
        if self._file is None:
            self._file = self._files.create(self._path)
        position = self._file.position
        self._files.append(self._file, [data])
        block = block_of(batch, data)
        self.staged.append(
            Staged(
                self.task,
                self.attempt,
                partition,
                position,
                data.size,
                block.records,
                block.tombstones,
                block.max_timestamp,
                crc32c(data),
            )
        )

    def close(self) -> None:
        if self._file is not None:
            self._files.close(self._file)


def _problem(batch: pa.RecordBatch, row: int, writing: _Writing) -> Staged | None:
    """A row that cannot be written. `row` is the number of rows of this task before `batch`."""
    problem = problem_of(batch)
    if problem is None:
        return None
    task, row = writing.task, row + problem.row
    if "row" in batch.schema.names:
        # From Spark's monotonically_increasing_id: the task before the sort, then 33 bits of row.
        task, row = divmod(batch.column("row")[problem.row].as_py(), 1 << 33)
    return Staged(task, writing.attempt, -1, 0, 0, row, 0, 0, 0, problem.kind, problem.column)


# -- on the driver -------------------------------------------------------------------------------------------


def staged_by_tasks(records: DataFrame, stage: Stage) -> list[Staged]:
    """Every task stages its own rows. Returns the blocks in the order of the DataFrame.

    Raises:
        ConfigError: keyfold is missing in the Python of the workers.
    """
    # The JVM would parse a schema given as text in every batch.
    facts = T.StructType([T.StructField(name, T.LongType()) for name in _NAMES])
    try:
        rows = records.mapInArrow(stage, facts).collect()
    except PythonException as error:
        if "No module named 'keyfold'" not in str(error):
            raise
        raise ConfigError(
            "Spark's Python workers cannot import keyfold.",
            expected=f"a Python with keyfold, such as {sys.executable}",
            found=f"the workers run {records.sparkSession.sparkContext.pythonExec}",
            remedy="activate the environment, or set PYSPARK_PYTHON to its Python before Spark starts; on a "
            'cluster, ship keyfold with --py-files, or set placement="driver"',
        ) from error  # fmt: skip
    return sorted((Staged(*row) for row in rows), key=lambda s: s.task)


def staged_on_driver(files: Files, records: DataFrame, stage: Stage) -> list[Staged]:
    """The same if tasks cannot write to the changelog's disk: every row is sent to the driver.

    The JVM holds one partition of the DataFrame at a time in memory, Python one Arrow batch.
    """
    return stage.run(files, _arriving(records), 0, 0)


def _arriving(records: DataFrame) -> Iterator[pa.RecordBatch]:
    def packed(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Sent to the workers by value, so keyfold need not be installed there.
        for batch in batches:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as stream:
                stream.write_batch(batch)
            yield pa.RecordBatch.from_pydict({"packed": pa.array([sink.getvalue().to_pybytes()])})

    try:
        for row in records.mapInArrow(packed, "packed binary").toLocalIterator():
            with pa.ipc.open_stream(row.packed) as stream:
                yield from stream
    except Py4JJavaError as error:
        # Spark itself does this for every other action.
        cause = error.java_exception
        while cause.getCause() is not None:
            cause = cause.getCause()
        raise convert_exception(cause) from error


def refused_row(staged: Sequence[Staged], stage: Stage) -> BadRecord | None:
    """The error for the first row that a task could not write; None if all were written."""
    problems = [s for s in staged if s.problem]
    if not problems:
        return None
    first = min(problems, key=lambda s: (s.task, s.records))
    position = f"batch {stage.batch}, Spark partition {first.task}, row {first.records}"
    what, expected, found, remedy = PROBLEMS[first.problem]
    column = (*stage.shape.names, "")[first.column]
    return BadRecord(
        what.format(column=column), position=position, expected=expected, found=found, remedy=remedy
    )


def blocks_by_partition(
    files: Files,
    stage: Stage,
    staged: Iterable[Staged],
    value_type: Callable[[], pa.DataType] | None = None,
) -> dict[int, Callable[[int], Iterator[Block]]]:
    """For each partition of the log with records: a function that returns its blocks, starting at an offset.

    Args:
        value_type: The type of the changelog's values. It is called when the blocks are placed: another sink
            may have added columns since the rows were staged. None if it is that of the stage.

    The functions raise `StorageFailed` or `Damaged` if a file is not as the task left it. Neither fences the
    writer: nothing committed was written.
    """
    parts: dict[int, list[Staged]] = {}
    for s in staged:
        parts.setdefault(s.partition, []).append(s)

    def placing(blocks: Sequence[Staged]) -> Callable[[int], Iterator[Block]]:
        def place(offset: int) -> Iterator[Block]:
            wanted = stage.shape.value_type if value_type is None else value_type()
            for s in blocks:
                data = pa.py_buffer(rebase(_read(files, stage, s), offset))
                block = _as_written(data, stage.shape.value_type, wanted, stage.codec)
                yield Block(block, offset, offset + s.records - 1, s.records, s.tombstones, s.max_timestamp)
                offset += s.records

        return place

    return {p: placing(blocks) for p, blocks in parts.items()}


def _as_written(block: pa.Buffer, kind: pa.DataType, wanted: pa.DataType, codec: str | None) -> pa.Buffer:
    """A block whose values have type `kind`, as the segment is to have it."""
    if kind == wanted:
        return block
    offsets, timestamps, keys, values, headers = decode(block, record_schema(kind)).columns
    batch = record_batch(offsets.to_numpy(), timestamps, keys, as_type(values, wanted), headers)
    return encode(batch, codec)


def _read(files: Files, stage: Stage, s: Staged) -> pa.Buffer:
    """A staged block. It is read, not mapped: mapped pages would count as the driver's memory."""
    path = filenames.staged(Path(stage.directory), stage.batch, s.task, s.attempt)
    with storage_errors(
        "The driver cannot read a file that a task wrote.",
        path,
        expected="a disk that the tasks and the driver share",
        remedy='use placement="driver"',
    ):
        data = files.read(path, s.position, s.length)
    if len(data) != s.length or crc32c(data) != s.crc:
        raise Damaged(
            "A staged block does not match its checksum.",
            path=path,
            position=f"bytes {s.position} to {s.position + s.length}",
            expected=f"crc32c {s.crc:08x}",
            found=f"{len(data)} bytes with crc32c {crc32c(data):08x}",
            remedy="check the disk, then restart the query; the batch was not committed",
        )
    return pa.py_buffer(data)
