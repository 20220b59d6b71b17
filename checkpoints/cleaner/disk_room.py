"""The maximum disk space that a cleaner pass can use, computed before the pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from keyfold.checkpoints.cleaner.log_to_clean import LogToClean
from keyfold.checkpoints.compaction.key_index import SMALL_ROWS
from keyfold.statestore.segment.reader import SegmentReader
from keyfold.statestore.segment.writer import Segment

#: Overhead of an index and of alignment per block, and of a header and an end per segment.
_BLOCK_BYTES: Final = 128
_SEGMENT_BYTES: Final = 4096


@dataclass(frozen=True)
class _Needs:
    """For one segment: the maximum size of a copy, and the bytes of keys that are not read in place."""

    copy: int
    keys: int
    moved_keys: int


class Room:
    """How much space copies and spilled keys can need, computed from the blocks' metadata.

    Args:
        codec: the codec of the copies.

    Raises (all methods):
        Damaged, ViewExpired: a segment cannot be read.
    """

    def __init__(self, reader: Callable[[Segment], SegmentReader], codec: str | None) -> None:
        self._reader = reader
        self._codec = codec
        self._known: dict[str, _Needs] = {}

    def of_copy(self, segments: Iterable[Segment]) -> int:
        """The copy of a group of segments. They are deleted afterwards, so it needs its full size."""
        return sum(self._needs(segment).copy for segment in segments)

    def of_spill(self, section: LogToClean, *, spill_all: bool) -> int:
        """Keys of dirty blocks that cannot remain mapped, and keys of the tombstones that are checked."""
        needed = 0
        for segment in section.segments:
            if segment.next > section.first_dirty:
                needs = self._needs(segment)
                needed += needs.keys if spill_all else needs.moved_keys
            if section.sweeps and segment.tombstones and segment.base < section.tombstones_below:
                needed += self._needs(segment).keys
        return needed

    def _needs(self, segment: Segment) -> _Needs:
        known = self._known.get(segment.name)
        if known is None:
            known = self._known[segment.name] = self._measured(segment)
        return known

    def _measured(self, segment: Segment) -> _Needs:
        """A block of another codec than the copy's counts without compression. A codec can enlarge data that
        it cannot compress, and fewer records per block compress worse: an eighth is added for that.
        """
        copy, keys, moved = _SEGMENT_BYTES, 0, 0
        for block in self._reader(segment).sizes():
            largest = block.stored if block.codec == self._codec else block.raw
            copy += largest + _BLOCK_BYTES + (largest // 8 if self._codec else 0)
            held = block.raw_keys + _BLOCK_BYTES
            keys += held
            moved += held if block.codec or block.records < SMALL_ROWS else 0
        return _Needs(copy, keys, moved)
