"""Last-value stores that killed standbys left. The lock of each ended with its process."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from keyfold.statestore import filenames
from keyfold.statestore.files import Files, OpenFile

log = logging.getLogger("keyfold")


def remove_dead_standbys(files: Files, root: Path) -> None:
    """Remove the stores of standbys that were killed."""
    found = {filenames.standby_id(name) for name in files.list_directory(root / filenames.WORK)}
    for identifier in sorted(i for i in found if i is not None):
        with contextlib.suppress(OSError):
            held = files.lock(filenames.standby_lock(root, identifier))
            if held is not None:
                log.info("changelog %s: removing the stores of a dead standby", root)
                remove_store(files, filenames.standby(root, identifier), held)


def remove_store(files: Files, directory: Path, lock: OpenFile) -> None:
    """Remove a standby's store. What cannot be removed now is left for the next call. The lock file is
    removed last, because a directory without a lock file has no owner.
    """
    try:
        files.remove_tree(directory)
        with contextlib.suppress(OSError):
            files.unlink(lock.path)
    finally:
        files.close(lock)
