"""How the command ends: one clear error for every verb wherever it is pointed, a code for each outcome."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from keyfold import Changelog
from keyfold.checkpoints.cli import exits
from keyfold.checkpoints.cli.group import VERBS, cli
from keyfold.statestore import errors
from keyfold.statestore.errors import KeyfoldError
from support.changelogs import BY_HAND, KEYFOLD, Living, flip, identity_of, make_closed, rows, segment_of

#: Each verb, with what makes it write where it can.
CALLS: dict[str, list[str]] = {
    "stats": ["stats", "{path}"],
    "ls": ["ls", "{path}"],
    "verify": ["verify", "{path}"],
    "dump": ["dump", "{path}"],
    "get": ["get", "{path}", "k10"],
    "tail": ["tail", "{path}"],
    "compact": ["compact", "{path}"],
    "anchor": ["anchor", "{path}"],
    "anchor --add": ["anchor", "{path}", "--add", "x"],
    "anchor --drop": ["anchor", "{path}", "--drop", "first"],
    "config": ["config", "{path}"],
    "config --set": ["config", "{path}", "--set", "anchors.auto=9"],
    "restore": ["restore", "{path}", "--to", "{tmp}/out.parquet"],
    "restore to a store": ["restore", "{path}", "--to", "{tmp}/out"],
    "restore to -": ["restore", "{path}", "--to", "-"],
    "snapshot": ["snapshot", "{path}", "--to", "{tmp}/snapshot"],
    "clone": ["snapshot", "{path}", "--clone-to", "{tmp}/clone"],
}
WRITING = ("compact", "anchor --add", "anchor --drop", "config --set")


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=True)


def words_of(call: str, path: Path, tmp: Path) -> list[str]:
    return [word.format(path=path, tmp=tmp) for word in CALLS[call]]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("places")
    closed = make_closed(root / "closed")
    with Changelog.open(closed, mode="r") as log:
        log.snapshot(root / "snapshot")
    (root / "file").write_bytes(b"text")
    (root / "empty").mkdir()
    (root / "foreign").mkdir()
    (root / "foreign" / "other.txt").write_bytes(b"text")
    for name in ("bad identity", "bad segment", "bad head", "no journal"):
        shutil.copytree(closed, root / name)
    flip(identity_of(root / "bad identity"), 60)
    for segment in (root / "bad segment").glob("*/*.arrows"):
        flip(segment, segment.stat().st_size // 2)
    for head in (root / "bad head" / "manifest").glob("*.head"):
        head.write_bytes(b"x" * 128)
    shutil.rmtree(root / "no journal" / "manifest")
    return root


#: Place → code of every call, or code for the calls named.
EXPECTED: dict[str, dict[str, int]] = {
    "missing": {"": 3},
    "file": {"": 3},
    "empty": {"": 3},
    "foreign": {"": 3},
    "file/below": {"": 3},
    "bad identity": {"": 4},
    # Who opens to write recovers from it.
    "bad head": {"": 4, "config": 0} | dict.fromkeys(WRITING[1:], 0),
    "no journal": {"": 4, "config": 0} | dict.fromkeys(WRITING[1:], 4),
    # Only what reads records can see it.
    "bad segment": {"": 4}
    | dict.fromkeys(("stats", "ls", "anchor", "config", *WRITING[1:]), 0)
    | {"clone": 3},
    "snapshot": {"": 0} | dict.fromkeys(WRITING, 2),
    "closed": {"": 0, "clone": 3},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("place", EXPECTED)
def test_every_verb_ends_with_one_clear_error_wherever_it_is_pointed(
    place: str, call: str, places: Path, tmp_path: Path
) -> None:
    path = places / place
    if path.is_dir():  # some calls write
        path = Path(shutil.copytree(path, tmp_path / "there"))
    code = EXPECTED[place].get(call, EXPECTED[place][""])
    for words in (words_of(call, path, tmp_path), [*words_of(call, path, tmp_path), "--json"]):
        if code == 0 and "--json" in words:
            continue  # done already, and some cannot be done twice
        done = run(*words)
        assert done.exit_code == code, done.output
        assert "Traceback" not in done.output
        assert done.exception is None or isinstance(done.exception, SystemExit)
        if code == 0 or (call == "verify" and code == 4):
            continue
        if "--json" in words:
            error = json.loads(done.stderr)["error"]
            assert error["exit_code"] == code
            assert error["what"]
            assert error["remedy"]
        else:
            assert done.stderr.count("error:") == 1
            assert "what to do:" in done.stderr
    assert not (tmp_path / "out.parquet").exists() or code == 0


@pytest.mark.parametrize("call", CALLS)
def test_every_verb_beside_a_living_writer_works_or_says_who_holds_it(call: str, tmp_path: Path) -> None:
    with Living(tmp_path / "log") as living:
        living.append("k10", "1")
        done = run(*words_of(call, living.path, tmp_path))
    if call in WRITING:
        assert done.exit_code == 5
        assert f"pid {living.pid}" in done.stderr
    elif call == "clone":
        assert done.exit_code == 3
    else:
        assert done.exit_code == 0, done.output


_AS_NOBODY = """
import importlib, json, os, sys
from keyfold.checkpoints.cli.group import VERBS, cli
for module, _ in VERBS.values():
    importlib.import_module(f"keyfold.checkpoints.cli.{module}")
