"""A power loss at every moment of random lives, each with all corners of what a disk may have kept."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from support.folds import IN_MEMORY
from support.lived import Life
from support.losing import lose_power
from support.soaking import Soak

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("part", [1, 2])
def test_no_power_loss_takes_back_what_was_acknowledged(part: int) -> None:
    with Soak(f"power-losses-{part}", share=0.26) as soak:
        for seed in soak.rounds():
            directory = Path(tempfile.mkdtemp(dir=IN_MEMORY))
            try:
                lose_power(Life(seed), directory, soak, seed)
            finally:
                shutil.rmtree(directory)
