"""The machine with a cleaner on its own thread, which comes whenever it can, and standbys."""

from __future__ import annotations

from typing import ClassVar

import hypothesis.strategies as st
from hypothesis.stateful import rule

from support.machine_reading import ReadingMachine


class LivingMachine(ReadingMachine):
    fixed: ClassVar[dict[str, object]] = {"cleaner.threads": 1, "cleaner.backoff.ms": 1}
    is_living = True

    @rule(steal=st.booleans())
    def let_a_standby_take_over(self, steal: bool) -> None:
        self.stand_by(steal)
