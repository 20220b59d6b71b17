"""What a process opens belongs to that process, not to a forked child.

A child has the memory of its parent and none of its threads. A lock that a thread held at the fork is held
for ever in the child. So every operation compares the process first, and only then waits for anything.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from keyfold.statestore.errors import ConfigError


class OwnProcess:
    """The process that opened something."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pid = os.getpid()

    def is_this(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises `ConfigError` in another process, such as a child forked by `multiprocessing`."""
        if not self.is_this():
            raise ConfigError(
                "This changelog was opened in another process. A forked process cannot use it.",
                path=self._path, expected=f"process {self._pid}", found=f"process {os.getpid()}",
                remedy="open it in the process that uses it; if another process writes, with mode=\"r\"",
            )  # fmt: skip


class ProcessLock:
    """A reentrant lock for the threads of one process, as a context manager. Raises in another process."""

    def __init__(self, process: OwnProcess) -> None:
        self._process = process
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._process.check()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        if self._process.is_this():
            self._lock.release()
