"""Random lives of a changelog from a seed, told step by step, and what is right after each step."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from keyfold import Changelog, restore
from keyfold.checkpoints.log.recovery import open_writer
from keyfold.statestore.errors import CompactedAway, ConfigError
from keyfold.statestore.files import Files
from support.perfect import Filling, Perfect, Row, found_in, table

NOW_MS: Final = 1_700_000_000_000
APP: Final = "life"
_CODECS: Final = ("none", "lz4", "zstd")

Told = Callable[[int], object]
#: Key → value.
Stated = dict[bytes, bytes | None]


class Life:
    """A life of some steps. The same for the same seed, whatever files it is lived on.

    Attributes:
        models: what is right before the first step, and after each one.
    """

    def __init__(self, seed: int, steps: int = 12) -> None:
        self._random = random.Random(seed)
        self.partitions = self._random.choice((1, 1, 2))
        self.config: dict[str, object] = {
            "cleaner.threads": 0,
            # Last values are followed only when somebody asks: they are not what is looked at.
            "cleanup.policy": "compact,delete",
            "segment.bytes": self._random.choice((1024, 1500, 4096)),
            "delete.retention.ms": self._random.choice((0, 1000)),
            "anchors.auto": self._random.choice((0, 1, 3)),
            "compression.type": self._random.choice(_CODECS),
        }
        self._steps = [self._step() for _ in range(steps)]
        self.models = [Perfect.empty(self.partitions)]
        self._now_ms = NOW_MS

    def live(self, files: Files, path: Path, told: Told = lambda step: None) -> None:
        """Live it from its beginning; `told` gets the number of each step that is over."""
        self.models = [Perfect.empty(self.partitions)]
        self._now_ms = NOW_MS
        log = self._open(files, path)
        try:
            told(0)
            for number, (kind, argument) in enumerate(self._steps, 1):
                self._now_ms += 700
                log = self._take(log, kind, argument, files, path)
                told(number)
        finally:
            log.close()

    def _open(self, files: Files, path: Path) -> Changelog:
        return Changelog.open(
            path, partitions=self.partitions, config=self.config, files=files, clock_ms=lambda: self._now_ms
        )

    def _step(self) -> tuple[str, int]:
        kinds = ("append",) * 5 + ("compact", "reopen", "anchor", "roll back", "configure")
        return self._random.choice(kinds), self._random.randrange(2**32)

    def _take(self, log: Changelog, kind: str, argument: int, files: Files, path: Path) -> Changelog:
        model = self.models[-1]
        if kind == "append":
            last, rows = model.last_of(APP), rows_of(argument)
            batch = 0 if last is None else last.batch + 1
            # Before the step: it may die in the middle, and be whole nevertheless.
            self.models.append(model.committed(rows, APP, batch, self._now_ms))
            log.append(table(rows), app_id=APP, batch_id=batch)
            return log
        if kind == "roll back" and model.commits:
            number = model.commits[-1 - argument % min(3, len(model.commits))].number
            if restorable(files, path, number):
                self.models.append(model.rolled_back(number))
                log.rollback(number)
                return log
        self.models.append(model)
        if kind == "compact":
            log.compact()
        elif kind == "anchor" and model.commits:
            name = f"a{argument % 3}"
            if name in log.anchors():
                log.drop_anchor(name)
            else:
                log.anchor(name)
        elif kind == "configure":
            log.engine.configure({"compression.type": _CODECS[argument % 3]})
        elif kind == "reopen":
            log.close()
            return self._open(files, path)
        return log

    # -- what is left ------------------------------------------------------------------------------

    def fault_in(
        self, files: Files, path: Path, told: int, read: Callable[[], Stated] | None = None
    ) -> str | None:
        """What is wrong with what is left at `path` after a sudden end, for somebody who was told of `told`
        steps (-1: of none, not even that it was made); None if nothing is. It is recovered on the way.

        Args:
            read: reads the state of what was recovered. By default `stated`.
        """
        if not files.exists(path / "changelog.json"):
            return None if told < 0 else f"step {told} was acknowledged, and the changelog is gone"
        right = self.models[max(told, 0) : told + 2]
        writer = open_writer(files, path, None, lambda: self._now_ms, steal=False)
        ends, number = writer.state.ends, writer.state.next_commit
        writer.close()
        state = stated(files, path) if read is None else read()
        if not any(m.ends == ends and m.next_number == number and m.fold() == state for m in right):
            return f"{told} steps were acknowledged: ends {ends}, next commit {number}, state {state}"
        return None


def stated(files: Files, path: Path) -> Stated:
    """The state at the end of the changelog at `path`."""
    with restore(path, files=files) as restored:
        # Not `to_dict`, which starts threads.
        return {key: value for _, key, value, _ in found_in(restored.batches())}


def restorable(files: Files, path: Path, number: int) -> bool:
    """Whether a rollback to this commit will be taken: exact, and without a named anchor after it."""
    with suppress(CompactedAway, ConfigError), restore(path, at=number, files=files):
        with Changelog.open(path, mode="r", files=files) as view:
            return all(a.commit <= number for a in view.anchors().values())
    return False


def rows_of(seed: int) -> list[Row]:
    draw = random.Random(seed)
    values: tuple[bytes | None, ...] = (None, b"", b"%d" % seed, Filling(300), Filling(900))
    return [(b"k%d" % draw.randrange(6), draw.choice(values)) for _ in range(draw.randrange(8))]
