"""A fast hash that groups equal keys. Callers resolve collisions by comparing the key bytes.

The hash is not stable: nothing on disk may depend on it. `partitioner` has the hash that assigns partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keyfold.statestore.keys.buffers import Layout, Memory, Words, layout_of, word_blocks
from keyfold.statestore.keys.partitioner import xxh64

#: Longer keys use XXH64.
_SHORT_BYTES: Final = 64
_BLOCK_ROWS: Final = 1 << 13
#: Random odd numbers: for the length, for the end, and one for each word of a short key.
_LENGTH: Final = np.uint64(0xE220A8397B1DCDAF)
_END: Final = np.uint64(0x6E789E6AA1B965F5)
_WORDS: Final = np.array(
    [
        0x06C45D188009454F, 0xF88BB8A8724C81ED, 0x1B39896A51A8749B, 0x53CB9F0C747EA2EB,
        0x2C829ABE1F4532E1, 0xC584133AC916AB3D, 0x3EE5789041C98AC3, 0xF3B8488C368CB0A7,
    ],
    np.uint64,
)  # fmt: skip
_HALF: Final = np.uint64(32)


def group_hash(keys: pa.Array) -> npt.NDArray[np.int64]:
    """A hash of each key. Its upper half is better distributed. Raises the same errors as `xxh64`.

    For a key of up to 64 bytes, each word is multiplied by its own factor, folded and added. A zero word adds
    nothing, so the hash does not depend on how many words other keys of the array have.
    """
    layout = layout_of(keys)
    if layout.width is not None and layout.width <= _SHORT_BYTES:
        hashes = np.empty(layout.rows, np.uint64)
        for rows, words in word_blocks(layout, layout.width):
            _mix(words, np.full(1, layout.width, np.uint64), hashes[rows])
        return hashes.view(np.int64)
    if layout.width is not None or layout.rows == 0:
        return xxh64(keys)
    return _ragged(keys, layout)


def _ragged(keys: pa.Array, layout: Layout) -> npt.NDArray[np.int64]:
    addresses, lengths = layout.addresses(), layout.lengths()
    memory = Memory(*layout.span)
    some_long = int(lengths.max()) > _SHORT_BYTES
    hashes = xxh64(keys).view(np.uint64) if some_long else np.empty(layout.rows, np.uint64)
    for first in range(0, layout.rows, _BLOCK_ROWS):
        rows: slice | npt.NDArray[np.int64] = slice(first, first + _BLOCK_ROWS)
        if some_long:
            rows = np.flatnonzero(lengths[rows] <= _SHORT_BYTES) + first
        some = lengths[rows]
        count = -(-int(some.max(initial=0)) // 8)
        mixed = np.empty(len(some), np.uint64)
        _mix(memory.ragged_columns(addresses[rows], some, count), some.view(np.uint64), mixed)
        hashes[rows] = mixed
    return hashes.view(np.int64)


def _mix(words: Sequence[Words], lengths: Words, hashes: Words) -> None:
    temp, word = np.empty((2, len(hashes)), np.uint64)
    hashes[:] = lengths * _LENGTH
    for column, factor in zip(words, _WORDS, strict=False):
        np.multiply(column, factor, out=word)
        np.right_shift(word, _HALF, out=temp)
        word ^= temp
        hashes += word
    np.right_shift(hashes, _HALF, out=temp)
    hashes ^= temp
    hashes *= _END
