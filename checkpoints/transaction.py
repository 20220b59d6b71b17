"""A transaction on the last values: reads see its own writes, and all its writes become one commit."""

from __future__ import annotations

import threading
from pathlib import Path

from keyfold.checkpoints.log.processes import OwnProcess
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.kv.stores import Overlay, ReadOnlyStore
from keyfold.statestore.kv.typed_columns import ColumnsStore
from keyfold.statestore.schema.columns import Columns


class Transaction(Overlay):
    """A store (`get, get_all, put, put_all, delete, range, prefix, all`) that buffers its writes until the
    commit.

    Attributes:
        applied: the batch was committed before. Writes will be discarded, so the caller may leave at once.
    """

    def __init__(self, base: ReadOnlyStore, *, applied: bool) -> None:
        super().__init__(base)
        self.applied = applied


class ColumnsTransaction(ColumnsStore):
    """A transaction on typed columns: `put("to", {"count": 2})`.

    Attributes:
        applied: as in `Transaction`.
    """

    def __init__(self, transaction: Transaction, columns: Columns) -> None:
        super().__init__(transaction, columns)
        self.applied = transaction.applied


class Turn:
    """The right to change records: one holder at a time, from its first read to its commit. A context
    manager.

    A commit between a transaction's reads and its writes would be lost, so other threads wait. A thread
    cannot wait for itself: a second request inside its own transaction is refused.
    """

    def __init__(self, path: Path, process: OwnProcess) -> None:
        self._path = path
        self._process = process
        self._lock = threading.Lock()
        self._holder: int | None = None

    def check(self) -> None:
        """Raises `ConfigError` in the thread that holds it, and in a forked process."""
        self._process.check()
        if self._holder == threading.get_ident():
            raise ConfigError(
                "A transaction of this thread is already open.", path=self._path,
                expected="one at a time, and no append, rollback or close inside it",
                found="another transaction",
                remedy="write through the open transaction, or leave its block first",
            )  # fmt: skip

    def __enter__(self) -> None:
        self.check()
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        if self._process.is_this():
            self._holder = None
            self._lock.release()