if os.geteuid() == 0:
    os.seteuid(65534)
for words in json.loads(sys.argv[1]):
    try:
        cli(words)
    except SystemExit as e:
        print(json.dumps([words, e.code]), flush=True)
"""


@pytest.mark.parametrize("hidden", ["", "manifest", "changelog.json", "0"])
def test_every_verb_without_permission_ends_with_one_clear_error(
    hidden: str, places: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(places / "closed", tmp_path / "log"))
    (tmp_path / "log" / hidden).chmod(0)
    calls = [words_of(call, root, tmp_path) for call in CALLS]
    done = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, json.dumps(calls)], capture_output=True, text=True, timeout=300
    )
    (tmp_path / "log" / hidden).chmod(0o755)
    assert "Traceback" not in done.stderr, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert len(ends) == len(CALLS), done.stderr
    for words, code in ends:
        reads_segments = words[0] not in ("stats", "ls", "anchor", "config", "compact")
        if hidden != "0" or reads_segments:
            assert code in (3, 4, 7), (words, code, done.stderr)


# -- the table of codes --------------------------------------------------------------------------------------


def test_every_outcome_has_a_code_of_its_own_and_every_error_an_outcome() -> None:
    codes = [outcome.code for outcome in exits.EXITS]
    assert codes == sorted(set(codes))
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KeyfoldError)
    ]
    assert len(kinds) > 10
    for kind in kinds:
        found = exits.exit_of(kind("x"))
        assert found is not None
        assert found.code not in (0, 1, 130, 141)
    by_name = {name: exits.exit_of(getattr(errors, name)("x")) for name in ("Damaged", "CompactedAway")}
    assert {name: outcome and outcome.code for name, outcome in by_name.items()} == {
        "Damaged": 4, "CompactedAway": 6,
    }  # fmt: skip
    assert exits.exit_of(ZeroDivisionError()) is None


def test_the_codes_are_in_the_help() -> None:
    shown = run("--help").output
    for outcome in exits.EXITS:
        assert re.search(rf"^ +{outcome.code}  {re.escape(outcome.meaning)}$", shown, re.MULTILINE)
    for verb, (_, does) in VERBS.items():
        assert "keyfold --help" in run(verb, "--help").output
        assert does in shown


def test_a_missing_key_is_no_damage(places: Path) -> None:
    done = run("get", places / "closed", "nothing")
    assert (done.exit_code, done.stderr) == (1, "the key has no value\n")
    assert run("get", places / "bad segment", "k10").exit_code == 4


@pytest.mark.parametrize("kind", ["arrows", "index"])
@pytest.mark.parametrize("call", ["dump", "get", "tail", "compact --full", "restore --to out.parquet"])
def test_a_lost_file_is_damage_and_told_once(
    call: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_closed(tmp_path / "log")
    for lost in root.glob(f"*/*.{kind}"):
        lost.unlink()
    verb, *options = call.split()
    key = ["k10"] if verb == "get" else []
    monkeypatch.chdir(tmp_path)
    done = run(verb, root, *key, *options)
    assert done.exit_code == exits.DAMAGED.code, done.output
    assert "A file that the manifest names is missing." in done.output
    assert not [r for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")]


def test_python_runs_the_command_as_a_module(places: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "keyfold", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[0]) == (0, "keyfold")


@pytest.mark.parametrize(
    "words", [["nothing"], ["stats"], ["get", "."], ["dump", ".", "--limit", "-1"], ["ls", ".", "--what"]]
)
def test_a_wrong_use_is_told_in_json_too(words: list[str]) -> None:
    assert run(*words).exit_code == 2
    done = run(*words, "--json")
    assert done.exit_code == 2
    assert json.loads(done.stderr)["error"]["exit_code"] == 2


# -- standard output, pipes, Ctrl-C --------------------------------------------------------------------------

_FULL = Path("/dev/full")


@pytest.mark.skipif(not _FULL.exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], *([*call] for call in (["stats"], ["dump"], ["ls"]))]
)
def test_a_full_standard_output_is_what_the_error_names(words: list[str], places: Path) -> None:
    path = [] if words[0].startswith("-") else [str(places / "closed")]
    with _FULL.open("w") as full:
        done = subprocess.run(
            [KEYFOLD, *words, *path], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 7
    assert done.stderr.startswith("error: Cannot write to standard output.\n")
    assert "places" not in done.stderr


@pytest.mark.parametrize("error", [OSError("no such host"), OSError(-2, "no such host")])
def test_a_url_that_cannot_be_reached_is_what_the_error_names(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> None:
        raise error

    monkeypatch.setattr("keyfold.checkpoints.cli.output.located", unreachable)
    done = CliRunner().invoke(cli, ["stats", "s3://bucket/counts"])
    assert done.exit_code == 7
    assert done.stderr == "error: no such host\n  path: s3://bucket/counts\n"


def test_a_closed_standard_output_is_an_error(places: Path) -> None:
    words = f"{KEYFOLD} stats {places / 'closed'} >&-"
    done = subprocess.run(["sh", "-c", words], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, "Cannot write to standard output." in done.stderr) == (7, True)


@pytest.mark.parametrize("words", ["--help", "dump {path}", "restore {path} --to -", "stats {path} --json"])
def test_a_reader_that_leaves_ends_it_as_it_ends_other_tools(words: str, places: Path) -> None:
    command = f"{KEYFOLD} {words.format(path=places / 'closed')} | :; exit ${{PIPESTATUS[0]}}"
    for _ in range(3):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        assert done.returncode in (0, 141)  # it may have written before the reader left
        assert done.stderr == ""


_INTERRUPTED_IN = """
import os, signal, sys
module = sys.argv[1]
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from keyfold.checkpoints.cli.main import main
sys.argv = ["keyfold", *sys.argv[2:]]
main()
"""


@pytest.mark.parametrize(
    "module",
    ["click", "json", "keyfold.statestore.errors", "keyfold.checkpoints.cli.group", "pyarrow", "numpy",
     "keyfold.checkpoints.cli.inspect", "keyfold.checkpoints.changelog", "pyarrow.lib", "rocksdict"],
)  # fmt: skip
def test_ctrl_c_while_modules_are_loaded_ends_it_quietly(module: str, places: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_IN, module, "stats", str(places / "closed")],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stderr) == (130, "")


# -- what it loads -------------------------------------------------------------------------------------------


def loaded_by(*words: object, env: dict[str, str] | None = None) -> set[str]:
    script = (
        "import sys\nfrom keyfold.checkpoints.cli.group import cli\n"
        "try:\n    cli(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('loaded:', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(env or {})},
    )
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.rpartition("loaded:")[2].split()}


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["nothing"]])
def test_what_needs_no_changelog_loads_nothing_heavy(words: list[str]) -> None:
    assert not loaded_by(*words) & {"pyarrow", "numpy", "rocksdict", "rich", "pandas", "xxhash"}


@pytest.mark.parametrize("call", ["stats", "ls", "verify", "dump", "anchor", "config", "restore"])
@pytest.mark.parametrize("drawn", [False, True])
def test_rich_is_loaded_only_where_a_bar_is_drawn(
    call: str, drawn: bool, places: Path, tmp_path: Path
) -> None:
    env = {"FORCE_COLOR": "1"} if drawn and call != "restore" else {}
    assert "rich" not in loaded_by(*words_of(call, places / "closed", tmp_path), env=env)


def test_the_public_names_of_the_room_are_no_modules() -> None:
    script = (
        "import keyfold.checkpoints.changelog, keyfold.checkpoints.restore.restore\n"
        "import keyfold.checkpoints.resume.resume\n"
        "from keyfold import restore, resume, Changelog\n"
        "import keyfold as room\n"
        "assert callable(restore) and callable(resume) and room.restore is restore\n"
        "assert all(hasattr(room, name) for name in room.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# -- restore to standard output, tail of a snapshot ----------------------------------------------------------


def test_restore_to_a_dash_prints_a_line_of_json_per_key(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with Changelog.open(tmp_path / "log", partitions=2, config=BY_HAND) as log:
        log.append(rows(*((f"k{i}", f"{i}") for i in range(2_500)), ("k0", None)))
    for more in ([], ["--json"]):
        done = run("restore", "log", "--to", "-", *more)
        assert done.exit_code == 0
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert {line["key"]: line["value"] for line in lines} == {f"k{i}": f"{i}" for i in range(1, 2_500)}
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


@pytest.fixture
def following(places: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [KEYFOLD, "tail", "-f", str(places / "snapshot")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def test_following_a_snapshot_ends_and_says_that_it_never_grows(following: subprocess.Popen[str]) -> None:
    out, err = following.communicate(timeout=60)
    assert following.returncode == 0
    assert "k14" in out
    assert "never grows" in err


def test_a_file_that_takes_no_more_is_what_the_error_names(places: Path, tmp_path: Path) -> None:
    if not _FULL.exists():
        pytest.skip("no /dev/full")
    done = run("restore", places / "closed", "--to", tmp_path / "no" / "x.csv")
    assert done.exit_code == 7
    assert f"path: {tmp_path / 'no'}" in done.stderr


def test_segments_exist_for_the_damage(places: Path) -> None:
    """Otherwise the table above would not mean what it says."""
    assert segment_of(places / "bad segment").stat().st_size > 0
