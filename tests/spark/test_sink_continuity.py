"""A batch is taken only where it follows from what was committed: by query, batch id and source offsets."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import StreamingQueryException

from keyfold import ChangelogSink, TaskSink, resume
from keyfold.checkpoints.manifest.idempotence import SourceBatch
from keyfold.checkpoints.manifest.resumption import QueryStart
from keyfold.checkpoints.manifest.state import Anchor, Commit, empty
from keyfold.sink.batch_gate import IncomingBatch, batch_of
from keyfold.sink.offset_log import HadoopOffsetLog, LocalOffsetLog, positions
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.files import LOCAL, Files, OpenFile
from support import streams
from support.streams import commits, forget_batch, pairs, run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def words(spark: SparkSession, directory: Path, batches: int) -> streams.Files:
    """Batch i holds the word "a" with the number i."""
    source = streams.Files(spark, directory / "words", "word string, n long")
    for n in range(batches):
        source.add({"word": "a", "n": n})
    return source


def numbers(sink: ChangelogSink) -> list[int]:
    return [value["n"] for _, value in pairs(sink.log)]


# -- checkpoints that are not the one of the last commit -----------------------------------------------------


def test_a_deleted_checkpoint_is_refused_and_resume_is_named(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path, 2)
    with ChangelogSink(tmp_path / "log", keys="word") as sink:
        run(source.stream(), sink, tmp_path / "checkpoint")
        shutil.rmtree(tmp_path / "checkpoint")
        with pytest.raises(StreamingQueryException, match=r"start from resume\(\.\.\.\)"):
            run(source.stream(), sink, tmp_path / "checkpoint")
        assert numbers(sink) == [0, 1]


def test_an_older_copy_of_the_checkpoint_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path, 1)
    with ChangelogSink(tmp_path / "log", keys="word") as sink:
        run(source.stream(), sink, tmp_path / "checkpoint")
        shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy")
        source.add({"word": "a", "n": 1}).add({"word": "a", "n": 2})
        run(source.stream(), sink, tmp_path / "checkpoint")
        with pytest.raises(StreamingQueryException, match="an older copy"):
            run(source.stream(), sink, tmp_path / "copy")
        assert numbers(sink) == [0, 1, 2]


def test_a_checkpoint_that_went_on_without_the_changelog_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Batch 1 went elsewhere: batch 2 does not begin where the last commit ended."""
    source = words(spark, tmp_path, 1)
    with ChangelogSink(tmp_path / "log", keys="word") as sink:
        run(source.stream(), sink, tmp_path / "checkpoint")
        source.add({"word": "a", "n": 1})
        run(
            source.stream(),
            lambda df, batch: df.write.format("noop").mode("append").save(),
            tmp_path / "checkpoint",
        )
        source.add({"word": "a", "n": 2})
        with pytest.raises(StreamingQueryException, match="does not begin where the last commit ended"):
            run(source.stream(), sink, tmp_path / "checkpoint")
        assert numbers(sink) == [0]


def test_a_batch_id_with_other_source_offsets_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path, 2)
    with ChangelogSink(tmp_path / "log", keys="word") as sink:
        run(source.stream(), sink, tmp_path / "checkpoint")
        forget_batch(tmp_path / "checkpoint", 1)
        entry = tmp_path / "checkpoint" / "offsets" / "1"
        entry.write_text(entry.read_text().replace('"logOffset":1', '"logOffset":0'))
        entry.with_name(".1.crc").unlink()
        with pytest.raises(StreamingQueryException, match="was delivered again with other source offsets"):
            run(source.stream(), sink, tmp_path / "checkpoint")
        assert numbers(sink) == [0, 1]


def test_on_reset_append_takes_all_that_a_new_query_reads(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path, 2)
    with ChangelogSink(tmp_path / "log", keys="word", on_reset="append") as sink:
        run(source.stream(), sink, tmp_path / "checkpoint")
        run(source.stream(), sink, tmp_path / "new")
        forget_batch(tmp_path / "new", 1)
        run(source.stream(), sink, tmp_path / "new")
        assert numbers(sink) == [0, 1, 0, 1]


def test_on_reset_restore_takes_a_new_query_only_after_resume(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path, 2)
    replayed: dict[str, Any] = {"on_reset": "restore", "accept_replay": True}
    with ChangelogSink(tmp_path / "log", keys="word", **replayed) as sink:
        run(source.stream(), sink, tmp_path / "checkpoint")
        with pytest.raises(StreamingQueryException, match="that was not resumed"):
            run(source.stream(), sink, tmp_path / "new")
        with resume(tmp_path / "log", app_id="log") as again:
            assert again.commit.source == ('{"logOffset":1}',)
        shutil.rmtree(tmp_path / "new")
        run(source.stream(), sink, tmp_path / "new")
        assert numbers(sink) == [0, 1, 0, 1]


