"""The cleaner's threads: one small pool for all changelogs that this process has open to write.

A thread takes the filthiest partition of all (dirty bytes / all bytes, above `min.cleanable.dirty.ratio`, or
any whose oldest dirty record is older than `max.compaction.lag.ms`; else one at rest of which an anchor was
dropped or deletes are past their horizon), cleans it, and looks again; with nothing to do it sleeps for
`cleaner.backoff.ms`. It also does what else falls due without anybody asking: retention, sealing segments
that are too old to stay active, and what other processes ask for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from keyfold.checkpoints.cleaner.manager import CleanerManager
from keyfold.checkpoints.log.writer import Writer

log = logging.getLogger("keyfold")

T = TypeVar("T")

#: Requests of other processes are looked for this often.
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
        """Retention, old active segments, what other processes ask for."""

    def is_asked(self) -> bool:
        """Whether another process has asked for something."""


class Pool:
    """As many threads as the largest `cleaner.threads` of the open changelogs.

    A changelog with `cleaner.threads=0` is left alone: what should be done, its own process does by hand.

    Attributes:
        dead_threads: how many have ended by an error that nothing has caught (Kafka's `DeadThreadCount`).
            Another one takes the place of each.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all changelogs and threads, without a look at them."""
        self.dead_threads = 0
        self._hosts: list[Cleanable] = []
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._chores = threading.Lock()

    def add(self, engine: Cleanable) -> None:
        with self._changed:
            self._hosts.append(engine)
            self._start_threads()
            self._changed.notify_all()

    def remove(self, engine: Cleanable) -> None:
        """Forget a changelog; stops its passes at their next batch, and waits for that."""
        with self._changed:
            if engine in self._hosts:
                self._hosts.remove(engine)
            self._changed.notify_all()
        engine.cleaning.close()
        with engine.chores:
            pass

    def wake(self) -> None:
        """Look again now: a setting has changed."""
        with self._changed:
            self._start_threads()
            self._changed.notify_all()

    def _start_threads(self) -> None:
        self._threads = [t for t in self._threads if t.is_alive()]
        wanted = max((h.writer.identity.config.cleaner_threads for h in self._hosts), default=0)
        while len(self._threads) < wanted:
            thread = threading.Thread(target=self._run, name="keyfold-cleaner", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        try:
            while self._work():
                pass
        except BaseException:
            log.critical("a cleaner thread has died; another one takes its place", exc_info=True)
            with self._changed:
                self.dead_threads += 1
                self._threads.remove(threading.current_thread())
                self._start_threads()

    def _work(self) -> bool:
        """One round; False when this thread is not needed any more."""
        with self._changed:
            hosts = [h for h in self._hosts if h.writer.identity.config.cleaner_threads]
            if not hosts:
                self._threads.remove(threading.current_thread())
                return False
        for engine in hosts:
            _guarded(engine, engine.do_chores)
        looked = [(_guarded(engine, engine.cleaning.filthiest), engine) for engine in hosts]
        ranked = [(found, engine) for found, engine in looked if found is not None]
        if ranked:
            (_, number), engine = max(ranked, key=lambda r: r[0][0])
            if engine.cleaning.clean_in_background(number) is not None:
                return True
        self._sleep(hosts)
        return True

    def _sleep(self, hosts: list[Cleanable]) -> None:
        """For the shortest `cleaner.backoff.ms`; an open request or a change ends it."""
        backoff = min(h.writer.identity.config.cleaner_backoff_ms for h in hosts) / 1000
        until = time.monotonic() + backoff
        while (left := until - time.monotonic()) > 0:
            with self._changed:
                if self._changed.wait(min(left, _REQUEST_SECONDS)):
                    return
            if any(engine.is_asked() for engine in hosts):
                return


def _guarded(engine: Cleanable, work: Callable[[], T]) -> T | None:
    """What it gives. What fails here must keep neither the thread nor the other changelogs from going on."""
    try:
        return work()
    except Exception as e:
        log.error("changelog %s: the cleaner could not look after it: %s", engine.writer.root, e)
        return None


POOL: Final = Pool()
# Threads do not survive a fork, and the changelogs are the parent's.
os.register_at_fork(after_in_child=POOL.clear)
