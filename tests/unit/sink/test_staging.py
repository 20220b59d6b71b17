"""Blocks that tasks write aside: what the driver places is what the tasks were given, or nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspark")

from keyfold import Changelog
from keyfold.checkpoints.log.writer import Batch
from keyfold.sink import arrow_rows, staging
from keyfold.sink.staging import Stage, Staged, blocks_by_partition, refused_row
from keyfold.statestore import filenames
from keyfold.statestore.errors import BadRecord, Damaged, StorageFailed
from keyfold.statestore.files import LOCAL
from keyfold.statestore.keys.partitioner import partition_of
from keyfold.statestore.segment.block import BLOCK_BYTES, HEADERS_TYPE, decode, encode, record_batch
from keyfold.statestore.segment.message import rebase

Row = tuple[bytes, bytes | None]


def batch(rows: list[Row]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([k for k, _ in rows], pa.binary()),
            "value": pa.array([v for _, v in rows], pa.binary()),
        }
    )


def records(log: Changelog) -> list[list[Row]]:
    """Key and value of every record, by partition."""
    return [
        [
            row
            for b in log.read(p)
            for row in zip(b.column("key").to_pylist(), b.column("value").to_pylist(), strict=True)
        ]
        for p in range(log.partitions)
    ]


def commit(log: Changelog, stage: Stage, staged: list[Staged]) -> None:
    parts = blocks_by_partition(LOCAL, stage, staged)
    log.engine.writer.commit(parts, Batch("test", stage.batch))


rows_of_a_task = st.lists(
    st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.none() | st.binary(max_size=40)), max_size=12),
    max_size=4,
)


@given(
    st.lists(rows_of_a_task, min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from([None, "lz4", "zstd"]),
    st.sampled_from([60, BLOCK_BYTES]),
)
def test_the_log_gets_the_rows_of_each_partition_in_order(
    tasks: list[list[list[Row]]], partitions: int, codec: str | None, kept_bytes: int
) -> None:
    """A simple model: rows of all tasks one after the other, split by the partition of their key."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("keyfold.sink.staging.BLOCK_BYTES", kept_bytes)
        stage = Stage(directory, 3, partitions, 1000, codec=codec)
        staged = [
            s
            for number, batches in enumerate(tasks)
            for s in stage.run(LOCAL, map(batch, batches), number, 10 + number)
        ]
        rows = [row for batches in tasks for rows in batches for row in rows]
        with Changelog.open(Path(directory) / "log", partitions=partitions) as log:
            for number in range(2):
                log.engine.writer.commit(blocks_by_partition(LOCAL, stage, staged), Batch("test", number))
            expected = [
                [row for row in rows if partition_of(row[0], partitions) == p] for p in range(partitions)
            ]
            assert records(log) == [part * 2 for part in expected]
            for p in range(partitions):
                offsets = [o for b in log.read(p) for o in b.column("offset").to_pylist()]
                assert offsets == list(range(2 * len(expected[p])))
                tombstones = sum(s.tombstones for s in log.state.partitions[p].segments)
                assert tombstones == 2 * sum(value is None for _, value in expected[p])


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_the_blocks_of_a_log_are_as_small_as_the_tasks_have_made_them(
    tmp_path: Path, codec: str | None
) -> None:
    """Whatever the codec of the log is by now."""
    stage = Stage(str(tmp_path), 0, 1, 0, codec=codec)
    (staged,) = stage.run(LOCAL, [batch([(b"%d" % i, b"x" * 100) for i in range(5000)])], 0, 0)
    assert (staged.length < 100_000) == (codec is not None)
    for setting in ("none", "lz4", "zstd"):
        with Changelog.open(tmp_path / setting, config={"compression.type": setting}) as log:
            log.append([{"key": "first", "value": "v"}])
            before = log.state.partitions[0].bytes
            commit(log, stage, [staged])
            assert abs(log.state.partitions[0].bytes - before - staged.length) <= staged.length // 100
            assert records(log)[0][1:] == [(b"%d" % i, b"x" * 100) for i in range(5000)]


def test_large_rows_make_blocks_of_about_two_mebibytes(tmp_path: Path) -> None:
    stage = Stage(str(tmp_path), 0, 2, 0)
    rows: list[Row] = [(b"%d" % i, b"x" * 1000) for i in range(20_000)]
    for attempt, together in enumerate((1000, 20_000)):
        batches = (batch(rows[i : i + together]) for i in range(0, len(rows), together))
        staged = stage.run(LOCAL, batches, 0, attempt)
        assert sum(s.records for s in staged) == 20_000
        assert all(s.length < 4 << 20 for s in staged)
        assert len(staged) <= 14


