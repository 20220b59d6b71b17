"""The partition of a key: XXH64 of its bytes with seed 42, as Spark's `xxhash64` computes it.

The hash is specified in https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md. Here it is computed
for many keys at once: every step is one numpy call over a column of 64-bit words of keys of equal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from keyfold.statestore.keys.buffers import Ints, Layout, Memory, Words, layout_of, word_blocks

SEED: Final = 42

_P1: Final = np.uint64(0x9E3779B185EBCA87)
_P2: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_P3: Final = np.uint64(0x165667B19E3779F9)
_P4: Final = np.uint64(0x85EBCA77C2B2AE63)
_P5: Final = np.uint64(0x27D4EB2F165667C5)
_M64: Final = (1 << 64) - 1
#: The four accumulators before the first stripe, and the hash of a key shorter than a stripe before its
#: length is added.
_LANES: Final = tuple(
    np.uint64(x & _M64)
    for x in (SEED + int(_P1) + int(_P2), SEED + int(_P2), SEED, SEED - int(_P1))
)  # fmt: skip
_SHORT: Final = np.uint64(SEED + int(_P5))

#: Longer keys are hashed one by one: for them a call costs less than the bytes.
_LONG_BYTES: Final = 1024
#: Fewer keys of one length are also hashed one by one: numpy calls have a fixed cost.
_FEW_KEYS: Final = 128
#: A block's words and scratch stay in the second-level cache.
_BLOCK_ROWS: Final = 1 << 13
_RAGGED_ROWS: Final = 1 << 18


def xxh64(keys: pa.Array) -> npt.NDArray[np.int64]:
    """XXH64 with seed 42 of each key's bytes, as a signed 64-bit integer.

    Args:
        keys: Binary, large binary, string or large string, sliced or not, without nulls.

    Raises:
        BadRecord: A key is null, or the array has another type.
    """
    layout = layout_of(keys)
    hashes = np.empty(layout.rows, np.uint64)
    if layout.rows and layout.width is not None and layout.width <= _LONG_BYTES:
        _hash_equal(layout, layout.width, hashes)
    elif layout.rows:
        _hash_ragged(layout, hashes)
    return hashes.view(np.int64)


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of one key: `pmod(xxhash64(key), partitions)` in Spark SQL."""
    hashed = xxhash.xxh64_intdigest(key, SEED)
    return (hashed - (hashed >> 63 << 64)) % partitions


def partitions_of(keys: pa.Array, partitions: int) -> npt.NDArray[np.int32]:
    """The partition of each key. Raises the same errors as `xxh64`."""
    if partitions == 1:
        return np.zeros(layout_of(keys).rows, np.int32)
    return np.mod(xxh64(keys), partitions).astype(np.int32)


# -- keys of one length --------------------------------------------------------------------------------------


def _hash_equal(layout: Layout, width: int, hashes: Words) -> None:
    temp, word = np.empty((2, min(layout.rows, _BLOCK_ROWS)), np.uint64)
    for rows, words in word_blocks(layout, width):
        count = rows.stop - rows.start
        _hash_block(words, width, hashes[rows], temp[:count], word[:count])


