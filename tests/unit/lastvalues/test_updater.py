"""Last values that are not those of the log: behind a lost delete, ahead of the log, older than retention."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from keyfold import Changelog
from keyfold.checkpoints.cleaner.retention import apply_retention
from keyfold.checkpoints.lastvalues.stores import Step
from keyfold.statestore.segment.block import VALUE_BYTES_MAX
from support.huge import zeros

CONFIG = {"cleaner.threads": 0, "anchors.auto": 0, "delete.retention.ms": 0}


def table(**rows: str | None) -> pa.Table:
    return pa.table({"key": list(rows), "value": pa.array(list(rows.values()), pa.string())})


def put_store(source: Path, target: Path) -> None:
    """Replace the last values in `target` by those of `source`."""
    for old in target.glob("store-*"):
        shutil.rmtree(old)
    (store,) = source.glob("store-*")
    shutil.copytree(store, target / store.name)


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
        log.engine.writer.seal_active()
        log.append(table(new="1"))
        assert dict(log.store().all()) == {b"old": b"1", b"new": b"1"}
        now_ms[0] += 2000
        log.append(table(newer="1"))
        assert apply_retention(log.engine.writer) == 1
        assert dict(log.store().all()) == {b"new": b"1", b"newer": b"1"}


def test_a_writer_waits_while_the_stores_are_too_far_behind(tmp_path: Path) -> None:
    config = {"cleaner.threads": 0, "store.backlog.bytes": 1 << 20}
    with Changelog.open(tmp_path / "log", config=config) as log:
        for number in range(8):
            log.append(pa.table({"key": [f"k{number}-{i}" for i in range(400)], "value": ["v" * 1000] * 400}))
        log.engine.wait_for_room()
        assert log.engine._updater.lag_bytes() <= 1 << 20


class Applied:
    """A store that only notes the offset and the length of what it is given."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []
        self.ends: list[int] = []

    def apply(self, rows: pa.RecordBatch, end: int) -> None:
        lengths = pc.binary_length(rows.column("value")).to_pylist()
        self.found += zip(rows.column("offset").to_pylist(), lengths, strict=True)
        self.ends.append(end)


def test_no_record_is_lost_where_those_of_a_step_do_not_fit_one_arrow_column() -> None:
    """The largest value that a record can have, and others before and after it."""
    sizes = [60 << 20, 4, VALUE_BYTES_MAX, 5, 40 << 20, VALUE_BYTES_MAX, 6]
    store: Any = Applied()
    step = Step(cast(Any, None), [store])
    for offset, size in enumerate(sizes):
        batch = pa.record_batch(
            {
                "offset": [offset],
                "timestamp": pa.array([0], pa.timestamp("ms")),
                "key": [b"%d" % offset],
                "value": zeros(size),
            }
        )
        if not step.has_room(0, batch.nbytes):
            step.apply()
        step.add(0, batch, batch.nbytes, offset + 1)
    step.apply()
    assert store.found == list(enumerate(sizes))
    assert store.ends == sorted(set(store.ends))
    assert store.ends[-1] == len(sizes)
