"""`ChangelogSink` on real queries: every batch is one commit, once, in order; nothing else is visible."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import functions as F

from keyfold import Changelog, ChangelogSink
from keyfold.statestore.errors import (
    BadRecord,
    BatchConflict,
    ChangelogLocked,
    ConfigError,
    NotAChangelog,
    SchemaMismatch,
)
from support import streams
from support.streams import commits, forget_batch, pairs, run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def words(spark: SparkSession, directory: Path) -> streams.Files:
    return streams.Files(spark, directory / "words", "word string, n long")


def kafka(spark: SparkSession, *rows: tuple[object, ...]) -> DataFrame:
    """Rows of key and value in Kafka's shape, one partition."""
    return spark.createDataFrame([*rows], "key string, value string").coalesce(1)


def work_files(path: Path) -> list[Path]:
    return [p for p in (path / "work").rglob("*") if not p.name.isdigit()]


# -- each batch once -----------------------------------------------------------------------------------------


def test_every_batch_is_one_commit_with_its_source_offsets(spark: SparkSession, tmp_path: Path) -> None:
    source = (
        words(spark, tmp_path).add({"word": "a", "n": 1}, {"word": "b", "n": 2}).add({"word": "a", "n": 3})
    )
    with ChangelogSink(tmp_path / "log", keys="word", partitions=1) as sink:
        run(source.stream(), sink, tmp_path / "checkpoint")
        assert pairs(sink.log) == [(b"a", {"n": 1}), (b"b", {"n": 2}), (b"a", {"n": 3})]
        assert commits(sink.log) == [(0, ('{"logOffset":0}',)), (1, ('{"logOffset":1}',))]
        assert {c.app for c in sink.log.state.commits} == {"log"}
        assert len({c.query for c in sink.log.state.commits} - {""}) == 1
    assert work_files(tmp_path / "log") == []


def test_a_batch_that_spark_delivers_again_adds_nothing(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path).add({"word": "a", "n": 1}).add({"word": "a", "n": 2})
    with ChangelogSink(tmp_path / "log", keys="word") as sink:
        run(source.stream(), sink, tmp_path / "checkpoint")
    forget_batch(tmp_path / "checkpoint", 1)
    source.add({"word": "a", "n": 3})
    with ChangelogSink(tmp_path / "log", keys="word") as sink:
        run(source.stream(), sink, tmp_path / "checkpoint")
        assert pairs(sink.log) == [(b"a", {"n": 1}), (b"a", {"n": 2}), (b"a", {"n": 3})]
        assert [batch for batch, _ in commits(sink.log)] == [0, 1, 2]


def test_a_stateful_query_whose_batch_is_skipped_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    """It would fail at its state store if a partition of the skipped batch were not read."""
    source = words(spark, tmp_path)
    source.add(*({"word": w, "n": 1} for w in "abcdef")).add({"word": "a", "n": 1})
    counts = source.stream().groupBy("word").agg(F.sum("n").alias("n"))
    with ChangelogSink(tmp_path / "log", keys="word", partitions=4) as sink:
        run(counts, sink, tmp_path / "checkpoint", "update")
        forget_batch(tmp_path / "checkpoint", 1)
        source.add({"word": "a", "n": 5}, {"word": "f", "n": 5})
        run(counts, sink, tmp_path / "checkpoint", "update")
        state = dict(pairs(sink.log))
        assert state == {w.encode(): {"n": 1} for w in "bcde"} | {b"a": {"n": 7}, b"f": {"n": 6}}
        assert [batch for batch, _ in commits(sink.log)] == [0, 1, 2]


def test_an_empty_batch_commits_too(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path).add({"word": "a", "n": 1})
    with ChangelogSink(tmp_path / "log", keys="word", partitions=2) as sink:
        run(source.stream().where("n > 1"), sink, tmp_path / "checkpoint")
        assert pairs(sink.log) == []
        assert commits(sink.log) == [(0, ('{"logOffset":0}',))]


def test_without_a_query_a_batch_is_known_by_its_id_alone(spark: SparkSession, tmp_path: Path) -> None:
    with ChangelogSink(tmp_path / "log") as sink:
        sink(kafka(spark, ("a", "1")), 3)
        sink(kafka(spark, ("a", "other rows")), 3)
        with pytest.raises(BatchConflict, match="was never committed"):
            sink(kafka(spark, ("a", "earlier")), 1)
        sink(kafka(spark, ("a", "2")), 7)
        assert pairs(sink.log) == [(b"a", b"1"), (b"a", b"2")]
        assert commits(sink.log) == [(3, ()), (7, ())]


def test_an_app_of_a_query_takes_no_batch_without_one(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path).add({"word": "a", "n": 1})
    with ChangelogSink(tmp_path / "log", keys="word") as sink:
        run(source.stream(), sink, tmp_path / "checkpoint")
        with pytest.raises(BatchConflict, match="belongs to a streaming query"):
            sink(spark.createDataFrame([("a", 1)], source.schema), 9)


