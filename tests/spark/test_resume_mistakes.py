"""What a job that lost its checkpoint can get wrong: each mistake is refused, or harmless.

A table of kinds of queries, kinds of sources, and mistakes. Whatever happens, the changelog is exact
afterwards: as it was where the query is refused, and as if nothing had been lost where it is taken.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

from keyfold import Changelog, ChangelogSink, TaskSink, aggregate, initial_state, restore, resume
from keyfold.streaming.seed import seed
from support import streams
from support.events import QUIET, Events, finish
from support.session import stateful_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from keyfold import Resumed

SCHEMA = "word string, n long"
BEFORE = [("a", 1), ("b", 2), ("a", 4)]
AFTER = [("a", 10), ("c", 3)]
TOTALS = {"a": 15, "b": 2, "c": 3}
LAST = {"a": 10, "b": 2, "c": 3}
BEGINNING = {"startingOffsets": "earliest"}


# -- kinds of queries ----------------------------------------------------------------------------------------


def upserts(live: DataFrame, again: Resumed | None) -> DataFrame:
    return live


def summed(live: DataFrame, again: Resumed | None) -> DataFrame:
    return aggregate(live, "word", F.sum("n").alias("n"), resumed=again)


def summed_by_hand(live: DataFrame, again: Resumed | None) -> DataFrame:
    both = live if again is None else seed(live.sparkSession, again).unionByName(live)
    return both.groupBy("word").agg(F.sum("n").alias("n"))


def distinct(live: DataFrame, again: Resumed | None) -> DataFrame:
    return live.dropDuplicates(["word", "n"])


def with_state(live: DataFrame, again: Resumed | None) -> DataFrame:
    from support.totals import by_rows

    return by_rows(live, None if again is None else initial_state(live.sparkSession, again))


def adds(df: DataFrame, store: Any) -> None:
    for word, n in df.toLocalIterator():
        key = word.encode()
        store.put(key, b"%d" % (int(store.get(key) or b"0") + n))


@dataclass(frozen=True)
class Kind:
    """A kind of query: what it computes from the stream, and what should be held in the end.

    Attributes:
        first: the kind of query that has led its first life, and has written the same.
    """

    first: str
    frame: Callable[[DataFrame, Resumed | None], DataFrame]
    held: Mapping[str, int]
    is_task: bool = False


KINDS = {
    "upserts": Kind("upserts", upserts, LAST),
    "sums": Kind("sums", summed, TOTALS),
    "sums by hand": Kind("sums", summed_by_hand, TOTALS),
    "distinct": Kind("upserts", distinct, LAST),
    "with state": Kind("sums", with_state, TOTALS),
    "task": Kind("task", upserts, TOTALS, is_task=True),
}


class Job:
    """One query over events in a changelog and in files, the same in both."""

    def __init__(self, kind: Kind, root: Path, log: Path) -> None:
        self.kind = kind
        self.root = root
        self.log = log
        self.checkpoint = log.with_name("checkpoint")

    def run(self, live: DataFrame, again: Resumed | None, **settings: Any) -> None:
        common: dict[str, Any] = {"config": QUIET, "on_reset": "restore", **settings}
        sink = (
            TaskSink(self.log, adds, **common)
            if self.kind.is_task
            else ChangelogSink(self.log, keys="word", **common)
        )
        with sink:
            finish(self.kind.frame(live, again), sink, self.checkpoint)

    def held(self) -> dict[str, int]:
        with restore(self.log) as state:
            found = state.to_dict()
        if self.kind.is_task:
            return {key.decode(): int(value) for key, value in found.items()}
        return {word: row["n"] for word, row in found.items()}


# -- the first life of each kind, led once -------------------------------------------------------------------


class World:
    """Events, and what each kind of job has made of the first ones before it lost its checkpoint."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark, self.root = spark, root
        self.events = Events(spark, root / "events", SCHEMA).add(*BEFORE)
        self.files = streams.Files(spark, root / "files", SCHEMA)
        self.files.add(*({"word": word, "n": n} for word, n in BEFORE))
        for name, source, *_ in CASES:
            if KINDS[name].first == name and not self.place(name, source).exists():
                Job(KINDS[name], root, self.place(name, source)).run(self.stream(source, BEGINNING), None)
        self.events.add(*AFTER)
        self.files.add(*({"word": word, "n": n} for word, n in AFTER))

    def place(self, name: str, source: str) -> Path:
        return self.root / name / source / "log"

    def stream(self, source: str, options: Mapping[str, str]) -> DataFrame:
        if source == "files":
            return self.files.stream().select("word", "n")
        return self.events.stream(options, self.spark).select("word", "n")

    def lost(self, name: str, source: str, tmp_path: Path) -> Job:
        """A job of its own that has lost its checkpoint."""
        shutil.copytree(self.place(KINDS[name].first, source), tmp_path / "log")
        return Job(KINDS[name], tmp_path, tmp_path / "log")


