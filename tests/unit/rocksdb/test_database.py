"""One RocksDB with the last values of many partitions: each is a fold of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from keyfold.statestore.rocksdb import store as lastvalues
from keyfold.statestore.rocksdb.database import Database
from keyfold.statestore.rocksdb.format import ALL_PARTITIONS, data_end, data_prefix, stored_keys
from keyfold.statestore.rocksdb.store import LastValues, StoreId, StoreUnusable, apply_together
from support.folds import IN_MEMORY, last_per_key, records_from

#: The first, neighbours around a carry between the bytes of their number, and the last.
PARTITIONS = (0, 1, 255, 256, ALL_PARTITIONS)
KEYS = st.sampled_from([b"", b"\x00", b"a", b"a\x00", b"b", b"\xff", b"\xff\xff\xff"])
ROWS = st.dictionaries(KEYS, st.none() | st.binary(max_size=3))


def apply_all(stores: dict[int, LastValues], changes: dict[int, dict[bytes, bytes | None]]) -> None:
    """As one step; the stores are of one database."""
    batches, numbers, ends = [], [], []
    for number, rows in sorted(changes.items()):
        offset = stores[number].applied
        batches.append(last_per_key(records_from(offset, *rows.items())))
        numbers += [number] * len(rows)
        ends.append((stores[number], offset + len(rows) + 1))
    rows_of_all = pa.concat_batches(batches)
    keys = stored_keys(np.array(numbers, np.uint16), rows_of_all.column("key"))
    apply_together(stores[next(iter(stores))]._database, rows_of_all.set_column(2, "key", keys), ends)


class ManyFolds(RuleBasedStateMachine):
    """Several partitions of one database, against a dict each."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory(dir=IN_MEMORY)
        self.model: dict[int, dict[bytes, bytes]] = {number: {} for number in PARTITIONS}
        self.applied = dict.fromkeys(PARTITIONS, 0)
        self.generations = dict.fromkeys(PARTITIONS, 0)

    @initialize()
    def open(self) -> None:
        self.database = Database.open(Path(self.place.name) / "store")
        folds = self.database.folds()
        assert {n: applied for n, (_, applied) in folds.items()} == {
            n: a for n, a in self.applied.items() if a
        }
        self.stores = {
            number: LastValues(
                self.database, *folds.get(number, (StoreId("u", number, self.generations[number]), 0))
            )
            for number in PARTITIONS
        }
        assert {n: store.identity.generation for n, store in self.stores.items()} == self.generations

    @rule(
        changes=st.dictionaries(st.sampled_from(PARTITIONS), ROWS, min_size=1),
        ingested=st.booleans(),
        together=st.booleans(),
    )
    def apply(self, changes: dict[int, dict[bytes, bytes | None]], ingested: bool, together: bool) -> None:
        lastvalues.INGEST_ROWS = 0 if ingested else 20_000
        try:
            for part in [changes] if together else [{n: rows} for n, rows in changes.items()]:
                apply_all(self.stores, part)
        finally:
            lastvalues.INGEST_ROWS = 20_000
        for number, rows in changes.items():
            self.applied[number] = self.stores[number].applied
            self.model[number] |= {key: value for key, value in rows.items() if value is not None}
            for key in [key for key, value in rows.items() if value is None]:
                self.model[number].pop(key, None)

    @rule(number=st.sampled_from(PARTITIONS))
    def begin_again(self, number: int) -> None:
        self.generations[number] += 1
        self.stores[number].begin_again(self.generations[number])
        self.model[number], self.applied[number] = {}, 0

    @rule()
    def flush(self) -> None:
        self.database.flush()

    @rule()
    def reopen(self) -> None:
        self.database.close()
        for number in PARTITIONS:
            if not self.applied[number]:
                self.generations[number] = 0
        self.open()

    @invariant()
    def every_partition_holds_its_own_rows_and_no_others(self) -> None:
        if hasattr(self, "stores"):
            cursor = self.database.cursor()
            for number, expected in self.model.items():
                store = self.stores[number]
                snapshot = lastvalues.LastValuesSnapshot(cursor, number, owns=False)
                assert dict(store.all()) == dict(snapshot.all()) == expected
                assert store.applied == snapshot.applied == self.applied[number]
                for key in (b"", b"a", b"\xff"):
                    assert store.get(key) == snapshot.get(key) == expected.get(key)
                    assert list(store.range(key, b"\xff\xff")) == [
                        e for e in sorted(expected.items()) if key <= e[0] < b"\xff\xff"
                    ]
            cursor.close()

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.database.close()
        self.place.cleanup()


TestManyFolds = ManyFolds.TestCase
TestManyFolds.settings = settings(stateful_step_count=20)


@pytest.mark.parametrize("number", PARTITIONS)
def test_the_rows_of_a_partition_are_between_its_prefix_and_its_end(number: int) -> None:
    assert data_prefix(number) < data_prefix(number) + b"\xff" * 9 < data_end(number)
    assert stored_keys(np.array([number], np.uint16), pa.array([b"k"])).to_pylist() == [
        data_prefix(number) + b"k"
    ]


def test_a_store_of_many_partitions_is_not_opened_as_that_of_one(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "store")
    apply_all(
        {n: LastValues(database, StoreId("u", n, 0), 0) for n in (1, 2)}, {1: {b"a": b"1"}, 2: {b"b": b"2"}}
    )
    database.close()
    for identity in (StoreId("u", 1, 0), StoreId("u", 3, 0), None):
        with pytest.raises(StoreUnusable):
            LastValues.open(tmp_path / "store", identity)
