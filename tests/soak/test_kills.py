"""Writers in processes of their own, killed with -9 at random moments of random lives."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from support.faults.inject import QUICK
from support.folds import IN_MEMORY
from support.life_server import STEPS, LifeServer
from support.lived import Life
from support.soaking import Soak
from support.waiting import eventually

pytestmark = pytest.mark.soak

#: What most lives take on a quiet machine, so that the kills are anywhere in them, and sometimes after one.
_SECONDS_MAX = 0.2


def test_a_writer_killed_at_any_moment_has_lost_nothing_that_it_had_acknowledged() -> None:
    with Soak("kills", share=0.1) as soak, LifeServer() as server:
        for seed in soak.rounds():
            directory = Path(tempfile.mkdtemp(dir=IN_MEMORY))
            try:
                pid = server.start(seed, directory / "log", directory / "told")
                kill(pid, directory / "told", random.Random(seed))
                code = server.wait()
                assert code in (0, -signal.SIGKILL), f"seed {seed}: exit code {code}"
                soak.count("kills of a writer", code != 0)
                look(seed, directory)
            finally:
                shutil.rmtree(directory)


def kill(pid: int, told: Path, draw: random.Random) -> None:
    eventually(told.exists)
    time.sleep(draw.uniform(0, _SECONDS_MAX))
    # Who has come to its end is reaped by the server that forked it.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def look(seed: int, directory: Path) -> None:
    steps = [int(line) for line in (directory / "told").read_text().split() if line.isdigit()]
    # The same life again, for what is right after each step.
    life = Life(seed, STEPS)
    life.live(QUICK, directory / "again")
    fault = life.fault_in(QUICK, directory / "log", steps[-1] if steps else -1)
    assert fault is None, f"seed {seed}: {fault}"
