"""The last position of every distinct key, found exactly, in at most 16 bytes per distinct key.

An entry is one 64-bit word: the upper half of the key's hash, then the key's position. Entries are
collected unsorted. When there is no room for more, they are sorted and folded: entries with the same half
hash lie side by side, in the order of their positions, and an entry whose neighbour has the same key
**bytes** goes. The hash only brings candidates together. Two different keys with the same half hash may lie
in turns (A, B, A); such groups, rare with a good hash, are told apart by Arrow's dictionary of their key
bytes.

Bytes per distinct key, when as many are held as may be: while collecting, 8 for its entry, 6 for room for
more and 2 for marks; afterwards 8 for its entry, 4 for its position and at most 4 for the directory. Beside
that come scratch of a constant size and 40 bytes for every 1024 keys that are held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from keyfold.statestore.keys.buffers import Bools, Ints, Words, neighbours_equal, pairs_equal
from keyfold.statestore.keys.group_hash import group_hash
from keyfold.statestore.keys.key_table import ArrayKeys, KeyTable

KeyHasher: TypeAlias = Callable[[pa.Array], npt.NDArray[np.int64]]
#: Moves keys to where they may stay.
Hold: TypeAlias = Callable[[pa.Array], pa.Array]

#: Bytes of the map's budget for each distinct key.
BYTES_PER_KEY: Final = 16
#: Positions have 32 bits.
POSITIONS_MAX: Final = 1 << 32

_POSITION: Final = np.uint64(POSITIONS_MAX - 1)
_HALF_HASH: Final = np.uint64((1 << 64) - POSITIONS_MAX)
_HALF: Final = np.uint64(32)
#: Number of entries that are processed at a time: their keys' cache lines fit the second-level cache.
_SLICE: Final = 1 << 14
#: Room for the first entries, and when that is full; memory that is not written to costs nothing. It
#: doubles where folding leaves more than half of it in use. Never more than the capacity allows.
_ROOM_MIN: Final = 1 << 17
_ROOM_FREE: Final = 1 << 23
#: Smaller arrays of keys are gathered before they are hashed.
_GATHER_ROWS: Final = 1 << 14
_GATHER_BYTES: Final = 1 << 24
#: Still smaller ones are made one array, so that positions and memory for each do not run out first.
SMALL_ROWS: Final = 256
#: A bucket of the directory with more entries than this exists only for a bad hash.
_BUCKET_MAX: Final = 64


class KeyIndex:
    """Distinct keys and the last position of each.

    Args:
        held: where the keys are held; may be shared, and may hold other keys too.
        capacity: how many distinct keys at most; None for as many as come.
        hash_keys: only brings equal keys together. With a bad one the result is the same, later.
        hold: moves keys to where they may stay as long as this.

    Attributes:
        end: position of the first key that is left out, because it or its position would be one too many;
            None as long as nothing is left out. Keys in front of `end` are all in, none from it on is. Known
            only after `finish`.
    """

    def __init__(
        self,
        held: KeyTable,
        capacity: int | None = None,
        hash_keys: KeyHasher = group_hash,
        hold: Hold = lambda keys: keys,
    ) -> None:
        self._held = held
        self._capacity = capacity
        self._hash_keys = hash_keys
        self._hold = hold
        self.end: int | None = None
        self._room_max = None if capacity is None else capacity + capacity * 3 // 4 + 1
        self._room: Words = np.empty(0, np.uint64)
        self._fill = 0
        self._small: list[pa.Array] = []
        self._small_rows = self._small_bytes = 0
        self._gathered: list[tuple[pa.Array, Ints]] = []
        self._gathered_rows = self._gathered_bytes = 0
        self._directory: _Directory | None = None

    @property
    def distinct(self) -> int:
        """How many distinct keys; after `finish`."""
        return self._fill

    def add(self, keys: pa.Array) -> bool:
        """Take in more keys. False if no more are wanted: there is no room."""
        if self.end is not None or len(keys) == 0:
            return self.end is None
        if len(keys) >= SMALL_ROWS:
            self._take_in_small()
            self._take_in(self._hold(keys))
            return self.end is None
        self._small.append(keys)
        self._small_rows += len(keys)
        self._small_bytes += keys.nbytes
        if self._small_rows >= _GATHER_ROWS or self._small_bytes > _GATHER_BYTES:
            self._take_in_small()
        return self.end is None

    def _take_in_small(self) -> None:
        small, self._small = self._small, []
        self._small_rows = self._small_bytes = 0
        if small:
            self._take_in(self._hold(small[0] if len(small) == 1 else pa.concat_arrays(small)))

    def _take_in(self, keys: pa.Array) -> None:
        """Give keys their positions."""
        if self.end is not None:
            return
        room = POSITIONS_MAX - self._held.end
        if room > 0:
            first, size = self._held.add(keys[:room])
            if self._gathered_bytes + size > _GATHER_BYTES:
                self._hash_gathered()
            self._gathered.append((keys[:room], np.arange(first, first + min(len(keys), room))))
            self._gathered_rows += len(keys)
            self._gathered_bytes += size
        if self._gathered_rows >= _GATHER_ROWS or room < len(keys):
            self._hash_gathered()
        if room < len(keys) and self.end is None:
            self.end = self._held.end

    def finish(self) -> None:
        """Fold what was collected. No keys can be added after this; a second call does nothing."""
        self._take_in_small()
        self._hash_gathered()
        self._fold()
        # Gives the rest back to the system in place: a copy would need the memory twice.
        self._room.resize(self._fill, refcheck=False)

    def positions(self) -> npt.NDArray[np.uint32]:
        """The last position of every distinct key, ascending; after `finish`."""
        positions = self._room.astype(np.uint32)
        positions.sort()
        return positions

    def find(self, keys: pa.Array, hashes: npt.NDArray[np.int64]) -> Ints:
        """For each key the number of its entry, in [0, `distinct`), or -1 if it is not among them.

        `hashes` are those of `keys`.
        """
        if self._directory is None:
            self._directory = _Directory(self._room)
        asked = ArrayKeys(keys)
        found = np.full(len(keys), -1, np.int64)
        for at in _slices(len(keys)):
            half = hashes[at].view(np.uint64) >> _HALF
            rows, entries = self._directory.candidates(half)
            rows += at.start
            same = pairs_equal(asked.spots(rows), self._held.spots(self._positions_of(entries)))
            found[rows[same]] = entries[same]
        rows, entries = self._directory.crowded(hashes.view(np.uint64) >> _HALF)
        if len(rows):
            known = self._held.take(self._positions_of(entries))
            among = pc.index_in(keys.take(pa.array(rows)).cast(pa.large_binary()), value_set=known)
            hit = np.flatnonzero(among.is_valid().to_numpy(zero_copy_only=False))
            found[rows[hit]] = entries[among.take(pa.array(hit)).to_numpy()]
        return found

    def _positions_of(self, entries: Ints) -> Ints:
        positions: Ints = (np.take(self._room, entries) & _POSITION).view(np.int64)
        return positions

    # -- collecting ------------------------------------------------------------------------------------------

    def _hash_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        self._gathered_rows = self._gathered_bytes = 0
        if not gathered or self.end is not None:
            return
        arrays = [keys for keys, _ in gathered]
        hashes = self._hash_keys(arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)).view(np.uint64)
        positions = gathered[0][1] if len(gathered) == 1 else np.concatenate([at for _, at in gathered])
        done = 0
        while done < len(hashes) and self.end is None:
            if self._fill == len(self._room):
                self._make_room()
                continue
            count = min(len(hashes) - done, len(self._room) - self._fill)
            entries = self._room[self._fill : self._fill + count]
            np.bitwise_and(hashes[done : done + count], _HALF_HASH, out=entries)
            entries |= positions[done : done + count].view(np.uint64)
            self._fill += count
            done += count

    def _make_room(self) -> None:
        room = len(self._room)
        wanted = _ROOM_FREE if room else _ROOM_MIN
        if room >= min(_ROOM_FREE, self._room_max or _ROOM_FREE):
            self._fold()
            if self._fill * 2 <= room or room == self._room_max:
                return
            wanted = room * 2
        larger: Words = np.empty(min(wanted, self._room_max or wanted), np.uint64)
        larger[: self._fill] = self._room[: self._fill]
        self._room = larger

    # -- folding ---------------------------------------------------------------------------------------------

    def _fold(self) -> None:
        """Sort the entries and keep the last of each key; find `end` if there are more keys than may be."""
        entries = self._room[: self._fill]
        entries.sort()
        obsolete, mixed = self._obsolete(entries)
        if self._capacity is not None and len(entries) - np.count_nonzero(obsolete) > self._capacity:
            self.end = _first_left_out(entries, obsolete, mixed, self._capacity)
            end = np.uint64(self.end)
            self._fill = _compress(entries, lambda at: (entries[at] & _POSITION) < end)
            entries = entries[: self._fill]
            obsolete, _ = self._obsolete(entries)
        self._fill = _compress(entries, lambda at: ~obsolete[at])

    def _obsolete(self, entries: Words) -> tuple[Bools, _Runs]:
        """Which of the sorted entries have a later one of their key; the runs in groups of several keys."""
        obsolete = np.zeros(len(entries), np.bool_)
        breaks: list[Ints] = []
        for at in _slices(len(entries) - 1):
            part = entries[at.start : at.stop + 1]
            half = part >> _HALF
            grouped = half[1:] == half[:-1]
            count = np.count_nonzero(grouped)
            if count == 0:
                continue
            positions = (part & _POSITION).view(np.int64)
            if count * 2 > len(grouped):
                same = neighbours_equal(self._held.spots(positions))
                same &= grouped
                rows = np.flatnonzero(grouped ^ same)
            else:
                rows = np.flatnonzero(grouped)
                equal = pairs_equal(self._held.spots(positions[rows]), self._held.spots(positions[rows + 1]))
                same = np.zeros(len(grouped), np.bool_)
                same[rows[equal]] = True
                rows = rows[~equal]
            obsolete[at] = same
            if len(rows):
                breaks.append(rows + at.start)
        if not breaks:
            return obsolete, _Runs(np.empty(0, np.int64), np.empty(0, np.bool_))
        return obsolete, self._settle_mixed(entries, obsolete, np.concatenate(breaks))

    def _settle_mixed(self, entries: Words, obsolete: Bools, breaks: Ints) -> _Runs:
        """Complete `obsolete` for groups of one half hash that hold several keys.

        Args:
            breaks: entries whose next neighbour has the same half hash and another key.
        """
        groups = np.unique(entries[breaks] & _HALF_HASH)
        group_starts = np.searchsorted(entries, groups)
        group_ends = np.searchsorted(entries, groups | _POSITION, side="right") - 1
        # Runs of equal keys: each ends at a break or with its group, and begins after the run before it.
        ends = np.sort(np.concatenate([breaks, group_ends]))
        starts = np.sort(np.concatenate([breaks + 1, group_starts]))
        keys = self._held.take((entries[ends] & _POSITION).view(np.int64))
        codes = keys.dictionary_encode().indices.to_numpy().astype(np.int64)
        order = np.argsort(codes, kind="stable")
        equal = codes[order][1:] == codes[order][:-1]
        obsolete[ends[order[:-1][equal]]] = True
        again = np.zeros(len(starts), np.bool_)
        again[order[1:][equal]] = True
        return _Runs(starts, again)


@dataclass(frozen=True)
class _Runs:
    """Runs of equal keys in groups of one half hash that hold several keys."""

    starts: Ints
    """The first entry of each."""
    again: Bools
    """Whether its key had a run before."""


class _Directory:
    """Where in sorted entries those with a given half hash may be: buckets of equal width."""

    def __init__(self, entries: Words) -> None:
        self._entries = entries
        bits = max(len(entries).bit_length() - 1, 0)
        self._shift = np.uint64(32 - bits)
        self._starts = np.zeros((1 << bits) + 1, np.uint32)
        for at in _slices(len(entries)):
            buckets = (entries[at] >> _HALF >> self._shift).view(np.int64)
            counts = np.bincount(buckets - buckets[0])
            self._starts[buckets[0] + 1 : buckets[0] + 1 + len(counts)] += counts.astype(np.uint32)
        np.cumsum(self._starts, out=self._starts)

    def candidates(self, half: Words) -> tuple[Ints, Ints]:
        """Pairs of a row and an entry with the same half hash, in buckets that are not crowded."""
        start, stop = self._buckets(half)
        rows = np.flatnonzero((start < stop) & (stop - start <= _BUCKET_MAX))
        at, stop, wanted = start[rows], stop[rows], half[rows]
        pairs = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        while len(rows):
            seen = np.take(self._entries, at) >> _HALF
            hit = np.flatnonzero(seen == wanted)
            pairs.append((rows[hit], at[hit]))
            at += 1
            on = np.flatnonzero((at < stop) & (seen <= wanted))
            rows, at, stop, wanted = rows[on], at[on], stop[on], wanted[on]
        return np.concatenate([row for row, _ in pairs]), np.concatenate([entry for _, entry in pairs])

    def crowded(self, half: Words) -> tuple[Ints, Ints]:
        """The rows that fall into crowded buckets, and all entries of those buckets."""
        start, stop = self._buckets(half)
        rows = np.flatnonzero(stop - start > _BUCKET_MAX)
        if len(rows) == 0:
            return rows, rows
        ranges = np.unique(np.stack([start[rows], stop[rows]]), axis=1).T.tolist()
        return rows, np.concatenate([np.arange(*ends) for ends in ranges])

    def _buckets(self, half: Words) -> tuple[Ints, Ints]:
        bucket = (half >> self._shift).view(np.int64)
        return np.take(self._starts, bucket).astype(np.int64), np.take(self._starts, bucket + 1).astype(
            np.int64
        )


def _first_left_out(entries: Words, obsolete: Bools, mixed: _Runs, capacity: int) -> int:
    """The position of the first key beyond the capacity: every distinct key counts where it comes first.

    `obsolete` is not needed afterwards and is overwritten.
    """
    # An entry begins a run where the one before it is not of its key.
    for at in reversed(list(_slices(len(entries) - 1))):
        obsolete[at.start + 1 : at.stop + 1] = ~obsolete[at]
    firsts = obsolete
    firsts[:1] = True
    firsts[mixed.starts] = ~mixed.again

    def positions(chosen: slice) -> Ints:
        found: Ints = (entries[chosen][firsts[chosen]] & _POSITION).view(np.int64)
        return found

    # The capacity-th of them, without sorting a copy of all: first its upper half by counting, then the rest.
    counts = np.zeros(1 << 16, np.int64)
    for at in _slices(len(entries)):
        counts += np.bincount(positions(at) >> 16, minlength=1 << 16)
    below = np.cumsum(counts) - counts
    upper = int(np.searchsorted(below, capacity, side="right")) - 1
    near = [p[p >> 16 == upper] for p in map(positions, _slices(len(entries)))]
    return int(np.sort(np.concatenate(near))[capacity - int(below[upper])])


def _compress(entries: Words, kept: Callable[[slice], Bools]) -> int:
    """Move the entries that are kept to the front, in their order; returns how many they are."""
    fill = 0
    for at in _slices(len(entries)):
        # Several times faster than indexing by a mask, where what is kept lies scattered.
        some = np.take(entries[at], np.flatnonzero(kept(at)))
        entries[fill : fill + len(some)] = some
        fill += len(some)
    return fill


def _slices(count: int) -> Iterator[slice]:
    for start in range(0, count, _SLICE):
        yield slice(start, min(start + _SLICE, count))
