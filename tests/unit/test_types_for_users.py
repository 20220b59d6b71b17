"""What a type checker elsewhere sees of `import keyfold`: no configuration, only the installed package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import keyfold
from keyfold import errors

pytest.importorskip("mypy")

#: An expression, and its type as mypy writes it.
TYPES = {
    'keyfold.open("x")': "keyfold.checkpoints.changelog.Changelog",
    'keyfold.open("x").get(b"a")': "Any",  # bytes, or a dict of typed columns
    'keyfold.open("x").append([{"key": "a"}])': "keyfold.checkpoints.manifest.state.Commit",
    'keyfold.Changelog.open("x")': "keyfold.checkpoints.changelog.Changelog",
    'keyfold.ChangelogSink("x", keys="word")': "keyfold.sink.changelog_sink.ChangelogSink",
    'keyfold.ChangelogSink("x", keys="word").log': "keyfold.checkpoints.changelog.Changelog",
    'keyfold.restore("x")': "keyfold.checkpoints.restore.restore.RestoredState",
    'keyfold.restore("x").ends': "tuple[int, ...]",
    'keyfold.dataset("x").__enter__()': "keyfold.checkpoints.restore.dataset.ChangelogDataset",
    'keyfold.open_store("x").__enter__()': "keyfold.statestore.kv.typed_columns.LastValuesView",
    'keyfold.open("x").store().__enter__()': "keyfold.statestore.kv.typed_columns.LastValuesView",
    'keyfold.restore("x").to_store("y").__enter__()': "keyfold.statestore.kv.typed_columns.LastValuesView",
    'keyfold.resume("x", "app")': "keyfold.checkpoints.resume.resume.Resumed",
    'keyfold.resume_if_lost("x", "app", checkpoint="y")': "keyfold.checkpoints.resume.resume.Resumed | None",
    'keyfold.Standby("x")': "keyfold.checkpoints.standby.Standby",
    "keyfold.Store()": "keyfold.sink.named_stores.Store",
}
#: What mypy says of a value of which it knows nothing, or of a function without annotations.
_UNKNOWN = re.compile(r"Any|object|def \(.*\) -> Any")


def checked(folder: Path, *lines: str) -> str:
    """What mypy says, strictly, of a program in `folder`."""
    (folder / "program.py").write_text("\n".join(["import keyfold", *lines]) + "\n")
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--cache-dir",
        str(folder / "cache"),
    ]
    return subprocess.run(
        [*command, "program.py"], cwd=folder, env=kept, capture_output=True, text=True
    ).stdout


def test_a_type_checker_elsewhere_knows_every_public_name_and_no_other(tmp_path: Path) -> None:
    names = [f"keyfold.{name}" for name in keyfold.__all__]
    names += [f"keyfold.errors.{name}" for name in errors.__all__]
    expressions = [*TYPES, *names]
    out = checked(tmp_path, *(f"reveal_type({expression})" for expression in expressions), "keyfold.opne")
    wrong = re.findall(r"^program\.py:(\d+): error: (.*)", out, re.MULTILINE)
    assert wrong == [(str(len(expressions) + 2), 'Module has no attribute "opne"  [attr-defined]')], out
    notes = re.findall(r'^program\.py:(\d+): note: Revealed type is "(.*)"$', out, re.MULTILINE)
    found = {expressions[int(line) - 2]: kind for line, kind in notes}
    assert {expression: found.get(expression) for expression in TYPES} == TYPES
    assert [name for name in names if _UNKNOWN.fullmatch(found.get(name, "Any"))] == []
