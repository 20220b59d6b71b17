"""Stores that tell offset and timestamp of the last records, one by one, for many keys, and in ranges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold.statestore.keys.partitioner import partition_of, partitions_of
from keyfold.statestore.kv.api import LAST_RECORDS, RecordStore, StoreClosed
from keyfold.statestore.kv.stores import PartitionedStore
from keyfold.statestore.rocksdb.format import HEADER
from keyfold.statestore.rocksdb.snapshot import unpacked
from keyfold.statestore.rocksdb.store import LastValues, StoreId

#: More than are looked up in one turn. Key n has the offset n and the timestamp 10 n; every seventh is gone.
COUNT = 20_000
KEYS = [b"%d" % (n * 7919 % COUNT) for n in range(COUNT)]
HELD = {key: (n, 10 * n, b"v%d" % n) for n, key in enumerate(KEYS) if n % 7}


def rows(numbers: list[int]) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "offset": pa.array(numbers, pa.int64()),
            "timestamp": pa.array([10 * n for n in numbers], pa.timestamp("ms")),
            "key": pa.array([KEYS[n] for n in numbers], pa.binary()),
            "value": pa.array([b"v%d" % n if n % 7 else None for n in numbers], pa.binary()),
        }
    )


@pytest.fixture(scope="module", params=["one", "three"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordStore]:
    count = {"one": 1, "three": 3}[request.param]
    parts: list[list[int]] = [[] for _ in range(count)]
    for n, key in enumerate(KEYS):
        parts[partition_of(key, count)].append(n)
    with ExitStack() as stack:
        directory: Path = tmp_path_factory.mktemp("records")
        stores = []
        for number, part in enumerate(parts):
            values = stack.enter_context(LastValues.open(directory / str(number), StoreId("u", number, 0)))
            half = len(part) // 2
            values.apply(rows(part[:half]), part[half])
            values.apply(rows(part[half:]), COUNT)
            stores.append(values)
        many = PartitionedStore(
            stores, lambda key: partition_of(key, count), lambda keys: partitions_of(keys, count)
        )
        snapshot = many.snapshot() if count > 1 else stores[0].snapshot()
        yield cast(RecordStore, stack.enter_context(closing(snapshot)))


def test_records_are_found_one_by_one(store: RecordStore) -> None:
    for key in [*KEYS[:50], b"none", b""]:
        assert store.get_record(key) == HELD.get(key)


@pytest.mark.parametrize("count", [0, 1, 20, 3 * COUNT])
def test_many_records_are_found_in_the_order_asked(store: RecordStore, count: int) -> None:
    """Missing keys, and keys that are asked twice, among them."""
    random = np.random.default_rng(count)
    asked = [b"%d" % n for n in random.integers(-5, COUNT + 5, count)]
    found = store.get_records(pa.array(asked, pa.binary()))
    assert found.schema == LAST_RECORDS
    expected = [HELD.get(key, (None, None, None)) for key in asked]
    assert found.to_pydict() == {
        name: [record[place] for record in expected] for place, name in enumerate(LAST_RECORDS.names)
    }


def test_ranges_come_with_their_records(store: RecordStore) -> None:
    expected = sorted((key, record) for key, record in HELD.items() if b"15" <= key < b"2")
    assert list(store.records(b"15", b"2")) == expected
    assert len(list(store.records())) == len(HELD)


def test_a_snapshot_that_was_closed_gives_no_records(tmp_path: Path) -> None:
    with LastValues.open(tmp_path / "one", StoreId("u", 0, 0)) as values:
        snapshot = values.snapshot()
        snapshot.close()
        for ask in (
            lambda: snapshot.get_record(b"a"),
            lambda: snapshot.get_records(pa.array([b"a"])),
            lambda: list(snapshot.records()),
        ):
            with pytest.raises(StoreClosed):
                ask()


def test_records_of_a_snapshot_stay_as_they_were(tmp_path: Path) -> None:
    with LastValues.open(tmp_path / "one", StoreId("u", 0, 0)) as values:
        values.apply(rows([1, 2, 3]), 4)
        with closing(values.snapshot()) as snapshot:
            last = rows([4]).set_column(2, "key", pa.array([KEYS[1]], pa.binary()))
            values.apply(last, 5)
            assert snapshot.get_records(pa.array(KEYS[1:5])).column("offset").to_pylist() == [1, 2, 3, None]
            assert snapshot.get_record(KEYS[1]) == (1, 10, b"v1")
        with closing(values.snapshot()) as later:
            assert later.get_record(KEYS[1]) == (4, 40, b"v4")


INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.none() | st.tuples(INT64, INT64, st.binary())), st.integers(0, 3))
def test_stored_records_are_taken_apart(records: list[tuple[int, int, bytes] | None], skip: int) -> None:
    stored = pa.array([None if r is None else HEADER.pack(*r[:2]) + r[2] for r in records], pa.binary())
    found = unpacked(stored.slice(skip)).to_pylist()
    names = LAST_RECORDS.names
    assert found == [dict(zip(names, r or (None,) * 3, strict=True)) for r in records[skip:]]
