"""Sorts keys by their bytes, eight at a time, in a third of the time of Arrow's own sort of binary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.keys.buffers import Ints, Layout, Memory, Words, layout_of

_WORD: Final = 8
#: Keys that are equal up to here are sorted by Arrow, which compares them one by one.
_LONG_BYTES: Final = 256


def key_order(keys: pa.Array) -> Ints:
    """The rows of `keys` in ascending byte order, the order of memcmp and RocksDB.

    Args:
        keys: Binary or large binary without nulls.

    Returns:
        A permutation of 0 to `len(keys)` - 1. The order of equal keys is undefined.

    Raises:
        BadRecord: A key is null, or the array has another type.
    """
    layout = layout_of(keys)
    words_at = _fixed_words(layout) if layout.width else _words(layout)
    order: Ints = np.arange(layout.rows)
    # `rows` are sorted by the bytes compared so far, except within a group. They belong at `places`.
    rows, places = order.copy(), order.copy()
    groups: Ints = np.zeros(layout.rows, np.int64)
    done, all_as_they_are = 0, True
    while len(rows) and done < _LONG_BYTES:
        some = None if all_as_they_are else rows
        words, rest = words_at(some, done)
        while groups[0] == groups[-1] and done < _LONG_BYTES and (common := _common_bytes(words, rest)):
            done += common
            words, rest = words_at(some, done)
        all_as_they_are = False
        # A zero-padded word sorts before the same word of a longer key.
        rest = np.minimum(rest, _WORD + 1)
        moved = _argsort(words, rest, groups)
        rows, words, rest, groups = rows[moved], words[moved], rest[moved], groups[moved]
        order[places] = rows
        differs = (words[1:] != words[:-1]) | (rest[1:] != rest[:-1]) | (groups[1:] != groups[:-1])
        if differs.all():
            break
        begins = np.concatenate([[True], differs])
        ends = np.concatenate([differs, [True]])
        tied = np.flatnonzero(~(begins & ends) & (rest > _WORD))
        groups = np.cumsum(begins)[tied]
        rows, places = rows[tied], places[tied]
        done += _WORD
    else:
        if len(rows):
            # The groups are already in order, so all remaining rows can be sorted at once.
            order[places] = rows[pc.sort_indices(keys.take(pa.array(rows))).to_numpy()]
    return order


#: Given some keys (None for all) and a number of bytes to skip, returns the next bytes as numbers that
#: compare in byte order, and how many bytes each key has left.
_WordsAt: TypeAlias = Callable[[Ints | None, int], tuple[Words, Ints]]


def _words(layout: Layout) -> _WordsAt:
    memory = Memory(*layout.span)
    addresses, lengths = layout.addresses(), layout.lengths()

    def words_at(rows: Ints | None, done: int) -> tuple[Words, Ints]:
        at, rest = (addresses, lengths) if rows is None else (addresses[rows], lengths[rows])
        rest = rest - done
        return memory.ragged_columns(at + done, rest, 1)[0].byteswap(), rest

    return words_at


def _fixed_words(layout: Layout) -> _WordsAt:
    """The same for keys of one width, without looking up each key."""
    width = layout.width or 0
    start, stop = layout.span
    data = np.frombuffer(pa.foreign_buffer(start, stop - start), np.uint8).reshape(layout.rows, width)

    def words_at(rows: Ints | None, done: int) -> tuple[Words, Ints]:
        some = data[:, done : done + _WORD] if rows is None else data[rows, done : done + _WORD]
        padded = np.zeros((len(some), _WORD), np.uint8)
        padded[:, : some.shape[1]] = some
        return padded.view(">u8").reshape(-1).astype(np.uint64), np.full(len(some), width - done)

    return words_at


def _common_bytes(words: Words, rest: Ints) -> int:
    """The length of the common prefix of all words, limited by the shortest key."""
    differing = int(np.bitwise_or.reduce(words ^ words[0]))
    return min(_WORD - -(-differing.bit_length() // 8), int(rest.min()))


def _argsort(words: Words, rest: Ints, groups: Ints) -> Ints:
    """Sort by group, word and rest. Sorting a single array takes an eighth of the time."""
    if groups[0] != groups[-1]:
        return np.lexsort((rest, words, groups))
    by_word = np.argsort(words)
    if rest[0] == rest[-1] and (rest == rest[0]).all():
        return by_word
    ordered = words[by_word]
    if (ordered[1:] != ordered[:-1]).all():
        return by_word
    return np.lexsort((rest, words))