# -- order, time, placement ----------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["tasks", "driver"])
def test_records_keep_the_order_of_the_dataframe(spark: SparkSession, tmp_path: Path, placement: Any) -> None:
    frame = spark.range(0, 5000, 1, 3).selectExpr("cast(id % 10 as string) key", "cast(id as string) value")
    with ChangelogSink(tmp_path / "log", partitions=3, placement=placement) as sink:
        sink(frame, 0)
        sink(frame, 1)
        for partition in range(3):
            values = [int(v) for b in sink.log.read(partition) for v in b.column("value").to_pylist()]
            half = len(values) // 2
            assert values == sorted(values[:half]) * 2
        assert sorted(int(v or b"") for _, v in pairs(sink.log)) == sorted([*range(5000), *range(5000)])
        expected = {k: sink.log.partition(k) for k, _ in pairs(sink.log)}
        for partition in range(3):
            keys = {k for b in sink.log.read(partition) for k in b.column("key").to_pylist()}
            assert keys == {k for k, p in expected.items() if p == partition}


def test_rows_have_the_time_of_their_batch(spark: SparkSession, tmp_path: Path) -> None:
    with ChangelogSink(tmp_path / "log") as sink:
        before = sink.log.engine.writer.clock_ms()
        sink(kafka(spark, ("a", "1"), ("b", "2")), 0)
        (batch,) = sink.log.read(0)
        first, second = batch.column("timestamp").cast("int64").to_pylist()
        assert before <= first == second <= sink.log.engine.writer.clock_ms()


def test_a_dataframe_in_kafkas_shape_keeps_headers_and_timestamps(
    spark: SparkSession, tmp_path: Path
) -> None:
    frame = spark.sql(
        "select 'topic' topic, 7 partition, 99L offset, 1 timestampType, binary('k') key, binary('v') value, "
        "timestamp_millis(1234567890123) timestamp, "
        "array(named_struct('key', 'h', 'value', binary('x'))) headers "
        "union all select 'topic', 7, 100L, 1, binary('k'), null, null, null"
    ).coalesce(1)
    with ChangelogSink(tmp_path / "log") as sink:
        sink(frame, 0)
        rows = [row for batch in sink.log.read(0) for row in batch.to_pylist()]
        assert [row["value"] for row in rows] == [b"v", None]
        assert rows[0]["headers"] == [{"key": "h", "value": b"x"}]
        assert rows[0]["timestamp"].isoformat() == "2009-02-13T23:31:30.123000"
        assert rows[1]["headers"] is None
        assert rows[1]["timestamp"].year > 2020, "a null timestamp becomes the time of the batch"
        assert sink.log.state.partitions[0].segments[0].tombstones == 1


