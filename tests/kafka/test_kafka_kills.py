"""A real PySpark job that reads a topic, killed with -9, Python and JVM, at random moments; between two lives
it may lose its checkpoints, and the topic gets more records and partitions.
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

import pytest

pytest.importorskip("pyspark")

from keyfold import Changelog, restore
from keyfold.statestore.errors import KeyfoldError
from support.kafka_job import NAMES
from support.kafka_topics import Sent, Topics
from support.soaking import Soak, in_rounds

# kafka-python reads its schemas in a way that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*_text is deprecated:DeprecationWarning")

TESTS = Path(__file__).resolve().parent.parent
RECORDS = 240
KEYS = 40
#: In one history.
KILLS_OF_SOAK = 8


def produce(topics: Topics, topic: str, draw: random.Random, partitions: int) -> None:
    """A key is always in the same one of the first three partitions, or in the last."""
    records = []
    for _ in range(RECORDS):
        key = draw.randrange(KEYS)
        value = None if draw.random() < 0.1 else b"%d" % draw.randrange(1000)
        own = key % 3 if partitions == 3 or key % 7 else partitions - 1
        records.append(Sent(own, b"k%d" % key, value, (("n", b"%d" % key),) * draw.randrange(3)))
    topics.send(topic, *records)


def commits(root: Path) -> int:
    done = 0
    for name in NAMES:
        try:
            with Changelog.open(root / name, mode="r") as log:
                done += log.state.next_commit - 1
        except KeyfoldError:
            pass
    return done


def run(root: Path, arguments: list[str], kill: random.Random | None) -> int | None:
    """One life of the job: to its end, or until it is killed some commits and a fraction of a second
    later.
    """
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYSPARK_PYTHON": sys.executable}
    with open(root / "job.log", "ab") as log:
        job = subprocess.Popen(
            [sys.executable, "-m", "support.kafka_job", str(root), *arguments], cwd=root, env=environment,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            if kill is None:
                return job.wait(timeout=240)
            until = commits(root) + kill.choice((0, 1, 2, 4))
            deadline = time.monotonic() + 120
            while job.poll() is None and time.monotonic() < deadline and commits(root) <= until:
                time.sleep(0.02)
            time.sleep(kill.random() * 0.6)
            return job.poll()
        finally:
            try:
                os.killpg(job.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            job.wait()


def test_a_job_killed_at_random_moments_takes_every_record_once(
    topics: Topics, tmp_path: Path, soak: bool
) -> None:
    def once(seed: int, figures: Soak) -> None:
        root = tmp_path / str(seed)
        root.mkdir()
        kill(topics, root, seed, KILLS_OF_SOAK if soak else 2, figures)

    in_rounds("kills-of-a-kafka-query", 0.05, once, soak=soak)


def kill(topics: Topics, root: Path, seed: int, kills: int, figures: Soak) -> None:
    draw = random.Random(seed)
    topic, partitions = topics.make(f"killed-{seed}"), 3
    produce(topics, topic, draw, partitions)
    log = root / "job.log"
    for number in range(kills):
        code = run(root, [topics.address, topic], draw)
        assert code in (None, 0), log.read_text()[-4000:]
        figures.count("kills of a PySpark query", code is None)
        for name in NAMES:
            # The first time for certain: what is tested is the loss.
            if number == 0 or draw.random() < 0.3:
                shutil.rmtree(root / f"checkpoint-{name}", ignore_errors=True)
        if number % 4 == 0:
            partitions += 1
            topics.grow(topic, partitions)
        produce(topics, topic, draw, partitions)
    assert run(root, [topics.address, topic], None) == 0, log.read_text()[-4000:]
    told = f"SOAK_SEED={seed}"
    counts = {word: row["n"] for word, row in restore(root / "counts").to_dict().items()}
    assert counts == topics.counted(topic), told
    expected = {key: sent.value for key, sent in topics.last(topic).items()}
    assert restore(root / "records").to_dict() == expected, told
    with Changelog.open(root / "records") as opened:
        assert sum(opened.end_offsets().values()) == len(topics.sent[topic]), told
    topics.remove(topic)
