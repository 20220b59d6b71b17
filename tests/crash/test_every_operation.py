"""A kill, a failing disk, a power loss at every single file operation of appends, cleaner passes and
openings.

Crash states as numbered in docs/format.md: C1 to C4, O1 to O3, S1 and S2 all occur among them.
"""

from __future__ import annotations

import errno
import random
from contextlib import suppress
from pathlib import Path

import pytest

from faults import FailAt, KillAt, Killed, Operation, changes
from keyfold.checkpoints import writer
from keyfold.statestore.errors import KeyfoldError
from powerloss import Disk, PowerLoss
from support.lives import BATCHES, bury, fault_in, live


@pytest.fixture(autouse=True)
def short_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal is rolled after some lines, so that its operations are among those that fail."""
    monkeypatch.setattr(writer, "_JOURNAL_BYTES", 2500)
    monkeypatch.setattr(writer, "_JOURNAL_CHECKPOINTS", 1)


def of_the_log(operation: Operation) -> bool:
    """Last-value stores are made by a thread of their own, at no certain time, and count for nothing."""
    return changes(operation) and "store-" not in str(operation.path)


def thinned(count: int, every: int, soak: bool) -> range:
    """All of 0 to `count`, or every so many from a start that is drawn and printed."""
    start = 0 if soak else random.randrange(every)
    print(f"from {start}, every {1 if soak else every}")
    return range(start, count, 1 if soak else every)


def operations(tmp_path: Path) -> int:
    files = KillAt(only=of_the_log)
    live(files, tmp_path / "counted", lambda batch: None)
    return files.count


@pytest.mark.parametrize("halfway", [False, True], ids=["before", "halfway"])
def test_a_kill_at_any_operation_leaves_whole_batches_and_none_that_was_told_is_lost(
    tmp_path: Path, halfway: bool, soak: bool
) -> None:
    count = operations(tmp_path)
    assert count > 150
    for n in thinned(count, 2 if halfway else 1, soak):
        told: list[int] = []
        files = KillAt(n, halfway=halfway, only=of_the_log)
        path = tmp_path / f"life-{n}"
        with suppress(Killed):
            live(files, path, told.append)
        bury(files)
        fault = fault_in(path, told, last_values=n % 8 == 0)
        assert fault is None, f"killed at operation {n}: {fault}"


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
def test_a_disk_that_fails_at_any_operation_loses_nothing_that_was_told(
    tmp_path: Path, error: int, forever: bool, soak: bool
) -> None:
    for n in thinned(operations(tmp_path), 6, soak):
        told: list[int] = []
        files = FailAt(n, error, forever=forever, halfway=True, only=of_the_log)
        path = tmp_path / f"life-{n}"
        with suppress(KeyfoldError):
            live(files, path, told.append)
        bury(files)
        fault = fault_in(path, told, last_values=n % 8 == 0)
        assert fault is None, f"failed at operation {n}: {fault}"


def test_a_power_loss_at_any_moment_leaves_whole_batches_and_none_that_was_told_is_lost(
    tmp_path: Path, soak: bool
) -> None:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk", ignored=("store-", "lock", "readers"))
    live(PowerLoss(disk), disk.base / "log", lambda batch: disk.mark(str(batch)))
    assert disk.unrecorded() == []
    checked = 0
    chosen = thinned(1 << 20, 4, soak)
    for number, state in enumerate(disk.states(tmp_path / "states", seeds=(1,), apart=soak)):
        # the first states, those of the creation, are all different in kind
        if number > 120 and number not in chosen:
            continue
        fault = fault_in(state.path / "log", [int(m) for m in state.marks], last_values=checked % 20 == 0)
        assert fault is None, f"{state}: {fault}"
        checked += 1
    assert checked > 2 * BATCHES
