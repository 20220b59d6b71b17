"""Files of a changelog that are harmed, and what must come of it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from faults import QUICK
from keyfold.checkpoints import Changelog
from keyfold.checkpoints.opening import open_writer
from keyfold.checkpoints.verify import verify
from keyfold.statestore.errors import KeyfoldError
from support.lived import NOW_MS, Life
from support.perfect import Found, found_in
from support.soaking import Soak

_PER_LIFE = 400
_OPENED_EVERY = 5

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
            corrupt_one(draw, root, directory / "opened", soak, seed)


def corrupt_one(draw: random.Random, root: Path, opened: Path, soak: Soak, seed: int) -> None:
    right = read(root)
    before = verify(root, files=QUICK)
    assert before.damages == [], f"seed {seed}"
    files = [f for f in sorted(root.rglob("*")) if f.is_file() and f.stat().st_size and f.name != "lock"]
    for number in range(_PER_LIFE):
        if soak.is_over:
            return
        path, how = draw.choice(files), draw.choice(HARMS)
        data = path.read_bytes()
        harmed = how(draw, data)
        if harmed == data:
            continue
        what = f"seed {seed}, corruption {number}: {path.relative_to(root)} {how.__name__}"
        try:
            path.unlink()
            if harmed is not None:
                path.write_bytes(harmed)
            soak.count("corruptions")
            soak.count(f"corruptions {how.__name__}")
            soak.count(f"corruptions {judge(root, right, path, what)}")
            if number % _OPENED_EVERY == 0 and root.name != "snapshot":
                judge_opened(root, opened, right, what)
                soak.count("corrupted changelogs opened to write")
        finally:
            path.write_bytes(data)
    assert read(root) == right, f"seed {seed}"


def read(root: Path) -> list[list[Found]]:
    with Changelog.open(root, mode="r", files=QUICK) as log:
        return [found_in(log.read(p)) for p in range(log.partitions)]


def judge(root: Path, right: list[list[Found]], path: Path, what: str) -> str:
    """What came of it. Where something is refused or missing, `verify` must say so.

    A head has two slots, because one may be torn while it is written. Where the newer one is damaged readers
    see the state one line earlier, until a writer opens, which reads the journal itself.
    """
    try:
        result = "without effect" if read(root) == right else "of a head, the state before was read"
    except KeyfoldError:
        result = "refused"
    assert path.suffix == ".head" or "before" not in result, f"{what}: other records, and no error"
    try:
        sound = not verify(root, files=QUICK).damages
    except KeyfoldError:
        sound = False
    assert not sound or result == "without effect", f"{what}: {result}, and verify finds nothing"
    return result


def judge_opened(root: Path, opened: Path, right: list[list[Found]], what: str) -> None:
    """A writer that recovers what it finds loses nothing that was acknowledged without an error."""
    shutil.copytree(root, opened)
    try:
        try:
            open_writer(QUICK, opened, None, lambda: NOW_MS, steal=False).close()
            found = read(opened)
        except KeyfoldError:
            return
        assert found == right, f"{what}: opened to write, other records and no error"
    finally:
        shutil.rmtree(opened)
