"""A transaction on the last values: reads see its own writes, and all its writes are one commit."""

from __future__ import annotations

from keyfold.statestore.kv import Overlay, ReadOnlyStore


class Transaction(Overlay):
    """A store (`get, get_all, put, put_all, delete, range, prefix, all`) whose writes are kept back until the
    commit.

    Attributes:
        applied: the batch was committed before; what is written here will be dropped, so the caller may leave
            at once.
    """

    def __init__(self, base: ReadOnlyStore, *, applied: bool) -> None:
        super().__init__(base)
        self.applied = applied
