"""Flipped bits, zeros, cuts, missing files anywhere in a changelog: no other result, and never silence."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest

from support.corrupting import corrupt
from support.folds import IN_MEMORY
from support.soaking import Soak

pytestmark = pytest.mark.soak


def test_no_corruption_is_silent() -> None:
    with Soak("corruptions", share=0.12) as soak:
        for seed in soak.rounds():
            directory = Path(tempfile.mkdtemp(dir=IN_MEMORY))
            try:
                corrupt(random.Random(seed), directory, soak, seed)
            finally:
                shutil.rmtree(directory)
