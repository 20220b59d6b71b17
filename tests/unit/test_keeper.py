"""Last values that are not those of the log: behind a lost delete, ahead of the log, older than retention."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from keyfold.checkpoints import Changelog
from keyfold.checkpoints.keeper import steps
from keyfold.checkpoints.retention import apply_retention
from keyfold.statestore.blocks import RECORD_SCHEMA, VALUE_BYTES_MAX, no_headers
from support.huge import zeros

CONFIG = {"cleaner.threads": 0, "anchors.auto": 0, "delete.retention.ms": 0}


def table(**rows: str | None) -> pa.Table:
    return pa.table({"key": list(rows), "value": pa.array(list(rows.values()), pa.string())})


def put_store(source: Path, target: Path) -> None:
    """Replace the last values of partition 0 in `target` by those of `source`."""
    for old in (target / "0").glob("store-*"):
        shutil.rmtree(old)
    (store,) = (source / "0").glob("store-*")
    shutil.copytree(store, target / "0" / store.name)


def test_a_store_that_slept_through_a_delete_is_rebuilt(tmp_path: Path) -> None:
    path, before = tmp_path / "log", tmp_path / "before"
    with Changelog.open(path, config=CONFIG) as log:
        log.append(table(a="1", b="1"))
        assert log.get(b"a") == b"1"
    shutil.copytree(path, before)
    with Changelog.open(path) as log:
        log.append(table(a=None))
        log.append(table(c="1"))
        log.compact()
        log.compact()
        assert log.state.partitions[0].dropped_tombstone == 2
    put_store(before, path)
    with Changelog.open(path) as log:
        assert dict(log.store().all()) == {b"b": b"1", b"c": b"1"}


def test_a_store_that_is_ahead_of_the_log_is_rebuilt(tmp_path: Path) -> None:
    path, before = tmp_path / "log", tmp_path / "before"
    with Changelog.open(path, config=CONFIG) as log:
        log.append(table(a="1"))
    shutil.copytree(path, before)
    with Changelog.open(path) as log:
        log.append(table(a="2", b="2"))
        assert log.get(b"a") == b"2"
    put_store(path, before)
    with Changelog.open(before) as log:
        assert dict(log.store().all()) == {b"a": b"1"}


def test_keys_that_retention_has_dropped_are_no_last_values(tmp_path: Path) -> None:
    now_ms = [1_000_000]
    config = {"cleaner.threads": 0, "cleanup.policy": "compact,delete", "retention.ms": 1000}
    with Changelog.open(tmp_path / "log", config=config, clock_ms=lambda: now_ms[0]) as log:
        log.append(table(old="1"))
        log.host.writer.seal_active()
        log.append(table(new="1"))
        assert dict(log.store().all()) == {b"old": b"1", b"new": b"1"}
        now_ms[0] += 2000
        log.append(table(newer="1"))
        assert apply_retention(log.host.writer) == 1
        assert dict(log.store().all()) == {b"new": b"1", b"newer": b"1"}


def test_a_writer_waits_while_the_stores_are_too_far_behind(tmp_path: Path) -> None:
    config = {"cleaner.threads": 0, "store.backlog.bytes": 1 << 20}
    with Changelog.open(tmp_path / "log", config=config) as log:
        for number in range(8):
            log.append(pa.table({"key": [f"k{number}-{i}" for i in range(400)], "value": ["v" * 1000] * 400}))
        log.host.wait_for_room()
        assert log.host._keeper.lag_bytes() <= 1 << 20


def test_no_stretch_of_the_log_loses_records_that_do_not_fit_one_arrow_column_together() -> None:
    """The largest value that a record can have, and others before and after it."""
    sizes = [60 << 20, 4, VALUE_BYTES_MAX, 5, 40 << 20, VALUE_BYTES_MAX, 6]
    batches = [
        pa.RecordBatch.from_arrays(
            [
                pa.array([offset], pa.int64()),
                pa.array([0], pa.timestamp("ms")),
                pa.array([b"%d" % offset], pa.binary()),
                zeros(size),
                no_headers(1),
            ],
            schema=RECORD_SCHEMA,
        )
        for offset, size in enumerate(sizes)
    ]
    found = list(steps(batches, 0, len(sizes) + 3))
    ends = [end for _, end in found]
    assert ends == sorted(set(ends))
    assert ends[-1] == len(sizes) + 3
    kept = [
        (offset, last)
        for rows, _ in found
        for offset, last in zip(
            rows.column("offset").to_pylist(),
            pc.binary_length(rows.column("value")).to_pylist(),
            strict=True,
        )
    ]
    assert kept == list(enumerate(sizes))
