"""A table of the keys of a log that references them in place, by position, and compares their bytes.

The table holds only references. For memory-mapped blocks it uses mapped pages and no heap memory. For blocks
that are decoded copies, the caller first moves the keys to memory that may be kept (`OffsetMap.build`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keyfold.statestore.errors import BadRecord
from keyfold.statestore.keys.buffers import Ints, Layout, Memory, Spots, layout_of

#: Every array begins at a multiple of 1 << _PAGE_BITS positions, so the page of a position gives its array.
_PAGE_BITS: Final = 10
_PAGE_ROWS: Final = 1 << _PAGE_BITS
_OFFSET_BYTES: Final = 4


#: Arrow offsets by address, in units of one offset. Only offsets of referenced arrays are read.
_FIRST_BYTE: Final = 8
_ANYWHERE: Final = pa.foreign_buffer(_FIRST_BYTE, 1 << 56)
_PLACES: Final[npt.NDArray[np.int32]] = np.frombuffer(_ANYWHERE, "<i4")

# The rows of the page table. Three are addresses that position 0 would have if the page's array reached down
# to it: of the key bytes (if all keys have one width), of the Arrow offsets (in units of one offset), and of
# the bytes that the offsets count from. The others: how many positions before it were skipped, and its array.
_KEYS, _OFFSETS, _DATA, _GAPS, _ARRAY = range(5)


class KeyTable:
    """Keys by position. Positions ascend in insertion order; some are skipped between two arrays.

    The cost of adding does not depend on the size of the table.

    Attributes:
        end: One past the last position.
        count: The number of keys.
        width: The length of the keys in bytes, if all have the same length.
    """

    def __init__(self) -> None:
        self.end = 0
        self.count = 0
        self.width: int | None = None
        #: each array, the position of its first key, and the layout that must be kept alive with it
        self._arrays: list[tuple[pa.Array, int, Layout]] = []
        self._pages: Ints = np.empty((5, 16), np.int64)
        self._span = (0, 0)

    def add(self, keys: pa.Array) -> tuple[int, int]:
        """Add an array of `binary` or `string` keys.

        Returns:
            The position of its first key, and the total size of its keys in bytes.

        Raises:
            BadRecord: `layout_of` refuses the array, or its type has 64-bit offsets.
        """
        layout = layout_of(keys)
        if layout.offsets.dtype != np.int32:
            raise BadRecord(
                "The key column has the wrong type.", expected="binary", found=str(keys.type),
                remedy="cast it to binary",
            )  # fmt: skip
        if layout.offsets.ctypes.data % _OFFSET_BYTES:
            layout = replace(layout, offsets=layout.offsets.copy())
        first, span = self.end, layout.span
        if layout.rows:
            self.width = layout.width if self.width == layout.width or not self._arrays else None
            if span[0] < span[1]:
                low, high = self._span if self._span[1] else span
                self._span = min(low, span[0]), max(high, span[1])
            page, stop = first >> _PAGE_BITS, -(-(first + layout.rows) // _PAGE_ROWS)
            if stop > self._pages.shape[1]:
                larger: Ints = np.empty((5, max(stop, 2 * page)), np.int64)
                larger[:, :page] = self._pages[:, :page]
                self._pages = larger
            place = (layout.offsets.ctypes.data - _FIRST_BYTE) // _OFFSET_BYTES
            known = (
                span[0] - first * (layout.width or 0), place - first, layout.data, first - self.count,
                len(self._arrays),
            )  # fmt: skip
            self._pages[:, page:stop] = np.array(known)[:, None]
            self._arrays.append((keys, first, layout))
            self.end = stop << _PAGE_BITS
        self.count += layout.rows
        return first, span[1] - span[0]

    def ordinals(self, positions: Ints) -> Ints:
        """The number of each key in insertion order, without the skipped positions."""
        numbers: Ints = positions - np.take(self._pages[_GAPS], positions >> _PAGE_BITS)
        return numbers

    def ordinal(self, position: int) -> int:
        """The number of keys added before the key at a position, which may be `end`."""
        return self.count if position >= self.end else int(self.ordinals(np.array([position]))[0])

    def spots(self, positions: Ints) -> Spots:
        """Where the keys at these positions are."""
        pages, page, memory = self._pages, positions >> _PAGE_BITS, Memory(*self._span)
        if self.width is not None:
            return Spots(memory, np.take(pages[_KEYS], page) + positions * self.width, self.width, None)
        place = np.take(pages[_OFFSETS], page) + positions
        begin, end = np.take(_PLACES, place), np.take(_PLACES, place + 1)
        lengths: Ints = (end - begin).astype(np.int64)
        data: Ints = pages[_DATA]
        return Spots(memory, np.take(data, page) + begin, None, lengths)

    def take(self, positions: Ints) -> pa.Array:
        """A copy of the keys at these positions, as large binary. Slow: use it for few keys only."""
        number = np.take(self._pages[_ARRAY], positions >> _PAGE_BITS)
        order = np.argsort(number, kind="stable")
        parts = []
        for i in np.unique(number).tolist():
            keys, first, _ = self._arrays[i]
            rows = positions[order[slice(*np.searchsorted(number[order], [i, i + 1]))]] - first
            parts.append(keys.take(pa.array(rows)).cast(pa.large_binary()))
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return pa.concat_arrays(parts).take(pa.array(back)) if parts else pa.array([], pa.large_binary())


class ArrayKeys:
    """The keys of one array by row. The caller keeps the array alive."""

    def __init__(self, keys: pa.Array) -> None:
        layout = layout_of(keys)
        self._memory = Memory(*layout.span)
        self._start, self._width = layout.span[0], layout.width
        self._addresses, self._lengths = layout.addresses(), layout.lengths()

    def spots(self, rows: Ints) -> Spots:
        """Where the keys of these rows are."""
        if self._width is not None:
            return Spots(self._memory, self._start + rows * self._width, self._width, None)
        return Spots(self._memory, self._addresses[rows], None, self._lengths[rows])
