"""`verify` names every damage with file and place, goes on to the end, and finds none where all is sound."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfold import Changelog, Standby
from keyfold.checkpoints.log.compact_requests import Request
from keyfold.checkpoints.manifest.journal import Head
from keyfold.checkpoints.verify.verify import Verification, verify
from keyfold.statestore.errors import Damaged, NotAChangelog, UnsupportedFormat
from keyfold.statestore.files import LOCAL
from support.changelogs import (
    BY_HAND,
    flip,
    head_of,
    identity_of,
    index_of,
    journal_of,
    rewrite,
    rows,
    segment_of,
)


@pytest.fixture(params=["closed", "crashed"])
def either(request: pytest.FixtureRequest) -> Path:
    return Path(request.getfixturevalue(request.param))


def damaged_files(found: Verification) -> set[Path]:
    return {damage.path for damage in found.damages}


# -- what is sound -------------------------------------------------------------------------------------------


def test_a_sound_changelog_is_found_sound_with_all_its_records(either: Path) -> None:
    found = verify(either)
    assert (found.damages, found.notes, found.unnamed) == ([], [], [])
    with Changelog.open(either, mode="r") as log:
        assert found.checked.records == sum(b.num_rows for p in range(2) for b in log.read(p)) > 0
        assert found.line == log.state.seq
    assert found.checked.files == 3 + sum(1 for _ in either.glob("*/*.arrows")) + sum(
        1 for _ in either.glob("*/*.index")
    )


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.tuples(st.sampled_from("abcdef"), st.none() | st.text()))),
        st.tuples(st.sampled_from(["compact", "reopen", "anchor", "drop"]), st.none()),
    ),
    max_size=8,
)


@settings(max_examples=settings().max_examples // 4)
@given(steps=_STEPS, lag=st.sampled_from([0, 86_400_000]), auto=st.sampled_from([0, 2]))
def test_nothing_that_a_writer_does_is_taken_for_damage(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, Any]], lag: int, auto: int
) -> None:
    root = tmp_path_factory.mktemp("model") / "log"
    config = {**BY_HAND, "segment.bytes": "2KiB", "delete.retention.ms": lag, "anchors.auto": auto}
    log = Changelog.open(root, partitions=2, config=config)
    try:
        for step, data in steps:
            if step == "append":
                log.append(rows(*data))
            elif step == "compact":
                log.compact()
            elif step == "reopen":
                log.close()
                log = Changelog.open(root)
            elif step == "anchor" and log.state.commits:
                log.anchor(f"at {log.state.seq}")
            elif step == "drop" and log.anchors():
                log.drop_anchor(next(iter(log.anchors())))
        assert verify(root).damages == []
    finally:
        log.close()
    assert verify(root).damages == []


def test_a_torn_last_line_is_a_note_and_no_damage(crashed: Path) -> None:
    """Crash state C2."""
    with journal_of(crashed).open("ab") as journal:
        journal.write(b'1234abcd {"n":99,"t":"com')
    found = verify(crashed)
    assert found.sound
    assert "never acknowledged" in found.notes[0]


@pytest.mark.parametrize("durable", [1, 2, 3])
@pytest.mark.parametrize("ends", [True, False], ids=["whole", "without its newline"])
def test_a_journal_is_damaged_for_verify_if_and_only_if_it_is_for_an_opening(
    tmp_path: Path, durable: int, ends: bool
) -> None:
    """A power loss can leave a head that names fewer lines than were durable, here `durable` of four."""
    original = tmp_path / "original"
    with Changelog.open(original, config=BY_HAND) as log:
        for _ in range(3):
            log.append(rows(("a", "1")))
        shutil.copytree(original, tmp_path / "crashed")
    journal = journal_of(tmp_path / "crashed")
    lines = journal.read_bytes().splitlines(keepends=True)
    head = b"".join(lines[:durable])
    slot = Head(len(head), durable, crc32c(head)).encode() + b" " * 64
    outcomes = set()
    for damaged in range(len(lines)):
        path = Path(shutil.copytree(tmp_path / "crashed", tmp_path / f"{damaged}"))
        changed = list(lines)
        changed[damaged] = changed[damaged].replace(b'"seq"', b'"sep"')
        data = b"".join(changed)
        journal_of(path).write_bytes(data if ends else data.removesuffix(b"\n"))
        head_of(path).write_bytes(slot)
        found = bool(verify(path).damages)
        try:
            Changelog.open(path).close()
        except Damaged:
            assert found, damaged
        else:
            assert not found, damaged
        outcomes.add(found)
    assert outcomes == {True, False}


def test_a_line_behind_the_head_is_checked_and_no_damage(crashed: Path) -> None:
    """Crash state C3: the head is as old as one commit before."""
    heads = sorted((head_of(crashed).read_bytes()[i : i + 64] for i in (0, 64)), reverse=True)
    head_of(crashed).write_bytes(heads[1] + b" " * 64)
    found = verify(crashed)
    assert (found.damages, found.notes) == ([], [])
    assert found.line == int(heads[0][21:41])


def test_an_opening_that_died_before_its_head_is_a_note(closed: Path) -> None:
    """Crash state O1."""
    (closed / "manifest" / "77.journal").write_bytes(b"")
    found = verify(closed)
    assert found.sound
    assert "epoch 77 was claimed" in found.notes[0]


def test_what_nobody_names_is_listed_and_is_no_damage(closed: Path) -> None:
    """Crash states C1, S1 and S2, and a user's own files."""
    left = {
        f"0/{99:020}-1-99.arrows": "never committed, replaced by the cleaner, or being written now",
        "work/3": "files of tasks that were not committed",
        "manifest/9.files": "of another epoch, or a claim",
    }
    strangers = ("1/notes.txt", "manifest/0.bak", "copy.parquet", "readers/x", "requests/x", "work/mine")
    for name in (*left, *strangers):
        (closed / name).parent.mkdir(exist_ok=True)
        (closed / name).write_bytes(b"x")
    found = verify(closed)
    assert found.sound
    listed = {str(u.path.relative_to(closed)): u.what for u in found.unnamed}
    assert listed == left | dict.fromkeys(strangers, "not part of this changelog")


