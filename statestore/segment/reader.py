"""Reads the committed blocks of a segment. Checksums are verified before Arrow reads the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise, repeat
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from crc32c import crc32c

from keyfold.statestore import filenames
from keyfold.statestore.errors import Damaged, SchemaMismatch, ViewExpired
from keyfold.statestore.files import Files
from keyfold.statestore.projection import as_type, check_nulls
from keyfold.statestore.segment.block import (
    RECORD_SCHEMA,
    block_lengths,
    check_version,
    decode,
    decode_stream,
    schema_of,
)
from keyfold.statestore.segment.block_columns import BlockColumns
from keyfold.statestore.segment.message import BlockSize, is_compressed, size_of
from keyfold.statestore.segment.writer import ENTRY, INDEX_HEADER, INDEX_MAGIC, Segment

#: Says which of some keys are wanted, as an array of booleans without nulls.
KeyFilter: TypeAlias = Callable[[pa.Array], pa.Array]

_KEY_NAMES: Final = ["offset", "key"]
_REMEDY: Final = "restore from a snapshot or a copy; `keyfold verify` lists all damage"


class SegmentReader:
    """Reads the committed records of one segment, and verifies checksums before Arrow reads the bytes.

    Args:
        values: The type that the values are given in. The segment may have fewer or more columns: those that
            it lacks are null, those of a compressed block that `values` lacks are not decompressed. A struct
            without fields says only which values are null, also of raw values. None for the type in the
            segment.
        names: The columns of the records that are given: `offset` and others, in the order of the log's.
    """

    def __init__(
        self,
        files: Files,
        directory: Path,
        segment: Segment,
        values: pa.DataType | None = None,
        names: Sequence[str] = RECORD_SCHEMA.names,
    ) -> None:
        self.segment = segment
        self._values = values
        self._names = names
        self.path = directory / segment.name
        self._files = files
        self._index_path = directory / filenames.segment_index(segment.name)
        self._data: pa.Buffer | None = None
        self._compared: set[int] = set()
        self._compressed = False
        self._schema: pa.Schema | None = None
        #: length and CRC32C of the schema message
        self._header: tuple[int, int] | None = None

    @property
    def mapped(self) -> tuple[int, int]:
        """The address range of batches of uncompressed blocks. It is valid as long as the batch."""
        return (0, 0) if self._data is None else (self._data.address, self._data.address + self._data.size)

    def batches(
        self,
        from_offset: int = 0,
        to_offset: int | None = None,
        *,
        keys_only: bool = False,
        wanted: KeyFilter | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Records with `from_offset` <= offset < `to_offset`, block by block, cut to these offsets.

        A reader verifies the checksum of a block only once: the bytes are mapped.

        Args:
            keys_only: Read only the columns `offset` and `key`.
            wanted: Give only the records with these keys. Of a block without any, only the keys are decoded.

        Raises:
            Damaged: Committed bytes do not match their checksum.
            ViewExpired: The file no longer exists.
        """
        segment = self.segment
        to_offset = segment.next if to_offset is None else min(to_offset, segment.next)
        if from_offset >= to_offset or segment.records == 0:
            return
        names = _KEY_NAMES if keys_only else self._names
        stream: Iterator[pa.RecordBatch] | None = None
        for block in self._blocks(from_offset, to_offset):
            if wanted is not None:
                batch = self._wanted(block, wanted, names)
                if not batch.num_rows:
                    continue
            elif self._leaves_fields_out and not keys_only:
                batch = self._selected(block) if is_compressed(block) else decode(block, self.schema())
            else:
                if stream is None and self._compressed:
                    stream = self._stream(block, names)
                if stream is not None:
                    batch = next(stream)
                else:
                    # An uncompressed block is not copied, so reading all its columns costs the same.
                    batch = decode(block, self.schema())
                    self._compressed = not _lies_in(batch, block)
            if batch.num_columns > len(names):
                batch = batch.select(names)
            if "value" in names and self._values is not None:
                batch = _with_values(batch, self._values)
            offsets = batch.column("offset").to_numpy(zero_copy_only=True)
            start = int(np.searchsorted(offsets, from_offset)) if offsets[0] < from_offset else 0
            stop = int(np.searchsorted(offsets, to_offset)) if offsets[-1] >= to_offset else len(offsets)
            if start < stop:
                yield batch if stop - start == len(offsets) else batch.slice(start, stop - start)

    def _stream(self, block: pa.Buffer, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Decodes this block and the following ones, in step with `_blocks`: each is requested after its
        checksum was verified. Raises the same errors as `batches`.
        """
        data = self._slice(0, self.segment.size)
        position = block.address - data.address
        if self._dense is None:
            yield from decode_stream(data, position, names)
            return
        schema = pa.schema([self.schema().field(name) for name in names], self.schema().metadata)
        entries = self._dense[np.searchsorted(self._dense["position"], position) :]
        others = (b.columns for b in decode_stream(data, position, names[1:])) if names[1:] else repeat([])
        for entry, columns in zip(entries, others, strict=False):
            yield pa.RecordBatch.from_arrays([_offsets(entry), *columns], schema=schema)

    @cached_property
    def _dense(self) -> npt.NDArray[np.void] | None:
        """The index, if no record is missing in the blocks: then it says what the offsets are, which need not
        be decompressed.
        """
        entries = self.index() if self.segment.sealed else np.empty(0, ENTRY)
        if not len(entries) or (entries["last"] - entries["base"] + 1 != entries["records"]).any():
            return None
        return entries

    @cached_property
    def _leaves_fields_out(self) -> bool:
        """Whether fields of the values in the segment are left out."""
        if "value" not in self._names:
            return False
        some = BlockColumns.of(self.schema(), ["value"], self._values)
        return not some.schema.field("value").type.equals(self.schema().field("value").type)

    @cached_property
    def _some(self) -> BlockColumns:
        names = self._names if self._dense is None else self._names[1:]
        return BlockColumns.of(self.schema(), names, self._values)

    @cached_property
    def _keys(self) -> BlockColumns:
        return BlockColumns.of(self.schema(), ["key"])

    def _wanted(self, block: pa.Buffer, wanted: KeyFilter, names: Sequence[str]) -> pa.RecordBatch:
        """The records of a block with wanted keys. If there are none, a batch without rows."""
        compressed = is_compressed(block)
        batch = self._keys.decode(block) if compressed else decode(block, self.schema())
        rows = wanted(batch.column("key"))
        if not rows.true_count:
            return batch.slice(0, 0)
        if compressed:
            batch = BlockColumns.of(self.schema(), names, self._values).decode(block)
        return batch if rows.true_count == len(rows) else batch.filter(rows)

    def _selected(self, block: pa.Buffer) -> pa.RecordBatch:
        """The columns of a compressed block that are wanted; others are not decompressed."""
        batch = self._some.decode(block)
        if self._dense is None:
            return batch
        position = block.address - self._slice(0, self.segment.size).address
        entry = self._dense[np.searchsorted(self._dense["position"], position)]
        schema = pa.schema([self.schema().field("offset"), *batch.schema])
        return pa.RecordBatch.from_arrays([_offsets(entry), *batch.columns], schema=schema)

    def sizes(self) -> Iterator[BlockSize]:
        """The size of each block, without reading its data. Raises the same errors as `batches`."""
        blocks: Iterable[pa.Buffer] = self._blocks(self.segment.base, self.segment.next)
        if self.segment.sealed:
            blocks = (self._slice(int(e["position"]), int(e["length"])) for e in self.index())
        for block in blocks:
            try:
                yield size_of(block)
            except ValueError as e:
                raise self._damaged("a block", "an Arrow record batch", "other bytes") from e

    def verify(self) -> None:
        """Verify every checksum of the segment and its schema message. Raises `Damaged`."""
        for batch in self.batches(self.segment.base):
            batch.validate(full=True)

    def schema(self) -> pa.Schema:
        """The schema of the blocks. Raises the same errors as `batches`."""
        if self._schema is None:
            if self.segment.sealed and self._header is None:
                self.index()
            length, crc = self._header or (self.segment.marks[0].position, self.segment.marks[0].crc)
            header = self._slice(0, length)
            self._compare(crc32c(header), crc, 0, length)
            try:
                self._schema = schema_of(header)
            except ValueError as e:
                raise self._damaged("byte 0", "the schema message of a segment", "other bytes") from e
        return self._schema

    def _blocks(self, from_offset: int, to_offset: int) -> Iterator[pa.Buffer]:
        if self.segment.sealed:
            index = self.index()
            first = int(np.searchsorted(index["last"], from_offset))
            stop = int(np.searchsorted(index["base"], to_offset))
            for i in range(first, stop):
                entry = index[i]
                position = int(entry["position"])
                block = self._slice(position, int(entry["length"]))
                if position not in self._compared:
                    self._compare(crc32c(block), int(entry["crc"]), position, block.size)
                    self._compared.add(position)
                yield block
            return
        marks = self.segment.marks
        for before, mark in pairwise(marks):
            if mark.next_offset <= from_offset or before.next_offset >= to_offset:
                continue
            data = self._slice(before.position, mark.position - before.position)
            if before.position not in self._compared:
                self._compare(crc32c(data, before.crc), mark.crc, before.position, data.size)
                self._compared.add(before.position)
            for position, length in block_lengths(data):
                yield data.slice(position, length)

    def index(self) -> npt.NDArray[np.void]:
        """The index entries of a sealed segment, verified with the CRC32C in the manifest."""
        data = self._read_index()
        found = crc32c(data)
        if found != self.segment.index_crc:
            raise Damaged(
                "The segment index does not match its checksum in the manifest.",
                path=self._index_path,
                position="byte 0",
                expected=f"crc32c {self.segment.index_crc:08x}",
                found=f"crc32c {found:08x}",
                remedy=_REMEDY,
            )
        magic, version, _, size, count, header_bytes, header_crc = INDEX_HEADER.unpack_from(data)
        if magic != INDEX_MAGIC or size != self.segment.size:
            raise Damaged(
                "The segment index belongs to another segment.",
                path=self._index_path,
                position="byte 0",
                expected=f"{INDEX_MAGIC!r} for {self.segment.size} bytes",
                found=f"{magic!r} for {size} bytes",
                remedy=_REMEDY,
            )
        check_version(version, self._index_path)
        self._header = header_bytes, header_crc
        return np.frombuffer(data, ENTRY, count, INDEX_HEADER.size)

    def _read_index(self) -> bytes:
        try:
            return self._files.read(self._index_path)
        except FileNotFoundError as e:
            raise self._gone(self._index_path) from e

    def _slice(self, position: int, length: int) -> pa.Buffer:
        if self._data is None:
            try:
                self._data = self._files.map(self.path)
            except FileNotFoundError as e:
                raise self._gone(self.path) from e
        if self._data.size < position + length:
            raise self._damaged(
                f"byte {self._data.size}", f"{self.segment.size} bytes", f"{self._data.size} bytes"
            )
        return self._data.slice(position, length)

    def _compare(self, found: int, expected: int, position: int, length: int) -> None:
        if found != expected:
            raise self._damaged(
                f"bytes {position} to {position + length}", f"crc32c {expected:08x}", f"crc32c {found:08x}"
            )

    def _damaged(self, position: str, expected: str, found: str) -> Damaged:
        return Damaged(
            "Committed bytes of a segment are damaged.",
            path=self.path, position=position, expected=expected, found=found, remedy=_REMEDY,
        )  # fmt: skip

    def _gone(self, path: Path) -> ViewExpired:
        return ViewExpired(
            "A file of this view no longer exists.", path=path,
            expected="the file, which is kept while a view or lease of a reader needs it",
            found="no such file",
            remedy="open the changelog again; if that also fails, the file is lost: restore from a snapshot",
        )  # fmt: skip


def _lies_in(batch: pa.RecordBatch, block: pa.Buffer) -> bool:
    """Whether a batch is a view of its block."""
    address: int = batch.column("offset").buffers()[1].address
    low: int = block.address
    return bool(low <= address < low + block.size)


def _offsets(entry: np.void) -> pa.Array:
    """The offsets of a block without gaps, from its entry in the index."""
    return pa.array(np.arange(int(entry["base"]), int(entry["last"]) + 1))


def _with_values(batch: pa.RecordBatch, kind: pa.DataType) -> pa.RecordBatch:
    """The records with their values as `kind`."""
    place = batch.schema.get_field_index("value")
    if batch.column(place).type.equals(kind):
        return batch
    columns = batch.columns
    try:
        columns[place] = as_type(columns[place], kind)
        check_nulls(columns[place])
    except pa.ArrowInvalid as e:
        raise SchemaMismatch(
            "A value does not fit the columns that this reader was opened with.",
            expected=kind, found=f"a value of {columns[place].type}",
            remedy="open the changelog again: a column has a wider type now",
        ) from e  # fmt: skip
    schema = batch.schema.set(place, batch.schema.field(place).with_type(kind))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def read_segments(
    files: Files,
    directory: Path,
    segments: tuple[Segment, ...],
    offset: int,
    to: int,
    values: pa.DataType | None = None,
    names: Sequence[str] = RECORD_SCHEMA.names,
    wanted: KeyFilter | None = None,
) -> Iterator[pa.RecordBatch]:
    """Records with `offset` <= offset < `to`, in order. `values`, `names` and `wanted`: see `SegmentReader`.

    Raises `Damaged`, `ViewExpired`.
    """
    for segment in segments:
        if segment.next > offset and segment.base < to:
            reader = SegmentReader(files, directory, segment, values, names)
            yield from reader.batches(offset, to, wanted=wanted)
