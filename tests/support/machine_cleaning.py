"""Rules of the machine: what takes records away, and what must keep them."""

from __future__ import annotations

from contextlib import suppress

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import precondition, rule

from keyfold.checkpoints.cleaner.clean_pass import Aborted, clean_partition
from keyfold.statestore.errors import CompactedAway, ConfigError
from support.machine_writing import WritingMachine


class CleaningMachine(WritingMachine):
    @rule(later_ms=st.sampled_from([0, 0, 2000]))
    def compact(self, later_ms: int) -> None:
        self.pass_time(later_ms)
        if "compact" in self.log.config.cleanup_policy:
            # Retention on its thread may stop it.
            with suppress(*((ConfigError,) if self.is_living else ())):
                self.timely(self.log.compact)
        else:
            with pytest.raises(ConfigError):
                self.log.compact()

    @rule(
        partition=st.integers(0, 1), spill_all=st.booleans(), seal=st.booleans(),
        steps=st.none() | st.integers(0, 25),
    )  # fmt: skip
    def clean_one_partition(self, partition: int, spill_all: bool, seal: bool, steps: int | None) -> None:
        """As the thread of the cleaner does, which seals nothing; with `steps` it is broken off anywhere,
        also between two of its groups.
        """
        left = 1 << 30 if steps is None else steps

        def pace(size: int) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Aborted

        writer = self.log.engine.writer
        if seal:
            writer.seal_active()
        if "compact" in self.log.config.cleanup_policy:
            with self.log.cleaning_paused(), suppress(Aborted):
                clean_partition(writer, partition % self.model.partitions, pace, spill_all=spill_all)

    @rule()
    def do_chores(self) -> None:
        """Retention, segments that are too old to stay active."""
        before = self.log.start_offsets()
        self.timely(self.log.engine.do_chores)
        if "delete" not in self.log.config.cleanup_policy:
            assert self.log.start_offsets() == before

    # -- anchors -----------------------------------------------------------------------------------

    @precondition(lambda self: self.model.commits)
    @rule(name=st.sampled_from(["x", "y"]), data=st.data(), last=st.booleans())
    def set_or_drop_an_anchor(self, name: str, data: st.DataObject, last: bool) -> None:
        if name in dict(self.model.anchors):
            try:
                self.log.drop_anchor(name)
            except ConfigError:
                assert name not in self.log.anchors()
            self.model = self.model.unnamed(name)
            return
        number = (self.model.commits[-1] if last else self.draw_commit(data)).number
        try:
            self.log.anchor(name, None if last else number)
        except CompactedAway:
            assert self.excused(number)
            return
        self.model = self.model.named(name, number)

    # -- rollback ----------------------------------------------------------------------------------

    @precondition(lambda self: self.model.commits)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        """To any commit whose state is exact, unless a named anchor is later; the rest never was."""
        made = self.draw_commit(data)
        later = [name for name, number in self.model.anchors if number > made.number]
        try:
            done = self.timely(lambda: self.log.rollback(made.number))
        except ConfigError:
            assert later
            return
        except CompactedAway:
            assert later or self.excused(made.number)
            return
        assert not later
        assert done.number == made.number
        self.model = self.model.rolled_back(made.number)
        self.protected = frozenset(n for n in self.protected if n <= made.number)