def test_compressed_logs_hold_the_same_records(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.range(0, 3000, 1, 2).selectExpr("cast(id as string) key", "repeat('x', 100) value")
    written = []
    for codec in ("none", "zstd"):
        with ChangelogSink(tmp_path / codec, partitions=2, config={"compression.type": codec}) as sink:
            sink(frame, 0)
            written.append((pairs(sink.log), sum(p.bytes for p in sink.log.state.partitions)))
    assert written[0][0] == written[1][0]
    assert written[1][1] < written[0][1] / 2


# -- what goes wrong leaves nothing --------------------------------------------------------------------------


def test_a_null_key_is_named_and_nothing_of_its_batch_counts(spark: SparkSession, tmp_path: Path) -> None:
    keys = F.when(F.col("id") != 700, F.col("id").cast("string"))
    frame = spark.range(0, 1000, 1, 2).select(keys.alias("key"), F.lit("v").alias("value"))
    with ChangelogSink(tmp_path / "log", partitions=2) as sink:
        sink(kafka(spark, ("a", "1")), 0)
        with pytest.raises(BadRecord, match="no key") as caught:
            sink(frame, 1)
        assert caught.value.position == "batch 1, Spark partition 1, row 200"
        assert pairs(sink.log) == [(b"a", b"1")]
        assert work_files(tmp_path / "log") == []
        sink(kafka(spark, ("a", "2")), 1)
        assert pairs(sink.log) == [(b"a", b"1"), (b"a", b"2")]


def test_a_header_without_a_key_is_named(spark: SparkSession, tmp_path: Path) -> None:
    rows = "(binary('k'), binary('v'), array(named_struct('key', 'h', 'value', binary('x'))))"
    bad = rows.replace("'h'", "string(null)")
    frame = spark.sql(f"select * from values {rows}, {bad} as t(key, value, headers)").coalesce(1)
    with ChangelogSink(tmp_path / "log") as sink:
        with pytest.raises(BadRecord, match="header") as caught:
            sink(frame, 0)
        assert caught.value.position == "batch 0, Spark partition 0, row 1"
        assert pairs(sink.log) == []


@pytest.mark.parametrize("placement", ["tasks", "driver"])
def test_a_value_that_cannot_be_written_is_refused_with_its_batch(
    spark: SparkSession, tmp_path: Path, placement: Any
) -> None:
    with ChangelogSink(tmp_path / "log", keys="k", placement=placement) as sink:
        df = spark.range(1).selectExpr("'a' k", "cast(x'ff' as string) v")
        with pytest.raises(BadRecord, match="'v' has a string that is not valid UTF-8") as caught:
            sink(df, 4)
        assert str(caught.value.position).startswith("batch 4, Spark partition ")
        assert sink.log.state.commits == ()


@pytest.mark.parametrize("placement", ["tasks", "driver"])
def test_after_a_failure_in_spark_the_next_batch_is_taken(
    spark: SparkSession, tmp_path: Path, placement: Any
) -> None:
    broken = spark.range(0, 100, 1, 2).selectExpr("string(id) key", "string(assert_true(id != 70)) value")
    with ChangelogSink(tmp_path / "log", placement=placement) as sink:
        with pytest.raises(PySparkException, match="is not true"):
            sink(broken, 0)
        assert pairs(sink.log) == []
        assert work_files(tmp_path / "log") == []
        sink(kafka(spark, ("a", "1")), 0)
        assert pairs(sink.log) == [(b"a", b"1")]


def test_a_task_that_is_tried_again_adds_its_rows_once(tmp_path: Path) -> None:
    """In a process of its own: only a master such as local[2,3] tries a task again."""
    script = """if True:
        import sys
        from pathlib import Path
        from pyspark.sql import SparkSession
        from keyfold import ChangelogSink
        from support import streams
        root = Path(sys.argv[1])
        builder = SparkSession.builder.master("local[2,3]").config("spark.ui.enabled", "false")
        spark = builder.config("spark.local.dir", str(root / "local")).getOrCreate()
        spark.sparkContext.setLogLevel("OFF")
        def fails_once(batches):
            yield from batches
            from pyspark import TaskContext
            if TaskContext.get().attemptNumber() == 0 and TaskContext.get().partitionId() == 1:
                raise RuntimeError("once")
        rows = spark.range(0, 60000, 1, 2).selectExpr("string(id) key", "repeat('x', 100) value")
        with ChangelogSink(root / "log") as sink:
            seen = set()
            remove = sink._files.remove_tree
            def look(path):
                seen.update(p.name for p in path.iterdir())
                remove(path)
            sink._files.remove_tree = look
            sink(rows.mapInArrow(fails_once, "key string, value string"), 0)
            assert len(seen) == 3, seen
            keys = [int(key) for key, _ in streams.pairs(sink.log)]
            assert keys == list(range(60000)), len(keys)
        print("passed")
    """
    support = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(support)!r})\n" + script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable},
    )
    assert "passed" in done.stdout, done.stderr[-3000:]


# -- what is refused -----------------------------------------------------------------------------------------


def test_settings_are_refused_when_the_sink_is_built(tmp_path: Path) -> None:
    for given, message in (
        ({"config": {"segment.byte": 1}}, r"'segment\.bytes'"),
        ({"partitions": 0}, "number of partitions"),
        ({"placement": "taks"}, "did you mean 'tasks'"),
        ({"on_reset": "appnd"}, "did you mean 'append'"),
        ({"app_id": ""}, "Invalid app id"),
    ):
        with pytest.raises(ConfigError, match=message):
            ChangelogSink(tmp_path / "log", keys="word", **given)
    assert not (tmp_path / "log").exists()


def test_workers_without_keyfold_are_told(spark: SparkSession, tmp_path: Path) -> None:
    def not_there(batches: Any) -> Any:
        raise ModuleNotFoundError("No module named 'keyfold'")

    with ChangelogSink(tmp_path / "log", keys="word") as sink:
        words = spark.createDataFrame([("a",)], "word string").mapInArrow(not_there, "word string")
        with pytest.raises(ConfigError, match=r"cannot import keyfold(.|\n)*PYSPARK_PYTHON"):
            sink(words, 0)


