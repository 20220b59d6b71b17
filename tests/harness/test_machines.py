"""Faults made by the machine itself: a real ext4 loses power, a disk is full, a system call fails."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keyfold.statestore.files import LOCAL
from support.faults.inject import KillAt, Killed, on
from support.faults.machines import ext4, run_injected, tmpfs
from support.faults.toy_log import EARLY, fault_in, run


def test_a_real_power_loss_takes_what_was_not_synced_and_only_that(tmp_path: Path) -> None:
    with ext4(tmp_path) as disk:
        for name, synced in (("a", True), ("b", False)):
            file = LOCAL.create(disk.path / name)
            LOCAL.append(file, [b"x" * 5000])
            if synced:
                LOCAL.sync(file)
                LOCAL.sync_directory(disk.path)
            LOCAL.append(file, [b"y" * 5000])
            LOCAL.close(file)
        disk.lose_power()
        assert LOCAL.read(disk.path / "a") == b"x" * 5000
        assert not LOCAL.exists(disk.path / "b")
    assert not os.path.ismount(tmp_path / "ext4")


@pytest.mark.parametrize(("bug", "lost"), [(None, False), (EARLY, True)])
def test_the_toy_log_on_a_real_disk(tmp_path: Path, bug: str | None, lost: bool) -> None:
    """At each sync of the journal the process dies and the power goes."""
    selected = on("sync", path="*/journal-*")
    found = []
    with ext4(tmp_path) as disk:
        counting = KillAt(only=selected)
        (disk.path / "counting").mkdir()
        run(counting, disk.path / "counting" / "log", lambda number: None, bug)
        for n in range(counting.count):
            base = disk.path / f"{n}"
            base.mkdir()
            LOCAL.sync_directory(disk.path)
            told: list[int] = []
            files = KillAt(n, only=selected)
            files.real_syncs = True
            with pytest.raises(Killed):
                run(files, base / "log", told.append, bug)
            files.release()
            disk.lose_power()
            found.append(fault_in(LOCAL, base / "log", told))
    assert any(found) == lost


def test_a_disk_is_unmounted_when_the_test_fails(tmp_path: Path) -> None:
    def failing() -> None:
        with tmpfs(tmp_path, 1 << 20) as disk:
            assert os.path.ismount(disk)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert not os.path.ismount(tmp_path / "tmpfs")


def test_an_open_file_does_not_keep_the_mount_and_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="still open"), tmpfs(tmp_path, 1 << 20) as disk:
        file = LOCAL.create(disk / "a")
    assert not os.path.ismount(tmp_path / "tmpfs")
    LOCAL.close(file)


KILLED_WITH_A_MOUNT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from support.faults.machines import tmpfs
with tmpfs(Path(sys.argv[1]), 1 << 20) as disk:
    print(os.path.ismount(disk), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_disk_is_unmounted_when_the_process_is_killed(tmp_path: Path) -> None:
    with tmpfs(tmp_path, 1 << 20):
        pass  # skips where mounting is not allowed
    (tmp_path / "killed").mkdir()
    tests = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WITH_A_MOUNT, str(tmp_path / "killed"), str(tests)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    # The guard holds the other end of this pipe until it is done, so all is over when `run` returns.
    assert done.stdout == "True\n"
    assert done.returncode == -9
    assert not os.path.ismount(tmp_path / "killed" / "tmpfs")


def test_a_disk_runs_full_at_its_size(tmp_path: Path) -> None:
    with tmpfs(tmp_path, 1 << 20) as disk:
        assert LOCAL.free_bytes(disk) == 1 << 20
        file = LOCAL.create(disk / "a")
        LOCAL.append(file, [bytes(1 << 20)])
        with pytest.raises(OSError) as raised:
            LOCAL.append(file, [b"x"])
        LOCAL.close(file)
        assert raised.value.errno == errno.ENOSPC


SYNCS = """
from pathlib import Path
from keyfold.statestore.files import LOCAL
other = LOCAL.create(Path("other"))
file = LOCAL.create(Path("file"))
for n in range(5):
    LOCAL.append(file, [b"x"])
    LOCAL.sync(other)
    try:
        LOCAL.sync(file)
        print(n, "synced", flush=True)
    except OSError as e:
        print(n, e.strerror, flush=True)
"""


def test_a_chosen_sync_of_a_chosen_file_fails(tmp_path: Path) -> None:
    program = [sys.executable, "-c", SYNCS]
    done = run_injected(program, tmp_path, "fdatasync:error=EIO:when=3", path=tmp_path / "file")
    assert done.returncode == 0, done.stderr
    said = ["synced", "synced", "Input/output error", "synced", "synced"]
    assert done.stdout.splitlines() == [f"{n} {what}" for n, what in enumerate(said)]
    assert done.calls.count("fdatasync(") == 5


def test_a_process_is_killed_at_a_chosen_system_call(tmp_path: Path) -> None:
    program = [sys.executable, "-c", SYNCS]
    done = run_injected(program, tmp_path, "fdatasync:signal=SIGKILL:when=2", path=tmp_path / "file")
    assert done.returncode == -9
    assert done.stdout.splitlines()[0] == "0 synced"
    assert LOCAL.size(tmp_path / "file") == 2


def test_a_run_into_which_nothing_was_injected_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="nothing was injected"):
        run_injected([sys.executable, "-c", SYNCS], tmp_path, "fdatasync:error=EIO:when=99")
