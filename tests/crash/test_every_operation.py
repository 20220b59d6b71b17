"""A kill, a failing disk, a power loss at every single file operation of appends, cleaner passes and
openings.

Crash states as numbered in docs/format.md: C1 to C4, O1 to O3, S1 and S2 all occur among them.
"""

from __future__ import annotations

import errno
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from keyfold.checkpoints.log import writer
from keyfold.statestore.errors import KeyfoldError
from support.faults.inject import FailAt, KillAt, Killed, Operation, changes
from support.faults.powerloss import Disk, PowerLoss
from support.folds import IN_MEMORY
from support.lifecycle import BATCHES, bury, fault_in, live


@pytest.fixture(autouse=True)
def short_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal is rolled after some lines, so that its operations are among those that fail."""
    monkeypatch.setattr(writer, "_JOURNAL_BYTES", 2500)
    monkeypatch.setattr(writer, "_JOURNAL_CHECKPOINTS", 1)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """In memory where it can be: no sync here reaches a disk, and thousands of files are made and removed."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY or tmp_path) as made:
        yield Path(made)


def of_the_log(operation: Operation) -> bool:
    """Last-value stores are made by a thread of their own, at no certain time, and count for nothing."""
    return changes(operation) and "store-" not in str(operation.path)


def thinned(count: int, every: int, soak: bool) -> range:
    """All of 0 to `count`, or every so many from a start that is drawn and printed.

    Args:
        every: an odd number, or those that are multiples of 8 may never be among them.
    """
    assert every % 2, every
    start = 0 if soak else random.randrange(every)
    print(f"from {start}, every {1 if soak else every}")
    return range(start, count, 1 if soak else every)


def operations(place: Path) -> int:
    files = KillAt(only=of_the_log)
    live(files, place / "counted", lambda batch: None)
    return files.count


@pytest.mark.parametrize("halfway", [False, True], ids=["before", "halfway"])
def test_a_kill_at_any_operation_leaves_whole_batches_and_none_that_was_told_is_lost(
    place: Path, halfway: bool, soak: bool
) -> None:
    count = operations(place)
    assert count > 150
    for n in thinned(count, 7 if halfway else 3, soak):
        told: list[int] = []
        files = KillAt(n, halfway=halfway, only=of_the_log)
        path = place / f"life-{n}"
        with suppress(Killed):
            live(files, path, told.append)
        bury(files)
        fault = fault_in(path, told, last_values=n % 8 == 0)
        assert fault is None, f"killed at operation {n}: {fault}"
        shutil.rmtree(path)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
def test_a_disk_that_fails_at_any_operation_loses_nothing_that_was_told(
    place: Path, error: int, forever: bool, soak: bool
) -> None:
    for n in thinned(operations(place), 13, soak):
        told: list[int] = []
        files = FailAt(n, error, forever=forever, halfway=True, only=of_the_log)
        path = place / f"life-{n}"
        with suppress(KeyfoldError):
            live(files, path, told.append)
        bury(files)
        fault = fault_in(path, told, last_values=n % 8 == 0)
        assert fault is None, f"failed at operation {n}: {fault}"
        shutil.rmtree(path)


def test_a_power_loss_at_any_moment_leaves_whole_batches_and_none_that_was_told_is_lost(
    place: Path, soak: bool
) -> None:
    (place / "disk").mkdir()
    disk = Disk(place / "disk", ignored=("store-", "lock", "readers"))
    live(PowerLoss(disk), disk.base / "log", lambda batch: disk.mark(str(batch)))
    assert disk.unrecorded() == []
    checked = 0
    # tests/soak/test_power_losses.py has all of them, for other lives.
    chosen = thinned(1 << 20, 5 if soak else 11, False)
    for number, state in enumerate(disk.states(place / "states", seeds=(1,), apart=soak)):
        # the first states, those of the creation, are all different in kind
        if number > 120 and number not in chosen:
            continue
        fault = fault_in(state.path / "log", [int(m) for m in state.marks], last_values=checked % 20 == 0)
        assert fault is None, f"{state}: {fault}"
        checked += 1
    assert checked > 2 * BATCHES
