"""A changelog against a dict and a list of records: appends, transactions, cleaning, anchors, reopening,
sudden ends.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from faults import KillAt, Killed, Operation
from keyfold.checkpoints import Changelog, restore
from keyfold.checkpoints.compactor import Aborted, clean_partition
from keyfold.checkpoints.verify import verify
from keyfold.statestore.errors import CompactedAway, ConfigError
from keyfold.statestore.hashing import partition_of
from support.folds import IN_MEMORY
from support.lives import bury

KEYS = st.sampled_from([b"", b"a", b"b", b"ab", b"a\0", b"\0", b"key-5", b"key-6"])
VALUES = st.one_of(st.none(), st.binary(max_size=6), st.just(b"v" * 300))
ROWS = st.lists(st.tuples(KEYS, VALUES), max_size=12)
NEVER_MS = 10**15

Record = tuple[bytes, bytes | None]


def of_the_log(operation: Operation) -> bool:
    """Last-value stores are made by a thread of their own, at no certain time."""
    return "store-" not in str(operation.path)


class ChangelogMachine(RuleBasedStateMachine):
    """`records[p]` is all that was ever committed to a partition, at its offset; `commits` where each commit
    ended, None where it was rolled back.
    """

    @initialize(
        partitions=st.integers(1, 2),
        retention_ms=st.sampled_from([0, 1000, NEVER_MS]),
        auto=st.integers(0, 2),
        compression=st.sampled_from(["none", "lz4"]),
        map_bytes=st.sampled_from([1024, 1 << 20]),
    )
    def create(self, partitions: int, retention_ms: int, auto: int, compression: str, map_bytes: int) -> None:
        self.directory = Path(tempfile.mkdtemp(dir=IN_MEMORY))
        self.path = self.directory / "log"
        self.now_ms = 1_000_000
        self.partitions = partitions
        self.config: dict[str, object] = {
            "segment.bytes": 1500,
            "cleaner.threads": 0,
            "delete.retention.ms": retention_ms,
            "anchors.auto": auto,
            "compression.type": compression,
            "cleaner.dedupe.buffer.size": map_bytes,
        }
        self.records: list[list[Record]] = [[] for _ in range(partitions)]
        self.commits: list[list[int] | None] = []
        self.batch_of: dict[int, int] = {}
        self.anchors: dict[str, int] = {}
        self.batch = -1
        self.log = self.open(KillAt())

    def open(self, files: KillAt) -> Changelog:
        self.files = files
        return Changelog.open(
            self.path,
            partitions=self.partitions,
            config=self.config,
            files=files,
            clock_ms=lambda: self.now_ms,
        )

    def committed(self, rows: list[Record]) -> None:
        for key, value in rows:
            self.records[partition_of(key, self.partitions)].append((key, value))
        self.commits.append([len(r) for r in self.records])
        self.batch_of[len(self.commits)] = self.batch

    def alive(self) -> list[int]:
        """The numbers of the commits that were not rolled back."""
        return [n for n, ends in enumerate(self.commits, 1) if ends is not None]

    def fold(self, ends: list[int]) -> dict[bytes, bytes]:
        state: dict[bytes, bytes] = {}
        for records, end in zip(self.records, ends, strict=True):
            for key, value in records[:end]:
                if value is None:
                    state.pop(key, None)
                else:
                    state[key] = value
        return state

    @rule(rows=ROWS)
    def append(self, rows: list[Record]) -> None:
        self.batch += 1
        self.log.append(table(rows), app_id="m", batch_id=self.batch)
        self.committed(rows)

    @precondition(lambda self: self.batch >= 0)
    @rule(rows=ROWS)
    def deliver_an_older_batch_again(self, rows: list[Record]) -> None:
        self.log.append(table(rows), app_id="m", batch_id=self.batch - 1)

    @rule(rows=ROWS)
    def transact(self, rows: list[Record]) -> None:
        expected = self.fold([len(r) for r in self.records])
        with self.log.transaction(app_id="t", batch_id=len(self.commits)) as store:
            for key, value in rows:
                assert store.get(key) == expected.get(key)
                if value is None:
                    store.delete(key)
                    expected.pop(key, None)
                else:
                    store.put(key, value)
                    expected[key] = value
            changes = [(r["key"], r["value"]) for r in store.changes().to_pylist()]
        self.committed(changes)

    @rule(rows=ROWS, at=st.integers(0, 40), halfway=st.booleans())
    def append_and_die(self, rows: list[Record], at: int, halfway: bool) -> None:
        """Another life begins behind what the dead one left; the batch is in it wholly or not at all."""
        self.log.close()
        self.batch += 1
        dying = KillAt(at, halfway=halfway, only=of_the_log)
        with suppress(Killed):
            log = self.open(dying)
            log.append(table(rows), app_id="m", batch_id=self.batch)
            log.compact()
        bury(dying)
        self.log = self.open(KillAt())
        last = self.log.last_batch("m")
        if last == self.batch:
            self.committed(rows)
        else:
            self.batch -= 1
            assert last == (self.batch if self.batch >= 0 else None)
        self.check_now()

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = self.open(KillAt())

    @rule(later_ms=st.sampled_from([0, 500, 2000]))
    def compact(self, later_ms: int) -> None:
        self.now_ms += later_ms
        self.log.compact()
        self.check_now()

    @rule(partition=st.integers(0, 2), steps=st.integers(0, 25), spill_all=st.booleans())
    def clean_and_stop(self, partition: int, steps: int, spill_all: bool) -> None:
        """A pass that is broken off anywhere, also between two of its groups."""

        def pace(size: int) -> None:
            nonlocal steps
            steps -= 1
            if steps < 0:
                raise Aborted

        self.log.host.writer.seal_active()
        with suppress(Aborted):
            clean_partition(self.log.host.writer, partition % self.partitions, pace, spill_all=spill_all)
        self.check_now()

    @rule(first=st.integers(0, 100), value=VALUES)
    def append_more_keys_than_the_small_map_holds(self, first: int, value: bytes | None) -> None:
        self.append([(b"%d" % n, value) for n in range(first, first + 100)])

    @precondition(lambda self: self.commits)
    @rule(name=st.sampled_from(["x", "y"]))
    def set_anchor(self, name: str) -> None:
        if name not in self.anchors:
            self.log.anchor(name)
            self.anchors[name] = self.alive()[-1]

    @precondition(lambda self: self.anchors)
    @rule(data=st.data())
    def drop_anchor(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.anchors)))
        self.log.drop_anchor(name)
        del self.anchors[name]

    @precondition(lambda self: self.commits)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        """To any commit whose state is exact, unless a named anchor lies behind it; the rest never was."""
        alive = self.alive()
        commit = data.draw(st.sampled_from(alive))
        if any(c > commit for c in self.anchors.values()):
            with pytest.raises((ConfigError, CompactedAway)):
                self.log.rollback(commit)
            return
        try:
            done = self.log.rollback(commit)
        except CompactedAway:
            assert commit != alive[-1]
            return
        assert done.number == commit
        ends = self.commits[commit - 1]
        assert ends is not None
        self.records = [records[:end] for records, end in zip(self.records, ends, strict=True)]
        self.commits[commit:] = [None] * (len(self.commits) - commit)
        self.batch = self.batch_of[commit]
        assert self.log.last_batch("m") == (self.batch if self.batch >= 0 else None)
        self.check_now()

    @rule(data=st.data())
    def restore_any_commit(self, data: st.DataObject) -> None:
        """Exactly the fold up to there, or a refusal; never an approximation."""
        for name, commit in self.anchors.items():
            assert restore(self.path, at=name).to_dict() == self.fold(self.commits[commit - 1] or [])
        if not self.commits:
            return
        commit = data.draw(st.integers(1, len(self.commits)))
        try:
            found = restore(self.path, at=commit).to_dict()
        except CompactedAway:
            assert commit != self.alive()[-1]
            return
        ends = self.commits[commit - 1]
        assert ends is not None
        assert found == self.fold(ends)

    @rule(data=st.data())
    def read_from_any_offset(self, data: st.DataObject) -> None:
        partition = data.draw(st.integers(0, self.partitions - 1))
        records = self.records[partition]
        offset = data.draw(st.integers(0, len(records)))
        rows = [r for b in self.log.read(partition, offset) for r in b.to_pylist()]
        offsets = [r["offset"] for r in rows]
        assert offsets == sorted(set(offsets))
        assert all(o >= offset for o in offsets)
        assert all((r["key"], r["value"]) == records[r["offset"]] for r in rows)
        last = {key: o for o, (key, value) in enumerate(records) if value is not None or o >= offset}
        final = {o for key, o in last.items() if o >= offset and records[o][1] is not None}
        assert {
            o for o in final if o == max(i for i, (k, _) in enumerate(records) if k == records[o][0])
        } <= set(offsets)

    def check_now(self) -> None:
        """Called behind everything that may have lost or revived something."""
        ends = [len(r) for r in self.records]
        assert list(self.log.end_offsets().values()) == ends
        assert restore(self.path).to_dict() == self.fold(ends)

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.check_now()
            assert dict(self.log.store().all()) == self.fold([len(r) for r in self.records])
            assert verify(self.path).damages == []
            self.log.close()
            shutil.rmtree(self.directory)


def table(rows: list[Record]) -> pa.Table:
    keys, values = [k for k, _ in rows], [v for _, v in rows]
    return pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


# On CI 1,000 examples each: two of them, so that two processes have work.
TestChangelog = ChangelogMachine.TestCase
TestChangelog.settings = settings(max_examples=10 * settings().max_examples, stateful_step_count=14)


class SameMachine(ChangelogMachine):
    """With seeds of its own."""


TestChangelogAgain = SameMachine.TestCase
TestChangelogAgain.settings = TestChangelog.settings
