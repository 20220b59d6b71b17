"""The addresses of the keys of an Arrow array, and reads of the same eight bytes of many keys at once.

Keys are compared and hashed in place, without a copy: a key is an address and a length. `Memory` reads only
aligned 64-bit words that hold at least one byte of a key. Such a word never crosses a page boundary, so the
bytes next to a key may be read (and are masked out) even at the end of a mapped file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.errors import BadRecord

Ints: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]

Bools: TypeAlias = npt.NDArray[np.bool_]
Offsets: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]

#: This many leading bytes of every key are compared column by column, even if the first columns differ.
_HEAD_BYTES: Final = 64
#: Longer keys are compared one by one: for them a call costs less than the bytes.
_LONG_BYTES: Final = 1024

_BLOCK_BYTES: Final = 1 << 17
_BLOCK_ROWS: Final = 1 << 13

#: `_MASKS[n]` keeps the first n bytes of a little-endian word.
_MASKS: Final = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)
_ONE: Final = np.uint64(1)
_LOW_BITS: Final = np.uint64(63)


@dataclass(frozen=True)
class Layout:
    """Where the keys of one array are. Valid as long as the array is referenced.

    Attributes:
        data: Address of the byte that `offsets` count from; 0 if the array has no bytes.
        offsets: One more than the number of keys, int32 or int64, ascending.
        width: The length of every key in bytes if all have the same length. Otherwise, and for an empty
            array, None.
    """

    data: int
    offsets: Offsets
    width: int | None

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def span(self) -> tuple[int, int]:
        """The addresses of the first byte of the first key, and one past the last byte of the last key."""
        return self.data + int(self.offsets[0]), self.data + int(self.offsets[-1])

    def addresses(self) -> Ints:
        return self.offsets[:-1].astype(np.int64) + self.data

    def lengths(self) -> Ints:
        return np.diff(self.offsets).astype(np.int64, copy=False)


def layout_of(keys: pa.Array) -> Layout:
    """The layout of an array of binary, large binary, string or large string, sliced or not.

    Raises:
        BadRecord: A key is null, or the array has another type.
        ValueError: The offsets do not ascend within the data: the array was never validated.
    """
    if pa.types.is_binary(keys.type) or pa.types.is_string(keys.type):
        bits = 32
    elif pa.types.is_large_binary(keys.type) or pa.types.is_large_string(keys.type):
        bits = 64
    else:
        raise BadRecord(
            "The key column has the wrong type.", expected="binary or string", found=str(keys.type),
            remedy="cast it to binary",
        )  # fmt: skip
    if keys.null_count:
        raise BadRecord(
            "A key is null.", expected="no null keys", found=f"{keys.null_count} null keys of {len(keys)}",
            remedy="filter out rows with a null key",
        )  # fmt: skip
    _, places, data = keys.buffers()
    if len(keys) == 0 or places is None:
        return Layout(0, np.zeros(1, np.int64), None)
    offsets: Offsets = np.frombuffer(places, f"<i{bits // 8}", len(keys) + 1, keys.offset * bits // 8)
    lengths = np.diff(offsets)
    first, last, shortest = int(offsets[0]), int(offsets[-1]), int(lengths.min())
    if first < 0 or shortest < 0 or last > (0 if data is None else data.size):
        raise ValueError("The offsets of a key column do not ascend within its data.")
    width = shortest if last - first == shortest * len(keys) else None
    return Layout(0 if data is None else data.address, offsets, width)


def prefixed(prefix: bytes, keys: pa.Array) -> pa.Array:
    """Every key of a `binary` array, preceded by `prefix`."""
    return pc.binary_join_element_wise(pa.scalar(prefix), keys, b"")


def word_blocks(layout: Layout, width: int) -> Iterator[tuple[slice, Sequence[Words]]]:
    """Keys of one `width` as columns of 64-bit words, the last one zero-padded, in blocks of rows.

    A block fits the second-level cache. It is valid until the next block is requested.
    """
    start, stop = layout.span
    count = max(64, min(_BLOCK_ROWS, _BLOCK_BYTES // max(width, 1)))
    padded = -(-width // 8) * 8
    raw = np.frombuffer(pa.foreign_buffer(start, stop - start), np.uint8) if width else np.zeros(0, np.uint8)
    # Keys of whole words at aligned addresses are read in place, others from a padded copy.
    in_place = width == padded and start % 8 == 0
    scratch = np.zeros((0 if in_place else min(count, layout.rows), padded), np.uint8)
    for first in range(0, layout.rows, count):
        rows = slice(first, min(first + count, layout.rows))
        keys = raw[first * width : rows.stop * width].reshape(rows.stop - first, width)
        if not in_place:
            scratch[: len(keys), :width] = keys
            keys = scratch[: len(keys)]
        yield rows, keys.view("<u8").T if width else ()


class Memory:
    """Reads 64-bit little-endian words in [start, stop). The caller keeps that memory alive."""

    def __init__(self, start: int, stop: int) -> None:
        first = start & ~7
        size = ((stop + 7) & ~7) - first if stop > start else 0
        self._words: Words = np.zeros(1, np.uint64)
        if size:
            self._words = np.frombuffer(pa.foreign_buffer(first, size), "<u8")
        self.first = first

    def columns(self, addresses: Ints, width: int) -> list[Words]:
        """The first `width` ≥ 1 bytes at each address as columns of words, the last one padded with zeros."""
        places = addresses - self.first
        low = places >> 3
        shift = ((places & 7) << 3).view(np.uint64)
        if width % 8 == 0 and not shift.any():
            return [self._aligned(low + i) for i in range(width // 8)]
        columns = self._shifted(low, shift, (places + (width - 1)) >> 3, -(-width // 8))
        if width % 8:
            columns[-1] &= _MASKS[width % 8]
        return columns

    def ragged_columns(self, addresses: Ints, lengths: Ints, count: int) -> list[Words]:
        """The first `count` words of keys of any length; bytes beyond the end of a key are zero."""
        # An empty key may be at the edge of an unmapped page: the first word is read instead.
        places = np.where(lengths == 0, 0, addresses - self.first)
        shift = ((places & 7) << 3).view(np.uint64)
        last = np.maximum(places + lengths - 1, 0) >> 3
        columns = self._shifted(places >> 3, shift, last, count)
        for i, column in enumerate(columns):
            column &= np.take(_MASKS, lengths - 8 * i, mode="clip")
        return columns

    def _shifted(self, low: Ints, shift: Words, last: Ints, count: int) -> list[Words]:
        """`count` words from each `low`, shifted right by `shift` bits; no word after `last` is read."""
        back = _LOW_BITS - shift
        columns = []
        word = self._aligned(low)
        for i in range(1, count + 1):
            following = self._aligned(np.minimum(low + i, last))
            word >>= shift
            word |= (following << _ONE) << back
            columns.append(word)
            word = following
        return columns

    def _aligned(self, indices: Ints) -> Words:
        return np.take(self._words, indices, mode="clip")

    def bytes_at(self, address: int, length: int) -> bytes:
        """A copy of one key."""
        place = address - self.first
        return self._words.view(np.uint8)[place : place + length].tobytes()


@dataclass(frozen=True)
class Spots:
    """Keys to compare: the address of each, and either the common `width` in bytes or the `lengths`."""

    memory: Memory
    addresses: Ints
    width: int | None
    lengths: Ints | None

    def sizes(self) -> Ints:
        if self.lengths is not None:
            return self.lengths
        return np.full(len(self.addresses), self.width, np.int64)

    def head(self, width: int) -> list[Words]:
        """The first `width` bytes of every key, or the whole key if it is shorter, as columns of words."""
        if self.width == 0 or len(self.addresses) == 0:
            return []
        if self.lengths is None and self.width is not None:
            return self.memory.columns(self.addresses, min(width, self.width))
        return self.memory.ragged_columns(self.addresses, self.sizes(), -(-width // 8))

    def longest(self) -> int:
        if self.width is not None:
            return self.width
        return int(self.sizes().max(initial=0))


def neighbours_equal(keys: Spots) -> Bools:
    """Whether each key equals the next one. The result is one shorter than the number of keys."""
    count = max(len(keys.addresses) - 1, 0)
    same = np.ones(count, np.bool_)
    longest = keys.longest()
    for word in keys.head(min(longest, _HEAD_BYTES)):
        same &= word[1:] == word[:-1]
    if keys.lengths is not None:
        same &= keys.lengths[1:] == keys.lengths[:-1]
    if longest > _HEAD_BYTES:
        _compare_rest(
            (keys.memory, keys.addresses[:-1]), (keys.memory, keys.addresses[1:]), keys.sizes()[:-1], same
        )
    return same


def pairs_equal(a: Spots, b: Spots) -> Bools:
    """Whether key i of `a` equals key i of `b`, for every i."""
    same: Bools = a.sizes() == b.sizes()
    longest = min(a.longest(), b.longest())
    head = min(longest, _HEAD_BYTES)
    # Keys of different lengths may have different numbers of words; they are already known to differ.
    for word_a, word_b in zip(a.head(head), b.head(head), strict=False):
        same &= word_a == word_b
    if longest > _HEAD_BYTES:
        _compare_rest((a.memory, a.addresses), (b.memory, b.addresses), a.sizes(), same)
    return same


def _compare_rest(a: tuple[Memory, Ints], b: tuple[Memory, Ints], lengths: Ints, same: Bools) -> None:
    """Clear `same` for keys of equal `lengths` that differ after the first `_HEAD_BYTES`."""
    done = _HEAD_BYTES
    rows = np.flatnonzero(same & (lengths > done))
    while len(rows) and done < _LONG_BYTES:
        rest = lengths[rows] - done
        word_a, word_b = (m.ragged_columns(at[rows] + done, rest, 1)[0] for m, at in (a, b))
        equal = word_a == word_b
        same[rows[~equal]] = False
        done += 8
        rows = rows[equal & (rest > 8)]
    for row in rows.tolist():
        length = int(lengths[row]) - done
        one, other = (m.bytes_at(int(at[row]) + done, length) for m, at in (a, b))
        same[row] = one == other
