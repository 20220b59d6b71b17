"""The job: one query writes the flights as an event changelog, three follow and each keep a compacted one.

    python job.py DIRECTORY

It runs until every flight has gone through, or until somebody kills it: what is under DIRECTORY is whole
either way.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import ClassVar

import data
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from keyfold import ChangelogSink, Store, Task, TaskSink, aggregate, resume_if_lost
from keyfold.sink.task_sink import Int64Serde, JsonSerde, NamedStores, StringSerde

PARTITIONS = 4
#: The demo compacts by hand at its end, to show what that does. Left out, a background thread cleans.
BY_HAND = {"cleaner.threads": 0, "anchors.auto": 1}
#: The number of files of flights, one per micro-batch; followers take as many flights at a time.
FILES = 24
ROWS_PER_TRIGGER = 16_000
FORGET_AFTER = timedelta(days=30)
FIRST_OF_ALL = datetime(1970, 1, 1, tzinfo=timezone.utc)


def ingest(spark: SparkSession, root: Path) -> StreamingQuery:
    """Flights that have an aircraft, as events: every one stays (`cleanup.policy=delete`, no retention
    set).
    """
    sink = ChangelogSink(
        root / "events", keys="tailnum", partitions=PARTITIONS, config={"cleanup.policy": "delete"}
    )
    return (
        _files(spark, root)
        .where("tailnum IS NOT NULL")
        .writeStream.queryName("ingest")
        .foreachBatch(sink)
        .option("checkpointLocation", str(root / "spark" / "ingest"))
        .trigger(availableNow=True)
        .start()
    )


class Rejected(Task):
    """Counts flights by carrier."""

    stores: ClassVar = {"rejected": Store(StringSerde(), Int64Serde())}

    def process(self, records: pa.RecordBatch, store: NamedStores) -> None:
        rejected, found = store["rejected"], pc.value_counts(records["carrier"])
        before = rejected.get_all(found.field("values"))
        rejected.put_all(found.field("values"), pc.add(before.fill_null(0), found.field("counts")))


def count_rejected(spark: SparkSession, root: Path) -> StreamingQuery:
    """Flights without an aircraft cannot be keyed by it. They are counted, by carrier, in a changelog of
    their own: keyfold's store is all the state there is.
    """
    return (
        _files(spark, root, files=6)
        .where("tailnum IS NULL")
        .writeStream.queryName("rejected")
        .foreachBatch(TaskSink(root / "rejected", Rejected()))
        .option("checkpointLocation", str(root / "spark" / "rejected"))
        .trigger(availableNow=True)
        .start()
    )


def _files(spark: SparkSession, root: Path, files: int = 1) -> DataFrame:
    return (
        spark.readStream.schema(data.SCHEMA)
        .option("maxFilesPerTrigger", files)
        .parquet(str(root / "incoming"))
    )


def count(spark: SparkSession, root: Path) -> StreamingQuery:
    """Flights, minutes of delay and miles per carrier and per destination: a native aggregation of Spark.

    Where the query's checkpoint is lost, the aggregation begins with the restored totals as its first
    micro-batch, and the events go on after the position that was committed with them. The sums of both are
    the totals as if nothing had happened.
    """
    checkpoint = root / "spark" / "counters"
    again = resume_if_lost(root / "counters", app_id="counters", checkpoint=checkpoint)
    begin = {"startingOffsets": "earliest"} if again is None else again.options()
    events = spark.readStream.format("keyfold").option("maxOffsetsPerTrigger", ROWS_PER_TRIGGER)
    totals = aggregate(
        _totals(events.options(**begin).load(str(root / "events"))),
        ["kind", "name"],
        *(F.sum(name).alias(name) for name in ("flights", "delay_minutes", "miles")),
        resumed=again,
    )
    sink = ChangelogSink(
        root / "counters", keys=["kind", "name"], partitions=PARTITIONS, config=BY_HAND, on_reset="restore"
    )
    return (
        totals.writeStream.queryName("counters")
        .outputMode("update")
        .foreachBatch(sink)
        .option("checkpointLocation", str(checkpoint))
        .start()
    )


def _totals(events: DataFrame) -> DataFrame:
    """Each flight as a count of one for its carrier, and one for its destination."""
    name = F.explode(
        F.array(
            F.struct(F.lit("carrier").alias("kind"), F.col("carrier").alias("name")),
            F.struct(F.lit("destination").alias("kind"), F.col("dest").alias("name")),
        )
    )
    delay = F.coalesce("delay_minutes", F.lit(0)).cast("bigint").alias("delay_minutes")
    counted = events.select(name.alias("of"), delay, F.col("miles").cast("bigint").alias("miles"))
    return counted.select(
        "of.kind", "of.name", F.lit(1).cast("bigint").alias("flights"), "delay_minutes", "miles"
    )


def locate(spark: SparkSession, root: Path) -> StreamingQuery:
    """The last known airport of every aircraft, in keyfold's own store."""
    events = (
        spark.readStream.format("keyfold")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", ROWS_PER_TRIGGER)
        .load(str(root / "events"))
    )
    airport = F.when(F.col("landed"), F.col("dest")).otherwise(F.col("origin")).alias("airport")
    seen = events.where("departed").select("tailnum", "seq", "scheduled", airport)
    sink = TaskSink(root / "positions", Positions(), partitions=PARTITIONS, config=BY_HAND)
    return (
        seen.writeStream.queryName("positions")
        .foreachBatch(sink)
        .option("checkpointLocation", str(root / "spark" / "positions"))
        .start()
    )


