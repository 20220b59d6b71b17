"""What a task reads: one piece of a plan, with all that it needs to be read.

Spark plans in one Python process and reads in others. Those import this module and little else: it needs
nothing of planning, of the writer or of the manifest's journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from keyfold.checkpoints.manifest.identity_file import read_uuid
from keyfold.sink.python_worker import freeze_loaded
from keyfold.statestore import filenames
from keyfold.statestore.errors import KeyfoldError, ViewExpired
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.segment.block import RECORD_SCHEMA
from keyfold.statestore.segment.reader import read_segments
from keyfold.statestore.segment.writer import Segment
from keyfold.streaming.leases import Lease, LeaseRenewer
from keyfold.streaming.rows import Rows, arrow_schema

if TYPE_CHECKING:
    from keyfold.checkpoints.log.key_filter import Selection


@dataclass(frozen=True)
class Piece(InputPartition):
    """One task's part: the records of one partition with `begin` <= offset < `end`, folded or as in the log.

    Attributes:
        uuid: of the changelog that was planned on.
        segments: those that hold them, in offset order.
        unique_below: folded, no two records below that offset have the same key.
        selection: only these keys; None for all.
    """

    root: Path
    uuid: str
    partition: int
    segments: tuple[Segment, ...]
    begin: int
    end: int
    folded: bool
    lease: Lease | None
    unique_below: int = 0
    selection: Selection | None = None

    def records(
        self, files: Files, values: pa.DataType, names: Sequence[str] = RECORD_SCHEMA.names
    ) -> Iterator[pa.RecordBatch]:
        """The piece's records as Arrow batches. Keeps the lease alive.

        Args:
            values, names: see `SegmentReader`; a folded piece needs `offset`, `key` and `value`.

        Raises:
            ViewExpired: a file is gone, or the directory holds another changelog now.
            Damaged: bytes do not match their checksum.
        """
        with LeaseRenewer(files, self.root, self.lease):
            self._check_same_changelog(files)
            directory = filenames.partition(self.root, self.partition)
            try:
                if self.folded:
                    from keyfold.checkpoints.log.rereading import state_batches

                    yield from state_batches(
                        files, directory, self.segments, self.end, values, self.unique_below,
                        self.selection, names,
                    )  # fmt: skip
                else:
                    wanted = None if self.selection is None else self.selection.filter
                    yield from read_segments(
                        files, directory, self.segments, self.begin, self.end, values, names, wanted
                    )
            except ViewExpired as e:
                raise self._expired(e, e.expected, e.found) from e

    def _check_same_changelog(self, files: Files) -> None:
        try:
            found = read_uuid(files, self.root)
        except KeyfoldError as e:
            raise self._expired(e, f"the changelog {self.uuid}", e.found) from e
        if found != self.uuid:
            raise self._expired(None, f"the changelog {self.uuid}", f"the changelog {found}")

    def _expired(self, e: KeyfoldError | None, expected: object, found: object) -> ViewExpired:
        return ViewExpired(
            "The records that this DataFrame was planned to read no longer exist.",
            path=self.root if e is None else e.path,
            position=f"partition {self.partition}, offsets {self.begin} to {self.end}",
            expected=expected, found=found,
            remedy="load the DataFrame again, or start the stream again; raise the option viewTimeoutMs "
            "where more time passes between planning and reading",
        )  # fmt: skip


class PieceReader:
    """What a task has of a reader: how to read a piece. The planning stays with the driver.

    Args:
        rows: what the rows are made of.
        schema: the columns that Spark was told of.
    """

    def __init__(self, rows: Rows, schema: StructType) -> None:
        self._rows = rows
        self._schema = schema

    def __reduce__(self) -> tuple[type[PieceReader], tuple[Rows, StructType]]:
        return PieceReader, (self._rows, self._schema)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one piece as Arrow batches; none for a plan without pieces."""
        if not isinstance(partition, Piece):
            return iter(())
        freeze_loaded()
        target = arrow_schema(self._schema)
        records = partition.records(LOCAL, self._rows.value_type(target), self._rows.names(target))
        return self._rows.batches(records, partition.partition, target)
