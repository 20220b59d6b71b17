"""What overlays and partitioned stores do besides what every store does."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import pyarrow as pa
import pytest

from keyfold.statestore.kv.api import Entries
from keyfold.statestore.kv.stores import MemoryStore, Overlay, PartitionedStore, StoreClosed

SAMPLE = {b"": b"empty", b"a": b"1", b"a\x00": b"2", b"ab": b"", b"b": b"4", b"\xff": b"7"}


def partition_of(key: bytes) -> int:
    return crc32(key) % 3


def test_changes_are_one_row_a_key_in_the_order_of_first_changes_with_null_for_a_delete() -> None:
    overlay = Overlay(MemoryStore(SAMPLE))
    overlay.put(b"z", b"1")
    overlay.delete(b"a")
    overlay.put(b"b", b"x")
    overlay.put(b"z", b"2")
    overlay.delete(b"b")
    overlay.delete(b"never there")
    changes = overlay.changes()
    assert changes.schema == pa.schema(
        [pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())]
    )
    assert changes.to_pydict() == {
        "key": [b"z", b"a", b"b", b"never there"],
        "value": [b"2", None, None, None],
    }


def test_an_overlay_without_changes_has_an_empty_table() -> None:
    assert Overlay(MemoryStore()).changes().num_rows == 0


def test_an_overlay_never_writes_its_base() -> None:
    base = MemoryStore(SAMPLE)
    overlay = Overlay(base)
    overlay.put_all({b"a": b"new", b"zz": b"new"})
    overlay.delete_all(list(SAMPLE))
    assert list(base.all()) == sorted(SAMPLE.items())


def test_a_key_is_looked_for_in_its_own_partition_only() -> None:
    stores = [MemoryStore({b"a": b"zero", b"b": b"zero"}), MemoryStore({b"a": b"one", b"b": b"one"})]
    both = PartitionedStore(stores, lambda key: int(key == b"a"))
    assert both.get(b"a") == b"one"
    assert both.get_all([b"a", b"b", b"a"]) == [b"one", b"zero", b"one"]


def test_a_scan_over_partitions_closes_all_that_it_opened_when_one_fails() -> None:
    open_scans = []

    class Counting(MemoryStore):
        def range(self, from_: bytes | None = None, to: bytes | None = None) -> Entries[bytes, bytes]:
            open_scans.append(self)
            return Entries(iter(()), lambda: open_scans.remove(self))

    shut = MemoryStore()
    shut.close()
    with pytest.raises(StoreClosed):
        PartitionedStore([Counting(), Counting(), shut], partition_of).all()
    assert open_scans == []
    with PartitionedStore([Counting(), Counting()], partition_of).all():
        assert len(open_scans) == 2
    assert open_scans == []


def test_the_partitions_of_many_keys_are_asked_for_at_once() -> None:
    stores = [MemoryStore({b"a": b"zero", b"b": b"zero"}), MemoryStore({b"a": b"one", b"b": b"one"})]
    asked: list[int] = []

    def partitions_of(keys: pa.Array) -> np.ndarray:
        asked.append(len(keys))
        return np.array([int(key == b"a") for key in keys.to_pylist()], np.int32)

    both = PartitionedStore(stores, lambda key: 2, partitions_of)
    assert both.get_all(pa.array([b"a", b"b", b"a"])).to_pylist() == [b"one", b"zero", b"one"]
    assert both.snapshot().get_all(pa.array([b"b", b"b"])).to_pylist() == [b"zero", b"zero"]
    assert asked == [3, 2]


def test_changes_of_arrays_are_one_row_a_key_in_the_order_of_first_changes() -> None:
    overlay = Overlay(MemoryStore(SAMPLE))
    overlay.put(b"z", b"0")
    overlay.put_all(pa.array([b"c", b"z", b"c", b"a"]), pa.array([b"1", b"2", b"3", None]))
    assert overlay.changes().to_pydict() == {
        "key": [b"z", b"c", b"a"],
        "value": [b"2", b"3", None],
    }
    assert [key for key, _ in overlay.range(b"a", b"zz")] == [b"a\x00", b"ab", b"b", b"c", b"z"]