def test_rows_find_any_of_many_partitions_and_keep_their_order(tmp_path: Path) -> None:
    stage = Stage(str(tmp_path), 0, 1000, 0)
    rows: list[Row] = [(b"%d" % (i % 3000), b"%d" % i) for i in range(6000)]
    staged = stage.run(LOCAL, [batch(rows)], 0, 0)
    data = filenames.staged(tmp_path, 0, 0, 0).read_bytes()
    found: list[tuple[int, bytes]] = []
    for s in staged:
        block = decode(pa.py_buffer(data[s.position : s.position + s.length]))
        found += [(s.partition, value) for value in block.column("value").to_pylist()]
    expected = [(partition_of(key, 1000), value) for key, value in rows]
    assert found == sorted(expected, key=lambda row: row[0])


def test_arrow_batches_are_put_together_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow's binary columns cannot hold more than 2 GiB."""
    stage, rows = Stage(str(tmp_path), 0, 1, 0), batch([(b"a", b"x" * 1000)])
    assert len(stage.run(LOCAL, [rows] * 6, 0, 0)) == 1
    monkeypatch.setattr(staging, "_TOGETHER_BYTES_MAX", 2 * rows.nbytes)
    assert [s.records for s in stage.run(LOCAL, [rows] * 6, 0, 1)] == [2, 2, 2]


def test_the_commit_knows_the_newest_timestamp_of_each_partition(tmp_path: Path) -> None:
    times = pa.array([500, 900, None, 700], pa.int64())
    rows = batch([(b"a", b"1"), (b"a", b"2"), (b"b", b"3"), (b"b", b"4")]).append_column("timestamp", times)
    stage = Stage(str(tmp_path), 0, 2, 800)
    with Changelog.open(tmp_path / "log", partitions=2) as log:
        commit(log, stage, stage.run(LOCAL, [rows], 0, 0))
        newest: dict[int, int] = {}
        for key, time in ((b"a", 900), (b"b", 800)):
            newest[log.partition(key)] = max(time, newest.get(log.partition(key), -1))
        for p, time in newest.items():
            assert [s.max_timestamp for s in log.state.partitions[p].segments] == [time]


def test_few_rows_are_kept_back_until_the_task_ends(tmp_path: Path) -> None:
    """Small Arrow batches, as `maxRecordsPerBatch` may have them, do not make small blocks."""
    stage = Stage(str(tmp_path), 0, 2, 0)
    staged = stage.run(LOCAL, (batch([(b"%d" % i, b"v")]) for i in range(500)), 0, 0)
    assert len(staged) == 2


def test_a_task_without_rows_makes_no_file(tmp_path: Path) -> None:
    stage = Stage(str(tmp_path), 0, 2, 0)
    assert stage.run(LOCAL, [batch([])], 0, 0) == []
    assert list(tmp_path.iterdir()) == []


def test_attempts_of_one_task_write_files_of_their_own(tmp_path: Path) -> None:
    """What the driver was not told of does not count."""
    stage = Stage(str(tmp_path), 0, 1, 0)
    stage.run(LOCAL, [batch([(b"a", b"lost")])], 0, 7)
    won = stage.run(LOCAL, [batch([(b"a", b"won")])], 0, 8)
    with Changelog.open(tmp_path / "log") as log:
        commit(log, stage, won)
        assert records(log) == [[(b"a", b"won")]]


# -- rows that cannot be written -----------------------------------------------------------------------------


def test_the_first_row_without_a_key_is_found_across_batches(tmp_path: Path) -> None:
    stage = Stage(str(tmp_path), 5, 2, 0)
    keys = pa.array([b"c", None, None], pa.binary())
    bad = pa.RecordBatch.from_pydict({"key": keys, "value": keys})
    staged = stage.run(LOCAL, [batch([(b"a", b""), (b"b", b"")]), bad], 3, 0)
    error = refused_row(staged, stage)
    assert error is not None
    assert error.position == "batch 5, Spark partition 3, row 3"


