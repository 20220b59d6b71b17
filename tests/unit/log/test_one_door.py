"""`Engine.commit`: the look at a batch, its commit and what follows it are one step, in the caller's turn."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keyfold import Changelog
from keyfold.checkpoints.log.writer import Batch
from keyfold.checkpoints.manifest.state import State
from keyfold.statestore.errors import BatchConflict, ConfigError
from support.changelogs import BY_HAND, rows


@pytest.fixture
def log(tmp_path: Path):  # type: ignore[no-untyped-def]
    with Changelog.open(tmp_path / "log", config=BY_HAND) as log:
        log.append(rows(("a", "0")))
        yield log


def test_a_batch_that_a_commit_holds_is_not_written_again(log: Changelog) -> None:
    held, before, after = log.state.commits[-1], log.state, []
    commit = log.engine.commit(
        log.engine.blocks_of(rows(("a", "1"))), lambda state: held, then=lambda: after.append(1)
    )
    assert (commit, commit.applied) == (held, False)
    assert log.state is before
    assert after == []


def test_a_batch_that_is_refused_leaves_everything_as_it_was(log: Changelog) -> None:
    def refuse(state: State) -> Batch:
        raise BatchConflict("No.", remedy="none")

    before = log.state
    with pytest.raises(BatchConflict, match=r"No\."):
        log.engine.commit({}, refuse)
    assert log.state is before
    assert log.append(rows(("a", "1"))).number == 2


def test_what_follows_a_commit_is_done_before_another_one_can_be_made(log: Changelog) -> None:
    """The look, the commit and what follows them see the same last commit, however many commit at once."""
    seen: list[tuple[int, int]] = []

    def one(app: str) -> None:
        looked: list[int] = []

        def admit(state: State) -> Batch:
            looked.append(state.next_commit)
            return Batch(app, 0)

        def then() -> None:
            seen.append((looked[0], log.state.next_commit))

        log.engine.commit({}, admit, then=then, takes_turn=False)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, [f"app {i}" for i in range(64)]))
    assert seen == [(number, number + 1) for number in range(2, 66)]


def test_a_commit_takes_its_turn_unless_the_caller_has_it(log: Changelog) -> None:
    with log.engine.transactions:
        with pytest.raises(ConfigError, match="A transaction of this thread is already open"):
            log.engine.commit({}, lambda state: Batch("b", 0))
        assert log.engine.commit({}, lambda state: Batch("b", 0), takes_turn=False).applied
    assert log.engine.commit({}, lambda state: Batch("b", 1)).number == 3
