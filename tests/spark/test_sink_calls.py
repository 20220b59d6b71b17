"""How often a function of foreachBatch calls a sink: once for each batch, or it says that it skips one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import StreamingQueryException

from keyfold import Changelog, ChangelogSink, TaskSink
from keyfold.statestore.errors import ConfigError
from support import streams
from support.streams import forget_batch, run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Words:
    """A stream of which batch i holds the words a and b with the number i, and a changelog of them."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self.source = streams.Files(spark, directory / "words", "word string, n long")
        self.log = directory / "log"
        self.checkpoint = directory / "checkpoint"

    def add(self, *words: str) -> Words:
        self.source.add(*({"word": word, "n": self.source.count} for word in words))
        return self

    def sink(self, **settings: Any) -> ChangelogSink:
        return ChangelogSink(self.log, keys="word", **settings)

    def run(self, function: Callable[[DataFrame, int], None]) -> None:
        run(self.source.stream(), function, self.checkpoint)

    def held(self) -> list[tuple[str, int]]:
        """Word and number of every record, in order."""
        with Changelog.open(self.log, mode="r") as log:
            assert log.columns is not None
            tables = [log.columns.decode(b.column("key"), b.column("value")) for b in log.read(0)]
        return [(row["word"], row["n"]) for table in tables for row in table.to_pylist()]


@pytest.fixture
def words(spark: SparkSession, tmp_path: Path) -> Words:
    return Words(spark, tmp_path)


# -- two calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [1, 2])
def test_the_second_call_for_a_batch_is_refused_and_what_the_message_says_puts_it_right(
    words: Words, sinks: int
) -> None:
    """Of one sink, or of two that write the same app of the same changelog."""
    words.add("a", "b")
    made = [words.sink() for _ in range(sinks)]

    def twice(df: DataFrame, batch: int) -> None:
        made[0](df.where("word = 'a'"), batch)
        made[-1](df.where("word = 'b'"), batch)

    words.run(made[0])
    words.add("a", "b")
    for _ in range(2):  # a start of the query again does not make it right either
        with pytest.raises(StreamingQueryException, match=r"(?s)this call's rows would be dropped.*rollback"):
            words.run(twice)
    assert words.held() == [("a", 0), ("b", 0), ("a", 1)]
    made[0].log.rollback(("log", 0))
    words.run(made[0])
    assert words.held() == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    for sink in made:
        sink.close()


def test_the_second_call_of_a_task_is_refused(words: Words, tmp_path: Path) -> None:
    words.add("a")

    def note(df: DataFrame, store: Any) -> None:
        store.put(b"rows", str(df.count()).encode())

    def twice(df: DataFrame, batch: int) -> None:
        sink(df, batch)
        sink(df, batch)

    with TaskSink(tmp_path / "task", note) as sink:
        with pytest.raises(StreamingQueryException, match="rows would be dropped"):
            words.run(twice)


def test_a_batch_that_comes_again_in_another_run_is_passed_over(words: Words) -> None:
    """Whether the function failed after its call of the sink, or Spark has lost its own note."""
    words.add("a").add("a")
    fails = [True]

    def failing(df: DataFrame, batch: int) -> None:
        sink(df, batch)
        if batch == 1 and fails.pop():
            raise ValueError("after the commit")

    with words.sink() as sink:
        with pytest.raises(StreamingQueryException, match="after the commit"):
            words.run(failing)
        fails.append(False)
        words.run(failing)
        forget_batch(words.checkpoint, 1)
        words.run(sink)
        assert words.held() == [("a", 0), ("a", 1)]


def test_a_call_that_has_failed_can_be_made_again(words: Words) -> None:
    words.add("a")

    def patient(df: DataFrame, batch: int) -> None:
        with pytest.raises(ConfigError):
            sink(df.drop("word"), batch)
        sink(df, batch)

    with words.sink() as sink:
        words.run(patient)
        assert words.held() == [("a", 0)]


# -- no call -------------------------------------------------------------------------------------------------


