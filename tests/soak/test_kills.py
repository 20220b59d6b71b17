"""Writers in processes of their own, killed with -9 at random moments of random lives."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from faults import QUICK
from support.folds import IN_MEMORY
from support.lived import Life, live_and_tell
from support.soaking import Soak
from support.waiting import eventually

pytestmark = pytest.mark.soak

#: Longer than a life takes on a quiet machine, so that the kills are anywhere in it, and sometimes after it.
_SECONDS_MAX = 0.25


def test_a_writer_killed_at_any_moment_has_lost_nothing_that_it_had_acknowledged() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["keyfold.checkpoints", "support.lived"])
    with Soak("kills", share=0.15) as soak:
        for seed in soak.rounds():
            directory = Path(tempfile.mkdtemp(dir=IN_MEMORY))
            try:
                (directory / "told").touch()
                process = context.Process(
                    target=live_and_tell, args=(seed, str(directory / "log"), str(directory / "told"))
                )
                process.start()
                kill(process.pid, directory / "told", random.Random(seed))
                process.join()
                soak.count("kills of a writer", process.exitcode == -signal.SIGKILL)
                look(seed, directory)
            finally:
                shutil.rmtree(directory)


def kill(pid: int | None, told: Path, draw: random.Random) -> None:
    assert pid is not None
    eventually(lambda: bool(told.read_text()))
    time.sleep(draw.uniform(0, _SECONDS_MAX))
    # Who has come to its end is reaped by the server that forked it.
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def look(seed: int, directory: Path) -> None:
    steps = [int(line) for line in (directory / "told").read_text().split() if line.isdigit()]
    # The same life again, for what is right after each step.
    life = Life(seed)
    life.live(QUICK, directory / "again")
    fault = life.fault_in(QUICK, directory / "log", steps[-1] if steps else -1)
    assert fault is None, f"seed {seed}: {fault}"
