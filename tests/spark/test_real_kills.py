"""A real PySpark job killed with -9, Python and JVM, at random moments, and started again until it is
through.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from keyfold import Changelog, restore
from keyfold.statestore.errors import KeyfoldError
from support import killed_job
from support.soaking import Soak, in_rounds
from support.waiting import eventually

TESTS = Path(__file__).resolve().parent.parent
#: In one history, at most.
KILLS, SOAK_KILLS = 4, 10


def commits(path: Path) -> int:
    try:
        with Changelog.open(path, mode="r") as log:
            return log.state.next_commit - 1
    except KeyfoldError:
        return 0


def started(root: Path, java: str) -> subprocess.Popen[bytes]:
    """A job with a group of processes of its own. `java` are options for its JVM."""
    java = f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} {java}"
    environment = {
        **os.environ, "PYTHONPATH": str(TESTS), "PYSPARK_PYTHON": sys.executable, "SPARK_SUBMIT_OPTS": java,
    }  # fmt: skip
    with open(root / "job.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "support.killed_job", str(root)], cwd=root, env=environment,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def archived(root: Path) -> str:
    """Options for a JVM that finds Spark's classes in an archive: its start takes half as long.

    A whole life makes that archive, or none where this Java cannot.
    """
    root.mkdir()
    killed_job.write_files(root, 0)
    archive = root / "classes.jsa"
    job = started(root, f"-XX:ArchiveClassesAtExit={archive}")
    assert job.wait(timeout=240) == 0, (root / "job.log").read_text()[-4000:]
    # The JVM writes it when it ends, and lives longer than the job.
    eventually(lambda: not is_alive(job.pid), 120)
    return f"-XX:SharedArchiveFile={archive}" if archive.exists() else ""


def is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def run(root: Path, kill: random.Random | None, java: str = "") -> int | None:
    """One life of the job: to its end, or until it is killed some commits and a fraction of a second
    later.
    """
    job = started(root, java)
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
    java = archived(tmp_path / "archive") if soak else ""

    def once(seed: int, figures: Soak) -> None:
        root = tmp_path / str(seed)
        root.mkdir()
        kill(root, seed, SOAK_KILLS if soak else KILLS, figures, java)
        shutil.rmtree(root)

    in_rounds("kills-of-a-query", 0.42, once, soak=soak)


def kill(root: Path, seed: int, kills: int, figures: Soak, java: str) -> None:
    """One history, with kills until it is over, or there are enough."""
    told = f"SOAK_SEED={seed}"
    draw = random.Random(seed)
    files = killed_job.write_files(root, seed)
    for _ in range(kills):
        code = run(root, draw, java)
        if code is not None:
            assert code == 0, (root / "job.log").read_text()[-4000:]
            break
        figures.count("kills of a PySpark query")
    assert run(root, None, java) == 0, (root / "job.log").read_text()[-4000:]
    assert restore(root / "last").to_dict() == killed_job.expected_last(files), told
    assert restore(root / "sums").to_dict() == killed_job.expected_sums(files), told
    with Changelog.open(root / "last") as log:
        assert len(dict(log.store().all())) == len(killed_job.expected_last(files))
        # one commit for each batch: none twice, none left out
        assert log.state.next_commit - 1 == (log.last_batch("last") or 0) + 1
