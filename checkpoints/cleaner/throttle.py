"""A limit on the bytes per second that the background cleaner reads and writes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from keyfold.checkpoints.manifest.config import UNLIMITED

#: Time lost by sleeping too long may be made up for, up to this many seconds.
_CREDIT_SECONDS: Final = 0.05
#: Interval at which a sleeper checks whether it should stop.
_SLICE_SECONDS: Final = 0.1


class Throttle:
    """Limits the rate of bytes, for all threads together (Kafka's `Throttler`).

    Args:
        rate: bytes per second as of now; it may change.
        sleep, clock: for tests; seconds.
    """

    def __init__(
        self,
        rate: Callable[[], int],
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = rate
        self._sleep = sleep
        self._clock = clock
        self._free_at = clock()
        self._lock = threading.Lock()

    def __call__(self, size: int, check: Callable[[], None] = lambda: None) -> None:
        """Account for `size` bytes and sleep until they fit the rate. `check` is called meanwhile and may
        raise.
        """
        rate = self._rate()
        check()
        if rate >= UNLIMITED:
            return
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now - _CREDIT_SECONDS) + size / rate
            free_at = self._free_at
        while (left := free_at - self._clock()) > 0:
            self._sleep(min(left, _SLICE_SECONDS))
            check()
