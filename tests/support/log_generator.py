"""Random histories of one compacted log, for a comparison of two cleaners; and the exact rule, in few lines.

A history is made of passes. In each, some segments are written, then the cleaner comes once. What it may
clean ends where the last segment begins, for that one is active.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from keyfold.statestore.keys.group_hash import group_hash

#: Time of the first record. Segments are further apart than `SEGMENT_MS`, the records of one are closer.
START_MS: Final = 1_700_000_000_000
SEGMENT_MS: Final = 1_000_000
_SEGMENT_STEP_MS: Final = 10_000_000
_FOREVER_MS: Final = 10**12


class Record(NamedTuple):
    """What a reader sees of a record. `value` None is a delete."""

    offset: int
    key: bytes
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    timestamp: int


@dataclass(frozen=True)
class History:
    """One log.

    Attributes:
        passes: pass → segment → append → records. The last segment of a pass is active when the cleaner
            comes.
        by_hand: the active segment is a single record of a key that no other segment has, so that keyfold's
            `compact()`, which seals the active segment first, may be called just before it is written.
    """

    name: str
    passes: tuple[tuple[tuple[tuple[Record, ...], ...], ...], ...]
    delete_retention_ms: int
    by_hand: bool
    segment_bytes: int
    dedupe_buffer_bytes: int
    compression: str

    def cleanable_end(self, number: int) -> int:
        """The offset up to which pass `number` cleans."""
        return self.passes[number][-1][0][0].offset

    def records(self, number: int) -> list[Record]:
        """All records that were written up to pass `number`."""
        return [r for p in self.passes[: number + 1] for segment in p for append in segment for r in append]


def by_the_rule(history: History) -> list[list[Record]]:
    """What stays below the cleanable end, after each pass: the last record of every key; a tombstone stays
    in the first pass that meets it, and goes in the next if no time is to pass.
    """
    stay: list[list[Record]] = []
    clean_end = 0
    for number in range(len(history.passes)):
        end = history.cleanable_end(number)
        last = {r.key: r for r in history.records(number) if r.offset < end}
        # A key whose tombstone has gone must not come back with an older record: `last` has the tombstone.
        stay.append(
            [
                r
                for r in sorted(last.values())
                if r.value is not None or r.offset >= clean_end or history.delete_retention_ms
            ]
        )
        clean_end = end
    return stay


def random_history(seed: int, number: int) -> History:
    """History `number` of a seed."""
    rng = np.random.default_rng([seed, number])
    by_hand = bool(rng.random() < 0.7)
    forever = bool(rng.random() < 0.5)
    draw = _records(rng)
    passes: list[tuple[tuple[tuple[Record, ...], ...], ...]] = []
    for _ in range(int(rng.integers(1, 5))):
        segments = [_segment(rng, draw) for _ in range(int(rng.integers(1, 4)))]
        passes.append((*segments, _closing(draw) if by_hand else _segment(rng, draw)))
    # Two more passes with next to nothing new: deletes of the last one go, then nothing changes any more.
    passes += [((draw(b"\xffnew%d" % n),), _closing(draw)) for n in range(2)]
    small = by_hand and rng.random() < 0.5
    return History(
        name=f"{number} of seed {seed}",
        passes=tuple(passes),
        delete_retention_ms=_FOREVER_MS if forever else 0,
        by_hand=by_hand,
        segment_bytes=int(rng.choice([1024, 8192, 65536])) if small else 1 << 20,
        # A full map means several passes of keyfold for one of Kafka: the same only if no delete goes.
        dedupe_buffer_bytes=1024 if small and forever else 1 << 20,
        compression=str(rng.choice(["none", "lz4", "zstd"])),
    )


_Draw = Callable[..., "tuple[Record, ...]"]


def _records(rng: np.random.Generator) -> _Draw:
    """A function that makes the records of the next append."""
    keys = _keys(rng)
    # Some keys are written much more often than others.
    weights = rng.permutation(1 / np.arange(1, len(keys) + 1) ** rng.choice([0.0, 1.0, 2.0]))
    weights /= weights.sum()
    deletes = float(rng.choice([0.0, 0.1, 0.4, 0.9]))
    next_offset = iter(range(1 << 62))
    segments = [0]

    def draw(key: bytes | None = None, *, new_segment: bool = True, count: int = 1) -> tuple[Record, ...]:
        segments[0] += new_segment
        chosen = [key] if key is not None else [keys[i] for i in rng.choice(len(keys), count, p=weights)]
        made = []
        for one in chosen:
            value = None if key is None and rng.random() < deletes else _value(rng)
            time = START_MS + segments[0] * _SEGMENT_STEP_MS + int(rng.integers(0, 1000))
            made.append(Record(next(next_offset), one, value, _headers(rng), time))
        return tuple(made)

    return draw


def _segment(rng: np.random.Generator, draw: _Draw) -> tuple[tuple[Record, ...], ...]:
    sizes = rng.integers(1, rng.choice([2, 10, 60]), int(rng.integers(1, 4)))
    return tuple(draw(new_segment=i == 0, count=int(size)) for i, size in enumerate(sizes))


def _closing(draw: _Draw) -> tuple[tuple[Record, ...], ...]:
    return (draw(b"\xffend"),)


def _keys(rng: np.random.Generator) -> list[bytes]:
    """Few or many; short, empty, long; prefixes of each other; alike but for zeros; of equal hashes."""
    some = [b"k%d" % i for i in range(int(rng.choice([1, 3, 20, 300])))]
    long = rng.bytes(int(rng.integers(65, 5000)))
    kinds: list[list[bytes]] = [
        [b"", b"\0", b"\0\0", b"\0\0\0\0\0\0\0\0", b"a", b"a\0", b"a\0\0"],
        [long, long[:-1], long[:-1] + bytes([long[-1] ^ 1]), long + b"\0"],
        [b"prefix-of-several-words"[:n] for n in range(0, 24, int(rng.integers(1, 5)))],
        [key for pair in _of_equal_hashes() for key in pair],
        [rng.bytes(16) for _ in range(30)],
    ]
    for kind in kinds:
        if rng.random() < 0.4:
            some += kind
    return sorted(set(some))


@lru_cache(maxsize=1)
def _of_equal_hashes() -> list[tuple[bytes, bytes]]:
    """Pairs of keys that have the same upper half of the hash by which the cleaner brings keys together."""
    numbers = np.arange(1 << 18, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys = pa.Array.from_buffers(pa.binary(8), len(numbers), [None, pa.py_buffer(numbers)]).cast(pa.binary())
    half = group_hash(keys).view(np.uint64) >> np.uint64(32)
    order = np.argsort(half, kind="stable")
    at = np.flatnonzero(half[order][1:] == half[order][:-1])[:6]
    return [(keys[int(order[i])].as_py(), keys[int(order[i + 1])].as_py()) for i in at]


def _value(rng: np.random.Generator) -> bytes:
    return rng.bytes(int(rng.choice([0, 1, 20, 100, 3000], p=[0.1, 0.1, 0.4, 0.38, 0.02])))


def _headers(rng: np.random.Generator) -> tuple[tuple[str, bytes], ...]:
    count = int(rng.choice([0, 1, 3], p=[0.8, 0.15, 0.05]))
    return tuple((f"h{rng.integers(3)}", rng.bytes(int(rng.integers(0, 9)))) for _ in range(count))


def differences(found: list[Record], expected: list[Record]) -> Iterator[str]:
    """Where two lists of records differ, by offset. Long keys and values are cut."""
    a, b = ({r.offset: r for r in records} for records in (found, expected))
    if len(a) != len(found) or [r.offset for r in found] != sorted(a):
        yield "offsets out of order, or twice"
    for offset in sorted(a.keys() | b.keys()):
        if a.get(offset) != b.get(offset):
            yield f"offset {offset}: {_short(a.get(offset))} instead of {_short(b.get(offset))}"


def _short(record: Record | None) -> str:
    if record is None:
        return "none"
    value = "a delete" if record.value is None else f"{len(record.value)} bytes {record.value[:8]!r}"
    return (
        f"key of {len(record.key)} bytes {record.key[:24]!r}, {value}, {record.headers}, {record.timestamp}"
    )
