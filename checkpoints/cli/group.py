"""The `keyfold` command: inspect, verify, compact and restore a changelog.

Each group of commands is a module (`cli.inspect`, `cli.schema` and so on), which is loaded when one of
its commands is called. This module turns errors into messages or JSON, and exit codes.
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

#: Command → its module and its short help, in the order of the help text.
VERBS: Final = {
    "stats": ("inspect", "Show the identity, contents and size of a changelog."),
    "schema": ("schema", "Show the columns of a changelog, and how they changed."),
    "ls": ("inspect", "List the committed segment files."),
    "verify": ("inspect", "Verify all checksums."),
    "dump": ("records", "Print records in log order, partition by partition."),
    "get": ("records", "Print the last value of a key."),
    "tail": ("records", "Print the last records of each partition."),
    "compact": ("change", "Compact every partition now."),
    "anchor": ("change", "List the anchors, or add or drop one."),
    "snapshot": ("change", "Write a snapshot, or clone one to a changelog."),
    "config": ("change", "Show or change the settings of a changelog."),
    "restore": ("restore", "Write the state to a store or a file, one row per key."),
}


class _Keyfold(click.Group):
    """Reports errors as messages, never as tracebacks."""

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
        """List the commands without loading their modules."""
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
        """Run the command and end the process."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(words, prog_name, complete_var, standalone_mode=False, **extra)
        except SystemExit:
            if "PacifyFlushWrapper" not in type(sys.stdout).__name__:
                raise
            code = _pipe_closed()  # click has noticed, and keeps Python from writing to the pipe again
        except Exception as e:
            code = _told(e, as_json="--json" in words)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # click would print a line
            ctx.exit(INTERRUPTED.code)


def _told(error: Exception, *, as_json: bool) -> int:
    """Report an error and return the exit code. An error that is a bug is raised again."""
    if isinstance(error, click.Abort):
        return INTERRUPTED.code
    if isinstance(error, OSError) and error.filename is None:
        error = output_failed(error.strerror or str(error))  # commands set the path of any other OSError
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
    """End with the status that other tools have, for scripts that check each command of a pipeline."""
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
    """The fields of an error in JSON, the same for every kind."""
    found: dict[str, str | None] = dict.fromkeys(("path", "position", "expected", "found", "remedy"))
    if isinstance(error, KeyfoldError):
        said = {name: getattr(error, name) for name in found}
        found |= {name: None if value is None else str(value) for name, value in said.items()}
        what = error.what
    elif isinstance(error, click.ClickException):
        what = error.format_message()
    elif isinstance(error, OSError):
        # pyarrow raises errors without a number. If such an error names a file, its text omits the message.
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
    """Inspect, verify, compact and restore a changelog.

    PATH is the changelog's directory. Only compact, config --set, anchor --add and anchor --drop change the
    changelog. All other commands only read, even while another process is writing.

    With --json an error is one JSON object on standard error: {"error": {"kind", "what", "path", "position",
    "expected", "found", "remedy", "exit_code"}}.
    """
