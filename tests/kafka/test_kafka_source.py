"""Spark's Kafka source into a changelog, and a lost checkpoint: compared with what was produced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

from keyfold import (
    Changelog,
    ChangelogSink,
    Resumed,
    aggregate,
    kafka_stream,
    restore,
    resume,
    resume_if_lost,
)
from keyfold.statestore.errors import NotResumable
from keyfold.statestore.files import Files
from support.events import QUIET, finish, fold, forget_batch, lose
from support.kafka_topics import Sent, Topics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# kafka-python reads its schemas in a way that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*_text is deprecated:DeprecationWarning")

SOME = ["to", "be", "or", "not", "to", "be", "that", "is", "the", "question"]
MORE = ["whether", "it", "is", "nobler", "in", "the", "mind", "to", "suffer", "the", "slings"]
LAST = ["and", "arrows", "of", "outrageous", "fortune", "or", "to", "take", "arms"]


class Job:
    """Counts the keys of a topic into a changelog; `run` is one run to its end, resumed where the checkpoint
    was lost.
    """

    def __init__(self, spark: SparkSession, topics: Topics, root: Path, **options: object) -> None:
        self.spark = spark
        self.log = root / "counts"
        self.checkpoint = root / "checkpoint"
        self.options: dict[str, object] = {
            "kafka.bootstrap.servers": topics.address, "startingOffsets": "earliest", **options,
        }  # fmt: skip

    def run(self, **options: object) -> None:
        with self.lost() as again:
            self.count(kafka_stream(self.spark, {**self.options, **options}, resumed=again), again)

    def run_with_plain_options(self, **options: object) -> None:
        """As where `kafka_stream` is not used."""
        with self.lost() as again:
            begin = {} if again is None else again.options()
            reader = self.spark.readStream.format("kafka").options(**{**self.options, **begin, **options})
            self.count(reader.load(), again)

    def count(self, records: DataFrame, again: Resumed | None) -> None:
        words = records.select(F.col("key").cast("string").alias("word"))
        frame = aggregate(words, "word", F.count("*").alias("n"), resumed=again)
        with ChangelogSink(
            self.log, keys="word", partitions=2, config=QUIET, app_id="job", on_reset="restore"
        ) as sink:
            finish(frame, sink, self.checkpoint)

    def lost(self) -> Any:
        found = resume_if_lost(self.log, "job", checkpoint=self.checkpoint)
        return found if found is not None else _Nothing()

    def counted(self) -> dict[str, int]:
        return {word: row["n"] for word, row in restore(self.log).to_dict().items()}

    def commits(self) -> int:
        with Changelog.open(self.log, mode="r") as log:
            return log.state.next_commit - 1


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def topic(topics: Topics, tmp_path: Path) -> Iterator[str]:
    """Three partitions."""
    name = topics.make(tmp_path.name.replace("_", "-"))
    yield name
    topics.remove(name)


@pytest.fixture
def job(spark: SparkSession, topics: Topics, topic: str, tmp_path: Path) -> Job:
    return Job(spark, topics, tmp_path, subscribe=topic)


# -- what comes in -------------------------------------------------------------------------------------------


def test_counters_are_what_was_produced_however_it_is_cut_into_batches(
    spark: SparkSession, topics: Topics, topic: str, tmp_path: Path
) -> None:
    """With `aggregate`, and with Spark's own aggregation."""
    ours = Job(spark, topics, tmp_path, subscribe=topic, maxOffsetsPerTrigger=7)
    plain = tmp_path / "plain"
    for words in (SOME, MORE * 2):
        topics.words(topic, words)
        ours.run()
        records = kafka_stream(spark, {**ours.options, "maxOffsetsPerTrigger": 12})
        counts = records.groupBy(F.col("key").cast("string").alias("word")).count()
        with ChangelogSink(plain, keys="word", config=QUIET) as sink:
            finish(counts, sink, tmp_path / "checkpoint-plain")
    assert ours.counted() == topics.counted(topic)
    assert ours.commits() >= 5
    assert {k: v["count"] for k, v in restore(plain).to_dict().items()} == topics.counted(topic)


def upserts(generation: int, count: int = 40) -> list[Sent]:
    """Values, tombstones and headers; a key stays in its partition."""
    return [
        Sent(
            partition=key % 3,
            key=b"\xff\x00key %d" % key,
            value=None if n % 5 == 4 else b"\xfe %d.%d" % (generation, n),
            headers=(("h", b"%d" % n), ("h", b"\xff"), ("g", b""))[: n % 4],
        )
        for n in range(count)
        for key in [n * 7 % 11]
    ]


