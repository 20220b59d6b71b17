"""A real PySpark job killed with -9, Python and JVM, at random moments, and started again until it is
through.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from keyfold.checkpoints import Changelog, restore
from keyfold.statestore.errors import KeyfoldError
from support import killed_job
from support.soaking import Soak

TESTS = Path(__file__).resolve().parent.parent


def commits(path: Path) -> int:
    try:
        with Changelog.open(path, mode="r") as log:
            return log.state.next_commit - 1
    except KeyfoldError:
        return 0


def run(root: Path, kill: random.Random | None) -> int | None:
    """One life of the job: to its end, or until it is killed some commits and a fraction of a second
    later.
    """
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYSPARK_PYTHON": sys.executable}
    with open(root / "job.log", "ab") as log:
        job = subprocess.Popen(
            [sys.executable, "-m", "support.killed_job", str(root)], cwd=root, env=environment,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            if kill is None:
                return job.wait(timeout=240)
            until = commits(root / "last") + commits(root / "sums") + kill.choice((0, 1, 2, 3, 5))
            deadline = time.monotonic() + 120
            while job.poll() is None and time.monotonic() < deadline:
                if commits(root / "last") + commits(root / "sums") > until:
                    break
                time.sleep(0.02)
            time.sleep(kill.random() * 0.6)
            return job.poll()
        finally:
            try:
                os.killpg(job.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            job.wait()


def test_a_job_killed_at_random_moments_ends_equal_to_the_oracle(tmp_path: Path, soak: bool) -> None:
    """With `make soak` it goes on for its share of the time; 100 kills are what an hour should see.

    Elsewhere there are few: each costs a start of Spark, which takes longer than all that is killed.
    """
    if not soak:
        kill(tmp_path, random.SystemRandom().randrange(2**32), lambda done: done >= 4)
        return
    with Soak("kills-of-a-query", share=0.35) as figures:
        for seed in figures.rounds():
            kill(tmp_path / str(seed), seed, lambda done: done >= 10 or figures.is_over, figures)


def kill(path: Path, seed: int, is_enough: Callable[[int], bool], figures: Soak | None = None) -> None:
    """Histories one after another, with kills in between, until there are enough."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    done = 0
    history = 0
    while not is_enough(done):
        root = path / str(history)
        root.mkdir(parents=True)
        files = killed_job.write_files(root, seed + history)
        while not is_enough(done):
            code = run(root, draw)
            if code is not None:
                assert code == 0, (root / "job.log").read_text()[-4000:]
                break
            done += 1
            if figures is not None:
                figures.count("kills of a PySpark query")
        assert run(root, None) == 0, (root / "job.log").read_text()[-4000:]
        assert restore(root / "last").to_dict() == killed_job.expected_last(files), f"seed {seed}"
        assert restore(root / "sums").to_dict() == killed_job.expected_sums(files), f"seed {seed}"
        with Changelog.open(root / "last") as log:
            assert len(dict(log.store().all())) == len(killed_job.expected_last(files))
            # one commit for each batch: none twice, none left out
            assert log.state.next_commit - 1 == (log.last_batch("last") or 0) + 1
        history += 1
