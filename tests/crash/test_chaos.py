"""Processes that take one changelog from each other, are stopped and woken at random moments, and have their
directories moved, removed and made again: whatever was acknowledged is there, and nothing is damaged.

A failure names its seed; `SOAK_SEED` runs it again, with the same moments as far as the machine's own timing
allows.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from keyfold import Changelog, restore
from keyfold.checkpoints.verify.verify import verify
from support import thieves
from support.folds import IN_MEMORY
from support.soaking import Soak, in_rounds

#: Of a round.
SECONDS, SOAK_SECONDS = 12, 60


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY or tmp_path) as directory:
        yield Path(directory)


@contextmanager
def running(
    path: Path, reports: list[Path], seed: int, *, moved: bool
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that live until the context is left, and are killed then, stopped or not."""
    processes = [thieves.start(path, report, f"{seed}/{n}", moved=moved) for n, report in enumerate(reports)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def stop_and_wake(processes: list[subprocess.Popen[bytes]], draw: random.Random, seconds: float) -> None:
    """For so long: stop one, let the others go on, wake it; sometimes stop two at once."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        chosen = draw.sample(processes, draw.choice((1, 1, 2)))
        time.sleep(draw.expovariate(1 / 0.05))
        for process in chosen:
            process.send_signal(signal.SIGSTOP)
        time.sleep(draw.expovariate(1 / 0.3))
        for process in chosen:
            process.send_signal(signal.SIGCONT)


def check(path: Path, acknowledged: set[str], seed: int) -> None:
    """As it was left, and once more after it was opened."""
    for _ in range(2):
        state = restore(path).to_dict()
        missing = {key for key in acknowledged if state.get(key.encode()) != key.encode()}
        assert not missing, f"seed {seed}: {sorted(missing)[:5]} of {len(acknowledged)} are missing"
        damages = list(verify(path).damages)
        assert not damages, f"seed {seed}: {damages[:3]}"
        with Changelog.open(path) as log:
            assert dict(log.store().all()) == state, f"seed {seed}: the last values differ from the log"


def test_three_processes_that_steal_from_each_other_lose_nothing(place: Path, soak: bool) -> None:
    def steal(seed: int, figures: Soak) -> None:
        root = place / str(seed)
        root.mkdir()
        path, reports = root / "log", [root / f"report-{n}" for n in range(3)]
        Changelog.open(path, partitions=2, config=thieves.CONFIG).close()
        with running(path, reports, seed, moved=False) as processes:
            stop_and_wake(processes, random.Random(seed), SOAK_SECONDS if soak else SECONDS)
        acknowledged, faults = thieves.told(reports)
        figures.count("commits of processes that steal from each other", sum(map(len, acknowledged.values())))
        assert not faults, f"seed {seed}: {faults[0]}"
        (keys,) = acknowledged.values()
        check(path, keys, seed)
        shutil.rmtree(root)

    in_rounds("chaos-of-thieves", 0.05, steal, soak=soak)


def identity_of(path: Path) -> str | None:
    try:
        return str(json.loads((path / "changelog.json").read_bytes())["uuid"])
    except (OSError, ValueError):
        return None


class Mover:
    """Moves, removes and makes again what is at `path`, and remembers which changelogs it has removed."""

    def __init__(self, path: Path, draw: random.Random) -> None:
        self._path = path
        self._draw = draw
        self._number = 0
        self.removed: set[str | None] = set()

    def work(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        acts = (self.move, self.move, self.move_back, self.remove, self.remove_in_place, self.make)
        while time.monotonic() < until:
            time.sleep(self._draw.expovariate(1 / 0.2))
            with suppress(FileNotFoundError, FileExistsError):
                self._draw.choice(acts)()

    def aside(self) -> list[Path]:
        return sorted(self._path.parent.glob("aside-*"))

    def move(self) -> Path:
        self._number += 1
        target = self._path.with_name(f"aside-{self._number}")
        self._path.rename(target)
        return target

    def move_back(self) -> None:
        """What is at the path goes aside, and something from there comes in its place."""
        if aside := self.aside():
            with suppress(FileNotFoundError):
                self.move()
            with suppress(OSError):
                self._draw.choice(aside).rename(self._path)

    def remove(self) -> None:
        gone = self.move()
        self.removed.add(identity_of(gone))
        shutil.rmtree(gone)

    def remove_in_place(self) -> None:
        """As `rm -rf` does it: one name after the other, under whoever writes there."""
        found = identity_of(self._path)
        if found is not None:
            self.removed.add(found)
            shutil.rmtree(self._path, ignore_errors=True)

    def make(self) -> None:
        self._path.mkdir()


def test_directories_that_are_moved_removed_and_made_again_lose_nothing_else(place: Path, soak: bool) -> None:
    """What was acknowledged is in its changelog, wherever that is now, unless it was removed as a whole."""

    def move(seed: int, figures: Soak) -> None:
        root = place / str(seed)
        root.mkdir()
        path, reports = root / "log", [place / f"report-{seed}-{n}" for n in range(2)]
        mover = Mover(path, random.Random(seed))
        with running(path, reports, seed, moved=True):
            mover.work(SOAK_SECONDS if soak else SECONDS)
        acknowledged, faults = thieves.told(reports)
        figures.count("commits to directories that are moved", sum(map(len, acknowledged.values())))
        assert not faults, f"seed {seed}: {faults[0]}"
        left = {uuid: p for p in (path, *mover.aside()) if (uuid := identity_of(p)) is not None}
        lost = set(acknowledged) - set(left) - mover.removed
        assert not lost, f"seed {seed}: {lost} are nowhere, and were not removed"
        for uuid in left.keys() - mover.removed:
            check(left[uuid], acknowledged.get(uuid, set()), seed)
        assert acknowledged.keys() & left.keys() - mover.removed or mover.removed
        shutil.rmtree(root)

    in_rounds("chaos-of-directories", 0.05, move, soak=soak)
