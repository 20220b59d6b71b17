"""The cleaner's threads: one small pool for all changelogs that this process has open to write.

A thread takes the partition with the highest dirty ratio (dirty bytes / all bytes, above
`min.cleanable.dirty.ratio`), or any whose oldest dirty record is older than `max.compaction.lag.ms`;
otherwise an idle one where an anchor was dropped or a delete horizon has passed. It cleans the partition and
looks again. If there is nothing to do, it sleeps for `cleaner.backoff.ms`. It also does other periodic work:
retention, sealing segments that are too old to remain active, and requests of other processes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar

from keyfold.checkpoints.cleaner.manager import CleanerManager
from keyfold.checkpoints.log.writer import Writer

log = logging.getLogger("keyfold")

T = TypeVar("T")

#: Interval between looks for requests of other processes.
_REQUEST_SECONDS: Final = 1.0


class Cleanable(Protocol):
    """An open changelog, as the pool sees it."""

    @property
    def writer(self) -> Writer: ...

    @property
    def cleaning(self) -> CleanerManager: ...

    @property
    def chores(self) -> threading.Lock:
        """Held while chores are done."""

    def do_chores(self) -> None:
        """Retention, old active segments, requests of other processes."""

    def is_asked(self) -> bool:
        """Whether another process has asked for something."""


class Pool:
    """As many threads as the largest `cleaner.threads` of the open changelogs.

    The pool does nothing for a changelog with `cleaner.threads=0`: its own process compacts on request.

    Attributes:
        dead_threads: number of threads that ended with an uncaught error (Kafka's `DeadThreadCount`). Each is
            replaced.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all changelogs and threads, without touching them."""
        self.dead_threads = 0
        self._engines: list[Cleanable] = []
        self._stilled = 0
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._chores = threading.Lock()

    def add(self, engine: Cleanable) -> None:
        with self._changed:
            self._engines.append(engine)
            self._start_threads()
            self._changed.notify_all()

    def remove(self, engine: Cleanable) -> None:
        """Forget a changelog. Stops its passes at their next batch, and waits for that."""
        with self._changed:
            if engine in self._engines:
                self._engines.remove(engine)
            self._changed.notify_all()
        engine.cleaning.close()
        with engine.chores:
            pass

    @contextmanager
    def stilled(self) -> Iterator[None]:
        """Start no threads: a command does what it was asked to do, and nothing else."""
        self._stilled += 1
        try:
            yield
        finally:
            self._stilled -= 1
            self.wake()

    def wake(self) -> None:
        """Look again now, because a setting has changed."""
        with self._changed:
            self._start_threads()
            self._changed.notify_all()

    def _start_threads(self) -> None:
        self._threads = [t for t in self._threads if t.is_alive()]
        if self._stilled:
            return
        wanted = max((e.writer.identity.config.cleaner_threads for e in self._engines), default=0)
        while len(self._threads) < wanted:
            thread = threading.Thread(target=self._run, name="keyfold-cleaner", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        try:
            while self._work():
                pass
        except BaseException:
            log.critical("a cleaner thread has died and is replaced", exc_info=True)
            with self._changed:
                self.dead_threads += 1
                self._threads.remove(threading.current_thread())
                self._start_threads()

    def _work(self) -> bool:
        """Run one round. False if this thread is not needed any more."""
        with self._changed:
            engines = [e for e in self._engines if e.writer.identity.config.cleaner_threads]
            if not engines:
                self._threads.remove(threading.current_thread())
                return False
        for engine in engines:
            _guarded(engine, engine.do_chores)
        looked = [(_guarded(engine, engine.cleaning.filthiest), engine) for engine in engines]
        ranked = [(found, engine) for found, engine in looked if found is not None]
        if ranked:
            (_, partition), engine = max(ranked, key=lambda r: r[0][0])
            if engine.cleaning.clean_in_background(partition) is not None:
                return True
        self._sleep(engines)
        return True

    def _sleep(self, engines: list[Cleanable]) -> None:
        """Sleep for the shortest `cleaner.backoff.ms`. An open request or a change ends the sleep."""
        backoff = min(e.writer.identity.config.cleaner_backoff_ms for e in engines) / 1000
        until = time.monotonic() + backoff
        while (left := until - time.monotonic()) > 0:
            with self._changed:
                if self._changed.wait(min(left, _REQUEST_SECONDS)):
                    return
            if any(engine.is_asked() for engine in engines):
                return


def _guarded(engine: Cleanable, work: Callable[[], T]) -> T | None:
    """The result of a call. An error must stop neither the thread nor the work for other changelogs."""
    try:
        return work()
    except Exception as e:
        log.error("changelog %s: background maintenance failed: %s", engine.writer.root, e)
        return None


POOL: Final = Pool()
# Threads do not survive a fork, and the changelogs belong to the parent.
os.register_at_fork(after_in_child=POOL.clear)
