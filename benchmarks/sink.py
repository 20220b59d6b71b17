"""Micro-batches through Spark into a changelog, beside a plain Parquet append and Delta Lake's MERGE.

    python benchmarks/sink.py [--rounds 5] [--batches 20] [--rows 100000] [--directory DIR] [--only CASE …]

Three cases, each a stream of 20 batches:

    one      keys of 16 bytes out of 200,000 and a string of 100 bytes, 100,000 rows a batch
    eight    the same keys and 8 columns: bigint, int, double, string, timestamp, decimal, boolean, date
    small    as `one`, 1,000 rows a batch

In each batch the same DataFrame goes, in turn, to a sink that throws it away (the floor: what Spark itself
costs), to Parquet (append, not synced), and to a changelog of 4 partitions (synced, exactly once). Rates are
medians over all batches of all rounds but the first three of each. Delta runs the batches of `one` in an
environment of its own, whose Python the variable KEYFOLD_DELTA_PYTHON names (`make bench` sets it).

Memory is the peak resident size of the driver's Python and of the JVM, in fresh processes, for batches of one
size and of ten times that size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEYS, KEY_BYTES, VALUE_BYTES, PARTITIONS = 200_000, 16, 100, 4
SMALL_ROWS = 1000
CASES = ["one", "eight", "small"]
WARM_UP_BATCHES = 3

Times = dict[str, list[float]]


def write_events(directory: Path, batches: int, rows: int, *, eight: bool = False) -> None:
    """One Parquet file per batch, with two row groups, so that both cores have work."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(11)
    directory.mkdir()
    for number in range(batches):
        keys = [b"%0*d" % (KEY_BYTES, key) for key in random.integers(0, KEYS, rows).tolist()]
        columns = {"key": pa.array(keys, pa.binary()).cast(pa.string())}
        if eight:
            columns |= _mixed(random, rows, number * rows)
        else:
            letters = random.integers(97, 123, rows * VALUE_BYTES, dtype=np.uint8)
            ends = pa.py_buffer(np.arange(0, (rows + 1) * VALUE_BYTES, VALUE_BYTES, dtype=np.int32))
            text = pa.Array.from_buffers(pa.string(), rows, [None, ends, pa.py_buffer(letters.tobytes())])
            columns["value"] = text
        path = directory / f"{number:04d}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=rows // 2 + 1, compression="none")
        os.utime(path, (1_600_000_000 + number, 1_600_000_000 + number))


def _mixed(random: Any, rows: int, first: int) -> dict[str, Any]:
    """Eight columns of a typical event."""
    import numpy as np
    import pyarrow as pa

    micros = 1_600_000_000_000_000 + np.arange(first, first + rows) * 1_000_000
    cents = pa.array(random.integers(0, 100_000, rows), pa.int64()).cast(pa.decimal128(19, 0))
    return {
        "id": pa.array(np.arange(first, first + rows)),
        "kind": pa.array(random.integers(0, 100, rows).astype(np.int32)),
        "score": pa.array(random.random(rows)),
        "name": pa.array([f"name-{n}" for n in random.integers(0, 5000, rows).tolist()]),
        "at": pa.array(micros, pa.timestamp("us", "UTC")),
        "price": cents.cast(pa.decimal128(12, 2), safe=False),
        "paid": pa.array(random.integers(0, 2, rows).astype(bool)),
        "day": pa.array(random.integers(18_000, 19_000, rows).astype(np.int32), pa.date32()),
    }


