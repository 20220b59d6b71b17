"""Waiting for what other threads and processes do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Returns as soon as the condition holds; fails when it has not held for so long."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"it did not come true within {seconds} s"
        time.sleep(0.01)


def in_time(call: Callable[[], T], seconds: float = 60.0) -> T:
    """What the call gives; fails when it has not returned for so long, and leaves it alone then."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as e:
            done.set_exception(e)

    threading.Thread(target=run, daemon=True, name="in-time").start()
    try:
        return done.result(seconds)
    except FutureTimeoutError:
        if done.done():
            raise
        raise AssertionError(f"it did not return within {seconds} s") from None
