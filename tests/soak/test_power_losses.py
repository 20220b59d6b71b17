"""A power loss at every moment of random lives, each with all corners of what a disk may have kept."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from faults import QUICK
from keyfold.checkpoints.verify import verify
from powerloss import Disk, PowerLoss
from support.folds import IN_MEMORY
from support.lived import Life
from support.soaking import Soak

pytestmark = pytest.mark.soak

#: Verifying takes as long as all the rest.
_VERIFIED_EVERY = 20


@pytest.mark.parametrize("part", [1, 2])
def test_no_power_loss_takes_back_what_was_acknowledged(part: int) -> None:
    with Soak(f"power-losses-{part}", share=0.3) as soak:
        for seed in soak.rounds():
            directory = Path(tempfile.mkdtemp(dir=IN_MEMORY))
            try:
                lose_power(Life(seed), directory, soak, seed)
            finally:
                shutil.rmtree(directory)


def lose_power(life: Life, directory: Path, soak: Soak, seed: int) -> None:
    (directory / "disk").mkdir()
    # What a pass keeps in `work` while it runs counts for nothing, and is large.
    disk = Disk(directory / "disk", ignored=("store-", "lock", "readers", "cleaner-"))
    life.live(PowerLoss(disk), disk.base / "log", lambda step: disk.mark(str(step)))
    assert disk.unrecorded() == []
    soak.count("random lives that lost power")
    for number, state in enumerate(disk.states(directory / "states", seeds=(seed, seed + 1))):
        told = int(state.marks[-1]) if state.marks else -1
        fault = life.fault_in(QUICK, state.path / "log", told)
        assert fault is None, f"seed {seed}: {state}: {fault}"
        if number % _VERIFIED_EVERY == 0 and told >= 0:
            assert verify(state.path / "log", files=QUICK).damages == [], f"seed {seed}: {state}"
        soak.count("power-loss states")
        if soak.is_over:
            return
