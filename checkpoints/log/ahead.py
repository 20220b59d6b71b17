"""Batches of several sources, made on threads of their own ahead of who takes them, in bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final, TypeAlias

import pyarrow as pa

Source: TypeAlias = Callable[[], Iterator[pa.RecordBatch]]

#: So many bytes wait at most, or one batch that is larger.
AHEAD_BYTES: Final = 32 << 20


def ahead(sources: Sequence[Source], threads: int = 2) -> Generator[pa.RecordBatch, None, None]:
    """All batches of all sources, each source's in its order; with one thread also the sources in theirs.

    Raises what a source raises, once; the others end then. They end too when this is closed.
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
    """Batches between those who make them and the one who takes them."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = iter(sources)
        self._batches: deque[pa.RecordBatch] = deque()
        self._bytes = 0
        self._ended = 0
        self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def fill(self) -> None:
        """Make batches of one source after the other. Runs on a thread; does not raise."""
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
