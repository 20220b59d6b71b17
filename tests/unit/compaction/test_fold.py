"""`keyfold.checkpoints.compaction.fold`: what compaction does to records, one fact at a time."""

from __future__ import annotations

import mmap
import subprocess
import sys
import tracemalloc
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from keyfold.checkpoints.compaction import key_index
from keyfold.checkpoints.compaction.fold import FoldCounts, OffsetMap, compact, last_per_key, last_values
from keyfold.checkpoints.compaction.key_index import KeyIndex
from keyfold.statestore.errors import BadRecord
from keyfold.statestore.keys.group_hash import group_hash
from keyfold.statestore.keys.key_table import KeyTable
from keyfold.statestore.keys.partitioner import xxh64
from keyfold.statestore.segment.block import RECORD_SCHEMA
from support.fold_model import HASHES, Record, batches, compacted, folded, map_end, records, same_hash

P1, P2 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F
M64 = (1 << 64) - 1


def _same(found: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return found


def log_of(*keys: bytes, first: int = 0, step: int = 1) -> list[Record]:
    return [Record(first + i * step, key, b"%d" % i) for i, key in enumerate(keys)]


def built(
    log: list[Record], first_dirty: int = 0, anchors: tuple[int, ...] = (), budget: int | None = None
) -> OffsetMap:
    end = log[-1].offset + 1 if log else 0
    return OffsetMap.build(lambda: batches(log), first_dirty, anchors, budget, dirty_end=end)


def pass_over(
    log: list[Record],
    first_dirty: int = 0,
    anchors: tuple[int, ...] = (),
    below: int = 0,
    budget: int | None = None,
) -> list[Record]:
    return records(compact(lambda: batches(log), built(log, first_dirty, anchors, budget), below))


def offsets_kept(*args: object, **kwargs: object) -> list[int]:
    return [r.offset for r in pass_over(*args, **kwargs)]  # type: ignore[arg-type]


# -- which records stay --------------------------------------------------------------------------------------


def test_only_the_last_record_of_a_key_stays() -> None:
    assert offsets_kept(log_of(b"a", b"b", b"a", b"c", b"a")) == [1, 3, 4]


def test_a_clean_record_goes_when_its_key_is_dirty() -> None:
    assert offsets_kept(log_of(b"a", b"b", b"c", b"b"), first_dirty=3) == [0, 2, 3]


def test_an_anchor_keeps_the_record_below_it() -> None:
    """A record at the anchor's own offset lies behind it."""
    log = log_of(b"a", b"a", b"a", b"a")
    assert offsets_kept(log, anchors=(2,)) == [1, 3]
    assert offsets_kept(log, anchors=(0, 2, 3, 4)) == [1, 2, 3]


def test_an_anchor_between_clean_and_dirty_keeps_the_clean_record() -> None:
    log = log_of(b"a", b"b", b"a", b"b")
    assert offsets_kept(log, first_dirty=2, anchors=(2,)) == [0, 1, 2, 3]
    assert offsets_kept(log, first_dirty=2, anchors=(1,)) == [0, 2, 3]


def test_records_behind_the_map_are_untouched() -> None:
    log = log_of(b"a", b"b", b"c", b"a", b"c", b"c")
    assert built(log, budget=32).end_offset == 2
    assert offsets_kept(log, budget=32) == [0, 1, 2, 3, 4, 5]
    assert offsets_kept(log_of(b"a", b"a", b"c", b"a", b"x", b"c", b"c"), budget=32) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("budget", [0, 1, 15, 16, 31])
def test_a_map_with_no_room_still_makes_progress(budget: int) -> None:
    """One key always fits, whatever the gaps between offsets, and every pass gets further."""
    log = log_of(b"a", b"a", b"b", b"c", b"b", first=1000, step=977)
    end, first_dirty, passes = log[-1].offset + 1, 1000, 0
    expected = folded(log)
    while first_dirty < end:
        source = batches(log)
        offset_map = OffsetMap.build(partial(_same, source), first_dirty, (), budget, dirty_end=end)
        assert offset_map.end_offset > first_dirty
        log = records(compact(partial(_same, source), offset_map, 0))
        first_dirty = offset_map.end_offset
        passes += 1
    assert passes <= 5
    assert folded(log) == expected
    assert len(log) == 3


def test_records_at_and_behind_the_dirty_end_are_passed_over() -> None:
    log = log_of(b"a", b"b", b"a", b"c", b"a", b"b")
    for cut in ([], [2], [3], [4], [1, 1, 1, 1]):
        source = batches(log, cut)
        offset_map = OffsetMap.build(partial(_same, source), 1, (), None, dirty_end=3)
        assert (offset_map.end_offset, offset_map.records, offset_map.distinct_keys) == (3, 2, 2)
        assert [r.offset for r in records(compact(partial(_same, source), offset_map, 0))] == [1, 2, 3, 4, 5]


def test_the_map_reaches_the_dirty_end_over_a_gap() -> None:
    """Also where there is no record at all, so that no pass is repeated for ever."""
    log = log_of(b"a", b"b")
    assert OffsetMap.build(lambda: batches(log), 0, (), 1 << 20, dirty_end=500).end_offset == 500
    assert OffsetMap.build(list, 40, (), 1 << 20, dirty_end=500).end_offset == 500
    assert OffsetMap.build(lambda: batches(log), 0, (), 1 << 20).end_offset == 2


def test_a_budget_is_sixteen_bytes_for_each_key_however_long() -> None:
    log = log_of(*(bytes([i]) * 5000 for i in range(10)), b"\0" * 5000)
    assert built(log, budget=160).end_offset == 11
    assert built(log, budget=159).end_offset == 9
    assert built(log, budget=320).utilisation == 0.5


def test_every_interval_counts_its_own_keys() -> None:
    log = log_of(b"a", b"b", b"a", b"b", b"a")
    assert built(log, anchors=(2,), budget=64).end_offset == 5
    assert built(log, anchors=(2,), budget=48).end_offset == 3
    assert built(log, anchors=(2,), budget=32).end_offset == 2


@pytest.mark.parametrize("hash_keys", [group_hash, same_hash])
def test_a_map_ends_at_the_first_key_without_room_in_every_short_log(hash_keys: key_index.KeyHasher) -> None:
    """All logs of five records and three keys, so also A B A C: a key that comes back needs no room again."""
    for keys in product((b"a", b"b", b"c"), repeat=5):
        log = log_of(*keys)
        found = batches(log, [2])
        for capacity in (1, 2):
            offset_map = OffsetMap.build(partial(_same, found), 0, (), 16 * capacity, hash_keys)
            assert offset_map.end_offset == map_end(log, (), capacity, 5), keys
            kept, _ = compacted(log, 0, offset_map.end_offset, (), 0)
            assert records(compact(partial(_same, found), offset_map, 0)) == kept, keys


def test_a_map_ends_where_positions_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions have 32 bits; more dirty records than that are left to the next pass."""
    monkeypatch.setattr(key_index, "POSITIONS_MAX", 3 << 10)
    log = log_of(*[b"a", b"b"] * 2000)
    found = batches(log, [1000, 1000, 1000])
    offset_map = OffsetMap.build(lambda: found, 0, (), None, dirty_end=4000)
    assert offset_map.end_offset == 3000
    assert [r.offset for r in records(compact(lambda: found, offset_map, 0))] == list(range(2998, 4000))


@pytest.mark.parametrize("sizes", [[], [1] * 400, [1000, 1, 1, 1000]])
def test_last_values_are_exact_where_positions_run_out(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several maps take turns, each with the records before it as its clean section."""
    monkeypatch.setattr(key_index, "POSITIONS_MAX", 1 << 10)
    monkeypatch.setattr(key_index, "SMALL_ROWS", 1)
    log = [Record(i, b"%d" % (i * 7 % 900), None if i % 5 == 0 else b"%d" % i) for i in range(3000)]
    found = batches(log, sizes)
    for unique_below in (0, 700):
        state = records(last_values(lambda: found, unique_below))
        assert state == sorted(r for r in {r.key: r for r in log}.values() if r.value is not None)
        state = records(last_values(lambda: found, unique_below, deletes=True))
        assert state == sorted({r.key: r for r in log}.values())


def test_many_small_batches_take_few_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit of a few records is a block, and millions of those must not use up 32 bits."""
    monkeypatch.setattr(key_index, "POSITIONS_MAX", 32 << 10)
    log = log_of(*(b"%d" % (i % 1000) for i in range(20_000)))
    found = batches(log, [5] * 4000)
    assert OffsetMap.build(lambda: found, 0, (), None).complete
    table = pa.Table.from_batches(found)
    assert last_per_key(table).num_rows == 1000


def test_more_rows_than_can_be_told_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "POSITIONS_MAX", 1 << 10)
    rows = pa.Table.from_batches(batches(log_of(*(b"%d" % (i % 3) for i in range(1025)))))
    with pytest.raises(ValueError, match="more than 1024 rows"):
        last_per_key(rows)
    assert last_per_key(rows.slice(1)).num_rows == 3


# -- tombstones ----------------------------------------------------------------------------------------------


def test_a_tombstone_stays_until_its_horizon_has_passed() -> None:
    log = [Record(0, b"a", b"1"), Record(1, b"a", None), Record(2, b"b", None), Record(3, b"c", b"2")]
    assert offsets_kept(log) == [1, 2, 3]
    assert offsets_kept(log, below=2) == [2, 3]
    assert offsets_kept(log, below=4) == [3]


def test_a_tombstone_stays_while_an_older_value_of_its_key_does() -> None:
    """An anchor keeps the value; without the tombstone it would come back."""
    log = [Record(0, b"a", b"1"), Record(1, b"a", None), Record(2, b"b", None)]
    assert offsets_kept(log, anchors=(1,), below=3) == [0, 1]
    assert offsets_kept(log, first_dirty=3, anchors=(1,), below=3) == [0, 1]
    assert offsets_kept(log, first_dirty=1, below=3) == []


def test_tombstones_of_one_key_go_together_and_stay_together() -> None:
    log = [Record(i, b"a", None) for i in range(3)]
    assert offsets_kept(log, anchors=(1, 2), below=3) == []
    log.insert(1, Record(1, b"a", b"1"))
    log = [Record(i, r.key, r.value) for i, r in enumerate(log)]
    assert offsets_kept(log, anchors=(1, 2, 3), below=4) == [1, 2, 3]


def test_tombstones_behind_the_map_stay() -> None:
    log = [Record(0, b"a", b"1"), Record(1, b"b", None), Record(2, b"b", None)]
    assert offsets_kept(log, below=3, budget=16) == [0, 1, 2]


@pytest.mark.parametrize("hash_keys", HASHES)
def test_with_little_room_tombstones_go_in_several_passes(hash_keys: key_index.KeyHasher) -> None:
    log = [Record(i, b"%d" % i, None) for i in range(40)]
    lengths = []
    while log:
        offset_map = OffsetMap.build(lambda: (), 40, (), 32 * 24, hash_keys, dirty_end=40)
        source = batches(log)
        log = records(compact(partial(_same, source), offset_map, 40))
        lengths.append(len(log))
    assert lengths == [8, 0]


@pytest.mark.parametrize(("in_map", "dropped"), [(0, 32), (24, 16), (48, 4)])
def test_tombstones_get_what_the_map_leaves_and_at_least_an_eighth(in_map: int, dropped: int) -> None:
    """A budget of 768 bytes: 16 for each key in the map, 24 for each key of a tombstone."""
    log = [Record(i, b"gone %d" % i, None) for i in range(40)]
    log += log_of(*(b"%d" % i for i in range(in_map)), first=40)
    offset_map = OffsetMap.build(lambda: batches(log), 40, (), 768, dirty_end=100)
    assert offset_map.end_offset == 100
    counts = FoldCounts()
    kept = records(compact(lambda: batches(log), offset_map, 40, counts))
    assert (counts.tombstones_dropped, len(kept)) == (dropped, len(log) - dropped)


def test_keys_of_tombstones_are_held_where_they_may_stay() -> None:
    log = [Record(0, b"a", None), Record(1, b"b", b"1"), Record(2, b"c", None), Record(3, b"d", None)]
    held: list[bytes] = []

    def hold(keys: pa.Array) -> pa.Array:
        held.extend(keys.to_pylist())
        return keys

    offset_map = OffsetMap.build(list, 4, (), None, dirty_end=4)
    assert records(compact(lambda: batches(log), offset_map, 3, hold=hold)) == [log[1], log[3]]
    assert held == [b"a", b"c"]


def test_counts_say_what_was_read_kept_and_dropped() -> None:
    log = [Record(0, b"a", b"1"), Record(1, b"a", None), Record(2, b"b", None), Record(3, b"c", b"2")]
    counts = FoldCounts()
    list(compact(lambda: batches(log), built(log), 2, counts))
    assert (counts.records_read, counts.records_kept) == (4, 2)
    assert (counts.tombstones_dropped, counts.dropped_tombstones) == (1, (1,))


# -- keys that are easily taken for one another --------------------------------------------------------------


def colliding(first: bytes, second: bytes, count: int) -> list[bytes]:
    """Keys of 16 bytes with the same XXH64: `first` + `second`, and others solved for their second half.

    Of a 16-byte key k1 k2, XXH64 makes h1 = rotl((seed + P5 + 16) ^ r(k1), 27) * P1 + P4, then the same of
    h1 ^ r(k2), and r can be inverted. So for any other k1', k2' = r⁻¹(h1' ^ h1 ^ r(k2)) collides.
    """

    def rotate(x: int, bits: int) -> int:
        return ((x << bits) | (x >> (64 - bits))) & M64

    def r(x: int) -> int:
        return rotate(x * P2 & M64, 31) * P1 & M64

    def r_inverse(y: int) -> int:
        return rotate(y * pow(P1, -1, 1 << 64) & M64, 64 - 31) * pow(P2, -1, 1 << 64) & M64

    def h1(k: int) -> int:
        h0 = 42 + 0x27D4EB2F165667C5 + 16
        return (rotate(h0 ^ r(k), 27) * P1 + 0x85EBCA77C2B2AE63) & M64

    k1, k2 = int.from_bytes(first, "little"), int.from_bytes(second, "little")
    keys = [first + second]
    for i in range(1, count):
        other = (k1 + i) & M64
        keys.append(other.to_bytes(8, "little") + r_inverse(h1(other) ^ h1(k1) ^ r(k2)).to_bytes(8, "little"))
    return keys


def test_keys_with_the_same_xxh64_are_not_taken_for_one_another() -> None:
    """Real 64-bit collisions, in turns: clean and dirty, in the map and looked up in it."""
    keys = colliding(b"customer", b"-0000001", 200)
    assert len(set(keys)) == 200
    assert len(set(xxh64(pa.array(keys, pa.binary())).tolist())) == 1
    log = log_of(*keys, *keys[:100], *keys[:50])
    stays = [*range(100, 200), *range(250, 350)]
    for first_dirty in (0, 200):
        offset_map = OffsetMap.build(lambda: batches(log), first_dirty, (), None, xxh64)
        assert [r.offset for r in records(compact(lambda: batches(log), offset_map, 0))] == stays
    assert [r.offset for r in records(last_values(lambda: batches(log), hash_keys=xxh64))] == stays


ALIKE = {
    "zeros": [bytes(n) for n in range(40)],
    "prefixes": [b"abcdefghijklmnopqrstuvwxyz"[:n] for n in range(27)],
    "last byte": [
        b"x" * n + bytes([i]) for n in (0, 6, 7, 8, 15, 63, 64, 65, 511, 1023, 1024, 3000) for i in range(3)
    ],
    "middle byte": [b"x" * 70 + bytes([i]) + b"x" * n for n in (0, 1, 900, 2000) for i in range(4)],
    "long": [
        b"a" * (1 << 20),
        b"a" * (1 << 20) + b"b",
        b"a" * ((1 << 20) - 1) + b"b",
        b"b" + b"a" * (1 << 20),
    ],
}


@pytest.mark.parametrize("hash_keys", HASHES)
@pytest.mark.parametrize("keys", ALIKE.values(), ids=ALIKE.keys())
def test_similar_keys_stay_apart(keys: list[bytes], hash_keys: key_index.KeyHasher) -> None:
    """Each key three times, first in the clean section; every key's last record stays, and no other."""
    log = log_of(*keys, *reversed(keys), *keys)
    count = len(keys)
    for cut in ([], [1, count - 2, 2]):
        source = batches(log, cut)
        offset_map = OffsetMap.build(partial(_same, source), count, (), None, hash_keys)
        kept = records(compact(partial(_same, source), offset_map, 0))
        assert [r.offset for r in kept] == list(range(2 * count, 3 * count))


def test_keys_lie_at_any_address() -> None:
    """Bytes and offsets that begin at odd bytes of memory, of equal and of different lengths."""
    for lengths in ([16], [5], [13], [3, 16, 40]):
        keys = [bytes([65 + i]) * lengths[i % len(lengths)] for i in range(30)]
        arrays = []
        for shift in range(9):
            blob = pa.py_buffer(bytes(shift) + b"".join(keys)).slice(shift)
            offsets = np.concatenate([[0], np.cumsum([len(k) for k in keys])]).astype(np.int32)
            places = pa.py_buffer(bytes(shift // 2) + offsets.tobytes()).slice(shift // 2)
            arrays.append(pa.Array.from_buffers(pa.binary(), 30, [None, places, blob]))
        last = last_per_key(pa.table({"key": pa.chunked_array(arrays), "n": list(range(270))}), same_hash)
        assert last["n"].to_pylist() == list(range(240, 270))


GUARDED = """
import ctypes, mmap, sys
import numpy as np, pyarrow as pa
from keyfold.checkpoints.compaction.fold import last_per_key
from keyfold.statestore.keys.group_hash import group_hash
from keyfold.statestore.keys.partitioner import xxh64

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

for lengths in ([13] * 40, [16] * 40, [5] * 40, [0, 3, 16, 40, 0], [1, 65, 8, 0], [70, 2000, 0, 9], [0, 0]):
    start = libc.mmap(None, 7 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    data = b"".join(bytes([65 + i]) * n for i, n in enumerate(lengths))
    places = pa.py_buffer(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    arrays = []
    for page, at in ((1, PAGE - len(data)), (3, 0), (5, PAGE - len(data))):
        address = start + page * PAGE + at
        ctypes.memmove(address, data, len(data))
        blob = pa.foreign_buffer(address, len(data))
        arrays.append(pa.Array.from_buffers(pa.binary(), len(lengths), [None, places, blob]))
    for page in (0, 2, 4, 6):
        assert libc.mprotect(start + page * PAGE, PAGE, 0) == 0
    for hash_keys in (group_hash, xxh64, lambda keys: np.zeros(len(keys), np.int64)):
        for array in arrays:
            hash_keys(array)
        last = last_per_key(pa.table({"key": pa.chunked_array(arrays)}), hash_keys)
        found = last["key"].to_pylist()
        expected = list(dict.fromkeys(reversed(arrays[0].to_pylist())))[::-1]
        assert found == expected, lengths
print("passed")
"""


def test_nothing_beyond_the_pages_of_the_keys_is_read(tmp_path: Path) -> None:
    """Keys that begin and end with a page, between pages that may not be read: mapped files end so."""
    done = subprocess.run(
        [sys.executable, "-c", GUARDED], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.stdout == "passed\n", (done.returncode, done.stderr[-2000:])


# -- memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 200])
def test_a_full_map_takes_no_more_than_its_budget(length: int) -> None:
    """400,000 keys, each twice, in a budget of exactly that; scratch apart, at any moment."""
    count, step = 400_000, 20_000
    padding = b"x" * (length - 8)

    def batch(start: int) -> pa.RecordBatch:
        numbers = np.arange(start, start + step) % count
        keys = pa.array([b"%08d" % n + padding for n in numbers.tolist()], pa.binary())
        rest = [pa.nulls(step, field.type) for field in list(RECORD_SCHEMA)[3:]]
        times = pa.array(numbers, pa.timestamp("ms"))
        return pa.RecordBatch.from_arrays(
            [pa.array(np.arange(start, start + step)), times, keys, *rest], schema=RECORD_SCHEMA
        )

    source = [batch(start) for start in range(0, 2 * count, step)]
    tracemalloc.start()
    offset_map = OffsetMap.build(lambda: source, 0, (), count * 16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert offset_map.end_offset == 2 * count
    assert offset_map.distinct_keys == count
    assert offset_map.utilisation == 1.0
    scratch = 4 << 20
    assert peak < count * 16 + scratch


def test_a_batch_of_which_all_records_stay_is_passed_on_as_it_is() -> None:
    log = log_of(*(b"%d" % i for i in range(5000)), b"0")
    source = batches(log, [5000])
    offset_map = OffsetMap.build(lambda: source, 5000, (), None)
    first, second = compact(lambda: source, offset_map, 0)
    assert second.column("key").buffers()[2].address == source[1].column("key").buffers()[2].address
    assert first.num_rows == 4999
    assert first.column("key").buffers()[2].address == source[0].column("key").buffers()[2].address


def test_keys_that_were_moved_are_not_read_where_they_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hold` moves keys to a mapped file; the batch's own memory may then be used for something else."""
    # Smaller arrays are held for a while before they are moved together.
    monkeypatch.setattr(key_index, "SMALL_ROWS", 1)
    spill = (tmp_path / "keys").open("w+b")
    mapped: list[mmap.mmap] = []

    def hold(keys: pa.Array) -> pa.Array:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, pa.schema([("key", pa.binary())])) as stream:
            stream.write_batch(pa.record_batch([keys], ["key"]))
        start = spill.seek(0, 2)
        spill.write(sink.getvalue())
        spill.write(bytes(-spill.tell() % mmap.ALLOCATIONGRANULARITY))
        spill.flush()
        mapped.append(mmap.mmap(spill.fileno(), 0, access=mmap.ACCESS_READ))
        return pa.ipc.open_stream(pa.py_buffer(mapped[-1]).slice(start)).read_next_batch().column(0)

    log = log_of(*(b"key-%d" % (i % 7) for i in range(60)))

    def decoded() -> Iterator[pa.RecordBatch]:
        """As blocks that are decoded anew each time; of a batch that was read, the memory is overwritten."""
        for batch in batches(log, [9] * 6):
            keys = bytearray(batch.column("key").buffers()[2].to_pybytes())
            column = pa.Array.from_buffers(
                pa.binary(), len(batch), [None, batch.column("key").buffers()[1], pa.py_buffer(keys)],
                offset=batch.column("key").offset,
            )  # fmt: skip
            yield batch.set_column(2, "key", column)
            keys[:] = b"#" * len(keys)

    offset_map = OffsetMap.build(decoded, 20, (), None, hold=hold)
    assert [r.offset for r in records(compact(lambda: batches(log), offset_map, 0))] == list(range(53, 60))


def test_behind_the_clean_section_the_keys_are_let_go() -> None:
    """And with them the files that they are mapped from; dirty records are known by number."""
    held: list[weakref.ref[np.ndarray]] = []

    def hold(keys: pa.Array) -> pa.Array:
        data = np.frombuffer(keys.buffers()[2], np.uint8).copy()
        held.append(weakref.ref(data))
        buffers = [None, keys.buffers()[1], pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.binary(), len(keys), buffers, offset=keys.offset)

    source = batches(log_of(b"a", b"b", b"c", b"a", b"a"), [3, 0])
    offset_map = OffsetMap.build(lambda: source, 3, (), None, hold=hold)
    staying = compact(lambda: source, offset_map, 0)
    assert next(staying).column("offset").to_pylist() == [1, 2]
    assert [ref() is None for ref in held] == [False]
    assert next(staying).column("offset").to_pylist() == [4]
    assert [ref() is None for ref in held] == [True]


# -- the other folds -----------------------------------------------------------------------------------------


def test_last_values_leave_deleted_keys_out() -> None:
    log = [Record(0, b"a", b"1"), Record(1, b"b", b"2"), Record(2, b"a", None), Record(3, b"c", None)]
    assert records(last_values(lambda: batches(log))) == [log[1]]
    assert records(last_values(lambda: batches(log), unique_below=2)) == [log[1]]


def test_last_values_hold_no_key_that_is_unique_below_the_offset_that_says_so() -> None:
    log = log_of(b"a", b"b", b"c", b"a", b"d")
    held: list[bytes] = []

    def hold(keys: pa.Array) -> pa.Array:
        held.extend(keys.to_pylist())
        return keys

    assert records(last_values(lambda: batches(log), 3, hold=hold)) == log[1:]
    assert held == [b"a", b"d"]


def test_last_per_key_keeps_tombstones_and_other_columns() -> None:
    rows = pa.table({"n": [1, 2, 3], "key": pa.array([b"a", b"b", b"a"], pa.binary())})
    assert last_per_key(rows)["n"].to_pylist() == [2, 3]
    log = [Record(0, b"a", b"1"), Record(1, b"a", None)]
    assert records([last_per_key(batches(log)[0])]) == [log[1]]


def test_nothing_is_left_of_nothing() -> None:
    empty = pa.RecordBatch.from_pylist([], schema=RECORD_SCHEMA)
    assert last_per_key(empty).num_rows == 0
    assert list(last_values(lambda: [empty, empty])) == []
    assert list(compact(lambda: [empty], OffsetMap.build(lambda: [empty], 0, (), 16), 0)) == []


# -- bad input -----------------------------------------------------------------------------------------------


def test_a_null_key_is_refused() -> None:
    keys = pa.array([b"a", None], pa.binary())
    with pytest.raises(BadRecord, match="null"):
        last_per_key(pa.table({"key": keys}))


def test_keys_of_another_type_are_refused() -> None:
    with pytest.raises(BadRecord, match="binary"):
        last_per_key(pa.table({"key": pa.array([b"a"], pa.large_binary())}))


def test_offsets_that_do_not_ascend_are_refused() -> None:
    log = log_of(b"a", b"b")
    with pytest.raises(ValueError, match="ascend"):
        OffsetMap.build(lambda: [*batches(log), *batches(log)], 0, (), None)
    with pytest.raises(ValueError, match="ascend"):
        OffsetMap.build(lambda: batches(log[:1] * 2), 0, (), None)


def test_a_log_that_is_not_the_maps_own_is_refused() -> None:
    """Rather than dropping records by numbers that mean others."""
    log = log_of(b"a", b"b", b"a")
    offset_map = built(log)
    with pytest.raises(ValueError, match="2 records"):
        list(compact(lambda: batches(log[:2]), offset_map, 0))


def test_a_map_serves_one_going_over_the_log() -> None:
    """It has let its keys go; a second one would keep obsolete clean records."""
    log = log_of(b"a", b"b", b"a")
    source = batches(log, [2, 0])
    offset_map = built(log, first_dirty=2)
    assert [r.offset for r in records(compact(lambda: source, offset_map, 0))] == [1, 2]
    with pytest.raises(ValueError, match="used already"):
        list(compact(lambda: source, offset_map, 0))


def test_keys_are_found_by_their_bytes() -> None:
    held = KeyTable()
    last = KeyIndex(held)
    last.add(pa.array([b"a", b"bb", b"a"], pa.binary()))
    last.finish()
    asked = pa.array([b"bb", b"b", b"a", b""], pa.binary())
    found = last.find(asked, group_hash(asked))
    assert [i >= 0 for i in found.tolist()] == [True, False, True, False]
    assert last.positions().tolist() == [1, 2]


def test_a_keys_group_hash_does_not_depend_on_the_keys_beside_it() -> None:
    """Else equal keys in two batches would not be brought together."""
    for length in (0, 1, 8, 13, 16, 63, 64, 65, 500):
        key = bytes(range(1, 251))[:length] * (2 if length > 250 else 1)
        alone = group_hash(pa.array([key], pa.binary()))[0]
        for others in ([key], [b"", b"x"], [b"y" * 40], [b"z" * 64], [b"z" * 65], [b"z" * 2000] * 300):
            beside = group_hash(pa.array([*others, key, *others], pa.binary()))
            assert beside[len(others)] == alone
