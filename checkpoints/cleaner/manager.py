"""The partitions of a log that are being cleaned, are paused, or cannot be cleaned; Kafka's
`LogCleanerManager`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from keyfold.checkpoints.cleaner.clean_pass import Aborted, PassStatistics, clean_partition
from keyfold.checkpoints.cleaner.log_to_clean import LogToClean, cleanable, find_log_to_clean
from keyfold.checkpoints.cleaner.throttle import Throttle
from keyfold.checkpoints.log.writer import Writer
from keyfold.checkpoints.manifest.entries import UncleanableEntry
from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.checkpoints.manifest.state import State
from keyfold.statestore.errors import ConfigError, KeyfoldError, StorageFailed

log = logging.getLogger("keyfold")

#: After this many failures in a row, other than disk failures, a partition is not cleaned until requested.
FAILURES_MAX: Final = 5
_RETRY_SECONDS_MAX: Final = 3600.0
#: A pass that is not due by the dirty ratio waits this many times the duration of the last pass.
_REST: Final = 10


@dataclass(frozen=True)
class _Failing:
    times: int
    retry_at: float


class CleanerManager:
    """The passes over one changelog: at most one at a time per partition, whichever thread runs it.

    Args:
        clock: seconds, for the times between retries.
    """

    def __init__(self, writer: Writer, clock: Callable[[], float] = time.monotonic) -> None:
        self._writer = writer
        self._clock = clock
        self._changed = threading.Condition()
        self._in_progress: set[int] = set()
        self._paused: Counter[int] = Counter()
        #: the pauses among them that are for rollbacks, which end by themselves
        self._cut: Counter[int] = Counter()
        self._failing: dict[int, _Failing] = {}
        self._closed = False
        self._throttle = Throttle(lambda: writer.identity.config.cleaner_io_max_bytes_per_second)
        self._last: dict[int, PassStatistics] = {}
        #: when the last pass over each partition ended
        self._ended: dict[int, float] = {}
        #: the last known end of each partition, and since when it has not changed
        self._still: dict[int, tuple[int, float]] = {}

    # -- choosing --------------------------------------------------------------------------------------------

    def filthiest(self) -> tuple[float, int] | None:
        """The partition that needs a pass most, and how much: its dirty ratio; or 2 if it is overdue by
        `max.compaction.lag.ms`; or 0 if it is idle and a pass would help although it is not due by its ratio:
        an anchor was dropped, or a delete horizon has passed. None if no partition is due.
        """
        config = self._writer.identity.config
        if "compact" not in config.cleanup_policy or self._writer.fenced:
            return None
        state, now_ms = self._writer.state, self._writer.clock_ms()
        best: tuple[float, int] | None = None
        for partition, p in enumerate(state.partitions):
            rests = self._rests(partition, p)
            if (
                self._is_free(partition)
                and (rank := self._rank(state, partition, p, now_ms, rests)) is not None
            ):
                best = (rank, -partition) if best is None else max(best, (rank, -partition))
        return None if best is None else (best[0], -best[1])

    def _rank(
        self, state: State, partition: int, p: PartitionState, now_ms: int, rests: bool
    ) -> float | None:
        """How much a partition needs a pass, None if it is not due. Anchors are checked last, because that
        takes longest.
        """
        config = self._writer.identity.config
        if p.unique_end < p.end:
            segments = cleanable(self._writer, p, partition)
            section = LogToClean(segments, p.unique_end, p.unique_end, p.end, (), p.swept_end, 0)
            if section.dirty and now_ms - section.dirty[0].created_ms > config.max_compaction_lag_ms:
                return 2.0
            if section.dirty_ratio > config.min_cleanable_dirty_ratio:
                return section.dirty_ratio
        expired = now_ms - config.delete_retention_ms
        if not rests or not (
            p.splits or any(x.clean_end > p.swept_end and x.time_ms <= expired for x in p.passes)
        ):
            return None
        section = find_log_to_clean(self._writer, state, partition)
        went_back = section.first_dirty < min(section.unique_end, section.end)
        return 0.0 if section.needs_pass and (went_back or section.sweeps) else None

    def _rests(self, partition: int, p: PartitionState) -> bool:
        """Whether nothing was appended to a partition for `cleaner.backoff.ms`, and enough time has passed
        since its last pass in relation to the duration of that pass.
        """
        now = self._clock()
        end, since = self._still.get(partition, (-1, now))
        if end != p.end:
            end, since = self._still[partition] = p.end, now
        last = self._last.get(partition)
        if last is not None:
            since = max(since, self._ended[partition] + _REST * last.seconds)
        return now - since >= self._writer.identity.config.cleaner_backoff_ms / 1000

    def _sections(self) -> list[tuple[int, LogToClean]]:
        state = self._writer.state
        return [(n, find_log_to_clean(self._writer, state, n)) for n in range(len(state.partitions))]

    def _is_free(self, partition: int) -> bool:
        failing = self._failing.get(partition)
        return (
            partition not in self._in_progress
            and not self._paused[partition]
            and not self._writer.state.partitions[partition].uncleanable
            and (failing is None or failing.retry_at <= self._clock())
        )

    # -- cleaning --------------------------------------------------------------------------------------------

    def clean_in_background(self, partition: int) -> PassStatistics | None:
        """Run a throttled pass over a partition from `filthiest`. None if another thread was faster, or the
        pass was stopped or failed. A failure is logged and counted, never raised.
        """
        with self._changed:
            if self._closed or not self._is_free(partition):
                return None
            self._in_progress.add(partition)
        try:
            return self._pass(partition, lambda size: self._throttle(size, lambda: self._check(partition)))
        except Aborted:
            return None
        except Exception as e:  # the thread must continue after any error
            self._failed(partition, e)
            return None
        finally:
            self._release(partition)

    def clean_now(self, partition: int, *, full: bool = False) -> list[PassStatistics]:
        """Run unthrottled passes over the present content of a partition, until nothing more can be folded. A
        partition that was given up is cleaned too, and is cleaned again normally if that succeeds. None if
        there is nothing to fold.

        Args:
            full: fold everything from the log's start, whatever the manifest says is clean.

        Raises:
            ConfigError: cleaning is paused.

        Also raises the errors of `clean_partition`, and `Aborted`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    partition not in self._in_progress
                    and (not self._cut[partition] or self.is_stopped(partition))
                )
            )
            self._check_not_paused(partition)
            self._in_progress.add(partition)
        try:
            done: list[PassStatistics] = []
            until = self._writer.state.partitions[partition].end
            # Each incomplete pass gets further than the one before. Records that are appended meanwhile are
            # left for the next call: otherwise this call would never return while a writer is busy.
            while not done or not done[-1].complete:
                one = self._pass(
                    partition, lambda size: self._check(partition), until, full=full and not done
                )
                if one is None:
                    break
                done.append(one)
            if self._writer.state.partitions[partition].uncleanable:
                self._writer.write_line(UncleanableEntry(partition, ""))
            return done
        finally:
            self._release(partition)

    def _pass(
        self, partition: int, pace: Callable[[int], None], until: int | None = None, *, full: bool = False
    ) -> PassStatistics | None:
        done = clean_partition(self._writer, partition, pace, until=until, full=full)
        self._failing.pop(partition, None)
        if done is not None:
            self._last[partition], self._ended[partition] = done, self._clock()
            log.info(
                "changelog %s: cleaned partition %d: %d of %d records kept, %.2f s",
                self._writer.root, partition, done.records_kept, done.records_read, done.seconds,
            )  # fmt: skip
        return done

    def is_stopped(self, partition: int) -> bool:
        """Whether no pass may run over the partition until further notice: cleaning is paused, or the
        changelog was closed. A rollback does not count, because it ends by itself.
        """
        return self._closed or self._paused[partition] > self._cut[partition]

    def _check(self, partition: int) -> None:
        if self._closed or self._paused[partition]:
            raise Aborted

    def _release(self, partition: int) -> None:
        with self._changed:
            self._in_progress.discard(partition)
            self._changed.notify_all()

    def _failed(self, partition: int, error: Exception) -> None:
        config = self._writer.identity.config
        times = 1 + (self._failing[partition].times if partition in self._failing else 0)
        wait = min(config.cleaner_backoff_ms / 1000 * 2 ** min(times - 1, 20), _RETRY_SECONDS_MAX)
        self._failing[partition] = _Failing(times, self._clock() + wait)
        what = str(error) if isinstance(error, KeyfoldError) else f"{type(error).__name__}: {error}"
        root = self._writer.root
        if times < FAILURES_MAX or isinstance(error, StorageFailed | OSError | MemoryError):
            log.error(
                "changelog %s: cleaning partition %d failed, next attempt in %.0f s: %s",
                root, partition, wait, what,
            )  # fmt: skip
            return
        log.critical(
            "changelog %s: cleaning partition %d failed %d times; it is not cleaned again until "
            "`keyfold compact` succeeds: %s",
            root, partition, times, what,
        )  # fmt: skip
        try:
            self._writer.write_line(UncleanableEntry(partition, what))
        except KeyfoldError as e:
            log.error("changelog %s: cannot record that partition %d is uncleanable: %s", root, partition, e)

    # -- pausing ---------------------------------------------------------------------------------------------

    @contextmanager
    def paused(self, partitions: Iterable[int], *, cut: bool = False) -> Iterator[None]:
        """Pause passes over these partitions, and retention. Running passes are stopped first, without a
        trace of their current group. Pauses are counted: a partition is cleaned again when the last pause has
        ended.

        Args:
            cut: a rollback is the reason, and `clean_now` waits instead of failing.
        """
        chosen = set(partitions)
        with self._changed:
            self._paused.update(chosen)
            if cut:
                self._cut.update(chosen)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not chosen & self._in_progress)
        try:
            if not cut:
                with self._writer.exclusive:
                    pass  # retention that had begun before has ended
            yield
        finally:
            with self._changed:
                self._paused.subtract(chosen)
                if cut:
                    self._cut.subtract(chosen)
                self._changed.notify_all()

    def _check_not_paused(self, partition: int) -> None:
        pauses = self._paused[partition] - self._cut[partition]
        if pauses:
            raise ConfigError(
                "Cleaning is paused.", path=self._writer.root, position=f"partition {partition}",
                expected="no pause", found=f"{pauses} pauses",
                remedy="compact when the blocks of `cleaning_paused` have ended",
            )  # fmt: skip

    def close(self) -> None:
        """Stop all passes and begin no more. Returns when they have ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._in_progress)

    # -- metrics ---------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """The metrics of Kafka's cleaner, under its names.

        About the present sections: `max-dirty-percent`, `max-compaction-delay-secs` (age of the oldest dirty
        segment that is past `max.compaction.lag.ms`), `uncleanable-partitions-count`, `uncleanable-bytes`.
        About the last pass over each partition: `cleaner-recopy-percent`, `max-buffer-utilization-percent`,
        `max-clean-time-secs`. And `time-since-last-run-ms`, -1 before the first pass.
        """
        config, now_ms = self._writer.identity.config, self._writer.clock_ms()
        sections = self._sections()
        ages = [now_ms - s.dirty[0].created_ms for _, s in sections if s.dirty]
        given_up = [s for n, s in sections if self._writer.state.partitions[n].uncleanable]
        last = list(self._last.values())
        read, kept = sum(p.bytes_read for p in last), sum(p.bytes_kept for p in last)
        since = (self._clock() - max(self._ended.values())) * 1000 if self._ended else -1.0
        return {
            "max-dirty-percent": 100 * max((s.dirty_ratio for _, s in sections), default=0.0),
            "max-compaction-delay-secs": max(
                (a / 1000 for a in ages if a > config.max_compaction_lag_ms), default=0.0
            ),
            "uncleanable-partitions-count": float(len(given_up)),
            "uncleanable-bytes": float(sum(s.dirty_bytes for s in given_up)),
            "cleaner-recopy-percent": 100 * kept / read if read else 0.0,
            "max-buffer-utilization-percent": 100 * max((p.map_utilisation for p in last), default=0.0),
            "max-clean-time-secs": max((p.seconds for p in last), default=0.0),
            "time-since-last-run-ms": since,
        }
