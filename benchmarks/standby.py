"""How soon a changelog goes on after its writer was killed: with a warm standby, and opened cold.

    python benchmarks/standby.py [--keys 200000] [--takeovers 20] [--directory /tmp]

Keys of 16 bytes, values of 100, four partitions. The writer overwrites random keys, 500 per commit, at full
speed, and is killed with kill -9. Times go from the kill to the first transaction that is committed after
it; of the cold openings, in a process that has imported everything, from the call of `open` to the first
`get`. Medians and maxima.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from keyfold import Changelog, Standby

_PARTITIONS: Final = 4
_COMMIT_ROWS: Final = 500
#: The writer runs so long before it is killed.
_RUN_SECONDS: Final = 1.5
_COLD_REPEATS: Final = 5
_LAG_RECORDS: Final = 1_000_000


def keys_of(ids: np.ndarray) -> pa.Array:
    """16 bytes each, in an order that has nothing to do with the ids."""
    mixed = ids.astype("u8") * np.uint64(0x9E3779B97F4A7C15)
    raw = np.stack([mixed, ids.astype("u8")], 1).tobytes()
    return pa.Array.from_buffers(pa.binary(16), len(ids), [None, pa.py_buffer(raw)]).cast(pa.binary())


def rows(ids: np.ndarray, random: np.random.Generator) -> pa.Table:
    noise = np.zeros((len(ids), 100), "u1")
    noise[:, :50] = random.integers(0, 256, (len(ids), 50))
    values = pa.Array.from_buffers(pa.binary(100), len(ids), [None, pa.py_buffer(noise.tobytes())])
    return pa.table({"key": keys_of(ids), "value": values.cast(pa.binary())})


def commit_one(log: Changelog) -> None:
    last = log.last_batch("probe")
    with log.transaction(app_id="probe", batch_id=0 if last is None else last + 1) as store:
        store.put(b"probe", b"%d" % (int(store.get(b"probe") or b"0") + 1))


def life(path: str, keys: int, told: Connection, standing: bool) -> None:
    """A standby that becomes the writer, or a writer at once; tells when, and when each step was done."""
    started = time.monotonic()
    if standing:
        with Standby(path) as standby:
            while any(standby.lag().values()):
                time.sleep(0.01)
            told.send(("warm", 0.0, 0.0))
            log = standby.take_over()
    else:
        log = Changelog.open(path)
        log.get(b"probe")
    opened = time.monotonic()
    commit_one(log)
    told.send(("committed", time.monotonic(), opened - started))
    random = np.random.default_rng(os.getpid())
    while True:
        log.append(rows(random.integers(0, keys, _COMMIT_ROWS), random))


class Runner:
    """Starts and kills processes that have imported everything when they begin."""

    def __init__(self, path: Path, keys: int) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["__main__", "keyfold.checkpoints", "numpy"])
        self._path = path
        self._keys = keys

    def start(self, *, standing: bool) -> tuple[BaseProcess, Connection]:
        mine, theirs = self._context.Pipe()
        arguments = (str(self._path), self._keys, theirs, standing)
        process = self._context.Process(target=life, args=arguments, daemon=True)
        process.start()
        return process, mine

    def takeovers(self, count: int) -> list[float]:
        """Seconds from each kill to the next commit."""
        writer, told = self.start(standing=False)
        told.recv()
        taken = []
        for _ in range(count):
            standby, its = self.start(standing=True)
            its.recv()
            time.sleep(_RUN_SECONDS)
            killed = time.monotonic()
            writer.kill()
            taken.append(its.recv()[1] - killed)
            writer.join()
            writer, told = standby, its
        writer.kill()
        writer.join()
        return taken

    def cold(self) -> tuple[list[float], list[float]]:
        """After a kill: seconds to the first commit, with those of starting the process; to the first get."""
        to_commit, to_get = [], []
        writer, told = self.start(standing=False)
        told.recv()
        for _ in range(_COLD_REPEATS):
            time.sleep(_RUN_SECONDS)
            killed = time.monotonic()
            writer.kill()
            writer.join()
            writer, told = self.start(standing=False)
            _, committed, opening = told.recv()
            to_commit.append(committed - killed)
            to_get.append(opening)
        writer.kill()
        writer.join()
        return to_commit, to_get


def opening_s(path: Path) -> float:
    start = time.perf_counter()
    log = Changelog.open(path)
    log.get(b"probe")
    spent = time.perf_counter() - start
    log.close()
    return spent


def lagging_s(path: Path, keys: int) -> list[float]:
    """Opening with stores that lack the last records, as a kill can leave them."""
    random = np.random.default_rng(11)
    aside = path.with_name("stores")
    opening_s(path)
    for store in path.glob("store-*"):
        shutil.copytree(store, aside / store.name)
    with Changelog.open(path) as log:
        for _ in range(0, _LAG_RECORDS, 50_000):
            log.append(rows(random.integers(0, keys, 50_000), random))
    spent = []
    for _ in range(3):
        for store in path.glob("store-*"):
            shutil.rmtree(store)
        shutil.copytree(aside, path, dirs_exist_ok=True)
        spent.append(opening_s(path))
    return spent


def line(what: str, seconds: list[float]) -> str:
    return f"{what}: median {statistics.median(seconds) * 1e3:,.0f} ms, max {max(seconds) * 1e3:,.0f} ms"


def measured(work: Callable[[], float], count: int) -> list[float]:
    return [work() for _ in range(count)]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keys", type=int, default=200_000)
    arguments.add_argument("--takeovers", type=int, default=20)
    arguments.add_argument("--directory", type=Path, default=None)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as name:
        path = Path(name) / "log"
        random = np.random.default_rng(3)
        with Changelog.open(path, partitions=_PARTITIONS) as log:
            log.append(rows(random.permutation(given.keys), random))
            log.get(b"probe")
        runner = Runner(path, given.keys)
        print(line(f"kill to commit, warm standby, {given.takeovers}x", runner.takeovers(given.takeovers)))
        to_commit, to_get = runner.cold()
        print(line("kill to commit, cold process", to_commit))
        print(line("open to first get after a kill", to_get))
        opening_s(path)
        print(line("open to first get, stores current", measured(lambda: opening_s(path), 10)))
        print(line(f"open to first get, stores {_LAG_RECORDS:,} records behind", lagging_s(path, given.keys)))


if __name__ == "__main__":
    main()