def _hash_block(words: Sequence[Words], width: int, hashes: Words, temp: Words, word: Words) -> None:
    """Keys as columns of words, the last one zero-padded. `temp` and `word` are scratch space."""
    stripes, rest = width // 32, width % 32
    if stripes:
        lanes = [np.full(len(hashes), start) for start in _LANES]
        for stripe in range(stripes):
            for lane in range(4):
                np.multiply(words[stripe * 4 + lane], _P2, out=word)
                _accumulate(lanes[lane], word, temp)
        hashes[:] = _converge(lanes)
    else:
        hashes[:] = _SHORT
    hashes += np.uint64(width)
    column = stripes * 4
    for _ in range(rest // 8):
        np.multiply(words[column], _P2, out=word)
        _mix_word(hashes, word, temp)
        column += 1
    if rest % 8:
        tail = words[column]
        if rest & 4:
            np.bitwise_and(tail, np.uint64(0xFFFFFFFF), out=word)
            _mix_half(hashes, word, temp)
            tail = tail >> np.uint64(32)
        for byte in range(rest & 3):
            _mix_byte(hashes, (tail >> np.uint64(8 * byte)) & np.uint64(0xFF), temp)
    _avalanche(hashes, temp)


# -- keys of any lengths -------------------------------------------------------------------------------------


def _hash_ragged(layout: Layout, hashes: Words) -> None:
    """Group keys by length and hash each group as above."""
    addresses, lengths = layout.addresses(), layout.lengths()
    memory = Memory(*layout.span)
    for first in range(0, layout.rows, _RAGGED_ROWS):
        part = np.minimum(lengths[first : first + _RAGGED_ROWS], _LONG_BYTES + 1).astype(np.uint16)
        order = np.argsort(part, kind="stable") + first
        ends = np.cumsum(np.bincount(part)).tolist()
        for width, (start, end) in enumerate(pairwise([0, *ends])):
            for at in range(start, end, _BLOCK_ROWS):
                rows = order[at : min(at + _BLOCK_ROWS, end)]
                if len(rows) < _FEW_KEYS or width > _LONG_BYTES:
                    _hash_singly(memory, addresses, lengths, rows, hashes)
                else:
                    columns = memory.columns(addresses[rows], width) if width else []
                    block, temp, word = (np.empty(len(rows), np.uint64) for _ in range(3))
                    _hash_block(columns, width, block, temp, word)
                    hashes[rows] = block


def _hash_singly(memory: Memory, addresses: Ints, lengths: Ints, rows: Ints, hashes: Words) -> None:
    for row in rows.tolist():
        key = memory.bytes_at(int(addresses[row]), int(lengths[row]))
        hashes[row] = xxhash.xxh64_intdigest(key, SEED)


# -- the steps of XXH64, each in place -----------------------------------------------------------------------


def _rotate(values: Words, bits: int, temp: Words) -> None:
    np.right_shift(values, np.uint64(64 - bits), out=temp)
    np.left_shift(values, np.uint64(bits), out=values)
    np.bitwise_or(values, temp, out=values)


def _accumulate(lane: Words, word: Words, temp: Words) -> None:
    """`word` is already multiplied by P2."""
    lane += word
    _rotate(lane, 31, temp)
    lane *= _P1


def _converge(lanes: list[Words]) -> Words:
    temp = np.empty_like(lanes[0])
    total = np.zeros_like(temp)
    for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True):
        rotated = lane.copy()
        _rotate(rotated, bits, temp)
        total += rotated
    for lane in lanes:
        lane *= _P2
        _rotate(lane, 31, temp)
        lane *= _P1
        total ^= lane
        total *= _P1
        total += _P4
    return total


def _mix_word(hashes: Words, word: Words, temp: Words) -> None:
    """`word` is already multiplied by P2; it is overwritten."""
    _rotate(word, 31, temp)
    word *= _P1
    hashes ^= word
    _rotate(hashes, 27, temp)
    hashes *= _P1
    hashes += _P4


def _mix_half(hashes: Words, half: Words, temp: Words) -> None:
    half *= _P1
    hashes ^= half
    _rotate(hashes, 23, temp)
    hashes *= _P2
    hashes += _P3


def _mix_byte(hashes: Words, byte: Words, temp: Words) -> None:
    byte *= _P5
    hashes ^= byte
    _rotate(hashes, 11, temp)
    hashes *= _P1


def _avalanche(hashes: Words, temp: Words) -> None:
    for bits, factor in ((33, _P2), (29, _P3)):
        np.right_shift(hashes, np.uint64(bits), out=temp)
        hashes ^= temp
        hashes *= factor
    np.right_shift(hashes, np.uint64(32), out=temp)
    hashes ^= temp