def test_of_several_tasks_the_first_row_is_named() -> None:
    def problem(task: int, row: int) -> Staged:
        return Staged(task, 0, -1, 0, 0, row, 0, 0, 0, arrow_rows.NO_KEY)

    stage = Stage("", 0, 2, 0)
    error = refused_row([problem(2, 1), problem(1, 9), problem(1, 4)], stage)
    assert error is not None
    assert error.position == "batch 0, Spark partition 1, row 4"
    assert refused_row([], stage) is None


@pytest.mark.parametrize("slice_from", [0, 1])
def test_a_header_without_a_key_is_found_in_its_row(tmp_path: Path, slice_from: int) -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    good = [{"key": "h", "value": None}]
    for bad in ([{"key": None, "value": b"x"}], [*good, None]):
        headers = pa.array([None, good, [], [*good, *good], bad], kind)
        rows = pa.RecordBatch.from_pydict(
            {"key": pa.array([b"k"] * 5), "value": pa.nulls(5, pa.binary()), "headers": headers}
        ).slice(slice_from)
        (found,) = Stage(str(tmp_path), 0, 1, 0).run(LOCAL, [rows], 0, 0)
        assert (found.problem, found.records) == (arrow_rows.NO_HEADER_KEY, 4 - slice_from)


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
@pytest.mark.parametrize("offsets", [[1, 2], [0, 2], [5, 6]])
def test_a_block_whose_records_do_not_count_from_zero_is_not_placed(
    offsets: list[int], codec: str | None
) -> None:
    keys, headers = pa.array([b"a", b"b"], pa.binary()), pa.nulls(2, HEADERS_TYPE)
    times = pa.array([0, 0], pa.timestamp("ms"))
    block = encode(record_batch(np.array(offsets, np.int64), times, keys, keys, headers), codec)
    with pytest.raises(BadRecord, match="do not start at 0"):
        rebase(block, 7)


# -- files that are not as they were left --------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Changelog]:
    with Changelog.open(tmp_path / "log", partitions=2) as opened:
        yield opened


def test_a_byte_that_changed_on_the_way_is_noticed_and_the_writer_goes_on(
    log: Changelog, tmp_path: Path
) -> None:
    stage = Stage(str(tmp_path), 0, 2, 0)
    staged = stage.run(LOCAL, [batch([(b"%d" % i, b"value") for i in range(50)])], 0, 0)
    path = filenames.staged(tmp_path, 0, 0, 0)
    good = path.read_bytes()
    changed = bytearray(good)
    changed[staged[-1].position + 200] ^= 1
    path.write_bytes(changed)
    with pytest.raises(Damaged, match="crc32c"):
        commit(log, stage, staged)
    assert records(log) == [[], []]
    path.write_bytes(good)
    commit(log, stage, staged)
    assert sum(len(part) for part in records(log)) == 50


def test_a_file_that_the_driver_does_not_see_does_not_fence_the_writer(
    log: Changelog, tmp_path: Path
) -> None:
    stage = Stage(str(tmp_path), 0, 2, 0)
    staged = stage.run(LOCAL, [batch([(b"a", b"1")])], 0, 0)
    filenames.staged(tmp_path, 0, 0, 0).unlink()
    with pytest.raises(StorageFailed, match='placement="driver"'):
        commit(log, stage, staged)
    assert not log.engine.writer.fenced
    commit(log, stage, stage.run(LOCAL, [batch([(b"a", b"1")])], 0, 1))
    assert [row for part in records(log) for row in part] == [(b"a", b"1")]


def test_a_directory_that_a_task_does_not_see_is_named(tmp_path: Path) -> None:
    stage = Stage(str(tmp_path / "missing"), 0, 2, 0)
    with pytest.raises(StorageFailed, match='placement="driver"') as caught:
        stage.run(LOCAL, [batch([(b"a", b"1")])], 0, 0)
    assert "missing" in str(caught.value.path)


def test_tasks_can_write_at_the_same_time(log: Changelog, tmp_path: Path) -> None:
    stage = Stage(str(tmp_path), 0, 2, 0)
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(
            lambda n: stage.run(LOCAL, [batch([(b"%d" % n, b"%d" % i) for i in range(20)])], n, 0), range(8)
        )
        staged = [s for part in parts for s in part]
    commit(log, stage, staged)
    for n in range(8):
        key = b"%d" % n
        assert [v for part in records(log) for k, v in part if k == key] == [b"%d" % i for i in range(20)]
