"""`keyfold.aggregate`: what a resumed aggregation gives, and what is refused."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

from keyfold import Changelog, ChangelogSink, aggregate, resume, resume_if_lost
from keyfold.statestore.errors import ConfigError, SchemaMismatch
from support.events import QUIET, Events, finish, fold, forget_batch, kept, lose, rows_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from keyfold import Resumed

SCHEMA = "word string not null, n long, small int, price decimal(9,2), name string, day date, x double"
Row = tuple[Any, ...]


def row(word: str, n: int | None, price: str | None = None, name: str | None = None) -> Row:
    value = None if price is None else Decimal(price)
    return (word, n, None if n is None else n % 7, value, name, None, None if n is None else n / 8)


FIRST = [row("a", 1, "1.10", "x"), row("a", 4, "2.05", None), row("b", None), row("c", None, "-3.33", "m")]
SECOND = [row("a", 9, "0.01", "k"), row("b", None), row("d", 5, None, "z"), row("c", 7)]
THIRD = [row("b", -2, "9999999.99", "b"), row("a", None), row("e", None), row("c", -7, "3.33", "a")]


def everything() -> list[Column]:
    return [
        F.sum("n").alias("total"),
        F.sum("small").alias("small"),
        F.sum("price").alias("spent"),
        F.count("*").alias("rows"),
        F.count("n").alias("with n"),
        F.expr("count(n, name)").alias("both"),
        F.min("name").alias("first_name"),
        F.max(F.col("n") + 1).alias("most"),
        F.min("day").alias("day"),
        F.avg("n").alias("mean"),
        F.avg("price").alias("mean_price"),
        F.mean("x").alias("x"),
        F.expr("sum(n) FILTER (WHERE n > 4)").alias("large"),
        F.expr("count(*) FILTER (WHERE n > 4)").alias("larges"),
        F.expr("avg(n) FILTER (WHERE name IS NOT NULL)").alias("named"),
    ]


def records(path: Path) -> int:
    """How many were ever written."""
    with Changelog.open(path, mode="r") as log:
        return sum(log.state.ends)


def parts() -> list[Column]:
    """What an average adds: a sum and a count, which `agg` can compute too."""
    return [
        F.sum(F.col("n").cast("double")).alias("mean_sum"),
        F.count("n").alias("mean_count"),
        F.sum("price").alias("mean_price_sum"),
        F.count("price").alias("mean_price_count"),
        F.sum("x").alias("x_sum"),
        F.count("x").alias("x_count"),
        F.expr("sum(cast(n AS double)) FILTER (WHERE name IS NOT NULL)").alias("named_sum"),
        F.expr("count(n) FILTER (WHERE name IS NOT NULL)").alias("named_count"),
    ]


def plain(frame: DataFrame) -> DataFrame:
    return frame.groupBy("word").agg(*everything(), *parts())


@pytest.fixture
def events(spark: SparkSession, tmp_path: Path) -> Events:
    return Events(spark, tmp_path / "events", SCHEMA)


class Job:
    """A query that counts `events` into a changelog; `run` is one run to its end, resumed where it lost its
    checkpoint.
    """

    def __init__(self, events: Events, directory: Path, *aggregates: Column) -> None:
        self.events = events
        self.log = directory / "counts"
        self.checkpoint = directory / "checkpoint"
        self.aggregates = aggregates

    def frame(self, again: Resumed | None, spark: SparkSession | None = None) -> DataFrame:
        live = self.events.stream(None if again is None else again.options(), spark)
        return aggregate(live, "word", *self.aggregates, resumed=again)

    def run(self, spark: SparkSession | None = None) -> None:
        again = resume_if_lost(self.log, "counts", checkpoint=self.checkpoint)
        with ChangelogSink(self.log, keys="word", config=QUIET, on_reset="restore") as sink:
            finish(self.frame(again, spark), sink, self.checkpoint)

    def totals(self) -> dict[str, Any]:
        """Of the first aggregate."""
        name = self.frame(None).columns[1]
        return {r["word"]: r[name] for r in kept(self.log)}


@pytest.fixture
def job(events: Events, tmp_path: Path) -> Job:
    return Job(events, tmp_path, *everything())


# -- what comes out ------------------------------------------------------------------------------------------


def test_it_is_the_plain_aggregation_with_the_parts_of_averages(events: Events) -> None:
    """Values, types, and which columns can be null."""
    frame = events.add(*FIRST, *SECOND, *THIRD).all()
    ours, theirs = aggregate(frame, ["word"], *everything()), plain(frame)
    assert sorted(ours.columns) == sorted(theirs.columns)
    assert ours.columns[:2] == ["word", "total"]
    assert ours.columns[-3:] == ["named", "named_sum", "named_count"]
    assert ours.select(*theirs.columns).schema == theirs.schema
    assert rows_of(ours) == rows_of(theirs)


def test_a_query_that_is_resumed_twice_gives_what_one_gives_that_never_stopped(
    job: Job, events: Events, spark: SparkSession
) -> None:
    """With other numbers of shuffle partitions, passes between, and the same columns each time. What did not
    change is not written again.
    """
    wider = spark.newSession()
    wider.conf.set("spark.sql.shuffle.partitions", "5")
    events.add(*FIRST)
    job.run()
    assert kept(job.log) == rows_of(plain(events.all()))
    with Changelog.open(job.log) as log:
        columns = log.columns
    for session, rows in ((wider, SECOND), (spark, THIRD)):
        lose(job.checkpoint)
        fold(job.log)
        events.add(*rows)
        before = records(job.log)
        job.run(session)
        assert kept(job.log) == rows_of(plain(events.all()))
        assert records(job.log) - before == len({word for word, *_ in rows})
    events.add(*FIRST)
    job.run()
    assert kept(job.log) == rows_of(plain(events.all()))
    with Changelog.open(job.log) as log:
        assert log.columns == columns


def test_a_crash_before_spark_notes_the_first_batch_counts_nothing_twice(
    events: Events, tmp_path: Path
) -> None:
    job = Job(events.add(*FIRST), tmp_path, F.sum("n").alias("n"))
    job.run()
    lose(job.checkpoint)
    events.add(*SECOND)
    job.run()
    forget_batch(job.checkpoint, 0)
    fold(job.log)
    events.add(*THIRD)
    job.run()
    assert job.totals() == {"a": 14, "b": -2, "c": 0, "d": 5, "e": None}


def test_a_pin_that_is_not_kept_in_the_checkpoint_seeds_the_same_state_again(
    events: Events, tmp_path: Path
) -> None:
    """`resume` is called a second time, when the last commit is the new query's own."""
    job = Job(events.add(*FIRST), tmp_path, F.sum("n").alias("n"))
    job.run()
    lose(job.checkpoint)
    events.add(*SECOND)
    for rows in (FIRST, THIRD):
        with ChangelogSink(job.log, keys="word", config=QUIET, on_reset="restore") as sink:
            with resume(job.log, "counts") as again:
                finish(job.frame(again), sink, job.checkpoint)
            if rows is FIRST:
                forget_batch(job.checkpoint, 0)
        fold(job.log)
        events.add(*rows)
    with ChangelogSink(job.log, keys="word", config=QUIET, on_reset="restore") as sink:
        finish(job.frame(again), sink, job.checkpoint)
    assert job.totals() == {"a": 19, "b": -2, "c": 0, "d": 5, "e": None}


