"""Every file operation of random lives fails once, reads too: nothing that was acknowledged is lost."""

from __future__ import annotations

import errno
import random
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from keyfold.statestore.errors import KeyfoldError
from support.faults.inject import QUICK, FailAt, Operation
from support.folds import IN_MEMORY
from support.lifecycle import bury
from support.lived import Life
from support.soaking import Soak

pytestmark = pytest.mark.soak

ERRORS = (errno.EIO, errno.ENOSPC)


def of_the_log(operation: Operation) -> bool:
    """Last-value stores are made by a thread of their own, at no certain time."""
    return "store-" not in str(operation.path)


def test_any_operation_may_fail_once_or_from_then_on() -> None:
    with Soak("failing-calls", share=0.06) as soak:
        for seed in soak.rounds():
            directory = Path(tempfile.mkdtemp(dir=IN_MEMORY))
            try:
                fail(seed, directory, soak)
            finally:
                shutil.rmtree(directory, ignore_errors=True)


def fail(seed: int, directory: Path, soak: Soak) -> None:
    counted = FailAt(None, only=of_the_log)
    Life(seed, steps=8).live(counted, directory / "counted")
    draw = random.Random(seed)
    for n in range(counted.count):
        if soak.is_over:
            return
        error, forever = draw.choice(ERRORS), draw.random() < 0.3
        files = FailAt(n, error, forever=forever, halfway=draw.random() < 0.5, only=of_the_log)
        life, path, told = Life(seed, steps=8), directory / f"life-{n}", [-1]
        with suppress(KeyfoldError, OSError):
            life.live(files, path, told.append)
        bury(files)
        fault = life.fault_in(QUICK, path, told[-1])
        assert fault is None, f"seed {seed}, operation {n}, {errno.errorcode[error]}: {fault}"
        shutil.rmtree(path, ignore_errors=True)
        soak.count("failing calls", files.failed > 0)
    soak.count("lives of which every call failed once")