def test_batches_without_a_call_are_named_and_can_be_skipped_afterwards(words: Words) -> None:
    """Their records are no longer there to look at, but the function's author knows."""
    words.add("a").add("x").add("x").add("a")

    def returns(df: DataFrame, batch: int) -> None:
        wanted = df.where("word = 'a'")
        if wanted.isEmpty():
            return
        sink(wanted, batch)

    def heals(df: DataFrame, batch: int) -> None:
        if batch == 3:
            sink.skip(2)
        sink(df, batch)

    with words.sink() as sink:
        with pytest.raises(
            StreamingQueryException, match=r"(?s)batches 1 to 2 .*df.isEmpty.*sink\.skip\(2\)"
        ):
            words.run(returns)
        assert words.held() == [("a", 0)]
        words.run(heals)
        forget_batch(words.checkpoint, 3)
        words.run(heals)
        assert words.held() == [("a", 0), ("a", 3)]


@pytest.mark.parametrize("first", ["a", "x"])
def test_a_function_may_skip_batches(words: Words, first: str) -> None:
    """Also the first one, when the changelog of a typed sink is not there yet."""
    words.add(first).add("x").add("a")

    def skips(df: DataFrame, batch: int) -> None:
        wanted = df.where("word = 'a'")
        if wanted.isEmpty():
            sink.skip(batch, df)
            sink.skip(batch)
        else:
            sink(wanted, batch)

    with words.sink() as sink:
        words.run(skips)
        forget_batch(words.checkpoint, 2)
        words.run(skips)
        assert words.held() == ([("a", 0)] if first == "a" else []) + [("a", 2)]
        with pytest.raises(ConfigError, match="Invalid batch id"):
            sink.skip(-1)


def test_a_batch_that_was_skipped_takes_no_rows_any_more(words: Words) -> None:
    words.add("a").add("a")

    def both(df: DataFrame, batch: int) -> None:
        if batch:
            sink.skip(batch)
        sink(df, batch)

    with words.sink() as sink, pytest.raises(StreamingQueryException, match="rows would be dropped"):
        words.run(both)


def test_a_later_batch_than_the_querys_cannot_be_skipped(words: Words) -> None:
    words.add("a")
    with (
        words.sink() as sink,
        pytest.raises(StreamingQueryException, match="not that of the calling query"),
    ):
        words.run(lambda df, batch: sink.skip(batch + 1))


def test_batches_of_spark_without_records_need_no_call(spark: SparkSession, words: Words) -> None:
    """A watermark that has moved runs one batch more; whoever leaves it out leaves out nothing."""
    called = []
    times = words.source.stream().selectExpr("word", "timestamp_seconds(n * 1000) AS t")
    closed = times.withWatermark("t", "1 second").groupBy("word", "t").count()

    def returns(df: DataFrame, batch: int) -> None:
        called.append(batch)
        if not df.isEmpty():
            sink(df, batch)
        else:
            df.write.format("noop").mode("append").save()

    with ChangelogSink(words.log, keys=["word", "t"]) as sink:
        for _ in range(3):
            words.add("a")
            run(closed, returns, words.checkpoint)
        assert len(called) > 3
        assert len(sink.log.state.commits) < len(called)


# -- the app -------------------------------------------------------------------------------------------------


def test_a_changelog_with_another_name_is_guarded_as_before(words: Words) -> None:
    """Without app_id: a new query under a new name would else be the first one of a new app."""
    words.add("a")
    with words.sink() as sink:
        words.run(sink)
    words.log = words.log.rename(words.log.with_name("renamed"))
    words.checkpoint = words.checkpoint.with_name("new")
    with words.sink() as sink:
        with pytest.raises(StreamingQueryException, match=r"The app 'log' has already committed .*"):
            words.run(sink)
        assert words.held() == [("a", 0)]


@pytest.mark.parametrize("app", ["", 7, "\ud800"])
def test_a_sink_takes_no_name_that_no_app_can_have(words: Words, app: Any) -> None:
    with pytest.raises(ConfigError, match="Invalid app id"):
        words.sink(app_id=app)
    for settings in ({"accept_replay": True}, {"accept_replay": 1, "on_reset": "restore"}):
        with pytest.raises(ConfigError, match="accept_replay"):
            words.sink(**settings)