def test_raw_upserts_keep_tombstones_headers_and_timestamps(
    spark: SparkSession, topics: Topics, topic: str, tmp_path: Path
) -> None:
    """Also when the checkpoint is lost between."""
    options = {
        "kafka.bootstrap.servers": topics.address, "subscribe": topic, "startingOffsets": "earliest",
        "includeHeaders": True, "maxOffsetsPerTrigger": 25,
    }  # fmt: skip
    checkpoint, path = tmp_path / "checkpoint", tmp_path / "log"
    for generation in range(3):
        topics.send(topic, *upserts(generation))
        again = resume_if_lost(path, "upserts", checkpoint=checkpoint)
        with ChangelogSink(path, partitions=2, config=QUIET, app_id="upserts", on_reset="restore") as sink:
            finish(kafka_stream(spark, options, resumed=again), sink, checkpoint)
        if generation == 1:
            lose(checkpoint)
    assert restore(path).to_dict() == {key: sent.value for key, sent in topics.last(topic).items()}
    found: dict[bytes, list[Any]] = {}
    with Changelog.open(path) as log:
        for number in range(log.partitions):
            for batch in log.read(partition=number, offset=0):
                for r in batch.to_pylist():
                    headers = tuple((h["key"], h["value"]) for h in r["headers"] or ())
                    time = round(r["timestamp"].timestamp() * 1000)
                    found.setdefault(r["key"], []).append((r["value"], headers, time))
    expected: dict[bytes, list[Any]] = {}
    for sent in topics.sent[topic]:
        expected.setdefault(sent.key, []).append((sent.value, sent.headers, sent.timestamp_ms))
    assert found == expected


def test_a_key_that_has_moved_to_another_partition_keeps_its_order_by_its_timestamps(
    spark: SparkSession, topics: Topics, topic: str, tmp_path: Path
) -> None:
    topics.send(topic, Sent(2, b"a", b"old"), Sent(0, b"a", b"new"), Sent(2, b"b", b"x"), Sent(1, b"b", None))
    options = {"kafka.bootstrap.servers": topics.address, "subscribe": topic, "startingOffsets": "earliest"}
    with ChangelogSink(tmp_path / "log", config=QUIET, sequence_by="timestamp") as sink:
        finish(kafka_stream(spark, options), sink, tmp_path / "checkpoint")
    assert restore(tmp_path / "log").to_dict() == {b"a": b"new"}


class Recorder(Files):
    """Notes what is synced."""

    def __init__(self) -> None:
        self.synced: list[Path] = []

    def _operation(self, name: str, path: Path, **rest: Any) -> AbstractContextManager[None]:
        if name == "sync_path":
            self.synced.append(path)
        return super()._operation(name, path, **rest)


def test_where_the_query_began_is_durable_with_its_first_commit(
    spark: SparkSession, topics: Topics, topic: str, tmp_path: Path
) -> None:
    """Spark does not sync it, and without it would run the first batch from another place."""
    topics.words(topic, SOME)
    records = kafka_stream(
        spark, {"kafka.bootstrap.servers": topics.address, "subscribe": topic, "startingOffsets": "earliest"}
    )
    files = Recorder()
    with ChangelogSink(tmp_path / "log", config=QUIET, files=files) as sink:
        finish(records, sink, tmp_path / "checkpoint")
    began = tmp_path / "checkpoint" / "sources" / "0" / "0"
    assert f'{{"{topic}":{{"0":0,"1":0,"2":0}}}}'.encode() in began.read_bytes()
    assert {began, began.with_name(".0.crc")} <= set(files.synced)


# -- the checkpoint is lost ----------------------------------------------------------------------------------


def test_a_lost_checkpoint_costs_nothing_however_often(job: Job, topics: Topics, topic: str) -> None:
    """Also with nothing new, and with a crash before Spark has noted the first batch."""
    topics.words(topic, SOME)
    job.run()
    for words in ([], MORE, LAST):
        lose(job.checkpoint)
        fold(job.log)
        topics.words(topic, words)
        job.run()
        assert job.counted() == topics.counted(topic)
    forget_batch(job.checkpoint, 0)
    topics.words(topic, SOME)
    job.run()
    assert job.counted() == topics.counted(topic)


def test_the_plain_options_go_on_where_the_commit_ended(job: Job, topics: Topics, topic: str) -> None:
    topics.words(topic, SOME)
    job.run_with_plain_options(maxOffsetsPerTrigger="6")
    lose(job.checkpoint)
    topics.words(topic, MORE)
    job.run_with_plain_options(maxOffsetsPerTrigger="6")
    assert job.counted() == topics.counted(topic)


