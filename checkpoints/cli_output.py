"""How the `keyfold` command shows things, and what all its verbs have: PATH, `--json`, examples."""

from __future__ import annotations

import base64
import datetime
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click
from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from keyfold.statestore.errors import ConfigError
from keyfold.statestore.files import LOCAL, Files

Cell: TypeAlias = "str | int | float | bool | None"

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


@dataclass(frozen=True)
class Place:
    """What a verb works on, and how it answers. `given` is PATH as it was typed, which may be a URL."""

    path: Path
    files: Files
    as_json: bool
    given: str = ""

    def show(self, document: Callable[[], Any], text: Callable[[], None]) -> None:
        """One JSON document, or what `text` prints."""
        if self.as_json:
            click.echo(json.dumps(document(), indent=2))
        else:
            text()


def verb(*examples: str) -> Callable[[Callable[..., None]], click.Command]:
    """A verb of the command: the function gets a `Place` and the options declared below this decorator.

    Its docstring is the help, with these example commands behind it.
    """
    epilog = "\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples)

    def decorate(function: Callable[..., None]) -> click.Command:
        @click.command(name=function.__name__, help=function.__doc__, epilog=epilog)
        @click.argument("path")
        @click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
        @click.pass_context
        def run(context: click.Context, /, path: str, as_json: bool, **options: Any) -> None:
            try:
                function(Place(Path(path), context.find_object(Files) or LOCAL, as_json, path), **options)
            except OSError as e:
                if e.filename is None and not isinstance(e, BrokenPipeError):
                    e.filename = path  # a write to an open file does not say to which
                raise

        # click keeps the parameters of a function in an attribute until it is made a command.
        run.params += reversed(getattr(function, "__click_params__", []))
        return run

    return decorate


# -- tables --------------------------------------------------------------------------------------------------


def table(headings: Sequence[str], rows: Sequence[Sequence[Cell]], title: str = "") -> None:
    """Rows in a table on a terminal, elsewhere in columns two spaces apart; numbers stand to the right."""
    right = [_is_numeric([row[i] for row in rows]) for i in range(len(headings))]
    console = Console()
    cells = [[_cell(cell, grouped=console.is_terminal) for cell in row] for row in rows]
    if not console.is_terminal:
        if title:
            click.echo(f"\n{title}")
        _plain([list(headings), *cells], right)
        return
    drawn = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading, to_right in zip(headings, right, strict=True):
        drawn.add_column(heading, justify="right" if to_right else "left", overflow="fold")
    for row in cells:
        drawn.add_row(*(Text(cell) for cell in row))
    console.print(drawn)


def _is_numeric(cells: Sequence[Cell]) -> bool:
    found = [cell for cell in cells if cell is not None]
    return bool(found) and all(isinstance(cell, int | float) for cell in found)


def facts(pairs: Sequence[tuple[str, Cell]]) -> None:
    """One `name: value` per line."""
    width = max(len(name) for name, _ in pairs) + 2
    grouped = Console().is_terminal
    for name, value in pairs:
        click.echo(f"{name + ':':{width}}{_cell(value, grouped=grouped)}")


def _plain(rows: list[list[str]], right: Sequence[bool]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(right))]
    for row in rows:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        click.echo("  ".join(padded).rstrip())


def _cell(value: Cell, *, grouped: bool) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if grouped else str(value)
    if isinstance(value, float):
        return f"{value:.2f}"
    return printable(value)


# -- bytes, text and times -----------------------------------------------------------------------------------


def printable(text: str) -> str:
    """The text with what could move a terminal's cursor written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def text_of(data: bytes) -> str:
    """Bytes for the eye: as text where they are UTF-8, else in hexadecimal digits."""
    try:
        return printable(data.decode())
    except UnicodeDecodeError:
        return "0x" + data.hex()


def json_of(name: str, data: bytes | None) -> dict[str, str | None]:
    """Bytes in JSON: in the field `name` where they are UTF-8 (or null), else in `<name>_base64`."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def time_of(ms: int) -> str:
    """Milliseconds since 1970 as ISO 8601 in UTC; the number where Python has no such date."""
    try:
        moment = _EPOCH + datetime.timedelta(milliseconds=ms)
    except OverflowError:
        return f"{ms} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def time_from(text: str) -> datetime.datetime | None:
    """The moment that ISO 8601 text names, in UTC where it says nothing else; None for other text."""
    try:
        moment = datetime.datetime.fromisoformat(
            text.removesuffix("Z") + ("+00:00" if text.endswith("Z") else "")
        )
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.timezone.utc)


def settings_from(texts: Sequence[str]) -> dict[str, str]:
    """`name=value` texts as a mapping. Raises `ConfigError`."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(
                "A setting is changed by its name and its new value.", expected="--set name=value",
                found=repr(text), remedy="for example --set segment.bytes=64MiB",
            )  # fmt: skip
        found[name.strip()] = value.strip()
    return found


# -- long work -----------------------------------------------------------------------------------------------


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, if it is a terminal; gives a function of bytes done and bytes in all."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def on_terminal() -> bool:
    """Whether standard output goes to a person."""
    return sys.stdout.isatty()
