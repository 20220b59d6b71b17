"""The tree keeps its rules: who imports whom, who touches files, how long things get, what lies where."""

from __future__ import annotations

import ast
import os
import pkgutil
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from support.rules import (
    ENGINE,
    FLOORS,
    FOLDERS,
    Rule,
    bare_imports,
    code_from_data,
    helpless_errors,
    long_functions,
    reaches_through_the_door,
    room_of,
    touched_files,
    unidiomatic,
    wrong_directions,
)

ROOT = Path(__file__).resolve().parent.parent.parent

TOP_LEVEL = frozenset(
    {
        *FOLDERS,
        *("examples", "tests", "docs", "benchmarks"),
        *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "pyproject.toml"),
        *(".ci", ".gitignore", "MANIFEST.in", "mkdocs.yml", "src"),
    }
)

SEAMS = ("statestore/files.py", "statestore/remote_files.py")

#: What the rule about files would find elsewhere, and why it is right there.
ALLOWED: dict[tuple[str, str], str] = {
    ("checkpoints/restore/export.py", "import of pyarrow.parquet"): "writes to a file that `Files` opened",
    ("checkpoints/restore/export.py", "import of pyarrow.csv"): "writes to a file that `Files` opened",
    ("checkpoints/restore/dataset.py", "import of pyarrow.dataset"): "scans batches that `Files` has read",
    (
        "sink/offset_log.py",
        "call of self._system.exists",
    ): "Hadoop's file system: a checkpoint may lie anywhere",
}

#: About 400: what has one reason to change is not cut to fit.
FILE_LINES_MAX = 450
#: A suite of tests has one reason to change at more lines than code has.
TEST_LINES_MAX = 650
#: What users call is in one place, however much that is.
FACADES = ("checkpoints/changelog.py",)

# -- reading the tree ----------------------------------------------------------------------------------------


@cache
def tracked() -> tuple[str, ...]:
    """Files that git knows or would add: everything but what .gitignore names."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = listed.stdout.decode().split("\0")
    return tuple(sorted(n for n in names if n and os.path.lexists(ROOT / n)))


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(path for path in found if "__pycache__" not in path.parts)


PRODUCT = python_files(*FOLDERS)
EVERYTHING = python_files(*FOLDERS, "examples", "benchmarks", "tests")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


# -- the tree keeps them -------------------------------------------------------------------------------------


def _ids(path: Path) -> str:
    return name_of(path)


@pytest.mark.parametrize(
    "path", [path for path in PRODUCT if name_of(path) != "checkpoints/__init__.py"], ids=_ids
)
def test_rooms_import_downwards_only(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    assert list(wrong_directions(tree_of(path), room_of(module))) == []


@pytest.mark.parametrize("path", EVERYTHING, ids=_ids)
def test_rooms_are_imported_by_their_full_name(path: Path) -> None:
    assert list(bare_imports(tree_of(path))) == []


def _touched(path: Path) -> set[tuple[str, str]]:
    return {(name_of(path), found.partition(": ")[2]) for found in touched_files(tree_of(path))}


@pytest.mark.parametrize("path", [path for path in PRODUCT if name_of(path) not in SEAMS], ids=_ids)
def test_only_the_seam_touches_files(path: Path) -> None:
    assert _touched(path) - set(ALLOWED) == set()


@pytest.mark.parametrize("exception", ALLOWED, ids=str)
def test_every_exception_is_still_needed(exception: tuple[str, str]) -> None:
    assert exception in _touched(ROOT / exception[0])


@pytest.mark.parametrize("path", PRODUCT, ids=_ids)
def test_no_data_is_run_as_code(path: Path) -> None:
    assert list(code_from_data(tree_of(path))) == []


@pytest.mark.parametrize("path", PRODUCT, ids=_ids)
def test_every_error_says_what_to_do(path: Path) -> None:
    assert list(helpless_errors(tree_of(path))) == []


def _above_the_engine(path: Path) -> bool:
    (height,) = (n for n, floor in enumerate(FLOORS) if ENGINE in floor)
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return room_of(module) in {room for floor in FLOORS[height + 1 :] for room in floor}


ABOVE_THE_ENGINE = [path for path in PRODUCT if _above_the_engine(path)]


@pytest.mark.parametrize("path", ABOVE_THE_ENGINE, ids=_ids)
def test_there_is_one_door_to_the_writer(path: Path) -> None:
    assert list(reaches_through_the_door(tree_of(path))) == []


def test_sinks_and_streams_are_above_the_engine() -> None:
    above = {name_of(path).split("/")[0] for path in ABOVE_THE_ENGINE}
    assert above == {"checkpoints", "sink", "streaming"}


@pytest.mark.parametrize("path", PRODUCT, ids=_ids)
def test_sentences_read_as_a_native_writer_would_write_them(path: Path) -> None:
    assert list(unidiomatic(path.read_text())) == []


@pytest.mark.parametrize(
    "text", ["# made anew", 'f"the offsets behind the commit"', '"""X.\n\nso\n many.\n"""']
)
def test_a_translated_sentence_is_seen(text: str) -> None:
    assert list(unidiomatic(text)) != []


def test_a_word_in_code_or_of_lag_is_let_pass() -> None:
    assert list(unidiomatic('behind = 1\nx = "3 commits behind"\n')) == []


@pytest.mark.parametrize("path", EVERYTHING, ids=_ids)
def test_functions_fit_on_a_screen(path: Path) -> None:
    assert list(long_functions(tree_of(path))) == []


@pytest.mark.parametrize("path", EVERYTHING, ids=_ids)
def test_files_have_a_bounded_length(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    if name_of(path) not in FACADES:
        assert lines <= (TEST_LINES_MAX if path.name.startswith("test_") else FILE_LINES_MAX)


PACKAGES = sorted({str(path.parent.relative_to(ROOT)) for path in PRODUCT})


@pytest.mark.parametrize("package", PACKAGES)
def test_a_room_says_what_is_in_it_and_loads_nothing(package: str) -> None:
    """Spark's workers import the packages above the module that they need."""
    tree = tree_of(ROOT / package / "__init__.py")
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