def test_each_of_several_topics_goes_on_where_it_was(job: Job, topics: Topics, topic: str) -> None:
    other = topics.make(f"{topic}-b")

    def run(*numbers: int) -> None:
        with job.lost() as again:
            first, second = (
                kafka_stream(job.spark, {**job.options, "subscribe": name}, resumed=again, source=number)
                for name, number in zip((topic, other), numbers, strict=True)
            )
            job.count(first.union(second), again)

    topics.words(topic, SOME)
    topics.words(other, MORE)
    run(0, 1)
    lose(job.checkpoint)
    topics.words(topic, LAST)
    topics.words(other, SOME)
    with pytest.raises(NotResumable, match=f"(?s)not among those it reads now.*{other}-0"):
        run(1, 0)
    run(0, 1)
    assert job.counted() == topics.counted(topic, other)
    topics.remove(other)


@pytest.mark.parametrize("kind", ["subscribe", "subscribePattern", "assign"])
def test_the_way_to_subscribe_stays_what_it_was(
    kind: str, spark: SparkSession, topics: Topics, topic: str, tmp_path: Path
) -> None:
    """A pattern finds topics that are new."""
    other = topics.make(f"{topic}-b")
    given = {
        "subscribe": f"{topic}, {other}",
        "subscribePattern": f"{topic}.*",
        "assign": f'{{"{topic}":[0,1,2],"{other}":[0,1,2]}}',
    }
    job = Job(spark, topics, tmp_path, **{kind: given[kind]}, maxOffsetsPerTrigger=9)
    names = [topic, other]
    for name in names:
        topics.words(name, SOME)
    job.run()
    lose(job.checkpoint)
    if kind == "subscribePattern":
        names.append(topics.make(f"{topic}-c"))
    for name in names:
        topics.words(name, MORE)
    job.run()
    assert job.counted() == topics.counted(*names)
    for name in names[1:]:
        topics.remove(name)


def test_a_time_to_begin_at_does_not_move_the_position(
    spark: SparkSession, topics: Topics, topic: str, tmp_path: Path
) -> None:
    """Spark prefers `startingTimestamp` to `startingOffsets`."""
    job = Job(spark, topics, tmp_path, subscribe=topic, startingTimestamp=1)
    topics.words(topic, SOME)
    job.run()
    lose(job.checkpoint)
    topics.words(topic, MORE)
    job.run()
    assert job.counted() == topics.counted(topic)


def test_a_resumed_query_that_begins_elsewhere_is_refused_until_its_checkpoint_is_deleted(
    job: Job, topics: Topics, topic: str
) -> None:
    """Its options were forgotten: the records since the beginning, or the state itself, would count twice."""
    topics.words(topic, SOME)
    job.run()
    counted = job.counted()
    topics.words(topic, MORE)
    for begin, says in (("earliest", "offsets 0 to .* are read again"), ("latest", "are skipped")):
        lose(job.checkpoint)
        with job.lost() as again, pytest.raises(StreamingQueryException, match=f"(?s)BatchConflict.*{says}"):
            job.count(kafka_stream(job.spark, {**job.options, "startingOffsets": begin}), again)
        with pytest.raises(StreamingQueryException, match=f"(?s)BatchConflict.*{says}"):
            job.run()
        assert job.counted() == counted
    lose(job.checkpoint)
    job.run()
    assert job.counted() == topics.counted(topic)


# -- Kafka is not what it was --------------------------------------------------------------------------------


def test_partitions_that_are_new_are_read_from_their_beginning(job: Job, topics: Topics, topic: str) -> None:
    """The plain options are refused by Spark, and nothing is counted."""
    topics.words(topic, SOME)
    job.run()
    lose(job.checkpoint)
    before = job.commits()
    topics.grow(topic, 5)
    topics.words(topic, MORE)
    topics.send(topic, *(Sent(3 + n % 2, word.encode(), b"") for n, word in enumerate(SOME * 2)))
    with pytest.raises(StreamingQueryException, match="you must specify all TopicPartitions"):
        job.run_with_plain_options()
    assert job.commits() == before
    lose(job.checkpoint)
    job.run()
    assert job.counted() == topics.counted(topic)


def test_partitions_may_become_more_while_the_query_runs(job: Job, topics: Topics, topic: str) -> None:
    topics.words(topic, SOME)
    job.run()
    topics.grow(topic, 4)
    topics.send(topic, *(Sent(3, word.encode(), b"") for word in MORE))
    job.run()
    lose(job.checkpoint)
    topics.send(topic, *(Sent(3, word.encode(), b"") for word in LAST))
    job.run()
    assert job.counted() == topics.counted(topic)


