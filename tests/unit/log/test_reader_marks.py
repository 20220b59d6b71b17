"""Marks of readers: every living reader has one, and whoever looks at them waits for nobody."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from keyfold import Changelog
from keyfold.checkpoints.lastvalues.directories import StandbyStoreDirs
from keyfold.checkpoints.log.compact_requests import Request, open_requests
from keyfold.checkpoints.log.dead_standbys import remove_dead_standbys
from keyfold.checkpoints.log.reader_marks import ViewLock, oldest_view
from keyfold.statestore.files import LOCAL, Files
from support.changelogs import BY_HAND, rows


def mark(root: Path) -> Callable[[], object]:
    lock = ViewLock(LOCAL, root)
    lock.record(7)
    return lock.close


def ask(root: Path) -> Callable[[], object]:
    request = Request(LOCAL, root)
    request.__enter__()
    return lambda: request.__exit__(None, None, None)


def stand_by(root: Path) -> Callable[[], object]:
    return StandbyStoreDirs(LOCAL, root).close


def sees_mark(root: Path) -> bool:
    return oldest_view(LOCAL, root, 0) == 7


def sees_request(root: Path) -> bool:
    return len(open_requests(LOCAL, root)) == 1


def sees_standby(root: Path) -> bool:
    remove_dead_standbys(LOCAL, root)
    return any((root / "work").glob("standby-*.lock"))


KINDS = {"view": (mark, sees_mark), "request": (ask, sees_request), "standby": (stand_by, sees_standby)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["before it is locked", "while it is looked at", "after it was removed"])
def test_a_look_at_any_moment_takes_no_lock_from_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, moment: str
) -> None:
    """The owner makes its file; somebody looks whether it is held, and takes the lock for a moment."""
    for name in ("readers", "requests", "work"):
        (tmp_path / name).mkdir()
    make, sees = KINDS[kind]
    real = fcntl.flock
    looked: list[int] = []

    def flock(fd: int, how: int) -> None:
        if looked:
            return real(fd, how)
        looked.append(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if moment == "while it is looked at":
            held = os.open(path, os.O_RDWR)
            real(held, fcntl.LOCK_EX)
            try:
                return real(fd, how)
            finally:
                path.unlink()
                os.close(held)
        if moment == "after it was removed":
            path.unlink()
        else:
            sees(tmp_path)
        return real(fd, how)

    monkeypatch.setattr("keyfold.statestore.files.fcntl.flock", flock)
    give_up = make(tmp_path)
    monkeypatch.undo()
    assert looked
    assert sees(tmp_path)
    assert sees(tmp_path)
    give_up()
    assert not sees(tmp_path)


class Collecting(Files):
    """Python's collector runs wherever a file operation is, as it may anywhere."""

    def list_directory(self, path: Path) -> list[str]:
        gc.collect()
        return super().list_directory(path)

    def unlink(self, path: Path, within: object = None) -> None:
        gc.collect()
        super().unlink(path, within)  # type: ignore[arg-type]


def test_a_view_that_a_finalizer_releases_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Also where the finalizer runs in the middle of the look at the views."""

    class Job:
        """An object that refers to itself, with a view that was not read to its end."""

        def __init__(self, log: Changelog) -> None:
            self.me = self
            self.records = log.read(0)
            next(iter(self.records))

    config = {**BY_HAND, "anchors.auto": 0}
    done = threading.Event()

    def work() -> None:
        with Changelog.open(tmp_path / "log", config=config, files=Collecting()) as log:
            for n in range(3):
                log.append(rows(*((f"k{i}", f"{n}") for i in range(100))))
                Job(log)
                log.compact()
                assert not log.engine.writer.garbage._lock.locked()
        done.set()

    gc.disable()
    try:
        threading.Thread(target=work, daemon=True).start()
        assert done.wait(60), "a thread waits for itself"
    finally:
        gc.enable()
    assert len(list((tmp_path / "log" / "0").glob("*.arrows"))) == 1


def test_a_file_that_is_replaced_while_the_views_are_looked_at_waits(tmp_path: Path) -> None:
    """A reader comes after the look at the views, and then a line takes out a file that the reader names."""

    class Coming(Files):
        armed = False

        def list_directory(self, path: Path) -> list[str]:
            found = super().list_directory(path)
            if self.armed and path.name == "readers":
                self.armed = False
                came.append(Changelog.open(tmp_path / "log", mode="r"))
                garbage.add(log.state.seq + 1, [directory / "late"])
            return found

    came: list[Changelog] = []
    files = Coming()
    with Changelog.open(tmp_path / "log", config=BY_HAND, files=files) as log:
        log.append(rows(("a", "1")))
        garbage, directory = log.engine.writer.garbage, tmp_path / "log" / "0"
        for name in ("early", "late"):
            (directory / name).write_bytes(b"")
        garbage.add(log.state.seq, [directory / "early"])
        files.armed = True
        for _ in range(2):
            garbage.collect()
            assert came
            assert not (directory / "early").exists()
            assert (directory / "late").exists()
        came[0].close()
        garbage.collect()
        assert not (directory / "late").exists()


def test_what_waits_for_a_reader_that_stays_costs_little_at_each_look(tmp_path: Path) -> None:
    """Comparing each file that waits with each other took seconds where there are thousands."""
    with Changelog.open(tmp_path / "log", config=BY_HAND) as log:
        log.append(rows(("a", "1")))
        garbage, n = log.engine.writer.garbage, log.state.seq
        with Changelog.open(tmp_path / "log", mode="r"):
            for number in range(20_000):
                garbage.add(n + 1 + number, [tmp_path / "log" / "0" / f"{number}"])
            began = time.thread_time()
            garbage.collect()
            assert time.thread_time() - began < 0.5
            assert len(garbage._waiting) == 20_000


def test_a_proof_that_meets_the_rolling_of_the_journal_does_not_fail(tmp_path: Path) -> None:
    """Whoever deletes proves without the writer's lock, and may look at the journal that was just closed."""
    with Changelog.open(tmp_path / "log", config=BY_HAND) as log:
        log.append(rows(("a", "1")))
        writer = log.engine.writer
        closed = writer._journal
        looked = threading.Event()

        class Rolling(Files):
            def list_directory(self, path: Path) -> list[str]:
                found = super().list_directory(path)
                if threading.current_thread() is proving and not looked.is_set():
                    looked.set()
                    rolled.wait(60)
                return found

        rolled = threading.Event()
        errors: list[Exception] = []

        def prove() -> None:
            try:
                writer.ownership.prove()
            except Exception as e:
                errors.append(e)

        proving = threading.Thread(target=prove)
        writer.ownership._files = Rolling()
        proving.start()
        assert looked.wait(60)
        with writer.exclusive:
            writer._roll()
        assert writer._journal is not closed
        rolled.set()
        proving.join(60)
        assert errors == []
        assert not writer.fenced
