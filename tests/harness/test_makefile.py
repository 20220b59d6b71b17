"""What `make` gives to the programs that it starts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_compiled_modules_are_kept_whatever_the_caller_sets() -> None:
    """The environments have none, so each of the many processes would compile all that it imports."""
    done = subprocess.run(
        ["make", "--silent", "--eval", "show-environment:; @env", "show-environment"],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "SEEN": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    names = {line.partition("=")[0] for line in done.stdout.splitlines()}
    assert "SEEN" in names
    assert "PYTHONDONTWRITEBYTECODE" not in names
