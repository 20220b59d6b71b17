"""Some columns of a block without the others. Codecs only, no I/O.

Arrow's reader leaves out columns of a record, but not fields of a struct, and the value columns are fields of
the struct `value`. So the nodes and buffers of the other columns are left out of the block's metadata, and
their bytes out of its body. They are neither copied nor decompressed:

    | prefix, metadata: nodes and buffers of all columns  | body: buffers of all columns           |
    | prefix, metadata: nodes and buffers of some columns | body: buffers of these columns |
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from keyfold.statestore.segment.block import stream_header
from keyfold.statestore.segment.message import selected


@dataclass(frozen=True)
class BlockColumns:
    """Columns of the blocks of a segment.

    Attributes:
        schema: Of the records with these columns.
        nodes, buffers: Their numbers in the metadata of a block.
    """

    schema: pa.Schema
    nodes: tuple[int, ...]
    buffers: tuple[int, ...]

    @classmethod
    def of(cls, schema: pa.Schema, names: Collection[str], values: pa.DataType | None = None) -> BlockColumns:
        """The columns `names` of a segment with this schema. Of typed values only the fields that the struct
        `values` has too, also in structs within; None for all of them. Of raw values, a struct without fields
        says only which are null.
        """
        fields: list[pa.Field] = []
        nodes: list[int] = []
        buffers: list[int] = []
        node = buffer = 0
        for field in schema:
            if field.name in names:
                wanted = field.type if field.name != "value" or values is None else values
                kind = _choose(field.type, wanted, (node, buffer), nodes, buffers)
                fields.append(field.with_type(kind))
            node += _nodes(field.type)
            buffer += _buffers(field.type)
        return cls(pa.schema(fields), tuple(nodes), tuple(buffers))

    @cached_property
    def _header(self) -> bytes:
        return stream_header(self.schema)

    def decode(self, block: pa.Buffer) -> pa.RecordBatch:
        """The records of one block, with these columns. Its checksum was verified.

        Raises:
            ValueError: The bytes are not a block of the segment.
        """
        parts = selected(block, self.nodes, self.buffers)
        options = pa.ipc.IpcReadOptions(use_threads=False)
        with pa.ipc.open_stream(pa.py_buffer(self._header + parts), options=options) as stream:
            return stream.read_next_batch()


def _choose(
    kind: pa.DataType, wanted: pa.DataType, place: tuple[int, int], nodes: list[int], buffers: list[int]
) -> pa.DataType:
    """Choose what a column of type `kind` at `place` has in common with `wanted`. Returns the type of that.

    Args:
        place: The numbers of its first node and its first buffer.
        nodes, buffers: The chosen ones are appended.
    """
    node, buffer = place
    only_presence = pa.types.is_struct(wanted) and not wanted.num_fields and not pa.types.is_null(kind)
    if not only_presence and not (pa.types.is_struct(kind) and pa.types.is_struct(wanted)):
        nodes += range(node, node + _nodes(kind))
        buffers += range(buffer, buffer + _buffers(kind))
        return kind
    # The validity is the first buffer of every type, and the only one of a struct.
    nodes.append(node)
    buffers.append(buffer)
    node, buffer = node + 1, buffer + 1
    fields = []
    for child in kind if pa.types.is_struct(kind) else ():
        if wanted.get_field_index(child.name) >= 0:
            inner = _choose(child.type, wanted.field(child.name).type, (node, buffer), nodes, buffers)
            fields.append(child.with_type(inner))
        node += _nodes(child.type)
        buffer += _buffers(child.type)
    return pa.struct(fields)


def _nodes(kind: pa.DataType) -> int:
    """The number of nodes of a column: its own, and those of its children."""
    return 1 + sum(_nodes(child) for child in _children(kind))


def _buffers(kind: pa.DataType) -> int:
    """The number of buffers of a column and its children."""
    if pa.types.is_null(kind):
        return 0
    if pa.types.is_struct(kind) or pa.types.is_fixed_size_list(kind):
        own = 1
    elif any(has_ends(kind) for has_ends in _WITH_OFFSETS_AND_DATA):
        own = 3
    else:
        own = 2
    return own + sum(_buffers(child) for child in _children(kind))


def _children(kind: pa.DataType) -> list[pa.DataType]:
    return [kind.field(i).type for i in range(kind.num_fields)]


_WITH_OFFSETS_AND_DATA = (
    pa.types.is_binary, pa.types.is_string, pa.types.is_large_binary, pa.types.is_large_string,
)  # fmt: skip
