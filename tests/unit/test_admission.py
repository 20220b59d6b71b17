"""Which batches are taken, passed over, or refused."""

from __future__ import annotations

import pytest

from keyfold.checkpoints.admission import OnReset, StreamBatch, admits_append, admits_stream
from keyfold.checkpoints.state import Anchor, Commit, State, empty
from keyfold.statestore.errors import BatchConflict


def state(query: str = "q1", batch: int = 5, source: tuple[str, ...] = ("s5",), digest: str = "") -> State:
    commit = Commit(9, 0, "app", query, batch, source, digest, (7,))
    before = empty(1, 1)
    return State(20, 1, before.partitions, (commit,), {"app": commit}, {}, 10)


def stream(batch: int, source: str, previous: str, query: str = "q1") -> StreamBatch:
    return StreamBatch("app", query, batch, (source,), (previous,) if previous else ())


def test_the_first_batch_of_an_app_is_taken() -> None:
    assert admits_append(empty(1, 1), "app", 3, "d")
    assert admits_stream(empty(1, 1), stream(3, "s3", ""), "refuse")


def test_an_appended_batch_again_is_passed_over() -> None:
    assert not admits_append(state("", digest="d"), "app", 5, "d")
    assert not admits_append(state("", digest="d"), "app", 4, "anything: only the last batch is compared")


def test_a_batch_id_with_other_rows_is_refused() -> None:
    with pytest.raises(BatchConflict, match="other rows"):
        admits_append(state("", digest="d"), "app", 5, "e")


def test_a_digest_is_compared_only_where_both_are_known() -> None:
    """A sink that is called without a query knows a batch by its id alone."""
    assert not admits_append(state("", digest=""), "app", 5, "d")
    assert not admits_append(state("", digest="d"), "app", 5, "")


def test_append_under_the_app_of_a_query_is_refused() -> None:
    with pytest.raises(BatchConflict, match="belongs to a streaming query"):
        admits_append(state("q1"), "app", 6, "d")


def test_batch_ids_may_have_gaps() -> None:
    assert admits_append(state(""), "app", 17, "d")
    assert admits_stream(state(), stream(8, "s8", "s5"), "refuse")


def test_a_replayed_micro_batch_is_known_by_its_source_offsets() -> None:
    assert not admits_stream(state(), stream(5, "s5", "s4"), "refuse")


def test_a_replayed_micro_batch_from_elsewhere_is_refused() -> None:
    with pytest.raises(BatchConflict, match="other source offsets"):
        admits_stream(state(), stream(5, "s5'", "s4"), "refuse")


def test_an_older_checkpoint_is_refused() -> None:
    with pytest.raises(BatchConflict, match="older copy"):
        admits_stream(state(), stream(4, "s4", "s3"), "refuse")


def test_a_batch_that_does_not_begin_where_the_last_commit_ended_is_refused() -> None:
    with pytest.raises(BatchConflict, match="does not begin where the last commit ended"):
        admits_stream(state(), stream(6, "s6", "s4"), "refuse")


@pytest.mark.parametrize("on_reset", ["refuse", "restore"])
def test_a_new_query_of_a_known_app_is_refused_and_told_of_resume(on_reset: OnReset) -> None:
    with pytest.raises(BatchConflict, match="resume"):
        admits_stream(state(), stream(0, "s0", "", "q2"), on_reset)


def test_a_new_query_may_append_where_the_user_says_so() -> None:
    assert admits_stream(state(), stream(0, "s0", "", "q2"), "append")


def test_a_new_query_is_taken_once_the_app_was_resumed_at_its_last_commit() -> None:
    before = state()
    pinned = State(
        21, 1, before.partitions, before.commits, before.apps, {"r": Anchor("r", 9, (7,), "app")}, 10
    )
    assert admits_stream(pinned, stream(0, "s0", "", "q2"), "restore")
    other = State(
        21, 1, before.partitions, before.commits, before.apps, {"r": Anchor("r", 9, (7,), "other")}, 10
    )
    with pytest.raises(BatchConflict):
        admits_stream(other, stream(0, "s0", "", "q2"), "restore")
    older = State(
        21, 1, before.partitions, before.commits, before.apps, {"r": Anchor("r", 8, (6,), "app")}, 10
    )
    with pytest.raises(BatchConflict):
        admits_stream(older, stream(0, "s0", "", "q2"), "restore")