def test_keys_of_several_columns_and_odd_names_are_taken(events: Events, tmp_path: Path) -> None:
    events.add(*FIRST)
    log, checkpoint = tmp_path / "counts", tmp_path / "checkpoint"
    for rows in (SECOND, THIRD):
        again = resume_if_lost(log, "counts", checkpoint=checkpoint)
        live = events.stream(None if again is None else again.options()).where("name IS NOT NULL")
        live = live.withColumn("the `word`.", F.upper("word"))
        frame = aggregate(
            live, ["the `word`.", "name"], F.sum("n").alias("a.b"), F.avg("n").alias("m`"), resumed=again
        )
        with ChangelogSink(log, keys=["the `word`.", "name"], on_reset="restore", config=QUIET) as sink:
            finish(frame, sink, checkpoint)
        lose(checkpoint)
        events.add(*rows)
    found = {(r["the `word`."], r["name"]): (r["a.b"], r["m`"], r["m`_count"]) for r in kept(log)}
    assert found == {
        ("A", "x"): (1, 1.0, 1),
        ("C", "m"): (None, None, 0),
        ("A", "k"): (9, 9.0, 1),
        ("D", "z"): (5, 5.0, 1),
    }


def test_a_sum_that_overflows_after_a_resume_fails_as_it_would_have_before(
    events: Events, tmp_path: Path
) -> None:
    job = Job(events.add(row("a", 2**63 - 5)), tmp_path, F.sum("n").alias("n"))
    job.run()
    lose(job.checkpoint)
    events.add(row("a", 100))
    with pytest.raises(StreamingQueryException, match="ARITHMETIC_OVERFLOW"):
        job.run()
    assert job.totals() == {"a": 2**63 - 5}


