"""Taking commits back: log, state, source position, and everybody who had gone further."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from keyfold import Changelog, restore, resume
from keyfold.checkpoints.log.writer import Batch
from keyfold.checkpoints.manifest.idempotence import Reset, SourceBatch, admits_stream
from keyfold.checkpoints.manifest.resumption import QueryStart
from keyfold.checkpoints.manifest.source_offsets import Begin
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import BatchConflict, CompactedAway, ConfigError, StorageFailed
from keyfold.statestore.files import Files, OpenFile
from keyfold.streaming import offsets
from keyfold.streaming.options import Offsets
from support.changelogs import BY_HAND, rows

CONFIG = {"cleaner.threads": 0, "anchors.auto": 0, "segment.bytes": "1MiB"}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Changelog]:
    with Changelog.open(tmp_path / "log", config=CONFIG) as log:
        yield log


def append(log: Changelog, keys: range, value: bytes, app: str = "append") -> None:
    log.append(pa.table({"key": [b"%d" % k for k in keys], "value": [value] * len(keys)}), app_id=app)


def expected(**values: tuple[range, bytes]) -> dict[bytes, bytes]:
    return {b"%d" % k: value for keys, value in values.values() for k in keys}


def records(log: Changelog) -> list[tuple[int, bytes, bytes]]:
    return [(r["offset"], r["key"], r["value"]) for b in log.read(0) for r in b.to_pylist()]


def test_everything_is_as_it_was_and_goes_on_from_there(log: Changelog) -> None:
    append(log, range(5), b"1")
    before = records(log)
    append(log, range(3), b"2")
    append(log, range(5, 9), b"3")
    assert log.rollback(1).number == 1
    assert (records(log), log.end_offsets()) == (before, {0: 5})
    assert restore(log.path).to_dict() == expected(a=(range(5), b"1"))
    assert dict(log.store().all()) == restore(log.path).to_dict()
    assert log.last_batch("append") == 0
    append(log, range(2), b"4")
    assert [o for o, _, _ in records(log)] == list(range(7))
    assert log.get(b"0") == b"4"
    assert log.state.commits[-1].number == 4  # a number is never used twice
    assert verify(log.path).damages == []


def test_a_commit_in_the_middle_of_a_compacted_segment(log: Changelog) -> None:
    append(log, range(5), b"1")
    log.anchor("keep")
    append(log, range(5), b"2")
    append(log, range(5), b"3")
    log.compact()
    assert len(log.state.partitions[0].segments) == 1
    log.rollback("keep")
    assert records(log) == [(i, b"%d" % i, b"1") for i in range(5)]
    assert verify(log.path).damages == []
    with pytest.raises(CompactedAway):
        restore(log.path, at=2)


def test_it_survives_being_opened_again(log: Changelog) -> None:
    append(log, range(5), b"1")
    append(log, range(5), b"2")
    log.rollback(1)
    log.close()
    for _ in range(2):
        with Changelog.open(log.path) as again:
            assert dict(again.store().all()) == expected(a=(range(5), b"1"))
            assert again.state.partitions[0].generation == 1


def test_stores_that_were_further_are_built_anew_even_if_the_log_has_caught_up(log: Changelog) -> None:
    append(log, range(5), b"1")
    append(log, range(5, 9), b"2")
    assert len(dict(log.store().all())) == 9
    log.rollback(1)
    append(log, range(20, 24), b"3")
    assert dict(log.store().all()) == expected(a=(range(5), b"1"), b=(range(20, 24), b"3"))


def test_a_reader_keeps_its_view(log: Changelog) -> None:
    append(log, range(5), b"1")
    append(log, range(5), b"2")
    with Changelog.open(log.path, mode="r") as reader:
        log.rollback(1)
        assert sum(b.num_rows for b in reader.read(0)) == 10
        reader.refresh()
        assert sum(b.num_rows for b in reader.read(0)) == 5
    log.rollback(1)
    files = {f.name for f in (log.path / "0").glob("*.arrows")}
    assert files == {s.name for s in log.state.partitions[0].segments}


def test_a_named_anchor_behind_the_commit_must_be_dropped_first(log: Changelog) -> None:
    append(log, range(5), b"1")
    append(log, range(5), b"2")
    log.anchor("wanted")
    with pytest.raises(ConfigError, match="A commit after the rollback target has an anchor"):
        log.rollback(1)
    assert log.end_offsets() == {0: 10}
    log.drop_anchor("wanted")
    log.rollback(1)


@pytest.mark.parametrize("to", [None, 0, 7, "nothing", ("append", 9)])
def test_there_must_be_such_a_commit(log: Changelog, to: object) -> None:
    append(log, range(5), b"1")
    with pytest.raises(ConfigError):
        log.rollback(to)  # type: ignore[arg-type]


def test_what_was_folded_away_cannot_be_gone_back_to(log: Changelog) -> None:
    append(log, range(5), b"1")
    append(log, range(5), b"2")
    log.compact()
    with pytest.raises(CompactedAway):
        log.rollback(1)


def test_every_app_is_back_at_its_own_last_batch(log: Changelog) -> None:
    """Also one whose last commit before is folded away."""
    append(log, range(3), b"1", "a")
    append(log, range(3), b"2", "b")
    append(log, range(3), b"3", "b")
    log.anchor("point")
    append(log, range(3), b"4", "a")
    append(log, range(3), b"5", "c")
    log.compact()
    log.close()
    with Changelog.open(log.path) as again:
        again.rollback("point")
        assert {app: again.last_batch(app) for app in "abc"} == {"a": 0, "b": 1, "c": None}


def stream(log: Changelog, batch: int) -> SourceBatch:
    before = (f'{{"t":{{"0":{batch}}}}}',) if batch else ()
    start = partial(QueryStart, tuple(map(Begin, before)))
    return SourceBatch("q1", batch, (f'{{"t":{{"0":{batch + 1}}}}}',), before, start)


def deliver(log: Changelog, b: SourceBatch) -> None:
    log.engine.writer.commit({}, Batch("job", b.batch, query=b.query, source=b.source))


def test_the_query_whose_batches_were_taken_back_is_refused_until_it_resumes(log: Changelog) -> None:
    for batch in range(4):
        deliver(log, stream(log, batch))
    log.rollback(("job", 1))
    with pytest.raises(BatchConflict, match="does not begin where the last commit ended"):
        admits_stream(log.state, log.identity.uuid, "job", stream(log, 4), Reset("refuse"))
    with resume(log.path, app_id="job") as again:
        assert again.commit.batch == 1
        assert again.options()["startingOffsets"] == '{"t":{"0":2}}'


def test_a_stream_reader_that_had_gone_further_is_told(log: Changelog) -> None:
    append(log, range(5), b"1")
    append(log, range(5), b"2")
    uuid, root = log.identity.uuid, log.path
    below, beyond = (offsets.marked(uuid, [offset], log.state) for offset in (5, 6))
    log.rollback(1)
    append(log, range(20, 40), b"3")
    assert offsets.resolved(below, log.state, uuid, root) == below
    with pytest.raises(CompactedAway, match="rolled back"):
        offsets.resolved(beyond, log.state, uuid, root)
    now = offsets.marked(uuid, [20], log.state)
    assert Offsets.from_json(now.to_json()) == now
    assert offsets.resolved(now, log.state, uuid, root) == now
    log.rollback(1)
    with pytest.raises(CompactedAway, match="rolled back"):
        offsets.resolved(now, log.state, uuid, root)


def test_a_disk_that_fails_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    class Failing(Files):
        failing = False

        def append(self, file: OpenFile, chunks: object) -> None:
            if self.failing and file.path.suffix == ".arrows" and file.path.parent.name == "0":
                raise OSError(28, "No space left on device", str(file.path))
            super().append(file, chunks)  # type: ignore[arg-type]

    files = Failing()
    with Changelog.open(tmp_path / "log", config=CONFIG, files=files) as log:
        append(log, range(5), b"1")
        append(log, range(5), b"2")
        log.engine.writer.seal_active()
        files.failing = True
        with pytest.raises(StorageFailed, match="could not be rolled back"):
            log.rollback(1)
        files.failing = False
        assert len(records(log)) == 10
        append(log, range(5), b"3")
        log.rollback(1)
        assert len(records(log)) == 5


def test_a_commit_that_was_rolled_back_is_not_among_those_to_restore_at(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config=BY_HAND) as log:
        for number in range(4):
            log.append(rows(("k", str(number))))
        log.rollback(2)
        log.append(rows(("k", "4")))
    with pytest.raises(CompactedAway, match="rolled back") as gone:
        restore(tmp_path / "log", at=3)
    assert gone.value.expected == "commits 1 to 2, 5 to 5"
