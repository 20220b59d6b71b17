"""`resume` without Spark: which commit it gives, how long that is pinned, and the options of each source."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keyfold import Changelog, resume, resume_if_lost
from keyfold.checkpoints.log.writer import Batch
from keyfold.checkpoints.manifest.journal import encode_line
from keyfold.checkpoints.manifest.source_offsets import options_of
from keyfold.checkpoints.resume.resume_marker import checkpoint_path
from keyfold.statestore.errors import CompactedAway, ConfigError, Damaged, NotResumable
from keyfold.statestore.files import Files

QUIET = {"cleaner.threads": 0, "anchors.auto": 0}
KAFKA = '{"words":{"0":7,"1":9}}'
FEED = '{"keyfold": "feed", "offsets": {"0": 3}}'
OTHER = '{"keyfold": "cafe", "offsets": {"0": 4}}'
SEED = '{"keyfold": "beef", "seed": 4}'


@pytest.fixture
def log(tmp_path: Path) -> Any:
    with Changelog.open(tmp_path / "log", config=QUIET) as opened:
        yield opened


def value_of(n: int) -> pa.Table:
    """One more value of the one key."""
    return pa.table({"key": [b"k"], "value": [str(n).encode()]})


def deliver(log: Changelog, batch: int, query: str = "q1", source: tuple[str, ...] = (KAFKA,)) -> None:
    """A commit of a query, whose state is the number of the commit."""
    number = log.state.next_commit
    log.append(value_of(number), app_id="other", batch_id=number)
    pins: tuple[str, ...] = ()
    last = log.state.apps.get("job")
    if last is not None and last.query == query:
        pins = tuple(a.name for a in log.state.anchors.values() if a.app == "job" and a.commit < last.number)
    log.engine.writer.commit({}, Batch("job", batch, query=query, source=source, unanchor=pins))


class Spark:
    """What Spark writes into a checkpoint."""

    def __init__(self, directory: Path, query: str) -> None:
        self.directory = directory
        (directory / "offsets").mkdir(parents=True)
        (directory / "commits").mkdir()
        (directory / "metadata").write_text(json.dumps({"id": query}))

    def plans(self, batch: int) -> None:
        (self.directory / "offsets" / str(batch)).write_text("v1\n{}\n-\n")

    def notes(self, batch: int) -> None:
        (self.directory / "commits" / str(batch)).write_text("v1\n{}")


def spark_in(directory: Path, query: str = "q2") -> Spark:
    """A query of which `resume` has made the checkpoint's directory."""
    made = Spark(directory.with_name("spark"), query)
    for path in made.directory.iterdir():
        path.rename(directory / path.name)
    made.directory.rmdir()
    made.directory = directory
    return made


# -- the commit that a query was resumed from ----------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "var" / "checkpoint"


def test_however_often_a_query_starts_it_is_resumed_from_one_commit(log: Changelog, checkpoint: Path) -> None:
    """Also behind its own first commit, and when others have folded the state away for everybody else."""
    deliver(log, 7)
    with resume(log.path, "job", checkpoint=checkpoint) as again:
        first = again.commit
        assert again.state.to_dict() == {b"k": b"1"}
    query = spark_in(checkpoint)
    query.plans(0)
    deliver(log, 0, "q2", (FEED,))
    log.compact()
    for _ in range(2):
        with resume(log.path, "job", checkpoint=checkpoint) as again:
            assert (again.commit, again.is_seeded) == (first, False)
            assert again.state.to_dict() == {b"k": b"1"}
            assert again.options()["startingOffsets"] == KAFKA
    query.notes(0)
    query.plans(1)
    deliver(log, 1, "q2", (FEED,))
    assert log.anchors() == {}
    log.compact()
    with resume(log.path, "job", checkpoint=checkpoint) as again:
        assert (again.commit, again.is_seeded) == (first, True)
        with pytest.raises(CompactedAway):
            _ = again.state


def test_a_query_that_has_planned_nothing_is_resumed_from_the_last_commit(
    log: Changelog, checkpoint: Path
) -> None:
    deliver(log, 7)
    resume(log.path, "job", checkpoint=checkpoint).close()
    deliver(log, 8)
    with resume(log.path, "job", checkpoint=checkpoint) as again:
        assert again.commit.batch == 8
        assert again.state.to_dict() == {b"k": b"3"}


