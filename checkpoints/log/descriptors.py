"""Open files are limited: raise the limit of the process, reserve some for the writer, explain errors.

Each active segment takes one open file. All last-value stores of a changelog together take at most
`rocks.open_files_max()`, plus about ten. A limit of 1,024 is therefore enough for about 600 partitions.
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

#: Files that acknowledging a batch and then rolling the manifest may open at the same time, plus a margin.
_SPARE: Final = 6
#: Above this limit, the open files are not counted for a message.
_COUNTED_MAX: Final = 1 << 16


def raise_limit() -> None:
    """Raise this process's limit of open files (`RLIMIT_NOFILE`) from the soft to the hard limit, if the
    system allows it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            log.info("raised the limit of open files from %d to %d", soft, hard)


def is_too_many(error: OSError) -> bool:
    """Whether a file could not be opened because too many files are open."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def too_many_files(error: OSError, root: Path, outcome: str) -> StorageFailed:
    """The error for too many open files. `outcome` says what happened to the caller's operation."""
    if error.errno == errno.ENFILE:
        return StorageFailed(
            f"Too many open files in the system; {outcome}.", path=root,
            expected="fewer open files than the system's limit (fs.file-max)", found="the limit is reached",
            remedy="close files in other processes, or raise fs.file-max",
        )  # fmt: skip
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return StorageFailed(
        f"Too many open files in this process; {outcome}.", path=root,
        expected=f"fewer than {soft} open files, the limit of the process (RLIMIT_NOFILE, at most {hard})",
        found=f"{count_descriptors(soft)} open files" if soft <= _COUNTED_MAX else "the limit is reached",
        remedy="raise the limit (`ulimit -n`, LimitNOFILE), close files in this process, or use fewer "
        "partitions: each active segment takes one file",
    )  # fmt: skip


@contextlib.contextmanager
def limit_told(root: Path, outcome: str) -> Iterator[None]:
    """Raises `StorageFailed` with this outcome if too many files are open. Other errors pass."""
    try:
        yield
    except OSError as e:
        if not is_too_many(e):
            raise
        raise too_many_files(e, root, outcome) from e


class Reserve:
    """Reserved file descriptors, for operations that must not fail half-way. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: list[int] = []

    def fill(self) -> None:
        """Reserve all descriptors. Raises `OSError` if too many files are open."""
        while len(self._kept) < _SPARE:
            self._kept.append(hold_descriptor())

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Release the reserved descriptors inside the context, so that as many files can be opened."""
        self.close()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self.fill()

    def close(self) -> None:
        while self._kept:
            free_descriptor(self._kept.pop())
