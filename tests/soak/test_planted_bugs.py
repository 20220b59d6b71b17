"""Bugs that are planted into the product: the harness must find each, or it would find none."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from keyfold.checkpoints.cleaner import clean_pass, log_to_clean
from keyfold.checkpoints.log import ingest, reader_marks
from keyfold.checkpoints.log.ownership import Ownership
from keyfold.checkpoints.manifest import idempotence
from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.statestore.errors import KeyfoldError
from keyfold.statestore.segment.reader import SegmentReader
from support.corrupting import corrupt
from support.faults.inject import Selection, on
from support.faults.powerloss import Disk, PowerLoss
from support.folds import IN_MEMORY
from support.lived import Life
from support.losing import lose_power
from support.machine_reading import ReadingMachine
from support.soaking import Soak

pytestmark = pytest.mark.soak

_EXAMPLES_MAX = 500
_LIVES_MAX = 20

#: How a bug shows itself; a mistake in the planting is none of these.
NOTICED = (AssertionError, KeyfoldError, OSError, EOFError, pa.ArrowException, pytest.fail.Exception)

Wrap = Callable[[Any], Any]


def _no_horizon(of: Any) -> Any:
    def changed(*arguments: Any, **named: Any) -> Any:
        found = of(*arguments, **named)
        return replace(found, tombstones_below=found.end)

    return changed


#: What is wrong → where it is planted, and what is there instead of what was.
IN_THE_PRODUCT: dict[str, list[tuple[Any, str, Wrap]]] = {
    "a batch is taken twice": [(idempotence, "appended", lambda of: lambda *a: None)],
    "other rows are taken for the same batch": [(ingest, "digest", lambda of: lambda *a: "same")],
    "keys are said to be unique up to the end": [
        (PartitionState, "unique_below", lambda of: property(lambda p: p.end))
    ],
    "anchors cut no pass": [
        (log_to_clean, "anchor_offsets", lambda of: lambda *a: set()),
        (clean_pass, "anchor_offsets", lambda of: lambda *a: set()),
    ],
    "deletes go in their first pass": [
        (log_to_clean, "find_log_to_clean", _no_horizon),
        (clean_pass, "find_log_to_clean", _no_horizon),
    ],
    "files go under readers": [(reader_marks, "oldest_view", lambda of: lambda *a: None)],
    "an overtaken writer goes on": [
        (Ownership, "loss", lambda of: lambda *a: None),
        (Ownership, "misplaced", lambda of: lambda *a: None),
    ],
}

#: What is not synced → which operations do not reach the disk.
NOT_SYNCED: dict[str, Selection] = {
    "segments are not synced": on("sync", path="*.arrows"),
    "the journal is not synced": on("sync", path="*.journal"),
    "no directory is synced": on("sync_directory"),
}


@contextmanager
def planted(places: list[tuple[Any, str, Wrap]]) -> Iterator[None]:
    patches = [mock.patch.object(where, name, wrap(getattr(where, name))) for where, name, wrap in places]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


@pytest.mark.parametrize("bug", IN_THE_PRODUCT)
def test_random_histories_find_a_bug_in_the_product(bug: str) -> None:
    examples = 0

    class Counted(ReadingMachine):
        def __init__(self) -> None:
            super().__init__()
            nonlocal examples
            examples += 1

    chosen = settings(
        max_examples=_EXAMPLES_MAX, stateful_step_count=30, database=None, deadline=None,
        phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with Soak(f"planted, {bug}", share=0) as soak, planted(IN_THE_PRODUCT[bug]):
        try:
            run_state_machine_as_test(seed(next(soak.rounds()))(Counted), settings=chosen)
        except NOTICED as e:
            print(f"found after {examples} examples: {type(e).__name__}: {str(e)[:100]}")
            soak.count("planted bugs caught")
            return
    raise AssertionError(f"{_EXAMPLES_MAX} examples have not shown that {bug}")


class Forgetful(PowerLoss):
    """Says that it has synced what it has not."""

    def __init__(self, disk: Disk, forgets: Selection) -> None:
        super().__init__(disk)
        self._forgets = forgets

    @contextmanager
    def around(self, operation: Any) -> Iterator[None]:
        if self._forgets(operation):
            yield
        else:
            with super().around(operation):
                yield


@pytest.mark.parametrize("bug", NOT_SYNCED)
def test_power_losses_find_what_is_not_synced(bug: str) -> None:
    with Soak(f"planted, {bug}", share=1) as soak:
        number = next(soak.rounds())
        for life in range(_LIVES_MAX):
            directory = Path(tempfile.mkdtemp(dir=IN_MEMORY))
            try:
                lose_power(
                    Life(number + life),
                    directory,
                    soak,
                    number,
                    lambda disk: Forgetful(disk, NOT_SYNCED[bug]),
                )
            except NOTICED as e:
                print(f"found in life {life + 1}: {type(e).__name__}: {str(e)[:200]}")
                soak.count("planted bugs caught")
                return
            finally:
                shutil.rmtree(directory)
    raise AssertionError(f"{_LIVES_MAX} lives have not shown that {bug}")


def test_corruptions_find_a_checksum_that_is_not_compared() -> None:
    with (
        Soak("planted, a checksum is not compared", share=1) as soak,
        planted([(SegmentReader, "_compare", lambda of: lambda *a: None)]),
    ):
        number = next(soak.rounds())
        for life in range(_LIVES_MAX):
            directory = Path(tempfile.mkdtemp(dir=IN_MEMORY))
            try:
                corrupt(random.Random(number + life), directory, soak, number + life)
            except NOTICED as e:
                print(f"found in life {life + 1}: {type(e).__name__}: {str(e)[:200]}")
                soak.count("planted bugs caught")
                return
            finally:
                shutil.rmtree(directory)
    raise AssertionError(f"{_LIVES_MAX} lives have not shown it")
