"""How long the deletes of a partition must stay, while settings and the clock change beside a cleaner.

What is looked at now and then tells no more than that a pass came in between. So each of its three times is
an interval: when the first pass came past a delete, when the pass that took it began, by which setting.
"""

from __future__ import annotations

from collections.abc import Collection


class Horizons:
    """The deletes of one partition, from one look to the next.

    A pass goes by the setting and the clock of its begin, and dates what it has come through at its end. One
    that is under way at a look may have begun at any time since the last look at which none was.

    Args:
        beside: whether passes come at any time. Otherwise all that come between two looks come right before
            the second one, with the setting and the clock of then.
    """

    def __init__(self, beside: bool) -> None:
        self._beside = beside
        #: clocks since the last look
        self._clocks: list[int] = []
        #: clocks and settings since the last look at which no pass was under way
        self._begun: list[int] = []
        self._settings: list[int] = []
        #: offset of a delete that counts → the earliest time at which a pass may have come past it
        self._dated: dict[int, int] = {}
        self._deletes: set[int] = set()
        self._end = 0

    def now(self, clock_ms: int, retention_ms: int) -> None:
        """This is the clock, and `delete.retention.ms`, from now on; also whenever one of them changes."""
        if not self._beside:
            self._clocks, self._begun, self._settings = [], [], []
        self._clocks.append(clock_ms)
        self._begun.append(clock_ms)
        self._settings.append(retention_ms)

    def look(self, deletes: Collection[int], there: Collection[int], end: int, *, under_way: bool) -> None:
        """Prove that none has gone too soon.

        Args:
            deletes: the deletes that are the newest record of their key.
            there: those of them that the log still holds.
            end: how far passes have come.
            under_way: whether there was a pass under way when what is looked at was not yet fixed.
        """
        came_past, shortest = min(self._clocks), min(self._settings)
        for offset in (self._deletes & set(deletes)) - set(there):
            dated = self._dated.get(offset)
            if dated is None:
                dated = came_past
                assert shortest == 0 or self._beside, f"delete {offset} went in its first pass"
            assert max(self._begun) - dated >= shortest, f"delete {offset} went too soon"
        # A rollback gives offsets again. A pass that comes past a delete with its clock set back dates it
        # again.
        again = end != self._end or self._beside
        dates = {o: came_past for o in deletes if o < end}
        known = {o: at for o, at in self._dated.items() if o in deletes}
        self._dated = dates | {o: min(at, dates.get(o, at)) if again else at for o, at in known.items()}
        self._deletes = set(deletes) & set(there)
        self._end = end
        del self._clocks[:-1]
        if not under_way:
            del self._begun[:-1]
            del self._settings[:-1]
