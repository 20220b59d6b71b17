"""The `keyfold` command: look into a changelog, check it, fold it, copy its state out.

One module per group of verbs (`cli.inspect`, `cli.records`, `cli.change`, `cli.restore`), loaded when one of
its verbs is called. This one turns errors into messages, or into JSON, and exit codes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import MutableMapping, Sequence
from importlib import import_module
from typing import Any, Final

import click

from keyfold.checkpoints.cli import exits
from keyfold.checkpoints.cli.exits import INTERRUPTED, PIPE_CLOSED, STORAGE, USAGE, Exit, output_failed
from keyfold.checkpoints.cli.main import importing
from keyfold.statestore.errors import KeyfoldError

#: Verb → the module that has it, and what it does; in the order in which they are of use.
VERBS: Final = {
    "stats": ("inspect", "Show what a changelog is and how full it is."),
    "ls": ("inspect", "List the segment files that count."),
    "verify": ("inspect", "Check every checksum of everything that counts."),
    "dump": ("records", "Print records in log order, partition by partition."),
    "get": ("records", "Print the last value of a key."),
    "tail": ("records", "Print the last records of each partition."),
    "compact": ("change", "Fold every partition now."),
    "anchor": ("change", "List the anchors, or add or drop one."),
    "snapshot": ("change", "Write a snapshot, or make a changelog of one."),
    "config": ("change", "Show the settings of a changelog, or change some."),
    "restore": ("restore", "Write the state, one row per key."),
}


class _Keyfold(click.Group):
    """Says what went wrong in the words of the error, never in those of a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        with importing():
            module = import_module(f"keyfold.checkpoints.cli.{VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, does) for name, (_, does) in VERBS.items()])

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> None:
        """Ends the process, whatever happens."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(words, prog_name, complete_var, standalone_mode=False, **extra)
        except SystemExit:
            if "PacifyFlushWrapper" not in type(sys.stdout).__name__:
                raise
            code = _pipe_closed()  # click has seen it, and keeps Python from writing to it once more
        except Exception as e:
            code = _told(e, as_json="--json" in words)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # click would write a line
            ctx.exit(INTERRUPTED.code)


def _told(error: Exception, *, as_json: bool) -> int:
    """Say what went wrong; the exit code. What is nobody's fault but this program's is raised again."""
    if isinstance(error, click.Abort):
        return INTERRUPTED.code
    if isinstance(error, OSError) and error.filename is None:
        error = output_failed(error.strerror or str(error))  # a verb names the path of every other one
    outcome = USAGE if isinstance(error, click.ClickException) else exits.exit_of(error)
    if outcome is None:
        raise error
    if as_json:
        click.echo(json.dumps({"error": {**_fields(error), "exit_code": outcome.code}}), err=True)
    elif isinstance(error, click.ClickException):
        error.show()
    else:
        click.echo(click.style("error:", fg="red", bold=True) + f" {_message(error, outcome)}", err=True)
    return outcome.code


def _pipe_closed() -> int:
    """End as other tools do, for whoever asks for the status of each part of a pipe."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    return PIPE_CLOSED.code


def _message(error: Exception, outcome: Exit) -> str:
    if isinstance(error, KeyfoldError):
        return str(error)
    fields = _fields(error)
    what = str(fields["what"]) if outcome is STORAGE else f"{fields['kind']}: {fields['what']}"
    return what + (f"\n  path: {fields['path']}" if fields["path"] else "")


def _fields(error: Exception) -> MutableMapping[str, str | None]:
    """An error as JSON has it: the same fields for every kind."""
    found: dict[str, str | None] = dict.fromkeys(("path", "position", "expected", "found", "remedy"))
    if isinstance(error, KeyfoldError):
        said = {name: getattr(error, name) for name in found}
        found |= {name: None if value is None else str(value) for name, value in said.items()}
        what = error.what
    elif isinstance(error, click.ClickException):
        what = error.format_message()
    elif isinstance(error, OSError):
        # Without a number, as pyarrow raises it, the text of one that names a file leaves its message out.
        what = error.strerror or " ".join(map(str, error.args)) or type(error).__name__
        found["path"] = None if error.filename is None else str(error.filename)
    else:
        what = str(error)
    return {"kind": type(error).__name__, "what": what, **found}


@click.group(
    cls=_Keyfold,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExit codes:\n" + exits.table(),
)
@click.version_option(package_name="keyfold", message="keyfold %(version)s")
def cli() -> None:
    """Look into a changelog, check it, fold it, copy its state out.

    PATH is the changelog's directory. Everything but compact, config --set and anchor --add or --drop only
    reads, also beside a living writer, and changes nothing.

    With --json an error is one JSON object on standard error: {"error": {"kind", "what", "path", "position",
    "expected", "found", "remedy", "exit_code"}}.
    """
