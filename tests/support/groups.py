"""A group of tests that was skipped whole is a failure where its tool is at hand.

A skip is for one reason at a time and easily overlooked: a suite whose Spark tests were all skipped is
green. A group is a directory under `tests` or one of `MARKERS`. On CI (the variable `CI` is set), a group
with skipped tests and none that ran turns the run red, unless the program it needs is not on the machine.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

MARKERS = ("crash", "kafka", "kafka_source", "model", "spark")

#: The program without which a group cannot run. Groups that are not named need none.
TOOLS = {"kafka": "mvn", "kafka_source": "mvn", "spark": "java"}

_PROPERTY = "groups"


def groups_of(nodeid: str, markers: Iterable[str]) -> list[str]:
    """The groups of a test: the directory below `tests`, and its markers that make a group."""
    parts = Path(nodeid.split("::")[0]).parts
    inside = parts[1:] if parts and parts[0] == "tests" else parts
    directories = [f"tests/{inside[0]}"] if len(inside) > 1 else []
    return directories + sorted(set(markers) & set(MARKERS))


def skipped_whole(
    outcomes: dict[str, Counter[str]], has_tool: Callable[[str], object] = shutil.which
) -> list[str]:
    """The groups of which tests were skipped and none ran, though nothing they need is missing.

    Args:
        outcomes: group to number of tests by outcome; `"ran"` and `"skipped"` count.
        has_tool: tells whether a program is on this machine.
    """
    found = []
    for group, count in sorted(outcomes.items()):
        tool = TOOLS.get(group.removeprefix("tests/"))
        if count["skipped"] and not count["ran"] and (tool is None or has_tool(tool)):
            found.append(group)
    return found


class Groups:
    """The pytest plugin: counts on the process that reports, judges when all tests are done."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        # User properties travel with the report, also from the worker processes of pytest-xdist.
        names = groups_of(item.nodeid, (mark.name for mark in item.iter_markers()))
        item.user_properties.append((_PROPERTY, " ".join(names)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.skipped or report.failed:
            outcome = "skipped" if report.skipped and not hasattr(report, "wasxfail") else "ran"
            for name, value in report.user_properties:
                if name == _PROPERTY:
                    for group in str(value).split():
                        self.outcomes.setdefault(group, Counter())[outcome] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_worker = hasattr(session.config, "workerinput")
        if session.exitstatus == pytest.ExitCode.OK and not is_worker and self.missing():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for group in self.missing():
            terminalreporter.write_line(
                f"ERROR: every test of '{group}' was skipped, though what it needs is here",
                red=True,
                bold=True,
            )

    def missing(self) -> list[str]:
        return skipped_whole(self.outcomes) if os.environ.get("CI") else []