def test_the_pin_of_resume_goes_with_the_second_batch_of_the_new_query(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A crash behind the first batch must find the state that was resumed."""
    source = words(spark, tmp_path, 2)
    replayed: dict[str, Any] = {"on_reset": "restore", "accept_replay": True}
    with ChangelogSink(tmp_path / "log", keys="word", **replayed) as sink:
        run(source.stream(), sink, tmp_path / "checkpoint")
        resume(tmp_path / "log", app_id="log").close()
        new = words(spark, tmp_path / "next", 1)
        run(new.stream(), sink, tmp_path / "new")
        (pin,) = sink.log.state.anchors.values()
        assert (pin.app, pin.commit) == ("log", 2)
        forget_batch(tmp_path / "new", 0)
        run(new.stream(), sink, tmp_path / "new")
        assert len(sink.log.state.anchors) == 1, "a batch that is delivered again is no second one"
        new.add({"word": "a", "n": 1})
        run(new.stream(), sink, tmp_path / "new")
        assert sink.log.state.anchors == {}


def test_a_pin_stays_for_one_commit_behind_the_pinned_one_whoever_makes_it() -> None:
    """Also where the old query goes on after all: a job that is starting from `resume` may still need it."""
    first = Commit(2, 0, "log", "q", 1, ("s1",), "", (2,))
    pins = {"pin": Anchor("pin", 2, (2,), "log"), "mine": Anchor("mine", 1, (1,), "")}
    pinned = replace(empty(1, 1), commits=(first,), apps={"log": first}, anchors=pins, next_commit=3)
    next_one = SourceBatch("q", 2, ("s2",), ("s1",), lambda: QueryStart(()))
    assert batch_of(pinned, "log", IncomingBatch(2, next_one, lambda: None)).unanchor == ()
    later = replace(pinned, apps={"log": replace(first, number=3, batch=2)}, next_commit=4)
    assert batch_of(later, "log", IncomingBatch(3, next_one, lambda: None)).unanchor == ("pin",)


def test_an_anchor_of_the_user_stays(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path, 1)
    with ChangelogSink(tmp_path / "log", keys="word") as sink:
        run(source.stream(), sink, tmp_path / "checkpoint")
        sink.log.anchor("mine", 1)
        source.add({"word": "a", "n": 1}).add({"word": "a", "n": 2})
        run(source.stream(), sink, tmp_path / "checkpoint")
        assert list(sink.log.state.anchors) == ["mine"]


# -- several queries -----------------------------------------------------------------------------------------


def test_two_queries_write_two_changelogs_at_once(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path, 4)
    sinks = [ChangelogSink(tmp_path / name, keys="word", partitions=2) for name in ("one", "two")]
    queries = [
        source.stream()
        .writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(tmp_path / f"checkpoint {i}"))
        .trigger(availableNow=True)
        .start()
        for i, sink in enumerate(sinks)
    ]
    for query, sink in zip(queries, sinks, strict=True):
        assert query.awaitTermination(60)
        assert numbers(sink) == [0, 1, 2, 3]
        sink.close()


def test_a_second_query_that_runs_at_the_same_time_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Even with on_reset="append": each would look like a reset of the other."""
    source = words(spark, tmp_path, 1)
    sink = ChangelogSink(tmp_path / "log", keys="word", on_reset="append")
    writer = source.stream().writeStream.foreachBatch(sink)
    query = writer.option("checkpointLocation", str(tmp_path / "first")).start()
    try:
        query.processAllAvailable()
        with pytest.raises(StreamingQueryException, match="one query for each changelog"):
            run(source.stream(), sink, tmp_path / "second")
        source.add({"word": "a", "n": 1})
        query.processAllAvailable()
    finally:
        query.stop()
    assert numbers(sink) == [0, 1]
    sink.close()


def test_a_query_of_a_session_of_its_own_is_found(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark.newSession(), tmp_path, 1)
    with ChangelogSink(tmp_path / "log", keys="word") as sink:
        run(source.stream(), sink, tmp_path / "checkpoint")
        assert commits(sink.log) == [(0, ('{"logOffset":0}',))]


class Between(Files):
    """Does something once, when a sink has admitted a batch and makes the directory to compute it in."""

    def __init__(self) -> None:
        self.todo: list[Callable[[], None]] = []

    def _operation(
        self, name: str, path: Path, *, file: OpenFile | None = None, **rest: Any
    ) -> AbstractContextManager[None]:
        if name == "mkdir" and path.parts[-3] == "work" and self.todo:
            self.todo.pop()()
        return super()._operation(name, path, file=file, **rest)


def test_a_batch_that_another_sink_commits_meanwhile_is_not_committed_twice(
    spark: SparkSession, tmp_path: Path
) -> None:
    frame = spark.createDataFrame([("a", "1")], "key string, value string")
    files = Between()
    with ChangelogSink(tmp_path / "log", files=files) as other:
        with ChangelogSink(tmp_path / "log", files=files) as sink:
            files.todo.append(lambda: other(frame, 0))
            sink(frame, 0)
            assert files.todo == []
        assert commits(other.log) == [(0, ())]
        assert pairs(other.log) == [(b"a", b"1")]


def test_one_function_can_give_a_batch_to_two_sinks(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path, 2)
    even = ChangelogSink(tmp_path / "even", keys="word")
    odd = ChangelogSink(tmp_path / "odd", keys="word")

    def both(df: DataFrame, batch: int) -> None:
        even(df.where("n % 2 = 0"), batch)
        odd(df.where("n % 2 = 1"), batch)

    with even, odd:
        run(source.stream(), both, tmp_path / "checkpoint")
        assert (numbers(even), numbers(odd)) == ([0], [1])


def test_another_batch_id_than_the_querys_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path, 1)
    with ChangelogSink(tmp_path / "log", keys="word") as sink:
        with pytest.raises(StreamingQueryException, match="not that of the calling query"):
            run(source.stream(), lambda df, batch: sink(df, batch + 1), tmp_path / "checkpoint")