class Positions(Task):
    """Puts where each aircraft was seen last, and deletes those not seen for 30 days of the flights' own
    time. All of a micro-batch is one commit.
    """

    stores: ClassVar = {
        "aircraft": Store(key=StringSerde(), value=JsonSerde()),
        "clock": Store(key=StringSerde(), value=StringSerde()),
    }

    def process(self, records: pa.RecordBatch, store: NamedStores) -> None:
        seen = pa.Table.from_batches([records])
        newest = seen.group_by("tailnum").aggregate([("seq", "max")]).rename_columns(["tailnum", "seq"])
        last = newest.join(seen.drop_columns(["tailnum"]), "seq").to_pylist()
        where = {r["tailnum"]: {"airport": r["airport"], "seen": r["scheduled"].isoformat()} for r in last}
        store["aircraft"].put_all(where)
        now = max(_now(store), pc.max(seen["scheduled"]).as_py())
        store["clock"].put("now", now.isoformat())

    def window(self, store: NamedStores) -> None:
        aircraft, earliest = store["aircraft"], _now(store) - FORGET_AFTER
        with aircraft.all() as entries:
            unseen = [tailnum for tailnum, value in entries if _seen(value) < earliest]
        aircraft.delete_all(unseen)


def _now(store: NamedStores) -> datetime:
    """The latest time of any flight so far."""
    stored = store["clock"].get("now")
    return FIRST_OF_ALL if stored is None else datetime.fromisoformat(stored)


def _seen(position: dict[str, str]) -> datetime:
    return datetime.fromisoformat(position["seen"])


def positions(state: dict[bytes, bytes]) -> dict[str, tuple[str, datetime]]:
    """tailnum → airport and time, of the restored changelog, where a store's keys begin with its name."""
    found = {}
    for key, value in state.items():
        if key.startswith(b"aircraft\0"):
            position = json.loads(value)
            found[key.removeprefix(b"aircraft\0").decode()] = position["airport"], _seen(position)
    return found


def position(source: tuple[str, ...]) -> int:
    """How many events a follower has taken in, by the source offsets of its last commit."""
    offsets = [json.loads(text) for text in source]
    return sum(sum(o["offsets"].values()) for o in offsets if "offsets" in o)


def session(root: Path) -> SparkSession:
    return (
        SparkSession.builder.master("local[2]")
        .appName("flights")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(root / "spark" / "warehouse"))
        .getOrCreate()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    root = parser.parse_args().directory.absolute()
    spark = session(root)
    spark.sparkContext.setLogLevel("ERROR")
    finite = [ingest(spark, root), count_rejected(spark, root)]
    while not (root / "events" / "changelog.json").exists() and finite[0].isActive:
        finite[0].awaitTermination(1)
    following = [count(spark, root), locate(spark, root)]
    for query in finite:
        query.awaitTermination()
    for query in following:
        query.processAllAvailable()
        query.stop()
    spark.stop()


if __name__ == "__main__":
    main()
