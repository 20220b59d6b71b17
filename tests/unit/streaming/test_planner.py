"""Plans of the data source: all of a view and nothing else, in pieces, kept from the cleaner by a lease."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold import Changelog
from keyfold.checkpoints.log.reader_marks import now_ms
from keyfold.statestore import filenames
from keyfold.statestore.errors import ViewExpired
from keyfold.statestore.files import LOCAL
from keyfold.statestore.segment.reader import read_segments
from keyfold.statestore.segment.writer import Segment
from keyfold.streaming import leases
from keyfold.streaming.leases import LeaseRenewer
from keyfold.streaming.pieces import Piece
from keyfold.streaming.planner import Planner, pieces_of
from support.faults.inject import FailAt, changes
from support.source import QUIET, Driver, clean, numbered, read_batch, table
from support.source import leases as lease_files

MINUTES_10 = 600_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


def values(pieces: Sequence[Piece]) -> list[bytes]:
    return [
        v
        for piece in pieces
        for batch in piece.records(LOCAL, pa.binary())
        for v in batch.column("value").to_pylist()
    ]


def whole(planner: Planner) -> list[Piece]:
    state = planner.leased()
    return planner.log_pieces(state, [p.start for p in state.partitions], state.ends)


# -- pieces ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Segment, ...]]:
    """Some large, some small, some folded, and the active one with a mark for each of 40 commits."""
    path = tmp_path_factory.mktemp("pieces") / "log"
    with Changelog.open(path, config={**QUIET, "segment.bytes": 20_000}) as log:
        for i in range(40):
            log.append(numbered(range(i * 30, i * 30 + 30 + i)))
        log.compact()
        for i in range(40):
            log.append(numbered(range(i * 7)))
        log.engine.configure({"segment.bytes": 1 << 30})
        for i in range(40):
            log.append(numbered(range(i)))
        found = log.state.partitions[0].segments
    assert any(s.records < s.next - s.base for s in found)
    assert max(len(s.marks) for s in found) > 30
    return path / "0", found


@given(st.data())
def test_pieces_are_the_range_without_gap_or_overlap(
    segments: tuple[Path, tuple[Segment, ...]], data: st.DataObject
) -> None:
    directory, found = segments
    end = data.draw(st.integers(0, found[-1].next))
    begin = data.draw(st.integers(0, end))
    pieces = list(pieces_of(found, begin, end, data.draw(st.sampled_from([500, 5_000, 50_000, 1 << 40]))))
    read = [
        offset
        for part, first, last in pieces
        for batch in read_segments(LOCAL, directory, part, first, last)
        for offset in batch.column("offset").to_pylist()
    ]
    expected = [
        offset
        for batch in read_segments(LOCAL, directory, found, begin, end)
        for offset in batch.column("offset").to_pylist()
    ]
    assert read == expected


def test_a_large_range_is_cut_into_even_pieces(segments: tuple[Path, tuple[Segment, ...]]) -> None:
    _, found = segments
    largest = max(found, key=lambda s: s.size)
    pieces = list(pieces_of([largest], largest.base, largest.next, largest.size // 4))
    sizes = [last - first for _, first, last in pieces]
    assert 3 <= len(pieces) <= 5
    assert max(sizes) < 2 * min(sizes)


def test_small_segments_share_a_piece(segments: tuple[Path, tuple[Segment, ...]]) -> None:
    _, found = segments
    ((part, _, _),) = pieces_of(found[:3], found[0].base, found[2].next, 1 << 40)
    assert part == found[:3]


@given(st.data())
def test_a_piece_carries_only_the_marks_that_it_needs(
    segments: tuple[Path, tuple[Segment, ...]], data: st.DataObject
) -> None:
    directory, found = segments
    planner = Planner(LOCAL, directory.parent, MINUTES_10)
    active = found[-1]
    begin = data.draw(st.integers(active.base, active.next - 1))
    end = data.draw(st.integers(begin + 1, min(active.next, begin + 40)))
    (piece,) = planner.log_pieces(planner.state(), [begin], [end])
    # The first commits are so small that forty offsets are nine of them.
    assert sum(len(s.marks) for s in piece.segments) < 12
    read = [o for batch in piece.records(LOCAL, pa.binary()) for o in batch.column("offset").to_pylist()]
    assert read == list(range(begin, end))


def test_a_folded_piece_gives_the_last_record_of_every_key(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1"), ("b", "2"), ("a", "3"), ("b", None), ("c", "4")))
        planner = Planner(LOCAL, path, MINUTES_10)
        state = planner.leased()
        assert values(planner.state_pieces(state, state.ends, {0})) == [b"3", b"4"]
        assert values(planner.state_pieces(state, (2,), {0})) == [b"1", b"2"]
        assert planner.state_pieces(state, (0,), {0}) == []
        assert planner.state_pieces(state, state.ends, set()) == []


def test_a_folded_piece_only_looks_keys_up_behind_the_clean_section(path: Path) -> None:
    """Also where an anchor lies in it: from there on a key of the clean section may come again."""
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1"), ("b", "2")))
        log.anchor("kept")
        log.append(table(("a", "3"), ("c", "4")))
        log.compact()
        log.append(table(("b", "5")))
        planner = Planner(LOCAL, path, MINUTES_10)
        state = planner.leased()
        (piece,) = planner.state_pieces(state, state.ends, {0})
        assert (piece.unique_below, values([piece])) == (2, [b"3", b"4", b"5"])
        log.drop_anchor("kept")
        log.compact()
        state = planner.leased()
        (piece,) = planner.state_pieces(state, state.ends, {0})
        assert (piece.unique_below, values([piece])) == (5, [b"3", b"4", b"5"])


def test_a_plan_without_pieces_reads_nothing(path: Path) -> None:
    Changelog.open(path, config=QUIET).close()
    assert read_batch(path) == read_batch(path, mode="log") == []
    assert lease_files(path) == []


# -- leases ------------------------------------------------------------------------------------------


def test_a_plan_can_be_read_after_the_cleaner_has_replaced_its_files(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1")))
        log.append(table(("a", "2")))
        pieces = whole(Planner(LOCAL, path, MINUTES_10))
        clean(log)
        assert values(pieces) == [b"1", b"2"]
        assert values(whole(Planner(LOCAL, path, MINUTES_10))) == [b"2"]


def test_a_plan_whose_lease_was_given_up_is_told_that_its_files_are_gone(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1")))
        log.append(table(("a", "2")))
        planner = Planner(LOCAL, path, MINUTES_10)
        pieces = whole(planner)
        planner.close()
        clean(log)
        with pytest.raises(ViewExpired, match=r"partition 0, offsets 0 to 2(.|\n)*viewTimeoutMs"):
            values(pieces)


def test_a_lease_that_ran_out_protects_nothing(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1")))
        log.append(table(("a", "2")))
        pieces = whole(Planner(LOCAL, path, 1))
        time.sleep(0.01)
        clean(log)
        with pytest.raises(ViewExpired):
            values(pieces)


def test_a_plan_whose_lease_ran_out_is_still_read_while_its_files_are_there(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1")))
        planner = Planner(LOCAL, path, MINUTES_10)
        pieces = whole(planner)
        planner.close()
        assert values(pieces) == [b"1"]


def test_a_task_that_reads_keeps_its_lease_alive(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1")))
        planner = Planner(LOCAL, path, 300)
        (piece,) = whole(planner)
        assert piece.lease is not None
        lease = filenames.lease(path, piece.lease.identifier)
        before = json.loads(lease.read_bytes())
        with LeaseRenewer(LOCAL, path, piece.lease):
            deadline = time.monotonic() + 60
            while json.loads(lease.read_bytes())["expires_ms"] < before["expires_ms"] + 300:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert json.loads(lease.read_bytes())["seq"] == before["seq"]
        assert not [t for t in threading.enumerate() if t.name == "keyfold-lease"]


def test_a_task_that_begins_late_renews_its_lease_at_once(path: Path) -> None:
    """Not only after a while: the time between planning and reading may have used up all but a moment."""
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1")))
        (piece,) = whole(Planner(LOCAL, path, MINUTES_10))
        assert piece.lease is not None
        file = filenames.lease(path, piece.lease.identifier)
        before = json.loads(file.read_bytes())["expires_ms"]
        time.sleep(0.01)
        with LeaseRenewer(LOCAL, path, replace(piece.lease, expires_ms=now_ms() + 1000)):
            assert json.loads(file.read_bytes())["expires_ms"] > before


def test_tasks_that_renew_one_lease_at_once_leave_it_whole(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1")))
        (piece,) = whole(Planner(LOCAL, path, MINUTES_10))
        lease = piece.lease
        assert lease is not None
        broken: list[BaseException | bytes] = []
        done = threading.Event()

        def renew() -> None:
            try:
                for _ in range(40):
                    assert leases.renew(LOCAL, path, lease, lease.seq) is not None
            except BaseException as e:
                broken.append(e)

        def look() -> None:
            while not done.is_set():
                text = filenames.lease(path, lease.identifier).read_bytes()
                if not text.endswith(b"}"):
                    broken.append(text)

        tasks = [threading.Thread(target=renew) for _ in range(4)]
        watcher = threading.Thread(target=look)
        for thread in [watcher, *tasks]:
            thread.start()
        for thread in tasks:
            thread.join()
        done.set()
        watcher.join()
        assert broken == []
        assert [p.name for p in (path / "readers").iterdir()] == lease_files(path)


def test_a_lease_that_is_gone_is_not_made_again_by_who_renews(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1")))
        planner = Planner(LOCAL, path, MINUTES_10)
        (piece,) = whole(planner)
        planner.close()
        assert piece.lease is not None
        assert leases.renew(LOCAL, path, piece.lease, 1) is None
        assert lease_files(path) == []


def test_one_stream_holds_one_lease_and_gives_it_up_when_it_stops(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        query = Driver(path, {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "2"})
        for i in range(5):
            log.append(table(("a", str(i))))
            query.trigger()
        assert len(lease_files(path)) == 1
        query.reader.stop()
        assert lease_files(path) == []


def test_a_stream_that_was_idle_for_long_takes_a_new_lease(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        query = Driver(path, {"startingOffsets": "earliest"})
        log.append(table(("a", "1")))
        query.trigger()
        (before,) = lease_files(path)
        (path / "readers" / before).unlink()
        planner = query.reader._planner
        assert planner._lease is not None
        planner._lease = replace(planner._lease, expires_ms=0)
        log.append(table(("a", "2")))
        assert [r["value"] for r in query.trigger() or []] == [b"2"]
        (after,) = lease_files(path)
        assert after != before


def test_leases_that_ran_out_are_swept_by_the_next_reader(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1")))
        for _ in range(3):
            read_batch(path, viewTimeoutMs="1")
            time.sleep(0.005)
        assert len(lease_files(path)) == 1


def test_a_changelog_that_cannot_be_written_is_read_without_a_lease(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1")))
    for code in (errno.EROFS, errno.EACCES, errno.ENOSPC):
        files = FailAt(0, code, forever=True, only=changes)
        assert values(whole(Planner(files, path, MINUTES_10))) == [b"1"]
        assert files.failed
    assert lease_files(path) == []
    for file in (path / "readers").iterdir():
        file.unlink()
    (path / "readers").rmdir()
    assert [r["value"] for r in read_batch(path)] == [b"1"]


def test_another_changelog_at_the_same_path_is_told(path: Path) -> None:
    def made_anew() -> None:
        with Changelog.open(path, config=QUIET) as log:
            log.append(table(("a", "1")))

    made_anew()
    pieces = whole(Planner(LOCAL, path, MINUTES_10))
    path.rename(path.with_name("old"))
    with pytest.raises(ViewExpired, match="no directory"):
        values(pieces)
    made_anew()
    with pytest.raises(ViewExpired, match="found: the changelog"):
        values(pieces)


def test_slices_of_records_keep_their_types(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(numbered(range(10)))
        planner = Planner(LOCAL, path, MINUTES_10)
        (piece,) = planner.log_pieces(planner.leased(), [3], [5])
        (batch,) = piece.records(LOCAL, pa.binary())
        assert isinstance(batch, pa.RecordBatch)
        assert batch.num_rows == 2
