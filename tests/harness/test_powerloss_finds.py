"""What the model of a power loss finds in a toy log, and what kills and single failures add to it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from support.faults.inject import QUICK, KillAt, Killed, on
from support.faults.powerloss import Disk, FailingPowerLoss, KilledPowerLoss, PowerLoss
from support.faults.toy_log import BUGS, RETRYING, TRUSTING, Told, ToyLog, fault_in, run


def faults_after_power_loss(tmp_path: Path, disk: Disk, seeds: tuple[int, ...] = ()) -> list[str]:
    assert disk.unrecorded() == []
    return [
        f"{what}: {state}"
        for state in disk.states(tmp_path / "states", seeds=seeds)
        if (what := fault_in(QUICK, state.path / "log", [int(m) for m in state.marks]))
    ]


def new_disk(tmp_path: Path) -> tuple[Disk, Told]:
    """A disk, and what marks the numbers on it that the world was told."""
    (tmp_path / "disk").mkdir(parents=True)
    disk = Disk(tmp_path / "disk")
    return disk, lambda number: disk.mark(f"{number}")


def test_the_right_log_survives_a_power_loss_at_every_moment(tmp_path: Path) -> None:
    disk, told = new_disk(tmp_path)
    run(PowerLoss(disk), disk.base / "log", told)
    assert faults_after_power_loss(tmp_path, disk, seeds=tuple(range(5))) == []


@pytest.mark.parametrize("bug", BUGS)
def test_each_planted_fault_is_found_without_luck(tmp_path: Path, bug: str) -> None:
    """Without seeds: the corners and the single changes find all five; kills alone find one of them."""
    disk, told = new_disk(tmp_path)
    run(PowerLoss(disk), disk.base / "log", told, bug)
    assert faults_after_power_loss(tmp_path, disk) != []


def test_the_record_is_right_after_a_kill_or_an_error_in_the_middle_of_any_operation(tmp_path: Path) -> None:
    counting = KillAt()
    (tmp_path / "counting").mkdir()
    run(counting, tmp_path / "counting" / "log", lambda number: None)
    for n in range(counting.count):
        disk, told = new_disk(tmp_path / f"killed-{n}")
        killed = KilledPowerLoss(disk, n, halfway=True)
        with pytest.raises(Killed):
            run(killed, disk.base / "log", told)
        killed.release()
        assert disk.unrecorded() == []
        disk, told = new_disk(tmp_path / f"failed-{n}")
        with pytest.raises(OSError, match="No space"):
            run(FailingPowerLoss(disk, n, errno.ENOSPC, halfway=True), disk.base / "log", told)
        assert disk.unrecorded() == []


@pytest.mark.parametrize(("bug", "found"), [(None, False), (TRUSTING, True)])
def test_a_kill_and_then_a_power_loss_find_who_trusts_the_page_cache(
    tmp_path: Path, bug: str | None, found: bool
) -> None:
    """The first life dies before a journal's sync; the second reads the line and says that it is durable."""
    selected = on("sync", path="*/journal-*")
    faults = []
    for n in range(3):
        disk, told = new_disk(tmp_path / f"{n}")
        files = KilledPowerLoss(disk, n, only=selected)
        with pytest.raises(Killed):
            run(files, disk.base / "log", told, bug)
        files.release()
        ToyLog(PowerLoss(disk), disk.base / "log", told, bug).close()
        faults += faults_after_power_loss(tmp_path / f"{n}", disk)
    assert bool(faults) == found


@pytest.mark.parametrize(("bug", "found"), [(None, False), (RETRYING, True)])
def test_a_failed_sync_and_then_a_power_loss_find_who_tries_again(
    tmp_path: Path, bug: str | None, found: bool
) -> None:
    faults = []
    for n in range(3):
        disk, told = new_disk(tmp_path / f"{n}")
        files = FailingPowerLoss(disk, n, errno.EIO, only=on("sync", path="*/journal-*"))
        try:
            run(files, disk.base / "log", told, bug)
        except OSError:
            assert bug is None
        assert files.failed == 1
        faults += faults_after_power_loss(tmp_path / f"{n}", disk)
    assert bool(faults) == found
