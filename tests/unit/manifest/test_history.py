"""Which commits can be named, and what a point means that retention or the end of history has passed."""

from __future__ import annotations

import datetime
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from keyfold import Changelog, restore, resume
from keyfold.checkpoints.cleaner.retention import apply_retention
from keyfold.checkpoints.log import writer
from keyfold.checkpoints.manifest.segment_lines import Growth
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import CompactedAway, ConfigError
from support.changelogs import Clock
from support.folds import IN_MEMORY

BY_HAND = {"cleaner.threads": 0, "anchors.auto": 0}


def rows(*pairs: tuple[str, str | None]) -> pa.Table:
    keys, values = [k for k, _ in pairs], [v for _, v in pairs]
    return pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


@pytest.fixture
def small_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_JOURNAL_BYTES", 1)
    monkeypatch.setattr(writer, "_JOURNAL_CHECKPOINTS", 1)


# -- how many are kept ---------------------------------------------------------------------------------------


def test_a_changelog_that_is_never_cleaned_keeps_a_bounded_number_of_commits(tmp_path: Path) -> None:
    most = 0
    with Changelog.open(tmp_path / "log", config={**BY_HAND, "commits.retained": 10}) as log:
        log.append(rows(("k", "0")), app_id="quiet")
        log.anchor("first")
        for i in range(1, 300):
            log.append(rows(("k", str(i))), app_id="busy")
            most = max(most, len(log.state.commits))
        assert most <= 2 + 10 + writer._PRUNED_MIN
        assert restore(log.path, at=300).to_dict() == {b"k": b"299"}
        assert restore(log.path, at=291).to_dict() == {b"k": b"290"}
        assert restore(log.path, at="first").to_dict() == {b"k": b"0"}
        assert log.last_batch("quiet") == 0
        with pytest.raises(CompactedAway, match=r"commits\.retained"):
            restore(log.path, at=100)
        with pytest.raises(CompactedAway, match=r"commits\.retained"):
            restore(log.path, at=("busy", 50))
    with Changelog.open(tmp_path / "log") as log:
        assert len(log.state.commits) == 11
        assert log.rollback(295).number == 295
        assert (log.last_batch("quiet"), log.last_batch("busy")) == (0, 293)


def test_more_anchors_than_commits_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"anchors\.auto is larger than commits\.retained"):
        Changelog.open(tmp_path / "log", config={"anchors.auto": 9, "commits.retained": 8})


def test_what_a_line_says_of_a_segment_does_not_grow_with_the_segment(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config=BY_HAND) as log:
        for i in range(50):
            log.append(rows(("k", str(i))))
        segment = log.engine.writer._active[0].segment
        assert len(segment.marks) == 2
        assert set(Growth.of(segment, begun=False).to_json()) == {
            *("file", "base", "next", "size", "records", "tombstones", "max_timestamp", "created", "crc")
        }


def test_a_rollback_to_an_old_anchor_knows_what_every_app_had_committed_then(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config={**BY_HAND, "commits.retained": 2}) as log:
        log.append(rows(("k", "0")), app_id="quiet")
        log.append(rows(("k", "1")), app_id="quiet")
        log.append(rows(("k", "2")), app_id="busy")
        log.anchor("x")
        for i in range(200):
            log.append(rows(("k", str(i))), app_id=("busy", "quiet")[i % 2])
    with Changelog.open(tmp_path / "log") as log:
        log.rollback("x")
        assert (log.last_batch("quiet"), log.last_batch("busy")) == (1, 0)
        assert restore(log.path).to_dict() == {b"k": b"2"}


def test_a_time_at_which_a_forgotten_commit_was_the_last_is_refused(tmp_path: Path) -> None:
    clock = Clock()
    with Changelog.open(tmp_path / "log", config={**BY_HAND, "commits.retained": 1}, clock_ms=clock) as log:
        first = clock.now_ms
        for i in range(100):
            log.append(rows(("k", str(i))))
            if not i:
                log.anchor("x")
            clock.now_ms += 1000

    def at(time_ms: int) -> dict[bytes, bytes]:
        moment = datetime.datetime.fromtimestamp(time_ms / 1000, datetime.timezone.utc)
        return restore(tmp_path / "log", at=moment).to_dict()

    with Changelog.open(tmp_path / "log"):  # a new journal begins with the commits that are kept
        pass
    assert (at(first + 999), at(first + 99_000)) == ({b"k": b"0"}, {b"k": b"99"})
    for later_ms in (1000, 50_500, 98_999):
        with pytest.raises(CompactedAway):
            at(first + later_ms)


