"""Events in a changelog of their own, one row each, that aggregating queries of tests follow."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from keyfold import ChangelogSink, restore

#: Nothing is folded but by hand, and no commit is an anchor by itself.
QUIET = {"cleaner.threads": 0, "anchors.auto": 0}
WAIT_SECONDS = 120


class Events:
    """A changelog of rows of `schema`, keyed by `id`, a column that is added."""

    def __init__(self, spark: SparkSession, path: Path, schema: str) -> None:
        self.spark = spark
        self.path = path
        self.schema = schema
        self.count = 0
        self.batches = 0

    def add(self, *rows: tuple[Any, ...]) -> Events:
        """One more commit."""
        numbered = [(self.count + i, *row) for i, row in enumerate(rows)]
        frame = self.spark.createDataFrame(numbered, f"id long not null, {self.schema}").coalesce(1)
        with ChangelogSink(self.path, keys="id", config={"cleanup.policy": "delete", **QUIET}) as sink:
            sink(frame, self.batches)
        self.count += len(rows)
        self.batches += 1
        return self

    def all(self) -> DataFrame:
        return self.spark.read.format("keyfold").load(str(self.path))

    def stream(
        self, options: Mapping[str, str] | None = None, spark: SparkSession | None = None
    ) -> DataFrame:
        reader = (spark or self.spark).readStream.format("keyfold")
        wanted = {"startingOffsets": "earliest"} if options is None else options
        return reader.options(**wanted).load(str(self.path))


def finish(frame: DataFrame, sink: Callable[[DataFrame, int], None], checkpoint: Path) -> None:
    """Run a query until it has taken all there is. Raises `StreamingQueryException`."""
    writer = frame.writeStream.outputMode("update").foreachBatch(sink)
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(WAIT_SECONDS)
    finally:
        query.stop()


def fold(path: Path) -> None:
    """One full pass over the changelog; what it replaced is deleted unless a reader needs it."""
    from keyfold import Changelog

    with Changelog.open(path) as log:
        log.compact()
        log.engine.writer.garbage.collect()


def forget_batch(checkpoint: Path, batch: int) -> None:
    """As after a crash between the sink's commit and Spark's own note that the batch is done."""
    (checkpoint / "commits" / str(batch)).unlink()
    (checkpoint / "commits" / f".{batch}.crc").unlink()


def lose(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)


def rows_of(frame: DataFrame) -> list[dict[str, Any]]:
    """Rows as dicts, in an order that depends on their values only."""
    return sorted((row.asDict() for row in frame.collect()), key=lambda row: repr(sorted(row.items())))


def kept(path: Path) -> list[dict[str, Any]]:
    """What the changelog holds now, as `rows_of` gives it."""
    with restore(path) as state:
        rows = state.to_arrow().to_pylist()
    return sorted(rows, key=lambda row: repr(sorted(row.items())))
