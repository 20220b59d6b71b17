"""Output of the `keyfold` command, and what all its commands share: PATH, `--json`, examples."""

from __future__ import annotations

import base64
import datetime
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from keyfold.checkpoints.cli.exits import output_failed
from keyfold.checkpoints.cli.tables import printable
from keyfold.checkpoints.log.recovery import lost
from keyfold.statestore.errors import ConfigError, ViewExpired
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.paths import local_path, remote_scheme, without_secrets
from keyfold.statestore.remote_files import located

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


@dataclass(frozen=True)
class Target:
    """The input of a command, and the form of its output.

    Attributes:
        path: A path in `files`; a local path is absolute.
        given: PATH as typed, which may be a URL.
        local: The local file system, for output files.
    """

    path: Path
    files: Files
    as_json: bool
    given: str = ""
    local: Files = LOCAL

    def show(self, document: Callable[[], Any], text: Callable[[], None]) -> None:
        """Print one JSON document, or call `text` to print text."""
        if self.as_json:
            out(json.dumps(document(), indent=2))
        else:
            text()


class LocalPath(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """An absolute local path. With `dash`, also `-`, unchanged."""

    name = "path"

    def __init__(self, *, dash: bool = False) -> None:
        self._dash = dash

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return Path(value) if self._dash and value == "-" else local_path(value)


def verb(
    *examples: str, writes: Callable[[Mapping[str, Any]], object] = lambda options: False
) -> Callable[[Callable[..., None]], click.Command]:
    """Declare a command. The function gets a `Target` and the options declared below this decorator.

    Its docstring is the help, followed by these examples. If one of the options in `writes` is given, a URL
    is refused before the remote store is accessed.
    """
    epilog = "\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples)
    epilog += "\n\nExit codes: see keyfold --help."

    def decorate(function: Callable[..., None]) -> click.Command:
        @click.command(name=function.__name__, help=function.__doc__, epilog=epilog)
        @click.argument("path")
        @click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
        @click.pass_context
        def run(context: click.Context, /, path: str, as_json: bool, **options: Any) -> None:
            local = context.find_object(Files) or LOCAL
            try:
                if writes(options):
                    _check_local(path)
                files, root = located(path, None, local)
                try:
                    function(Target(root, files, as_json, path, local), **options)
                except ViewExpired as e:
                    raise lost(files, root, e) or e from e
            except OSError as e:
                if e.filename is None and not isinstance(e, BrokenPipeError):
                    e.filename = path  # an error of a write to an open file has no file name
                raise

        # click keeps the parameters of a function in an attribute until it becomes a command.
        run.params += reversed(getattr(function, "__click_params__", []))
        return run

    return decorate


def _check_local(path: str) -> None:
    scheme = remote_scheme(path)
    if scheme is not None:
        raise ConfigError(
            "Only a changelog on a local disk can be changed.", path=without_secrets(path),
            expected="a local directory", found=f"a URL with {scheme}:",
            remedy="clone the remote snapshot to a changelog with keyfold snapshot URL --clone-to DIR",
        )  # fmt: skip


# -- bytes, text and times -----------------------------------------------------------------------------------


def text_of(data: bytes) -> str:
    """Bytes for people: as text if they are UTF-8, otherwise in hexadecimal."""
    try:
        return printable(data.decode())
    except UnicodeDecodeError:
        return "0x" + data.hex()


def json_of(name: str, data: bytes | None) -> dict[str, str | None]:
    """Bytes in JSON: in the field `name` if they are UTF-8 (or null), otherwise in `<name>_base64`."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def time_of(ms: int) -> str:
    """Milliseconds since 1970 as ISO 8601 in UTC, or as a number if Python cannot represent the date."""
    try:
        moment = _EPOCH + datetime.timedelta(milliseconds=ms)
    except OverflowError:
        return f"{ms} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def time_from(text: str) -> datetime.datetime | None:
    """The time given as ISO 8601 text, in UTC by default; None for other text."""
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
                "--set needs a name and a value.", expected="--set name=value",
                found=repr(text), remedy="write for example --set segment.bytes=64MiB",
            )  # fmt: skip
        found[name.strip()] = value.strip()
    return found


# -- output and long work ------------------------------------------------------------------------------------


def out(text: str = "") -> None:
    """Print a line of text.

    Raises:
        OutputFailed: Standard output cannot be written.
        BrokenPipeError: The reader closed the pipe.
    """
    if sys.stdout is None:
        raise output_failed("standard output is closed")
    try:
        click.echo(text)
    except BrokenPipeError:
        raise
    except OSError as e:
        raise output_failed(e.strerror or str(e)) from e


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, if it is a terminal. Yields a function of done and total bytes."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)
