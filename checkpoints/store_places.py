"""Where the last-value stores of a changelog lie: a writer's beside the log, a standby's aside.

A writer's are `<partition>/store-<epoch>/`, and whoever becomes the writer uses or removes them. A standby's
are `work/standby-<id>/<partition>/`, its own as long as it holds the lock beside that directory: no other
process uses or removes them. When its process has died, the next writer or standby removes them.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from abc import ABC, abstractmethod
from pathlib import Path

from keyfold.checkpoints.writer import Writer
from keyfold.statestore import names
from keyfold.statestore.files import Files, OpenFile

log = logging.getLogger("keyfold")


class StorePlace(ABC):
    """Directories of stores, one per partition in use."""

    @abstractmethod
    def found(self, partition: int) -> list[Path]:
        """The stores that are there, the one to be preferred first."""

    @abstractmethod
    def new(self, partition: int) -> Path:
        """Where a new one goes, once those that were found are removed."""


class BesideTheLog(StorePlace):
    """The writer's own."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def found(self, partition: int) -> list[Path]:
        root = self._writer.root
        epochs = map(names.store_epoch, self._writer.files.list_directory(names.partition(root, partition)))
        ordered = sorted((e for e in epochs if e is not None), reverse=True)
        return [names.store(root, partition, epoch) for epoch in ordered]

    def new(self, partition: int) -> Path:
        writer = self._writer
        directory = names.partition(writer.root, partition)
        if not writer.files.is_directory(directory):
            # No commit may come to lie in a directory that is there and not durable.
            with writer.exclusive:
                writer.files.make_directory(directory)
                writer.files.sync_directory(writer.root)
        return names.store(writer.root, partition, writer.state.epoch)


class Aside(StorePlace):
    """A standby's. Raises `OSError` where nothing can be written."""

    def __init__(self, files: Files, root: Path) -> None:
        self._files = files
        files.make_directory(root / names.WORK)
        remove_dead(files, root)
        identifier = uuid.uuid4().hex
        # Before the directory: one without a lock has no owner.
        self._lock: OpenFile | None = files.lock(names.standby_lock(root, identifier))
        self._directory = names.standby(root, identifier)

    def found(self, partition: int) -> list[Path]:
        path = self.new(partition)
        return [path] if self._files.is_directory(path) else []

    def new(self, partition: int) -> Path:
        return names.partition(self._directory, partition)

    def close(self) -> None:
        """Remove what is left there."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _remove(self._files, self._directory, lock)


def remove_dead(files: Files, root: Path) -> None:
    """Remove what standbys left that were killed."""
    found = {names.standby_id(name) for name in files.list_directory(root / names.WORK)}
    for identifier in sorted(i for i in found if i is not None):
        with contextlib.suppress(OSError):
            held = files.lock(names.standby_lock(root, identifier))
            if held is not None:
                log.info("changelog %s: the stores of a standby that has died are removed", root)
                _remove(files, names.standby(root, identifier), held)


def _remove(files: Files, directory: Path, lock: OpenFile) -> None:
    """What cannot be removed now is left to the next one that looks. The lock goes last, because a directory
    without a lock is nobody's.
    """
    try:
        files.remove_tree(directory)
        with contextlib.suppress(OSError):
            files.unlink(lock.path)
    finally:
        files.close(lock)
