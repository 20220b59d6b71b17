"""Tables of the command fit the terminal from 40 to 200 cells, and no number is broken at any width."""

from __future__ import annotations

import random
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from keyfold import Changelog
from keyfold.checkpoints.cli.group import cli
from keyfold.checkpoints.cli.tables import Cell, cells_of, facts, folded, sentence, table
from keyfold.checkpoints.log.writer import Batch
from support.changelogs import BY_HAND, make_closed, rows

WIDTHS = range(40, 201)
_NUMBER = re.compile(r"\d[\d,.]*\d|\d")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("FORCE_COLOR", "1")
    return monkeypatch


def numbers_of(text: str) -> list[str]:
    return _NUMBER.findall(click.unstyle(text))


def _cells(random_: random.Random, numeric: bool) -> Cell:
    if random_.random() < 0.2:
        return None
    if numeric:
        return random_.choice([random_.randrange(10 ** random_.randrange(1, 19)), round(random_.random(), 2)])
    words = [
        "pid",
        "commit",
        str(random_.randrange(10**12)),
        "größe",
        "日本語",
        "a" * random_.randrange(1, 30),
    ]
    return " ".join(random_.choices(words, k=random_.randrange(1, 6)))


@pytest.mark.parametrize("seed", range(8))
def test_a_table_fits_and_shows_each_number_whole(seed: int, terminal: pytest.MonkeyPatch) -> None:
    random_ = random.Random(seed)
    kinds = [random_.random() < 0.6 for _ in range(random_.randrange(1, 9))]
    headings = [random_.choice(["partition", "bytes", "next offset", "x"]) for _ in kinds]
    cells = [[_cells(random_, kind) for kind in kinds] for _ in range(5)]
    terminal.setenv("COLUMNS", "10000")
    wanted = sorted(numbers_of(table(headings, cells)))
    for width in WIDTHS:
        terminal.setenv("COLUMNS", str(width))
        drawn = click.unstyle(table(headings, cells, "Title"))
        assert sorted(numbers_of(drawn)) == wanted
        assert max(map(cells_of, drawn.split("\n"))) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_facts_and_sentences_fit_and_show_each_number_whole(width: int, terminal: pytest.MonkeyPatch) -> None:
    terminal.setenv("COLUMNS", str(width))
    text = 'commits 1234567 to 2345678 of {"topic":{"0":123456789012345,"1":123456789012346}} in 0.25 s'
    for drawn in (sentence(text), facts([("source position", text), ("records", 12_345_678)])):
        assert max(map(cells_of, drawn.split("\n"))) <= width
        assert set(numbers_of(sentence(text))) <= set(numbers_of(text))
        for number in ("1234567", "2345678", "123456789012345", "123456789012346", "0.25"):
            assert number in drawn


def test_folding_loses_nothing() -> None:
    random_ = random.Random(7)
    for _ in range(300):
        text = " ".join("".join(random_.choices("ab1日,.", k=random_.randrange(1, 25))) for _ in range(4))
        width = random_.randrange(2, 40)
        assert "".join(folded(text, width)).replace(" ", "") == text.replace(" ", "")


def test_elsewhere_than_on_a_terminal_a_row_is_one_line() -> None:
    shown = table(("name", "bytes"), [("a b", 1_234_567), ("x" * 300, None)])
    assert shown.split("\n")[1].split() == ["a", "b", "1234567"]
    assert len(shown.split("\n")) == 3


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_closed(tmp_path_factory.mktemp("tables") / "log")
    with Changelog.open(root, config=BY_HAND) as log:
        log.append(rows(*((f"key {i}", "x" * 50) for i in range(3_000))))
        source = ('{"topic":{"0":123456789012345,"1":123456789012346}}',)
        log.engine.writer.commit({}, Batch("a job with a long name", 1_234_567, query="q", source=source))
    return root


@pytest.mark.parametrize("verb", [["stats"], ["ls"], ["anchor"], ["config"], ["verify"]])
def test_what_the_command_prints_fits_and_shows_each_number_whole(
    verb: list[str], log: Path, terminal: pytest.MonkeyPatch
) -> None:
    def shown(width: int) -> str:
        terminal.setenv("COLUMNS", str(width))
        # A relative path: a long one has digits of its own.
        terminal.chdir(log.parent)
        done = CliRunner().invoke(cli, [verb[0], log.name, *verb[1:]])
        assert done.exit_code == 0
        return click.unstyle(done.output)

    wanted = set(numbers_of(shown(10_000)))
    for width in (40, 48, 60, 72, 80, 100, 132, 200):
        narrow = shown(width)
        assert {n for n in wanted if len(n) <= 20} <= set(numbers_of(narrow))
        assert max(map(cells_of, narrow.split("\n"))) <= width
