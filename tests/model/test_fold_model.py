"""The vectorised fold agrees with a dict and a list, whatever the log, the map's size and the hash."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keyfold.checkpoints.compaction import fold, key_index
from keyfold.checkpoints.compaction.fold import FoldCounts, OffsetMap, compact, last_per_key, last_values
from support.fold_model import HASHES, Record, batches, compacted, folded, map_end, records, two_bits

KeyHasher = Callable[[pa.Array], npt.NDArray[np.int64]]
Scale = tuple[int, int, int, int, int, int] | None

#: Keys that are easily taken for one another: empty, zeros, prefixes, the same but for one byte far behind.
LONG = b"k" * 1100
KEYS = [
    b"", b"\0", b"\0\0", bytes(8), bytes(9), b"a", b"ab", b"abcdefgh", b"abcdefghi", b"abcdefgh\0",
    b"1234567890abcdef", b"1234567890abcdeF", b"x" * 64, b"x" * 65, b"x" * 64 + b"y", LONG,
    LONG[:-1] + b"K", LONG[:-1], LONG[:600] + b"K" + LONG[601:],
]  # fmt: skip


@st.composite
def logs(draw: st.DrawFn, size_max: int = 60) -> list[Record]:
    """Records with gaps between their offsets."""
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=8, unique=True))
    if draw(st.booleans()):
        keys = [f"key-{i:04}".encode() for i in range(draw(st.integers(1, 12)))]
    offset, log = draw(st.integers(0, 3)), []
    for _ in range(draw(st.integers(0, size_max))):
        value = draw(st.one_of(st.none(), st.binary(max_size=3)))
        log.append(Record(offset, draw(st.sampled_from(keys)), value))
        offset += draw(st.sampled_from([1, 1, 1, 2, 7]))
    return log


sizes = st.lists(st.integers(0, 9), max_size=8)
hashes = st.sampled_from(HASHES)
#: Room for so few entries and slices so short that small logs go through all the work of large ones.
scales = st.sampled_from([None, (2, 2, 2, 1, 1, 0), (4, 16, 3, 5, 2, 1), (16, 64, 7, 1, 9, 4)])


@contextmanager
def scaled(scale: Scale) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if scale is not None:
            names = ("_ROOM_MIN", "_ROOM_FREE", "_SLICE", "_GATHER_ROWS", "SMALL_ROWS", "_BUCKET_MAX")
            for name, value in zip(names, scale, strict=True):
                patch.setattr(key_index, name, value)
            patch.setattr(fold, "_SMALL_ROWS", 3)
        yield


def end_of(log: list[Record]) -> int:
    return log[-1].offset + 1 if log else 0


@settings(max_examples=3 * settings().max_examples)
@given(st.data(), logs(), hashes, sizes, scales)
def test_one_pass_keeps_what_the_rule_keeps(
    data: st.DataObject, log: list[Record], hash_keys: KeyHasher, cut: list[int], scale: Scale
) -> None:
    """Any first dirty offset, anchors, budget and horizon; the clean section may even hold a key twice."""
    end = end_of(log) + data.draw(st.integers(0, 3))
    offsets = st.integers(0, end + 2)
    first_dirty, below = min(data.draw(offsets), end), data.draw(offsets)
    anchors = data.draw(st.lists(offsets, max_size=4))
    capacity = data.draw(st.one_of(st.none(), st.integers(0, 12)))
    budget = None if capacity is None else 16 * capacity + data.draw(st.integers(0, 15))
    found, counts = batches(log, cut), FoldCounts()
    with scaled(scale):
        offset_map = OffsetMap.build(lambda: found, first_dirty, anchors, budget, hash_keys, dirty_end=end)
        kept = records(compact(lambda: found, offset_map, below, counts))
    dirty = [r for r in log if r.offset >= first_dirty]
    assert offset_map.end_offset == map_end(dirty, sorted(anchors), capacity, end)
    expected, expired = compacted(log, first_dirty, offset_map.end_offset, anchors, below)
    if budget is not None:
        # With little room, some tombstones that could go stay until a later pass; nothing else may differ.
        expired = [r for r in expired if r not in kept]
        expected = sorted([*expected, *(r for r in kept if r not in expected and r.value is None)])
    assert kept == expected
    assert (counts.records_read, counts.records_kept) == (len(log), len(kept))
    assert counts.tombstones_dropped == len(expired)
    highest = {bisect_right(sorted(anchors), r.offset): r.offset for r in expired}
    assert counts.dropped_tombstones == tuple(sorted(highest.values()))


class Passes(RuleBasedStateMachine):
    """A partition's life: partial maps, anchors that come and go, tombstones that expire."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Record] = []
        self.log: list[Record] = []
        self.end = 0
        #: keys are unique in every interval below
        self.clean_end = 0
        #: the state is exact at every offset from here on; a pass that goes back for a dropped anchor ends
        #: below it
        self.exact_from = 0
        self.anchors: set[int] = set()
        #: anchors inside the clean section that passes have kept apart what lies on both sides of
        self.splits: set[int] = set()

    @rule(
        changes=st.lists(
            st.tuples(st.sampled_from(KEYS), st.booleans(), st.sampled_from([1, 1, 4])), max_size=12
        )
    )
    def append(self, changes: list[tuple[bytes, bool, int]]) -> None:
        for key, delete, gap in changes:
            record = Record(self.end, key, None if delete else b"%d" % self.end)
            self.history.append(record)
            self.log.append(record)
            self.end += gap

    @rule()
    def anchor(self) -> None:
        self.anchors.add(self.end)

    @precondition(lambda self: self.anchors)
    @rule(data=st.data())
    def drop_anchor(self, data: st.DataObject) -> None:
        self.anchors.remove(data.draw(st.sampled_from(sorted(self.anchors))))

    @rule(
        capacity=st.integers(1, 15), hash_keys=hashes, cut=sizes, scale=scales, expired=st.floats(0, 1)
    )  # fmt: skip
    def clean(
        self, capacity: int, hash_keys: KeyHasher, cut: list[int], scale: Scale, expired: float
    ) -> None:
        first_dirty = min([self.clean_end, *(self.splits - self.anchors)])
        found = batches(self.log, cut)
        with scaled(scale):
            offset_map = OffsetMap.build(
                lambda: found, first_dirty, sorted(self.anchors), capacity * 16, hash_keys, dirty_end=self.end
            )
            below = int(self.clean_end * expired)
            self.log = records(compact(lambda: found, offset_map, below))
        assert offset_map.end_offset > first_dirty or first_dirty == self.end
        self.clean_end = offset_map.end_offset
        self.exact_from = max(self.exact_from, self.clean_end)
        self.splits = {a for a in self.anchors if a < self.clean_end}

    @invariant()
    def every_state_that_may_be_asked_for_is_exact(self) -> None:
        for offset in (*self.anchors, *range(self.exact_from, self.end + 1)):
            assert folded(self.log, offset) == folded(self.history, offset)

    def teardown(self) -> None:
        """Passes come to rest, at what one unlimited pass over the whole history would leave."""
        for _ in range(len(self.history) + 2):
            self.clean(2, two_bits, [], None, 0.0)
        assert self.clean_end == self.end
        rest = self.log
        self.clean(2, two_bits, [], None, 0.0)
        assert self.log == rest
        kept, _ = compacted(self.history, 0, self.end, sorted(self.anchors), 0)
        assert [r for r in rest if r.value is not None] == [r for r in kept if r.value is not None]
        self.clean(50, two_bits, [], None, 1.0)
        kept, _ = compacted(self.history, 0, self.end, sorted(self.anchors), self.end)
        assert self.log == kept
        super().teardown()


