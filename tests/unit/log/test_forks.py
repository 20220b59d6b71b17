"""A process that was forked from one that has a changelog open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest

from keyfold import Changelog, Standby, restore
from keyfold.checkpoints.log.compact_requests import Request
from keyfold.checkpoints.log.reader_marks import oldest_view
from keyfold.statestore.errors import ChangelogLocked, ConfigError
from keyfold.statestore.files import LOCAL
from support.changelogs import BY_HAND, rows
from support.waiting import eventually

SECONDS = 30


def in_child(act: Callable[[], object]) -> str:
    """What `act` raises in a process that is forked here, "" for nothing. Fails if it hangs."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(SECONDS)
        text = ""
        try:
            act()
        except BaseException as e:
            text = f"{type(e).__name__}: {e}"
            if not isinstance(e, ConfigError | ChangelogLocked):
                traceback.print_exc()
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child hung or died: status {status}"
    return said


def contents(path: Path) -> dict[str, tuple[int, int]]:
    found = [f for f in path.rglob("*") if f.is_file()]
    return {str(f.relative_to(path)): (f.stat().st_size, f.stat().st_mtime_ns) for f in found}


def open_log(path: Path) -> Changelog:
    log = Changelog.open(path, partitions=2, config=BY_HAND)
    for n in range(3):
        log.append(rows(*((f"k{i}", f"{n}") for i in range(50))))
    assert log.get(b"k1") == b"2"
    return log


@contextmanager
def held_everywhere(log: Changelog):  # type: ignore[no-untyped-def]
    """Threads of the parent hold every lock at the moment of a fork."""
    from keyfold.checkpoints import engine as engines
    from keyfold.checkpoints.cleaner import pool

    locks = [
        log.engine.transactions, log.engine.writer.exclusive, log.engine.writer.garbage._lock,
        engines._engines_lock, pool.POOL._changed, log.engine.cleaning._changed,
        log.engine._updater._changed, log.engine.chores,
    ]  # fmt: skip
    done = threading.Event()
    ready = threading.Semaphore(0)

    def hold(lock) -> None:  # type: ignore[no-untyped-def]
        with lock:
            ready.release()
            done.wait(SECONDS)

    threads = [threading.Thread(target=hold, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for _ in locks:
        ready.acquire()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


ACTS: dict[str, Callable[[Changelog], object]] = {
    "append": lambda log: log.append(rows(("child", "1"))),
    "transaction": lambda log: log.transaction(app_id="t", batch_id=0).__enter__(),
    "get": lambda log: log.get(b"k1"),
    "store": lambda log: log.store(),
    "read": lambda log: next(iter(log.read(0))),
    "compact": lambda log: log.compact(),
    "anchor": lambda log: log.anchor("child"),
    "rollback": lambda log: log.rollback(1),
    "refresh": lambda log: log.refresh(),
}


@pytest.mark.parametrize("mode", ["w", "r"])
def test_every_operation_is_refused_in_a_child(tmp_path: Path, mode: str) -> None:
    with open_log(tmp_path / "log") as writer:
        log = writer if mode == "w" else Changelog.open(tmp_path / "log", mode="r")
        before = contents(tmp_path / "log")
        for name, act in ACTS.items():
            with held_everywhere(writer):
                said = in_child(lambda act=act: act(log))  # type: ignore[misc]
            refused = "was opened in another process" in said or (mode == "r" and "to read only" in said)
            assert refused, f"{name}: {said}"
        with held_everywhere(writer):
            assert in_child(log.close) == ""
        assert contents(tmp_path / "log") == before
        if mode == "r":
            assert len(list((tmp_path / "log" / "readers").iterdir())) == 1
            log.close()
        writer.append(rows(("parent", "1")))
    state = restore(tmp_path / "log").to_dict()
    assert state[b"parent"] == b"1"
    assert b"child" not in state


def test_a_child_that_ends_as_python_does_touches_nothing(tmp_path: Path) -> None:
    """It leaves the with-blocks of its parent, a transaction among them, and runs all finalizers."""
    script = """
import os, signal, sys
from pathlib import Path
from keyfold import Changelog, restore
from support.changelogs import BY_HAND, rows
path = Path(sys.argv[1])
def contents():
    return {str(f): (f.stat().st_size, f.stat().st_mtime_ns) for f in path.rglob("*") if f.is_file()}
with Changelog.open(path, config=BY_HAND) as log:
    log.append(rows(*((f"k{i}", "1") for i in range(50))))
    with log.transaction(app_id="t", batch_id=0) as store:
        store.put(b"t", b"1")
        state, kept, records = restore(path), log.store(), log.read(0)
        next(iter(records))
        before = contents()
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            sys.exit(7)
        status = os.waitpid(pid, 0)[1]
        assert os.waitstatus_to_exitcode(status) == 7, status
        assert contents() == before, set(contents().items()) ^ set(before.items())
    state.close()
    log.append(rows(("parent", "1")))
print("sound")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "log")], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)},
    )  # fmt: skip
    assert done.stdout == "sound\n", done.stderr
    state = restore(tmp_path / "log").to_dict()
    assert state[b"t"] == state[b"parent"] == b"1"


def test_a_child_does_not_keep_the_locks_of_a_parent_that_has_died(tmp_path: Path) -> None:
    script = """
import os, sys, time
from keyfold import Changelog
from keyfold.checkpoints.log.compact_requests import Request
log = Changelog.open(sys.argv[1])
reader = Changelog.open(sys.argv[1], mode="r")
if os.fork() == 0:
    print(os.getpid(), flush=True)  # it has let go of the locks by now
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        with pytest.raises(ChangelogLocked, match=f"pid {parent.pid}"):
            Changelog.open(tmp_path / "log")
        parent.kill()
        parent.wait()
        with Changelog.open(tmp_path / "log") as log:
            assert oldest_view(LOCAL, log.path, 0) is None, "the mark of the dead reader stays"
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_may_open_for_itself(tmp_path: Path) -> None:
    """While its parent writes it is refused; another changelog it may write, and this one it may read."""
    with open_log(tmp_path / "log") as log:

        def act() -> None:
            with pytest.raises(ChangelogLocked, match=f"pid {os.getppid()}"):
                Changelog.open(tmp_path / "log")
            with Changelog.open(tmp_path / "log", mode="r") as reader:
                assert reader.get(b"k1") == b"2"
            with Changelog.open(tmp_path / "own", config=BY_HAND) as own:
                for n in range(3):
                    own.append(rows(*((f"k{i}", f"{n}") for i in range(1000))))
                own.compact()
                with pytest.raises(ConfigError, match="forked"):
                    own.get(b"k1")

        with held_everywhere(log):
            assert in_child(act) == ""
    assert restore(tmp_path / "own").to_dict()[b"k1"] == b"2"


def test_a_standby_and_a_request_belong_to_their_process_too(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open_log(path), Standby(path) as standby, Request(LOCAL, path) as request:
        eventually(lambda: sum(standby.lag().values()) == 0)
        time.sleep(0.1)
        before = contents(path)
        assert "another process" in in_child(standby.lag)
        assert "another process" in in_child(lambda: standby.take_over(timeout=0))
        assert in_child(standby.close) == ""
        assert in_child(lambda: request.__exit__(None, None, None)) == ""
        assert contents(path) == before
