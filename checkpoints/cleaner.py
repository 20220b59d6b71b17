"""The cleaner's threads: one small pool for all changelogs that this process has open to write.

A thread takes the filthiest partition (dirty bytes / all bytes, above `min.cleanable.dirty.ratio`, or any
whose oldest dirty record is older than `max.compaction.lag.ms`), cleans it, and looks again; with nothing to
do it sleeps for `cleaner.backoff.ms`. A partition whose pass failed is left alone for a while that doubles
each time.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from keyfold.checkpoints.compactor import Aborted, clean_partition, section_of
from keyfold.checkpoints.retention import apply_retention
from keyfold.statestore.errors import KeyfoldError

if TYPE_CHECKING:
    from keyfold.checkpoints.hosting import Host

log = logging.getLogger("keyfold")

_RETRY_SECONDS_MAX: Final = 3600.0


@dataclass
class _Failure:
    retry_at: float
    wait_seconds: float


class Pool:
    """As many threads as the largest `cleaner.threads` of the open changelogs; 0 everywhere: only by hand."""

    def __init__(self) -> None:
        self._hosts: list[Host] = []
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._failures: dict[tuple[int, int], _Failure] = {}

    def add(self, host: Host) -> None:
        with self._changed:
            self._hosts.append(host)
            self._threads = [t for t in self._threads if t.is_alive()]
            wanted = max(h.writer.identity.config.cleaner_threads for h in self._hosts)
            while len(self._threads) < wanted:
                thread = threading.Thread(target=self._run, name="keyfold-cleaner", daemon=True)
                self._threads.append(thread)
                thread.start()

    def remove(self, host: Host) -> None:
        """Forget a changelog; waits for a pass over it, which ends at its next batch."""
        with self._changed:
            if host in self._hosts:
                self._hosts.remove(host)
            self._failures = {k: v for k, v in self._failures.items() if k[0] != id(host)}
            self._changed.notify_all()
        with host.cleaning:
            pass

    def _run(self) -> None:
        while True:
            with self._changed:
                hosts = [h for h in self._hosts if h.writer.identity.config.cleaner_threads]
                if not self._hosts:
                    self._threads.remove(threading.current_thread())
                    return
            worked = [self._work_on(host) for host in hosts]
            if not any(worked):
                backoff = min((h.writer.identity.config.cleaner_backoff_ms for h in hosts), default=15_000)
                with self._changed:
                    self._changed.wait(backoff / 1000)

    def _work_on(self, host: Host) -> bool:
        """Clean the filthiest partition of a changelog that is due; False where there is none."""
        if not host.cleaning.acquire(blocking=False):
            return False
        number = -1
        try:
            if host.writer.fenced or host not in self._hosts:
                return False
            apply_retention(host.writer)
            found = self._filthiest(host)
            if found is None:
                return False
            number = found
            statistics = clean_partition(host.writer, number, lambda: host not in self._hosts)
            self._failures.pop((id(host), number), None)
            if statistics is not None:
                log.info(
                    "changelog %s: cleaned partition %d: %d of %d records kept, %.2f s",
                    host.writer.root,
                    number,
                    statistics.records_kept,
                    statistics.records_read,
                    statistics.seconds,
                )
            return statistics is not None
        except Aborted:
            return False
        except (KeyfoldError, OSError, MemoryError) as e:
            self._failed(host, number, e)
            return False
        finally:
            host.cleaning.release()

    def _failed(self, host: Host, number: int, error: Exception) -> None:
        before = self._failures.get((id(host), number))
        backoff = host.writer.identity.config.cleaner_backoff_ms / 1000
        wait = min(2 * before.wait_seconds, _RETRY_SECONDS_MAX) if before else backoff
        self._failures[id(host), number] = _Failure(time.monotonic() + wait, wait)
        log.error(
            "changelog %s: cleaning partition %d failed, tried again in %.0f s: %s",
            host.writer.root,
            number,
            wait,
            error,
        )

    def _filthiest(self, host: Host) -> int | None:
        writer = host.writer
        config = writer.identity.config
        if "compact" not in config.cleanup_policy:
            return None
        best: tuple[float, int] | None = None
        now_ms = writer.clock_ms()
        with writer.pin() as state:
            for number in range(len(state.partitions)):
                failure = self._failures.get((id(host), number))
                if failure is not None and failure.retry_at > time.monotonic():
                    continue
                section = section_of(writer, state, number)
                dirty = [s for s in section.segments if s.next > section.clean_end]
                if not dirty:
                    continue
                overdue = now_ms - dirty[0].created_ms > config.max_compaction_lag_ms
                if overdue or section.dirty_ratio > config.min_cleanable_dirty_ratio:
                    rank = (2.0 if overdue else section.dirty_ratio, -number)
                    best = rank if best is None else max(best, rank)
        return None if best is None else -best[1]


POOL: Final = Pool()
