"""Directories that are moved, removed or made again while a changelog in them is open.

Whatever happens to the path: what was acknowledged is in the directory that the changelog was opened in, or
the acknowledgement was refused; and nothing appears where the directory was.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keyfold import Changelog, Standby, restore
from keyfold.checkpoints import engine
from keyfold.checkpoints.log import ingest
from keyfold.checkpoints.log.recovery import NewChangelog, open_writer
from keyfold.checkpoints.log.writer import Batch
from keyfold.checkpoints.manifest.config import LogConfig
from keyfold.checkpoints.manifest.entries import AnchorEntry
from keyfold.checkpoints.manifest.state import Anchor
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import KeyfoldError, StorageFailed, WriterFenced
from keyfold.statestore.segment.block import RECORD_SCHEMA
from support.changelogs import BY_HAND, Clock, rows
from support.faults.inject import QUICK, Watched

KEYS = tuple(f"k{i}" for i in range(20))


def everything(path: Path) -> set[str]:
    return {str(f.relative_to(path)) for f in path.rglob("*")}


def batch(value: str) -> object:
    return rows(*((key, value) for key in KEYS))


def test_a_relative_path_is_that_of_the_moment_when_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with Changelog.open("var/x", partitions=4, config=BY_HAND) as log:
        log.append(rows(("first", "1")))
        os.chdir(tmp_path / "b")
        log.append(batch("2"))
        assert log.get(b"k1") == b"2"
        assert dict(log.store().all())[b"first"] == b"1"
        with Changelog.open(tmp_path / "a" / "var" / "x") as same:
            assert same.engine is log.engine
    assert everything(tmp_path / "b") == set()
    assert len(restore(tmp_path / "a" / "var" / "x").to_dict()) == 21


def move(path: Path) -> Path | None:
    path.rename(path.with_name("moved"))
    return path.with_name("moved")


def move_a_parent(path: Path) -> Path | None:
    path.parent.rename(path.parent.with_name("elsewhere"))
    return path.parent.with_name("elsewhere") / path.name


def remove(path: Path) -> Path | None:
    shutil.rmtree(path)
    return None


def remove_the_lock(path: Path) -> Path | None:
    (path / "lock").unlink()
    return path


def remove_what_is_inside(path: Path) -> Path | None:
    for entry in path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return None


def make_again(path: Path) -> Path | None:
    """As another process would, with other file operations."""
    shutil.rmtree(path)
    _make_theirs(path)
    return None


def move_and_make_again(path: Path) -> Path | None:
    moved = move(path)
    _make_theirs(path)
    return moved


def _make_theirs(path: Path) -> None:
    """A changelog of another process."""
    writer = open_writer(QUICK, path, NewChangelog(1, None, LogConfig()), Clock(), steal=False)
    batches = ingest.normalize(rows(("theirs", "1")), 0)
    with ThreadPoolExecutor(1) as pool:
        writer.commit(ingest.partition_blocks(batches, 1, None, pool), Batch("theirs", 0))
    writer.close()


HAPPENINGS: list[Callable[[Path], Path | None]] = [
    move, move_a_parent, remove, remove_the_lock, remove_what_is_inside, make_again, move_and_make_again,
]  # fmt: skip


class Happening(Watched):
    """Something happens to the directory right before the n-th operation after it was armed."""

    def __init__(self, happen: Callable[[], None]) -> None:
        self.left: int | None = None
        self._happen = happen

    def _operation(self, name: str, path: Path, **details: object):  # type: ignore[no-untyped-def]
        if self.left is not None:
            if self.left == 0:
                self.left = None
                self._happen()
            else:
                self.left -= 1
        return super()._operation(name, path, **details)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1, 1100], ids=["into the segment", "into a new segment"])
@pytest.mark.parametrize("happen", HAPPENINGS)
def test_a_commit_is_refused_or_kept_whenever_it_happens(
    tmp_path: Path, happen: Callable[[Path], Path | None], width: int
) -> None:
    """Before every operation of a commit and of what follows it."""
    config = {**BY_HAND, "segment.bytes": 1024 if width > 1 else 1 << 20}
    for n in range(200):
        path = tmp_path / f"{n}" / "inner" / "log"
        found: list[Path | None] = []
        files = Happening(lambda path=path, found=found: found.append(happen(path)))  # type: ignore[misc]
        log = Changelog.open(path, partitions=1, config=config, files=files)
        log.append(rows(("a", "1".ljust(width))))
        files.left = n
        acknowledged, before = 1, None
        try:
            for value in (2, 3):
                log.append(rows(("a", f"{value}".ljust(width))))
                acknowledged = value if not found else acknowledged
        except (StorageFailed, WriterFenced) as e:
            before = str(e)
            assert "committed" in before or "line" in before
        over, files.left = files.left is not None, None
        left = everything(path) if path.exists() else set()
        if found:
            with pytest.raises(WriterFenced, match=r"open it again|open it there"):
                log.append(rows(("a", "9")))
        log.close()
        assert over or (everything(path) if path.exists() else set()) <= left
        home = path if over else found[0]
        if home is not None:
            assert int(restore(home).to_dict()[b"a"]) >= acknowledged
            with Changelog.open(home, files=QUICK) as again:
                again.append(rows(("b", "1")))
            assert not verify(home).damages
        if path.exists() and home != path and (path / "changelog.json").exists():
            assert restore(path).to_dict() == {b"theirs": b"1"}
            assert not verify(path).damages
        if over:
            break
    else:
        raise AssertionError("two commits do not come to their end")


@pytest.mark.parametrize("happen", HAPPENINGS)
def test_whatever_else_a_writer_does_leaves_no_trace_where_its_directory_was(
    tmp_path: Path, happen: Callable[[Path], Path | None]
) -> None:
    path = tmp_path / "inner" / "log"
    log = Changelog.open(path, partitions=4, config={**BY_HAND, "anchors.auto": 0}, files=Watched())
    for value in "12":
        log.append(batch(value))
    assert log.get(b"k1") == b"2"
    home = happen(path)
    there = everything(path) if path.exists() else None
    acts: list[Callable[[], object]] = [
        log.compact, lambda: log.anchor("x"), lambda: log.engine.configure({"retention.ms": 1}),
        lambda: log.rollback(1), log.engine.do_chores, log.engine.writer.garbage.collect,
    ]  # fmt: skip
    for act in acts:
        try:
            act()
        except (WriterFenced, StorageFailed):
            pass
    log.close()
    after = everything(path) if path.exists() else None
    if there is not None:
        assert after is not None
        assert after >= there
        there = {f for f in after if not f.startswith("store-")}
    if home is None:
        assert after is None or not {f for f in after if f.endswith(".arrows")} - (there or set())
    else:
        assert restore(home).to_dict() == {key.encode(): b"2" for key in KEYS}


def test_a_directory_that_was_removed_is_made_afresh_by_the_next_open(tmp_path: Path) -> None:
    """A notebook cell that removes the directory and opens it again, without closing what it had."""
    path = tmp_path / "log"
    logs = []
    for number in range(3):
        log = Changelog.open(path, partitions=2)
        logs.append(log)
        assert log.state.commits == ()
        log.append(rows(("a", f"{number}")))
        assert log.get(b"a") == b"%d" % number
        for old in logs[:-1]:
            assert old.engine is not log.engine
            with pytest.raises(WriterFenced):
                old.append(rows(("a", "9")))
        assert restore(path).to_dict() == {b"a": b"%d" % number}
        if number < 2:
            shutil.rmtree(path)
    for log in logs:
        log.close()
    assert restore(path).to_dict() == {b"a": b"2"}


def test_a_directory_that_was_moved_can_be_opened_where_it_is_now(tmp_path: Path) -> None:
    log = Changelog.open(tmp_path / "log", config=BY_HAND)
    log.append(rows(("a", "1")))
    (tmp_path / "log").rename(tmp_path / "moved")
    with Changelog.open(tmp_path / "moved") as moved:
        moved.append(rows(("b", "1")))
        with pytest.raises(WriterFenced, match="moved, removed") as refused:
            log.append(rows(("a", "2")))
        assert "find out where its directory is now" in str(
            refused.value.remedy
        )  # here would be an empty one
    log.close()
    assert restore(tmp_path / "moved").to_dict() == {b"a": b"1", b"b": b"1"}
    assert not (tmp_path / "log").exists()
    assert not [root for root in engine._engines if root.is_relative_to(tmp_path)]


def test_an_empty_list_of_claims_proves_nothing(tmp_path: Path) -> None:
    writer = open_writer(QUICK, _made(tmp_path / "log"), None, Clock(), steal=False)
    shutil.rmtree(tmp_path / "log" / "manifest")
    with pytest.raises(WriterFenced, match="its journal was removed"):
        writer.write_line(AnchorEntry(Anchor("a", 1, (1,))))
    writer.close()


def test_a_standby_of_a_removed_directory_does_not_make_it_again(tmp_path: Path) -> None:
    with Standby(_made(tmp_path / "log")) as standby:
        shutil.rmtree(tmp_path / "log")
        with pytest.raises(KeyfoldError):
            standby.take_over(timeout=0.2)
    assert not (tmp_path / "log").exists()


def _made(path: Path) -> Path:
    with Changelog.open(path, config=BY_HAND) as log:
        log.append(rows(("a", "1")))
    return path


def test_a_file_that_comes_to_nothing_is_removed_only_where_it_was_made(tmp_path: Path) -> None:
    """A changelog that was made again under the same path can have a file of the same name."""
    path = _made(tmp_path / "log")
    writer = open_writer(QUICK, path, None, Clock(), steal=False)
    begun = writer.new_segment(0, 1, RECORD_SCHEMA)
    path.rename(tmp_path / "moved")
    (path / "0").mkdir(parents=True)
    theirs = path / "0" / begun.segment.name
    theirs.write_bytes(b"theirs")
    begun.abandon(None)
    assert theirs.read_bytes() == b"theirs"
    writer.close()