def test_records_that_retention_took_are_told_before_the_query_starts(
    job: Job, topics: Topics, topic: str
) -> None:
    """Nothing is skipped in silence, with the plain options neither."""
    topics.words(topic, SOME)
    job.run()
    before, counted = job.commits(), job.counted()
    lose(job.checkpoint)
    topics.words(topic, MORE)
    topics.expire(topic, {0: len([w for w in SOME if len(w) % 3 == 0]) + 1})
    with pytest.raises(NotResumable, match="Kafka has deleted records") as caught:
        job.run()
    assert f"{topic}-0" in str(caught.value.position)
    assert "failOnDataLoss=false" in str(caught.value.remedy)
    assert not (job.checkpoint / "offsets").exists()
    with pytest.raises(StreamingQueryException, match="Some data may have been lost"):
        job.run_with_plain_options()
    assert (job.commits(), job.counted()) == (before, counted)


def test_a_new_partition_that_has_lost_records_is_told_whether_the_query_runs_or_is_resumed(
    job: Job, topics: Topics, topic: str
) -> None:
    topics.words(topic, SOME)
    job.run()
    before = job.commits()
    topics.grow(topic, 4)
    topics.send(topic, *(Sent(3, word.encode(), b"") for word in MORE))
    topics.expire(topic, {3: 2})
    with pytest.raises(StreamingQueryException, match="starts from 2 instead of 0"):
        job.run()
    lose(job.checkpoint)
    with pytest.raises(NotResumable, match=f"(?s)new to the query.*{topic}-3 begins at offset 2"):
        job.run()
    assert job.commits() == before
    job.run(failOnDataLoss="false")
    expected = topics.counted(topic)
    expected.subtract(MORE[:2])
    assert job.counted() == +expected


def test_what_retention_took_is_left_out_if_that_is_wanted(job: Job, topics: Topics, topic: str) -> None:
    topics.words(topic, SOME)
    job.run()
    lose(job.checkpoint)
    topics.words(topic, MORE)
    seen = len([word for word in SOME if len(word) % 3 == 2])
    topics.expire(topic, {2: seen + 2})
    job.run(failOnDataLoss=False)
    expected = topics.counted(topic)
    expected.subtract([word for word in MORE if len(word) % 3 == 2][:2])
    assert job.counted() == +expected


def test_a_query_that_goes_on_from_its_own_checkpoint_is_not_asked_about_the_past(
    job: Job, topics: Topics, topic: str
) -> None:
    """The position that it was resumed from is of no use any more."""
    topics.words(topic, SOME)
    job.run()
    lose(job.checkpoint)
    topics.words(topic, MORE)
    job.run()
    topics.expire(topic, dict.fromkeys(range(3), -1))
    topics.grow(topic, 4)
    topics.words(topic, LAST)
    job.run()
    assert job.counted() == topics.counted(topic)


def test_a_topic_that_was_made_anew_is_not_taken_for_the_old_one(
    job: Job, topics: Topics, topic: str
) -> None:
    topics.words(topic, SOME)
    job.run()
    before = job.commits()
    lose(job.checkpoint)
    topics.remove(topic)
    topics.make(topic)
    with pytest.raises(NotResumable, match="further than Kafka has records"):
        job.run()
    assert job.commits() == before


def test_a_topic_that_is_gone_or_not_read_any_more_is_named(
    job: Job, topics: Topics, topic: str, tmp_path: Path
) -> None:
    topics.words(topic, SOME)
    job.run()
    lose(job.checkpoint)
    for other in ({"subscribe": f"{topic}-nowhere"}, {"assign": f'{{"{topic}":[0,1]}}'}):
        job.options.pop("subscribe", None)
        job.options.pop("assign", None)
        job.options.update(other)
        with pytest.raises(NotResumable, match=f"(?s)not among those it reads now.*{topic}-2"):
            job.run()


def test_brokers_that_do_not_answer_are_told_in_time(job: Job, topics: Topics, topic: str) -> None:
    topics.words(topic, SOME)
    job.run()
    with resume(job.log, "job") as again:
        options = {**job.options, "kafka.bootstrap.servers": "127.0.0.1:9"}
        limits = {"kafka.default.api.timeout.ms": 1500, "kafka.request.timeout.ms": 1000}
        with pytest.raises(NotResumable, match=r"(?s)Kafka did not say.*TimeoutException"):
            kafka_stream(job.spark, {**options, **limits}, resumed=again)


def test_wrong_options_get_sparks_own_message(job: Job, topics: Topics, topic: str) -> None:
    topics.words(topic, SOME)
    job.run()
    wrong: list[Mapping[str, object]] = [
        {"subscribe": topic},
        {"kafka.bootstrap.servers": topics.address},
        {"kafka.bootstrap.servers": topics.address, "subscribe": topic, "assign": "{}"},
    ]
    with resume(job.log, "job") as again:
        for options in wrong:
            with pytest.raises(Exception, match=r"(?i)option"):
                kafka_stream(job.spark, options, resumed=again)