# -- the checkpoint's own files ------------------------------------------------------------------------------


class Recorder(Files):
    """Notes the name and path of every operation."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def _operation(
        self, name: str, path: Path, *, file: OpenFile | None = None, **rest: Any
    ) -> AbstractContextManager[None]:
        self.seen.append((name, "/".join(path.parts[-2:])))
        return super()._operation(name, path, file=file, **rest)


def test_the_checkpoints_entry_is_durable_before_the_commit(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path, 2)
    files = Recorder()
    with ChangelogSink(tmp_path / "log", files=files, keys="word") as sink:
        run(source.stream(), sink, tmp_path / "check point")
    for batch in (0, 1):
        entry = files.seen.index(("sync_path", f"offsets/{batch}"))
        lines = [i for i, seen in enumerate(files.seen) if seen == ("append", "manifest/1.journal")]
        syncs = files.seen[entry : lines[1 + batch]]
        assert ("sync_path", f"offsets/.{batch}.crc") in syncs
        assert ("sync_directory", "check point/offsets") in syncs
    first = files.seen[: files.seen.index(("sync_path", "offsets/1"))]
    assert ("sync_path", "check point/metadata") in first
    assert ("sync_path", "check point/.metadata.crc") in first


@pytest.mark.parametrize(("placement", "on_driver"), [("driver", True), ("tasks", False), ("auto", False)])
def test_blocks_are_made_where_placement_says(
    spark: SparkSession, tmp_path: Path, placement: Any, on_driver: bool
) -> None:
    """What a task does, it does with files of its own process."""
    files = Recorder()
    with ChangelogSink(tmp_path / "log", placement=placement, files=files) as sink:
        sink(spark.createDataFrame([("a", "1")], "key string, value string"), 0)
        assert pairs(sink.log) == [(b"a", b"1")]
    assert any(name == "create" and path.endswith(".blocks") for name, path in files.seen) == on_driver


class FailingOnce(Files):
    """The first sync of a query's entry for batch 1 fails."""

    def __init__(self) -> None:
        self.failed = False

    def _operation(
        self, name: str, path: Path, *, file: OpenFile | None = None, **rest: Any
    ) -> AbstractContextManager[None]:
        if name == "sync_path" and path.parts[-2:] == ("offsets", "1") and not self.failed:
            self.failed = True
            raise OSError(errno.EIO, "Input/output error", str(path))
        return super()._operation(name, path, file=file, **rest)


@pytest.mark.parametrize("is_task", [False, True])
def test_a_batch_whose_entry_cannot_be_made_durable_is_not_committed(
    spark: SparkSession, tmp_path: Path, is_task: bool
) -> None:
    source = words(spark, tmp_path, 2)
    files, log = FailingOnce(), tmp_path / "log"
    sink = TaskSink(log, count, files=files) if is_task else ChangelogSink(log, keys="word", files=files)
    with sink:
        with pytest.raises(StreamingQueryException, match="batch is not committed"):
            run(source.stream(), sink, tmp_path / "checkpoint")
        assert [batch for batch, _ in commits(sink.log)] == [0]
        run(source.stream(), sink, tmp_path / "checkpoint")
        assert [batch for batch, _ in commits(sink.log)] == [0, 1]


