"""The guard against groups of tests that are skipped whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from support.groups import groups_of, skipped_whole

TESTS = Path(__file__).resolve().parent.parent


def test_a_test_belongs_to_its_directory_and_to_its_marks() -> None:
    assert groups_of("tests/unit/test_a.py::test_b[x::y]", ["spark", "parametrize"]) == [
        "tests/unit",
        "spark",
    ]
    assert groups_of("tests/test_docs.py::test_b", []) == []


def test_a_group_with_one_test_that_ran_is_not_skipped_whole() -> None:
    assert skipped_whole({"tests/unit": Counter(skipped=9, ran=1)}) == []


def test_a_group_without_its_tool_may_be_skipped_whole() -> None:
    outcomes = {
        "spark": Counter(skipped=2),
        "tests/kafka": Counter(skipped=1),
        "tests/unit": Counter(skipped=1),
    }
    assert skipped_whole(outcomes, has_tool=lambda _: True) == ["spark", "tests/kafka", "tests/unit"]
    assert skipped_whole(outcomes, has_tool=lambda _: False) == ["tests/unit"]


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["alone", "xdist"])
@pytest.mark.parametrize(("ci", "status"), [("", 0), ("true", 1)])
def test_a_run_with_a_group_skipped_whole_is_red_on_ci(
    tmp_path: Path, workers: list[str], ci: str, status: int
) -> None:
    for folder, text in (
        ("unit", "@pytest.mark.skip(reason='before it starts')\ndef test_a(): pass\n"),
        ("model", "def test_b(): pytest.skip('while it runs')\ndef test_c(): pass\n"),
    ):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text("import pytest\n" + text)
    (tmp_path / "conftest.py").write_text(
        "from support.groups import Groups\n"
        "def pytest_configure(config): config.pluginmanager.register(Groups(), 'groups')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "tests", *workers],
        cwd=tmp_path,
        env={
            **os.environ,
            "CI": ci,
            "PYTHONPATH": str(TESTS),
            "PYTEST_ADDOPTS": "",
            "PYTEST_XDIST_WORKER": "",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert ("every test of 'tests/unit' was skipped" in done.stdout) == bool(status)
    assert "every test of 'tests/model' was skipped" not in done.stdout
    assert "1 passed, 2 skipped" in done.stdout


def test_tests_of_one_group_run_in_one_worker_process(tmp_path: Path) -> None:
    """Otherwise each worker starts Spark, and all that shows is time."""
    (tmp_path / "test_a.py").write_text(
        "import os, pytest\n"
        "@pytest.mark.xdist_group('spark-session')\n"
        "@pytest.mark.parametrize('i', range(6))\n"
        "def test_a(i): open(f'worker-{os.getpid()}', 'w')\n"
    )
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "--rootdir", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_ADDOPTS": "", "PYTEST_XDIST_WORKER": ""},
        check=True,
    )
    assert len(list(tmp_path.glob("worker-*"))) == 1