def session(directory: Path, configure: Callable[[Any], Any] = lambda builder: builder) -> Any:
    """Spark's defaults on two cores."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = configure(SparkSession.builder.master("local[2]").appName("keyfold-bench"))
    for name, value in {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.local.dir": str(directory / "local"),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def run_query(
    spark: Any, events: Path, checkpoint: Path, each: Callable[[Any, int], None], files: int
) -> None:
    schema = spark.read.parquet(str(events)).schema
    frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", files)
    writer = frame.parquet(str(events)).writeStream.foreachBatch(each)
    writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()


def in_turn(ways: dict[str, Callable[[Any, int], None]], times: Times) -> Callable[[Any, int], None]:
    """A function for foreachBatch that gives each batch to every way, each time another one first."""

    def each(df: Any, batch: int) -> None:
        order = list(ways)
        for name in order[batch % len(order) :] + order[: batch % len(order)]:
            began = time.perf_counter()
            ways[name](df, batch)
            if batch >= WARM_UP_BATCHES:
                times.setdefault(name, []).append(time.perf_counter() - began)

    return each


def throw_away(df: Any, batch: int) -> None:
    df.write.format("noop").mode("overwrite").save()


def append_to(directory: Path) -> Callable[[Any, int], None]:
    def append(df: Any, batch: int) -> None:
        df.write.mode("append").parquet(str(directory))

    return append


def compare(directory: Path, events: Path, rounds: int) -> tuple[Times, list[float]]:
    """Seconds per batch of each way, and seconds until last values had caught up, per round."""
    from keyfold import ChangelogSink

    spark = session(directory)
    times: Times = {}
    waits = []
    for number in range(rounds):
        here = directory / f"round-{number}"
        with ChangelogSink(here / "log", keys="key", partitions=PARTITIONS) as sink:
            ways: dict[str, Callable[[Any, int], None]] = {
                "noop": throw_away,
                "parquet": append_to(here / "parquet"),
                "keyfold": sink,
            }
            run_query(spark, events, here / "checkpoint", in_turn(ways, times), 1)
            began = time.perf_counter()
            sink.log.engine.catch_up()
            waits.append(time.perf_counter() - began)
        shutil.rmtree(here)
    spark.stop()
    return times, waits


def delta(directory: Path, events: Path) -> Times:
    """Seconds per batch of Delta's MERGE; runs in the Python that has Delta."""
    from delta import DeltaTable, configure_spark_with_delta_pip

    def configure(builder: Any) -> Any:
        builder = builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        catalog = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        return configure_spark_with_delta_pip(builder.config("spark.sql.catalog.spark_catalog", catalog))

    spark = session(directory, configure)
    table = str(directory / "table")
    spark.createDataFrame([], "key string, value string").write.format("delta").save(table)

    def merge(df: Any, batch: int) -> None:
        # MERGE refuses two rows of one key, so there is nothing it could do with fewer steps.
        changes = df.dropDuplicates(["key"]).alias("s")
        merging = DeltaTable.forPath(df.sparkSession, table).alias("t").merge(changes, "t.key = s.key")
        merging.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()

    times: Times = {}
    run_query(spark, events, directory / "checkpoint", in_turn({"delta": merge}, times), 1)
    spark.stop()
    return times


def memory(directory: Path, events: Path, files: int) -> dict[str, float]:
    """Peak MiB of the driver's Python and of the JVM, `files` files in a batch."""
    from keyfold import ChangelogSink

    spark = session(directory)
    with ChangelogSink(directory / "log", keys="key", partitions=PARTITIONS) as sink:
        run_query(spark, events, directory / "checkpoint", sink, files)
    jvm = int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())
    peaks = {"python": _peak_mib(os.getpid()), "jvm": _peak_mib(jvm)}
    spark.stop()
    return peaks


def _peak_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def other_process(python: str, part: str, directory: Path, events: Path, files: int = 1) -> Any:
    """What a part gives, measured in a process of its own."""
    result = directory / "result.json"
    command = [python, __file__, "--part", part, "--directory", str(directory), "--events", str(events)]
    directory.mkdir()
    subprocess.run([*command, "--files", str(files), "--result", str(result)], check=True)
    return json.loads(result.read_text())


def report(times: Times, rows: int, waits: list[float]) -> None:
    rates = {name: rows / statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in times.items():
        tenth, *_, ninth = statistics.quantiles(seconds, n=10)
        spread = f"p10 {tenth * 1e3:5.0f}   p90 {ninth * 1e3:5.0f}"
        median_ms = statistics.median(seconds) * 1e3
        print(f"{name:>8}: {rates[name]:>9,.0f} events/s   batch, ms: median {median_ms:5.0f}   {spread}")
    for name in rates:
        if name not in ("keyfold", "noop"):
            print(f"keyfold / {name}: {rates['keyfold'] / rates[name]:.2f}")
    more = statistics.median(times["keyfold"]) - statistics.median(times["noop"])
    print(f"keyfold - noop: {more * 1e3:.0f} ms a batch")
    print(
        f"until last values had caught up, s: median {statistics.median(waits):.2f}, longest {max(waits):.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, help="where to write (default: the temporary directory)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--rows", type=int, default=100_000, help="per batch")
    parser.add_argument("--only", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--skip", nargs="*", default=[], choices=["delta", "memory"])
    for hidden in ("--part", "--events", "--result"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--files", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        events = Path(args.events)
        given = (
            memory(args.directory, events, args.files)
            if args.part == "memory"
            else delta(args.directory, events)
        )
        Path(args.result).write_text(json.dumps(given))
        return
    directory = Path(tempfile.mkdtemp(prefix="keyfold-bench-", dir=args.directory))
    try:
        for case in args.only:
            rows = SMALL_ROWS if case == "small" else args.rows
            print(f"-- {case}: {rows:,} rows a batch", flush=True)
            here = directory / case
            here.mkdir()
            events = here / "events"
            write_events(events, args.batches, rows, eight=case == "eight")
            times, waits = compare(here, events, args.rounds)
            python = os.environ.get("KEYFOLD_DELTA_PYTHON")
            if case == "one" and python and "delta" not in args.skip:
                times |= other_process(python, "delta", here / "delta", events)
            report(times, rows, waits)
            if case == "one" and "memory" not in args.skip:
                for files in (1, 10):
                    peaks = other_process(sys.executable, "memory", here / f"memory-{files}", events, files)
                    print(f"batches of {files * rows:,} rows, peak MiB: "
                          f"driver's Python {peaks['python']:,.0f}, JVM {peaks['jvm']:,.0f}")  # fmt: skip
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
