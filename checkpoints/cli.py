"""The `keyfold` command: look into a changelog, check it, fold it, copy its state out.

One module per group of verbs (`cli_inspect`, `cli_records`, `cli_change`, `cli_restore`), this one puts them
together and turns errors into messages and exit codes: 0 done, 1 damage, absence or a failure, 2 a wrong
argument, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import io
import sys
from typing import Any

import click
import pyarrow as pa

from keyfold.checkpoints import cli_change, cli_inspect, cli_records, cli_restore
from keyfold.statestore.errors import BadRecord, ConfigError, KeyfoldError, NotAChangelog

_WRONG_ARGUMENT = (ConfigError, NotAChangelog, BadRecord)


class _Keyfold(click.Group):
    """Says what went wrong in the words of the error, never in those of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyfoldError as e:
            _fail(ctx, str(e), 2 if isinstance(e, _WRONG_ARGUMENT) else 1)
        except OSError as e:
            if e.errno == errno.EPIPE:
                raise  # click ends quietly
            _fail(ctx, f"{e.strerror or e}" + (f"\n  path: {e.filename}" if e.filename else ""), 1)
        except (pa.ArrowException, MemoryError) as e:
            _fail(ctx, f"{type(e).__name__}: {e}", 1)
        except KeyboardInterrupt:
            ctx.exit(130)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they are of use, not in that of the alphabet."""
        return list(self.commands)


def _fail(context: click.Context, message: str, code: int) -> None:
    click.echo(click.style("error:", fg="red", bold=True) + f" {message}", err=True)
    context.exit(code)


@click.group(cls=_Keyfold, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="keyfold", message="keyfold %(version)s")
def cli() -> None:
    """Look into a changelog, check it, fold it, copy its state out.

    PATH is the changelog's directory. Everything but compact, config --set and anchor --add or --drop only
    reads, also beside a living writer, and changes nothing.
    """


for _verb in (*cli_inspect.VERBS, *cli_records.VERBS, *cli_change.VERBS, *cli_restore.VERBS):
    cli.add_command(_verb)


def main() -> None:
    """What the `keyfold` script calls."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="backslashreplace")
    cli(prog_name="keyfold")
