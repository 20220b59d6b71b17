"""A process that is not the writer asks the writer to compact, through files in `requests/`.

The asking process locks `requests/<id>.compact` and waits for `requests/<id>.answer`. An id that begins with
`full-` asks to fold the log from its start. The lock tells the writer whether the asking process still waits:
the request of a dead process is removed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from keyfold.checkpoints.log.reader_marks import new_lock
from keyfold.statestore import filenames
from keyfold.statestore.files import Files, OpenFile

#: Interval between looks for an answer, in seconds.
_LOOK_SECONDS: Final = 0.1
_FULL: Final = "full-"


class Request:
    """A request to compact, as a context manager. Leaving the context withdraws it."""

    def __init__(self, files: Files, root: Path, *, full: bool = False) -> None:
        self._files = files
        self._root = root
        self._prefix = _FULL if full else ""
        self._lock: OpenFile | None = None

    def __enter__(self) -> Request:
        self._files.make_directory(self._root / filenames.REQUESTS, below=self._root)
        identifier, self._lock = new_lock(
            self._files, lambda i: filenames.request(self._root, self._prefix + i)
        )
        self._answer = filenames.answer(self._root, self._prefix + identifier)
        return self

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """The writer's answer, or None if there is none within this many seconds."""
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(FileNotFoundError):
                found: dict[str, Any] = json.loads(self._files.read(self._answer))
                return found
            if time.monotonic() >= until:
                return None
            time.sleep(_LOOK_SECONDS)

    def __exit__(self, *error: object) -> None:
        # A process that was forked from the asking process has no lock.
        if self._lock is not None and self._lock.fd >= 0:
            for path in (self._lock.path, self._answer):
                with contextlib.suppress(OSError):
                    self._files.unlink(path)
            self._files.close(self._lock)


def open_requests(files: Files, root: Path) -> list[str]:
    """The ids of unanswered requests that a process waits for. Requests of dead processes are removed."""
    present = files.list_directory(root / filenames.REQUESTS)
    asked = [i for i in map(filenames.request_id, present) if i is not None]
    for answered in [i for i in map(filenames.answer_id, present) if i is not None]:
        if answered not in asked:
            _remove(files, filenames.answer(root, answered))
    return [i for i in asked if _is_waited_for(files, root, i) and f"{i}.answer" not in present]


def serve(files: Files, root: Path, request: str, compact: Callable[[bool], dict[str, Any]]) -> None:
    """Answer one request with the result of `compact`. Its argument: whether to fold from the log's start."""
    found = compact(request.startswith(_FULL))
    files.write_whole(filenames.answer(root, request), json.dumps(found).encode())


def _is_waited_for(files: Files, root: Path, request: str) -> bool:
    held = files.lock(filenames.request(root, request))
    if held is None:
        return True
    _remove(files, filenames.request(root, request))
    _remove(files, filenames.answer(root, request))
    files.close(held)
    return False


def _remove(files: Files, path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        files.unlink(path)
