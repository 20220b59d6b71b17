"""A call that fails gives back what it has opened, whichever of its operations it was."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from keyfold import Changelog
from keyfold.statestore.errors import KeyfoldError
from keyfold.statestore.files import Files
from support.changelogs import BY_HAND, make_crashed, rows
from support.faults.inject import FailAt


def open_files() -> set[str]:
    """What the process has open below /tmp or wherever tests write."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {path for path in found if "/log/" in path or "/snapshot/" in path}


def opened(root: Path, files: Files) -> None:
    Changelog.open(root, files=files).close()


def appended_and_folded(root: Path, files: Files) -> None:
    with Changelog.open(root, files=files, config=BY_HAND) as log:
        log.append(rows(*((f"k{i}", "more") for i in range(9))))
        log.compact()


def snapshot_of_a_part(root: Path, files: Files) -> None:
    with Changelog.open(root, files=files, config=BY_HAND) as log:
        log.snapshot(root.with_name("snapshot"), at=2)


def rolled_back(root: Path, files: Files) -> None:
    with Changelog.open(root, files=files, config=BY_HAND) as log:
        log.rollback(2)


@pytest.mark.parametrize("call", [opened, appended_and_folded, snapshot_of_a_part, rolled_back])
def test_a_call_that_fails_at_any_operation_leaves_no_file_open(
    tmp_path: Path, call: Callable[[Path, Files], None]
) -> None:
    crashed = make_crashed(tmp_path / "crashed")
    n = failures = 0
    while n == failures:
        root = tmp_path / f"{n}" / "log"
        shutil.copytree(crashed, root)
        before = open_files()
        files = FailAt(n, errno.ENOSPC)
        with contextlib.suppress(KeyfoldError):
            call(root, files)
        assert open_files() - before == set(), f"operation {n}"
        failures += files.failed
        n += 1
    assert failures > 10
