"""Small streaming queries for tests: a file source whose batches a test writes, and what a sink made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from keyfold import Changelog

Sink = Callable[[DataFrame, int], None]


class Files:
    """A directory of JSON files, each one micro-batch of a stream. Keys of rows are column names."""

    def __init__(self, spark: SparkSession, directory: Path, schema: str) -> None:
        self.spark = spark
        self.directory = directory
        self.schema = schema
        self.count = 0
        directory.mkdir(parents=True)

    def add(self, *rows: dict[str, Any]) -> Files:
        """The rows of one more batch."""
        path = self.directory / f"{self.count:04d}.json"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        # The source orders its files by time of modification.
        os.utime(path, (1_600_000_000 + self.count, 1_600_000_000 + self.count))
        self.count += 1
        return self

    def stream(self) -> DataFrame:
        reader = self.spark.readStream.schema(self.schema).option("maxFilesPerTrigger", 1)
        return reader.json(str(self.directory))


def run(frame: DataFrame, sink: Sink, checkpoint: Path, mode: str = "append") -> None:
    """Run a query until it has taken all there is. Raises `StreamingQueryException`."""
    writer = frame.writeStream.outputMode(mode).foreachBatch(sink)
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(60)
    finally:
        query.stop()


def forget_batch(checkpoint: Path, batch: int) -> None:
    """As after a crash between the sink's return and Spark's own note that the batch is done."""
    (checkpoint / "commits" / str(batch)).unlink()
    (checkpoint / "commits" / f".{batch}.crc").unlink()


def pairs(log: Changelog) -> list[tuple[bytes, Any]]:
    """Key and value of every record, partition by partition; their offsets have to be dense."""
    found = []
    for partition in range(log.partitions):
        offsets = []
        for batch in log.read(partition):
            offsets += batch.column("offset").to_pylist()
            found += list(
                zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True)
            )
        assert offsets == list(range(len(offsets)))
    return found


def commits(log: Changelog) -> list[tuple[int, tuple[str, ...]]]:
    """Batch id and source offsets of every commit."""
    return [(c.batch, c.source) for c in log.state.commits]