def test_what_is_computed_behind_is_named(events: Events, tmp_path: Path) -> None:
    job = Job(events.add(*FIRST), tmp_path, F.sum("n").alias("n"))
    with ChangelogSink(job.log, keys="word", config=QUIET) as sink:
        finish(job.frame(None).withColumn("twice", F.col("n") * 2), sink, job.checkpoint)
    with resume(job.log, "counts") as again:
        live = events.stream(again.options())
        with pytest.raises(SchemaMismatch, match="twice: bigint"):
            aggregate(live, "word", *job.aggregates, resumed=again)
        frame = aggregate(live, "word", *job.aggregates, resumed=again, computed=["twice"])
        assert frame.columns == ["word", "n"]


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("count(DISTINCT n) AS v", "DISTINCT"),
        ("sum(DISTINCT n) AS v", "DISTINCT"),
        ("approx_count_distinct(n) AS v", "approx_count_distinct"),
        ("collect_list(n) AS v", "collect_list"),
        ("first(n) AS v", "first"),
        ("stddev(n) AS v", "stddev"),
        ("percentile(n, 0.5) AS v", "percentile"),
        ("try_sum(n) AS v", "try_sum"),
        ("try_avg(n) AS v", "try_avg"),
        ("sum(n) + 1 AS v", "computed from aggregates"),
        ("cast(avg(n) AS int) AS v", "computed from aggregates"),
        ("avg(cast(price AS decimal(30,2))) AS v", "decimal"),
    ],
)
def test_what_has_no_parts_is_refused_with_its_column(events: Events, sql: str, why: str) -> None:
    frame = events.spark.createDataFrame([], SCHEMA)
    with pytest.raises(ConfigError, match=why) as caught:
        aggregate(frame, "word", F.sum("n").alias("n"), F.expr(sql))
    assert caught.value.position == "column 'v'"


def test_the_way_that_can_is_named(events: Events) -> None:
    with pytest.raises(ConfigError, match=r"transformWithState with keyfold\.initial_state"):
        aggregate(events.spark.createDataFrame([], SCHEMA), "word", F.stddev("n").alias("v"))


def test_a_decimal_sum_that_may_become_null_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    lax = spark.newSession()
    lax.conf.set("spark.sql.ansi.enabled", "false")
    frame = lax.createDataFrame([], SCHEMA)
    for column in (F.sum("price"), F.avg("price")):
        with pytest.raises(ConfigError, match=r"ansi\.enabled=true"):
            aggregate(frame, "word", column.alias("v"))
    assert aggregate(frame, "word", F.sum("n").alias("v"), F.max("price").alias("w")).columns[0] == "word"


