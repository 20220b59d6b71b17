"""What a task does in its Python worker so that neither waits without need.

Spark sends a task its rows over a TCP connection, and the mark that ends them in a small packet of its own.
Spark leaves Nagle's algorithm on, so that packet waits until the one before it is acknowledged. Linux delays
this acknowledgement by 40 ms if the receiver has nothing to send, and a task that first reads all its input
has nothing to send. `TCP_QUICKACK` sends it at once.

After each task, Spark's worker collects garbage: a look at every object of every module, for 20 ms or more.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

#: Only Linux has it.
_QUICKACK: Final[int | None] = getattr(socket, "TCP_QUICKACK", None)
#: A worker opens the connection to the JVM first of all.
_FILES_LOOKED_AT: Final = range(3, 32)


def without_delays(batches: Iterable[T]) -> Iterator[T]:
    """The same batches, each acknowledged as soon as it has arrived."""
    with contextlib.ExitStack() as stack:
        connections = []
        for one in _connections():
            # It belongs to somebody else, who closes it.
            stack.callback(one.detach)
            connections.append(one)
        _acknowledge(connections)
        for batch in batches:
            # The kernel forgets it, so once is not enough.
            _acknowledge(connections)
            yield batch


@functools.cache
def freeze_loaded() -> None:
    """Take all objects of now out of later garbage collections: modules, which stay anyway."""
    gc.freeze()


def _connections() -> Iterator[socket.socket]:
    """The TCP connections of this process. The caller detaches each."""
    if _QUICKACK is None or socket.getdefaulttimeout() is not None:
        # With a default timeout, Python would make them non-blocking here.
        return
    for number in _FILES_LOOKED_AT:
        try:
            found = socket.socket(fileno=number)
        except OSError:
            continue  # no such file, or not a socket
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            yield found
        else:
            found.detach()


def _acknowledge(connections: Sequence[socket.socket]) -> None:
    for one in connections:
        with contextlib.suppress(OSError):
            one.setsockopt(socket.IPPROTO_TCP, _QUICKACK or 0, 1)