def test_what_keyfold_keeps_beside_the_log_is_not_listed(tmp_path: Path) -> None:
    root = tmp_path / "log"
    with Changelog.open(root, partitions=2, config={"snapshot.dest": str(tmp_path / "kept")}) as log:
        log.append(rows(("a", "1")))
        assert log.get(b"a") == b"1"
        with Changelog.open(root, mode="r"), Standby(root) as standby, Request(LOCAL, root):
            standby.lag()
            for name in (
                "changelog.json.7.tmp",
                "readers/x.lease",
                "requests/7.answer",
                "work/1/job/0-0-0.blocks",
            ):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(b"x")
            assert {path.name for path in root.iterdir()} >= {"readers", "requests", "work", "store-1"}
            assert [path.name for path in (root / "work").glob("standby-*")] != []
            assert verify(root).unnamed == []
        first = log.snapshot(tmp_path / "snapshot")
        log.append(rows(("b", "2")))
        again = log.snapshot(tmp_path / "snapshot")
        assert first.commit < again.commit
    (tmp_path / "snapshot" / "pinned").write_bytes(b"")
    with Changelog.open(tmp_path / "snapshot", mode="r"):
        assert list((tmp_path / "snapshot" / "manifest").glob("*.files")) != []
        assert verify(tmp_path / "snapshot").unnamed == []


def test_it_changes_nothing(crashed: Path) -> None:
    def tree() -> dict[str, tuple[bytes, int]]:
        files = (path for path in sorted(crashed.rglob("*")) if path.is_file())
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    before = tree()
    verify(crashed)
    assert tree() == before


# -- flipped bytes -------------------------------------------------------------------------------------------


def _every(path: Path, step: int) -> Iterator[int]:
    """Positions all over a file, the last one among them."""
    size = path.stat().st_size
    yield from range(0, size - 1, step)
    yield size - 1


@pytest.mark.parametrize(
    ("kind", "step"), [(identity_of, 7), (head_of, 3), (journal_of, 29), (segment_of, 23)]
)
def test_a_flipped_byte_is_found_in_the_file_it_is_in(
    either: Path, kind: Callable[[Path], Path], step: int
) -> None:
    _flip_every(either, kind(either), step)


def test_a_flipped_byte_of_an_index_is_found(closed: Path) -> None:
    _flip_every(closed, index_of(closed), 3)


