"""The cleaner's promises over any life of a log: every operation, every setting changed while it runs.

After each step they are proved by folding the raw records, see `support.proofs`. Segments, blocks and maps
are so small that commits span segments and passes end inside them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from keyfold import Changelog, restore
from keyfold.checkpoints.cleaner.clean_pass import Aborted, clean_partition
from keyfold.checkpoints.cleaner.retention import apply_retention
from keyfold.checkpoints.compaction import offset_map
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import CompactedAway, KeyfoldError
from keyfold.statestore.segment import block
from support.folds import IN_MEMORY
from support.proofs import Record, prove

KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"", b"\0"])
VALUES = st.sampled_from([None, None, b"1", b"2", b"v" * 700])
ROWS = st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=9)
CHANGES = st.sampled_from(
    [
        *(("anchors.auto", n) for n in range(5)),
        *(("min.compaction.lag.ms", n) for n in (0, 0, 500, 5000)),
        *(("cleaner.dedupe.buffer.size", n) for n in (1024, 2048, 1 << 20)),
        *(("delete.retention.ms", n) for n in (0, 1000, 10**12)),
        *(("segment.bytes", n) for n in (1024, 1 << 20)),
        *(("compression.type", n) for n in ("none", "zstd")),
    ]
)
NAMES = st.sampled_from(["x", "y", "z"])


@contextmanager
def small() -> Iterator[None]:
    """Two records to a block, four keys to a map of a kibibyte."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "BLOCK_RECORDS_MAX", 2)
        patch.setattr(offset_map, "BYTES_PER_KEY", 256)
        yield


