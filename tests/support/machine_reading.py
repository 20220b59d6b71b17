"""Rules of the machine: readers, restores at every point and into every target, snapshots, clones."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from keyfold import Changelog, RestoredState, restore, resume
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import CompactedAway
from keyfold.statestore.keys.partitioner import partition_of
from support.faults.inject import Watched
from support.machine import Bounded
from support.machine_cleaning import CleaningMachine
from support.machine_writing import KEYS
from support.other_process import OtherProcess
from support.perfect import Ends, Made, Perfect, found_in

State = dict[bytes, bytes]
UTC = datetime.timezone.utc


@cache
def another_process() -> OtherProcess:
    """One for all histories: each opens its own views there."""
    return OtherProcess()


class ReadingMachine(CleaningMachine):
    def __init__(self) -> None:
        super().__init__()
        # Before descriptors are counted.
        another_process()
        self.reader: Changelog | None = None
        self.seen: Perfect | None = None
        self.seen_elsewhere: Perfect | None = None
        self.kept: tuple[RestoredState, State] | None = None
        self.kept_snapshot: tuple[RestoredState, State] | None = None

    # Few rules with many ways, so that what is written and cleaned has its turn.

    @rule(data=st.data(), how=st.sampled_from(["look up", "read", "view", "refresh", "keep", "elsewhere"]))
    def read_something(self, data: st.DataObject, how: str) -> None:
        if how == "look up":
            self.look_up(data)
        elif how == "read":
            self.read_from_any_offset(data)
        elif how == "view":
            self.look_through_the_reader(data)
        elif how == "refresh":
            self.open_or_refresh_a_reader()
        elif how == "elsewhere":
            self.open_or_refresh_a_reader_elsewhere()
        elif self.model.commits:
            self.keep_a_restored_state(data)

    @precondition(lambda self: self.model.commits)
    @rule(data=st.data(), how=st.sampled_from(["point", "part", "changes", "target", "resume"]))
    def restore_something(self, data: st.DataObject, how: str) -> None:
        if how == "point":
            self.restore_at_any_point(data)
        elif how == "part":
            self.restore_a_part(data)
        elif how == "changes":
            self.restore_what_changed(data)
        elif how == "target":
            self.restore_into_another_place(data)
        else:
            self.resume_an_app(data)

    @precondition(lambda self: self.model.commits)
    @rule(data=st.data(), how=st.sampled_from(["again", "clone", "move"]))
    def copy_it(self, data: st.DataObject, how: str) -> None:
        if how == "again":
            self.take_a_snapshot_in_the_same_place(data)
        else:
            self.clone_it(data, stay=how == "move")

    # -- a writer's own reads ----------------------------------------------------------------------

    def look_up(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(KEYS, min_size=1, max_size=4))
        low, high = data.draw(KEYS), data.draw(KEYS)
        state = self.model.fold()
        if self.is_living:
            self.prove_last_values()
            return
        store = self.timely(self.log.store)
        assert [self.log.get(k) for k in keys] == [state.get(k) for k in keys]
        assert store.get_all(keys) == [state.get(k) for k in keys]
        assert list(store.range(low, high)) == [(k, state[k]) for k in sorted(state) if low <= k < high]
        assert list(store.prefix(low)) == [(k, state[k]) for k in sorted(state) if k.startswith(low)]

    def read_from_any_offset(self, data: st.DataObject) -> None:
        p = data.draw(st.integers(0, self.model.partitions - 1))
        records = self.model.records[p]
        start = self.model.starts[p]
        offset = data.draw(st.integers(start, len(records)))
        to = data.draw(st.none() | st.integers(offset, len(records)))
        with suppress(CompactedAway):
            rows = found_in(self.log.read(p, offset, to))
            end = len(records) if to is None else to
            assert all(offset <= row[0] < end and tuple(row[1:]) == records[row[0]] for row in rows)
            there = {row[0] for row in rows}
            newest = {key: o for o, (key, _, _) in enumerate(records)}
            final = {o for o in newest.values() if records[o][1] is not None and offset <= o < end}
            assert final <= there

    # -- a reader's view ---------------------------------------------------------------------------

    def open_or_refresh_a_reader(self) -> None:
        if self.reader is None:
            self.reader = Changelog.open(self.path, mode="r", files=Watched())
        else:
            self.prove_view()
            self.reader.refresh()
        self.seen = self.model.started(tuple(self.reader.start_offsets().values()))

    def open_or_refresh_a_reader_elsewhere(self) -> None:
        other = another_process()
        if self.seen_elsewhere is None:
            starts = other.open(self.path)
        else:
            self.prove_told(other.seen(), self.seen_elsewhere)
            starts = other.refresh()
        self.seen_elsewhere = self.model.started(starts)
        self.prove_told(other.seen(), self.seen_elsewhere)

    def look_through_the_reader(self, data: st.DataObject) -> None:
        if self.reader is None or self.seen is None:
            return
        key = data.draw(KEYS)
        self.prove_view()
        state = self.seen.fold()
        assert self.reader.get(key) == state.get(key)
        assert dict(self.reader.store().all()) == state

    def prove_view(self) -> None:
        """The reader sees what it saw, whatever was done since."""
        assert self.reader is not None
        assert self.seen is not None
        self.prove_records(self.reader, self.seen)

    def keep_a_restored_state(self, data: st.DataObject) -> None:
        """It is read later, and is the same then."""
        self.prove_kept()
        made = self.draw_commit(data)
        with suppress(CompactedAway):
            restored = restore(self.path, at=made.number, files=Watched())
            self.kept = restored, self.model.started(self.starts_now()).fold(made.ends)

    def prove_kept(self) -> None:
        for kept in (self.kept, self.kept_snapshot):
            if kept is not None:
                with kept[0] as restored:
                    assert restored.to_dict() == kept[1]
        self.kept = self.kept_snapshot = None

    # -- restore -----------------------------------------------------------------------------------

    def restored(self, made: Made | None, expected: Callable[[Perfect], Any], **arguments: Any) -> None:
        """`restore` gives what the model gives, or refuses where it may; `made` is the point, if known."""
        while True:
            starts = self.starts_now()
            try:
                with restore(self.path, files=self.eyes, **arguments) as restored:
                    found = restored.to_dict()
            except CompactedAway:
                assert made is None or self.excused(made.number)
                return
            if starts == self.starts_now():
                break
        assert found == expected(self.model.started(starts))

    def restore_at_any_point(self, data: st.DataObject) -> None:
        made = self.draw_commit(data)
        at: Any = made.number
        kind = data.draw(st.sampled_from(["number", "batch", "anchor", "time", "offsets"]))
        if kind == "batch":
            at = (made.app, made.batch)
        elif kind == "offsets":
            at = {p: data.draw(st.integers(0, end)) for p, end in enumerate(self.model.ends)}
            ends = tuple(at.values())
            self.restored(None, lambda model: model.fold(ends), at=at)
            return
        elif kind == "anchor" and self.model.anchors:
            at, number = data.draw(st.sampled_from(self.model.anchors))
            found = self.model.commit(number)
            assert found is not None
            made = found
        elif kind == "time":
            ms = made.time_ms + data.draw(st.sampled_from([-1, 0, 1, 500]))
            until = [c for c in self.model.commits if c.time_ms <= ms]
            at = datetime.datetime.fromtimestamp(ms / 1000, UTC)
            if not until:
                self.restored(None, lambda model: "nothing was there", at=at)
                return
            made = until[-1]
        self.restored(made, lambda model: model.fold(made.ends), at=at)

    def restore_a_part(self, data: st.DataObject) -> None:
        made = self.draw_commit(data)
        keys, prefix = data.draw(st.lists(KEYS, max_size=3)), data.draw(KEYS)
        some = data.draw(st.lists(st.integers(0, self.model.partitions - 1), min_size=1, unique=True))

        def fold(model: Perfect) -> State:
            return model.fold(made.ends)

        self.restored(
            made, lambda m: {k: v for k, v in fold(m).items() if k in keys}, at=made.number, keys=keys
        )
        self.restored(
            made, lambda m: {k: v for k, v in fold(m).items() if k.startswith(prefix)},
            at=made.number, prefix=prefix,
        )  # fmt: skip
        count = self.model.partitions
        self.restored(
            made, lambda m: {k: v for k, v in fold(m).items() if partition_of(k, count) in some},
            at=made.number, partitions=some,
        )  # fmt: skip

    def restore_what_changed(self, data: st.DataObject) -> None:
        one, two = sorted([self.draw_commit(data), self.draw_commit(data)], key=lambda c: c.number)
        # It may be refused where a point is not exact, or a delete before the later one is gone.
        exact = self.must_be_exact(one.number) and self.must_be_exact(two.number)
        excused = not exact or self.dropped_a_delete(two.ends)
        self.restored(
            None if excused else two, lambda m: m.changed(one.ends, two.ends), since=one.number, at=two.number
        )

    def dropped_a_delete(self, ends: Ends) -> bool:
        with Changelog.open(self.path, mode="r", files=self.eyes) as view:
            for p, end in enumerate(ends):
                there = {row[0] for row in found_in(view.read(p))}
                newest = {key: o for o, (key, _, _) in enumerate(self.model.records[p][:end])}
                if any(self.model.records[p][o][1] is None and o not in there for o in newest.values()):
                    return True
        return False

    def restore_into_another_place(self, data: st.DataObject) -> None:
        made, target = self.draw_commit(data), self.place("target")
        partitions, as_store = data.draw(st.none() | st.integers(1, 3)), data.draw(st.booleans())
        with suppress(CompactedAway), restore(self.path, at=made.number, files=self.eyes) as restored:
            expected = self.model.started(self.starts_now()).fold(made.ends)
            if as_store:
                store = restored.to_store(target)
                assert dict(store.all()) == expected
                store.close()
                return
            restored.to_changelog(target, partitions=partitions)
            with Changelog.open(target, mode="r", files=self.eyes) as made_anew:
                assert dict(made_anew.store().all()) == expected
                # A later commit without records is in the same state.
                within = [c for c in self.model.commits if all(map(int.__le__, c.ends, made.ends))]
                held = {c.app: c.batch for c in within}
                found = {app: c.batch for app, c in made_anew.state.apps.items() if app != "restore"}
                assert {app: found.get(app) for app in held} == held
            assert verify(target, files=self.eyes).damages == []

    def resume_an_app(self, data: st.DataObject) -> None:
        app = self.draw_commit(data).app
        made = self.model.last_of(app)
        assert made is not None
        try:
            resumed = resume(self.path, app, files=self.files)
        except CompactedAway:
            assert self.excused(made.number)
            return
        with resumed:
            expected = self.model.started(self.starts_now()).fold(made.ends)
            assert resumed.commit.number == made.number
            assert resumed.state.to_dict() == expected
            pins = {a.commit for a in self.log.anchors().values() if a.app == app}
            assert made.number in pins

    # -- snapshots ---------------------------------------------------------------------------------

    def draw_point(self, data: st.DataObject) -> tuple[Made, int | None]:
        made = self.draw_commit(data)
        is_last = made == self.model.commits[-1]
        return made, None if is_last and data.draw(st.booleans()) else made.number

    def take_a_snapshot_in_the_same_place(self, data: st.DataObject) -> None:
        keep = data.draw(st.booleans())
        made, at = self.draw_point(data)
        place = self.path.with_name(f"{self.path.name}-snapshot")
        try:
            self.log.snapshot(place, at)
        except CompactedAway:
            assert self.excused(made.number)
            return
        self.prove_kept()
        assert verify(place, files=self.eyes).damages == []
        restored = restore(place, files=Watched())
        expected = self.model.started(self.starts_of(place)).fold(made.ends)
        if keep:
            self.kept_snapshot = restored, expected
        else:
            with restored:
                assert restored.to_dict() == expected

    def starts_of(self, place: Path) -> Ends:
        with Changelog.open(place, mode="r", files=self.eyes) as view:
            return tuple(view.start_offsets().values())

    def clone_it(self, data: st.DataObject, stay: bool) -> None:
        made, at = self.draw_point(data)
        snapshot, target = self.place("snapshot"), self.place("clone")
        try:
            self.log.snapshot(snapshot, at)
        except CompactedAway:
            assert self.excused(made.number)
            return
        files = Bounded()
        log = Changelog.clone(snapshot, target, files=files)
        if stay:
            log.close()
            self.let_go()
            self.log.close()
            self.path = target
            self.log = self.open(files)
            self.model = self.model.rolled_back(made.number)
            self.protected = frozenset()
        else:
            found = self.timely(lambda: dict(log.store().all()))
            expected = self.model.started(tuple(log.start_offsets().values())).fold(made.ends)
            assert self.is_living or found == expected
            log.close()

    def let_go(self) -> None:
        super().let_go()
        if self.reader is not None:
            self.prove_view()
            self.reader.close()
            self.reader = self.seen = None
        if self.seen_elsewhere is not None:
            self.prove_told(another_process().seen(), self.seen_elsewhere)
            another_process().close()
            self.seen_elsewhere = None
        self.prove_kept()
