"""Resolves points in a changelog's history: the meaning of `at=`, and whether the state there is still
exact.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from keyfold.checkpoints.manifest.idempotence import checked_app, checked_batch
from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.checkpoints.manifest.state import Commit, State
from keyfold.statestore import arguments, filenames
from keyfold.statestore.errors import CompactedAway, ConfigError

#: None (now), a commit number, `(app_id, batch_id)`, an anchor's name, a time, or one end offset for each
#: partition.
At: TypeAlias = "int | tuple[str, int] | str | datetime.datetime | Mapping[int, int] | None"


def resolve_ends(state: State, root: Path, at: At) -> tuple[int, ...]:
    """The end offset of every partition as of `at`. Raises `CompactedAway`, `ConfigError`."""
    if at is None:
        return state.ends
    if isinstance(at, Mapping):
        return _ends_given(state, root, at)
    if isinstance(at, str):
        anchor = state.anchors.get(at)
        if anchor is None:
            raise ConfigError(
                f"The anchor {at!r} does not exist.",
                path=root,
                expected=anchor_names(state),
                found=repr(at),
                remedy="name an anchor that exists",
            )
        return _exact(state, root, anchor.ends, f"anchor {at!r}, commit {anchor.commit}")
    commit = commit_at(state, root, at)
    return _exact(state, root, commit.ends, f"commit {commit.number}")


def anchor_names(state: State) -> str:
    """The anchors that there are, for an error."""
    return ", ".join(map(repr, sorted(state.anchors))) or "an anchor (none is set)"


def _ends_given(state: State, root: Path, at: Mapping[int, int]) -> tuple[int, ...]:
    ends = _checked_ends(state, root, at)
    return _exact(state, root, ends, f"offsets {', '.join(map(str, ends))}")


def _exact(state: State, root: Path, ends: tuple[int, ...], what: str) -> tuple[int, ...]:
    if state.retained_no_more(ends):
        starts = ", ".join(str(p.start) for p in state.partitions)
        raise CompactedAway(
            "Retention has removed the records of this point.", path=root, position=what,
            expected=f"a point after the log start offsets {starts}",
            found=f"end offsets {', '.join(map(str, ends))}",
            remedy="restore at a later commit; raise retention.ms or retention.bytes to keep more",
        )  # fmt: skip
    if state.folded_away(ends):
        raise compacted_away(state, root, what)
    return ends


def _checked_ends(state: State, root: Path, at: Mapping[int, int]) -> tuple[int, ...]:
    for number in (*at.keys(), *at.values()):
        arguments.whole("at", number)
    right = all(0 <= at.get(n, -1) <= p.end for n, p in enumerate(state.partitions))
    if not right or len(at) != len(state.partitions):
        raise ConfigError(
            "Invalid end offsets for this changelog.", path=root,
            expected=", ".join(f"{n}: 0 to {p.end}" for n, p in enumerate(state.partitions)),
            found=", ".join(f"{n}: {at[n]}" for n in sorted(at)) or "none",
            remedy="give one end offset for each partition",
        )  # fmt: skip
    return tuple(at[n] for n in range(len(state.partitions)))


def resolve_since(state: State, root: Path, since: At, to: tuple[int, ...]) -> tuple[int, ...]:
    """The end offset of every partition at a point, for the changes from there up to the end offsets `to`.
    The state at the point need not be exact. Raises `CompactedAway` if a delete between the two was dropped,
    or the point is below the log start offset.
    """
    if isinstance(since, str) or since is None:
        ends = resolve_ends(state, root, since)
    elif isinstance(since, Mapping):
        ends = _checked_ends(state, root, since)
    else:
        ends = commit_at(state, root, since).ends
    for partition, (end, p) in enumerate(zip(ends, state.partitions, strict=True)):
        check_no_missed_delete(state, root, partition, end, to[partition])
        if end < p.start:
            raise CompactedAway(
                f"Offset {end} is below the log start offset {p.start} (removed by retention).", path=root,
                position=f"partition {partition}, offset {end}",
                expected=f"an offset from {p.start}", found=end,
                remedy="restore the whole state, without since=",
            )  # fmt: skip
    return ends


def commit_at(state: State, root: Path, at: int | tuple[str, int] | datetime.datetime) -> Commit:
    """The commit that `at` means. Raises `CompactedAway` if it was compacted away, `ConfigError` if it never
    existed.
    """
    if isinstance(at, datetime.datetime):
        moment = at if at.tzinfo else at.replace(tzinfo=datetime.timezone.utc)
        return _commit_of(state, root, moment)
    if isinstance(at, tuple):
        if len(at) != 2:
            raise ConfigError(
                "Invalid `at`.", path=root, expected="(app_id, batch_id)",
                found=f"a tuple of {len(at)}", remedy="correct `at=`",
            )  # fmt: skip
        app, batch = checked_app(at[0]), checked_batch(at[1])
        last = state.apps.get(app)
        match = [c for c in (*state.commits, *([last] if last else [])) if c.app == app and c.batch == batch]
        if match:
            return match[-1]
        if last is None or batch > last.batch:
            raise ConfigError(
                f"Batch {batch} of app {app!r} does not exist.",
                path=root,
                position=f"app {app!r}, batch {batch}",
                expected=f"a batch of one of these apps: {', '.join(sorted(state.apps)) or '(none)'}",
                found="no commit of this batch",
                remedy="correct `at=`",
            )
        raise compacted_away(state, root, f"batch {batch} of app {app!r}")
    if isinstance(at, bool) or not isinstance(at, int):
        raise ConfigError(
            "Invalid `at`.",
            path=root,
            expected="a commit number, (app_id, batch_id), an anchor's name, a datetime, "
            "{partition: end offset} or None",
            found=type(at).__name__,
            remedy="correct `at=`",
        )
    for commit in state.commits:
        if commit.number == at:
            return commit
    if not 1 <= at < state.next_commit:
        raise ConfigError(
            f"Commit {at} does not exist.",
            path=root,
            expected=f"a number from 1 to {state.next_commit - 1}",
            found=at,
            remedy="correct `at=`",
        )
    raise compacted_away(state, root, f"commit {at}")


def _commit_of(state: State, root: Path, moment: datetime.datetime) -> Commit:
    """The last commit not after a time.

    Raises:
        CompactedAway: that may be one that is no longer retained.
        ConfigError: the first commit is later.
    """
    limit = moment.timestamp() * 1000
    before = [i for i, c in enumerate(state.commits) if c.time_ms <= limit]
    # The clock may have gone backwards: a commit that is no longer retained may be earlier than one that is.
    later = state.commits[before[-1] if before else 0 :]
    gone = any(0 <= c.until_ms <= limit for c in later)
    if not before and not gone and state.commits and state.commits[0].number == 1:
        first = datetime.datetime.fromtimestamp(state.commits[0].time_ms / 1000, datetime.timezone.utc)
        raise ConfigError(
            "There was no commit at that time.", path=root, expected=f"{first.isoformat()} or later",
            found=moment.isoformat(), remedy="the time above is that of the first commit",
        )  # fmt: skip
    if not before or gone:
        raise compacted_away(state, root, moment.isoformat())
    return state.commits[before[-1]]


#: A rollback leaves a gap in the numbers. An error names at most this many runs of numbers, the last ones.
_RUNS = 5


def compacted_away(state: State, root: Path, what: str) -> CompactedAway:
    exact = [c.number for c in state.commits if state.restorable(c.ends)]
    firsts = [n for i, n in enumerate(exact) if i == 0 or exact[i - 1] != n - 1]
    lasts = [n for i, n in enumerate(exact) if i == len(exact) - 1 or exact[i + 1] != n + 1]
    runs = [f"{first} to {last}" for first, last in zip(firsts, lasts, strict=True)]
    if len(runs) > _RUNS:
        runs = ["..., " + runs[-_RUNS], *runs[1 - _RUNS :]]
    nearest = "commits " + ", ".join(runs) if exact else "the newest state only"
    if state.anchors:
        nearest += ", anchors " + ", ".join(sorted(state.anchors))
    return CompactedAway(
        "The exact state at this point no longer exists: it was compacted away, rolled back, or is no longer "
        "retained.",
        path=root,
        position=what,
        expected=nearest,
        found=what,
        remedy="restore at one of the points above. To keep a point, set an anchor before compaction; to "
        "keep more commits by number, raise commits.retained",
    )


def resolve_commit(state: State, root: Path, at: At) -> Commit:
    """The commit that `at` means; its state is exact. None means the last commit.

    Raises:
        CompactedAway: the exact state at that commit no longer exists.
        ConfigError: the commit does not exist; or `at` is a mapping of offsets, which may be between commits.
    """
    if isinstance(at, Mapping) or (at is None and not state.commits):
        raise ConfigError(
            "A commit is required here.", path=root,
            expected="a commit number, (app_id, batch_id), an anchor's name or a time",
            found="offsets" if isinstance(at, Mapping) else "a changelog without commits",
            remedy="name a commit" if isinstance(at, Mapping) else "commit a batch first",
        )  # fmt: skip
    resolve_ends(state, root, at)
    if at is None:
        return state.commits[-1]
    number = state.anchors[at].commit if isinstance(at, str) else commit_at(state, root, at).number
    return not_alone(next(c for c in state.commits if c.number == number), root)


def not_alone(commit: Commit, root: Path) -> Commit:
    """The same commit. Raises `CompactedAway` if the last commits of the other apps by then are unknown."""
    if commit.alone:
        raise CompactedAway(
            "The last commits of the other apps by then are no longer retained.", path=root,
            position=f"commit {commit.number}", expected="one of the last commits, or one with an anchor",
            found=f"the last commit of app {commit.app!r}, which is retained for that app only",
            remedy="name a later commit; raise commits.retained to keep more",
        )  # fmt: skip
    return commit


def apps_at(state: State, root: Path, ends: tuple[int, ...]) -> list[Commit]:
    """The last commit of every app up to these offsets. Raises `CompactedAway` if that is unknown."""
    held = [c for c in state.commits if all(e <= end for e, end in zip(c.ends, ends, strict=True))]
    if held and (held[-1].ends == ends or held[-1].until_ms < 0):
        not_alone(held[-1], root)
    elif any(ends):
        raise compacted_away(state, root, f"offsets {', '.join(map(str, ends))}")
    return list({c.app: c for c in held}.values())


def partition_state(state: State, root: Path, partition: int) -> PartitionState:
    if not 0 <= partition < len(state.partitions):
        raise ConfigError(
            f"Partition {partition} does not exist.", path=root, expected=f"0 to {len(state.partitions) - 1}",
            found=partition, remedy="correct `partition=`",
        )  # fmt: skip
    return state.partitions[partition]


def check_no_missed_delete(
    state: State, root: Path, partition: int, offset: int, to: int | None = None
) -> None:
    """Raises `CompactedAway` if following from `offset` up to `to` would miss a delete."""
    p = partition_state(state, root, partition)
    if p.may_miss_delete(offset, to):
        raise CompactedAway(
            "A delete after this position was compacted away.",
            path=filenames.partition(root, partition),
            position=f"partition {partition}, offset {offset}",
            expected=f"an offset above {p.last_dropped(to)}, the last dropped delete",
            found=offset,
            remedy="load the full state again, then follow from its end offset; a larger delete.retention.ms "
            "leaves more time",
        )
