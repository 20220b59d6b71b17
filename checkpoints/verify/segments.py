"""Verifies a segment: its bytes against their checksums, its records against the manifest."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from keyfold.checkpoints.verify.findings import Damages
from keyfold.statestore import filenames
from keyfold.statestore.errors import Damaged, ViewExpired
from keyfold.statestore.files import Files
from keyfold.statestore.keys.partitioner import partitions_of
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.segment.block import END_OF_STREAM, block_lengths, decode, schema_of
from keyfold.statestore.segment.reader import SegmentReader
from keyfold.statestore.segment.writer import Segment

#: Header bytes and header CRC32C in an index, see the ruler in `statestore.segment`.
_INDEX_STREAM_HEADER: Final = struct.Struct("<II")
_INDEX_STREAM_HEADER_AT: Final = 24

#: Maximum number of records per block that are reported for wrong columns. Each costs several passes over it.
_MISFITS_NAMED: Final = 10


@dataclass
class Counted:
    """What was found in a partition's segments."""

    files: int = 0
    bytes: int = 0
    blocks: int = 0
    records: int = 0
    tombstones: int = 0

    def __iadd__(self, other: Counted) -> Counted:
        self.files += other.files
        self.bytes += other.bytes
        self.blocks += other.blocks
        self.records += other.records
        self.tombstones += other.tombstones
        return self


def check_segment(
    files: Files,
    directory: Path,
    segment: Segment,
    partition: tuple[int, int],
    damages: Damages,
    clean_end: int,
    columns: Columns | None = None,
) -> Counted:
    """Verify all data in use of one segment and its index.

    Args:
        partition: its number, and the number of partitions: every key must belong to it.
        clean_end: from this offset on no record may be missing.
        columns: of a typed changelog: every record must match them.
    """
    return _Check(files, directory, segment, partition, damages, clean_end, columns).run()


