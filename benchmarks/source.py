"""`spark.read.format("keyfold")` beside Parquet: scan, count, sum, group-by, key lookup and key range.

    python benchmarks/source.py [--rounds 5] [--rows 2000000] [--directory DIR]

A typed changelog of 4 partitions with 8 columns (key `id bigint` in random order; int, double, decimal, two
strings, timestamp, boolean). It was cleaned once; then 5 % of the keys were written again, so a read has to
fold. Parquet holds the same final rows, written by Spark with its defaults in 4 files. Both are in the page
cache. Each query makes its DataFrame afresh. The sides take turns; times are medians over the rounds, after
one that is not counted. For a query that needs only some columns or keys, "keyfold" reads the whole state and
leaves the rest to Spark, and "keyfold, options" uses the options `columns` and `where`.

Memory is the highest anonymous memory (RssAnon) of one Python worker, sampled.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import keyfold

PARTITIONS, BATCHES, UPDATED = 4, 20, 0.05
CITIES = 1000

Query = Callable[[], Any]


def session(directory: Path) -> Any:
    """Spark's defaults on two cores."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder: Any = SparkSession.builder
    for name, value in {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.local.dir": str(directory / "local"),
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(name, value)
    spark = builder.master("local[2]").appName("keyfold-bench").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def rows_of(ids: Any, seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    count = len(ids)
    cents = pa.array(random.integers(0, 10_000_000, count)).cast(pa.decimal128(20, 0))
    columns: dict[str, pa.Array] = {
        "id": pa.array(ids, pa.int64()),
        "city": pa.array([f"city-{n}" for n in random.integers(0, CITIES, count).tolist()]),
        "name": pa.array([f"{n:012x}" for n in random.integers(0, 1 << 48, count).tolist()]),
        "amount": pc.divide(cents, pa.scalar(Decimal("100"))).cast(pa.decimal128(12, 2), safe=False),
        "score": pa.array(random.normal(size=count)),
        "n": pa.array(random.integers(0, 1000, count), pa.int32()),
        "seen": pa.array(1_700_000_000_000_000 + np.arange(count) * 1000, pa.timestamp("us", "UTC")),
        "active": pa.array(random.integers(0, 2, count).astype(bool)),
    }  # fmt: skip
    return pa.table(columns)


def write_changelog(path: Path, rows: int) -> None:
    ids = np.random.default_rng(3).permutation(rows)
    config = {"cleaner.threads": 0, "anchors.auto": 0}
    with keyfold.open(path, keys="id", partitions=PARTITIONS, config=config) as log:
        for number, part in enumerate(np.array_split(ids, BATCHES)):
            log.append(rows_of(part, number))
        log.compact(full=True)
        log.append(rows_of(ids[: int(rows * UPDATED)], BATCHES))


def queries(spark: Any, log: Path, parquet: Path, rows: int) -> dict[str, dict[str, Query]]:
    """Query → side → the query. Each returns what both sides must agree on."""
    one, low, high = rows // 3, rows // 2, rows // 2 + rows // 100

    def read(**options: str) -> Any:
        return spark.read.format("keyfold").options(**options).load(str(log))

    def files() -> Any:
        return spark.read.parquet(str(parquet))

    def scan(df: Any) -> None:
        df.write.format("noop").mode("overwrite").save()

    def total(df: Any) -> Any:
        return df.agg({"n": "sum"}).collect()

    def grouped(df: Any) -> Any:
        return df.groupBy("city").agg({"n": "sum"}).count()

    def looked_up(df: Any) -> Any:
        return df.where(f"id = {one}").collect()

    def ranged(df: Any) -> Any:
        return df.where(f"id >= {low} AND id < {high}").agg({"n": "sum"}).collect()

    return {
        "scan": {"parquet": lambda: scan(files()), "keyfold": lambda: scan(read())},
        "count": {
            "parquet": lambda: files().count(),
            "keyfold": lambda: read().count(),
            "keyfold, options": lambda: read(columns="id").count(),
        },
        "sum of one column": {
            "parquet": lambda: total(files()),
            "keyfold": lambda: total(read()),
            "keyfold, options": lambda: total(read(columns="n")),
        },
        "group-by": {
            "parquet": lambda: grouped(files()),
            "keyfold": lambda: grouped(read()),
            "keyfold, options": lambda: grouped(read(columns="city,n")),
        },
        "key lookup": {
            "parquet": lambda: looked_up(files()),
            "keyfold": lambda: looked_up(read()),
            "keyfold, options": lambda: read(where=f"id = {one}").collect(),
        },
        "key range of 1 %": {
            "parquet": lambda: ranged(files()),
            "keyfold": lambda: ranged(read()),
            "keyfold, options": lambda: total(read(columns="n", where=f"id >= {low} AND id < {high}")),
        },
    }


@contextlib.contextmanager
def watched_workers() -> Iterator[list[int]]:
    """The highest anonymous memory of one process of Spark's Python workers so far, in bytes."""
    highest, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError, IndexError):
                    if (
                        b"pyspark" in (process / "cmdline").read_bytes()
                        and b"daemon" in (process / "cmdline").read_bytes()
                    ):
                        status = (process / "status").read_text()
                        highest[0] = max(highest[0], int(status.split("RssAnon:")[1].split()[0]) * 1024)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield highest
    finally:
        ended.set()
        thread.join()


def compare(sides: dict[str, Query], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        order = list(sides)
        found = {}
        for name in order[number % len(order) :] + order[: number % len(order)]:
            began = time.perf_counter()
            found[name] = sides[name]()
            if number:
                times[name].append(time.perf_counter() - began)
        if any(result != found["parquet"] for result in found.values()):
            raise SystemExit("The sides disagree.")
    return times


def report(query: str, times: dict[str, list[float]]) -> None:
    base = statistics.median(times["parquet"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(
            f"{query:20}{name:18}{median:8.3f} s   {median / base:6.2f} x   "
            f"{min(seconds):.3f}-{max(seconds):.3f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, help="where to write (default: the temporary directory)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--only", nargs="*", help="these queries")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="keyfold-bench-", dir=args.directory))
    try:
        log, parquet = directory / "log", directory / "parquet"
        write_changelog(log, args.rows)
        spark = session(directory)
        spark.read.format("keyfold").load(str(log)).write.parquet(str(parquet))
        with watched_workers() as highest:
            for query, sides in queries(spark, log, parquet, args.rows).items():
                if not args.only or query in args.only:
                    report(query, compare(sides, args.rounds))
        print(f"peak of one Python worker: {highest[0] >> 20} MiB")
        for path in (log, parquet):
            print(f"{path.name}: {sum(f.stat().st_size for f in path.rglob('*') if f.is_file()) >> 20} MiB")
        spark.stop()
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
