"""The perfect changelog: lists of all records that were committed, and what must be true because of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from keyfold.statestore.keys.partitioner import partition_of

#: key, value or None, timestamp in ms
Record = tuple[bytes, bytes | None, int]
Row = tuple[bytes, bytes | None]
Ends = tuple[int, ...]
Found = tuple[int, bytes, bytes | None, int]


@dataclass(frozen=True)
class Made:
    """One commit, with every partition's end after it."""

    number: int
    app: str
    batch: int
    time_ms: int
    rows: tuple[Row, ...]
    ends: Ends


@dataclass(frozen=True)
class Perfect:
    """`records[p][offset]` of every partition; the commits that were not rolled back; where the log starts.

    Values do not change: what changes it gives another one, so that a reader's view is a reference.
    """

    records: tuple[tuple[Record, ...], ...]
    starts: Ends
    commits: tuple[Made, ...] = ()
    anchors: tuple[tuple[str, int], ...] = ()
    next_number: int = 1

    @classmethod
    def empty(cls, partitions: int) -> Perfect:
        return cls(((),) * partitions, (0,) * partitions)

    @property
    def partitions(self) -> int:
        return len(self.records)

    @property
    def ends(self) -> Ends:
        return tuple(len(r) for r in self.records)

    def commit(self, number: int) -> Made | None:
        return next((c for c in self.commits if c.number == number), None)

    def last_of(self, app: str) -> Made | None:
        return next((c for c in reversed(self.commits) if c.app == app), None)

    def committed(self, rows: Sequence[Row], app: str, batch: int, time_ms: int) -> Perfect:
        records = [list(r) for r in self.records]
        for key, value in rows:
            records[partition_of(key, len(records))].append((key, value, time_ms))
        all_records = tuple(tuple(r) for r in records)
        ends = tuple(len(r) for r in all_records)
        made = Made(self.next_number, app, batch, time_ms, tuple(rows), ends)
        return replace(
            self, records=all_records, commits=(*self.commits, made), next_number=self.next_number + 1
        )

    def rolled_back(self, number: int) -> Perfect:
        made = self.commit(number)
        assert made is not None
        return replace(
            self,
            records=tuple(r[:end] for r, end in zip(self.records, made.ends, strict=True)),
            commits=tuple(c for c in self.commits if c.number <= number),
            anchors=tuple(a for a in self.anchors if a[1] <= number),
        )

    def named(self, name: str, number: int) -> Perfect:
        return replace(self, anchors=(*self.anchors, (name, number)))

    def unnamed(self, name: str) -> Perfect:
        return replace(self, anchors=tuple(a for a in self.anchors if a[0] != name))

    def started(self, starts: Ends) -> Perfect:
        return replace(self, starts=starts)

    def fold(self, ends: Ends | None = None, partitions: Iterable[int] | None = None) -> dict[bytes, bytes]:
        """The last value of every key below these ends; what retention has deleted does not count."""
        ends = self.ends if ends is None else ends
        state: dict[bytes, bytes] = {}
        for p in range(self.partitions) if partitions is None else partitions:
            for key, value, _ in self.records[p][self.starts[p] : ends[p]]:
                if value is None:
                    state.pop(key, None)
                else:
                    state[key] = value
        return state

    def changed(self, begins: Ends, ends: Ends) -> dict[bytes, bytes | None]:
        """The last record of every key between two points; None is a delete."""
        found: dict[bytes, bytes | None] = {}
        for records, begin, end in zip(self.records, begins, ends, strict=True):
            found.update((key, value) for key, value, _ in records[begin:end])
        return found

    def is_cut(self, ends: Ends) -> bool:
        """Whether retention has deleted records from one of these ends on."""
        return any(end < start for end, start in zip(ends, self.starts, strict=True))

    def is_at_start(self, ends: Ends) -> bool:
        """Whether retention has come to one of these ends: nothing of what was there is left."""
        return any(end <= start for end, start in zip(ends, self.starts, strict=True) if start)


class Filling(bytes):
    """Many equal bytes, told in few characters where an example is printed."""

    def __new__(cls, length: int) -> Filling:
        return super().__new__(cls, b"v" * length)

    def __repr__(self) -> str:
        return f"Filling({len(self)})"


def folded(records: Iterable[Found], end: int) -> dict[bytes, bytes]:
    """The fold of records that were read, below an offset."""
    state: dict[bytes, bytes] = {}
    for offset, key, value, _ in records:
        if offset >= end:
            break
        if value is None:
            state.pop(key, None)
        else:
            state[key] = value
    return state


def found_in(batches: Iterable[pa.RecordBatch]) -> list[Found]:
    """What was read, as Python values."""
    rows: list[Found] = []
    for batch in batches:
        times = batch.column("timestamp").cast(pa.int64()).to_pylist()
        columns = (batch.column(name).to_pylist() for name in ("offset", "key", "value"))
        rows += zip(*columns, times, strict=True)
    return rows


def table(rows: Sequence[Row]) -> pa.Table:
    keys, values = [k for k, _ in rows], [v for _, v in rows]
    return pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})
