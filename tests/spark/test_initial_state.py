"""`keyfold.initial_state`: a restored state in the hands of `transformWithState`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("google.protobuf")

from keyfold import ChangelogSink, initial_state, resume
from keyfold.statestore.errors import ConfigError
from support.events import QUIET, Events, finish, fold, forget_batch, kept, lose
from support.session import stateful_session
from support.totals import by_pandas, by_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from keyfold import Resumed

FIRST = [("a", 1), ("b", 2), ("a", 4)]
SECOND = [("a", 10), ("c", 3)]
THIRD = [("b", 5), ("a", 100), ("d", 1)]


@pytest.fixture(scope="module")
def session(spark: SparkSession) -> SparkSession:
    return stateful_session(spark)


@pytest.fixture
def events(session: SparkSession, tmp_path: Path) -> Events:
    return Events(session, tmp_path / "events", "word string, n long").add(*FIRST)


Totals = Callable[["DataFrame", Any], "DataFrame"]


class Job:
    """Totals of `events` in a changelog; `run` is one run of a query to its end."""

    def __init__(self, events: Events, directory: Path, totals: Totals) -> None:
        self.events = events
        self.totals = totals
        self.log = directory / "totals"
        self.checkpoint = directory / "checkpoint"

    def run(self) -> None:
        self._write(self.totals(self.events.stream(), None))

    def run_resumed(self) -> Resumed:
        with resume(self.log, "totals", checkpoint=self.checkpoint) as again:
            state = initial_state(self.events.spark, again)
            self._write(self.totals(self.events.stream(again.options()), state))
        return again

    def _write(self, frame: DataFrame) -> None:
        with ChangelogSink(self.log, keys="word", config=QUIET, on_reset="restore") as sink:
            finish(frame, sink, self.checkpoint)

    def now(self) -> dict[str, int]:
        return {row["word"]: row["n"] for row in kept(self.log)}


@pytest.mark.parametrize("totals", [by_rows, by_pandas])
def test_a_first_batch_that_is_run_again_gets_the_same_state(
    events: Events, tmp_path: Path, totals: Totals
) -> None:
    """The sink has committed it and Spark has not noted it: the app's last commit is then the new query's
    own, with the events of the batch in it already.
    """
    job = Job(events, tmp_path, totals)
    job.run()
    assert job.now() == {"a": 5, "b": 2}
    lose(job.checkpoint)
    events.add(*SECOND)
    first = job.run_resumed()
    assert job.now() == {"a": 15, "b": 2, "c": 3}
    forget_batch(job.checkpoint, 0)
    fold(job.log)
    events.add(*THIRD)
    second = job.run_resumed()
    assert second.commit == first.commit
    assert job.now() == {"a": 115, "b": 7, "c": 3, "d": 1}


def test_a_state_that_was_taken_in_is_not_asked_for_again(events: Events, tmp_path: Path) -> None:
    """The query goes on when the commit that it was started from has been folded away."""
    job = Job(events, tmp_path, by_pandas)
    job.run()
    lose(job.checkpoint)
    for rows in (SECOND, THIRD):
        events.add(*rows)
        job.run_resumed()
        fold(job.log)
    events.add(("e", 7), ("a", 1))
    assert job.run_resumed().is_seeded
    assert job.now() == {"a": 116, "b": 7, "c": 3, "d": 1, "e": 7}


def test_the_state_may_be_folded_away_while_the_query_runs(events: Events, tmp_path: Path) -> None:
    """Spark takes the initial state in with the first batch only, although the query names it for ever."""
    job = Job(events, tmp_path, by_pandas)
    job.run()
    lose(job.checkpoint)
    with resume(job.log, "totals", checkpoint=job.checkpoint) as again:
        state = initial_state(events.spark, again)
    live = events.stream({**again.options(), "maxOffsetsPerTrigger": "1"})
    events.add(*SECOND, *THIRD)
    with ChangelogSink(job.log, keys="word", config=QUIET, on_reset="restore") as sink:

        def write_and_fold(frame: DataFrame, batch: int) -> None:
            sink(frame, batch)
            fold(job.log)

        finish(job.totals(live, state), write_and_fold, job.checkpoint)
        assert sink.log.anchors() == {}
    assert job.now() == {"a": 115, "b": 7, "c": 3, "d": 1}


def test_without_a_checkpoint_to_keep_the_commit_in_it_is_refused(events: Events, tmp_path: Path) -> None:
    job = Job(events, tmp_path, by_pandas)
    job.run()
    with resume(job.log, "totals") as again:
        with pytest.raises(ConfigError, match="however often the first batch runs"):
            initial_state(events.spark, again)


def test_it_is_grouped_by_the_keys_or_by_what_is_named(events: Events, tmp_path: Path) -> None:
    job = Job(events, tmp_path, by_pandas)
    job.run()
    with resume(job.log, "totals", checkpoint=tmp_path / "new") as again:
        counts = initial_state(events.spark, again).count()
        assert {(r["word"], r["count"]) for r in counts.collect()} == {("a", 1), ("b", 1)}
        assert initial_state(events.spark, again, "n").count().columns == ["n", "count"]
        for keys in (["nowhere"], []):
            with pytest.raises(ConfigError, match="Cannot group the state"):
                initial_state(events.spark, again, keys)
