"""Runs the code blocks of a Markdown page, so that documentation cannot go stale.

    python      executed in order in one namespace; `spark` is there when a block names it
    console     lines after `$ ` are commands; lines below one are its output (`...` stands for anything)
    bash        every line is a command
    text, json, toml, sql, mermaid          shown, not run
    <!-- python … -->                       executed, not shown: what an example needs and no reader does

Words after the language: `raises=ConfigError` (the block must raise it), `exit=2` (the commands exit so),
`needs=kafka` (the block is run where the jars of a broker and of Spark's Kafka source are, elsewhere only
checked; that they are missing where Maven is at hand, the tests that need them tell).

Commands are run or checked by the first rule that fits: `keyfold …` is run; `make …` must name targets of
the Makefile; `pip install …` must name extras of this project; `python FILE` must name a file of the
repository. Anything else, and a block without a language, is an error: nothing is passed over in silence.

The pages of one process share a Spark session. Each begins with a namespace of its own and an empty working
directory: what the page before has written is removed. The process starts in that directory, and with it the
JVM, because Spark resolves relative paths by the JVM's working directory, which `os.chdir` does not change.

Links and paths are checked too: see `broken_links` and `missing_paths`.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parent.parent.parent
NOT_RUN = frozenset({"text", "json", "toml", "sql", "mermaid"})
COMMAND_SECONDS_MAX = 300

Namespace: TypeAlias = dict[str, object]


class DocumentError(Exception):
    """A block that fails, or that no rule covers. The message begins with the page and line."""


@dataclass(frozen=True)
class Block:
    """A fenced block. `line` is that of its first line of text, counted from 1."""

    path: Path
    line: int
    language: str
    text: str
    options: dict[str, str] = field(default_factory=dict)

    def error(self, what: str) -> DocumentError:
        return DocumentError(f"{self.path.name}:{self.line}: {what}")

    def uses_spark(self) -> bool:
        """Whether a python block names `spark`."""
        if self.language != "python":
            return False
        return any(isinstance(n, ast.Name) and n.id == "spark" for n in ast.walk(ast.parse(self.text)))


@dataclass(frozen=True)
class Command:
    """One command of a console or bash block, with the output shown below it."""

    line: str
    output: str


_OPEN = re.compile(r"^(?P<indent>\s*)(?P<fence>```+|~~~+|<!--(?= python\b))[ ]*(?P<info>.*)$")


def blocks_of(path: Path) -> list[Block]:
    """The blocks of a page in order, hidden ones included."""
    return list(_blocks(path, iter(enumerate(path.read_text().splitlines(), start=1))))


def _blocks(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[Block]:
    for number, line in lines:
        opening = _OPEN.match(line)
        if opening is None:
            continue
        end = "-->" if opening["fence"] == "<!--" else opening["fence"]
        language, _, rest = opening["info"].strip().partition(" ")
        body = []
        for _, inner in lines:
            if inner.strip() == end:
                break
            body.append(inner.removeprefix(opening["indent"]))
        else:
            raise DocumentError(f"{path.name}:{number}: the block has no end")
        options = dict(word.split("=", 1) for word in rest.split() if "=" in word)
        yield Block(path, number + 1, language, "\n".join(body) + "\n", options)


def commands_of(block: Block) -> list[Command]:
    """The commands of a console or bash block; a line that ends in a backslash goes on in the next one."""
    commands: list[Command] = []
    lines = iter(block.text.splitlines())
    for line in lines:
        if block.language == "console" and not line.startswith("$ "):
            if not commands:
                raise block.error("a console block begins with a command, after '$ '")
            commands[-1] = Command(commands[-1].line, commands[-1].output + line + "\n")
            continue
        command = line.removeprefix("$ ") if block.language == "console" else line
        while command.endswith("\\"):
            command = command[:-1] + next(lines, "").removeprefix("> ")
        if command.strip() and not command.lstrip().startswith("#"):
            commands.append(Command(command.strip(), ""))
    if not commands:
        raise block.error("no command in this block")
    return commands


def make_targets(makefile: Path = ROOT / "Makefile") -> set[str]:
    """The names that stand before a colon at the beginning of a line."""
    names = re.findall(r"^([a-z][a-z-]*(?: [a-z][a-z-]*)*):(?!=)", makefile.read_text(), re.MULTILINE)
    return {name for group in names for name in group.split()}


def _extras() -> set[str]:
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    return set(re.findall(r"^([a-z]+) = \[", section.partition("\n[")[0], re.MULTILINE))


def check_command(block: Block, command: Command) -> None:
    """Raise `DocumentError` for a command that no rule covers, or that names what does not exist."""
    words = shlex.split(command.line, comments=True)
    if words[0] == "keyfold":
        return
    if words[0] == "make":
        unknown = [w for w in words[1:] if "=" not in w and not w.startswith("-") and w not in make_targets()]
    elif words[:2] == ["pip", "install"]:
        named = re.findall(r"(?:keyfold|\.)\[([^]]*)\]", command.line)
        unknown = [e for group in named for e in re.split(r"\s*,\s*", group) if e not in _extras()]
    elif words[0] == "python" and len(words) > 1 and words[1].endswith(".py"):
        unknown = [] if (ROOT / words[1]).is_file() else [words[1]]
    else:
        raise block.error(f"no rule runs or checks the command '{command.line}'")
    if unknown:
        raise block.error(f"'{command.line}' names what does not exist: {', '.join(unknown)}")


def check(block: Block) -> None:
    """Raise `DocumentError` for a block that no rule covers, without running it."""
    if block.language in NOT_RUN:
        return
    if block.options.get("needs", "kafka") != "kafka":
        raise block.error(f"nothing is known of needs={block.options['needs']}")
    if block.language == "python":
        try:
            ast.parse(block.text)
        except SyntaxError as error:
            raise block.error(f"not Python: {error}") from error
    elif block.language in ("console", "bash"):
        for command in commands_of(block):
            check_command(block, command)
    else:
        known = ", ".join(["python", "console", "bash", *sorted(NOT_RUN)])
        raise block.error(f"no rule for a block of language '{block.language}'; known are {known}")


def output_matches(shown: str, real: str) -> bool:
    """Whether `real` is `shown`, where `...` stands for anything. Space at the ends of lines is nothing."""
    tidy = ["\n".join(line.rstrip() for line in text.strip().splitlines()) for text in (shown, real)]
    pattern = ".*".join(re.escape(part) for part in re.split(r"\.\.\.|…", tidy[0]))
    return re.fullmatch(pattern, tidy[1], re.DOTALL) is not None


def run_python(block: Block, namespace: Namespace) -> None:
    """Execute the block; tracebacks show the page's own lines."""
    code = compile("\n" * (block.line - 1) + block.text, str(block.path), "exec")
    wanted = block.options.get("raises")
    try:
        exec(code, namespace)
    except Exception as error:
        if type(error).__name__ != wanted:
            raise
    else:
        if wanted is not None:
            raise block.error(f"the block should raise {wanted}, and did not")


