"""Leases in Spark: one for each planner, kept alive by the planner and by the tasks that read its view.

A lease only keeps the cleaner from deleting files. It is not needed for correct results: no file name is
ever used twice, and a missing file raises an error. So if no lease can be written (a read-only medium, a full
disk), reading continues without one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from keyfold.checkpoints.log.reader_marks import ViewLock, drop_lease, now_ms, write_lease
from keyfold.statestore import filenames
from keyfold.statestore.errors import ViewExpired
from keyfold.statestore.files import Files

log = logging.getLogger("keyfold")

#: A lease is renewed when this part of its time has passed.
_RENEWED_AFTER: Final = 3
_READ_ONLY: Final = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Lease:
    """What a task must know to keep its planner's lease alive. `n` is the manifest line of the view."""

    identifier: str
    seq: int
    expires_ms: int
    timeout_ms: int

    def is_due(self, now: int) -> bool:
        """Whether it should be renewed now."""
        return now >= self.expires_ms - self.timeout_ms + self.timeout_ms // _RENEWED_AFTER


def looking(files: Files, root: Path) -> AbstractContextManager[ViewLock | None]:
    """The mark of a reader that is just loading the manifest, None where none can be made."""
    try:
        return contextlib.closing(ViewLock(files, root))
    except OSError as e:
        _without(root, e)
        return contextlib.nullcontext()


def take(files: Files, root: Path, seq: int, timeout_ms: int) -> Lease | None:
    """A new lease on the view of line `n`, None where none can be written. Removes leases that ran out."""
    now = now_ms()
    expires = now + timeout_ms
    try:
        _sweep(files, root, now)
        return Lease(write_lease(files, root, seq, expires), seq, expires, timeout_ms)
    except OSError as e:
        _without(root, e)
        return None


def renew(files: Files, root: Path, lease: Lease, seq: int) -> Lease | None:
    """The lease with a new time, for the view of line `n`; None where it is gone. Raises `OSError`.

    Several tasks renew one lease. Only one at a time may replace the file, so the others leave it to that
    one: its lock is on the file that is replaced, and with it the lock's meaning ends.
    """
    path = filenames.lease(root, lease.identifier)
    expires = now_ms() + lease.timeout_ms
    try:
        if not files.exists(path):
            return None
        held = files.lock(path)
        if held is not None:
            try:
                if (
                    files.size(path) == 0
                ):  # removed between the look and the lock, which created the file again
                    files.unlink(path)
                    return None
                write_lease(files, root, seq, expires, lease.identifier)
            finally:
                files.close(held)
        return Lease(lease.identifier, seq, expires, lease.timeout_ms)
    except (ViewExpired, FileNotFoundError):
        return None


def drop(files: Files, root: Path, lease: Lease) -> None:
    """Give a lease up. Where the medium has become read-only it stays until its time is over."""
    try:
        drop_lease(files, root, lease.identifier)
    except OSError as e:
        _without(root, e)


def _without(root: Path, e: OSError) -> None:
    if e.errno not in _READ_ONLY:
        raise e
    log.info("changelog %s is read without a lease: %s", root, e.strerror)


def _sweep(files: Files, root: Path, now: int) -> None:
    """Remove leases that ran out: without a writer nobody else would."""
    for name in files.list_directory(root / filenames.READERS):
        path = root / filenames.READERS / name
        if name.endswith(".lease"):
            try:
                if json.loads(files.read(path))["expires_ms"] < now:
                    files.unlink(path)
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                continue


class LeaseRenewer:
    """Keeps a lease alive while a task reads, however slowly its rows are taken. A context manager."""

    def __init__(self, files: Files, root: Path, lease: Lease | None) -> None:
        self._files = files
        self._root = root
        self._lease = lease
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> LeaseRenewer:
        if self._lease is not None:
            self._renew_if_due()
            self._thread = threading.Thread(target=self._run, name="keyfold-lease", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._lease is not None and not self._stop.wait(
            self._lease.timeout_ms / 1000 / _RENEWED_AFTER / 2
        ):
            self._renew_if_due()

    def _renew_if_due(self) -> None:
        if self._lease is not None and self._lease.is_due(now_ms()):
            try:
                self._lease = renew(self._files, self._root, self._lease, self._lease.seq)
            except OSError as e:  # reading goes on; a file that is deleted meanwhile raises ViewExpired
                log.warning("changelog %s: a lease could not be renewed: %s", self._root, e.strerror)
