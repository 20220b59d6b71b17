"""Spark finds the data source by itself: nothing has to be registered.

The environment of the tests is an editable install. `tests/unit/test_wheel.py` shows the same of a wheel.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keyfold import Changelog
from support.source import QUIET, table

pytest.importorskip("pyspark")

import pyspark_keyfold

from keyfold.streaming.source import KeyfoldSource

TESTS = Path(__file__).resolve().parent.parent

_READ = """
import sys
from pathlib import Path
from support.session import spark_session

path, folder = sys.argv[1:]
spark = spark_session(Path(folder) / "spark")
rows = spark.read.format("keyfold").load(path).collect()
print([bytes(row.value) for row in rows])
spark.stop()
"""


def test_what_spark_looks_for_is_the_data_source() -> None:
    assert pyspark_keyfold.DefaultSource is KeyfoldSource
    assert pyspark_keyfold.DefaultSource.name() == "keyfold"


def test_a_fresh_session_knows_the_format_without_registering_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on the path of the tests nor from the working directory, but because it is installed."""
    path = tmp_path / "log"
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1"), ("a", "2")))
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    done = subprocess.run(
        [sys.executable, "-c", _READ, str(path), str(tmp_path)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[b'2']", done.stderr