def test_a_later_batch_means_that_the_first_one_is_behind(log: Changelog, checkpoint: Path) -> None:
    """Spark's notes are not synced: a power loss can take them."""
    deliver(log, 7)
    resume(log.path, "job", checkpoint=checkpoint).close()
    spark_in(checkpoint).plans(1)
    with resume(log.path, "job", checkpoint=checkpoint) as again:
        assert again.is_seeded


def test_a_checkpoint_behind_which_the_app_has_gone_on_is_refused(log: Changelog, checkpoint: Path) -> None:
    deliver(log, 7)
    resume(log.path, "job", checkpoint=checkpoint).close()
    spark_in(checkpoint, "q2").plans(0)
    deliver(log, 8, "q1")
    with pytest.raises(NotResumable, match="has committed with another query") as caught:
        resume(log.path, "job", checkpoint=checkpoint)
    assert "delete the checkpoint" in str(caught.value.remedy)


def test_a_query_that_was_never_resumed_is_not_resumed_from_the_middle(
    log: Changelog, checkpoint: Path
) -> None:
    deliver(log, 7)
    Spark(checkpoint, "q1").plans(3)
    with pytest.raises(NotResumable, match="began without being resumed"):
        resume(log.path, "job", checkpoint=checkpoint)
    assert log.anchors() == {}


def test_another_apps_checkpoint_is_refused(log: Changelog, checkpoint: Path) -> None:
    deliver(log, 7)
    resume(log.path, "job", checkpoint=checkpoint).close()
    spark_in(checkpoint).plans(0)
    with pytest.raises(NotResumable, match="for another app"):
        resume(log.path, "other", checkpoint=checkpoint)


def test_what_was_kept_is_checked(log: Changelog, checkpoint: Path) -> None:
    deliver(log, 7)
    resume(log.path, "job", checkpoint=checkpoint).close()
    spark_in(checkpoint).plans(0)
    (kept,) = checkpoint.glob("keyfold-resume-*")
    kept.write_bytes(kept.read_bytes().replace(b'"batch":7', b'"batch":6'))
    with pytest.raises(Damaged, match="delete the checkpoint"):
        resume(log.path, "job", checkpoint=checkpoint)


@pytest.mark.parametrize("commit", [None, {}, 5, {"commit": 1, "app": "job"}], ids=repr)
def test_a_kept_commit_with_other_fields_is_damage(log: Changelog, checkpoint: Path, commit: object) -> None:
    deliver(log, 7)
    resume(log.path, "job", checkpoint=checkpoint).close()
    spark_in(checkpoint).plans(0)
    (kept,) = checkpoint.glob("keyfold-resume-*")
    kept.write_bytes(encode_line({"t": "resumed", "commit": commit}))
    with pytest.raises(Damaged, match="delete the checkpoint"):
        resume(log.path, "job", checkpoint=checkpoint)


