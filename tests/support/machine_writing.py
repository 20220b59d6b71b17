"""Rules of the machine: what writes: twice, nested, by two handles, by one that dies or is overtaken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import precondition, rule

from keyfold import Changelog, Standby
from keyfold.statestore.errors import (
    BatchConflict,
    ChangelogLocked,
    CompactedAway,
    ConfigError,
    KeyfoldError,
    WriterFenced,
)
from support.faults.inject import Killed
from support.lifecycle import bury, forget
from support.machine import CONFIG, Bounded, Machine, of_the_log
from support.perfect import Filling, Row, table

KEYS = st.sampled_from([b"", b"a", b"b", b"ab", b"a\0", b"\0", b"key-5", b"key-6"])
VALUES = st.one_of(st.none(), st.binary(max_size=6), st.just(Filling(300)))
ROWS = st.lists(st.tuples(KEYS, VALUES), max_size=12)
APPS = st.sampled_from(["m", "n"])
TRANSACTIONS = ["alone", "nested", "around an append", "beside an append"]
#: what a killed life was about to do
LAST_WORDS = st.sampled_from(["append", "compact", "roll back", "anchor", "configure", "chores", "snapshot"])


class WritingMachine(Machine):
    # -- appends -----------------------------------------------------------------------------------

    def next_batch(self, app: str) -> int:
        last = self.model.last_of(app)
        return 0 if last is None else last.batch + 1

    def append_to(self, log: Changelog, rows: list[Row], app: str) -> None:
        batch = self.next_batch(app)
        self.timely(lambda: log.append(table(rows), app_id=app, batch_id=batch))
        self.model = self.model.committed(rows, app, batch, self.now_ms)

    @rule(rows=ROWS, app=APPS, by_a_second_handle=st.booleans())
    def append(self, rows: list[Row], app: str, by_a_second_handle: bool) -> None:
        if by_a_second_handle:
            with Changelog.open(self.path, files=self.files) as second:
                self.append_to(second, rows, app)
        else:
            self.append_to(self.log, rows, app)

    @rule(key=KEYS, value=VALUES, last=st.tuples(KEYS, VALUES), count=st.integers(5, 9))
    def append_what_spans_segments(
        self, key: bytes, value: bytes | None, last: tuple[bytes, bytes | None], count: int
    ) -> None:
        filling: list[Row] = [(b"f%d" % n, Filling(400)) for n in range(count)]
        self.append_to(self.log, [(key, value), *filling, last], "m")

    @rule(first=st.integers(0, 100), value=VALUES)
    def append_more_keys_than_the_small_map_holds(self, first: int, value: bytes | None) -> None:
        self.append_to(self.log, [(b"%d" % n, value) for n in range(first, first + 100)], "m")

    @precondition(lambda self: self.model.commits)
    @rule(data=st.data(), rows=st.none() | ROWS)
    def deliver(self, data: st.DataObject, rows: list[Row] | None) -> None:
        if rows is None:
            self.deliver_again(data)
        else:
            self.deliver_other_rows_as_the_last_batch(rows)

    def deliver_again(self, data: st.DataObject) -> None:
        """A batch that counts, as it was, or an older one: nothing changes, whether it is refused or not."""
        made = self.draw_commit(data)
        is_last = self.model.last_of(made.app) == made
        with suppress(*(() if is_last else (BatchConflict,))):
            self.log.append(table(made.rows), app_id=made.app, batch_id=made.batch)

    def deliver_other_rows_as_the_last_batch(self, rows: list[Row]) -> None:
        made = self.model.last_of("m")
        if made is not None and tuple(rows) != made.rows:
            with pytest.raises(BatchConflict):
                self.log.append(table(rows), app_id="m", batch_id=made.batch)

    # -- transactions ------------------------------------------------------------------------------

    @rule(rows=ROWS, how=st.sampled_from(TRANSACTIONS))
    def transact(self, rows: list[Row], how: str) -> None:
        if how == "alone":
            self.transact_alone(rows)
        elif how == "beside an append":
            self.count_beside_an_append(rows[0][0] if rows else b"")
        else:
            self.nest(how != "nested")

    def transact_alone(self, rows: list[Row]) -> None:
        batch = self.next_batch("t")
        written: dict[bytes, bytes | None] = {}
        seen: dict[bytes, bytes | None] = {}

        def work() -> list[Row]:
            with self.log.transaction(app_id="t", batch_id=batch) as store:
                for key, value in rows:
                    if key in written:
                        assert store.get(key) == written[key]
                    else:
                        seen[key] = store.get(key)
                    if value is None:
                        store.delete(key)
                    else:
                        store.put(key, value)
                    written[key] = value
                return [(r["key"], r["value"]) for r in store.changes().to_pylist()]

        changes = self.timely(work)
        self.prove_seen(seen)
        self.model = self.model.committed(changes, "t", batch, self.now_ms)

    def prove_seen(self, seen: Mapping[bytes, bytes | None]) -> None:
        """What a transaction has read of keys is right, or retention on a thread has deleted it before."""
        right = self.model.fold()
        others = {key for key, value in seen.items() if value != right.get(key)}
        if others:
            assert self.is_living
            left = self.model.started(self.starts_now()).fold()
            assert all(seen[key] is None and key not in left for key in others)

    def nest(self, as_append: bool) -> None:
        """What is written inside an open transaction is refused, or the transaction is."""
        outer, inner = self.next_batch("t"), self.next_batch("t") + 1
        seen: dict[bytes, bytes | None] = {}
        done: list[str] = []

        def inside() -> None:
            if as_append:
                self.log.append(table([(b"a", b"inner")]), app_id="n", batch_id=self.next_batch("n"))
            else:
                with self.log.transaction(app_id="t", batch_id=inner) as second:
                    second.put(b"a", b"inner")
            done.append("inner")

        def work() -> None:
            with self.log.transaction(app_id="t", batch_id=outer) as first:
                seen[b"a"] = first.get(b"a")
                first.put(b"b", seen[b"a"] or b"")
                with suppress(KeyfoldError):
                    inside()
            done.append("outer")

        with suppress(KeyfoldError):
            self.timely(work)
        self.prove_seen(seen)
        if "inner" in done:
            app, batch = ("n", self.next_batch("n")) if as_append else ("t", inner)
            self.model = self.model.committed([(b"a", b"inner")], app, batch, self.now_ms)
        assert len(done) < 2, "the outer one has not seen what the inner one wrote"
        if "outer" in done:
            self.model = self.model.committed([(b"b", seen[b"a"] or b"")], "t", outer, self.now_ms)

    def count_beside_an_append(self, key: bytes) -> None:
        """A transaction that adds to what it has read, while another thread appends to the same key."""
        before = self.model.fold().get(key, b"")
        mine, theirs = self.next_batch("t"), self.next_batch("n")
        seen: dict[bytes, bytes | None] = {}
        refused: list[KeyfoldError] = []

        def append() -> None:
            try:
                self.log.append(table([(key, before + b"2")]), app_id="n", batch_id=theirs)
            except KeyfoldError as e:
                refused.append(e)

        thread = threading.Thread(target=append, daemon=True)

        def work() -> bool:
            try:
                with self.log.transaction(app_id="t", batch_id=mine) as store:
                    seen[key] = store.get(key)
                    thread.start()
                    thread.join(0.02)
                    store.put(key, (seen[key] or b"") + b"1")
                return True
            except KeyfoldError:
                return False

        added = self.timely(work)
        self.timely(thread.join)
        self.prove_seen(seen)
        one: tuple[Row, str, int] = ((key, (seen.get(key) or b"") + b"1"), "t", mine)
        two: tuple[Row, str, int] = ((key, before + b"2"), "n", theirs)
        # Either there is one of them only, or the transaction came first, for it has not seen the append.
        for row, app, batch in [one] * added + [two] * (not refused):
            self.model = self.model.committed([row], app, batch, self.now_ms)

    # -- lives -------------------------------------------------------------------------------------

    @rule(overtaken=st.booleans(), rows=ROWS, app=APPS)
    def begin_another_life(self, overtaken: bool, rows: list[Row], app: str) -> None:
        if overtaken:
            self.be_overtaken(rows, app)
        else:
            self.log.close()
            self.log = self.open()

    @rule(settings=CONFIG)
    def set(self, settings: dict[str, object]) -> None:
        self.configure(settings)

    @rule(ms=st.sampled_from([-60_000, -1, 1, 1001, 100_000]))
    def let_the_clock_jump(self, ms: int) -> None:
        self.pass_time(ms)

    def be_overtaken(self, rows: list[Row], app: str) -> None:
        """Another writer steals; this one acknowledges nothing from then on."""
        overtaken, files = self.log, self.files
        forget(overtaken)
        self.log = self.open(steal=True)
        self.append_to(self.log, rows, app)
        with pytest.raises(WriterFenced):
            overtaken.append(table([(b"a", b"lost")]), app_id="m", batch_id=10**6)
        bury(files, overtaken)

    @rule(
        rows=ROWS, words=LAST_WORDS, at=st.integers(0, 40), halfway=st.booleans(), settings=CONFIG,
        data=st.data(),
    )  # fmt: skip
    def do_it_and_die(
        self, rows: list[Row], words: str, at: int, halfway: bool, settings: dict[str, object],
        data: st.DataObject,
    ) -> None:  # fmt: skip
        """Another life begins with what the dead one left: what it did is there wholly or not at all."""
        self.log.close()
        dying = Bounded(at, halfway=halfway, only=of_the_log)
        if words == "roll back" and not self.model.commits:
            words = "append"
        number = self.draw_commit(data).number if words == "roll back" else 0
        batch = self.next_batch("m")
        deeds: dict[str, Callable[[Changelog], object]] = {
            "append": lambda log: log.append(table(rows), app_id="m", batch_id=batch),
            "compact": lambda log: log.compact(),
            "roll back": lambda log: log.rollback(number),
            "anchor": lambda log: log.anchor("z"),
            "configure": lambda log: log.engine.configure(settings),
            "chores": lambda log: log.engine.do_chores(),
            "snapshot": lambda log: log.snapshot(self.place("dead")),
        }
        try:
            with suppress(Killed, ConfigError, CompactedAway):
                self.timely(lambda: deeds[words](self.open(dying)))
        except KeyfoldError:
            # The cleaner's thread may have been the one that was killed, in the middle of a line.
            assert self.is_living
            assert dying.dead
        bury(dying)
        if words == "configure":
            self.config.update(settings)
            self.note_time_and_settings()
        self.log = self.open()
        self.take_over(words, rows, batch, number)

    def take_over(self, words: str, rows: list[Row], batch: int, number: int) -> None:
        """What of its last words has come true."""
        state = self.log.state
        if words == "append" and self.log.last_batch("m") == batch:
            self.model = self.model.committed(rows, "m", batch, self.now_ms)
        if words == "roll back" and any(len(p.cuts) for p in state.partitions):
            kept = [c.number for c in state.commits]
            if kept and kept[-1] == number != self.model.commits[-1].number:
                self.model = self.model.rolled_back(number)
        if words == "anchor" and "z" in state.anchors and "z" not in dict(self.model.anchors):
            self.model = self.model.named("z", self.model.commits[-1].number)

    def stand_by(self, steal: bool) -> None:
        """A standby takes over from a writer that has closed, or that lives and is fenced."""
        before, files = self.log, self.files
        self.files = Bounded()
        with Standby(self.path, files=self.files, clock_ms=lambda: self.now_ms) as standby:
            if steal:
                forget(before)
            else:
                before.close()
            self.log = standby.take_over(timeout=30, steal=steal)
        if steal:
            with pytest.raises((WriterFenced, ChangelogLocked)):
                before.append(table([(b"a", b"lost")]), app_id="m", batch_id=10**6)
            bury(files, before)
