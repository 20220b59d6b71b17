"""What a writer that was lost, or closed, says of the cause, and of what is to be done."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from keyfold import Changelog, restore
from keyfold.statestore.errors import Damaged, KeyfoldError, StorageFailed, WriterFenced
from keyfold.statestore.kv.api import StoreClosed
from support.changelogs import BY_HAND, make_closed, rows
from support.faults.inject import FailAt, Operation, changes


def _emptied(root: Path) -> None:
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _without_lock(root: Path) -> None:
    (root / "lock").unlink()


def _without_journal(root: Path) -> None:
    shutil.rmtree(root / "manifest")


@pytest.mark.parametrize("take_away", [shutil.rmtree, _emptied, _without_lock, _without_journal])
def test_whoever_has_lost_its_files_is_told_that_opening_may_create_an_empty_changelog(
    take_away: Callable[[Path], None], tmp_path: Path
) -> None:
    log = Changelog.open(tmp_path / "log", config=BY_HAND)
    log.append(rows(("a", "1")))
    take_away(log.path)
    with pytest.raises(WriterFenced, match="opening this path to write creates an empty changelog"):
        log.append(rows(("a", "2")))
    log.close()


def _gone(manifest: Path) -> None:
    shutil.rmtree(manifest)


def _a_file(manifest: Path) -> None:
    shutil.rmtree(manifest)
    manifest.write_bytes(b"x")


@pytest.mark.parametrize("lose", [_gone, _a_file])
def test_a_changelog_without_its_manifest_is_damaged_and_nothing_of_it_is_touched(
    lose: Callable[[Path], None], tmp_path: Path
) -> None:
    root = make_closed(tmp_path / "log")
    lose(root / "manifest")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(Damaged, match="manifest") as damaged:
        Changelog.open(root)
    message = str(damaged.value)
    assert f"path: {root / 'manifest'}" in message
    assert "changelog.json" in str(damaged.value.found)
    assert "free" not in message
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_after_a_full_disk_each_call_names_it_and_what_to_do(tmp_path: Path) -> None:
    """Whichever write of a commit it was."""
    failed = 0
    for n in range(26):
        files = FailAt(n, errno.ENOSPC, only=changes)
        path = tmp_path / str(n)
        with Changelog.open(path, config=BY_HAND) as before:
            before.append(rows(("a", "0")))
        try:
            log = Changelog.open(path, files=files)
        except KeyfoldError:
            continue
        try:
            log.append(rows(("a", "1")))
        except StorageFailed:
            failed += 1
            calls: list[Callable[[], object]] = [
                lambda log=log: log.append(rows(("a", "2"))),  # type: ignore[misc]
                log.compact,
                lambda log=log: log.anchor("x"),  # type: ignore[misc]
                lambda log=log: log.get(b"a"),  # type: ignore[misc]
            ]
            for call in calls:
                with pytest.raises(KeyfoldError) as refused:
                    call()
                assert os.strerror(errno.ENOSPC) in str(refused.value)
                assert "free or repair the disk" in str(refused.value)
        with suppress(StorageFailed):
            log.close()
    assert failed > 1


def test_a_read_that_meets_a_close_names_the_changelog_and_what_to_do(tmp_path: Path) -> None:
    """As the thread of a reader finds it that was about to read when another one closed the changelog."""
    log = Changelog.open(tmp_path / "log", partitions=2, config=BY_HAND)
    log.append(rows(("a", "1"), ("b", "2")))
    store = log.store()
    log.close()
    for read in (lambda: store.get(b"a"), lambda: store.get_all([b"a"]), store.all, store.snapshot):
        with pytest.raises((StoreClosed, WriterFenced)) as refused:
            read()
        assert refused.value.path == str(tmp_path / "log")
        assert "what to do: open it again" in str(refused.value)


def test_a_reader_of_a_changelog_without_manifest_is_told_to_put_it_back(tmp_path: Path) -> None:
    path = make_closed(tmp_path / "log")
    (path / "manifest").rename(path.parent / "manifest")
    with pytest.raises(Damaged, match=r"The manifest of this changelog is missing\.") as missing:
        Changelog.open(path, mode="r")
    assert "put manifest/ back" in str(missing.value.remedy)
    (path / "manifest").mkdir()
    with pytest.raises(Damaged, match=r"The manifest has no readable journal\.") as empty:
        Changelog.open(path, mode="r")
    assert "to write" not in str(empty.value.remedy)
    (path / "manifest").rmdir()
    (path.parent / "manifest").rename(path / "manifest")
    (head,) = (path / "manifest").glob("*.head")
    head.unlink()
    with pytest.raises(Damaged, match=r"The manifest has no readable journal\.") as headless:
        Changelog.open(path, mode="r")
    assert "open the changelog to write once" in str(headless.value.remedy)
    Changelog.open(path).close()
    Changelog.open(path, mode="r").close()


def _opened(root: Path, files: FailAt) -> None:
    Changelog.open(root, mode="r", files=files).close()


def _restored(root: Path, files: FailAt) -> None:
    restore(root, files=files).close()


def _reads(operation: Operation) -> bool:
    return operation.name in ("read", "list_directory", "lock", "create")


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("look", [_opened, _restored])
def test_wherever_a_reader_cannot_open_a_file_it_says_so(
    look: Callable[[Path, FailAt], None], error: int, tmp_path: Path
) -> None:
    root = make_closed(tmp_path / "log")
    count = FailAt(None, only=_reads)
    look(root, count)
    assert count.count > 3
    for n in range(count.count):
        files = FailAt(n, error, only=_reads)
        with suppress(StorageFailed):
            look(root, files)
        assert files.failed == 1
    with pytest.raises(StorageFailed) as refused:
        look(root, FailAt(0, error, forever=True, only=_reads))
    assert ("Too many open files" in refused.value.what) is (error == errno.EMFILE)
