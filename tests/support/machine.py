"""A changelog that Hypothesis drives, beside a perfect one, and what is proved after each step.

The proof does not believe what the product says of itself: it folds the raw records that a reader is given.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from unittest import mock

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from keyfold import Changelog, restore
from keyfold.checkpoints.log import ingest as records
from keyfold.checkpoints.manifest.resolve import resolve_ends
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore import filenames
from keyfold.statestore.errors import CompactedAway
from keyfold.statestore.segment import block
from support.faults.inject import KillAt, Operation, Selection, Watched, changes
from support.folds import IN_MEMORY
from support.horizons import Horizons
from support.other_process import Seen, seen_through
from support.perfect import Ends, Found, Made, Perfect, folded, found_in
from support.waiting import in_time

T = TypeVar("T")

NEVER_MS = 10**15
#: No step comes near it; what goes on for ever does.
OPERATIONS_MAX = 100_000
#: What a manifest's checkpoint may take for each thing that it names.
BYTES_PER_ITEM = 700

#: Values that are said more than once are drawn more often.
SETTINGS: dict[str, list[object]] = {
    "min.compaction.lag.ms": [0, 0, 1000, 50_000],
    "max.compaction.lag.ms": [NEVER_MS, 1, 5000],
    "anchors.auto": [0, 0, 1, 2, 3, 10],
    "retention.ms": [-1, -1, 1000, 50_000],
    "retention.bytes": [-1, -1, 1500, 5000],
    "cleanup.policy": ["compact", "compact", "compact", "compact,delete", "compact,delete", "delete"],
    "compression.type": ["none", "lz4", "zstd"],
    "segment.bytes": [1024, 4000, 8000, 1 << 20],
    "segment.ms": [NEVER_MS, 1, 1000],
    "cleaner.dedupe.buffer.size": [1 << 20, 1024],
    "delete.retention.ms": [0, 1000, NEVER_MS],
    "min.cleanable.dirty.ratio": [0.5, 0.0, 1.0],
}
_LEAST, _LONGEST = "min.compaction.lag.ms", "max.compaction.lag.ms"


def _lags_agree(settings: dict[str, object]) -> dict[str, object]:
    """One lag is set with the other, so that the longest is never below the least, whatever was before."""
    if not {_LEAST, _LONGEST} & set(settings):
        return settings
    least, longest = int(str(settings.get(_LEAST, 0))), int(str(settings.get(_LONGEST, NEVER_MS)))
    return {**settings, _LEAST: least, _LONGEST: max(least, longest)}


CONFIG = st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in SETTINGS.items()}).map(
    _lags_agree
)


class Endless(AssertionError):
    """One step has done so many operations that it will not end by itself."""


class Bounded(KillAt):
    """A `KillAt` that also ends a step which goes on for ever."""

    def __init__(self, n: int | None = None, *, halfway: bool = False, only: Selection = changes) -> None:
        super().__init__(n, halfway=halfway, only=only)
        self.operations = 0

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        self.operations += 1
        if self.operations > OPERATIONS_MAX:
            raise Endless(f"{OPERATIONS_MAX} operations in one step, the last {operation.name}")
        with super().around(operation):
            yield


def of_the_log(operation: Operation) -> bool:
    """Last-value stores are made by a thread of their own, at no certain time."""
    return changes(operation) and "store-" not in str(operation.path)


class Machine(RuleBasedStateMachine):
    """The changelog `log` at `path`, the perfect one `model`, and the invariants between them.

    `eyes` are the files of other readers: what they see is what another process sees.
    """

    #: settings that stay as they are
    fixed: ClassVar[dict[str, object]] = {"cleaner.threads": 0}
    #: whether something happens between the steps, too
    is_living: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self._opened = False
        self.eyes = Watched()
        self.protected: frozenset[int] = frozenset()
        self.horizons = [Horizons(beside=self.is_living) for _ in range(2)]
        self._at_end = ExitStack()

    @initialize(
        partitions=st.integers(1, 2),
        block_bytes=st.sampled_from([200, 600, 2 << 20]),
        config=CONFIG,
    )
    def create(self, partitions: int, block_bytes: int, config: dict[str, object]) -> None:
        self.descriptors = len(os.listdir("/proc/self/fd"))
        self.directory = Path(tempfile.mkdtemp(dir=IN_MEMORY))
        self._at_end.callback(shutil.rmtree, self.directory, ignore_errors=True)
        # Small blocks let small commits span segments.
        self._at_end.enter_context(_blocks_of(block_bytes))
        self.path = self.directory / "log"
        self.now_ms = 1_000_000
        self.model = Perfect.empty(partitions)
        # Smaller than by default, so that there is something to clean.
        self.config = {"segment.bytes": 4000, "delete.retention.ms": 1000, **config, **self.fixed}
        self.note_time_and_settings()
        self._opened = True
        self.log = self.open()

    def open(self, files: Bounded | None = None, **arguments: Any) -> Changelog:
        self.files = Bounded() if files is None else files
        return Changelog.open(
            self.path,
            partitions=self.model.partitions,
            config=self.config,
            files=self.files,
            clock_ms=lambda: self.now_ms,
            **arguments,
        )

    def place(self, name: str) -> Path:
        """A path beside the changelog that was not used yet."""
        number = sum(1 for p in self.directory.iterdir() if p.name.startswith(name))
        return self.directory / f"{name}-{number}"

    def configure(self, changed: Mapping[str, object]) -> None:
        """By a second handle, as a user does."""
        self.config = {**self.config, **changed}
        self.note_time_and_settings()
        with Changelog.open(self.path, files=self.files, config=changed):
            pass

    def pass_time(self, ms: int) -> None:
        self.now_ms = max(0, self.now_ms + ms)
        self.note_time_and_settings()

    def note_time_and_settings(self) -> None:
        """A pass beside may go by each that there was."""
        for horizons in self.horizons:
            horizons.now(self.now_ms, int(str(self.config["delete.retention.ms"])))

    # -- what must hold ----------------------------------------------------------------------------

    @invariant()
    def it_is_the_perfect_one(self) -> None:
        if self._opened:
            self.prove()
            self.files.operations = 0

    def prove(self) -> None:
        under_way = frozenset(self.log.engine.cleaning._in_progress)
        with Changelog.open(self.path, mode="r", files=self.eyes) as view:
            found = self.prove_records(view, self.model)
            self.prove_points(view, found)
            self.prove_tombstones(view, found, under_way)
        self.prove_newest()
        assert verify(self.path, files=self.eyes).damages == []

    def prove_records(self, view: Changelog, model: Perfect) -> list[list[Found]]:
        """What a reader is given are records of the model, with the same fold; returns them."""
        return self.prove_told(seen_through(view), model)

    def prove_told(self, seen: Seen, model: Perfect) -> list[list[Found]]:
        assert seen.ends == model.ends
        assert seen.next_commit == model.next_number
        assert seen.apps == {c.app: c.batch for c in model.commits}
        for p, rows in enumerate(seen.records):
            offsets = [row[0] for row in rows]
            assert offsets == sorted(set(offsets))
            assert all(seen.starts[p] <= offset for offset in offsets)
            assert all(tuple(row[1:]) == model.records[p][row[0]] for row in rows)
            below = seen.unique_below[p]
            keys = [key for offset, key, _, _ in rows if offset < below]
            assert len(keys) == len(set(keys)), f"partition {p}: keys are not unique below {below}"
        assert self.fold_of(seen.records, model.ends) == model.started(seen.starts).fold()
        return seen.records

    def prove_points(self, view: Changelog, raw: list[list[Found]]) -> None:
        """The state at every point that the product calls restorable; and those that must be, are."""
        starts = tuple(view.start_offsets().values())
        assert all(now >= before for now, before in zip(starts, self.model.starts, strict=True))
        moved = starts != self.model.starts
        self.model = self.model.started(starts)
        auto = view.config.anchors_auto
        last = {c.number for c in self.model.commits[-auto:]} if auto else set[int]()
        exact = {c.number for c in self.model.commits if self.is_exact(view, raw, c, c.number)}
        assert moved or self.protected & last <= exact, f"{self.protected & last} are not all in {exact}"
        if self.model.commits:
            assert self.model.commits[-1].number in exact
        begun = {c.number for c in self.model.commits if self.model.is_at_start(c.ends)}
        self.protected = frozenset((exact & last) - begun)
        held = {a.name: a.commit for a in view.state.anchors.values() if not a.app}
        for name, number in self.model.anchors:
            made = self.model.commit(number)
            assert made is not None
            if name not in held:
                assert self.model.is_cut(made.ends), f"anchor {name} is gone"
                self.model = self.model.unnamed(name)
            else:
                assert held[name] == number
                there = self.is_exact(view, raw, made, name)
                assert there or any(starts), f"anchor {name} is not exact"

    def prove_tombstones(self, view: Changelog, raw: list[list[Found]], under_way: Collection[int]) -> None:
        """A delete that counts stays for `delete.retention.ms` from the first pass that came past it."""
        for p, rows in enumerate(raw):
            start, records = self.model.starts[p], self.model.records[p]
            newest = {key: o for o, (key, _, _) in enumerate(records)}
            deletes = {o for o in newest.values() if records[o][1] is None and o >= start}
            there = deletes & {row[0] for row in rows}
            partition = view.state.partitions[p]
            end = partition.unique_end
            if self.is_living:
                # A pass under way may have taken back what is unique, and has not taken back a date.
                end = max(end, *(x.clean_end for x in partition.passes), 0)
            self.horizons[p].now(self.now_ms, view.config.delete_retention_ms)
            self.horizons[p].look(deletes, there, end, under_way=p in under_way)

    def is_exact(self, view: Changelog, raw: list[list[Found]], made: Made, at: int | str) -> bool:
        try:
            ends = resolve_ends(view.state, self.path, at)
        except CompactedAway:
            return False
        assert ends == made.ends
        assert not self.model.is_cut(ends), f"{at} is said to be exact, and retention has deleted a part"
        assert self.fold_of(raw, ends) == self.model.fold(ends), f"the state at {at} is another one"
        return True

    def fold_of(self, raw: list[list[Found]], ends: Ends) -> dict[bytes, bytes]:
        state: dict[bytes, bytes] = {}
        for rows, end in zip(raw, ends, strict=True):
            state.update(folded(rows, end))
        return state

    def prove_newest(self) -> None:
        """By `restore`, which believes the manifest; retention may come meanwhile."""
        while True:
            starts = self.starts_now()
            with restore(self.path, files=self.eyes) as restored:
                # Not `to_dict`, which starts threads.
                state = {key: value for _, key, value, _ in found_in(restored.batches())}
            if starts == self.starts_now():
                break
        assert state == self.model.started(starts).fold()

    def starts_now(self) -> Ends:
        """Where the log starts; between two steps only a living one changes that."""
        if not self.is_living:
            return self.model.starts
        with Changelog.open(self.path, mode="r", files=self.eyes) as view:
            return tuple(view.start_offsets().values())

    # -- helpers of rules --------------------------------------------------------------------------

    def draw_commit(self, data: st.DataObject) -> Made:
        return self.model.commits[data.draw(st.integers(0, len(self.model.commits) - 1))]

    def must_be_exact(self, number: int) -> bool:
        """Whether the product has no excuse for a point that it has folded away."""
        return number in self.protected or number in dict(self.model.anchors).values()

    def excused(self, number: int) -> bool:
        """Whether a commit may be refused: folded away, or retention has come past it."""
        return not self.must_be_exact(number) or any(self.starts_now())

    def timely(self, call: Callable[[], T]) -> T:
        return in_time(call)

    # -- the end -----------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Close what belongs to readers."""

    def teardown(self) -> None:
        try:
            # After a step that has failed the rest would only hide it.
            if self._opened and sys.exc_info()[0] is None:
                self.finish()
        finally:
            if hasattr(self, "log"):
                with suppress(Exception):
                    self.log.close()
            self._at_end.close()

    def finish(self) -> None:
        self.let_go()
        self.prove()
        self.prove_last_values()
        self.log.close()
        self.log = self.open()
        self.prove()
        self.log.close()
        self.prove_sizes()

    def prove_last_values(self) -> None:
        while True:
            starts = self.starts_now()
            found = self.timely(lambda: dict(self.log.store().all()))
            if starts == self.starts_now():
                break
        assert found == self.model.started(starts).fold()

    def prove_sizes(self) -> None:
        """Nothing is left that nobody names: files, lines, commits, descriptors."""
        with Changelog.open(self.path, mode="r", files=self.eyes) as view:
            state = view.state
        segments = 0
        for number, p in enumerate(state.partitions):
            named = {s.name for s in p.segments} | {
                filenames.segment_index(s.name) for s in p.segments if s.sealed
            }
            segments += len(p.segments)
            directory = filenames.partition(self.path, number)
            there = {f.name for f in directory.iterdir()} if directory.exists() else set()
            assert {f for f in there if not f.startswith("store-")} == named
        assert [f for f in (self.path / filenames.WORK).rglob("*") if not f.is_dir()] == []
        manifest = sorted((self.path / filenames.MANIFEST).iterdir())
        assert len(manifest) == 2, manifest
        kept = 2 * len(state.commits) + len(state.apps) + len(state.anchors)
        assert len(state.commits) <= len(self.model.commits)
        bound = 4096 + BYTES_PER_ITEM * (segments + kept)
        assert sum(f.stat().st_size for f in manifest) <= bound
        open_now = len(os.listdir("/proc/self/fd"))
        assert open_now <= self.descriptors, f"{open_now - self.descriptors} descriptors are left open"


@contextmanager
def _blocks_of(block_bytes: int) -> Iterator[None]:
    with mock.patch.object(records, "split", partial(block.split, block_bytes=block_bytes)):
        yield
