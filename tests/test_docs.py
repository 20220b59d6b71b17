"""Every code block of the README and of docs/ runs; and the machinery that runs them sees what is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

import keyfold
from keyfold import errors
from support import documents
from support.documents import (
    Block,
    DocumentError,
    blocks_of,
    broken_links,
    check,
    commands_of,
    missing_paths,
    output_matches,
)
from support.rules import FOLDERS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


WritePage: TypeAlias = Callable[[str], Path]


def run_pages(pages: Sequence[Path], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run pages as the tests do: a process of their own, in an empty directory, `keyfold` on the PATH."""
    directory.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "tests"),
    }
    return subprocess.run(
        [sys.executable, "-m", "support.documents", *map(str, pages)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1100,
    )


def run_page(page: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    return run_pages([page], directory)


WITH_SPARK = [page for page in PAGES if any(block.uses_spark() for block in blocks_of(page))]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.spark
def test_every_block_of_the_pages_with_spark_runs(tmp_path: Path) -> None:
    """In one process: a session takes longer to start than most pages take to run."""
    done = run_pages(WITH_SPARK, tmp_path / "work")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if page not in WITH_SPARK], ids=_name)
def test_every_block_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    done = run_page(page, tmp_path / "work")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=_name)
def test_every_link_and_path_of_the_page_leads_to_something(page: Path) -> None:
    assert broken_links(page) == []
    assert missing_paths(page) == []


def test_contributing_names_only_what_exists() -> None:
    assert missing_paths(ROOT / "CONTRIBUTING.md", every=True) == []


def test_contributing_knows_every_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    packages = {init.parent for folder in FOLDERS for init in (ROOT / folder).glob("*/__init__.py")}
    assert [name for name in sorted(map(_name, packages)) if f"`{name}/`" not in text] == []


def test_every_page_is_on_the_site() -> None:
    """`make docs` would say so too, but does not run here."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = set(re.findall(r": ([\w/-]+\.md)$", nav, re.MULTILINE))
    docs = ROOT / "docs"
    assert listed == {str(page.relative_to(docs)) for page in PAGES if page.is_relative_to(docs)}


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    listed = set(re.findall(r"^::: keyfold\.([\w.]+)$", text, re.MULTILINE))
    public = {name for name in keyfold.__all__ if not name.startswith("_")} - {"errors"}
    assert public - listed == {"open"}, "`open` is Changelog.open"
    assert {f"errors.{name}" for name in errors.__all__} <= listed


def test_the_readme_shows_python_and_commands() -> None:
    """An extraction that finds nothing would pass everything."""
    languages = {block.language for block in blocks_of(ROOT / "README.md")}
    assert "python" in languages
    assert languages & {"console", "bash"}


# -- the machinery --------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path: Path) -> WritePage:
    """Write a page of which `'''` stands for three backticks."""

    def page(text: str) -> Path:
        path = tmp_path / "page.md"
        path.write_text(text.replace("'''", "```"))
        return path

    return page


def test_python_blocks_share_a_namespace_and_run_in_order(write: WritePage, tmp_path: Path) -> None:
    page = write(
        "'''python\nx = 1\n'''\nwords\n'''text\nnot run(\n'''\n<!-- python\nx += 1\n-->\n"
        "- item\n  '''python\n  if x:\n      open('made', 'w').write(str(x))\n  '''\n"
    )
    done = run_page(page, tmp_path / "work")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "work" / "made").read_text() == "2"


def test_a_failing_block_is_reported_with_the_page_and_its_line(write: WritePage, tmp_path: Path) -> None:
    done = run_page(write("# title\n\n'''python\nx = 1\nassert x == 2\n'''\n"), tmp_path / "work")
    assert done.returncode != 0
    assert "page.md" in done.stderr
    assert "line 5" in done.stderr


def test_nothing_of_a_page_runs_when_a_block_has_no_rule(write: WritePage, tmp_path: Path) -> None:
    done = run_page(write("'''python\nopen('made', 'w')\n'''\n'''\nno language\n'''\n"), tmp_path / "work")
    assert "page.md:5: no rule for a block" in done.stderr
    assert list((tmp_path / "work").iterdir()) == []


def test_a_block_that_should_raise_fails_when_it_does_not(write: WritePage, tmp_path: Path) -> None:
    assert run_page(write("'''python raises=ZeroDivisionError\n1 / 0\n'''\n"), tmp_path / "a").returncode == 0
    assert run_page(write("'''python raises=ZeroDivisionError\n1 / 1\n'''\n"), tmp_path / "b").returncode != 0
    assert run_page(write("'''python raises=KeyError\n1 / 0\n'''\n"), tmp_path / "c").returncode != 0


def test_keyfold_commands_run_where_the_python_blocks_before_them_ran(
    write: WritePage, tmp_path: Path
) -> None:
    write_log = (
        "'''python\nimport pyarrow as pa\nfrom keyfold import Changelog\n"
        "with Changelog.open('var/log', partitions=1) as log:\n"
        "    log.append(pa.table({'key': [b'a'], 'value': [b'1']}), app_id='page', batch_id=0)\n'''\n"
    )
    good = run_page(
        write(write_log + "'''console\n$ keyfold stats var/log --json\n{...}\n'''\n"), tmp_path / "a"
    )
    assert good.returncode == 0, good.stdout + good.stderr
    assert run_page(write("'''bash\nkeyfold stats var/log\n'''\n"), tmp_path / "b").returncode != 0
    wrong = run_page(
        write(write_log + "'''console\n$ keyfold stats var/log --json\nno\n'''\n"), tmp_path / "c"
    )
    assert "printed otherwise" in wrong.stderr


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("", "x = 1"),
        ("java", "int x;"),
        ("python", "def"),
        ("console", "make test"),
        ("console", "$ make nonsense"),
        ("bash", "make test nonsense"),
        ("bash", "rm -r somewhere"),
        ("bash", "# only words"),
        ("bash", "pip install 'keyfold[nonsense]'"),
        ("bash", "python examples/nonsense.py"),
    ],
)
def test_what_no_rule_covers_is_an_error(language: str, text: str) -> None:
    with pytest.raises(DocumentError, match=r"^page\.md:7: "):
        check(Block(Path("page.md"), 7, language, text + "\n"))


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", "x = 1"),
        ("console", "$ make test ARGS=-x\nmany lines\n$ keyfold --version"),
        ("bash", "make demo   # everything\n"),
        ("bash", "pip install 'keyfold[spark]'"),
        ("json", "{"),
    ],
)
def test_what_a_rule_covers_passes(language: str, text: str) -> None:
    check(Block(Path("page.md"), 7, language, text + "\n"))


def test_a_block_that_needs_what_is_not_here_is_checked_and_not_run(write: WritePage, tmp_path: Path) -> None:
    """A page is run in a process of its own: here the jars of Spark's Kafka source are hidden from it."""
    hide = "from support import kafka_topics\nkafka_topics.connector_jars = lambda: ''\n"
    page = write(f"<!-- python\n{hide}-->\n'''python needs=kafka\n1 / 0\n'''\n")
    done = run_page(page, tmp_path / "work")
    assert done.returncode == 0, done.stderr
    with pytest.raises(DocumentError, match=r"^page\.md:2: not Python"):
        check(Block(Path("page.md"), 2, "python", "def", {"needs": "kafka"}))
    with pytest.raises(DocumentError, match="nothing is known of needs=redis"):
        check(Block(Path("page.md"), 2, "python", "x = 1", {"needs": "redis"}))