def test_offsets_are_read_through_hadoop_as_from_the_disk(spark: SparkSession, tmp_path: Path) -> None:
    """File systems that are not local have no other way."""
    source = words(spark, tmp_path, 3)
    with ChangelogSink(tmp_path / "log", keys="word") as sink:
        run(source.stream(), sink, tmp_path / "check point")
    (tmp_path / "check point" / "offsets" / "1").unlink()
    hadoop = HadoopOffsetLog(spark, f"file:{tmp_path}/check point")
    local = LocalOffsetLog(LOCAL, tmp_path / "check point")
    assert sorted(hadoop.batches()) == sorted(local.batches()) == [0, 2]
    assert positions(hadoop, 2) == positions(local, 2) == (('{"logOffset":2}',), ('{"logOffset":0}',))
    assert hadoop.read(1) is None


def test_sparks_second_format_of_offsets_is_read(spark: SparkSession, tmp_path: Path) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.streaming.offsetLog.formatVersion", "2")
    source = words(session, tmp_path, 1)
    both = source.stream().union(
        streams.Files(session, tmp_path / "more", source.schema).add({"n": 7, "word": "b"}).stream()
    )
    with ChangelogSink(tmp_path / "log", keys="word") as sink:
        run(both, sink, tmp_path / "checkpoint")
        assert (tmp_path / "checkpoint" / "offsets" / "0").read_text().startswith("v2\n")
        assert commits(sink.log) == [(0, ('{"logOffset":0}', '{"logOffset":0}'))]


# -- `TaskSink` ----------------------------------------------------------------------------------------------


def count(df: DataFrame, store: Any) -> None:
    """The number of rows per word, and one key that is deleted each time."""
    for row in df.toLocalIterator():
        key = row.word.encode()
        store.put(key, str(int(store.get(key) or b"0") + 1).encode())
        store.put(b"gone", b"soon")
    store.delete(b"gone")


def test_a_tasks_changes_are_one_commit_with_the_source_offsets(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path, 3)
    with TaskSink(tmp_path / "counts", count, partitions=2) as sink:
        run(source.stream(), sink, tmp_path / "checkpoint")
        assert sink.log.get(b"a") == b"3"
        assert sink.log.get(b"gone") is None
        assert commits(sink.log) == [(n, (f'{{"logOffset":{n}}}',)) for n in range(3)]


def test_a_task_is_not_called_for_a_batch_that_was_committed(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path, 2)
    called = []

    def process(df: DataFrame, store: Any) -> None:
        called.append(df.count())
        store.put(b"calls", str(len(called)).encode())

    counts = source.stream().groupBy("word").count()
    with TaskSink(tmp_path / "log", process) as sink:
        run(counts, sink, tmp_path / "checkpoint", "update")
        forget_batch(tmp_path / "checkpoint", 1)
        source.add({"word": "b", "n": 1})
        run(counts, sink, tmp_path / "checkpoint", "update")
        assert called == [1, 1, 1]
        assert sink.log.get(b"calls") == b"3"


def test_an_exception_in_a_task_commits_nothing(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path, 1)
    broken = [True]

    def process(df: DataFrame, store: Any) -> None:
        store.put(b"a", b"1")
        if broken:
            raise ValueError("the task's own")

    with TaskSink(tmp_path / "log", process) as sink:
        with pytest.raises(StreamingQueryException, match="the task's own"):
            run(source.stream(), sink, tmp_path / "checkpoint")
        assert sink.log.get(b"a") is None
        assert sink.log.state.commits == ()
        broken.clear()
        run(source.stream(), sink, tmp_path / "checkpoint")
        assert sink.log.get(b"a") == b"1"


def test_a_task_follows_the_same_rules_of_continuity(spark: SparkSession, tmp_path: Path) -> None:
    source = words(spark, tmp_path, 1)
    with TaskSink(tmp_path / "log", count) as sink:
        run(source.stream(), sink, tmp_path / "checkpoint")
        shutil.rmtree(tmp_path / "checkpoint")
        with pytest.raises(StreamingQueryException, match=r"start from resume\(\.\.\.\)"):
            run(source.stream(), sink, tmp_path / "checkpoint")
        assert sink.log.get(b"a") == b"1"


def test_a_tasks_settings_are_refused_when_it_is_built(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="number of partitions"):
        TaskSink(tmp_path / "log", count, partitions=-1)
