"""A PySpark job that reads a topic and is killed again and again: counters, and the records as they are.

    python -m support.kafka_job DIRECTORY BROKER TOPIC

It ends when both queries have read all that the topic has. Either is resumed where its checkpoint was lost.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import functions as F

from keyfold import ChangelogSink, aggregate, kafka_stream, resume_if_lost
from support.session import spark_session

NAMES = ("counts", "records")


def main() -> None:
    root, broker, topic = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    options = {
        "kafka.bootstrap.servers": broker, "subscribe": topic, "startingOffsets": "earliest",
        "includeHeaders": True, "maxOffsetsPerTrigger": 120,
    }  # fmt: skip
    spark = spark_session(root / "spark")
    again = {
        name: resume_if_lost(root / name, name, checkpoint=root / f"checkpoint-{name}") for name in NAMES
    }
    stream = {name: kafka_stream(spark, options, resumed=again[name]) for name in NAMES}
    words = stream["counts"].select(F.col("key").cast("string").alias("word"))
    frames = {
        "counts": aggregate(words, "word", F.count("*").alias("n"), resumed=again["counts"]),
        "records": stream["records"],
    }
    queries = [
        frame.writeStream.outputMode("update")
        .foreachBatch(
            ChangelogSink(
                root / name, keys="word" if name == "counts" else None, partitions=2, on_reset="restore",
                config={"segment.bytes": "8KiB", "cleaner.backoff.ms": 50, "delete.retention.ms": "1d"},
            )
        )
        .option("checkpointLocation", str(root / f"checkpoint-{name}")).trigger(availableNow=True).start()
        for name, frame in frames.items()
    ]  # fmt: skip
    for query in queries:
        query.awaitTermination()


if __name__ == "__main__":
    main()