def _flip_every(root: Path, path: Path, step: int) -> None:
    for position in _every(path, step):
        flip(path, position)
        found = verify(root)
        assert damaged_files(found) == {path}, f"byte {position}"
        flip(path, position)
    assert verify(root).sound


def test_a_damage_says_where_it_is_and_what_was_expected(closed: Path) -> None:
    path = segment_of(closed)
    data = path.read_bytes()
    entry = np.frombuffer(index_of(closed).read_bytes()[32:80], "<i8")
    position, length = int(entry[2]), int(entry[3])
    flip(path, position + length - 1)
    (damage,) = verify(closed).damages
    changed = data[position : position + length - 1] + bytes([data[position + length - 1] ^ 1])
    assert damage.position == f"bytes {position} to {position + length}"
    assert damage.expected == f"crc32c {crc32c(data[position : position + length]):08x}"
    assert damage.found == f"crc32c {crc32c(changed):08x}"


def test_all_damages_are_listed_not_only_the_first(closed: Path) -> None:
    segments = sorted(closed.glob("*/*.arrows"))
    assert len(segments) >= 4
    for path in segments:
        flip(path, 100)
        flip(path, path.stat().st_size - 20)
    flip(head_of(closed), 5)
    flip(identity_of(closed), 30)
    found = verify(closed)
    assert damaged_files(found) == {*segments, head_of(closed), identity_of(closed)}
    assert len(found.damages) == 2 * len(segments) + 2


def test_files_that_unreadable_lines_may_have_taken_out_are_a_note(tmp_path: Path) -> None:
    """The swap of the cleaner stands behind the damaged line; the files it took out are gone."""
    root = tmp_path / "log"
    with Changelog.open(root, partitions=1, config=BY_HAND) as log:
        log.append(rows(("a", "1")))
        log.compact()
        log.append(rows(("a", "2")))
        log.append(rows(("a", "3")))
        log.compact()
    lines = journal_of(root).read_bytes().splitlines(keepends=True)
    commits = [i for i, line in enumerate(lines) if b'"t":"commit"' in line]
    flip(journal_of(root), sum(map(len, lines[: commits[1]])) + 20)
    found = verify(root)
    assert damaged_files(found) == {journal_of(root)}
    assert found.damages[0].position.startswith(f"line {commits[1] + 1}, ")
    assert "is missing" in found.notes[0]


@pytest.mark.parametrize("length", [0, 40, -30])
@pytest.mark.parametrize("kind", [segment_of, index_of, journal_of, head_of, identity_of])
def test_a_file_that_was_cut_is_damage(kind: Callable[[Path], Path], length: int, closed: Path) -> None:
    """The journal: crash state C4."""
    path = kind(closed)
    path.write_bytes(path.read_bytes()[:length])
    found = verify(closed)
    assert path in damaged_files(found)


def test_a_journal_that_lost_whole_lines_is_shorter_than_its_head_says(closed: Path) -> None:
    """Crash state C4: every line that is left is sound."""
    lines = journal_of(closed).read_bytes().splitlines(keepends=True)
    journal_of(closed).write_bytes(b"".join(lines[:-1]))
    (damage,) = verify(closed).damages
    assert damage.what == "A journal is shorter than its head says."
    assert damage.expected == f"{sum(map(len, lines))} bytes"


@pytest.mark.parametrize("kind", [segment_of, index_of, head_of])
def test_a_file_that_is_gone_is_damage(kind: Callable[[Path], Path], closed: Path) -> None:
    path = kind(closed)
    path.unlink()
    (damage,) = verify(closed).damages
    assert (damage.path, damage.found) == (path, "no such file")


def test_without_any_journal_everything_else_is_still_looked_at(closed: Path) -> None:
    journal_of(closed).unlink()
    flip(identity_of(closed), 30)
    found = verify(closed)
    assert damaged_files(found) == {closed / "manifest", identity_of(closed)}
    assert "unknown which are in use" in found.notes[-1]


def test_what_is_no_changelog_or_too_new_is_refused(tmp_path: Path, closed: Path) -> None:
    with pytest.raises(NotAChangelog):
        verify(tmp_path / "nowhere")
    rewrite(closed, lambda line: line.update(version=99))
    with pytest.raises(UnsupportedFormat):
        verify(closed)
