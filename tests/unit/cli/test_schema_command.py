"""`keyfold schema`: keys, columns and the history of schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from keyfold import Changelog
from keyfold.checkpoints.cli.group import cli
from keyfold.statestore.schema.columns import Columns
from support.changelogs import BY_HAND, make_closed

KEYS = ("word", "day")


def schema_of(*columns: tuple[str, Any, bool]) -> Columns:
    fields = [{"name": n, "type": kind, "nullable": null, "metadata": {}} for n, kind, null in columns]
    return Columns({"type": "struct", "fields": fields}, KEYS)


FIRST = (("count", "long", False), ("day", "date", False), ("word", "string", False))
LISTS = {"type": "array", "elementType": "string", "containsNull": True}


@pytest.fixture
def typed(tmp_path: Path) -> Path:
    """Three schemas: the first, one with another column, one that also allows a null count."""
    path = tmp_path / "log"
    first = schema_of(*FIRST)
    second = first.accepts(schema_of(*FIRST, ("tags", LISTS, True)))
    third = second.accepts(schema_of(("count", "long", True), *FIRST[1:], ("tags", LISTS, True)))
    with Changelog.open(path, columns=first, config=BY_HAND) as log:
        log.engine.set_columns(second)
        log.engine.set_columns(third)
    return path


def run(*arguments: object) -> str:
    done = CliRunner().invoke(cli, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_it_tells_keys_columns_and_what_each_schema_changed(typed: Path) -> None:
    found = json.loads(run("schema", typed, "--json"))
    assert found == {
        "path": str(typed),
        "schema": 3,
        "keys": ["word", "day"],
        "columns": [
            {"name": "count", "type": "bigint", "nullable": True, "key": False, "since": 1},
            {"name": "day", "type": "date", "nullable": False, "key": True, "since": 1},
            {"name": "word", "type": "string", "nullable": False, "key": True, "since": 1},
            {"name": "tags", "type": "array<string>", "nullable": True, "key": False, "since": 2},
        ],
        "history": [
            {
                "schema": 1,
                "changes": [
                    {"column": "count", "before": None, "after": "bigint not null"},
                    {"column": "day", "before": None, "after": "date not null"},
                    {"column": "word", "before": None, "after": "string not null"},
                ],
            },
            {"schema": 2, "changes": [{"column": "tags", "before": None, "after": "array<string>"}]},
            {"schema": 3, "changes": [{"column": "count", "before": "bigint not null", "after": "bigint"}]},
        ],
    }


def test_the_text_says_the_same(typed: Path) -> None:
    lines = [line.split() for line in run("schema", typed).splitlines()]
    assert ["keys:", "word,", "day"] in lines
    assert ["tags", "array<string>", "yes", "value", "2"] in lines
    assert ["word", "string", "no", "key", "1"] in lines
    assert ["2", "tags", "added", "array<string>"] in lines
    assert ["3", "count", "bigint", "not", "null", "bigint"] in lines


def test_a_changelog_of_raw_bytes_says_so(tmp_path: Path) -> None:
    path = make_closed(tmp_path / "raw")
    assert run("schema", path) == "raw bytes: this changelog has no typed columns\n"
    found = json.loads(run("schema", path, "--json"))
    assert found == {"path": str(path), "schema": None, "keys": [], "columns": [], "history": []}


def test_it_reads_while_another_process_writes_and_what_the_first_table_has_given(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", keys="user", config=BY_HAND) as log:
        log.append(pa.table({"user": ["a"], "n": [1]}))
        found = json.loads(run("schema", tmp_path / "log", "--json"))
    assert [(c["name"], c["type"], c["key"]) for c in found["columns"]] == [
        ("user", "string", True),
        ("n", "bigint", False),
    ]
