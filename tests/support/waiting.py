"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Returns as soon as the condition holds; fails when it has not held for so long."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"it did not come true within {seconds} s"
        time.sleep(0.01)