# -- a journal that is rolled --------------------------------------------------------------------------------


def test_a_roll_seals_nothing_and_the_same_segment_goes_on(tmp_path: Path, small_journal: None) -> None:
    path = tmp_path / "log"
    with Changelog.open(path, partitions=3, config=BY_HAND) as log:
        opened = log.state.epoch
        for i in range(40):
            log.append(rows(*((f"k{j}", str(i)) for j in range(12))))
        assert log.state.epoch > opened + 5
        assert [len(p.segments) for p in log.state.partitions] == [1, 1, 1]
        assert not any(p.segments[0].sealed for p in log.state.partitions)
        with Changelog.open(path, mode="r") as reader:
            assert reader.state.ends == log.state.ends
            assert sum(b.num_rows for p in range(3) for b in reader.read(p)) == 480
        assert verify(path).damages == []
        shutil.copytree(path, tmp_path / "killed", ignore=shutil.ignore_patterns("store-*"))
    for left in (path, tmp_path / "killed"):
        with Changelog.open(left, mode="w") as log:
            log.append(rows(("more", "1")))
            assert len(restore(left).to_dict()) == 13
        assert verify(left).damages == []


def test_a_reader_follows_across_a_roll(tmp_path: Path, small_journal: None) -> None:
    with Changelog.open(tmp_path / "log", config=BY_HAND) as log:
        log.append(rows(("k", "0")))
        with Changelog.open(log.path, mode="r") as reader:
            for i in range(1, 20):
                log.append(rows(("k", str(i))))
                reader.refresh()
                assert reader.get(b"k") == b"%d" % i


# -- retention -----------------------------------------------------------------------------------------------


def removed(path: Path, gone: int, commits: int) -> Changelog:
    """Commits of one record each, a segment each, of which retention has removed the first `gone`."""
    clock = Clock()
    config = {**BY_HAND, "cleanup.policy": "delete", "retention.ms": 1000}
    log = Changelog.open(path, partitions=2, config=config, clock_ms=clock)
    for i in range(commits):
        if i == gone:
            clock.now_ms += 5000
        log.append(rows((f"a{i}", str(i))), app_id=f"app-{i}")
        log.engine.writer.seal_active()
    assert apply_retention(log.engine.writer) == gone
    return log


@pytest.mark.parametrize("at", range(1, 5))
@pytest.mark.parametrize("gone", range(5))
def test_a_point_is_exact_from_the_log_start_or_refused_and_never_empty_by_retention(
    tmp_path: Path, gone: int, at: int
) -> None:
    app, left = f"app-{at - 1}", {b"a%d" % i: b"%d" % i for i in range(gone, at)}
    with removed(tmp_path / "log", gone, 5) as log:
        if at <= gone:
            ends = dict(enumerate(log.state.apps[app].ends))
            for refused in (
                lambda: restore(log.path, at=at),
                lambda: restore(log.path, at=(app, 0)),
                lambda: restore(log.path, at=ends),
                lambda: resume(log.path, app),
                lambda: log.rollback(at),
                lambda: log.anchor("x", at=at),
                lambda: log.snapshot(tmp_path / "snapshot", at=at),
            ):
                with pytest.raises(CompactedAway, match="Retention"):
                    refused()
            return
        assert restore(log.path, at=at).to_dict() == left
        log.rollback(at)
        assert all(p.start <= p.end for p in log.state.partitions)
        assert {key: log.get(key) for key in left} == left
        log.append(rows(("new", "1")))
        assert restore(log.path).to_dict() == {**left, b"new": b"1"}
        assert verify(log.path).damages == []


def test_commits_of_which_retention_has_left_nothing_are_not_kept(tmp_path: Path) -> None:
    with removed(tmp_path / "log", 3, 5):
        pass
    with Changelog.open(tmp_path / "log", mode="r") as log:
        # Of the others, what each app had committed last.
        assert not any(log.state.restorable(c.ends) for c in log.state.commits[:3])
        assert all(log.state.restorable(c.ends) for c in log.state.commits[3:])


