"""What killed standbys left: last-value stores whose lock ended with its process."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from keyfold.statestore import filenames
from keyfold.statestore.files import Files, OpenFile

log = logging.getLogger("keyfold")


def remove_dead_standbys(files: Files, root: Path) -> None:
    """Remove what standbys left that were killed."""
    found = {filenames.standby_id(name) for name in files.list_directory(root / filenames.WORK)}
    for identifier in sorted(i for i in found if i is not None):
        with contextlib.suppress(OSError):
            held = files.lock(filenames.standby_lock(root, identifier))
            if held is not None:
                log.info("changelog %s: the stores of a standby that has died are removed", root)
                remove_store(files, filenames.standby(root, identifier), held)


def remove_store(files: Files, directory: Path, lock: OpenFile) -> None:
    """What cannot be removed now is left to the next one that looks. The lock goes last, because a directory
    without a lock is nobody's.
    """
    try:
        files.remove_tree(directory)
        with contextlib.suppress(OSError):
            files.unlink(lock.path)
    finally:
        files.close(lock)
