"""What does not fit one Arrow column is refused by every store that joins several, nothing is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from keyfold.statestore.kv.api import LAST_RECORDS, check_arrow, joined
from keyfold.statestore.kv.stores import MemoryStore, PartitionedStore
from support.huge import zeros

HALF = (1 << 30) + 8


class OneHugeValue(MemoryStore):
    def get_all(self, keys: Any) -> Any:
        return zeros(HALF)

    def get_records(self, keys: pa.Array) -> pa.RecordBatch:
        numbers = pa.array([1], pa.int64())
        return pa.RecordBatch.from_arrays([numbers, numbers, zeros(HALF)], schema=LAST_RECORDS)


@pytest.mark.parametrize("ask", ["get_all", "get_records"])
def test_partitions_whose_values_do_not_fit_one_column_are_refused_together(ask: str) -> None:
    store = PartitionedStore([OneHugeValue(), OneHugeValue()], lambda key: key[0] % 2)
    assert len(getattr(store, ask)(pa.array([b"a"]))) == 1
    with pytest.raises(ValueError, match="2 GiB"):
        getattr(store, ask)(pa.array([b"a", b"b"]))


@pytest.mark.parametrize(
    "join",
    [
        lambda parts: check_arrow(pa.chunked_array(parts)),
        joined,
        lambda parts: joined([pa.record_batch({"value": part}) for part in parts]),
    ],
    ids=["keys", "arrays", "batches"],
)
def test_chunks_beyond_one_column_are_refused(join: Callable[[list[pa.Array]], Any]) -> None:
    with pytest.raises(ValueError, match="2 GiB"):
        join([zeros(HALF), zeros(HALF)])


def test_pieces_that_fit_are_joined_in_order() -> None:
    batches = [pa.record_batch({"n": [number]}) for number in range(3)]
    assert joined(batches).column("n").to_pylist() == [0, 1, 2]
    assert joined(batches[:1]) is batches[0]
