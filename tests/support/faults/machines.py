"""Faults that need the machine: a real ext4 that loses power, a full disk, system calls that fail.

Each skips the test, with the reason, where the machine does not allow it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import pytest

#: `_IOR('X', 125, __u32)` of linux/fs.h, and its flag "the journal in memory is lost as well".
_FS_IOC_SHUTDOWN: Final = 0x8004587D
_NOLOGFLUSH: Final = 2

#: Nothing is written back behind the test's back, and ext4 does not heal a missing sync before a rename.
_EXT4_OPTIONS: Final = "loop,commit=300,noauto_da_alloc"

_BUSY_RETRIES: Final = 40
_BUSY_PAUSE_S: Final = 0.05


class Ext4:
    """A small ext4 file system on a loop device. What lies at `path` can lose its power."""

    def __init__(self, image: Path, path: Path) -> None:
        self._image = image
        self.path = path

    def mount(self) -> None:
        _mount(["-t", "ext4", "-o", _EXT4_OPTIONS, str(self._image)], self.path)

    def lose_power(self) -> None:
        """Whatever was not synced is gone. All files on it must be closed before. It is mounted again."""
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(directory, _FS_IOC_SHUTDOWN, struct.pack("I", _NOLOGFLUSH))
        finally:
            os.close(directory)
        if not _unmounted(self.path):
            raise RuntimeError(f"a file under {self.path} is still open or mapped")
        self.mount()


@contextmanager
def ext4(directory: Path, size_bytes: int = 64 << 20) -> Iterator[Ext4]:
    """A fresh ext4 under `directory`. Skips unless this is root on a machine with loop devices.

    A `Watched` that is used on it needs `real_syncs`.
    """
    _need_root("mkfs.ext4", "mount", "umount")
    if not Path("/dev/loop-control").exists():
        pytest.skip("needs loop devices")
    image, path = directory / "ext4.image", directory / "ext4"
    path.mkdir()
    with open(image, "xb") as f:
        f.truncate(size_bytes)
    made = subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"mkfs.ext4 failed: {made.stderr.strip()}")
    disk = Ext4(image, path)
    disk.mount()
    try:
        with _unmounting(path):
            yield disk
    finally:
        image.unlink()


@contextmanager
def tmpfs(directory: Path, size_bytes: int) -> Iterator[Path]:
    """A directory with room for `size_bytes` (whole pages); then ENOSPC. Skips unless this is root."""
    _need_root("mount", "umount")
    path = directory / "tmpfs"
    path.mkdir()
    _mount(["-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs"], path)
    with _unmounting(path):
        yield path


def _need_root(*programs: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    for program in programs:
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            pytest.skip(f"needs {program}")


def _mount(arguments: Sequence[str], path: Path) -> None:
    done = subprocess.run(["mount", *arguments, str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")


@contextmanager
def _unmounting(path: Path) -> Iterator[None]:
    """Unmount at the end. If this process is killed, a shell that waits for the end of its input does it."""
    guard = subprocess.Popen(
        ["sh", "-c", 'cat >/dev/null; umount -l "$1" 2>/dev/null', "guard", str(path)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield
    finally:
        free = _unmounted(path)
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()
    if not free:
        raise RuntimeError(f"a file under {path} was still open or mapped; it was unmounted lazily")


def _unmounted(path: Path) -> bool:
    """Unmount, with patience: a process that ended just now may hold it for a moment. False: in use."""
    for _ in range(_BUSY_RETRIES):
        done = subprocess.run(["umount", str(path)], capture_output=True)
        if done.returncode == 0 or not os.path.ismount(path):
            return True
        time.sleep(_BUSY_PAUSE_S)
    return False


@dataclass(frozen=True)
class Traced:
    """How a program under strace ended, and its traced calls as text, one a line."""

    returncode: int
    stdout: str
    stderr: str
    calls: str


def run_injected(
    program: Sequence[str],
    directory: Path,
    *inject: str,
    path: Path | None = None,
    timeout_s: float = 60,
) -> Traced:
    """Run a program, and let system calls of it fail: `fdatasync:error=EIO:when=3`,
    `fdatasync:signal=SIGKILL:when=2`.

    `when` counts in each thread for itself. With `path` only calls on that file are counted; it need not
    exist yet. A program that died of a signal has `returncode` -9 and the like.

    Raises:
        AssertionError: the program ended without one injected fault: it showed nothing.
    """
    if reason := _no_strace():
        pytest.skip(reason)
    log = directory / "strace.log"
    command = ["strace", "-f", "-qq", "-o", str(log)]
    if path is not None:
        command += ["-P", str(path)]
    command += ["-e", "trace=" + ",".join(i.split(":")[0] for i in inject)]
    for i in inject:
        command += ["-e", f"inject={i}"]
    done = subprocess.run(
        [*command, *program], capture_output=True, text=True, cwd=directory, timeout=timeout_s
    )
    calls = log.read_text()
    if "(INJECTED)" not in calls and not any("signal=" in i and done.returncode < 0 for i in inject):
        raise AssertionError(f"nothing was injected:\n{done.stdout}{done.stderr}{calls}")
    return Traced(done.returncode, done.stdout, done.stderr, calls)


@cache
def _no_strace() -> str | None:
    """Why strace cannot be used; None where it can."""
    if shutil.which("strace") is None:
        return "needs strace"
    done = subprocess.run(["strace", "-qq", "-o", os.devnull, "true"], capture_output=True, text=True)
    return f"strace is not allowed here: {done.stderr.strip()}" if done.returncode else None