@pytest.fixture(scope="module")
def world(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> World:
    pytest.importorskip("google.protobuf")
    return World(stateful_session(spark), tmp_path_factory.mktemp("first-life"))


#: Kind of query, source, mistake, and what the refusal says; None: it goes on exactly.
CASES: list[tuple[str, str, str, str | None]] = [
    ("upserts", "changelog", "none", None),
    ("upserts", "changelog", "options forgotten", "offsets 0 to 2 of partition 0 are read again"),
    ("upserts", "changelog", "latest", "offsets 3 to 4 of partition 0 are skipped"),
    ("upserts", "changelog", "state forgotten", None),  # it needs none
    ("upserts", "files", "none", "accept_replay=True"),
    ("upserts", "files", "replay accepted", None),
    ("upserts", "changelog", "another source", "does not read the changelog"),
    ("sums", "changelog", "none", None),
    ("sums", "changelog", "options forgotten", "offsets 0 to 2 of partition 0 are read again"),
    ("sums", "changelog", "state forgotten", "the state of commit 1 as input of Aggregate"),
    ("sums", "files", "none", "accept_replay=True"),
    ("sums by hand", "changelog", "none", None),
    ("sums by hand", "changelog", "state of another commit", "found: the state of commit 2"),
    ("distinct", "changelog", "none", "the state of commit 1 as input of Deduplicate"),
    ("with state", "changelog", "none", None),
    ("with state", "changelog", "options forgotten", "offsets 0 to 2 of partition 0 are read again"),
    ("with state", "changelog", "state forgotten", "as input of TransformWithState"),
    ("task", "changelog", "none", None),
    ("task", "changelog", "options forgotten", "offsets 0 to 2 of partition 0 are read again"),
]


@pytest.mark.parametrize(("name", "source", "mistake", "refusal"), CASES)
def test_a_mistake_in_resuming_is_refused_or_harmless(
    world: World, tmp_path: Path, name: str, source: str, mistake: str, refusal: str | None
) -> None:
    job = world.lost(name, source, tmp_path)
    before = job.held()
    settings = {"accept_replay": True} if mistake == "replay accepted" else {}
    with resume(job.log, "log", checkpoint=job.checkpoint) as again:
        if source == "files":
            options: Mapping[str, str] = {}
        else:
            options = {
                "options forgotten": BEGINNING,
                "latest": {"startingOffsets": "latest"},
            }.get(mistake, again.options())
        live = other(world, tmp_path) if mistake == "another source" else world.stream(source, options)
        given: Resumed | None = None if mistake == "state forgotten" else again
        if mistake == "state of another commit":
            with Changelog.open(job.log) as log:
                log.append({"word": ["x"]}, app_id="other")
            given = resume(job.log, "other")
        if refusal is None:
            job.run(live, given, **settings)
            assert job.held() == job.kind.held
            return
        with pytest.raises(StreamingQueryException) as caught:
            job.run(live, given, **settings)
        assert refusal in str(caught.value)
        assert "what to do: " in str(caught.value)
        assert {word: n for word, n in job.held().items() if word != "x"} == before


def other(world: World, tmp_path: Path) -> DataFrame:
    events = Events(world.spark, tmp_path / "other", SCHEMA).add(*AFTER)
    return events.stream(BEGINNING).select("word", "n")


def test_sources_in_another_order_are_refused(world: World, tmp_path: Path) -> None:
    left = Events(world.spark, tmp_path / "left", SCHEMA).add(("a", 1), ("b", 2))
    right = Events(world.spark, tmp_path / "right", SCHEMA).add(("a", 10))
    job = Job(KINDS["sums"], tmp_path, tmp_path / "log")

    def united(*sides: DataFrame) -> DataFrame:
        return sides[0].select("word", "n").union(sides[1].select("word", "n"))

    job.run(united(left.stream(), right.stream()), None)
    shutil.rmtree(job.checkpoint)
    with resume(job.log, "log", checkpoint=job.checkpoint) as again:
        sides = [e.stream(again.options(source=i)) for i, e in enumerate((left, right))]
        with pytest.raises(
            StreamingQueryException, match=r"source 0: it does not read the changelog .* source 1: "
        ):
            job.run(united(*reversed(sides)), again)
    assert job.held() == {"a": 11, "b": 2}


@pytest.mark.parametrize("noted_by_sink", [False, True])
def test_a_first_batch_that_is_run_again_begins_where_it_began(
    world: World, tmp_path: Path, noted_by_sink: bool
) -> None:
    """Also if Spark asks the source anew, and is given other options then."""
    job = world.lost("sums", "changelog", tmp_path)
    with resume(job.log, "log", checkpoint=job.checkpoint) as again:
        frame = job.kind.frame(world.stream("changelog", again.options()), again)

        def dies(df: DataFrame, batch: int) -> None:
            if noted_by_sink:
                with ChangelogSink(job.log, keys="word", config=QUIET, on_reset="restore") as sink:
                    sink(df, batch)
            raise ValueError("the process is dead")

        with pytest.raises(StreamingQueryException, match="the process is dead"):
            finish(frame, dies, job.checkpoint)
        job.run(world.stream("changelog", {"startingOffsets": "latest"}), again)
    assert job.held() == TOTALS


def test_a_rate_has_no_position_to_go_on_from(world: World, tmp_path: Path) -> None:
    rate = world.spark.readStream.format("rate").option("rowsPerSecond", 100)
    live = rate.load().selectExpr("cast(value AS string) AS word", "value AS n")
    job = Job(KINDS["upserts"], tmp_path, tmp_path / "log")

    def until_there_are_rows() -> None:
        while not job.log.exists() or not job.held():
            job.run(live, None)

    until_there_are_rows()
    shutil.rmtree(job.checkpoint)
    with resume(job.log, "log", checkpoint=job.checkpoint):
        with pytest.raises(StreamingQueryException, match="accept_replay=True"):
            job.run(live, None)
