"""The example of `make demo-kafka`, with fewer flights, and the broker of the other tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.kafka_topics import Topics

ROOT = Path(__file__).resolve().parents[2]

# kafka-python reads its schemas in a way that is deprecated.
pytestmark = [
    pytest.mark.soak,
    pytest.mark.filterwarnings("ignore:.*_text is deprecated:DeprecationWarning"),
]


def test_the_demo_finds_every_number_equal(topics: Topics, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "kafka" / "kafka_demo.py"), str(tmp_path / "demo")]
    done = subprocess.run(
        [*command, "--broker", topics.address, "--flights", "4000"], cwd=tmp_path, capture_output=True,
        text=True, timeout=1100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal ") == 2
