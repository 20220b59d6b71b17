"""Files of a changelog that are harmed, and what must come of it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from keyfold import Changelog
from keyfold.checkpoints.log.recovery import open_writer
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import KeyfoldError
from keyfold.statestore.files import Files
from support.faults.inject import QUICK
from support.faults.powerloss import Tree, tree_of, written
from support.in_memory import InMemory
from support.lived import NOW_MS, Life
from support.perfect import Found, found_in
from support.soaking import Soak

_PER_LIFE = 400
_OPENED_EVERY = 5
_REAL_EVERY = 50

Harm = Callable[[random.Random, bytes], bytes | None]


def flipped(draw: random.Random, data: bytes) -> bytes:
    position = draw.randrange(len(data))
    return data[:position] + bytes([data[position] ^ (1 << draw.randrange(8))]) + data[position + 1 :]


def zeroed(draw: random.Random, data: bytes) -> bytes:
    position = draw.randrange(len(data))
    length = min(draw.choice((1, 8, 64, 512)), len(data) - position)
    return data[:position] + bytes(length) + data[position + length :]


def cut(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data))]


def removed(draw: random.Random, data: bytes) -> None:
    return None


def lengthened(draw: random.Random, data: bytes) -> bytes:
    return data + draw.randbytes(draw.choice((1, 8, 300)))


HARMS: tuple[Harm, ...] = (flipped, flipped, flipped, zeroed, cut, removed, lengthened)


def corrupt(draw: random.Random, directory: Path, soak: Soak, seed: int) -> None:
    log, snapshot, crashed = directory / "log", directory / "snapshot", directory / "crashed"
    life = Life(seed)

    def copied(step: int) -> None:
        # As a writer leaves it that dies here: its last segments are vouched for by marks.
        if step == len(life.models) // 2 + 4:
            shutil.copytree(log, crashed, dirs_exist_ok=True)

    life.live(QUICK, log, copied)
    with Changelog.open(log, mode="r", files=QUICK) as reader:
        if reader.state.commits:
            reader.snapshot(snapshot)
    for root in (log, snapshot, crashed):
        if (root / "changelog.json").exists():
            one = Corrupted(tree_of(root), directory / "real", f"seed {seed}, {root.name}")
            one.corrupt(draw, soak, is_opened=root != snapshot)


class Corrupted:
    """A changelog, or a snapshot, of which one file is harmed at a time.

    Args:
        tree: of it.
        real: a path where nothing is yet.
        what: names it where something is wrong.
    """

    def __init__(self, tree: Tree, real: Path, what: str) -> None:
        self._tree = tree
        self._real = real
        self._what = what
        files = InMemory(tree)
        self._right = read(files, files.ROOT)
        assert verify(files.ROOT, files=files).damages == [], what

    def corrupt(self, draw: random.Random, soak: Soak, *, is_opened: bool) -> None:
        names = [name for name, content in self._tree.items() if content and name != "lock"]
        for number in range(_PER_LIFE):
            if soak.is_over:
                return
            name, how = draw.choice(names), draw.choice(HARMS)
            harmed = {**self._tree, name: how(draw, self._tree[name] or b"")}
            if harmed == self._tree:
                continue
            if harmed[name] is None:
                del harmed[name]
            what = f"{self._what}, corruption {number}: {name} {how.__name__}"
            files = InMemory(harmed)
            result = self.judge(files, files.ROOT, name, what)
            soak.count("corruptions")
            soak.count(f"corruptions {how.__name__}")
            soak.count(f"corruptions {result}")
            if number % _REAL_EVERY == 0:
                self.judge_on_disk(harmed, name, what, result)
                soak.count("corruptions that were tried on a disk, too")
            if is_opened and number % _OPENED_EVERY == 0:
                self.judge_opened(InMemory(harmed), what)
                soak.count("corrupted changelogs opened to write")

    def judge(self, files: Files, root: Path, name: str, what: str) -> str:
        """What came of it. Where something is refused or missing, `verify` must say so.

        A head has two slots, because one may be torn while it is written. Where the newer one is damaged
        readers see the state one line earlier, until a writer opens, which reads the journal itself.
        """
        try:
            is_right = read(files, root) == self._right
            result = "without effect" if is_right else "of a head, the state before was read"
        except KeyfoldError:
            result = "refused"
        assert name.endswith(".head") or "before" not in result, f"{what}: other records, and no error"
        try:
            sound = not verify(root, files=files).damages
        except KeyfoldError:
            sound = False
        assert not sound or result == "without effect", f"{what}: {result}, and verify finds nothing"
        return result

    def judge_on_disk(self, harmed: Tree, name: str, what: str, result: str) -> None:
        """The same comes of it, with files that are mapped."""
        written(harmed, self._real)
        try:
            found = self.judge(QUICK, self._real, name, what)
            assert found == result, f"{what}: {result} in memory, {found} on a disk"
        finally:
            shutil.rmtree(self._real)

    def judge_opened(self, files: InMemory, what: str) -> None:
        """A writer that recovers what it finds loses nothing that was acknowledged without an error."""
        try:
            open_writer(files, files.ROOT, None, lambda: NOW_MS, steal=False).close()
            found = read(files, files.ROOT)
        except KeyfoldError:
            return
        assert found == self._right, f"{what}: opened to write, other records and no error"


def read(files: Files, root: Path) -> list[list[Found]]:
    with Changelog.open(root, mode="r", files=files) as log:
        return [found_in(log.read(p)) for p in range(log.partitions)]
