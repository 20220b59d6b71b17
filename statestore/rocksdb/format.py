r"""The bytes of a last-value store: its keys, its values, its meta records. No I/O.

b"\x00" + partition          -> the meta record of a partition
b"\x01" + partition + key    -> offset and timestamp in ms, each int64 little-endian, and the value

A partition is a big-endian uint16, so that its rows are adjacent.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.keys.buffers import prefixed
from keyfold.statestore.kv.api import binary_array
from keyfold.statestore.rocksdb.sst_writer import Bytes, Rows
from keyfold.statestore.segment.block import FORMAT_VERSION, VALUE_BYTES_MAX

# Data keys have a leading byte, so that no user key, not even the empty one, equals a meta key.
META = b"\x00"
DATA = b"\x01"

_PARTITION = struct.Struct(">H")
#: The length of the byte and the partition before every key.
PREFIX_BYTES = 1 + _PARTITION.size
#: The partition number in the identity of a store of many partitions.
ALL_PARTITIONS = (1 << 16) - 1

#: Before every value: offset and timestamp, 8 bytes each, little-endian.
HEADER = struct.Struct("<qq")

_META = struct.Struct("<4sHHIqq")
_MAGIC = b"KFLV"


@dataclass(frozen=True)
class StoreId:
    """What the rows of a store were computed from. A rollback starts a new generation."""

    changelog: str
    partition: int
    generation: int


def meta_key(partition: int) -> bytes:
    return META + _PARTITION.pack(partition)


def data_prefix(partition: int) -> bytes:
    return DATA + _PARTITION.pack(partition)


def data_end(partition: int) -> bytes:
    """The first key after all rows of a partition."""
    return data_prefix(partition + 1) if partition < ALL_PARTITIONS else bytes([DATA[0] + 1])


def partition_of_stored(key: bytes) -> int:
    """The partition in the key of a meta record or a row. Raises `ValueError` for any other key."""
    if len(key) < PREFIX_BYTES or key[:1] not in (META, DATA):
        raise ValueError("not a key of a last-value store")
    partition: int = _PARTITION.unpack_from(key, 1)[0]
    return partition


def stored_keys(partitions: npt.NDArray[np.uint16], keys: pa.Array) -> pa.Array:
    """Every key of a `binary` array, preceded by the prefix of its partition."""
    prefixes = np.empty((len(partitions), PREFIX_BYTES), np.uint8)
    prefixes[:, 0] = DATA[0]
    prefixes[:, 1:] = partitions.astype(">u2").view(np.uint8).reshape(-1, _PARTITION.size)
    packed = pa.Array.from_buffers(pa.binary(PREFIX_BYTES), len(keys), [None, pa.py_buffer(prefixes)])
    return pc.binary_join_element_wise(packed.cast(pa.binary()), keys, b"")


def pack_meta(identity: StoreId, applied: int) -> bytes:
    """The meta record.

    0        4         6             8           12           20        28
    +--------+---------+-------------+-----------+------------+---------+------------------+
    | "KFLV" | version | uuid length | partition | generation | applied | changelog's uuid |
    +--------+---------+-------------+-----------+------------+---------+------------------+
    """
    uuid = identity.changelog.encode()
    head = _META.pack(_MAGIC, FORMAT_VERSION, len(uuid), identity.partition, identity.generation, applied)
    return head + uuid


def unpack_meta(record: bytes) -> tuple[int, StoreId | None, int]:
    """Version, identity and applied offset; the identity is None for another version. Raises `ValueError` if
    it is not a meta record.
    """
    if len(record) < _META.size:
        raise ValueError("a meta record that is too short")
    magic, version, length, partition, generation, applied = _META.unpack_from(record)
    if magic != _MAGIC:
        raise ValueError("a meta record with another magic")
    if version != FORMAT_VERSION:
        return version, None, 0
    if len(record) != _META.size + length:
        raise ValueError("a meta record of another length")
    return version, StoreId(record[_META.size :].decode(), partition, generation), applied


def put_rows(batch: Any, prefix: bytes, rows: pa.RecordBatch) -> None:
    """Put or delete every row in a write batch. rocksdict needs one call per row."""
    heads = _heads(rows)
    packed = pa.Array.from_buffers(pa.binary(HEADER.size), len(heads), [None, pa.py_buffer(heads)])
    keys = prefixed(prefix, rows.column("key"))
    values = pc.binary_join_element_wise(packed.cast(pa.binary()), rows.column("value"), b"")
    for key, value in zip(keys.to_pylist(), values.to_pylist(), strict=True):
        if value is None:
            del batch[key]
        else:
            batch[key] = value


def values_of(records: list[bytes | None]) -> pa.Array:
    """The values of records as `binary`, null for None. Raises `ValueError` beyond 2 GiB."""
    # Without an end, Arrow's estimate of the size of the values overflows.
    return pc.binary_slice(binary_array(records), HEADER.size, VALUE_BYTES_MAX)


def sorted_rows(prefix: bytes, rows: pa.RecordBatch) -> Rows:
    """The same for a sorted file. The rows are in key order."""
    return Rows(prefix, rows.column("key"), _heads(rows), rows.column("value"))


def meta_rows(metas: Iterable[tuple[StoreId, int]]) -> Rows:
    """The meta records for a sorted file, where they are first."""
    packed = sorted(
        (meta_key(identity.partition), pack_meta(identity, applied)) for identity, applied in metas
    )
    keys, values = (pa.array(column, pa.binary()) for column in zip(*packed, strict=True))
    return Rows(b"", keys, np.empty((len(keys), 0), np.uint8), values)


def _heads(rows: pa.RecordBatch) -> Bytes:
    """The packed `HEADER` of each row, as (rows, 16) bytes."""
    heads = np.empty((rows.num_rows, 2), "<i8")
    for place, name in enumerate(("offset", "timestamp")):
        heads[:, place] = rows.column(name).cast(pa.int64()).to_numpy(zero_copy_only=False)
    return heads.view(np.uint8)
