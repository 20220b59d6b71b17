"""Reading committed records of one partition out of a state's segments."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from keyfold.checkpoints.log.descriptors import limit_told
from keyfold.checkpoints.manifest.resolve import partition_state
from keyfold.checkpoints.manifest.state import State
from keyfold.statestore import filenames
from keyfold.statestore.errors import CompactedAway, ConfigError, storage_errors
from keyfold.statestore.files import Files
from keyfold.statestore.segment.reader import read_segments


@contextmanager
def looked_at(root: Path) -> Iterator[None]:
    """Raises `StorageFailed` if the system refuses a path, this user may not read it, or too many files are
    open.
    """
    refused = storage_errors(
        "The changelog cannot be read.", root, expected="a valid path that this user may read",
        remedy="correct the path, or grant this user the right to read it",
    )  # fmt: skip
    with refused, limit_told(root, "the changelog cannot be read"):
        yield


def last_value(
    files: Files, root: Path, state: State, partition: int, key: bytes, values: pa.DataType
) -> pa.Array | None:
    """The last value of a key as an array of one, searched from the newest segment on.

    Raises `Damaged`, `ViewExpired`.
    """
    directory = filenames.partition(root, partition)
    for segment in reversed(state.partitions[partition].segments):
        found: pa.Array | None = None
        for batch in read_segments(files, directory, (segment,), segment.base, segment.next, values):
            rows = pc.indices_nonzero(pc.equal(batch.column("key"), pa.scalar(key, pa.binary())))
            if len(rows):
                found = batch.column("value").slice(rows[-1].as_py(), 1)
        if found is not None:
            return found if found.is_valid()[0].as_py() else None
    return None


def read_partition(
    files: Files,
    root: Path,
    state: State,
    partition: int,
    offset: int | None = None,
    to: int | None = None,
    *,
    values: pa.DataType,
) -> Iterator[pa.RecordBatch]:
    """Committed records of a partition from `offset` (default: the log start offset) up to, but not
    including, `to`. If the record at `offset` was compacted away, reading begins at the next higher offset.

    Raises:
        ConfigError: the partition does not exist, or the offset is beyond the end.
        CompactedAway: the offset is below the log start offset: retention has removed it.
    """
    p = partition_state(state, root, partition)
    offset = p.start if offset is None else offset
    to = p.end if to is None else min(to, p.end)
    if offset < p.start:
        raise CompactedAway(
            f"Offset {offset} is below the log start offset {p.start} (removed by retention).",
            path=filenames.partition(root, partition),
            position=f"partition {partition}, offset {offset}",
            expected=f"an offset from {p.start} to {p.end}",
            found=offset,
            remedy=f"read from offset {p.start}",
        )
    if offset > p.end:
        raise ConfigError(
            f"Offset {offset} is beyond the log end offset {p.end}.",
            path=filenames.partition(root, partition),
            position=f"partition {partition}, offset {offset}",
            expected=f"an offset from {p.start} to {p.end}",
            found=offset,
            remedy="read from an offset that exists, or wait until the offset is committed",
        )
    return read_segments(files, filenames.partition(root, partition), p.segments, offset, to, values)


class Records(Iterator[pa.RecordBatch]):
    """Batches of a pinned view. The view is released at the end, by `close`, or when the iterator is garbage
    collected.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch], pinned: ExitStack) -> None:
        self._batches = batches
        self._release = weakref.finalize(self, pinned.close)

    def __next__(self) -> pa.RecordBatch:
        try:
            return next(self._batches)
        except BaseException:
            self._release()
            raise

    def close(self) -> None:
        self._release()
