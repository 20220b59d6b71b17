"""The `keyfold` command: what every verb has in common, and `stats`, `ls`, `verify`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from keyfold import Changelog
from keyfold.checkpoints.cli import group
from keyfold.checkpoints.cli.group import cli
from keyfold.checkpoints.log.writer import Batch
from support.changelogs import (
    BY_HAND,
    KEYFOLD,
    Living,
    flip,
    identity_of,
    rows,
    segment_of,
)

#: What each verb needs besides PATH to do something.
VERBS: dict[str, list[str]] = {
    "stats": [],
    "schema": [],
    "ls": [],
    "verify": [],
    "dump": [],
    "get": ["k10"],
    "tail": [],
    "compact": [],
    "anchor": [],
    "config": [],
    "restore": ["--to", "{tmp}/out.parquet"],
    "snapshot": ["--to", "{tmp}/snapshot"],
}
READING = [verb for verb in VERBS if verb not in ("compact", "snapshot")]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def json_of(*arguments: object) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def arguments_of(verb: str, path: Path, tmp: Path) -> list[str]:
    return [verb, str(path), *(argument.format(tmp=tmp) for argument in VERBS[verb])]


# -- what all verbs have -------------------------------------------------------------------------------------


def test_every_verb_is_tested_here() -> None:
    assert set(VERBS) == set(group.VERBS)


def test_it_tells_its_version() -> None:
    assert run("--version").output == f"keyfold {importlib.metadata.version('keyfold')}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_says_what_it_does_with_examples_that_it_takes(verb: str) -> None:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    shown = run(verb, "--help").output
    assert "--json" in shown
    examples = re.findall(r"^ +keyfold (.*)$", shown.partition("Examples:")[2], re.MULTILINE)
    assert examples
    for example in examples:
        words = shlex.split(example.partition(" | ")[0])
        assert words[0] == verb
        command.make_context(verb, words[1:])


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_answers_in_json(verb: str, closed: Path, tmp_path: Path) -> None:
    done = run(*arguments_of(verb, closed, tmp_path), "--json")
    assert done.exit_code == 0, done.output
    if verb in ("dump", "tail"):
        assert all(isinstance(json.loads(line), dict) for line in done.output.splitlines())
    else:
        assert isinstance(json.loads(done.output), dict)


@pytest.mark.parametrize(
    "words",
    [*([verb, *rest] for verb, rest in VERBS.items()), ["anchor", "--add", "x"], ["config", "--set", "a=1"]],
)
def test_a_path_that_is_no_changelog_is_refused_and_nothing_is_made_there(
    words: list[str], tmp_path: Path
) -> None:
    verb, *rest = (word.format(tmp=tmp_path) for word in words)
    done = run(verb, tmp_path / "nowhere", *rest)
    assert done.exit_code == 3
    assert "error: Not a changelog." in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "verify"])
def test_a_damaged_identity_is_a_message_and_exit_code_4(verb: str, closed: Path, tmp_path: Path) -> None:
    flip(identity_of(closed), 60)
    done = run(*arguments_of(verb, closed, tmp_path))
    assert done.exit_code == 4
    assert f"path: {identity_of(closed)}" in done.output
    assert "what to do:" in done.output
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("verb", READING)
def test_verbs_that_read_change_nothing(verb: str, crashed: Path, tmp_path: Path) -> None:
    def tree() -> dict[str, tuple[bytes, int]]:
        files = (path for path in sorted(crashed.rglob("*")) if path.is_file())
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    before = tree()
    done = run(*arguments_of(verb, crashed, tmp_path))
    assert done.exit_code == 0, done.output
    assert tree() == before


_UNPRIVILEGED = """
import importlib, json, os, sys
from keyfold.checkpoints.cli.group import VERBS, cli
for module, _ in VERBS.values():
    importlib.import_module(f"keyfold.checkpoints.cli.{module}")  # the other user may not read it
os.chdir(sys.argv[1])
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    open("new", "w")
    sys.exit("the directory can be written")
except PermissionError:
    pass
for words in json.loads(sys.argv[2]):
    try:
        cli(words)
    except SystemExit as e:
        if e.code:
            sys.exit(f"{words}: {e.code}")
