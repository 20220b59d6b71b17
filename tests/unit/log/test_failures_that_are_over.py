"""What has failed and works again is as if it had never failed; what has failed holds nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keyfold import Changelog, Standby
from keyfold.checkpoints import engine
from keyfold.checkpoints.lastvalues import updater
from keyfold.checkpoints.lastvalues.stores import KeptStores
from keyfold.checkpoints.lastvalues.updater import StateUpdater
from keyfold.checkpoints.log.recovery import open_writer
from keyfold.statestore.errors import StorageFailed
from keyfold.statestore.rocksdb.database import Database
from support.changelogs import BY_HAND, Clock, rows
from support.faults.inject import QUICK
from support.waiting import eventually, in_time


class Disk:
    """The disk of last values, which `is_full` or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.refused = 0
        follow = KeptStores._follow

        def checked(kept: KeptStores, *arguments: Any) -> Iterator[None]:
            if self.is_full:
                self.refused += 1
                raise StorageFailed("The disk is full.")
            yield from follow(kept, *arguments)

        monkeypatch.setattr(KeptStores, "_follow", checked)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(updater, "_REST_SECONDS", 0.0)
    monkeypatch.setattr(updater, "_LINGER_SECONDS", 0.0)
    return Disk(monkeypatch)


def _get_after_a_wait_for_all(log: Changelog) -> object:
    log.engine.catch_up()
    return log.get(b"a")


READS: list[Callable[[Changelog], object]] = [
    lambda log: log.get(b"a"),
    lambda log: log.store().get_all([b"a"])[0],
    lambda log: dict(log.store().all()).get(b"a"),
    _get_after_a_wait_for_all,
]


@pytest.mark.parametrize("read", READS, ids=["get", "get_all", "all", "catch_up"])
@pytest.mark.parametrize("tried", [True, False], ids=["recovered", "not yet tried again"])
def test_no_read_raises_a_failure_that_is_over(
    read: Callable[[Changelog], object], tried: bool, disk: Disk, tmp_path: Path
) -> None:
    """Nobody has waited while the stores could not be written."""
    with Changelog.open(tmp_path / "log", partitions=2, config=BY_HAND) as log:
        disk.is_full = True
        log.append(rows(("a", "1"), ("b", "1")))
        eventually(lambda: log.engine._updater._failure is not None)
        disk.is_full = False
        if tried:
            log.append(rows(("b", "2")))
            eventually(lambda: not any(log.engine._updater.lag().values()))
        log.append(rows(("a", "2")))
        assert in_time(lambda: read(log)) == b"2"


@pytest.mark.parametrize("read", READS, ids=["get", "get_all", "all", "catch_up"])
def test_a_failure_that_goes_on_is_raised_by_every_read(
    read: Callable[[Changelog], object], disk: Disk, tmp_path: Path
) -> None:
    with Changelog.open(tmp_path / "log", partitions=2, config=BY_HAND) as log:
        disk.is_full = True
        log.append(rows(("a", "2")))
        for _ in range(3):
            with pytest.raises(StorageFailed, match="full"):
                in_time(lambda: read(log))
        disk.is_full = False
        assert in_time(lambda: read(log)) == b"2"


def test_a_writer_does_not_wait_for_stores_that_cannot_be_written_and_waits_again_later(
    disk: Disk, tmp_path: Path
) -> None:
    config = {**BY_HAND, "store.backlog.bytes": 1 << 20, "compression.type": "none"}
    with Changelog.open(tmp_path / "log", config=config) as log:
        large = rows(*((f"k{n}", "v" * 1000) for n in range(2000)))
        disk.is_full = True
        for _ in range(3):
            in_time(lambda: log.append(large))
        assert log.engine._updater.lag_bytes() > 1 << 20
        disk.is_full = False
        eventually(lambda: log.engine._updater.lag_bytes() == 0 or log.append(rows(("a", "1"))) is None)
        log.append(large)
        in_time(log.engine.wait_for_room)
        assert log.engine._updater.lag_bytes() <= 1 << 20


class Vanishing(tuple[Any, ...]):
    """Stores that another thread removes as soon as one has looked whether there are any."""

    kept: KeptStores

    def __bool__(self) -> bool:
        self.kept._stores = ()
        return True


@pytest.mark.parametrize("ask", [StateUpdater.lag, StateUpdater.lag_bytes])
def test_stores_that_are_removed_meanwhile_lag_by_what_they_lacked(
    ask: Callable[[StateUpdater], Any], tmp_path: Path
) -> None:
    with Changelog.open(tmp_path / "log", config=BY_HAND) as log:
        log.append(rows(("a", "1")))
        log.engine.catch_up()
        kept = log.engine._updater._kept
        there = Vanishing(kept._stores)
        there.kept = kept
        kept._stores, kept._done = there, [None]
        found = ask(log.engine._updater)
        assert found in ({0: 0}, 0)
        kept._stores = tuple(there)


def _opened(path: Path, steal: bool = False) -> None:
    with Changelog.open(path, config=BY_HAND, files=QUICK, steal=steal) as log:
        log.append(rows(("b", "1")))


@pytest.mark.parametrize("where", ["CleanerManager", "SnapshotPolicy", "Turn"])
def test_an_opening_that_fails_after_the_writer_is_there_keeps_no_lock(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    _opened(path)

    def failing(*arguments: object) -> object:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(engine, where, failing)
        with pytest.raises(ZeroDivisionError):
            Changelog.open(path)
    assert path not in engine._engines
    # As another process, which no table of open changelogs helps.
    open_writer(QUICK, path, None, Clock(), steal=False).close()
    _opened(path)


@pytest.mark.parametrize("where", ["move", "close"])
def test_a_standby_that_fails_in_the_middle_of_taking_over_leaves_no_lock_no_mark_and_no_stores(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    _opened(path)
    standby = Standby(path)
    with monkeypatch.context() as patch:

        def failing(*arguments: object) -> object:
            raise ZeroDivisionError

        if where == "move":
            patch.setattr(KeptStores, "move", failing)
        else:
            patch.setattr(Database, "close", failing)
        with pytest.raises(ZeroDivisionError):
            standby.take_over(timeout=30)
    standby.close()
    assert list((path / "readers").iterdir()) == []
    open_writer(QUICK, path, None, Clock(), steal=False).close()
    _opened(path)
    assert len(list(path.glob("store-*"))) <= 1