def test_arguments_that_cannot_be_are_refused(spark: SparkSession) -> None:
    frame, n = spark.createDataFrame([], SCHEMA), F.sum("n")
    wrong: list[tuple[Any, list[Any], str]] = [
        ("nowhere", [n.alias("v")], "keys have to be columns"),
        ([], [n.alias("v")], "keys have to be columns"),
        ("word", [], "Not aggregates"),
        ("word", ["n"], "Not aggregates"),
        ("word", [n], "no name of its own"),
        ("word", [n.alias("WORD")], "one name"),
        ("word", [F.avg("n").alias("v"), n.alias("v_sum")], "one name"),
        ("word", [n.alias("Keyfold_changed")], "one name"),
    ]
    for keys, columns, message in wrong:
        with pytest.raises(ConfigError, match=message):
            aggregate(frame, keys, *columns)


def test_windows_with_a_watermark_are_refused_and_others_are_not(spark: SparkSession) -> None:
    live = spark.readStream.format("rate").load()
    hours = F.window("timestamp", "1 hour")
    ending = live.withWatermark("timestamp", "1 minute").withColumn("hour", hours)
    with pytest.raises(ConfigError, match="watermark") as caught:
        aggregate(ending, "hour", F.sum("value").alias("n"))
    assert caught.value.position == "column 'hour'"
    assert aggregate(live.withColumn("hour", hours), "hour", F.sum("value").alias("n")).isStreaming


def test_another_stateful_operator_in_front_is_refused(spark: SparkSession) -> None:
    """What it remembers is lost with the checkpoint. A frame that is read once has no state."""
    once = spark.createDataFrame([], SCHEMA)
    live = spark.readStream.format("rate").load().selectExpr("value AS n", "'a' AS word")
    stateful = {
        "Deduplicate": live.dropDuplicates(["n"]),
        "Aggregate": live.groupBy("word", "n").count(),
        "Join": live.join(live.withColumnRenamed("word", "other"), "n"),
        "GlobalLimit": live.limit(5),
    }
    for kind, frame in stateful.items():
        with pytest.raises(ConfigError, match=kind):
            aggregate(frame, "word", F.sum("n").alias("v"))
    joined = live.join(once.dropDuplicates(["word"]).select("word"), "word")
    assert aggregate(joined, "word", F.sum("n").alias("v")).isStreaming
    assert not aggregate(once.dropDuplicates(["n"]), "word", F.sum("n").alias("v")).isStreaming


@pytest.fixture
def small(events: Events, tmp_path: Path) -> Job:
    """A changelog of `n` and the parts of an average of prices."""
    job = Job(events.add(*FIRST), tmp_path, F.sum("n").alias("n"), F.avg("price").alias("p"))
    job.run()
    return job


def test_an_aggregation_that_changed_is_told_column_by_column(small: Job) -> None:
    changed = {
        "no such column.*found: m: bigint": [*small.aggregates, F.max("n").alias("m")],
        r"expected: p: decimal\(13,6\); p_sum.*no such column": small.aggregates[:1],
        "expected: n: bigint.*found: n: double": [F.sum("x").alias("n"), small.aggregates[1]],
        r"p_sum: decimal\(19,2\).*found: p: double; p_sum: double": [
            small.aggregates[0],
            F.avg("x").alias("p"),
        ],
    }
    with resume(small.log, "counts") as again:
        live = small.events.stream(again.options())
        for message, columns in changed.items():
            with pytest.raises(SchemaMismatch, match=f"(?s){message}.*what to do: aggregate what"):
                aggregate(live, "word", *columns, resumed=again)
        with pytest.raises(SchemaMismatch, match=r"(?s)expected: .*keys word.*keys name"):
            aggregate(live, "name", *small.aggregates, resumed=again)
        with pytest.raises(ConfigError, match="Only a stream"):
            aggregate(small.events.all(), "word", *small.aggregates, resumed=again)


def test_a_changelog_of_bytes_is_no_aggregations(events: Events, tmp_path: Path) -> None:
    events.add(*FIRST)
    import pyarrow as pa

    with Changelog.open(tmp_path / "raw") as log:
        log.append(pa.table({"key": [b"a"], "value": [b"1"]}), app_id="raw", batch_id=0)
    with resume(tmp_path / "raw", "raw") as again:
        with pytest.raises(SchemaMismatch, match="bytes"):
            aggregate(events.stream(), "word", F.sum("n").alias("n"), resumed=again)
