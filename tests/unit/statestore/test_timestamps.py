"""Timestamps of records on their way in: exact in ms, or refused with their row; no timestamp is
the time of writing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import example, given

from keyfold import Changelog
from keyfold.checkpoints.log.ingest import normalize
from keyfold.statestore.errors import BadRecord
from keyfold.statestore.files import LOCAL
from support.changelogs import BY_HAND

NOW_MS = 77
INT64_MAX = (1 << 63) - 1
LARGEST_MS = INT64_MAX // 1000
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}

UNITS = st.sampled_from(["s", "ms", "us", "ns", "int64"])
EDGES = [0, 1, 999, 10**16, -1, -1000, -(10**6), -(10**16), INT64_MAX, -INT64_MAX - 1, LARGEST_MS // 1000,
         LARGEST_MS // 1000 + 1, LARGEST_MS, LARGEST_MS + 1]  # fmt: skip
TIMES = st.lists(
    st.none() | st.sampled_from(EDGES) | st.integers(-INT64_MAX - 1, INT64_MAX), min_size=1, max_size=6
)


def model(unit: str, time: int | None) -> int | None:
    """The timestamp in ms, None where it is out of range."""
    per_second = PER_SECOND["ms" if unit == "int64" else unit]
    if time is None or time * 1000 == -per_second:
        return NOW_MS
    ms = time * 1000 // per_second
    return ms if 0 <= ms <= LARGEST_MS else None


def column(unit: str, times: list[int | None]) -> pa.Array:
    whole = pa.array(times, pa.int64())
    return whole if unit == "int64" else whole.cast(pa.timestamp(unit, "Europe/Berlin"))


def table(times: pa.Array) -> pa.Table:
    return pa.table({"key": ["k"] * len(times), "value": ["v"] * len(times), "timestamp": times})


@given(UNITS, TIMES)
@example("s", [10**16])
def test_every_timestamp_is_exact_or_refused_with_its_row(unit: str, times: list[int | None]) -> None:
    expected = [model(unit, time) for time in times]
    batches = pa.concat_tables([table(column(unit, [0, None])), table(column(unit, times))])
    if None in expected:
        with pytest.raises(BadRecord, match=rf"timestamp(.|\n)*row {2 + expected.index(None)}\b"):
            normalize(batches, NOW_MS)
    else:
        found = [b.column("timestamp").cast(pa.int64()).to_pylist() for b in normalize(batches, NOW_MS)]
        assert [ms for part in found for ms in part] == [0, NOW_MS, *expected]


@given(TIMES)
def test_rows_of_a_stream_are_held_to_the_same(times: list[int | None]) -> None:
    """A task gets timestamps as int64 in ms."""
    pytest.importorskip("pyspark")
    from keyfold.sink.staging import Stage, blocks_by_partition, refused_row

    (rows,) = table(column("int64", times)).to_batches()
    rows = rows.set_column(0, "key", rows["key"].cast(pa.binary()))
    rows = rows.set_column(1, "value", rows["value"].cast(pa.binary()))
    expected = [model("int64", time) for time in times]
    with tempfile.TemporaryDirectory() as directory:
        stage = Stage(directory, 3, 1, NOW_MS)
        staged = stage.run(LOCAL, [rows.slice(0, 1), rows.slice(1)], 5, 0)
        refused = refused_row(staged, stage)
        if None in expected:
            assert refused is not None
            assert refused.what == "The timestamp of a record is out of range."
            assert refused.position == f"batch 3, Spark partition 5, row {expected.index(None)}"
        else:
            assert refused is None
            blocks = blocks_by_partition(LOCAL, stage, staged)[0](0)
            assert sum(block.records for block in blocks) == len(times)
            assert max(s.max_timestamp for s in staged) == max(e for e in expected if e is not None)


def test_a_record_from_the_far_future_is_not_deleted_as_the_oldest(tmp_path: Path) -> None:
    config = {**BY_HAND, "cleanup.policy": "delete", "retention.ms": "7d"}
    with Changelog.open(tmp_path / "log", config=config) as log:
        with pytest.raises(BadRecord, match="row 0"):
            log.append(table(column("s", [10**16])))
        assert log.end_offsets() == {0: 0}
        log.append(table(column("ms", [LARGEST_MS])))
        (batch,) = log.read(0)
        assert batch["timestamp"].cast(pa.timestamp("us")).cast(pa.int64())[0].as_py() == LARGEST_MS * 1000


def test_no_timestamp_value_is_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(BadRecord) as caught:
        normalize(table(column("ms", [-424_242])), NOW_MS)
    assert "424" not in str(caught.value)
