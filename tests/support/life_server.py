"""Processes that live a life each, forked from one that has loaded all modules already.

    python -m support.life_server

Each line of its input is a seed, a path and a file to tell; it answers with the number of a process, and
with the process' exit code once that is over.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Final

from keyfold.statestore.files import LOCAL
from support.lived import Life

#: Of a life; more than elsewhere, so that most kills come before its end.
STEPS: Final = 40

_TESTS = Path(__file__).resolve().parent.parent


class LifeServer:
    """A context manager; one process at a time."""

    def __enter__(self) -> LifeServer:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "support.life_server"], cwd=_TESTS, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.communicate()

    def start(self, seed: int, path: Path, told: Path) -> int:
        """The number of a process that lives a life at `path`. The file `told` gets a line when it begins,
        and then the number of each step that is over.
        """
        assert self._server.stdin is not None
        print(f"{seed}\t{path}\t{told}", file=self._server.stdin, flush=True)
        return self._answer()

    def wait(self) -> int:
        """Its exit code once it is over; negative for a signal."""
        return self._answer()

    def _answer(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())


def live(seed: int, path: Path, told: Path) -> None:
    fd = os.open(told, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(fd, b"begun\n")
    Life(seed, STEPS).live(LOCAL, path, lambda step: os.write(fd, b"%d\n" % step))


def serve() -> None:
    for line in sys.stdin:
        seed, path, told = line.rstrip("\n").split("\t")
        pid = os.fork()
        if not pid:
            code = 1
            try:
                live(int(seed), Path(path), Path(told))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
