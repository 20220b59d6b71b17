"""The entry point of the `keyfold` script. Ctrl-C ends it without a traceback from the start.

So this module imports very little. The command itself is in `cli.group`.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_INTERRUPTED = 130


def main() -> None:
    """Run the command and end the process with its exit code (see `cli.exits`)."""
    with importing():
        from keyfold.checkpoints.cli.group import cli
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        cli(prog_name="keyfold")
    except SystemExit as e:
        _leave(e.code if isinstance(e.code, int) else 0)
    except KeyboardInterrupt:
        _leave(_INTERRUPTED)


def _leave(code: int) -> None:
    """Exit. A failure of standard output was already reported; Python would report it again."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        os._exit(code)
    sys.exit(code)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Ctrl-C ends the process at once: an exception could be mistaken for a failed import."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # the parent process ignores or handles the signal
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)
