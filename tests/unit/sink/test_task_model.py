"""A task with stores that expire against a dict, whatever happens to the clock, the log and the process."""

from __future__ import annotations

import shutil
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from keyfold import Changelog, restore
from keyfold.sink import ttl
from keyfold.sink.named_stores import Store
from support.faults.inject import KillAt
from support.folds import IN_MEMORY
from support.lifecycle import bury
from support.tasks import APP, Driver

TTLS_MS = {"a": 10, "b": 25, "b.": 25, "c": None}
STORES = {
    name: Store(ttl=None if ttl_ms is None else timedelta(milliseconds=ttl_ms))
    for name, ttl_ms in TTLS_MS.items()
}
NAMES = st.sampled_from(sorted(STORES))
KEYS = st.sampled_from([b"", b"k", b"k\0", b"\xff"])
VALUES = st.sampled_from([b"v", b"w", b"", None])
WRITES = st.lists(st.tuples(NAMES, KEYS, VALUES), max_size=6)
STEPS_MS = st.sampled_from([0, 1, 5, 9, 10, 14, 25, 40])

#: Store and key → value, and when it was written.
Model = dict[tuple[str, bytes], tuple[bytes, int]]


class Failed(Exception):
    pass


class TaskMachine(RuleBasedStateMachine):
    """`model` is what was committed. An entry in `doubtful` had expired at some commit, which may have made
    its tombstone, before the clock went back.
    """

    @initialize(partitions=st.integers(1, 3), records_max=st.sampled_from([1, 4, 1000]))
    def create(self, partitions: int, records_max: int) -> None:
        self.directory = Path(tempfile.mkdtemp(dir=IN_MEMORY))
        self.partitions = partitions
        self.now_ms = 1_000
        self.model: Model = {}
        self.doubtful: set[tuple[str, bytes]] = set()
        self.commits: dict[int, tuple[Model, set[tuple[str, bytes]]]] = {}
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(ttl, "_RECORDS_MIN", records_max)
        self.patch.setattr(ttl, "_PARTITION_RECORDS_MIN", records_max)
        self.open()

    def open(self) -> None:
        self.files = KillAt()
        config = {
            "cleaner.threads": 0,
            "segment.bytes": 1024,
            "delete.retention.ms": 0,
            "anchors.auto": 2,
        }
        self.log = Changelog.open(
            self.directory / "log",
            partitions=self.partitions,
            config=config,
            files=self.files,
            clock_ms=lambda: self.now_ms,
        )
        self.driver = Driver(self.log, stores=STORES)

    def lives(self, entry: tuple[str, bytes]) -> bool:
        ttl_ms = TTLS_MS[entry[0]]
        return ttl_ms is None or self.now_ms - self.model[entry][1] < ttl_ms

    def check(self, store: Any) -> None:
        """Every read agrees with the model, which learns what became of doubtful entries."""
        for entry in sorted(self.doubtful):
            name, key = entry
            if entry in self.model and self.lives(entry) and store[name].get(key) is None:
                del self.model[entry]
        for name in STORES:
            expected = {key: self.model[n, key][0] for n, key in self.model if n == name}
            expected = {key: v for key, v in expected.items() if self.lives((name, key))}
            assert list(store[name].all()) == sorted(expected.items())
            asked = [b"", b"k", b"k\0", b"\0", b"\xff", b"none"]
            assert store[name].get_all(asked) == [expected.get(key) for key in asked]
            found = store[name].get_all(pa.array(asked, pa.binary()))
            assert found.to_pylist() == [expected.get(key) for key in asked]
            assert [store[name].get(key) for key in asked] == [expected.get(key) for key in asked]
            assert list(store[name].range(b"", b"k\0")) == sorted(
                (key, v) for key, v in expected.items() if key < b"k\0"
            )

    def committed(self, writes: list[tuple[str, bytes, bytes | None]]) -> None:
        self.doubtful |= {entry for entry in self.model if not self.lives(entry)}
        for name, key, value in writes:
            self.doubtful.discard((name, key))
            if value is None:
                self.model.pop((name, key), None)
            else:
                self.model[name, key] = value, self.now_ms
        self.commits[self.log.state.commits[-1].number] = dict(self.model), set(self.doubtful)

    @rule(batches=st.lists(st.tuples(STEPS_MS, WRITES), min_size=1, max_size=4), in_arrow=st.booleans())
    def batches(
        self, batches: list[tuple[int, list[tuple[str, bytes, bytes | None]]]], in_arrow: bool
    ) -> None:
        for step_ms, writes in batches:
            self.now_ms += step_ms
            self.batch(writes, in_arrow)

    def batch(self, writes: list[tuple[str, bytes, bytes | None]], in_arrow: bool) -> None:
        def write(store: Any) -> None:
            for name, key, value in writes:
                if in_arrow:
                    store[name].put_all(pa.array([key], pa.binary()), pa.array([value], pa.binary()))
                elif value is None:
                    store[name].delete(key)
                else:
                    store[name].put(key, value)

        self.driver.run(self.check, write)
        self.committed(writes)

    @rule(writes=WRITES)
    def failing_batch(self, writes: list[tuple[str, bytes, bytes | None]]) -> None:
        def write(store: Any) -> None:
            for name, key, value in writes:
                store[name].put(key, value or b"")
            raise Failed

        before = self.log.end_offsets()
        with pytest.raises(Failed):
            self.driver.run(self.check, write)
        assert self.log.end_offsets() == before

    @rule(step_ms=st.sampled_from([1, 6, 12]))
    def earlier(self, step_ms: int) -> None:
        self.now_ms -= step_ms

    @rule()
    def compact(self) -> None:
        self.log.compact()

    @rule(killed=st.booleans())
    def open_again(self, killed: bool) -> None:
        if killed:
            bury(self.files)
        else:
            self.log.close()
        self.open()

    @precondition(lambda self: len(self.commits) > 1)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        """To one of the last commits, which anchors hold."""
        state = self.log.state
        before = state.commits[:-1]
        known = [c for c in before if c.number in self.commits and state.restorable(c.ends)]
        if not known:
            return
        commit = data.draw(st.sampled_from(known[-3:]))
        self.log.rollback(commit.number)
        model, doubtful = self.commits[commit.number]
        self.model, self.doubtful = dict(model), set(doubtful)
        self.commits = {n: c for n, c in self.commits.items() if n <= commit.number}

    def teardown(self) -> None:
        """In the end, everything that has expired is a tombstone, and nothing else is."""
        if not hasattr(self, "log"):
            return
        try:
            self.now_ms = max([self.now_ms, *(at for _, at in self.model.values())]) + 1_000
            for _ in range(3 + sum(p.end for p in self.log.state.partitions)):
                self.driver.run(self.check)
            stay = {b"c\0" + key: value for (name, key), (value, _) in self.model.items() if name == "c"}
            assert restore(self.log.path).to_dict() == stay
            assert self.log.last_batch(APP) is not None
        finally:
            self.patch.undo()
            self.log.close()
            shutil.rmtree(self.directory)


TestTask = TaskMachine.TestCase
TestTask.settings = settings(max_examples=max(10, settings().max_examples // 3), stateful_step_count=20)
