"""Reads one partition several times for a fold, in memory that does not grow with the partition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from keyfold.checkpoints.compaction.fold import last_values
from keyfold.checkpoints.log.spill import KeySpill
from keyfold.statestore.errors import storage_errors
from keyfold.statestore.files import LOCAL, Files, temporary
from keyfold.statestore.segment.block import RECORD_SCHEMA
from keyfold.statestore.segment.reader import KeyFilter, SegmentReader
from keyfold.statestore.segment.writer import Segment

if TYPE_CHECKING:
    from keyfold.checkpoints.log.key_filter import Selection

#: Maximum bytes of decoded keys in memory, so that a small tail needs no file.
_HELD_BYTES: Final = 16 << 20


class Rereading:
    """The records of one partition. Each checksum is verified once only. A context manager.

    Keys of uncompressed blocks are in mapped segment files and remain there. Decoded keys, and keys that were
    filtered out of a block, move to a temporary file once they exceed some megabytes: in `TMPDIR`, mapped,
    without a name.
    """

    def __init__(
        self,
        files: Files,
        directory: Path,
        segments: tuple[Segment, ...],
        values: pa.DataType | None = None,
        names: Sequence[str] = RECORD_SCHEMA.names,
    ) -> None:
        self._readers = [SegmentReader(files, directory, segment, values, names) for segment in segments]
        self._mapped = (0, 0)
        self._directory = temporary()
        self._spill = KeySpill(files if files.has_locks else LOCAL, self._directory, nameless=True)
        self._held = 0

    def between(
        self, offset: int, to: int, *, keys_only: bool = False, wanted: KeyFilter | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Records with `offset` <= offset < `to`, in order, as `SegmentReader.batches` gives them."""
        for reader in self._readers:
            if reader.segment.next > offset and reader.segment.base < to:
                for batch in reader.batches(offset, to, keys_only=keys_only, wanted=wanted):
                    self._mapped = reader.mapped
                    yield batch

    def hold(self, keys: pa.Array) -> pa.Array:
        """Keys of the last batch read, at an address that remains valid. Raises `StorageFailed`: disk
        full.
        """
        low, high = self._mapped
        buffers = [b for b in keys.buffers() if b is not None and b.size]
        if all(low <= b.address and b.address + b.size <= high for b in buffers):
            return keys
        self._held += keys.nbytes
        if self._held <= _HELD_BYTES:
            return keys
        with storage_errors(
            "The keys of a state cannot be written to a temporary file.", self._directory.parent,
            expected="a directory with free space",
            remedy="free disk space, or set TMPDIR to a directory with free space",
        ):  # fmt: skip
            return self._spill.hold(keys)

    def __enter__(self) -> Rereading:
        return self

    def __exit__(self, *error: object) -> None:
        self._spill.close()


def state_batches(
    files: Files,
    directory: Path,
    segments: tuple[Segment, ...],
    end: int,
    values: pa.DataType,
    unique_below: int = 0,
    selection: Selection | None = None,
    names: Sequence[str] = RECORD_SCHEMA.names,
) -> Iterator[pa.RecordBatch]:
    """The last record of each key of one partition below offset `end`, without deletes, in offset order.

    `values`, `names`: the type of the values, and the columns of the records; `offset`, `key` and `value` are
    needed. See `SegmentReader`. `unique_below`: below that offset each key occurs once, see
    `PartitionState.unique_below`.
    """
    below = min(unique_below, end)
    wanted = None if selection is None else selection.filter
    with Rereading(files, directory, segments, values, names) as read:
        yield from last_values(
            lambda: read.between(0, end, wanted=wanted),
            below,
            dirty=lambda: read.between(below, end, keys_only=True, wanted=wanted),
            hold=read.hold,
        )
