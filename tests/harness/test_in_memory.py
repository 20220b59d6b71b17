"""Files in memory do what the real ones do: the same answers, and the same directory in the end."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keyfold.statestore.files import LOCAL, Files, OpenFile
from support.faults.powerloss import tree_of
from support.in_memory import InMemory

FILES = ("a", "b", "d/a", "d/b", "d/e/a", "missing/a")
DIRECTORIES = ("d", "d", "d/e")
STEPS = 400


class Actor:
    """Does what a random generator says to some files below `root`."""

    def __init__(self, files: Files, root: Path, seed: int) -> None:
        self._files = files
        self._root = root
        self._draw = random.Random(seed)
        self._open: list[OpenFile] = []

    def act(self) -> object:
        """One operation: what it gave, or how it failed."""
        draw = self._draw
        path, other, directory = (self._root / draw.choice(names) for names in (FILES, FILES, DIRECTORIES))
        chosen = draw.choice(self._open) if self._open else None
        data, position = draw.randbytes(draw.randrange(50)), draw.randrange(60)
        files = self._files
        by_path: list[Callable[[], Any]] = [
            lambda: self._keep(files.create(path)),
            lambda: self._close(files.lock(path)),
            lambda: [p.relative_to(self._root) for p in files.make_directory(directory, self._root)],
            lambda: files.write_whole(path, data),
            lambda: files.sync_path(path),
            lambda: files.sync_directory(directory),
            lambda: files.unlink(path),
            lambda: files.rename(path, other),
            lambda: files.remove_tree(directory) if draw.random() < 0.3 else None,
            lambda: files.list_directory(directory),
            lambda: (files.exists(path), files.exists(directory)),
            lambda: (files.is_directory(path), files.is_directory(directory)),
            lambda: files.read(path, position, draw.choice((None, 10))),
            lambda: files.read(path),
            lambda: files.size(path) and files.map(path).to_pybytes(),
        ]
        by_file: list[Callable[[OpenFile], Any]] = [
            lambda file: files.append(file, [data, data[:3]]),
            lambda file: files.overwrite(file, data, position),
            lambda file: files.truncate(file, position),
            lambda file: files.sync(file),
            lambda file: files.is_in_place(file),
            self._close,
        ]
        number = draw.randrange(len(by_path) + len(by_file))
        try:
            if number < len(by_path):
                return by_path[number]()
            return None if chosen is None else by_file[number - len(by_path)](chosen)
        except OSError as e:
            return type(e).__name__

    def _keep(self, file: OpenFile) -> None:
        self._open.append(file)

    def _close(self, file: OpenFile | None) -> None:
        assert file is not None
        self._files.close(file)
        self._open = [f for f in self._open if f is not file]

    def close(self) -> None:
        for file in self._open:
            self._files.close(file)


@pytest.mark.parametrize("seed", range(30))
def test_random_operations_give_the_same_as_on_a_disk(seed: int, tmp_path: Path) -> None:
    memory = InMemory({})
    real, mocked = Actor(LOCAL, tmp_path, seed), Actor(memory, InMemory.ROOT, seed)
    try:
        for step in range(STEPS):
            assert mocked.act() == real.act(), f"step {step}"
    finally:
        real.close()
    assert memory.digest() == InMemory(tree_of(tmp_path)).digest()