class CleanerMachine(RuleBasedStateMachine):
    """`committed` is all that was ever committed and not rolled back; a record's offset is its index."""

    @initialize(auto=st.integers(0, 3), retention_ms=st.sampled_from([0, 1000]))
    def create(self, auto: int, retention_ms: int) -> None:
        self.small = small()
        self.small.__enter__()
        self.directory = Path(tempfile.mkdtemp(dir=IN_MEMORY))
        self.now_ms = 1_000_000
        self.retention_ms = retention_ms
        self.committed: list[Record] = []
        #: when the first pass that came to its end met each tombstone
        self.met: dict[int, int] = {}
        self.present: set[int] = set()
        config = {
            "cleaner.threads": 0,
            "segment.bytes": 1024,
            "anchors.auto": auto,
            "delete.retention.ms": retention_ms,
            "cleaner.dedupe.buffer.size": 1024,
        }
        self.log = Changelog.open(self.directory / "log", config=config, clock_ms=lambda: self.now_ms)

    def check(self, passed: bool = False) -> None:
        p = self.log.state.partitions[0]
        now = set(prove(self.log, 0, self.committed))
        for anchor in self.log.anchors().values():
            assert anchor.ends[0] <= p.start or p.is_exact(anchor.ends[0])
        # A delete goes only where a pass has met it `delete.retention.ms` ago, unless a later record of its
        # key has made it obsolete.
        later = {key: o for o, (key, _) in enumerate(self.committed)}
        # A pass goes by what the setting was when it began.
        retention_ms = min(self.retention_ms, self.log.config.delete_retention_ms)
        self.retention_ms = self.log.config.delete_retention_ms
        for o in self.present - now if retention_ms else ():
            if p.start <= o < p.end and self.committed[o][1] is None and later[self.committed[o][0]] == o:
                assert o in self.met
                assert self.met[o] + retention_ms <= self.now_ms
        if passed:
            for o in now:
                if o < p.unique_end and self.committed[o][1] is None:
                    self.met.setdefault(o, self.now_ms)
        self.present = now
        self.met = {o: at for o, at in self.met.items() if o in now}
        assert verify(self.log.path).damages == []

    # -- writing ---------------------------------------------------------------------------------------------

    def put(self, rows: list[Record]) -> None:
        keys, values = [k for k, _ in rows], [v for _, v in rows]
        self.log.append(
            pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})
        )
        self.committed += rows

    @rule(rows=ROWS)
    def append(self, rows: list[Record]) -> None:
        self.put(rows)
        self.check()

    @rule(ms=st.sampled_from([400, 1000, 6000]))
    def wait(self, ms: int) -> None:
        self.now_ms += ms

    @rule(change=CHANGES)
    def configure(self, change: tuple[str, object]) -> None:
        self.log.engine.configure(dict([change]))
        self.retention_ms = min(self.retention_ms, self.log.config.delete_retention_ms)

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = Changelog.open(self.log.path, clock_ms=lambda: self.now_ms)
        self.check()

    @rule(name=NAMES, back=st.integers(0, 4))
    def anchor(self, name: str, back: int) -> None:
        with suppress(KeyfoldError):
            commits = self.log.state.commits
            self.log.anchor(name, at=commits[max(0, len(commits) - 1 - back)].number if commits else None)
        self.check()

    @rule(name=NAMES)
    def drop_anchor(self, name: str) -> None:
        with suppress(KeyfoldError):
            self.log.drop_anchor(name)

    @precondition(lambda self: self.committed)
    @rule(back=st.integers(0, 4))
    def roll_back(self, back: int) -> None:
        commits = self.log.state.commits
        try:
            commit = self.log.rollback(commits[max(0, len(commits) - 1 - back)].number)
        except KeyfoldError:
            return
        self.committed = self.committed[: commit.ends[0]]
        self.present = {o for o in self.present if o < len(self.committed)}
        self.met = {o: at for o, at in self.met.items() if o < len(self.committed)}
        self.check()

    @rule(size=st.sampled_from([1, 3000, 8000]))
    def retain(self, size: int) -> None:
        self.log.engine.configure({"cleanup.policy": "compact,delete", "retention.bytes": size})
        apply_retention(self.log.engine.writer)
        self.log.engine.configure({"cleanup.policy": "compact", "retention.bytes": -1})
        self.check()

    # -- cleaning --------------------------------------------------------------------------------------------

    @rule()
    def compact(self) -> None:
        """Then nothing is left to do, and nothing is done."""
        done = self.log.compact()
        self.check(passed=bool(done))
        if self.log.config.delete_retention_ms == 0:
            # The first pass was the one that a delete stays in.
            self.log.compact()
            self.check()
        line = self.log.state.seq
        assert self.log.compact() == []
        assert self.log.state.seq == line

    @rule()
    def compact_in_full(self) -> None:
        self.log.compact(full=True)
        self.check(passed=True)

    @rule()
    def one_pass(self) -> None:
        """As in the background: up to the active segment, which may be inside a commit."""
        self.check(passed=clean_partition(self.log.engine.writer, 0) is not None)

    @rule(steps=st.integers(0, 25), spill_all=st.booleans())
    def break_a_pass_off(self, steps: int, spill_all: bool) -> None:
        def stop() -> None:
            raise Aborted

        self._pass_until(steps, stop, spill_all=spill_all)

    @rule(steps=st.integers(0, 25), rows=ROWS)
    def append_during_a_pass(self, steps: int, rows: list[Record]) -> None:
        self._pass_until(steps, lambda: self.put(rows))

    @rule(steps=st.integers(0, 25), change=CHANGES)
    def configure_during_a_pass(self, steps: int, change: tuple[str, object]) -> None:
        self._pass_until(steps, lambda: self.configure(change))

    @rule(steps=st.integers(0, 25), name=NAMES, back=st.integers(0, 4), drop=st.booleans())
    def change_an_anchor_during_a_pass(self, steps: int, name: str, back: int, drop: bool) -> None:
        def change() -> None:
            with suppress(KeyfoldError):
                if drop:
                    self.log.drop_anchor(name)
                else:
                    commits = self.log.state.commits
                    self.log.anchor(name, at=commits[max(0, len(commits) - 1 - back)].number)

        self._pass_until(steps, change)

    def _pass_until(self, steps: int, then: Callable[[], None], *, spill_all: bool = False) -> None:
        left = steps

        def pace(size: int) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                then()

        self.log.engine.writer.seal_active()
        done = None
        with suppress(Aborted):
            done = clean_partition(self.log.engine.writer, 0, pace, spill_all=spill_all)
        self.check(passed=done is not None)

    # -- reading ---------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def restore_at_any_offset(self, data: st.DataObject) -> None:
        end, p = data.draw(st.integers(0, len(self.committed))), self.log.state.partitions[0]
        try:
            found = restore(self.log.path, at={0: end}).to_dict()
        except CompactedAway:
            assert end <= p.start or not p.is_exact(end)
            return
        last = dict(self.committed[p.start : end])
        assert found == {key: value for key, value in last.items() if value is not None}

    @rule(data=st.data())
    def restore_what_changed_between_two_offsets(self, data: st.DataObject) -> None:
        """It is refused only where a delete between the two is gone."""
        p = self.log.state.partitions[0]
        ends = sorted({*p.splits, p.clean_end, p.end})
        end = data.draw(st.sampled_from(ends))
        begin = data.draw(st.integers(0, end))
        gone = [o for o, (_, value) in enumerate(self.committed) if value is None and o not in self.present]
        try:
            found = restore(self.log.path, since={0: begin}, at={0: end}).to_dict()
        except CompactedAway:
            assert begin < p.start or end <= p.start or any(begin <= o < end for o in gone)
            return
        expected = dict(self.committed[begin:end])
        if begin == 0:
            # Who has seen nothing misses no delete.
            expected = {k: v for k, v in expected.items() if v is not None or k in found}
        assert found == expected

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.check()
            assert dict(self.log.store().all()) == restore(self.log.path).to_dict()
            self.log.close()
            shutil.rmtree(self.directory)
            self.small.__exit__(None, None, None)


TestCleaner = CleanerMachine.TestCase
TestCleaner.settings = settings(max_examples=max(1, settings().max_examples // 2), stateful_step_count=25)
