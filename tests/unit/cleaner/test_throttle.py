"""The cleaner's limit of bytes per second, by a clock that only sleeping moves."""

from __future__ import annotations

import pytest

from keyfold.checkpoints.cleaner.clean_pass import Aborted
from keyfold.checkpoints.cleaner.throttle import Throttle
from keyfold.checkpoints.manifest.config import UNLIMITED


class Time:
    """`late`: what every sleep takes too long."""

    def __init__(self, late: float = 0.0) -> None:
        self.now = 100.0
        self.late = late
        self.slept = 0

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late
        self.slept += 1


def throttle(time: Time, rate: int) -> Throttle:
    return Throttle(lambda: rate, time.sleep, lambda: time.now)


@pytest.mark.parametrize("late", [0.0, 0.004, 0.02])
@pytest.mark.parametrize("size", [100, 10_000, 3_000_000])
def test_the_rate_is_kept_within_a_tenth_even_if_sleeping_takes_longer(size: int, late: float) -> None:
    time = Time(late)
    throttled = throttle(time, 1_000_000)
    began, sent = time.now, 0
    while sent < 20_000_000:
        throttled(size)
        sent += size
    assert sent / (time.now - began) == pytest.approx(1_000_000, rel=0.1)


def test_time_that_was_not_used_is_not_made_up_for_later() -> None:
    time = Time()
    throttled = throttle(time, 1000)
    throttled(1000)
    time.now += 3600
    began = time.now
    throttled(2000)
    assert time.now - began == pytest.approx(2.0, abs=0.06)


def test_without_a_limit_nobody_sleeps() -> None:
    time = Time()
    throttle(time, UNLIMITED)(1 << 40)
    assert time.slept == 0


def test_a_long_sleep_ends_when_the_pass_is_stopped() -> None:
    time = Time()

    def check() -> None:
        if time.now > 101:
            raise Aborted

    with pytest.raises(Aborted):
        throttle(time, 1)(3600, check)
    assert time.now < 102
