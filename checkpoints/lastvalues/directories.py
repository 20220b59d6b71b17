"""The directories of last-value stores: a writer's is in the changelog, a standby's in `work/`.

A writer's is `store-<epoch>/`. The next writer uses or removes it. A standby's is `work/standby-<id>/`. It
belongs to the standby while the standby holds the lock beside that directory: no other process uses or
removes it. When its process has died, the next writer or standby removes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from keyfold.checkpoints.log.dead_standbys import remove_dead_standbys, remove_store
from keyfold.checkpoints.log.reader_marks import new_lock
from keyfold.checkpoints.log.writer import Writer
from keyfold.statestore import filenames
from keyfold.statestore.files import Files, OpenFile


class StoreDirs(ABC):
    """The directory of a store."""

    @abstractmethod
    def found(self) -> list[Path]:
        """The stores that are there and may be used or removed, the one to be preferred first."""

    @abstractmethod
    def new(self) -> Path:
        """Where a new one goes, once those that were found are removed."""

    def prove(self) -> None:
        """Raise `WriterFenced` where the stores are another's to use and to remove by now."""
        return


class WriterStoreDirs(StoreDirs):
    """The writer's own. Both methods raise `WriterFenced` unless it is provably the writer, see `ownership`:
    then all stores of lower epochs are those of earlier writers, and nobody else uses or removes them.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def found(self) -> list[Path]:
        """The newest store of an earlier writer gets a name of this epoch first: one that only hangs does not
        find it any more when it goes on, and removes nothing but what is its own.
        """
        writer = self._writer
        writer.ownership.prove()
        root, own = writer.root, writer.state.epoch
        listed = map(filenames.store_epoch, writer.files.list_directory(root))
        epochs = sorted((e for e in listed if e and e <= own), reverse=True)
        if epochs and epochs[0] < writer.opened_epoch:
            writer.files.rename(filenames.store(root, epochs[0]), filenames.store(root, own))
            epochs[0] = own
        return [filenames.store(root, epoch) for epoch in epochs]

    def new(self) -> Path:
        self._writer.ownership.prove()
        return filenames.store(self._writer.root, self._writer.state.epoch)

    def prove(self) -> None:
        self._writer.ownership.prove()


class StandbyStoreDirs(StoreDirs):
    """A standby's. Raises `OSError` where nothing can be written."""

    def __init__(self, files: Files, root: Path) -> None:
        self._files = files
        files.make_directory(root / filenames.WORK, below=root)
        remove_dead_standbys(files, root)
        self._lock: OpenFile | None
        # Before the directory: one without a lock has no owner.
        identifier, self._lock = new_lock(files, lambda i: filenames.standby_lock(root, i))
        self._directory = filenames.standby(root, identifier)

    def found(self) -> list[Path]:
        return [self._directory] if self._files.is_directory(self._directory) else []

    def new(self) -> Path:
        return self._directory

    def close(self) -> None:
        """Remove what is left there."""
        lock, self._lock = self._lock, None
        # In a process that was forked from the standby's there is no lock.
        if lock is not None and lock.fd >= 0:
            remove_store(self._files, self._directory, lock)