def run_command(block: Block, command: Command) -> None:
    """Run a `keyfold` command with the shell and compare exit status and, if shown, output."""
    if not command.line.startswith("keyfold"):
        return
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command.line],
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS_MAX,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
    )
    wanted = int(block.options.get("exit", "0"))
    if done.returncode != wanted:
        raise block.error(
            f"'{command.line}' exited {done.returncode}, not {wanted}:\n{done.stdout}{done.stderr}"
        )
    if command.output.strip() and not output_matches(command.output, done.stdout):
        raise block.error(f"'{command.line}' printed otherwise than shown:\n{done.stdout}")


def _lacks(block: Block) -> bool:
    """Whether what the block needs is not here."""
    if "needs" not in block.options:
        return False
    from support.kafka_topics import unavailable

    return unavailable() is not None


def run(path: Path, spark: SparkSession | None = None) -> None:
    """Check all blocks of a page, then run them in the current directory."""
    blocks = blocks_of(path)
    for block in blocks:
        check(block)
    namespace: Namespace = {"__name__": "__main__"}
    if spark is not None:
        namespace["spark"] = spark
    try:
        for block in blocks:
            if _lacks(block):
                continue
            if block.language == "python":
                run_python(block, namespace)
            elif block.language in ("console", "bash"):
                for command in commands_of(block):
                    run_command(block, command)
    finally:
        if spark is not None:
            for query in spark.streams.active:
                query.stop()


def run_all(pages: Sequence[Path]) -> list[Path]:
    """Run the pages one after the other. Returns those that failed; their tracebacks go to standard error."""
    failed: list[Path] = []
    session: SparkSession | None = None
    if any(block.uses_spark() for page in pages for block in blocks_of(page)):
        # Imported only here: most pages need no Spark, and the import takes a second.
        from support.session import spark_session

        session = spark_session(Path.cwd().with_name(Path.cwd().name + "-spark"))
    try:
        for page in pages:
            try:
                run(page, session)
            except Exception:
                traceback.print_exc()
                failed.append(page)
            if page != pages[-1]:
                _empty(Path.cwd())
    finally:
        if session is not None:
            session.stop()
    return failed


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


# -- links and paths ------------------------------------------------------------------------------

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.*-]+(/[\w.*-]+)*/?")
_SUFFIXES = (".py", ".md", ".toml", ".yml", ".java", ".sh")


def _prose(path: Path) -> str:
    """A page without its blocks."""
    text, inside = [], False
    for line in path.read_text().splitlines():
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            text.append(line)
    return "\n".join(text)


def _anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", _prose(path), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken_links(path: Path) -> list[str]:
    """The links of a page to files or headings that do not exist. Links to other hosts are not checked."""
    broken = []
    for link in _LINK.findall(_prose(path)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    return broken


def missing_paths(path: Path, *, every: bool = False) -> list[str]:
    """The paths in backticks that the repository does not have; `*` matches anything.

    Args:
        every: check everything that looks like a path, not only what begins with a folder of the repository.
    """
    missing = []
    for code in _CODE.findall(_prose(path)):
        if _PATH.fullmatch(code) is None:
            continue
        inside = "/" in code and (ROOT / code.split("/")[0]).is_dir()
        if (inside or (every and ("/" in code or code.endswith(_SUFFIXES)))) and not any(ROOT.glob(code)):
            missing.append(code)
    return missing


if __name__ == "__main__":
    sys.exit(1 if run_all([Path(page) for page in sys.argv[1:]]) else 0)