def test_a_directory_of_something_else_is_refused_when_the_sink_is_built(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    for keys in (None, "word"):
        with pytest.raises(NotAChangelog, match=r"photo\.jpg"):
            ChangelogSink(tmp_path, keys=keys)


def test_other_partitions_than_those_of_the_changelog_are_refused(tmp_path: Path) -> None:
    ChangelogSink(tmp_path / "log", partitions=2).close()
    with pytest.raises(ConfigError, match="cannot change"):
        ChangelogSink(tmp_path / "log", partitions=3)
    with ChangelogSink(tmp_path / "log") as sink:
        assert sink.log.partitions == 2


def test_keys_for_a_changelog_of_raw_bytes_are_refused_and_the_other_way_round(
    spark: SparkSession, tmp_path: Path
) -> None:
    ChangelogSink(tmp_path / "raw").close()
    with pytest.raises(SchemaMismatch, match="leave out keys="):
        ChangelogSink(tmp_path / "raw", keys="word")
    with ChangelogSink(tmp_path / "typed", keys="word") as sink:
        sink(spark.createDataFrame([("a", 1)], "word string, n long"), 0)
    with pytest.raises(SchemaMismatch, match="name its key columns"):
        ChangelogSink(tmp_path / "typed")


def test_a_changelog_that_another_process_writes_is_refused_with_its_pid(tmp_path: Path) -> None:
    hold = (
        "from keyfold import Changelog\n"
        f"log = Changelog.open({str(tmp_path / 'log')!r}); print(1, flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "1\n"
        with pytest.raises(ChangelogLocked, match=f"pid {other.pid}"):
            ChangelogSink(tmp_path / "log")
    finally:
        other.communicate("\n", timeout=30)


def test_complete_mode_is_refused_with_the_mode_to_use(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path).add({"word": "a", "n": 1})
    with ChangelogSink(tmp_path / "log", keys="word") as sink:
        with pytest.raises(StreamingQueryException, match=r'use outputMode\("update"\)'):
            run(source.stream().groupBy("word").count(), sink, tmp_path / "checkpoint", "complete")
        with pytest.raises(ConfigError, match="no open changelog"):
            _ = sink.log


def test_spark_connect_is_refused(tmp_path: Path) -> None:
    """Its DataFrames are not taken, and the sink is not sent to its server."""
    connected = type("DataFrame", (), {"__module__": "pyspark.sql.connect.dataframe"})
    with ChangelogSink(tmp_path / "log") as sink:
        with pytest.raises(ConfigError, match="Connect is not supported"):
            sink(connected(), 0)
        with pytest.raises(ConfigError, match="Connect is not supported"):
            copy.copy(sink)


@pytest.mark.parametrize("batch", [None, -1, "0", True])
def test_what_is_no_batch_id_is_refused(spark: SparkSession, tmp_path: Path, batch: Any) -> None:
    with ChangelogSink(tmp_path / "log") as sink, pytest.raises(ConfigError, match="Invalid batch id"):
        sink(kafka(spark, ("a", "1")), batch)


def test_what_is_no_dataframe_is_refused(tmp_path: Path) -> None:
    with ChangelogSink(tmp_path / "log") as sink, pytest.raises(ConfigError, match="found: list"):
        sink([("a", "1")], 0)  # type: ignore[arg-type]


# -- opening and closing -------------------------------------------------------------------------------------


def test_a_notebook_cell_can_be_run_twice(spark: SparkSession, tmp_path: Path) -> None:
    """The sink of the first run was never closed."""
    source = words(spark, tmp_path).add({"word": "a", "n": 1})
    first = ChangelogSink(tmp_path / "log", keys="word", partitions=2)
    run(source.stream(), first, tmp_path / "checkpoint")
    source.add({"word": "a", "n": 2})
    with ChangelogSink(tmp_path / "log", keys="word", partitions=2) as second:
        run(source.stream(), second, tmp_path / "checkpoint")
        assert pairs(first.log) == pairs(second.log) == [(b"a", {"n": 1}), (b"a", {"n": 2})]
        assert first.log.engine is second.log.engine
    assert len(pairs(first.log)) == 2
    first.close()
    Changelog.open(tmp_path / "log").close()


def test_a_closed_sink_takes_no_batch_and_can_be_closed_again(spark: SparkSession, tmp_path: Path) -> None:
    sink = ChangelogSink(tmp_path / "log")
    sink.close()
    sink.close()
    with pytest.raises(ConfigError, match="is closed"):
        sink(kafka(spark, ("a", "1")), 0)


def test_a_sink_that_was_closed_before_its_first_batch_makes_no_changelog(
    spark: SparkSession, tmp_path: Path
) -> None:
    sink = ChangelogSink(tmp_path / "log", keys="key")
    sink.close()
    with pytest.raises(ConfigError, match="is closed"):
        sink(kafka(spark, ("a", "1")), 0)
    assert not (tmp_path / "log").exists()


def test_a_sink_whose_writer_was_fenced_opens_the_changelog_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    with ChangelogSink(tmp_path / "log") as sink:
        sink(kafka(spark, ("a", "1")), 0)
        sink.log.engine.writer.fence("a test")
        sink(kafka(spark, ("a", "2")), 1)
        assert pairs(sink.log) == [(b"a", b"1"), (b"a", b"2")]