TestPasses = Passes.TestCase


@settings(max_examples=2 * settings().max_examples)
@given(st.data(), logs(), hashes, sizes, scales)
def test_last_values_are_the_fold_of_the_log(
    data: st.DataObject, log: list[Record], hash_keys: KeyHasher, cut: list[int], scale: Scale
) -> None:
    """Also of a clean section and a tail, where only the tail's keys are remembered."""
    clean_end = data.draw(st.integers(0, end_of(log)))
    clean, _ = compacted([r for r in log if r.offset < clean_end], 0, clean_end, (), 0)
    log = clean + [r for r in log if r.offset >= clean_end]
    found = batches(log, cut)
    with scaled(scale):
        for unique_below in (0, clean_end):
            state = records(last_values(lambda: found, unique_below, hash_keys))
            assert [r.offset for r in state] == sorted(r.offset for r in state)
            assert {r.key: r.value for r in state} == folded(log)
            assert len(state) == len(folded(log))
            assert set(state) <= set(log)


@given(logs(), hashes, sizes, scales, st.booleans())
def test_last_per_key_is_a_dict_of_the_last_rows(
    log: list[Record], hash_keys: KeyHasher, cut: list[int], scale: Scale, whole: bool
) -> None:
    """Tombstones included; of a record batch and of a table in chunks."""
    table = pa.Table.from_batches(batches(log, cut))
    rows = table.combine_chunks().to_batches()[0] if whole and log else table
    with scaled(scale):
        found = last_per_key(rows, hash_keys)
    assert type(found) is type(rows)
    last = sorted({r.key: r for r in log}.values())
    assert records(found.to_batches() if isinstance(found, pa.Table) else [found]) == last
