"""Every fault, at every moment, for every kind of job: the end equals an oracle over the raw events.

A life that ends at a moment is led once, and each fault is done to a copy of what it left. `make soak` takes
all four kinds through all cells; other runs one through each, so that every fault and every moment meets
every kind, beginning with another one in each run. Real kills of Python and JVM are in `test_real_kills`.
"""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("google.protobuf")

from support.matrix import (
    FAULTS,
    KINDS,
    MOMENTS,
    Event,
    Job,
    Moment,
    at_batch,
    unharmed,
    while_restoring,
    write_events,
)
from support.session import stateful_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENTS = 110
_RESTORING = "during restore"
#: Which kind begins in this run.
_FIRST_KIND = random.SystemRandom().randrange(len(KINDS))


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    return stateful_session(spark)


def live(jobs: list[Job], session: SparkSession, moment: Moment) -> None:
    """One life of all jobs; with a moment to die at, all of them die."""
    # Spark gives the Python of each query's source ten seconds to start: all of them at once would be late.
    for pair in (jobs[:2], jobs[2:]):
        for job in pair:
            job.start(session, moment)
        for job in pair:
            job.wait_until_begun()
    died = [job.end() for job in jobs]
    assert died == [moment is not unharmed] * len(jobs)


@pytest.fixture(scope="module")
def first_life(
    session: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, list[Event]]]:
    """What jobs of all kinds leave that have died at a moment, and the events they followed."""

    @functools.cache
    def lead(moment: str) -> tuple[Path, list[Event]]:
        root = tmp_path_factory.mktemp("first-life")
        seed = random.SystemRandom().randrange(2**32)
        print(f"seed of the events {seed}")
        events = write_events(root / "events", random.Random(seed), EVENTS)
        live([Job(kind, root, root / "events") for kind in KINDS], session, MOMENTS[moment])
        return root, events

    return lead


@pytest.mark.parametrize("moment", [*MOMENTS, _RESTORING])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_ends_equal_to_the_oracle(
    session: SparkSession,
    first_life: Callable[[str], tuple[Path, list[Event]]],
    tmp_path: Path,
    soak: bool,
    fault: str,
    moment: str,
) -> None:
    root, events = first_life("mid-batch" if moment == _RESTORING else moment)
    turn = _FIRST_KIND + [*FAULTS].index(fault) + [*MOMENTS, _RESTORING].index(moment)
    kinds = KINDS if soak else KINDS[turn % len(KINDS) :][:1]
    print(f"kinds: {', '.join(kind.name for kind in kinds)}")
    jobs = [Job(kind, tmp_path, root / "events") for kind in kinds]
    for job in jobs:
        shutil.copytree(root / job.kind.name, tmp_path / job.kind.name)
        FAULTS[fault](job)
    session.conf.set("spark.sql.shuffle.partitions", 3 if fault == "partitions changed" else 2)
    if moment == _RESTORING:
        operation = random.SystemRandom().randrange(12)
        print(f"killed at operation {operation}")
        live(jobs, session, at_batch(0, while_restoring(operation)))
    live(jobs, session, unharmed)
    session.conf.set("spark.sql.shuffle.partitions", 2)
    for job in jobs:
        job.check(events)
