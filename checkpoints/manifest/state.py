"""What the manifest says: an immutable `State`, to which one entry after the other is applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.checkpoints.manifest.segment_lines import Line
from keyfold.statestore.segment.writer import Segment


@dataclass(frozen=True, slots=True)
class CommitFacts:
    """What every line that names a commit says about it.

    Attributes:
        source: the position it was read up to.
    """

    number: int
    time_ms: int
    app: str
    query: str
    batch: int
    source: tuple[str, ...]
    digest: str

    def facts_line(self) -> Line:
        return {
            "commit": self.number,
            "time": self.time_ms,
            "app": self.app,
            "query": self.query,
            "batch": self.batch,
            "source": list(self.source),
            "digest": self.digest,
        }


def facts_from(line: Line) -> tuple[int, int, str, str, int, tuple[str, ...], str]:
    """The fields of `CommitFacts`."""
    return (
        line["commit"], line["time"], line["app"], line["query"], line["batch"], tuple(line["source"]),
        line["digest"],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Commit(CommitFacts):
    """One micro-batch.

    Attributes:
        ends: every partition's end offset after it.
        until_ms: the earliest time of the commits that followed it and are no longer kept, -1 for none: from
            that time on it is not known to be the last one.
        alone: it is kept only because its app had committed it last before a commit that is kept. What other
            apps had committed by then is not known, so nothing can be rolled back to it.
        applied: False only where `Changelog.append` gives a commit that an earlier call has made.
    """

    ends: tuple[int, ...]
    until_ms: int = -1
    alone: bool = False
    applied: bool = field(default=True, compare=False)

    def to_json(self) -> Line:
        return {
            **self.facts_line(),
            "ends": list(self.ends),
            "until": self.until_ms,
            "alone": self.alone,
        }

    @classmethod
    def from_json(cls, line: Line) -> Commit:
        return cls(*facts_from(line), tuple(line["ends"]), line["until"], line["alone"])


@dataclass(frozen=True, slots=True)
class Anchor:
    """A commit whose exact state stays restorable; `app` is set where `resume` pinned it for that app."""

    name: str
    commit: int
    ends: tuple[int, ...]
    app: str = ""

    def to_json(self) -> Line:
        return {"name": self.name, "commit": self.commit, "ends": list(self.ends), "app": self.app}

    @classmethod
    def from_json(cls, line: Line) -> Anchor:
        return cls(line["name"], line["commit"], tuple(line["ends"]), line["app"])


class Change(Protocol):
    """A change of the state; the kinds are in `entries`."""

    def applied(self, state: State) -> State:
        """The state after it, with the number from before. Raises `ValueError` where it does not follow."""


@dataclass(frozen=True, slots=True)
class State:
    """Everything a reader must know, as of manifest line `seq`.

    Attributes:
        commits: those that can be named, ascending: the last ones (`commits.retained`), those with an
            anchor, and what every app had committed last before any of these.
        apps: app id → its last commit, for ever.
    """

    seq: int
    epoch: int
    partitions: tuple[PartitionState, ...]
    commits: tuple[Commit, ...] = ()
    apps: Mapping[str, Commit] = field(default_factory=dict)
    anchors: Mapping[str, Anchor] = field(default_factory=dict)
    next_commit: int = 1

    def apply(self, entry: Change) -> State:
        """The state after one more entry. Raises `KeyError`, `ValueError` or `IndexError` on nonsense."""
        return replace(entry.applied(self), seq=self.seq + 1)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(p.end for p in self.partitions)

    def restorable(self, ends: tuple[int, ...]) -> bool:
        """Whether the fold up to these offsets can still be computed, and is not empty only because retention
        has removed everything.
        """
        return not self.retained_no_more(ends) and not self.folded_away(ends)

    def retained_no_more(self, ends: tuple[int, ...]) -> bool:
        """Whether the log begins after one of these offsets, or retention has removed everything below all of
        them: the state is the fold from the log start offset, and there is none up to an offset below it.
        """
        starts = tuple(p.start for p in self.partitions)
        if any(end < start for end, start in zip(ends, starts, strict=True)):
            return True
        return ends == starts and any(starts) and ends != self.ends

    def folded_away(self, ends: tuple[int, ...]) -> bool:
        """Whether a cleaner pass has dropped records that the fold up to these offsets needs."""
        pairs = zip(ends, self.partitions, strict=True)
        return any(p.start < end and not p.is_exact(end) for end, p in pairs)


def empty(partitions: int, epoch: int, seq: int = 0) -> State:
    return State(seq, epoch, tuple(PartitionState() for _ in range(partitions)))


def truncated(
    state: State,
    commit: int,
    ends: tuple[int, ...],
    parts: Mapping[int, tuple[set[str], tuple[Segment, ...]]],
) -> State:
    """The state as of a commit: every partition ends there, later commits and anchors are forgotten."""
    partitions = []
    for partition, (p, end) in enumerate(zip(state.partitions, ends, strict=True)):
        out, added = parts.get(partition, (set[str](), ()))
        segments = (*(s for s in p.segments if s.name not in out), *added)
        partitions.append(p.truncated(end, tuple(sorted(segments, key=lambda s: s.base))))
    commits = tuple(c for c in state.commits if c.number <= commit)
    # Now it is the last one again, whatever followed it.
    commits = (*commits[:-1], *(replace(c, until_ms=-1) for c in commits[-1:]))
    return replace(
        state,
        partitions=tuple(partitions),
        commits=commits,
        apps={c.app: c for c in commits},
        anchors={k: a for k, a in state.anchors.items() if a.commit <= commit},
    )


def pruned(state: State, keep: int) -> State:
    """With the last `keep` commits whose state can be restored, and those that have an anchor.

    What every app had committed last before such a commit stays too, alone: a rollback to it must know.
    """
    anchored = {a.commit for a in state.anchors.values()}
    oldest = state.commits[-keep].number if len(state.commits) > keep else 0
    named: set[int] = set()
    last: dict[str, int] = {}
    lasts: set[int] = set()
    run = False
    for c in state.commits:
        last[c.app] = c.number
        is_named = (c.number >= oldest or c.number in anchored) and state.restorable(c.ends)
        if is_named:
            named.add(c.number)
            if not run:
                # Within a run of commits that stay, what the apps had committed stays anyway.
                lasts.update(last.values())
        run = is_named
    kept: list[Commit] = []
    for c in state.commits:
        if c.number in named or c.number in lasts:
            kept.append(c if c.number in named else replace(c, alone=True))
        elif kept:
            times = (kept[-1].until_ms, c.time_ms, c.until_ms)
            kept[-1] = replace(kept[-1], until_ms=min(t for t in times if t >= 0))
    return replace(state, commits=tuple(kept))