class _Check:
    def __init__(
        self,
        files: Files,
        directory: Path,
        segment: Segment,
        partition: tuple[int, int],
        damages: Damages,
        clean_end: int,
        columns: Columns | None,
    ) -> None:
        self._files = files
        self._directory = directory
        self._segment = segment
        self._partition = partition
        self._damages = damages
        self._columns = columns
        self._path = directory / segment.name
        self._counted = Counted()
        self._whole = True
        self._schema: pa.Schema | None = None
        self._last = segment.base - 1
        #: the next offset at which a record must exist
        self._dense = max(segment.base, clean_end)
        self._max_timestamp = -1

    def run(self) -> Counted:
        segment = self._segment
        index = self._index() if segment.sealed else None
        try:
            data = self._files.map(self._path)
        except OSError as e:
            self._damages.add_unreadable(self._path, e)
            return self._counted
        self._counted.files += 1
        self._counted.bytes += min(data.size, segment.size)
        if data.size < segment.size:
            self._wrong(
                f"byte {data.size}", "A segment is too short.", f"{segment.size} bytes", f"{data.size} bytes"
            )
        if segment.sealed:
            end = data.slice(
                min(segment.size, data.size), min(len(END_OF_STREAM), max(0, data.size - segment.size))
            )
            if data.size >= segment.size and end.to_pybytes() != END_OF_STREAM:
                self._wrong(
                    f"byte {segment.size}", "A sealed segment does not end with the Arrow end of stream.",
                    END_OF_STREAM.hex(" ", 4), end.to_pybytes().hex(" ", 4) or "nothing",
                )  # fmt: skip
            if index is None:
                return self._counted
            self._indexed(data, *index)
        else:
            self._marked(data)
        if self._whole:
            self._totals()
        return self._counted

    # -- bytes -----------------------------------------------------------------------------------------------

    def _index(self) -> tuple[npt.NDArray[np.void], int, int] | None:
        """The entries, and bytes and CRC32C of the schema message. None if the index cannot be used."""
        path = self._directory / filenames.segment_index(self._segment.name)
        try:
            entries = SegmentReader(self._files, self._directory, self._segment).index()
            head = self._files.read(path, _INDEX_STREAM_HEADER_AT, _INDEX_STREAM_HEADER.size)
        except Damaged as e:
            self._damages.add_error(e, path)
        except ViewExpired:
            self._damages.add_unreadable(path, FileNotFoundError())
        except OSError as e:
            self._damages.add_unreadable(path, e)
        else:
            self._counted.files += 1
            self._counted.bytes += self._files.size(path)
            length, crc = _INDEX_STREAM_HEADER.unpack(head)
            return entries, length, crc
        return None

    def _indexed(
        self, data: pa.Buffer, entries: npt.NDArray[np.void], header_bytes: int, header_crc: int
    ) -> None:
        self._header(data, header_bytes, header_crc)
        position = header_bytes
        for entry in entries:
            start, length = int(entry["position"]), int(entry["length"])
            if start != position:
                self._wrong(f"byte {position}", "The blocks of an index leave a gap.", position, start)
            position = start + length
            block = self._compare(data, start, length, int(entry["crc"]), 0)
            if block is None:
                continue
            batch = self._decoded(block, start)
            if batch is None or not batch.num_rows:
                continue
            said = tuple(int(entry[name]) for name in ("base", "last", "records", "max_timestamp"))
            offsets = batch.column("offset").to_numpy()
            newest = int(batch.column("timestamp").cast(pa.int64()).to_numpy().max())
            found = (int(offsets[0]), int(offsets[-1]), batch.num_rows, newest)
            if said != found:
                self._wrong(
                    f"bytes {start} to {position}", "An index entry does not match its block.",
                    "base {}, last {}, {} records, newest {}".format(*said),
                    "base {}, last {}, {} records, newest {}".format(*found),
                )  # fmt: skip
        if position != self._segment.size:
            self._wrong(f"byte {position}", "An index ends before its segment.", self._segment.size, position)

    def _marked(self, data: pa.Buffer) -> None:
        marks = self._segment.marks
        if marks:
            self._header(data, marks[0].position, marks[0].crc)
        for before, mark in pairwise(marks):
            part = self._compare(data, before.position, mark.position - before.position, mark.crc, before.crc)
            for start, block in self._blocks(part, before.position):
                self._decoded(block, start)

    def _header(self, data: pa.Buffer, length: int, crc: int) -> None:
        """The schema message. Its blocks are decoded only if it is one of this changelog."""
        header = self._compare(data, 0, length, crc, 0)
        if header is None:
            return
        try:
            schema = schema_of(header)
        except ValueError as e:
            self._wrong("byte 0", "A segment does not begin with its schema.", "a schema message", str(e))
            return
        if pa.types.is_struct(schema.field("value").type) != (self._columns is not None):
            self._wrong(
                "byte 0", "The values of a segment have another type than those of its changelog.",
                "bytes" if self._columns is None else "a struct of columns", schema.field("value").type,
            )  # fmt: skip
            return
        self._schema = schema

    def _blocks(self, data: pa.Buffer | None, position: int) -> Iterator[tuple[int, pa.Buffer]]:
        if data is None:
            return
        try:
            for start, length in block_lengths(data):
                yield position + start, data.slice(start, length)
        except pa.ArrowException as e:
            self._senseless(position, e)

    def _compare(
        self, data: pa.Buffer, position: int, length: int, expected: int, before: int
    ) -> pa.Buffer | None:
        """The bytes if they exist and match. Bytes beyond the file's end were reported already."""
        part = data.slice(position, length) if position + length <= data.size else None
        if part is None:
            self._whole = False
            return None
        found = crc32c(part, before)
        if found == expected:
            return part
        self._wrong(
            f"bytes {position} to {position + length}", "Bytes of a segment do not match their checksum.",
            f"crc32c {expected:08x}", f"crc32c {found:08x}",
        )  # fmt: skip
        return None

    # -- records ---------------------------------------------------------------------------------------------

    def _decoded(self, block: pa.Buffer, position: int) -> pa.RecordBatch | None:
        if self._schema is None:
            return None
        try:
            batch = decode(block, self._schema, own=False)
        except (pa.ArrowException, OSError) as e:
            self._senseless(position, e)
            return None
        self._counted.blocks += 1
        self._records(batch, f"block at byte {position}")
        return batch

    def _records(self, batch: pa.RecordBatch, where: str) -> None:
        segment = self._segment
        if not batch.num_rows:
            return
        offsets = batch.column("offset").to_numpy()
        first, last = int(offsets[0]), int(offsets[-1])
        if first <= self._last or last >= segment.next or not (np.diff(offsets) > 0).all():
            self._wrong(
                where, "Offsets do not ascend within the range of the segment.",
                f"from {self._last + 1} to {segment.next - 1}", f"{first} to {last}",
            )  # fmt: skip
        self._last = max(self._last, last)
        dense = offsets[np.searchsorted(offsets, self._dense) :]
        gaps = np.flatnonzero(dense != np.arange(self._dense, self._dense + len(dense)))
        if len(gaps):
            self._missing(self._dense + int(gaps[0]))
        elif len(dense):
            self._dense = last + 1
        number, count = self._partition
        stray = np.flatnonzero(partitions_of(batch.column("key"), count) != number)
        if len(stray):
            self._wrong(
                f"{where}, offset {offsets[stray[0]]}", "A record is in the wrong partition.",
                f"partition {number}", f"{len(stray)} records of other partitions",
            )  # fmt: skip
        if self._columns is not None:
            self._typed(self._columns, batch, where)
        self._counted.records += batch.num_rows
        self._counted.tombstones += batch.column("value").null_count
        self._max_timestamp = max(
            self._max_timestamp, int(batch.column("timestamp").cast(pa.int64()).to_numpy().max())
        )

    def _typed(self, columns: Columns, batch: pa.RecordBatch, where: str) -> None:
        """Records that do not match the columns. A single one makes the whole state unreadable."""
        row, keys = 0, batch.column("key")
        for named in range(_MISFITS_NAMED + 1):
            misfit = columns.misfit(keys[row:])
            if misfit is None:
                return
            row += misfit.row
            at = f"{where}, partition {self._partition[0]}, offset {batch.column('offset')[row]}"
            if named == _MISFITS_NAMED:
                at += ", and perhaps more of this block"
            what = f"A record does not match the changelog's columns: its {misfit.part}."
            self._damages.add(self._path, at, what, misfit.expected, "other bytes")
            row += 1

    def _totals(self) -> None:
        segment, counted = self._segment, self._counted
        said = (segment.records, segment.tombstones, segment.max_timestamp)
        found = (counted.records, counted.tombstones, self._max_timestamp)
        if self._dense < segment.next:
            self._missing(self._dense)
        if said != found:
            self._wrong(
                "whole file", "The manifest's counts of a segment do not match its records.",
                "{} records, {} tombstones, newest {}".format(*said),
                "{} records, {} tombstones, newest {}".format(*found),
            )  # fmt: skip

    def _missing(self, offset: int) -> None:
        """Report a missing record in the dirty section. Once per segment."""
        self._wrong(
            f"partition {self._partition[0]}, offset {offset}",
            "A record is missing in a section that was never compacted.",
            f"all records in offsets {offset} to {self._segment.next}", "no record at this one",
        )  # fmt: skip
        self._dense = self._segment.next

    # -- damage ----------------------------------------------------------------------------------------------

    def _wrong(self, position: str, what: str, expected: object, found: object) -> None:
        self._whole = False
        self._damages.add(self._path, position, what, expected, found)

    def _senseless(self, position: int, error: Exception) -> None:
        self._wrong(
            f"byte {position}", "A block has a valid checksum but invalid content.", "a record batch",
            type(error).__name__
        )  # fmt: skip
