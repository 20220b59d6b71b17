"""Long tests: rounds with fresh seeds until a test's share of the time is over, and what they counted."""

from __future__ import annotations

import json
import os
import platform
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
#: Where the figures of a run are kept, one file per test.
FIGURES: Final = ROOT / "var" / "soak"


def minutes() -> float:
    """The time of a whole run, which `make soak MINUTES=…` sets."""
    return float(os.environ.get("SOAK_MINUTES") or 60)


class Soak:
    """One long test. A context manager: its figures are written when it is left, also where it has failed.

        with Soak("power-losses", share=0.3) as soak:
            for seed in soak.rounds():
                soak.count("power-loss states", work(seed))

    Args:
        name: of the file with its figures.
        share: of the time of the run. Two processes work, so the shares of all long tests are at most 2.
        seed: begin with this one, and end after it: to see a failure again. By default SOAK_SEED, if set.
    """

    def __init__(self, name: str, share: float, seed: int | None = None) -> None:
        given = os.environ.get("SOAK_SEED")
        self._only = int(given) if seed is None and given else seed
        self._name = name
        self._seconds = 60 * minutes() * share
        self._counts: Counter[str] = Counter()
        self._seeds: list[int] = []
        self._began = time.monotonic()
        self._began_at = datetime.now(timezone.utc).isoformat(timespec="seconds")

    @property
    def is_over(self) -> bool:
        """Whether the share of the time is used up."""
        return time.monotonic() - self._began >= self._seconds

    def rounds(self) -> Iterator[int]:
        """A seed for each round; at least one round is done."""
        while not self._seeds or not (self.is_over or self._only is not None):
            seed = random.SystemRandom().randrange(2**32) if self._only is None else self._only
            self._seeds.append(seed)
            print(f"SOAK_SEED={seed}", flush=True)
            yield seed

    def count(self, what: str, number: int = 1) -> None:
        self._counts[what] += number

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        figures = {
            "name": self._name,
            "began": self._began_at,
            "seconds": round(time.monotonic() - self._began, 1),
            "minutes_of_the_run": minutes(),
            "passed": kind is None,
            "counts": dict(sorted(self._counts.items())),
            "rounds": len(self._seeds),
            "seeds": self._seeds[:3] + self._seeds[3:][-3:],
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        }
        FIGURES.mkdir(parents=True, exist_ok=True)
        (FIGURES / f"{self._name}.json").write_text(json.dumps(figures, indent=1) + "\n")


def in_rounds(name: str, share: float, once: Callable[[int, Soak], None], *, soak: bool) -> None:
    """A test that is short without `make soak`: `once` with a seed, or in rounds for its share of the time.

    Args:
        share: see `Soak`. 0: there is one round with `make soak`, too.
        once: takes a seed, and counts what it does.
    """
    if soak:
        with Soak(name, share) as figures:
            for seed in figures.rounds():
                once(seed, figures)
    else:
        figures = Soak(name, 0)
        for seed in figures.rounds():
            once(seed, figures)
