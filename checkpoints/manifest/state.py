"""What the manifest says: an immutable `State`, and the pure function that one manifest line is.

A line is a JSON object with its number `n` (dense for the changelog's life) and its kind `t`:

- `checkpoint`: the whole state; the first line of every journal
- `commit`: one micro-batch, whole, in all partitions
- `seal`: active segments got their indexes
- `swap`: one cleaner pass over one partition: files out, files in
- `delete`: retention moved a log's start
- `anchor`, `unanchor`: a commit must stay restorable, or need not any more
- `rollback`: everything behind a commit is taken back
- `uncleanable`: the cleaner has given up a partition, or, with an empty reason, has taken it back
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from keyfold.checkpoints.manifest.partition import PartitionState, partition_from, partition_line
from keyfold.checkpoints.manifest.segment_lines import Line, grown, segment_from
from keyfold.statestore.segment.block import FORMAT_VERSION
from keyfold.statestore.segment.writer import Segment

#: Names of segments that go, and what replaces them.
Swapped: TypeAlias = tuple[set[str], tuple[Segment, ...]]

#: Marks of the segments without index in a checkpoint: of all partitions, and of one segment at least.
_MARKS_IN_ALL: Final = 1 << 14
_MARKS_MIN: Final = 8


@dataclass(frozen=True, slots=True)
class Commit:
    """One micro-batch.

    Attributes:
        source: the position it was read up to.
        ends: every partition's end offset after it.
        until_ms: the earliest time of the commits that followed it and are no longer kept, -1 for none: from
            that time on it is not known to be the last one.
        alone: it is kept only because its app had committed it last before a commit that is kept. What other
            apps had committed by then is not known, so nothing can be rolled back to it.
        applied: False only where `Changelog.append` gives a commit that an earlier call has made.
    """

    number: int
    time_ms: int
    app: str
    query: str
    batch: int
    source: tuple[str, ...]
    digest: str
    ends: tuple[int, ...]
    until_ms: int = -1
    alone: bool = False
    applied: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class Anchor:
    """A commit whose exact state stays restorable; `app` is set where `resume` pinned it for that app."""

    name: str
    commit: int
    ends: tuple[int, ...]
    app: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """Everything a reader must know, as of manifest line `n`.

    Attributes:
        commits: those that can be named, ascending: the last ones (`commits.retained`), those with an
            anchor, and what every app had committed last before any of these.
        apps: app id → its last commit, for ever.
    """

    n: int
    epoch: int
    partitions: tuple[PartitionState, ...]
    commits: tuple[Commit, ...] = ()
    apps: Mapping[str, Commit] = field(default_factory=dict)
    anchors: Mapping[str, Anchor] = field(default_factory=dict)
    next_commit: int = 1

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


def empty(partitions: int, epoch: int, n: int = 0) -> State:
    return State(n, epoch, tuple(PartitionState() for _ in range(partitions)))


# -- one line --------------------------------------------------------------------------------------


def apply(state: State, line: Line) -> State:
    """The state behind one more line. Raises `KeyError`, `ValueError` or `TypeError` on nonsense."""
    if line["n"] != state.n + 1:
        raise ValueError(f"line {state.n + 1} was expected, this is line {line['n']}")
    return _APPLY[line["t"]](replace(state, n=line["n"]), line)


def _commit(state: State, line: Line) -> State:
    if line["commit"] != state.next_commit:
        raise ValueError(f"commit {state.next_commit} was expected, this is commit {line['commit']}")
    after = _seal(state, line)
    commit = Commit(
        line["commit"], line["time"], line["app"], line["query"], line["batch"], tuple(line["source"]),
        line["digest"], after.ends,
    )  # fmt: skip
    after = replace(
        after,
        commits=(*state.commits, commit),
        apps={**state.apps, commit.app: commit},
        next_commit=commit.number + 1,
    )
    for name in line.get("unanchor", ()):
        after = _unanchor(after, {"name": name})
    return pruned(after, line["keep"]) if "keep" in line else after


def _seal(state: State, line: Line) -> State:
    """Take in `parts`: per partition the segments that grew, began or were sealed, each as it is now."""
    partitions = list(state.partitions)
    for key, pieces in line["parts"].items():
        p = partitions[int(key)]
        segments = list(p.segments)
        for piece in pieces:
            before = segments.pop() if segments and segments[-1].name == piece["file"] else None
            segments.append(grown(before, piece))
        partitions[int(key)] = replace(p, segments=tuple(segments), end=segments[-1].next)
    return replace(state, partitions=tuple(partitions))


def _swap(state: State, line: Line) -> State:
    p = state.partitions[line["partition"]]
    return _with_partition(state, line["partition"], p.folded(line, state.n))


def _delete(state: State, line: Line) -> State:
    p = state.partitions[line["partition"]]
    return _with_partition(state, line["partition"], p.retained(line["start"], set(line["out"])))


def _rollback(state: State, line: Line) -> State:
    ends, parts = tuple(line["ends"]), {}
    for number, part in line["parts"].items():
        parts[int(number)] = set(part["out"]), tuple(segment_from(s) for s in part["in"])
    cut = truncated(state, line["commit"], ends, parts)
    pairs = zip(cut.partitions, ends, strict=True)
    return replace(cut, partitions=tuple(replace(p, cuts=(*p.cuts, end)) for p, end in pairs))


def truncated(
    state: State,
    commit: int,
    ends: tuple[int, ...],
    parts: Mapping[int, tuple[set[str], tuple[Segment, ...]]],
) -> State:
    """The state as of a commit: every partition ends there, later commits and anchors are forgotten."""
    partitions = []
    for number, (p, end) in enumerate(zip(state.partitions, ends, strict=True)):
        out, added = parts.get(number, (set[str](), ()))
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


def _uncleanable(state: State, line: Line) -> State:
    number = line["partition"]
    return _with_partition(state, number, replace(state.partitions[number], uncleanable=line["reason"]))


def _anchor(state: State, line: Line) -> State:
    anchor = Anchor(line["name"], line["commit"], tuple(line["ends"]), line["app"])
    return replace(state, anchors={**state.anchors, anchor.name: anchor})


def _unanchor(state: State, line: Line) -> State:
    return replace(state, anchors={k: v for k, v in state.anchors.items() if k != line["name"]})


_APPLY: dict[str, Callable[[State, Line], State]] = {
    "commit": _commit,
    "seal": _seal,
    "swap": _swap,
    "delete": _delete,
    "anchor": _anchor,
    "unanchor": _unanchor,
    "rollback": _rollback,
    "uncleanable": _uncleanable,
}


def _with_partition(state: State, number: int, partition: PartitionState) -> State:
    partitions = list(state.partitions)
    partitions[number] = partition
    return replace(state, partitions=tuple(partitions))


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


# -- the whole state as a line, and back -----------------------------------------------------------


def checkpoint(state: State, epoch: int, identity: str) -> Line:
    """The line that begins the journal of `epoch`; it is line `state.n + 1` and changes nothing."""
    marks = max(_MARKS_MIN, _MARKS_IN_ALL // len(state.partitions))
    return {
        "n": state.n + 1,
        "t": "checkpoint",
        "magic": "keyfold journal",
        "version": FORMAT_VERSION,
        "changelog": identity,
        "epoch": epoch,
        "next_commit": state.next_commit,
        "partitions": [partition_line(p, marks) for p in state.partitions],
        "commits": [_commit_line(c) for c in state.commits],
        "apps": {name: _commit_line(c) for name, c in state.apps.items()},
        "anchors": [
            {"name": a.name, "commit": a.commit, "ends": list(a.ends), "app": a.app}
            for a in state.anchors.values()
        ],
    }


def from_checkpoint(line: Line) -> State:
    """The state that a checkpoint line holds. Raises `KeyError`, `ValueError` or `TypeError` on nonsense."""
    if line["t"] != "checkpoint" or line["magic"] != "keyfold journal":
        raise ValueError("the first line of a journal is a checkpoint")
    return State(
        n=line["n"],
        epoch=line["epoch"],
        partitions=tuple(partition_from(p) for p in line["partitions"]),
        commits=tuple(_commit_from(c) for c in line["commits"]),
        apps={name: _commit_from(c) for name, c in line["apps"].items()},
        anchors={
            a["name"]: Anchor(a["name"], a["commit"], tuple(a["ends"]), a["app"]) for a in line["anchors"]
        },
        next_commit=line["next_commit"],
    )


def _commit_line(c: Commit) -> Line:
    return {
        "commit": c.number,
        "time": c.time_ms,
        "app": c.app,
        "query": c.query,
        "batch": c.batch,
        "source": list(c.source),
        "digest": c.digest,
        "ends": list(c.ends),
        "until": c.until_ms,
        "alone": c.alone,
    }


def _commit_from(line: Line) -> Commit:
    return Commit(
        line["commit"], line["time"], line["app"], line["query"], line["batch"], tuple(line["source"]),
        line["digest"], tuple(line["ends"]), line.get("until", -1), line.get("alone", False),
    )  # fmt: skip
