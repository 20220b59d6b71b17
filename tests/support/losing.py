"""A life that loses its power, and what is left of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from faults import QUICK
from keyfold.checkpoints.verify import verify
from keyfold.statestore.files import Files
from powerloss import Disk, PowerLoss
from support.lived import Life
from support.soaking import Soak

#: Verifying takes as long as all the rest.
_VERIFIED_EVERY = 20


def lose_power(
    life: Life,
    directory: Path,
    soak: Soak,
    seed: int,
    watched: Callable[[Disk], Files] = PowerLoss,
) -> None:
    """Live it, and look at every state that a loss at any moment may leave."""
    (directory / "disk").mkdir()
    # What a pass keeps in `work` while it runs counts for nothing, and is large.
    disk = Disk(directory / "disk", ignored=("store-", "lock", "readers", "cleaner-"))
    life.live(watched(disk), disk.base / "log", lambda step: disk.mark(str(step)))
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
