"""A restored state as the first micro-batch of a stream, from which a new aggregation starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from keyfold.checkpoints.resume.resume import Resumed


def seed(spark: SparkSession, resumed: Resumed) -> DataFrame:
    """A stream that gives the state of `resumed` once, as its first micro-batch, and never anything again.

    `aggregate` does this for sums, counts, minima, maxima and averages. By hand: unite it with the stream
    that goes on from `resumed.options()`, the seed on the left, and aggregate both:

        again = resume("var/counts", app_id="counts")
        live = spark.readStream.format("keyfold").options(**again.options()).load("var/words")
        both = seed(spark, again).unionByName(live.selectExpr("word", "1L AS n"))
        counts = both.groupBy("word").agg(F.sum("n").alias("n"))

    The commit is part of the stream's offset. So a query that starts again with its own checkpoint is not
    seeded a second time, and one that crashed in its first batch gets the same state again, which `resume`
    has pinned.
    """
    return (
        spark.readStream.format("keyfold")
        .option("mode", "state")
        .option("at", resumed.commit.number)
        .load(str(resumed.path.absolute()))
    )
