"""The entries of the manifest: for each kind one class, with how it is written, how it is read, and what it
makes of the state.

An entry is a line of a journal, a JSON object with its number `seq` (dense for the changelog's life) and its
kind `t`:

- `checkpoint`: the whole state; the first line of every journal
- `commit`: one micro-batch, whole, in all partitions
- `seal`: active segments got their indexes
- `swap`: one cleaner pass over one partition: files out, files in
- `delete`: retention moved a log's start
- `anchor`, `unanchor`: a commit must stay restorable, or need not any more
- `rollback`: everything after a commit is removed
- `uncleanable`: the cleaner has given up a partition, or, with an empty reason, has taken it back

What is read raises `KeyError`, `ValueError`, `TypeError` or `IndexError` where it makes no sense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Protocol, TypeAlias, TypeVar

from keyfold.checkpoints.manifest.partition import CleanMark, PartitionState, cleaned_from, cleaned_line
from keyfold.checkpoints.manifest.segment_lines import Growth, Line, segment_from, segment_line
from keyfold.checkpoints.manifest.state import (
    Anchor,
    Change,
    Commit,
    CommitFacts,
    State,
    facts_from,
    pruned,
    truncated,
)
from keyfold.statestore.segment.block import FORMAT_VERSION
from keyfold.statestore.segment.writer import Segment

Self = TypeVar("Self", bound="Entry")

_MAGIC: Final = "keyfold journal"
#: Marks of the segments without index in a checkpoint: of all partitions, and of one segment at least.
_MARKS_IN_ALL: Final = 1 << 14
_MARKS_MIN: Final = 8


class Entry(Change, Protocol):
    """A line after the checkpoint."""

    KIND: ClassVar[str]

    def to_json(self) -> Line:
        """The line without its number and kind."""

    @classmethod
    def from_json(cls: type[Self], line: Line) -> Self: ...


def line_of(seq: int, entry: Entry) -> Line:
    """The line of an entry that is number `seq`."""
    return {"seq": seq, "t": entry.KIND, **entry.to_json()}


def apply_line(state: State, line: Line) -> State:
    """The state after one more line."""
    if line["seq"] != state.seq + 1:
        raise ValueError(f"line {state.seq + 1} was expected, this is line {line['seq']}")
    return state.apply(KINDS[line["t"]].from_json(line))


# -- what is appended ------------------------------------------------------------------------------

Growths: TypeAlias = Mapping[int, Sequence[Growth]]


def _growths_line(parts: Growths) -> Line:
    return {str(p): [g.to_json() for g in growths] for p, growths in parts.items()}


def _growths_from(parts: Line) -> dict[int, tuple[Growth, ...]]:
    return {int(p): tuple([Growth.from_json(g) for g in growths]) for p, growths in parts.items()}


def _grown(state: State, parts: Growths) -> tuple[PartitionState, ...]:
    partitions = list(state.partitions)
    for partition, growths in parts.items():
        p = partitions[partition]
        segments = list(p.segments)
        for growth in growths:
            same = segments and segments[-1].name == growth.segment.name
            segments.append(growth.grown(segments.pop() if same else None))
        partitions[partition] = replace(p, segments=tuple(segments), end=segments[-1].next)
    return tuple(partitions)


@dataclass(frozen=True, slots=True)
class CommitEntry(CommitFacts):
    """One micro-batch.

    Attributes:
        parts: partition → what its segments are now.
        unanchor: anchors that end with it.
        keep: how many of the last commits can be named from here on; None: as before.
    """

    KIND: ClassVar[str] = "commit"
    parts: Growths
    unanchor: tuple[str, ...] = ()
    keep: int | None = None

    def to_json(self) -> Line:
        line = {**self.facts_line(), "parts": _growths_line(self.parts)}
        if self.unanchor:
            line["unanchor"] = list(self.unanchor)
        if self.keep is not None:
            line["keep"] = self.keep
        return line

    @classmethod
    def from_json(cls, line: Line) -> CommitEntry:
        unanchor = tuple(line.get("unanchor", ()))
        return cls(*facts_from(line), _growths_from(line["parts"]), unanchor, line.get("keep"))

    def applied(self, state: State) -> State:
        if self.number != state.next_commit:
            raise ValueError(f"commit {state.next_commit} was expected, this is commit {self.number}")
        partitions = _grown(state, self.parts)
        commit = Commit(
            self.number, self.time_ms, self.app, self.query, self.batch, self.source, self.digest,
            tuple([p.end for p in partitions]),
        )  # fmt: skip
        anchors = state.anchors
        if self.unanchor:
            anchors = {name: a for name, a in anchors.items() if name not in self.unanchor}
        after = replace(
            state,
            partitions=partitions,
            commits=(*state.commits, commit),
            apps={**state.apps, commit.app: commit},
            anchors=anchors,
            next_commit=commit.number + 1,
        )
        return after if self.keep is None else pruned(after, self.keep)


@dataclass(frozen=True, slots=True)
class SealEntry:
    """Active segments got their indexes."""

    KIND: ClassVar[str] = "seal"
    parts: Growths

    def to_json(self) -> Line:
        return {"parts": _growths_line(self.parts)}

    @classmethod
    def from_json(cls, line: Line) -> SealEntry:
        return cls(_growths_from(line["parts"]))

    def applied(self, state: State) -> State:
        return replace(state, partitions=_grown(state, self.parts))


# -- what the cleaner and retention do -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SwapEntry:
    """One group of a cleaner pass over one partition.

    Attributes:
        out, added: names of the segments that go, and those that come.
        drops: a tombstone may be gone from here on. The other fields replace those of `PartitionState`.
    """

    KIND: ClassVar[str] = "swap"
    partition: int
    out: tuple[str, ...]
    added: tuple[Segment, ...]
    clean_end: int
    unique_end: int
    passes: tuple[CleanMark, ...]
    splits: tuple[int, ...]
    swept_end: int
    dropped_tombstones: tuple[int, ...]
    drops: bool

    def to_json(self) -> Line:
        return {
            "partition": self.partition,
            "out": list(self.out),
            "in": [segment_line(s) for s in self.added],
            **cleaned_line(self),
            "drops": self.drops,
        }

    @classmethod
    def from_json(cls, line: Line) -> SwapEntry:
        added = tuple(segment_from(s) for s in line["in"])
        return cls(line["partition"], tuple(line["out"]), added, **cleaned_from(line), drops=line["drops"])

    def applied(self, state: State) -> State:
        p, out = state.partitions[self.partition], set(self.out)
        if not out <= {s.name for s in p.segments}:
            raise ValueError("a swap removes segments that do not exist")
        rest = (s for s in p.segments if s.name not in out)
        after = replace(
            p,
            segments=tuple(sorted((*self.added, *rest), key=lambda s: (s.base, s.next))),
            clean_end=self.clean_end,
            unique_end=self.unique_end,
            passes=self.passes,
            splits=self.splits,
            swept_end=self.swept_end,
            dropped_tombstones=self.dropped_tombstones,
            dropped_at=state.seq + 1 if self.drops else p.dropped_at,
        )
        return _with_partition(state, self.partition, after)


@dataclass(frozen=True, slots=True)
class DeleteEntry:
    """Retention moved the log start offset of a partition."""

    KIND: ClassVar[str] = "delete"
    partition: int
    out: tuple[str, ...]
    start: int

    def to_json(self) -> Line:
        return {"partition": self.partition, "out": list(self.out), "start": self.start}

    @classmethod
    def from_json(cls, line: Line) -> DeleteEntry:
        return cls(line["partition"], tuple(line["out"]), line["start"])

    def applied(self, state: State) -> State:
        after = state.partitions[self.partition].retained(self.start, set(self.out))
        return _with_partition(state, self.partition, after)


@dataclass(frozen=True, slots=True)
class UncleanableEntry:
    """The cleaner has given a partition up; with an empty reason it has taken it back."""

    KIND: ClassVar[str] = "uncleanable"
    partition: int
    reason: str

    def to_json(self) -> Line:
        return {"partition": self.partition, "reason": self.reason}

    @classmethod
    def from_json(cls, line: Line) -> UncleanableEntry:
        return cls(line["partition"], line["reason"])

    def applied(self, state: State) -> State:
        after = replace(state.partitions[self.partition], uncleanable=self.reason)
        return _with_partition(state, self.partition, after)


def _with_partition(state: State, partition: int, after: PartitionState) -> State:
    partitions = list(state.partitions)
    partitions[partition] = after
    return replace(state, partitions=tuple(partitions))


# -- which commits stay ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnchorEntry:
    """A commit must stay restorable."""

    KIND: ClassVar[str] = "anchor"
    anchor: Anchor

    def to_json(self) -> Line:
        return self.anchor.to_json()

    @classmethod
    def from_json(cls, line: Line) -> AnchorEntry:
        return cls(Anchor.from_json(line))

    def applied(self, state: State) -> State:
        return replace(state, anchors={**state.anchors, self.anchor.name: self.anchor})


@dataclass(frozen=True, slots=True)
class UnanchorEntry:
    """A commit need not stay restorable any more."""

    KIND: ClassVar[str] = "unanchor"
    name: str

    def to_json(self) -> Line:
        return {"name": self.name}

    @classmethod
    def from_json(cls, line: Line) -> UnanchorEntry:
        return cls(line["name"])

    def applied(self, state: State) -> State:
        return replace(state, anchors={k: v for k, v in state.anchors.items() if k != self.name})


@dataclass(frozen=True, slots=True)
class RollbackEntry:
    """Everything after a commit is removed.

    Attributes:
        ends: of every partition, as of the commit.
        parts: partition → names of the segments that are removed, and what replaces them.
    """

    KIND: ClassVar[str] = "rollback"
    commit: int
    ends: tuple[int, ...]
    parts: Mapping[int, tuple[tuple[str, ...], tuple[Segment, ...]]]

    def to_json(self) -> Line:
        parts = {
            str(partition): {"out": list(out), "in": [segment_line(s) for s in added]}
            for partition, (out, added) in self.parts.items()
        }
        return {"commit": self.commit, "ends": list(self.ends), "parts": parts}

    @classmethod
    def from_json(cls, line: Line) -> RollbackEntry:
        parts = {
            int(partition): (tuple(part["out"]), tuple(segment_from(s) for s in part["in"]))
            for partition, part in line["parts"].items()
        }
        return cls(line["commit"], tuple(line["ends"]), parts)

    def applied(self, state: State) -> State:
        parts = {partition: (set(out), added) for partition, (out, added) in self.parts.items()}
        cut = truncated(state, self.commit, self.ends, parts)
        pairs = zip(cut.partitions, self.ends, strict=True)
        return replace(cut, partitions=tuple(replace(p, cuts=(*p.cuts, end)) for p, end in pairs))


_ENTRIES: Final[tuple[type[Entry], ...]] = (
    *(CommitEntry, SealEntry, SwapEntry, DeleteEntry, UncleanableEntry),
    *(AnchorEntry, UnanchorEntry, RollbackEntry),
)
KINDS: Final = {kind.KIND: kind for kind in _ENTRIES}


# -- the whole state as a line, and back -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """The whole state, with its number and epoch; the first line of every journal.

    Attributes:
        changelog: its uuid.
    """

    KIND: ClassVar[str] = "checkpoint"
    state: State
    changelog: str

    def to_line(self) -> Line:
        state = self.state
        marks = max(_MARKS_MIN, _MARKS_IN_ALL // len(state.partitions))
        return {
            "seq": state.seq,
            "t": self.KIND,
            "magic": _MAGIC,
            "version": FORMAT_VERSION,
            "changelog": self.changelog,
            "epoch": state.epoch,
            "next_commit": state.next_commit,
            "partitions": [p.to_json(marks) for p in state.partitions],
            "commits": [c.to_json() for c in state.commits],
            "apps": {name: c.to_json() for name, c in state.apps.items()},
            "anchors": [a.to_json() for a in state.anchors.values()],
        }

    @classmethod
    def from_line(cls, line: Line) -> CheckpointEntry:
        if line["t"] != cls.KIND or line["magic"] != _MAGIC:
            raise ValueError("the first line of a journal is a checkpoint")
        state = State(
            seq=line["seq"],
            epoch=line["epoch"],
            partitions=tuple(PartitionState.from_json(p) for p in line["partitions"]),
            commits=tuple(Commit.from_json(c) for c in line["commits"]),
            apps={name: Commit.from_json(c) for name, c in line["apps"].items()},
            anchors={a["name"]: Anchor.from_json(a) for a in line["anchors"]},
            next_commit=line["next_commit"],
        )
        return cls(state, line["changelog"])
