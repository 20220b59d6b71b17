"""What a changelog of many partitions costs: opening, commits to all of them, gets, closing, descriptors.

    python benchmarks/_partitions.py [--partitions 1000] [--directory DIR] [--commits 5]

Each figure is shown for one partition, for many, and beside what the disk alone takes: as many files written
and synced, one after the other. `benchmarks/growth.py` calls `measure`.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from keyfold import Changelog

_RECORD_BYTES = 600


def measure(partitions: int, directory: Path, *, commits: int = 5, keys_each: int = 10) -> dict[str, float]:
    """Seconds of each step with so many partitions, and the descriptors that are open at the end.

    Every commit touches all partitions (but those few that no key falls into).
    """
    path = directory / f"log-{partitions}"
    keys = [f"k{n}" for n in range(partitions * keys_each)]
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> None:
        start = time.perf_counter()
        work()
        found[name] = time.perf_counter() - start

    before = len(os.listdir("/proc/self/fd"))
    log = Changelog.open(path, partitions=partitions, config={"cleaner.threads": 0})
    timed("first commit", lambda: log.append(table(keys, 0)))
    timed("first get", lambda: log.get(b"k1"))
    took = []
    for number in range(1, commits + 1):
        start = time.perf_counter()
        log.append(table(keys, number))
        took.append(time.perf_counter() - start)
        log.get(b"k1")
    found["commit to all"] = statistics.median(took)
    timed("get after a commit", lambda: (log.append(table(["k1"], "x")), log.get(b"k1")))
    log.engine.catch_up()
    gets = 2_000
    timed("get", lambda: [log.get(b"k%d" % n) for n in range(gets)])
    found["get"] /= gets
    found["descriptors"] = len(os.listdir("/proc/self/fd")) - before
    timed("close", log.close)
    timed("open and close", lambda: Changelog.open(path).close())
    log = Changelog.open(path)
    timed("first get after opening", lambda: log.get(b"k2"))
    timed("close without commits", log.close)
    return found


def table(keys: list[str], value: object) -> pa.Table:
    return pa.table({"key": keys, "value": [f"{value}-{'v' * 40}"] * len(keys)})


def disk_alone(files: int, directory: Path) -> float:
    """Seconds to append to so many open files and to sync them, one after the other."""
    descriptors = [os.open(directory / f"raw-{n}", os.O_CREAT | os.O_WRONLY) for n in range(files)]
    data = bytes(_RECORD_BYTES)
    took = []
    for _ in range(5):
        start = time.perf_counter()
        for fd in descriptors:
            os.write(fd, data)
            os.fdatasync(fd)
        took.append(time.perf_counter() - start)
    for fd in descriptors:
        os.close(fd)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--partitions", type=int, default=1_000)
    parser.add_argument("--commits", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None)
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(dir=given.directory) as name:
        directory = Path(name)
        one = measure(1, directory, commits=given.commits)
        disk = disk_alone(given.partitions, directory)
        many = measure(given.partitions, directory, commits=given.commits)
    print(f"{'':26}{'1 partition':>14}{given.partitions:>12,d} partitions")
    for step, seconds in many.items():
        if step == "descriptors":
            print(f"{step:26}{one[step]:14.0f}{seconds:23.0f}")
        else:
            print(f"{step:26}{1e3 * one[step]:11.3f} ms{1e3 * seconds:20.3f} ms")
    print(f"{'the disk alone, a commit':26}{'':14}{1e3 * disk:20.3f} ms")


if __name__ == "__main__":
    main()
