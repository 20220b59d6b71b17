"""Spark finds the data source by itself, and a new process has nothing to register."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from keyfold import Changelog
from support.source import QUIET, table

pytest.importorskip("pyspark")

import pyspark_keyfold

from keyfold.streaming.source import KeyfoldSource

ROOT = Path(__file__).resolve().parent.parent.parent


def test_what_spark_looks_for_is_the_data_source() -> None:
    assert pyspark_keyfold.DefaultSource is KeyfoldSource
    assert pyspark_keyfold.DefaultSource.name() == "keyfold"


def test_a_fresh_session_knows_the_format_without_registering_it(tmp_path: Path) -> None:
    """`pip install -e` hides `pyspark_keyfold` from Spark, so here it lies on the path as in a wheel."""
    path = tmp_path / "log"
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1"), ("a", "2")))
    installed = tmp_path / "site-packages"
    shutil.copytree(ROOT / "streaming" / "autoload", installed / "pyspark_keyfold")
    code = f"""
        from pathlib import Path
        from support.session import spark_session
        spark = spark_session(Path({str(tmp_path / "spark")!r}))
        rows = spark.read.format("keyfold").load({str(path)!r}).collect()
        print([bytes(row.value) for row in rows])
        spark.stop()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT / "tests")])},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[b'2']", done.stderr
