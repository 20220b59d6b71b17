"""Which batches are taken, passed over, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold import Changelog, restore, resume, resume_if_lost
from keyfold.checkpoints.log.writer import Batch
from keyfold.checkpoints.manifest.idempotence import (
    APP_CHARACTERS_MAX,
    BATCH_MAX,
    OnReset,
    Reset,
    SourceBatch,
    admits_stream,
    appended,
)
from keyfold.checkpoints.manifest.resumption import Operator, QueryStart
from keyfold.checkpoints.manifest.source_offsets import Begin
from keyfold.checkpoints.manifest.state import Anchor, Commit, State, empty
from keyfold.statestore.errors import BatchConflict, ConfigError

LOG = "uuid-of-the-log"
QUIET = {"cleaner.threads": 0, "anchors.auto": 0}
REFUSE = Reset("refuse")


def state(query: str = "q1", batch: int = 5, source: tuple[str, ...] = ("s5",), digest: str = "") -> State:
    commit = Commit(9, 0, "app", query, batch, source, digest, (7,))
    before = empty(1, 1)
    return State(20, 1, before.partitions, (commit,), {"app": commit}, {}, 10)


def stream(batch: int, source: str, previous: str, query: str = "q1", *, skips: bool = False) -> SourceBatch:
    before = (previous,) if previous else ()
    return SourceBatch(query, batch, (source,), before, partial(QueryStart, (Begin("s5"),)), skips)


def admits(of: State, b: SourceBatch, reset: Reset = REFUSE) -> bool:
    return admits_stream(of, LOG, "app", b, reset)


def test_the_first_batch_of_an_app_is_taken() -> None:
    assert appended(empty(1, 1), "app", 3, "d") is None
    assert admits(empty(1, 1), stream(3, "s3", ""))


# -- without source offsets ----------------------------------------------------------------------------------


def test_an_appended_batch_again_is_passed_over() -> None:
    before = state("", digest="d")
    assert appended(before, "app", 5, "d") == before.apps["app"]
    assert appended(before, "app", 4, "unknown: its commit is not kept") == before.apps["app"]


def test_a_batch_id_with_other_rows_is_refused() -> None:
    with pytest.raises(BatchConflict, match="other rows"):
        appended(state("", digest="d"), "app", 5, "e")


def test_a_digest_is_compared_only_where_both_are_known() -> None:
    """A sink that is called without a query knows a batch by its id alone."""
    assert appended(state("", digest=""), "app", 5, "d")
    assert appended(state("", digest="d"), "app", 5, "")


def test_append_under_the_app_of_a_query_is_refused() -> None:
    with pytest.raises(BatchConflict, match="belongs to a streaming query"):
        appended(state("q1"), "app", 6, "d")


def rows(*values: str, **columns: Any) -> pa.Table:
    return pa.table({"key": [b"k"] * len(values), "value": list(values), **columns})


#: (app, batch) of commits in their order; batches of one app ascend.
_HISTORIES = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3)), max_size=8)


@given(_HISTORIES, st.integers(0, 10), st.sets(st.integers(0, 8)))
def test_a_batch_is_new_applied_or_refused_and_never_dropped(
    steps: list[tuple[str, int]], asked: int, gone: set[int]
) -> None:
    """Against a model that remembers everything, where commits in `gone` are not kept any more."""
    seen: dict[str, list[int]] = {"a": [], "b": []}
    commits: list[Commit] = []
    for app, step in steps:
        batch = (seen[app][-1] if seen[app] else -1) + step
        seen[app].append(batch)
        commits.append(Commit(len(commits) + 1, 0, app, "", batch, (), f"digest {batch}", (7,)))
    apps = {c.app: c for c in commits}
    kept = tuple(c for i, c in enumerate(commits) if i not in gone)
    of = replace(empty(1, 1), commits=kept, apps=apps, next_commit=len(commits) + 1)
    applied, last = asked in seen["a"], max(seen["a"], default=-1)
    try:
        found = appended(of, "a", asked, f"digest {asked}")
    except BatchConflict:
        assert not applied
        assert asked < last
        return
    assert (found is None) == (asked > last)
    if found is not None and not applied:
        assert gone, "every commit is known, and this batch was none"


def test_a_batch_that_a_later_one_has_passed_over_is_refused(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config=QUIET) as log:
        log.append(rows("5"), app_id="job", batch_id=5)
        log.append(rows("x"), app_id="other", batch_id=0)
        log.append(rows("9"), app_id="job", batch_id=9)
        for missed in (3, 7):
            with pytest.raises(BatchConflict, match="never committed, but a later batch was"):
                log.append(rows("lost"), app_id="job", batch_id=missed)
        assert not log.append(rows("5"), app_id="job", batch_id=5).applied


def test_what_a_copied_changelog_had_committed_is_not_refused(tmp_path: Path) -> None:
    """It holds the last commit of each app only, also where its state is empty."""
    for value in ("1", None):
        source, copy = tmp_path / f"log-{value}", tmp_path / f"copy-{value}"
        with Changelog.open(source, config=QUIET) as log:
            for batch in (1, 2):
                table = pa.table({"key": [b"k"], "value": pa.array([value])})
                log.append(table, app_id="job", batch_id=batch)
        with restore(source) as whole:
            whole.to_changelog(copy)
        with Changelog.open(copy) as log:
            assert not log.append(rows("1"), app_id="job", batch_id=1).applied


def test_a_commit_says_whether_this_call_has_applied_it(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config=QUIET) as log:
        first = log.append(rows("1"), app_id="job", batch_id=1)
        second = log.append(rows("2"), app_id="job", batch_id=2)
        assert (first.applied, second.applied) == (True, True)
        for batch, commit in ((1, first), (2, second)):
            again = log.append(rows(str(batch)), app_id="job", batch_id=batch)
            assert (again, again.applied) == (commit, False)
        assert all(commit.applied for commit in log.state.commits)


TIME = pa.array([1_000], pa.timestamp("ms"))
HEADERS = [[{"key": "h", "value": b"1"}]]


@pytest.mark.parametrize(
    ("first", "again", "same"),
    [
        ({}, {}, True),
        ({}, {"timestamp": pa.nulls(1, pa.timestamp("ms"))}, True),
        ({}, {"headers": pa.nulls(1)}, True),
        ({"timestamp": TIME}, {"timestamp": pa.array([1_000])}, True),
        ({"timestamp": TIME}, {"timestamp": pa.array([1_001])}, False),
        ({"timestamp": TIME}, {}, False),
        ({"headers": HEADERS}, {"headers": HEADERS}, True),
        ({"headers": HEADERS}, {"headers": [[{"key": "h", "value": b"2"}]]}, False),
        ({"headers": HEADERS}, {"headers": [[{"key": "g", "value": b"1"}]]}, False),
        ({"headers": HEADERS}, {"headers": [[{"key": "h", "value": None}]]}, False),
        ({"headers": HEADERS}, {"headers": [[]]}, False),
        ({"headers": HEADERS}, {}, False),
    ],
)
def test_a_batch_is_the_same_with_the_same_headers_and_given_timestamps(
    tmp_path: Path, first: dict[str, Any], again: dict[str, Any], same: bool
) -> None:
    now = [1_000]

    def clock() -> int:
        now[0] += 1
        return now[0]

    with Changelog.open(tmp_path / "log", config=QUIET, clock_ms=clock) as log:
        log.append(rows("1", **first), app_id="job", batch_id=1)
        if same:
            assert not log.append(rows("1", **again), app_id="job", batch_id=1).applied
        else:
            with pytest.raises(BatchConflict, match="other rows"):
                log.append(rows("1", **again), app_id="job", batch_id=1)


# -- names and numbers ---------------------------------------------------------------------------------------

NO_APPS: Sequence[object] = ("", None, 7, b"job", "lone \ud800", "\udfff", "x" * (APP_CHARACTERS_MAX + 1))
NO_BATCHES: Sequence[object] = (1.5, -1, 2**70, True, "1", np.int64(-1), np.bool_(True), [1])


@pytest.mark.parametrize("app", NO_APPS, ids=ascii)
def test_what_names_no_app_is_refused_everywhere(tmp_path: Path, app: Any) -> None:
    with Changelog.open(tmp_path / "log", config=QUIET) as log:
        log.append(rows("1"), app_id="job", batch_id=1)
        before = log.state
        calls: list[Callable[[], object]] = [
            lambda: log.append(rows("2"), app_id=app),
            lambda: log.transaction(app_id=app, batch_id=1).__enter__(),
            lambda: log.rollback((app, 1)),
            lambda: resume(log.path, app),
            lambda: resume_if_lost(log.path, app, checkpoint=tmp_path / "checkpoint"),
            lambda: restore(log.path, at=(app, 1)),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match="Invalid app id"):
                call()
        assert log.state is before


@pytest.mark.parametrize("batch", NO_BATCHES, ids=ascii)
def test_what_numbers_no_batch_is_refused_everywhere(tmp_path: Path, batch: Any) -> None:
    with Changelog.open(tmp_path / "log", config=QUIET) as log:
        log.append(rows("1"), app_id="job", batch_id=1)
        before = log.state
        calls: list[Callable[[], object]] = [
            lambda: log.append(rows("2"), app_id="job", batch_id=batch),
            lambda: log.transaction(app_id="job", batch_id=batch).__enter__(),
            lambda: log.rollback(("job", batch)),
            lambda: restore(log.path, at=("job", batch)),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match="Invalid batch id"):
                call()
        assert log.state is before


def test_any_whole_number_and_any_name_in_unicode_is_taken(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config=QUIET) as log:
        assert log.append(rows("1"), app_id="日本 \U0001f600", batch_id=np.int64(7)).batch == 7
        assert log.append(rows("2"), app_id="x" * APP_CHARACTERS_MAX, batch_id=BATCH_MAX).batch == BATCH_MAX
    with Changelog.open(tmp_path / "log", mode="r") as log:
        assert log.last_batch("日本 \U0001f600") == 7


# -- of a query ----------------------------------------------------------------------------------------------


def test_batch_ids_may_have_gaps() -> None:
    assert appended(state(""), "app", 17, "d") is None
    assert admits(state(), stream(8, "s8", "s5"))


def test_a_replayed_micro_batch_is_known_by_its_source_offsets() -> None:
    assert not admits(state(), stream(5, "s5", "s4"))


def test_a_replayed_micro_batch_from_elsewhere_is_refused() -> None:
    with pytest.raises(BatchConflict, match="other source offsets"):
        admits(state(), stream(5, "s5'", "s4"))


def test_an_older_checkpoint_is_refused() -> None:
    with pytest.raises(BatchConflict, match="older copy"):
        admits(state(), stream(4, "s4", "s3"))


def test_a_batch_that_does_not_begin_where_the_last_commit_ended_is_refused() -> None:
    with pytest.raises(BatchConflict, match="does not begin where the last commit ended") as caught:
        admits(state(), stream(6, "s6", "s4"))
    assert "skip" not in str(caught.value.remedy), "no batch is between"


@pytest.mark.parametrize(("batch", "named"), [(7, "batch 6 "), (9, "batches 6 to 8 ")])
def test_batches_that_the_sink_was_not_called_for_are_named_with_a_way_to_skip_them(
    batch: int, named: str
) -> None:
    with pytest.raises(BatchConflict) as caught:
        admits(state(), stream(batch, "s9", "s8"))
    assert named in str(caught.value.remedy)
    assert "df.isEmpty(): return" in str(caught.value.remedy)
    assert f"sink.skip({batch - 1})" in str(caught.value.remedy)


def test_a_gap_without_records_is_no_gap() -> None:
    """The source has written the same position in another way, as after its first batch."""
    ended = '{"keyfold": "feed", "offsets": {"0": 3}, "begun": {"0": 0}}'
    same = '{"keyfold": "feed", "offsets": {"0": 3}, "snapshot": {"0": 7}}'
    assert admits(state(source=(ended,)), stream(8, "s8", same))
    for other in (same.replace("3", "4"), same.replace("feed", "beef")):
        with pytest.raises(BatchConflict, match="does not begin where"):
            admits(state(source=(ended,)), stream(8, "s8", other))


def test_what_is_skipped_on_purpose_is_no_gap() -> None:
    assert admits(state(), stream(8, "s8", "s7", skips=True))
    assert not admits(state(), stream(4, "s4", "s3", skips=True)), "it was committed, or skipped, before"


# -- a new query of a known app ------------------------------------------------------------------------------


def pinned(anchor: Anchor, **commit: Any) -> State:
    return replace(state(**commit), seq=21, anchors={anchor.name: anchor})


PIN = Anchor("r", 9, (7,), "app")


@pytest.mark.parametrize("on_reset", ["refuse", "restore"])
def test_a_new_query_of_a_known_app_is_refused_and_told_of_resume(on_reset: OnReset) -> None:
    with pytest.raises(BatchConflict, match="resume"):
        admits(state(), stream(0, "s0", "", "q2"), Reset(on_reset))


def test_a_new_query_may_append_where_the_user_says_so() -> None:
    assert admits(state(), stream(0, "s0", "", "q2"), Reset("append"))


def test_a_new_query_is_taken_once_the_app_was_resumed_at_its_last_commit() -> None:
    first = stream(0, '{"t":{"0":9}}', "", "q2")
    first = replace(first, start=partial(QueryStart, (Begin('{"t":{"0":7}}'),)))
    at = {"source": ('{"t":{"0":7}}',)}
    assert admits(pinned(PIN, **at), first, Reset("restore"))
    for other in (replace(PIN, app="other"), replace(PIN, commit=8, ends=(6,))):
        with pytest.raises(BatchConflict, match="that was not resumed"):
            admits(pinned(other, **at), first, Reset("restore"))


KAFKA = '{"t":{"0":7,"1":9}}'
FEED = '{"keyfold": "feed", "offsets": {"0": 3, "1": 0}}'
ROLLED = '{"keyfold": "feed", "offsets": {"0": 3, "1": 0}, "generations": {"0": 1}}'
FILE, RATE = '{"logOffset":3}', "17"
SEED = f'{{"keyfold": "{LOG}", "seed": 9}}'


@pytest.mark.parametrize(
    ("ended", "begins", "match"),
    [
        ((KAFKA,), ('{"t":{"1":9,"0":7}}',), None),
        ((KAFKA,), ('{"t":{"0":7,"1":9,"2":0}}',), None),  # a partition that was added, from its beginning
        ((KAFKA,), ('{"t":{"0":0,"1":9}}',), "offsets 0 to 6 of topic t, partition 0 are read again"),
        ((KAFKA,), ('{"t":{"0":7,"1":12}}',), "offsets 9 to 11 of topic t, partition 1 are skipped"),
        ((KAFKA,), ('{"t":{"0":7}}',), "topic t, partition 1 is no longer read"),
        ((KAFKA,), ('{"t":{"0":7,"1":9,"2":4}}',), "offsets 0 to 3 of topic t, partition 2 are skipped"),
        ((KAFKA,), ('{"u":{"0":7,"1":9}}',), "topic t, partition 0 is no longer read"),
        ((KAFKA,), (FEED,), "not the Kafka source of the topics t"),
        ((KAFKA,), (None,), "it is unknown where it begins"),
        ((FEED,), (FEED.replace(" ", ""),), None),
        ((FEED,), (FEED.replace('"0": 3', '"0": 0'),), "offsets 0 to 2 of partition 0 are read again"),
        ((FEED,), (FEED.replace('"1": 0', '"1": 5'),), "offsets 0 to 4 of partition 1 are skipped"),
        ((FEED,), (FEED.replace("feed", "beef"),), "does not read the changelog feed"),
        ((FEED,), (ROLLED,), "rolled back meanwhile"),
        ((FEED,), (KAFKA,), "does not read the changelog feed"),
        ((KAFKA, FEED), (KAFKA, FEED), None),
        ((KAFKA, FEED), (FEED, KAFKA), "source 0: .*; source 1: "),
        ((KAFKA, FEED), (KAFKA,), "the query has 1 source"),
        ((KAFKA, "-"), (KAFKA, FEED), None),  # it had given nothing: all that it gives is new
        ((SEED, KAFKA), (KAFKA,), None),
        ((FILE,), (None,), "accept_replay"),
        ((FILE,), ("-",), "accept_replay"),
        ((RATE,), ("0",), "accept_replay"),
        ((RATE,), ("17",), None),  # whatever it is, it goes on where it was
        ((), (KAFKA,), "the commit has no source positions"),
    ],
)
def test_a_resumed_query_begins_each_source_where_the_commit_ended(
    ended: tuple[str, ...], begins: tuple[str | None, ...], match: str | None
) -> None:
    of = pinned(PIN, source=ended)
    first = replace(stream(0, "s0", "", "q2"), start=partial(QueryStart, tuple(map(Begin, begins))))
    if match is None:
        assert admits(of, first, Reset("restore"))
        return
    with pytest.raises(BatchConflict, match=match):
        admits(of, first, Reset("restore"))
    assert admits(of, first, Reset("append"))
    may_replay = match in ("accept_replay", "the commit has no source positions")
    if may_replay:
        assert admits(of, first, Reset("restore", accept_replay=True))
    else:
        with pytest.raises(BatchConflict, match=match):
            admits(of, first, Reset("restore", accept_replay=True))


def test_a_source_that_may_lose_data_may_lose_partitions_and_skips_or_repeats_nothing() -> None:
    """`failOnDataLoss=false` is no reason to begin elsewhere, as a query does without its options."""
    of = pinned(PIN, source=(KAFKA,))
    taken_ones = ('{"t":{"0":7}}', '{"t":{"0":7,"1":9,"2":4}}')
    refused = ('{"t":{"0":0}}', '{"t":{"0":8}}')
    for position, taken in (*((p, True) for p in taken_ones), *((p, False) for p in refused)):
        start = partial(QueryStart, (Begin(position, with_loss=True),))
        first = replace(stream(0, "s0", "", "q2"), start=start)
        if taken:
            assert admits(of, first, Reset("restore"))
        else:
            with pytest.raises(BatchConflict, match=r"read again|skipped"):
                admits(of, first, Reset("restore"))


@pytest.mark.parametrize(
    ("operators", "match"),
    [
        ((), None),
        ((Operator("Aggregate", ((LOG, 9),)),), None),
        ((Operator("Aggregate"),), "no restored state"),
        ((Operator("Aggregate", ((LOG, 8),)),), "the state of commit 8"),
        ((Operator("Aggregate", (("another", 9),)),), "as input of Aggregate"),
        ((Operator("Aggregate", ((LOG, 9),)), Operator("Deduplicate")), "as input of Deduplicate"),
    ],
)
def test_what_a_resumed_query_remembers_begins_with_the_state_of_the_commit(
    operators: tuple[Operator, ...], match: str | None
) -> None:
    of = pinned(PIN, source=(KAFKA,))
    first = replace(stream(0, "s0", "", "q2"), start=partial(QueryStart, (Begin(KAFKA),), operators))
    if match is None:
        assert admits(of, first, Reset("restore"))
        return
    for accept_replay in (False, True):
        with pytest.raises(BatchConflict, match=match) as caught:
            admits(of, first, Reset("restore", accept_replay=accept_replay))
        assert "replace the state in the changelog" in caught.value.what
    assert admits(of, first, Reset("append"))


def test_how_a_query_begins_is_asked_for_only_where_it_is_new() -> None:
    """It costs a walk through the query's plan."""

    def start() -> QueryStart:
        raise AssertionError("asked")

    for batch, source, previous in ((5, "s5", "s4"), (6, "s6", "s5")):
        admits(state(), replace(stream(batch, source, previous), start=start), Reset("restore"))


# -- the app of a changelog ----------------------------------------------------------------------------------


def test_the_default_app_stays_with_the_changelog(tmp_path: Path) -> None:
    """Whatever its directory is called later, and wherever its log is copied to."""
    path = tmp_path / "counts"
    with Changelog.open(path, config=QUIET) as log:
        log.engine.writer.commit({}, Batch("counts", 0, query="q", source=("s",)))
        assert log.identity.app == "counts"
        log.snapshot(tmp_path / "backup")
        log.engine.configure({"anchors.auto": 1})
    Changelog.clone(tmp_path / "backup", tmp_path / "clone").close()
    with restore(path) as whole:
        whole.to_changelog(tmp_path / "wider", partitions=3)
    path.rename(tmp_path / "renamed")
    for name in ("backup", "clone", "wider", "renamed"):
        with Changelog.open(tmp_path / name, mode="r") as log:
            assert log.identity.app == "counts"


def test_a_directory_whose_name_is_no_app_gets_another_one(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "a\udcff", config=QUIET) as log:
        assert log.identity.app == "changelog"
