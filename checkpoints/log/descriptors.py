"""Open files are scarce: the limit of the process is raised, the writer keeps some back, errors name it.

A partition that is being appended to has one file open. All last values of a changelog together take no more
than `rocks.open_files_max()`, and some ten. So a limit of 1,024 is enough for some 600 partitions.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from keyfold.statestore.errors import StorageFailed
from keyfold.statestore.files import count_descriptors, free_descriptor, hold_descriptor

log = logging.getLogger("keyfold")

#: What acknowledging a batch, and rolling the manifest after it, may have open at one time, and more.
_SPARE: Final = 6
#: Of more the open ones are not counted for a message.
_COUNTED_MAX: Final = 1 << 16


def raise_limit() -> None:
    """Raise this process' limit of open files (`RLIMIT_NOFILE`) from the soft to the hard one, where the
    system lets it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            log.info("the limit of open files is raised from %d to %d", soft, hard)


def is_too_many(error: OSError) -> bool:
    """Whether a file could not be opened because too many are open."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def too_many_files(error: OSError, root: Path, outcome: str) -> StorageFailed:
    """The error for it; `outcome` says what that means to what was being done."""
    if error.errno == errno.ENFILE:
        return StorageFailed(
            f"The system has as many files open as it may; {outcome}.", path=root,
            expected="fewer open files than the system's limit (fs.file-max)", found="as many",
            remedy="close files that other processes hold, or raise fs.file-max",
        )  # fmt: skip
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return StorageFailed(
        f"This process has as many files open as it may; {outcome}.", path=root,
        expected=f"fewer than {soft} open files, the limit of the process (RLIMIT_NOFILE, at most {hard})",
        found=f"{count_descriptors(soft) if soft <= _COUNTED_MAX else 'as many'} are open",
        remedy="raise the limit (`ulimit -n`, LimitNOFILE), close files that the process holds, or use fewer "
        "partitions: each that is appended to takes one",
    )  # fmt: skip


class Reserve:
    """Descriptors that are kept back for what must not fail half-way. Called by one thread at a time."""

    def __init__(self) -> None:
        self._kept: list[int] = []

    def fill(self) -> None:
        """Have all of them. Raises `OSError` where too many files are open."""
        while len(self._kept) < _SPARE:
            self._kept.append(hold_descriptor())

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Meanwhile as many files can be opened as were kept back."""
        self.close()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self.fill()

    def close(self) -> None:
        while self._kept:
            free_descriptor(self._kept.pop())
