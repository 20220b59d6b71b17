"""Transactions and appends beside and inside one another: no change is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from keyfold import Changelog
from keyfold.statestore.errors import ConfigError
from support.changelogs import BY_HAND, rows


@pytest.fixture
def log(tmp_path: Path):  # type: ignore[no-untyped-def]
    with Changelog.open(tmp_path / "log", config=BY_HAND) as log:
        log.append(rows(("n", "0")))
        yield log


INSIDE: dict[str, Callable[[Changelog], object]] = {
    "append": lambda log: log.append(rows(("n", "9"))),
    "transaction": lambda log: log.transaction(app_id="other", batch_id=0).__enter__(),
    "rollback": lambda log: log.rollback(1),
    "close": lambda log: log.close(),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_change_inside_a_transaction_of_the_same_thread_is_refused(log: Changelog, name: str) -> None:
    with log.transaction(app_id="t", batch_id=0) as store:
        store.put(b"n", b"1")
        with pytest.raises(ConfigError, match="A transaction of this thread is already open"):
            INSIDE[name](log)
        assert log.get(b"n") == b"0"
    assert log.get(b"n") == b"1"
    assert len(log.state.commits) == 2


def test_another_changelog_object_of_the_process_takes_turns_too(log: Changelog) -> None:
    with Changelog.open(log.path) as other:
        with log.transaction(app_id="t", batch_id=0) as store:
            store.put(b"n", b"1")
            with pytest.raises(ConfigError, match="A transaction of this thread is already open"):
                other.append(rows(("n", "9")))
            with Changelog.open(log.path) as third:
                assert third.get(b"n") == b"0"
        other.append(rows(("n", "2")))
    assert log.get(b"n") == b"2"


def test_counting_in_many_threads_loses_nothing(log: Changelog) -> None:
    """Transactions that add one, and appends beside them, through two objects."""

    def count(number: int) -> None:
        mine = log if number % 2 else other
        for batch in range(10):
            with mine.transaction(app_id=f"t{number}", batch_id=batch) as store:
                value = store.get(b"n")
                assert value is not None
                store.put(b"n", b"%d" % (int(value) + 1))
            mine.append(rows((f"a{number}", f"{batch}")), app_id=f"a{number}")

    with Changelog.open(log.path) as other, ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))
    assert log.get(b"n") == b"40"
    assert len(log.state.commits) == 81


@pytest.mark.parametrize("name", ["append", "transaction", "rollback", "close"])
def test_a_change_of_another_thread_waits_until_the_transaction_is_left(log: Changelog, name: str) -> None:
    acts = {**INSIDE, "transaction": lambda log: _add_one(log)}
    with ThreadPoolExecutor(1) as pool:
        with log.transaction(app_id="t", batch_id=0) as store:
            store.put(b"n", b"1")
            waiting = pool.submit(acts[name], log)
            threading.Event().wait(0.2)
            assert not waiting.done()
            assert len(log.state.commits) == 1
        waiting.result()
    expected = {"append": b"9", "transaction": b"2", "rollback": b"0", "close": b"1"}[name]
    with Changelog.open(log.path) as again:
        assert again.get(b"n") == expected


def test_a_transaction_that_fails_gives_up_its_turn(log: Changelog) -> None:
    for _ in range(2):
        with suppress(ZeroDivisionError), log.transaction(app_id="t", batch_id=0) as store:
            store.put(b"n", b"1")
            raise ZeroDivisionError
    assert log.get(b"n") == b"0"
    log.append(rows(("n", "2")))
    assert log.get(b"n") == b"2"


def _add_one(log: Changelog) -> None:
    with log.transaction(app_id="other", batch_id=0) as store:
        store.put(b"n", b"%d" % (int(store.get(b"n") or b"") + 1))
