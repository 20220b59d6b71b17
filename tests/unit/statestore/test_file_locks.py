"""Locks of `Files`: who holds one, and when it ends."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keyfold.statestore.files import LOCAL, Files


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


HOLDER = """
import sys
from pathlib import Path
from keyfold.statestore.files import LOCAL
held = LOCAL.lock(Path(sys.argv[1]))
print("held" if held else "refused", flush=True)
sys.stdin.read()
"""


def in_other_process(path: Path) -> subprocess.Popen[str]:
    """A process that tries to lock `path`, says how that went, and lives until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_holder_in_the_same_process_is_refused_and_leaks_nothing(tmp_path: Path) -> None:
    first = LOCAL.lock(tmp_path / "lock")
    assert first is not None
    before = open_descriptors()
    assert LOCAL.lock(tmp_path / "lock") is None
    assert Files().lock(tmp_path / "lock") is None
    assert open_descriptors() == before
    LOCAL.close(first)


def test_a_lock_is_free_again_once_it_is_closed(tmp_path: Path) -> None:
    for _ in range(2):
        file = LOCAL.lock(tmp_path / "lock")
        assert file is not None
        LOCAL.close(file)


def test_a_lock_excludes_other_processes_and_ends_with_its_process(tmp_path: Path) -> None:
    with in_other_process(tmp_path / "lock") as holder:
        assert said(holder) == "held"
        assert LOCAL.lock(tmp_path / "lock") is None
        holder.kill()
        holder.wait()
        mine = LOCAL.lock(tmp_path / "lock")
        assert mine is not None
    with in_other_process(tmp_path / "lock") as refused:
        assert said(refused) == "refused"
        refused.communicate("")
    LOCAL.close(mine)


def test_a_child_program_does_not_hold_the_lock_of_its_parent(tmp_path: Path) -> None:
    file = LOCAL.lock(tmp_path / "lock")
    assert file is not None
    with in_other_process(tmp_path / "another") as child:
        assert said(child) == "held"
        LOCAL.close(file)
        again = LOCAL.lock(tmp_path / "lock")
        assert again is not None
        child.communicate("")
    LOCAL.close(again)


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "removed"])
def test_a_lock_file_that_goes_away_before_it_is_locked_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    path = tmp_path / "lock"
    real: Callable[[int, int], object] = fcntl.flock
    calls = []

    def flock(fd: int, how: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            path.unlink()
            if replaced:
                path.write_bytes(b"of somebody else")
        real(fd, how)

    before = open_descriptors()
    monkeypatch.setattr("keyfold.statestore.files.fcntl.flock", flock)
    file = LOCAL.lock(path)
    monkeypatch.undo()
    assert file is not None
    assert len(calls) == 2
    assert os.path.samestat(os.fstat(file.fd), os.stat(path))
    assert open_descriptors() == before + 1
    LOCAL.close(file)


def test_a_lock_on_a_removed_file_does_not_hold_the_name(tmp_path: Path) -> None:
    old = LOCAL.lock(tmp_path / "lock")
    (tmp_path / "lock").unlink()
    new = LOCAL.lock(tmp_path / "lock")
    assert old is not None
    assert new is not None
    LOCAL.close(old)
    assert LOCAL.lock(tmp_path / "lock") is None
    LOCAL.close(new)


def test_a_lock_on_something_that_is_no_plain_file_comes_to_an_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    file = LOCAL.lock(tmp_path / "pipe")
    assert file is not None
    LOCAL.close(file)


def test_a_lock_in_a_missing_directory_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LOCAL.lock(tmp_path / "missing" / "lock")
