"""Keys of a log that stay where they are: arrays of keys, each key with a position, compared by their bytes.

Only references are held. Over memory-mapped blocks that costs mapped pages and no memory of our own; for
blocks that are decoded copies, whoever adds the keys first moves them to where they may stay (`hold` of
`OffsetMap.build`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keyfold.statestore.errors import BadRecord
from keyfold.statestore.keybytes import Ints, Layout, Memory, Spots, layout_of

#: Every array begins at a multiple of 1 << _PAGE_BITS positions, so a position's page leads straight to its
#: array.
_PAGE_BITS: Final = 10
_PAGE_ROWS: Final = 1 << _PAGE_BITS
_OFFSET_BYTES: Final = 4


@dataclass(frozen=True)
class _Array:
    keys: pa.Array
    layout: Layout
    first: int
    """Position of its first key."""
    ordinal: int
    """How many keys were held before it."""


@dataclass(frozen=True)
class _Pages:
    """For each page the addresses that position 0 would have if the page's array reached down to it."""

    keys: Ints
    """Of the key bytes, if all keys are of one width."""
    places: Ints
    """Of the Arrow offsets, in units of one offset from `places_first`."""
    data: Ints
    """Of the bytes that those offsets count from."""
    gaps: Ints
    """How many positions before it were skipped."""
    memory: Memory
    offsets: npt.NDArray[np.int32]


class HeldKeys:
    """Keys by position. Positions ascend in the order of adding; some are skipped between two arrays.

    Attributes:
        end: one past the last position.
        count: how many keys are held.
        width: the length of all of them in bytes, if it is the same.
    """

    def __init__(self) -> None:
        self.end = 0
        self.count = 0
        self.width: int | None = None
        self._arrays: list[_Array] = []
        self._pages: _Pages | None = None

    def add(self, keys: pa.Array) -> tuple[int, int]:
        """Hold one more array of `binary` or `string` keys.

        Returns:
            the position of its first key, and the bytes of all its keys.

        Raises:
            BadRecord: as `layout_of`, or the type has 64-bit offsets.
        """
        layout = layout_of(keys)
        if layout.offsets.dtype != np.int32:
            raise BadRecord("The key column of records is binary.", expected="binary", found=str(keys.type))
        if layout.offsets.ctypes.data % _OFFSET_BYTES:
            layout = replace(layout, offsets=layout.offsets.copy())
        if layout.rows:
            self.width = layout.width if self.width == layout.width or not self._arrays else None
            self._arrays.append(_Array(keys, layout, self.end, self.count))
            self._pages = None
        first, span = self.end, layout.span
        self.end += -(-layout.rows // _PAGE_ROWS) * _PAGE_ROWS
        self.count += layout.rows
        return first, span[1] - span[0]

    def ordinals(self, positions: Ints) -> Ints:
        """The number of each key in the order of adding, without the skipped positions."""
        return positions - np.take(self._table().gaps, positions >> _PAGE_BITS)

    def spots(self, positions: Ints) -> Spots:
        """Where the keys at these positions are."""
        table, page = self._table(), positions >> _PAGE_BITS
        if self.width is not None:
            return Spots(table.memory, np.take(table.keys, page) + positions * self.width, self.width, None)
        place = np.take(table.places, page) + positions
        begin, end = np.take(table.offsets, place), np.take(table.offsets, place + 1)
        lengths = (end - begin).astype(np.int64)
        return Spots(table.memory, np.take(table.data, page) + begin, None, lengths)

    def take(self, positions: Ints) -> pa.Array:
        """A copy of the keys at these positions, as large binary. For few keys: it is slow."""
        firsts = np.array([array.first for array in self._arrays])
        number = np.searchsorted(firsts, positions, side="right") - 1
        order = np.argsort(number, kind="stable")
        parts = []
        for i in np.unique(number).tolist():
            array = self._arrays[i]
            rows = positions[order[slice(*np.searchsorted(number[order], [i, i + 1]))]] - array.first
            parts.append(array.keys.take(pa.array(rows)).cast(pa.large_binary()))
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return pa.concat_arrays(parts).take(pa.array(back)) if parts else pa.array([], pa.large_binary())

    def _table(self) -> _Pages:
        if self._pages is None:
            self._pages = self._build_table()
        return self._pages

    def _build_table(self) -> _Pages:
        arrays = self._arrays
        spans = [a.layout.span for a in arrays if a.layout.span[0] < a.layout.span[1]]
        memory = Memory(min((s for s, _ in spans), default=0), max((e for _, e in spans), default=0))
        at = [a.layout.offsets.ctypes.data for a in arrays]
        low = min(at, default=0)
        high = max(
            (x + (a.layout.rows + 1) * _OFFSET_BYTES for x, a in zip(at, arrays, strict=True)), default=0
        )
        offsets: npt.NDArray[np.int32] = np.zeros(1, np.int32)
        if arrays:
            offsets = np.frombuffer(pa.foreign_buffer(low, high - low), "<i4")
        counts = [-(-a.layout.rows // _PAGE_ROWS) for a in arrays]
        width = self.width or 0

        def per_page(values: list[int]) -> Ints:
            return np.repeat(np.array(values, np.int64), counts)

        return _Pages(
            keys=per_page([a.layout.span[0] - a.first * width for a in arrays]),
            places=per_page([(x - low) // _OFFSET_BYTES - a.first for x, a in zip(at, arrays, strict=True)]),
            data=per_page([a.layout.data for a in arrays]),
            gaps=per_page([a.first - a.ordinal for a in arrays]),
            memory=memory,
            offsets=offsets,
        )  # fmt: skip


class ArrayKeys:
    """The keys of one array that the caller holds, by row."""

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
