"""Logs as lists of records, their folds, and last-value stores made of them."""

from __future__ import annotations

import os

import pyarrow as pa

from keyfold.statestore.rocksdb.store import LastValues, StoreId

#: Where a test is not about durability, RocksDB's many syncs go to memory if they can.
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

IDENTITY = StoreId("6f1c", 3, 1)

#: offset, key, value or None
Record = tuple[int, bytes, bytes | None]


def last_per_key(records: list[Record]) -> pa.RecordBatch:
    """The last record of every key; its timestamp is ten times its offset."""
    last = {key: (offset, value) for offset, key, value in records}
    return pa.record_batch(
        {
            "offset": pa.array([offset for offset, _ in last.values()], pa.int64()),
            "timestamp": pa.array([offset * 10 for offset, _ in last.values()], pa.timestamp("ms")),
            "key": pa.array(list(last), pa.binary()),
            "value": pa.array([value for _, value in last.values()], pa.binary()),
        }
    )


def folded(records: list[Record]) -> dict[bytes, bytes]:
    table: dict[bytes, bytes | None] = {key: value for _, key, value in records}
    return {key: value for key, value in table.items() if value is not None}


def apply(store: LastValues, records: list[Record]) -> None:
    store.apply(last_per_key(records), records[-1][0] + 1)


def records_from(offset: int, *entries: tuple[bytes, bytes | None]) -> list[Record]:
    return [(offset + n, key, value) for n, (key, value) in enumerate(entries)]
