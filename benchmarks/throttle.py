"""What a working cleaner costs those who append and read, and how well its limit of bytes per second is kept.

    python benchmarks/throttle.py [--rounds 5] [--seconds 6] [--directory DIR]

Batches of 50,000 records (keys of 16 bytes out of a million, values of 100 bytes) are appended to 4
partitions as fast as they go, while another thread reads one block at a random offset every 10 ms. In turn
the cleaner is paused, and works all the time (ratio 0) with the default limit, and without any. Then passes
with several limits: bytes read and written per second, against the limit.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa

from keyfold import Changelog
from keyfold.checkpoints.manifest.config import UNLIMITED, LogConfig

KEYS, KEY_BYTES, VALUE_BYTES, ROWS, PARTITIONS = 1_000_000, 16, 100, 50_000, 4
NAME = "cleaner.io.max.bytes.per.second"
DEFAULT = LogConfig().cleaner_io_max_bytes_per_second
CONFIG = {
    "segment.bytes": "16MiB",
    "anchors.auto": 0,
    "delete.retention.ms": 0,
    "store.backlog.bytes": "8GiB",
}


def batches(count: int) -> list[pa.Table]:
    draw = np.random.default_rng(5)
    made = []
    for _ in range(count):
        keys = [b"%0*d" % (KEY_BYTES, key) for key in draw.integers(0, KEYS, ROWS).tolist()]
        values = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(VALUE_BYTES), ROWS, [None, pa.py_buffer(draw.bytes(ROWS * VALUE_BYTES))]
        ).cast(pa.binary())
        made.append(pa.table({"key": pa.array(keys, pa.binary()), "value": values}))
    return made


def read_latencies(log: Changelog, stop: threading.Event, found: list[float]) -> None:
    draw = random.Random(1)
    while not stop.wait(0.01):
        partition = draw.randrange(PARTITIONS)
        offset = draw.randrange(log.end_offsets()[partition])
        began = time.perf_counter()
        next(log.read(partition, offset), None)
        found.append(time.perf_counter() - began)


def phase(log: Changelog, tables: list[pa.Table], seconds: float, rate: int | None) -> tuple[float, float]:
    """Records appended per second, and the 99th percentile of reading in ms. `rate` None: cleaner paused."""
    with ExitStack() as stack:
        if rate is None:
            stack.enter_context(log.cleaning_paused())
        else:
            log.engine.configure({NAME: rate})
        stop, latencies = threading.Event(), list[float]()
        reader = threading.Thread(target=read_latencies, args=(log, stop, latencies))
        reader.start()
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            log.append(tables[done % len(tables)])
            done += 1
        took = time.perf_counter() - began
        stop.set()
        reader.join()
    return done * ROWS / took, float(np.percentile(latencies, 99)) * 1e3


def beside_appends(directory: Path, tables: list[pa.Table], rounds: int, seconds: float) -> None:
    config = {**CONFIG, "min.cleanable.dirty.ratio": 0, "cleaner.backoff.ms": 10}
    ways = {"paused": None, "default": DEFAULT, "no limit": UNLIMITED}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds):
        path = directory / f"beside-{number}"
        with Changelog.open(path, partitions=PARTITIONS, config=config) as log:
            for table in tables:
                log.append(table)
            order = list(ways)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                found[name].append(phase(log, tables, seconds, ways[name]))
        shutil.rmtree(path)
    medians = {
        name: [statistics.median(v) for v in zip(*pairs, strict=True)] for name, pairs in found.items()
    }
    for name, (rate, p99) in medians.items():
        print(
            f"cleaner {name:>8}: {rate:>9,.0f} records/s appended ({rate / medians['paused'][0]:.2f}), "
            f"reading p99 {p99:5.1f} ms ({p99 / medians['paused'][1]:.2f})"
        )


def accuracy(directory: Path, tables: list[pa.Table], rounds: int) -> None:
    for rate in (20_000_000, 50_000_000, 100_000_000):
        kept = []
        for number in range(rounds):
            path = directory / f"rate-{rate}-{number}"
            config = {**CONFIG, "cleaner.threads": 0, NAME: rate}
            with Changelog.open(path, config=config) as log:
                for table in tables[: max(4, rate // 5_000_000)]:
                    log.append(table)
                log.engine.writer.seal_active()
                done = log.engine.cleaning.clean_in_background(0)
                assert done is not None
                kept.append(done.io_bytes / done.seconds)
            shutil.rmtree(path)
        found = statistics.median(kept)
        print(f"limit {rate / 1e6:.0f} MB/s: {found / 1e6:.1f} MB/s ({found / rate:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, help="where to write (default: the temporary directory)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="keyfold-bench-", dir=args.directory))
    try:
        tables = batches(24)
        beside_appends(directory, tables, args.rounds, args.seconds)
        accuracy(directory, tables, args.rounds)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
