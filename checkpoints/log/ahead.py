"""Reads batches of several sources ahead of the consumer, on background threads and in bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final, TypeAlias

import pyarrow as pa

Source: TypeAlias = Callable[[], Iterator[pa.RecordBatch]]

#: Maximum number of bytes that wait for the consumer. A single larger batch may exceed it.
AHEAD_BYTES: Final = 32 << 20


def ahead(sources: Sequence[Source], threads: int = 2) -> Generator[pa.RecordBatch, None, None]:
    """All batches of all sources, in order within each source. With one thread the sources are in order too.

    The first error of a source is raised once and stops the other sources. Closing the generator stops them
    too.
    """
    waiting = _Waiting(sources)
    workers = [
        threading.Thread(target=waiting.fill, name="keyfold-ahead", daemon=True)
        for _ in range(min(threads, len(sources)))
    ]
    for worker in workers:
        worker.start()
    try:
        yield from waiting.batches(len(workers))
    finally:
        waiting.stop()
        for worker in workers:
            worker.join()


class _Waiting:
    """The queue between the threads that read batches and the consumer."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = iter(sources)
        self._batches: deque[pa.RecordBatch] = deque()
        self._bytes = 0
        self._ended = 0
        self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def fill(self) -> None:
        """Read one source after another. Runs on a thread and does not raise."""
        try:
            while (source := self._next_source()) is not None:
                for batch in source():
                    if not self._put(batch):
                        return
        except BaseException as e:
            with self._changed:
                self._error = self._error or e
                self._stopped = True
        finally:
            with self._changed:
                self._ended += 1
                self._changed.notify_all()

    def _next_source(self) -> Source | None:
        with self._changed:
            return None if self._stopped else next(self._sources, None)

    def _put(self, batch: pa.RecordBatch) -> bool:
        size = batch.nbytes
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopped or not self._batches or self._bytes + size <= AHEAD_BYTES
            )
            if self._stopped:
                return False
            self._batches.append(batch)
            self._bytes += size
            self._changed.notify_all()
            return True

    def batches(self, workers: int) -> Iterator[pa.RecordBatch]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._batches or self._error or self._ended == workers)
                if self._error is not None:
                    raise self._error
                if not self._batches:
                    return
                batch = self._batches.popleft()
                self._bytes -= batch.nbytes
                self._changed.notify_all()
            yield batch

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