class Recorder(Files):
    """Notes what is synced and renamed, by name."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def _operation(self, name: str, path: Path, **rest: Any) -> AbstractContextManager[None]:
        self.seen.append((name, path.name))
        return super()._operation(name, path, **rest)


def test_the_choice_is_durable_before_it_is_given(log: Changelog, checkpoint: Path) -> None:
    deliver(log, 7)
    log.close()
    files = Recorder()
    resume(log.path, "job", checkpoint=checkpoint, files=files).close()
    (kept,) = checkpoint.glob("keyfold-resume-*")
    renamed = files.seen.index(("rename", f"{kept.name}.tmp"))
    assert ("sync", f"{kept.name}.tmp") in files.seen[:renamed]
    for directory in (checkpoint, checkpoint.parent, checkpoint.parent.parent):
        assert ("sync_directory", directory.name) in files.seen[renamed:]


def test_a_checkpoint_is_named_as_spark_names_it(tmp_path: Path) -> None:
    for name in (f"file:{tmp_path}/a b", f"file://{tmp_path}/a b", f"{tmp_path}/a b", tmp_path / "a b"):
        assert checkpoint_path(name) == tmp_path / "a b"
    assert checkpoint_path("var/x") == Path("var/x").absolute()
    with pytest.raises(ConfigError, match="local disk"):
        checkpoint_path("s3a://bucket/checkpoint")


# -- resume_if_lost ------------------------------------------------------------------------------------------


def test_a_first_start_and_a_whole_checkpoint_resume_nothing(log: Changelog, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    assert resume_if_lost(tmp_path / "nowhere", "job", checkpoint=checkpoint) is None
    assert resume_if_lost(log.path, "job", checkpoint=checkpoint) is None
    assert not checkpoint.exists()
    deliver(log, 0)
    Spark(checkpoint, "q1").plans(0)
    assert resume_if_lost(log.path, "job", checkpoint=checkpoint) is None
    assert log.anchors() == {}


def test_a_lost_checkpoint_is_resumed_at_every_start(log: Changelog, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    deliver(log, 5)
    again = resume_if_lost(log.path, "job", checkpoint=checkpoint)
    assert again is not None
    assert not again.is_seeded
    query = spark_in(checkpoint)
    query.plans(0)
    query.notes(0)
    later = resume_if_lost(log.path, "job", checkpoint=checkpoint)
    assert later is not None
    assert (later.commit, later.is_seeded) == (again.commit, True)


# -- pins ----------------------------------------------------------------------------------------------------


def test_the_commit_that_was_pinned_before_stays_pinned(log: Changelog) -> None:
    """The query that started from it may have to run its first batch again."""
    deliver(log, 7)
    with resume(log.path, "job") as again:
        before = again.commit
    deliver(log, 0, "q2")
    for _ in range(2):
        with resume(log.path, "job") as again:
            assert again.commit.query == "q2"
            pinned = sorted(a.commit for a in log.state.anchors.values())
            assert pinned == [before.number, again.commit.number]
    log.compact()
    with Changelog.open(log.path) as same:
        assert len(same.state.commits) >= 2
    deliver(log, 0, "q3")
    with resume(log.path, "job") as latest:
        pinned = sorted(a.commit for a in log.state.anchors.values())
        assert pinned == [again.commit.number, latest.commit.number]


# -- sources -------------------------------------------------------------------------------------------------


def test_several_sources_are_asked_for_one_by_one_in_the_order_of_the_query(log: Changelog) -> None:
    deliver(log, 1, source=(KAFKA, FEED, OTHER))
    with resume(log.path, "job") as again:
        assert again.options(source=0) == {"startingOffsets": KAFKA}
        assert again.options(source=1) == {"startingOffsets": FEED}
        assert again.options(source=2) == {"startingOffsets": OTHER}
        with pytest.raises(NotResumable, match="0: Kafka, topics words; source 1: keyfold, changelog feed"):
            again.options()
        for wrong in (3, -1):
            with pytest.raises(NotResumable, match="sources 0 to 2"):
                again.options(source=wrong)


def test_the_seed_of_an_earlier_resume_is_not_counted(log: Changelog) -> None:
    deliver(log, 1, source=(SEED, FEED))
    deliver(log, 2, source=(SEED, KAFKA, SEED, FEED))
    with resume(log.path, "job") as again:
        assert again.options(source=0)["startingOffsets"] == KAFKA
        assert again.options(source=1)["startingOffsets"] == FEED
    log.rollback(("job", 1))
    with resume(log.path, "job") as again:
        assert again.options() == {"startingOffsets": FEED}


def test_a_source_without_a_position_is_not_skipped_in_silence(log: Changelog) -> None:
    """It would be read from its beginning again, beside one that goes on."""
    deliver(log, 1, source=(KAFKA, '{"logOffset":3}'))
    with resume(log.path, "job") as again:
        with pytest.raises(NotResumable, match="source 1: a file source"):
            again.options()
        assert again.options(source=0) == {"startingOffsets": KAFKA}
        with pytest.raises(NotResumable, match="a file source"):
            again.options(source=1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("-", "had produced no data yet"),
        ("no json", "not JSON"),
        ('{"logOffset":1}', "file source"),
        ("17", "at its position: 17"),
        ("{}", "cannot start this kind of source"),
        ('{"words":{"x":1}}', "cannot start this kind of source"),
    ],
)
def test_a_position_that_cannot_be_given_back_says_why(text: str, why: str) -> None:
    assert why in options_of(text)


def test_an_app_without_sources_says_so(log: Changelog) -> None:
    log.append(value_of(1), app_id="loader", batch_id=1)
    with resume(log.path, "loader") as again:
        with pytest.raises(NotResumable, match="without sources"):
            again.options()
        with pytest.raises(NotResumable, match="without sources"):
            again.options(source=0)