"""


def test_verbs_that_read_work_in_a_directory_that_cannot_be_written(crashed: Path) -> None:
    """As another user, where the tests run as root; that one cannot restore to anywhere here."""
    for path in (*crashed.rglob("*"), crashed):
        path.chmod(0o555 if path.is_dir() else 0o444)
    # The other user has to come so far.
    above = [path for path in crashed.parents if path.stat().st_mode & 0o077 == 0]
    for path in above:
        path.chmod(0o711)
    words = json.dumps([[verb, ".", *VERBS[verb]] for verb in READING if verb != "restore"])
    done = subprocess.run(
        [sys.executable, "-c", _UNPRIVILEGED, str(crashed), words],
        capture_output=True,
        text=True,
        timeout=120,
    )
    for path in (crashed, *crashed.rglob("*")):
        path.chmod(0o755)
    for path in above:
        path.chmod(0o700)
    assert done.returncode == 0, done.stdout + done.stderr


def test_verbs_that_read_work_beside_a_living_writer(tmp_path: Path) -> None:
    with Living(tmp_path / "log") as living:
        for number, verb in enumerate(READING):
            living.append("k10", str(number))
            done = run(*arguments_of(verb, living.path, tmp_path))
            assert done.exit_code == 0, done.output
            assert run("get", living.path, "k10").output == f"{number}\n"


def test_an_error_of_the_operating_system_is_a_message(closed: Path, tmp_path: Path) -> None:
    done = run("restore", closed, "--to", tmp_path / "missing" / "x.csv")
    assert done.exit_code == 7
    assert "found: FileNotFoundError: No such file or directory" in done.output
    assert str(tmp_path / "missing") in done.output


def test_a_reader_of_the_pipe_that_leaves_ends_it_quietly(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config=BY_HAND) as log:
        log.append(rows(*((f"key {i}", "x" * 100) for i in range(20_000))))
    with subprocess.Popen(
        [KEYFOLD, "dump", str(tmp_path / "log")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "key 0" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == -signal.SIGPIPE
    assert not any((tmp_path / "log" / "readers").iterdir())


def test_ctrl_c_ends_it_quietly(closed: Path) -> None:
    with subprocess.Popen(
        [KEYFOLD, "tail", str(closed), "--follow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background has them ignore it, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
        assert process.stderr.read() == ""


def test_text_that_could_move_the_cursor_is_escaped(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log") as log:
        log.append(rows(("k", "\x1b[2Jgone\n")), app_id="\x1b[31mapp")
    for verb in (["get", "k"], ["dump"], ["stats"]):
        shown = run(verb[0], tmp_path / "log", *verb[1:]).output
        assert "\x1b" not in shown
        assert "\\x1b" in shown


# -- stats ---------------------------------------------------------------------------------------------------


def test_stats_agree_with_the_changelog(closed: Path) -> None:
    found = json_of("stats", closed)
    with Changelog.open(closed, mode="r") as log:
        assert found["uuid"] == log.identity.uuid
        assert found["epoch"] == log.state.epoch
        assert found["schema"] is None
        assert found["commits"] == 3
        assert found["anchors"] == [{"name": "first", "commit": 1}]
        assert [p["end_offset"] for p in found["partitions"]] == list(log.end_offsets().values())
        for number, p in enumerate(log.state.partitions):
            read = pa.Table.from_batches(log.read(number))
            shown = found["partitions"][number]
            assert shown["records"] == read.num_rows
            assert shown["tombstones"] == read["value"].null_count
            assert shown["clean_end_offset"] == p.clean_end
    assert found["totals"]["records"] == sum(p["records"] for p in found["partitions"]) > 0


def test_the_dirty_ratio_is_that_of_the_bytes_that_can_be_cleaned(tmp_path: Path) -> None:
    root = tmp_path / "log"

    def ratio() -> float:
        shown = json_of("stats", root)["partitions"][0]["dirty_ratio"]
        assert isinstance(shown, float)
        return shown

    with Changelog.open(root, config=BY_HAND) as log:
        log.append(rows(("a", "1")))
        assert ratio() == 0, "an active segment cannot be cleaned"
        log.engine.writer.seal_active()
        assert ratio() == 1
        log.compact()
        assert ratio() == 0
        log.append(rows(("a", "1")))
        log.engine.writer.seal_active()
        assert ratio() == 0.5


def test_stats_show_batch_and_source_position_of_each_app(closed: Path) -> None:
    with Changelog.open(closed) as log:
        log.engine.writer.commit({}, Batch("counts", 7, query="q-1", source=('{"topic":{"0":12}}',)))
    (app,) = [a for a in json_of("stats", closed)["apps"] if a["app"] == "counts"]
    assert (app["last_batch"], app["last_commit"], app["query"]) == (7, 4, "q-1")
    assert app["source"] == ['{"topic":{"0":12}}']
    assert '{"topic":{"0":12}}' in run("stats", closed).output


def test_stats_show_what_the_last_value_stores_take(closed: Path) -> None:
    with Changelog.open(closed) as log:
        log.get(b"any")
    stores = (file for file in closed.glob("store-*/*") if file.is_file())
    assert json_of("stats", closed)["totals"]["store_bytes"] == sum(f.stat().st_size for f in stores) > 0


def test_stats_know_a_living_writer_of_another_process_and_a_dead_one(tmp_path: Path) -> None:
    with Living(tmp_path / "log") as living:
        assert json_of("stats", living.path)["writer"] == {"pid": living.pid, "epoch": 1, "alive": True}
        assert f"pid {living.pid} is writing" in run("stats", living.path).output
        living.kill()
        assert json_of("stats", living.path)["writer"] == {"pid": living.pid, "epoch": 1, "alive": False}
    assert "writer:      none" in run("stats", living.path).output


def test_a_process_that_lives_and_has_closed_the_changelog_is_no_writer(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log"):
        assert json_of("stats", tmp_path / "log")["writer"]["alive"] is True
    assert json_of("stats", tmp_path / "log")["writer"] == {"pid": os.getpid(), "epoch": 1, "alive": False}


# -- ls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["closed", "crashed"])
def test_the_listed_bytes_are_the_log_for_a_plain_arrow_tool(
    name: str, request: pytest.FixtureRequest
) -> None:
    root = request.getfixturevalue(name)
    (root / "0" / "00000000000000000099-1-99.arrows").write_bytes(b"never committed")
    if name == "crashed":
        for path in root.glob("[01]/*-1-[12].arrows"):
            path.write_bytes(path.read_bytes() + b"never committed either")
    tables = []
    for file in json_of("ls", root)["files"]:
        data = Path(file["path"]).read_bytes()[: file["bytes"]]
        table = pa.ipc.open_stream(pa.BufferReader(data)).read_all()
        assert table.num_rows == file["records"]
        assert table["value"].null_count == file["tombstones"]
        assert file["sealed"] is (name == "closed")
        tables.append(table)
    with Changelog.open(root, mode="r") as log:
        batches = [batch for number in range(2) for batch in log.read(number)]
    assert pa.concat_tables(tables).equals(pa.Table.from_batches(batches))


@pytest.mark.parametrize("name", ["closed", "crashed"])
def test_ls_prints_paths_for_other_commands(name: str, request: pytest.FixtureRequest) -> None:
    root = request.getfixturevalue(name)
    listed = json_of("ls", root)["files"]
    everything = [file["path"] for file in listed]
    sealed = [file["path"] for file in listed if file["sealed"]]
    assert len(everything) > 1
    assert sealed == (everything if name == "closed" else [])
    assert run("ls", root, "--paths").output.splitlines() == everything
    assert run("ls", root, "--paths", "--sealed").output.splitlines() == sealed
    assert json_of("ls", root, "--paths")["files"] == listed
    assert [file["path"] for file in json_of("ls", root, "--sealed")["files"]] == sealed
    assert len(run("ls", root, "--sealed").output.splitlines()) == 1 + len(sealed)


def test_the_paths_of_ls_go_to_xargs(closed: Path, tmp_path: Path) -> None:
    root = tmp_path / "with a space"
    closed.rename(root)
    command = f"{KEYFOLD} ls '{root}' --paths | xargs -d '\\n' -n 1 wc -c"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    sizes = {line.split(" ", 1)[1]: int(line.split()[0]) for line in done.stdout.splitlines()}
    end_mark = 8
    assert sizes == {file["path"]: file["bytes"] + end_mark for file in json_of("ls", root)["files"]}


def test_ls_is_plain_columns_where_no_terminal_is(closed: Path) -> None:
    lines = run("ls", closed).output.splitlines()
    assert lines[0].split() == [
        "partition",
        "name",
        "base",
        "next",
        "bytes",
        "records",
        "tombstones",
        "state",
    ]
    assert len(lines) == 1 + len(json_of("ls", closed)["files"])
    assert all(len(line.split()) == 8 for line in lines)


def test_tables_are_drawn_on_a_terminal(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    shown = run("ls", closed).output
    assert "━" in shown or "─" in shown
    assert max(map(len, click.unstyle(shown).splitlines())) <= 60


# -- verify --------------------------------------------------------------------------------------------------


def test_verify_says_sound_and_what_it_looked_at(closed: Path) -> None:
    done = run("verify", closed)
    assert done.exit_code == 0
    assert done.output.endswith("\nsound\n")
    found = json_of("verify", closed)
    assert (found["sound"], found["damages"]) == (True, [])
    assert found["checked"]["records"] == json_of("stats", closed)["totals"]["records"]


def test_verify_lists_every_damage_and_exits_with_4(closed: Path) -> None:
    flip(identity_of(closed), 60)
    flip(segment_of(closed), 500)
    (closed / "0" / "stray").write_bytes(b"")
    done = run("verify", closed)
    assert done.exit_code == 4
    assert f"damaged: {identity_of(closed)}, byte 0\n" in done.output
    assert re.search(re.escape(f"damaged: {segment_of(closed)}, bytes ") + r"\d+ to \d+\n", done.output)
    assert f"not named: {closed / '0' / 'stray'}" in done.output
    assert done.output.endswith("damaged in 2 places\n")
    found = json.loads(run("verify", closed, "--json").output)
    assert {d["path"] for d in found["damages"]} == {str(identity_of(closed)), str(segment_of(closed))}
    assert all(d["expected"] and d["found"] and d["position"] for d in found["damages"])
