"""The job: two queries read topics of Kafka, and each keeps a changelog.

    python kafka_job.py DIRECTORY --broker HOST:PORT --jars FOLDER

It ends when both have read all that the topics have; or somebody kills it: what is under DIRECTORY is whole
either way. Where a query's checkpoint is lost, the query goes on from its changelog.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from keyfold import ChangelogSink, aggregate, kafka_stream, resume_if_lost

FLIGHT = "carrier STRING, delay_minutes INT, miles INT"
PARTITIONS = 4


def count(spark: SparkSession, root: Path, options: dict[str, object]) -> StreamingQuery:
    """Flights, minutes of delay and the longest way of each carrier, from JSON: an aggregation of Spark."""
    checkpoint = root / "spark" / "carriers"
    again = resume_if_lost(root / "carriers", app_id="carriers", checkpoint=checkpoint)
    records = kafka_stream(spark, {**options, "subscribe": "flights"}, resumed=again)
    flights = records.select(F.from_json(F.col("value").cast("string"), FLIGHT).alias("flight"))
    totals = aggregate(
        flights.select("flight.*"),
        "carrier",
        F.count("*").alias("flights"),
        F.sum("delay_minutes").alias("delay_minutes"),
        F.max("miles").alias("longest"),
        resumed=again,
    )
    sink = ChangelogSink(root / "carriers", keys="carrier", partitions=PARTITIONS, on_reset="restore")
    return start(totals, sink, checkpoint)


def mirror(spark: SparkSession, root: Path, options: dict[str, object]) -> StreamingQuery:
    """The last record of each aircraft as it is, headers too; a record without a value deletes."""
    checkpoint = root / "spark" / "aircraft"
    again = resume_if_lost(root / "aircraft", app_id="aircraft", checkpoint=checkpoint)
    subscribed = {**options, "subscribe": "aircraft", "includeHeaders": True}
    records = kafka_stream(spark, subscribed, resumed=again)
    sink = ChangelogSink(root / "aircraft", partitions=PARTITIONS, on_reset="restore")
    return start(records, sink, checkpoint)


def start(frame: DataFrame, sink: ChangelogSink, checkpoint: Path) -> StreamingQuery:
    return (
        frame.writeStream.queryName(checkpoint.name)
        .outputMode("update")
        .foreachBatch(sink)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def session(root: Path, jars: Path) -> SparkSession:
    """A session with Spark's Kafka source. On the network, `spark.jars.packages` fetches it from Maven."""
    return (
        SparkSession.builder.master("local[2]")
        .appName("kafka")
        .config("spark.jars", ",".join(str(jar) for jar in sorted(jars.absolute().glob("*.jar"))))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(root / "spark" / "warehouse"))
        .getOrCreate()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--broker", required=True)
    parser.add_argument("--jars", type=Path, required=True, help="a folder with Spark's Kafka source")
    parser.add_argument("--per-trigger", type=int, default=4000, help="records in a micro-batch, at most")
    arguments = parser.parse_args()
    root = arguments.directory.absolute()
    spark = session(root, arguments.jars)
    spark.sparkContext.setLogLevel("ERROR")
    options: dict[str, object] = {
        "kafka.bootstrap.servers": arguments.broker,
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": arguments.per_trigger,
    }
    for query in [count(spark, root, options), mirror(spark, root, options)]:
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
