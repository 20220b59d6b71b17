"""Writers that take one changelog from each other, in every order of their file operations.

W is the writer that lives, A and B steal. Whatever order their operations come in: everything that one of
them has acknowledged is there in the end, no file that counts is missing, and the next opening succeeds.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from keyfold import Changelog, restore
from keyfold.checkpoints.cleaner.manager import CleanerManager
from keyfold.checkpoints.log import ingest
from keyfold.checkpoints.log import writer as writing
from keyfold.checkpoints.log.recovery import open_writer
from keyfold.checkpoints.log.writer import Batch, Writer
from keyfold.checkpoints.manifest.entries import AnchorEntry
from keyfold.checkpoints.manifest.state import Anchor
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import ChangelogLocked, KeyfoldError, WriterFenced
from keyfold.statestore.files import Files
from support.actors import Stage, Stepped
from support.changelogs import Clock, rows
from support.faults.inject import QUICK

CONFIG = {"cleaner.threads": 0, "anchors.auto": 0}
OVERTAKEN = (WriterFenced, ChangelogLocked)
Act = Callable[[Writer], None]


class Here:
    """A pool that works in the thread that asks."""

    def map(self, function: Callable[[object], object], items: Iterator[object]) -> Iterator[object]:
        return map(function, items)


class Play:
    """One changelog with a living writer W, and what was acknowledged by whomever."""

    def __init__(self, template: Path, path: Path) -> None:
        shutil.copytree(template, path)
        self.path = path
        self.acknowledged = {f"k{i}".encode(): b"2" for i in range(8)}
        self.writers: list[Writer] = []
        self.stage = Stage()

    def open(self, files: Files, *, steal: bool = True) -> Writer:
        writer = open_writer(files, self.path, None, Clock(), steal=steal)
        self.writers.append(writer)
        return writer

    def append(self, writer: Writer, key: str) -> None:
        table = pa.table({"key": [key.encode()], "value": [b"new"]})
        parts = ingest.partition_blocks(ingest.normalize(table, 0), 1, None, Here())  # type: ignore[arg-type]
        writer.commit(parts, Batch(key, 0))
        self.acknowledged[key.encode()] = b"new"

    def add_living(self, act: Act) -> None:
        def play(files: Stepped) -> None:
            writer = self.open(files, steal=False)
            with suppress(*OVERTAKEN):
                self.append(writer, "w0")
                writer.seal_active()
                act(writer)
                self.append(writer, "w1")
                writer.garbage.collect()

        self.stage.add("W", play)

    def add_thief(self, name: str) -> None:
        def play(files: Stepped) -> None:
            with suppress(*OVERTAKEN):
                writer = self.open(files)
                for n in range(2):
                    self.append(writer, f"{name}{n}")
                clean(writer)

        self.stage.add(name, play)

    def fault(self) -> str | None:
        """What is wrong after all have ended; None if nothing."""
        self.stage.finish()
        if (fault := self._fault_now()) is not None:
            return fault
        for writer in self.writers:
            writer.fence("its process has ended")
            writer.close()
        open_writer(QUICK, self.path, None, Clock(), steal=False).close()
        return self._fault_now()

    def _fault_now(self) -> str | None:
        try:
            found = restore(self.path).to_dict()
        except KeyfoldError as e:
            return f"it cannot be restored: {e}"
        missing = {k for k, v in self.acknowledged.items() if found.get(k) != v}
        if missing:
            return f"{sorted(missing)} were acknowledged and are not there"
        damages = verify(self.path).damages
        return f"verify finds {damages[0]}" if damages else None


def clean(writer: Writer) -> None:
    CleanerManager(writer).clean_now(0)


def roll(writer: Writer) -> None:
    before = writing._JOURNAL_BYTES
    writing._JOURNAL_BYTES = 0  # type: ignore[misc]
    try:
        writer._checkpoint_bytes = 0
        writer.write_line(AnchorEntry(Anchor("a", 1, (8,))))
    finally:
        writing._JOURNAL_BYTES = before  # type: ignore[misc]


def append_only(writer: Writer) -> None:
    """W appends and does nothing else."""


ACTS: dict[str, Act] = {"append": append_only, "clean": clean, "roll": roll}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("overlapping") / "template"
    with Changelog.open(path, config=CONFIG) as log:
        for n in range(3):
            log.append(rows(*((f"k{i}", f"{n}") for i in range(8))))
    return path


def count_of_steps(template: Path, path: Path) -> tuple[int, int]:
    """How many operations W and a thief have."""
    play = Play(template, path)
    play.add_living(clean)
    play.add_thief("A")
    counts = play.stage.steps("W"), play.stage.steps("A")
    assert play.fault() is None
    return counts


def opened(play: Play, act: Act) -> None:
    """W has opened the changelog, and not begun to act."""
    play.add_living(act)
    while not play.writers:
        play.stage.steps("W", 1)


@pytest.mark.parametrize("act", ACTS)
def test_an_opener_held_up_at_any_operation_does_no_harm_when_it_wakes(
    template: Path, tmp_path: Path, act: str
) -> None:
    """A stops, W acts, B takes over from both and goes on, A wakes up."""
    _, count = count_of_steps(template, tmp_path / "count")
    for n in range(count):
        play = Play(template, tmp_path / f"{n}")
        opened(play, ACTS[act])
        play.add_thief("A")
        play.stage.steps("A", n)
        play.stage.steps("W")
        play.add_thief("B")
        play.stage.steps("B")
        play.stage.steps("A")
        assert (fault := play.fault()) is None, f"A stopped before its operation {n}: {fault}"


@pytest.mark.parametrize("act", ACTS)
def test_a_living_writer_held_up_at_any_operation_does_no_harm_when_it_wakes(
    template: Path, tmp_path: Path, act: str
) -> None:
    """W stops in whatever it does, A takes over and goes on, W wakes up."""
    count, _ = count_of_steps(template, tmp_path / "count")
    for n in range(count):
        play = Play(template, tmp_path / f"{n}")
        opened(play, ACTS[act])
        play.stage.steps("W", n)
        play.add_thief("A")
        play.stage.steps("A")
        play.stage.steps("W")
        assert (fault := play.fault()) is None, f"W stopped before its operation {n}: {fault}"


def test_three_openers_in_any_order_lose_nothing(template: Path, tmp_path: Path, soak: bool) -> None:
    """Random schedules: who goes on changes after a few operations, each time another number of them."""
    seed = random.SystemRandom().randrange(2**32)
    for number in range(1000 if soak else 40):
        name = f"{seed}/{number}"
        draw = random.Random(name)
        play = Play(template, tmp_path / f"{number}")
        opened(play, ACTS[draw.choice(sorted(ACTS))])
        for thief in "ABC":
            play.add_thief(thief)
        while living := play.stage.living():
            play.stage.steps(draw.choice(living), draw.choice((1, 1, 2, 3, 5, 8, 13, 21)))
        assert (fault := play.fault()) is None, f"schedule {name}: {fault}"
        shutil.rmtree(play.path)
