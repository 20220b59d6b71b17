"""A PySpark job that is killed again and again: one plain upsert sink with deletes, one stateful aggregation.

    python -m support.killed_job DIRECTORY

Reads the files under DIRECTORY/incoming, one in each micro-batch, and ends when all have gone through both
queries.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F

from keyfold import ChangelogSink
from support.session import spark_session

FILES = 18
ROWS = 300
KEYS = 60
SCHEMA = "key STRING, amount BIGINT, gone BOOLEAN"


def write_files(root: Path, seed: int) -> list[list[tuple[str, int, bool]]]:
    """The input, and what it holds, file by file."""
    draw = random.Random(seed)
    directory = root / "incoming"
    directory.mkdir()
    files = []
    for number in range(FILES):
        rows = [(f"k{draw.randrange(KEYS)}", draw.randrange(1000), draw.random() < 0.1) for _ in range(ROWS)]
        table = pa.table({n: [r[i] for r in rows] for i, n in enumerate(("key", "amount", "gone"))})
        path = directory / f"{number:03d}.parquet"
        pq.write_table(table, path)
        os.utime(path, (1_400_000_000 + number,) * 2)
        files.append(rows)
    return files


def expected_last(files: list[list[tuple[str, int, bool]]]) -> dict[str, dict[str, int]]:
    """Key → its last amount, without the deleted."""
    state: dict[str, dict[str, int]] = {}
    for key, amount, gone in (row for rows in files for row in rows):
        if gone:
            state.pop(key, None)
        else:
            state[key] = {"amount": amount}
    return state


def expected_sums(files: list[list[tuple[str, int, bool]]]) -> dict[str, dict[str, int]]:
    """Key → how many rows, and the sum of their amounts."""
    state: dict[str, dict[str, int]] = {}
    for key, amount, _ in (row for rows in files for row in rows):
        entry = state.setdefault(key, {"rows": 0, "amount": 0})
        entry["rows"] += 1
        entry["amount"] += amount
    return state


def main() -> None:
    root = Path(sys.argv[1])
    spark = spark_session(root / "spark")
    incoming = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(root / "incoming"))
    last = ChangelogSink(
        root / "last", keys="key", partitions=3, apply_as_deletes="gone", except_column_list="gone",
        config={"segment.bytes": "8KiB", "cleaner.backoff.ms": 50},
    )  # fmt: skip
    sums = ChangelogSink(
        root / "sums", keys="key", partitions=3, config={"segment.bytes": "8KiB", "cleaner.backoff.ms": 50}
    )
    totals = incoming.groupBy("key").agg(F.count("*").alias("rows"), F.sum("amount").alias("amount"))
    queries = [
        incoming.writeStream.foreachBatch(last)
        .option("checkpointLocation", str(root / "checkpoint-last")).trigger(availableNow=True).start(),
        totals.writeStream.outputMode("update").foreachBatch(sums)
        .option("checkpointLocation", str(root / "checkpoint-sums")).trigger(availableNow=True).start(),
    ]  # fmt: skip
    for query in queries:
        query.awaitTermination()


if __name__ == "__main__":
    main()