def test_every_package_is_a_room_and_every_room_is_there() -> None:
    rooms = {room for floor in FLOORS for room in floor}
    packages = {package.replace("/", ".") for package in PACKAGES} - {"checkpoints"}
    assert packages <= rooms
    assert all((ROOT / room.replace(".", "/")).with_suffix(".py").is_file() for room in rooms - packages)


@pytest.mark.parametrize("folder", FOLDERS)
def test_tools_find_the_folders_under_their_import_name(folder: str) -> None:
    assert os.readlink(ROOT / "src" / "keyfold" / folder) == f"../../{folder}"


def test_spark_finds_the_data_source_of_an_editable_install_in_a_folder() -> None:
    """Spark lists folders on the path."""
    assert "pyspark_keyfold" in {info.name for info in pkgutil.iter_modules()}


def test_no_room_is_missing_here() -> None:
    """A new package at the top would escape every rule above."""
    with_python = {name.split("/")[0] for name in tracked() if name.endswith(".py") and "/" in name}
    assert with_python == {*FOLDERS, "src", "tests"} | (with_python & {"examples", "benchmarks", "docs"})


def test_the_top_level_holds_only_what_is_agreed() -> None:
    assert {name.split("/")[0] for name in tracked()} - TOP_LEVEL == set()


def test_nothing_is_left_to_be_done() -> None:
    mark = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK"]) + r")\b")
    found = [
        f"{name}:{number}"
        for name in tracked()
        if Path(name).suffix in (".py", ".md", ".toml", "") and (ROOT / name).is_file() and name != "LICENSE"
        for number, line in enumerate((ROOT / name).read_text(errors="replace").splitlines(), start=1)
        if mark.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("room", FOLDERS)
def test_a_bare_import_fails_where_tests_run(room: str) -> None:
    import importlib.util

    assert importlib.util.find_spec(room) is None
    assert importlib.util.find_spec(f"keyfold.{room}") is not None


# -- and the rules see what they should ----------------------------------------------------------------------


def _in_checkpoints(tree: ast.Module) -> Iterator[str]:
    return wrong_directions(tree, "checkpoints.cleaner")


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (_in_checkpoints, "import keyfold.sink"),
        (_in_checkpoints, "def f():\n    from keyfold.streaming import source"),
        (_in_checkpoints, "from keyfold import sink"),
        (_in_checkpoints, "import keyfold"),
        (_in_checkpoints, "from ..sink import x"),
        (_in_checkpoints, "from keyfold.checkpoints import engine"),
        (_in_checkpoints, "from keyfold.checkpoints.engine import Engine"),
        (_in_checkpoints, "from keyfold.checkpoints.snapshot import policy"),
        (_in_checkpoints, "from keyfold import checkpoints"),
        (_in_checkpoints, "if True:\n    from pyspark.sql import SparkSession"),
        (_in_checkpoints, "if TYPE_CHECKING:\n    pass\nelse:\n    from pyspark.sql import SparkSession"),
        (_in_checkpoints, "if TYPE_CHECKING:\n    from keyfold.sink import x"),
        (bare_imports, "import sink"),
        (bare_imports, "from statestore.files import Files"),
        (touched_files, "open('x')"),
        (touched_files, "import os\nos.rename(a, b)"),
        (touched_files, "import os\nmove = os.replace"),
        (touched_files, "import os\nos.path.exists(a)"),
        (touched_files, "from os import listdir"),
        (touched_files, "import shutil"),
        (touched_files, "path.read_bytes()"),
        (touched_files, "(root / 'x').unlink()"),
        (touched_files, "self.path.exists()"),
        (touched_files, "import pyarrow as pa\npa.memory_map('x')"),
        (code_from_data, "import pickle"),
        (code_from_data, "from cloudpickle import loads"),
        (code_from_data, "eval(text)"),
        (code_from_data, "from rocksdict import Options\nOptions()"),
        (code_from_data, "import rocksdict\nrocksdict.Options(raw_mode=False)"),
        (code_from_data, "from rocksdict import Rdict\nRdict('path')"),
        (helpless_errors, "raise errors.Damaged('x', path=p, found=1)"),
        (helpless_errors, "def f():\n    return ConfigError('x')"),
        (reaches_through_the_door, "with log.engine.writer.exclusive:\n    pass"),
        (reaches_through_the_door, "def f(engine):\n    return engine.writer"),
        (long_functions, "def f():\n" + "    x = 1\n" * 70),
    ],
)
def test_a_rule_sees_what_breaks_it(rule: Rule, text: str) -> None:
    assert list(rule(ast.parse(text))) != []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (
            _in_checkpoints,
            "from keyfold.statestore.files import Files\nfrom keyfold.checkpoints.manifest import state",
        ),
        (_in_checkpoints, "if TYPE_CHECKING:\n    from pyspark.sql import SparkSession"),
        (bare_imports, "from keyfold.sink import x\nimport sinking"),
        (touched_files, "import os\nos.getpid()\nos.path.realpath(a)\nos.environ.get('A')"),
        (touched_files, "self.files.exists(path)\nfiles.unlink(path)\n'a'.replace('a', 'b')\nLog.open(a)"),
        (code_from_data, "from rocksdict import Options, Rdict\nRdict(a, options=Options(raw_mode=True))"),
        (code_from_data, "Options()\nre.compile('a')"),
        (helpless_errors, "raise Damaged('x', remedy='y')\nraise Damaged('x', **fields)\nKeyError('x')"),
        (
            reaches_through_the_door,
            "from a.writer import b\nlog.engine.commit(parts, admit)\nwriter.commit()",
        ),
        (long_functions, "def f():\n" + "    x = 1\n" * 69),
    ],
)
def test_a_rule_lets_pass_what_keeps_it(rule: Rule, text: str) -> None:
    assert list(rule(ast.parse(text))) == []
