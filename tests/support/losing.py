"""A life that loses its power, and what is left of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.files import Files
from support.faults.inject import QUICK
from support.faults.powerloss import Disk, Left, PowerLoss, tree_of, written
from support.in_memory import InMemory
from support.lived import Life, Stated, stated
from support.soaking import Soak

#: Verifying takes longer than all the rest.
_VERIFIED_EVERY = 4
#: How often what is left is written to a real directory as well, where the same must come of it.
_REAL_EVERY = 200

_LOG: Final = InMemory.ROOT / "log"


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
    looked = Looked(life)
    for number, left in enumerate(disk.left(seeds=(seed, seed + 1))):
        fault = looked.fault_in(left)
        assert fault is None, f"seed {seed}: {left}: {fault}"
        if number % _REAL_EVERY == 0:
            assert looked.as_on_disk(left, directory / "real"), f"seed {seed}: {left}: not as on a disk"
            soak.count("power-loss states that were looked at on a disk, too")
        soak.count("power-loss states")
        if soak.is_over:
            break
    soak.count("power-loss states, different ones after recovery", looked.different)


class Looked:
    """What was seen of all that is left of one life.

    Each is recovered. What is there then is read and folded, and some of it verified; where all names and
    bytes are as they were once before, that was done already.
    """

    def __init__(self, life: Life) -> None:
        self._life = life
        self._states: dict[bytes, Stated] = {}

    @property
    def different(self) -> int:
        return len(self._states)

    def fault_in(self, left: Left) -> str | None:
        files = InMemory(left.tree)
        told = int(left.marks[-1]) if left.marks else -1
        return self._life.fault_in(files, _LOG, told, lambda: self._read(files))

    def _read(self, files: InMemory) -> Stated:
        digest = files.digest()
        if digest not in self._states:
            if len(self._states) % _VERIFIED_EVERY == 0:
                damages = verify(_LOG, files=files).damages
                assert damages == [], damages
            self._states[digest] = stated(files, _LOG)
        return self._states[digest]

    def as_on_disk(self, left: Left, directory: Path) -> bool:
        """Whether the same is recovered on a real disk, name by name and byte by byte."""
        written(left.tree, directory)
        files = InMemory(left.tree)
        told = int(left.marks[-1]) if left.marks else -1
        try:
            faults = [
                self._life.fault_in(f, p / "log", told) for f, p in ((files, files.ROOT), (QUICK, directory))
            ]
            return faults == [None, None] and InMemory(tree_of(directory)).digest() == files.digest()
        finally:
            shutil.rmtree(directory)
