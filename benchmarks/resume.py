"""From the start of the process to the first committed micro-batch: restored, and the same job empty.

    make bench BENCH=benchmarks/resume.py ARGS="--rounds 5"

Two counters over the same events, each with `--keys` keys: a class task (`TaskSink`) whose state is the
changelog's own last values, and a native aggregation (`aggregate`), whose state goes in as its first
micro-batch. Restored, the checkpoint is lost, and of the task in a second line the last-value stores too.
Empty, the same query begins a new changelog at the same position of the source. The time is that from
starting Python to the sink's first commit, JVM, session and plan included. Medians; the sides take turns.
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
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from keyfold import Changelog, ChangelogSink, Store, TaskSink, aggregate, resume_if_lost
from keyfold.sink.task_sink import Int64Serde, StringSerde
from keyfold.statestore.schema.columns import Columns

NEW_EVENTS = 10_000
CONFIG = {"cleaner.threads": 0}


class Counts:
    """Counts the events of each key."""

    stores: ClassVar = {"counts": Store(StringSerde(), Int64Serde())}

    def process(self, records: pa.RecordBatch, store: Any) -> None:
        found = pc.value_counts(records["key"])
        keys, counts = found.field("values"), found.field("counts")
        before = store["counts"].get_all(keys)
        store["counts"].put_all(keys, pc.add(before.fill_null(0), counts))


def write_events(path: Path, first: int, count: int, keys: int) -> None:
    """One commit of events, numbered on from `first`."""
    types = {"id": "long", "key": "string"}
    fields = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in types.items()]
    columns = Columns({"type": "struct", "fields": fields}, ("id",), "json")
    with Changelog.open(path, columns=columns, config={**CONFIG, "cleanup.policy": "delete"}) as log:
        ids = np.arange(first, first + count)
        texts = pc.cast(pa.array(ids), pa.string())
        names = pc.utf8_lpad(pc.cast(pa.array(ids % keys), pa.string()), 16, "0")
        key = pc.binary_join_element_wise('{"id":', texts, "}", "").cast(pa.binary())
        value = pc.binary_join_element_wise('{"key":"', names, '"}', "").cast(pa.binary())
        log.append(pa.table({"key": key, "value": value}))


def session(folder: Path) -> SparkSession:
    options = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "3g",
        "spark.local.dir": str(folder / "spark"),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master("local[2]")
    for name, value in options.items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("ERROR")
    return made


def child(kind: str, folder: Path, path: Path, checkpoint: Path, offsets: str, *, whole: bool) -> None:
    """The job. It ends when the first micro-batch is committed, or with `whole` when all events are in."""
    spark = session(folder)
    again = resume_if_lost(path, app_id=path.name, checkpoint=checkpoint)
    options = {"startingOffsets": offsets} if again is None else again.options()
    live = spark.readStream.format("keyfold").options(**options).load(str(folder / "events"))
    sink: ChangelogSink | TaskSink
    if kind == "task":
        frame = live
        sink = TaskSink(path, Counts(), partitions=4, config=CONFIG, on_reset="restore")
    else:
        frame = aggregate(live, "key", F.count("*").alias("n"), resumed=again)
        sink = ChangelogSink(path, keys="key", partitions=4, config=CONFIG, on_reset="restore")

    def run(df: DataFrame, batch: int) -> None:
        sink(df, batch)
        if not whole:
            print(json.dumps({"committed": sink.log.last_batch(path.name)}), flush=True)
            os._exit(0)

    writer = frame.writeStream.outputMode("update").foreachBatch(run).trigger(availableNow=True)
    writer.option("checkpointLocation", str(checkpoint)).start().awaitTermination()
    sink.close()
    print(json.dumps({"committed": True}), flush=True)
    spark.stop()


def timed(folder: Path, kind: str, path: Path, offsets: str, *, whole: bool = False) -> float:
    """Seconds from the start of the process until it prints."""
    checkpoint = folder / "checkpoint"
    shutil.rmtree(checkpoint, ignore_errors=True)
    command = [sys.executable, __file__, "--child", kind, "--folder", str(folder), "--path", str(path)]
    command += ["--checkpoint", str(checkpoint), "--offsets", offsets] + (["--whole"] if whole else [])
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert process.stdout is not None
    lines = [line for line in process.stdout if line.startswith('{"committed"')][:1]
    seconds = time.perf_counter() - began
    process.wait()
    if not lines:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return seconds


def measure(folder: Path, kind: str, keys: int, rounds: int) -> None:
    before, empty = folder / f"{kind}-counts", folder / f"{kind}-empty"
    with Changelog.open(folder / "events", mode="r") as events:
        behind = json.dumps({"keyfold": events.identity.uuid, "offsets": {"0": keys}})
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name in ("empty", "restored", *(["restored, stores lost too"] if kind == "task" else [])):
            shutil.rmtree(empty, ignore_errors=True)
            if name == "empty":
                seconds = timed(folder, kind, empty, behind)
            else:
                # As the app knows it: its name is that of the directory.
                shutil.copytree(before, folder / "copy" / before.name)
                if "stores" in name:
                    for store in (folder / "copy" / before.name).glob("store-*"):
                        shutil.rmtree(store)
                seconds = timed(folder, kind, folder / "copy" / before.name, "latest")
                shutil.rmtree(folder / "copy")
            found.setdefault(name, []).append(seconds)
    base = statistics.median(found["empty"])
    for name, each in found.items():
        median = statistics.median(each)
        spread = f"{min(each):.2f}-{max(each):.2f} s"
        print(f"  {kind:7} {name:26} {median:6.2f} s  {median / base:5.2f} x  {spread}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=float, default=1e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kind", choices=["task", "native"], help="default: both")
    parser.add_argument("--directory", type=Path, help="where everything is written")
    parser.add_argument("--child", choices=["task", "native"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--offsets", help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.folder, args.path, args.checkpoint, args.offsets, whole=args.whole)
        return
    with tempfile.TemporaryDirectory(prefix="keyfold-bench-", dir=args.directory) as name:
        folder = Path(name)
        keys, kinds = int(args.keys), (args.kind,) if args.kind else ("task", "native")
        write_events(folder / "events", 0, keys, keys)
        for kind in kinds:
            timed(folder, kind, folder / f"{kind}-counts", "earliest", whole=True)
            with Changelog.open(folder / f"{kind}-counts") as log:
                log.compact()
        write_events(folder / "events", keys, NEW_EVENTS, keys)
        for kind in kinds:
            measure(folder, kind, keys, args.rounds)


if __name__ == "__main__":
    main()
