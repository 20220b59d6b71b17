"""A snapshot on a store without locks and renames: whatever a process that dies leaves of its open files.

An object store shows nothing of a file that was not closed. Others show an empty file, or a part of it.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pytest

from keyfold import Changelog, restore
from keyfold.checkpoints.snapshot.snapshot import Location, take
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import NotAChangelog
from keyfold.statestore.files import LOCAL, Data, OpenFile
from keyfold.statestore.remote_files import RemoteFiles
from support.changelogs import rows
from support.faults.inject import QUICK, Killed

CONFIG = {"cleaner.threads": 0, "anchors.auto": 0, "segment.bytes": 2048}
CHANGES = {"create", "append", "mkdir", "unlink", "remove_tree"}


class Store(RemoteFiles):
    """Dies before its n-th change, never with None. What it had open then is there as `left` says: "nothing"
    of it, also where it replaces a file, an "empty" file, or a "part" of it.
    """

    def __init__(self, left: str, n: int | None = None) -> None:
        super().__init__(pa.fs.LocalFileSystem())
        self.count = 0
        self._left, self._n, self._dead = left, n, False
        self._open: list[OpenFile] = []

    @contextmanager
    def _operation(self, name: str, path: Path, **more: Any) -> Iterator[None]:
        if name in CHANGES:
            self._change()
        elif self._dead:
            raise Killed
        yield

    def _change(self) -> None:
        if not self._dead and self.count == self._n:
            self._dead = True
            for file in self._open:
                file.stream.close()  # type: ignore[attr-defined]
                path = self._written(file.path)
                if self._left == "nothing":
                    path.unlink()
                else:
                    data = path.read_bytes()
                    path.write_bytes(data[: len(data) // 2 if self._left == "part" else 0])
        if self._dead:
            raise Killed
        self.count += 1

    def _written(self, path: Path) -> Path:
        return path.with_name(path.name + "@upload") if self._left == "nothing" else path

    def create(self, path: Path) -> OpenFile:
        file = super().create(self._written(path))
        file.path = path
        self._open.append(file)
        return file

    def append(self, file: OpenFile, chunks: Sequence[Data]) -> None:
        # Half of it reaches the file before the next operation, where this one is the last.
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            super().append(file, [view[: len(view) // 2]])
            super().append(file, [view[len(view) // 2 :]])

    def close(self, file: OpenFile) -> None:
        if self._dead or file not in self._open:
            return
        self._change()
        super().close(file)
        self._open.remove(file)
        if self._left == "nothing":
            self._written(file.path).rename(file.path)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Changelog]:
    """A snapshot in "before"; since then other records, a pass, and other settings."""
    with Changelog.open(tmp_path / "log", partitions=2, config=CONFIG, files=QUICK) as log:
        log.append(rows(*((f"k{n}", "old") for n in range(40))))
        taken(log, Store("nothing"), tmp_path / "before")
        log.append(rows(*((f"k{n}", "older") for n in range(40))))
        log.compact()
        log.append(rows(*((f"k{n}", "new") for n in range(40))))
        log.engine.configure({"delete.retention.ms": 1})
        yield log


def taken(log: Changelog, files: RemoteFiles, to: Path) -> None:
    with log.engine.writer.pin() as state:
        source = Location(LOCAL, log.path)
        take(source, log.identity, state, state.commits[-1], Location(files, to))


def value_of(to: Path) -> bytes | None:
    """The one value of all keys, None where there is no snapshot; the same through either way to read it."""
    try:
        found = restore(to).to_dict()
    except NotAChangelog:
        with pytest.raises(NotAChangelog):
            restore(str(to), filesystem=pa.fs.LocalFileSystem())
        return None
    assert restore(str(to), filesystem=pa.fs.LocalFileSystem()).to_dict() == found
    assert len(found) == 40
    assert verify(to).damages == []
    (value,) = set(found.values())
    assert isinstance(value, bytes)
    return value


@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
@pytest.mark.parametrize("left", ["nothing", "empty", "part"])
def test_a_death_at_any_change_leaves_none_or_the_one_before_or_the_new_one(
    log: Changelog, tmp_path: Path, left: str, again: bool
) -> None:
    seen = set()
    for n in itertools.count():
        to, killed = tmp_path / f"to-{n}", True
        if again:
            shutil.copytree(tmp_path / "before", to)
        with suppress(Killed):
            taken(log, Store(left, n), to)
            killed = False
        seen.add(value_of(to))
        # The next try dies too, somewhere else; then one succeeds.
        with suppress(Killed):
            taken(log, Store(left, (5 * n + 3) % 37), to)
        assert value_of(to) in seen | {b"new"}
        taken(log, Store(left), to)
        assert value_of(to) == b"new"
        with Changelog.clone(to, tmp_path / f"clone-{n}", files=QUICK) as clone:
            assert set(restore(clone.path).to_dict().values()) == {b"new"}
            assert clone.config.delete_retention_ms == 1
        assert not any("@upload" in path.name for path in to.rglob("*"))
        shutil.rmtree(to)
        if not killed:
            break
    assert n > 40
    assert seen == {b"old" if again else None, b"new"}


def test_a_changelog_json_that_is_cut_and_not_being_replaced_is_damage(
    log: Changelog, tmp_path: Path
) -> None:
    """What was about to replace it speaks for it only where it begins with what is left."""
    from keyfold.statestore.errors import Damaged

    identity = tmp_path / "before" / "changelog.json"
    whole = identity.read_bytes()
    identity.write_bytes(whole[:50])
    with pytest.raises(Damaged):
        restore(tmp_path / "before")
    identity.with_name("changelog.json.tmp").write_bytes(whole.replace(b"k", b"K", 1))
    with pytest.raises(Damaged):
        restore(tmp_path / "before")
    identity.with_name("changelog.json.tmp").write_bytes(whole)
    assert set(restore(tmp_path / "before").to_dict().values()) == {b"old"}