def test_links_and_paths_that_lead_nowhere_are_found(write: WritePage, tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A title, with a comma\n")
    page = write(
        "[a](there.md) [b](there.md#a-title-with-a-comma) [c](there.md#other) [d](gone.md) [e](https://f.org)\n"
        "`sink/base.py` `sink/b*.py` `sink/gone.py` `work/x` `gone.py` `make test`\n"
        "'''text\n`sink/never.py`\n'''\n"
    )
    assert broken_links(page) == ["there.md#other", "gone.md"]
    assert missing_paths(page) == ["sink/gone.py"]
    assert missing_paths(page, every=True) == ["sink/gone.py", "work/x", "gone.py"]


def test_pages_of_one_process_share_nothing_but_the_session(write: WritePage, tmp_path: Path) -> None:
    first = write("'''python\nx = 1\nopen('left', 'w').close()\n'''\n").rename(tmp_path / "first.md")
    second = write("'''python\nimport os\nassert os.listdir() == []\nassert 'x' not in globals()\n'''\n")
    done = run_pages([first, second], tmp_path / "work")
    assert done.returncode == 0, done.stderr
    bad = write("'''python\n1 / 0\n'''\n")
    assert run_pages([bad, first], tmp_path / "other").returncode == 1


def test_a_block_without_an_end_is_an_error(write: WritePage) -> None:
    with pytest.raises(DocumentError, match="no end"):
        blocks_of(write("'''python\nx = 1\n"))


def test_a_command_goes_on_after_a_backslash_and_has_its_output() -> None:
    block = Block(Path("page.md"), 1, "console", "$ keyfold ls \\\n> var\na\nb\n$ keyfold ls other\n")
    first, second = commands_of(block)
    assert (first.line, first.output, second.line) == ("keyfold ls var", "a\nb\n", "keyfold ls other")


@pytest.mark.parametrize(
    ("shown", "real", "same"),
    [
        ("a 12 b", "a 12 b\n", True),
        ("a ... b", "a 12 b  \n", True),
        ("a\n...\nd", "a\nb\nc\nd\n", True),
        ("a", "a\nb", False),
        ("a.c", "abc", False),
    ],
)
def test_shown_output_is_compared_with_dots_for_anything(shown: str, real: str, same: bool) -> None:
    assert output_matches(shown, real) is same


def test_the_makefile_has_the_targets_that_people_are_told_of() -> None:
    assert {
        "demo",
        "demo-kafka",
        "test",
        "lint",
        "types",
        "soak",
        "bench",
        "wheel",
        "docs",
        "clean",
        "help",
    } <= documents.make_targets()