def test_an_anchor_does_not_outlive_what_retention_removes(tmp_path: Path) -> None:
    clock = Clock()
    config = {**BY_HAND, "cleanup.policy": "compact,delete", "retention.ms": 1000}
    with Changelog.open(tmp_path / "log", config=config, clock_ms=clock) as log:
        log.append(rows(("a", "1")))
        log.anchor("x")
        log.append(rows(("b", "1")))
        log.engine.writer.seal_active()
        clock.now_ms += 5000
        apply_retention(log.engine.writer)
        log.append(rows(("c", "1")))
        with pytest.raises(CompactedAway, match="Retention"):
            restore(log.path, at="x")
        with pytest.raises(CompactedAway, match="Retention"):
            log.rollback("x")
        assert verify(log.path).damages == []
        log.drop_anchor("x")


# -- a model: what a number and a time mean ------------------------------------------------------------------


class HistoryMachine(RuleBasedStateMachine):
    """`lives`: every commit that was not rolled back: number, time, the fold, the last batch of each app."""

    @initialize(retained=st.integers(1, 4))
    def create(self, retained: int) -> None:
        self.directory = Path(tempfile.mkdtemp(dir=IN_MEMORY))
        self.pruned_min = writer._PRUNED_MIN
        writer._PRUNED_MIN = 1  # type: ignore[misc]
        self.clock = Clock()
        self.lives: list[tuple[int, int, dict[bytes, bytes], dict[str, int]]] = []
        self.times = {self.clock.now_ms}
        self.anchors: dict[str, int] = {}
        self.config = {**BY_HAND, "commits.retained": retained}
        self.log = self.opened()

    def opened(self) -> Changelog:
        return Changelog.open(self.directory / "log", config=self.config, clock_ms=self.clock)

    @rule(app=st.sampled_from("xyz"), value=st.one_of(st.none(), st.sampled_from("0123456789")),
          key=st.sampled_from("ab"), later_ms=st.sampled_from([0, 7, 7, 7, -20]))  # fmt: skip
    def append(self, app: str, key: str, value: str | None, later_ms: int) -> None:
        self.clock.now_ms += later_ms
        self.times.add(self.clock.now_ms)
        commit = self.log.append(rows((key, value)), app_id=app)
        _, _, state, batches = self.lives[-1] if self.lives else (0, 0, {}, {})
        state = {k: v for k, v in state.items() if k != key.encode()}
        if value is not None:
            state[key.encode()] = value.encode()
        self.lives.append((commit.number, self.clock.now_ms, state, {**batches, app: commit.batch}))

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = self.opened()

    @rule()
    def compact(self) -> None:
        self.log.compact()

    @precondition(lambda self: self.lives and len(self.anchors) < 3)
    @rule()
    def anchor(self) -> None:
        name = f"n{self.lives[-1][0]}"
        self.log.anchor(name)
        self.anchors[name] = self.lives[-1][0]

    @precondition(lambda self: self.anchors)
    @rule()
    def drop_anchor(self) -> None:
        name, _ = self.anchors.popitem()
        self.log.drop_anchor(name)

    @precondition(lambda self: self.lives)
    @rule(back=st.integers(0, 12))
    def roll_back(self, back: int) -> None:
        at = max(0, len(self.lives) - 1 - back)
        number = self.lives[at][0]
        try:
            self.log.rollback(number)
        except (CompactedAway, ConfigError):
            assert back
            return
        del self.lives[at + 1 :]
        assert {app: c.batch for app, c in self.log.state.apps.items()} == self.lives[at][3]

    @rule()
    def every_number_and_every_time_means_what_it_meant_or_is_refused(self) -> None:
        path, known = self.log.path, {number: state for number, _, state, _ in self.lives}
        for number, state in known.items():
            try:
                assert restore(path, at=number).to_dict() == state, number
            except CompactedAway:
                assert number != self.lives[-1][0]
                assert number not in self.anchors.values()
        for time_ms in self.times:
            moment = datetime.datetime.fromtimestamp(time_ms / 1000, datetime.timezone.utc)
            expected = [state for _, at_ms, state, _ in self.lives if at_ms <= time_ms][-1:]
            try:
                assert [restore(path, at=moment).to_dict()] == expected, time_ms
            except CompactedAway:
                pass
            except ConfigError:  # the first commit is later
                assert not expected, time_ms

    def teardown(self) -> None:
        if hasattr(self, "log"):
            writer._PRUNED_MIN = self.pruned_min  # type: ignore[misc]
            self.every_number_and_every_time_means_what_it_meant_or_is_refused()
            assert verify(self.log.path).damages == []
            self.log.close()
            shutil.rmtree(self.directory)


TestModel = HistoryMachine.TestCase
TestModel.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=25)
