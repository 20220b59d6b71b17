"""Checks whether a new query continues exactly where a resumed commit ended. Pure.

Two conditions must hold. Each source begins at its position of that commit. Each operator that keeps state in
Spark begins with the state of that commit. Otherwise records count twice or not at all, or results of the new
records only replace the changelog's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keyfold.checkpoints.manifest.source_offsets import Begin, difference, without_seeds
from keyfold.checkpoints.manifest.state import Commit
from keyfold.statestore.errors import BatchConflict

_APPEND = 'on_reset="append" accepts the query as it is'


@dataclass(frozen=True)
class Operator:
    """An operator of a query that keeps state in Spark's checkpoint.

    Attributes:
        name: its class name in Spark.
        states: its initial states: the uuid of a changelog, and the commit of the state.
    """

    name: str
    states: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class QueryStart:
    """How a query begins.

    Attributes:
        begins: where each source begins, in the order of the query, without seeds.
        operators: the operators that keep state.
    """

    begins: tuple[Begin, ...]
    operators: tuple[Operator, ...] = ()


def check_resumed(
    last: Commit, batch: int, start: QueryStart, changelog: str, *, accept_replay: bool
) -> None:
    """Check that a query continues from `last`, the app's last commit, which `resume` has pinned.

    Args:
        changelog: the changelog's uuid.
        accept_replay: also accept sources that keep no position to continue from, such as files and rates.

    Raises:
        BatchConflict: the query does not continue from that commit.
    """
    _check_sources(last, batch, start.begins, accept_replay=accept_replay)
    bare = [o.name for o in start.operators if (changelog, last.number) not in o.states]
    if not bare:
        return
    others = sorted({commit for o in start.operators for _, commit in o.states})
    raise BatchConflict(
        "The new query has a stateful operator that does not begin with the state of the resumed commit. Its "
        "results would reflect the new records only, and replace the state in the changelog.",
        position=f"batch {batch} of app {last.app!r}",
        expected=f"the state of commit {last.number} as input of {', '.join(bare)}",
        found="the state of " + ", ".join(f"commit {n}" for n in others) if others else "no restored state",
        remedy="delete the new checkpoint; pass resume(...) to aggregate(..., resumed=again), or "
        "initial_state(spark, again) to transformWithState, or union seed(spark, again) with the stream that "
        f"is aggregated. If the state may be lost, {_APPEND}",
    )


def _check_sources(last: Commit, batch: int, begins: Sequence[Begin], *, accept_replay: bool) -> None:
    ended = without_seeds(last.source)
    if not ended:
        problems = [] if accept_replay else ["the commit has no source positions"]
        expected, remedy = "a commit of a query", "set accept_replay=True if all that the query reads is new"
    elif len(ended) != len(begins):
        problems = [f"the query has {_counted(len(begins))}"]
        expected = f"the {_counted(len(ended))} of the query that made commit {last.number}, in its order"
        remedy = f"give the new query the same sources. If it should read other sources, {_APPEND}"
    else:
        found = [(n, difference(e, b)) for n, (e, b) in enumerate(zip(ended, begins, strict=True))]
        wrong = [(n, d) for n, d in found if d is not None and (d.is_known or not accept_replay)]
        problems = [f"source {n}: {d.what}" for n, d in wrong]
        expected = f"each source to begin where commit {last.number} ended: {text_of(ended)}"
        remedy = _remedy(
            replays=any(not d.is_known for _, d in wrong), moved=any(d.is_known for _, d in wrong)
        )
    if problems:
        raise BatchConflict(
            f"The new query of app {last.app!r} does not begin where the resumed commit ended. Records would "
            "count twice, or not at all.",
            position=f"batch {batch}", expected=expected, found="; ".join(problems), remedy=remedy,
        )  # fmt: skip


def _remedy(*, replays: bool, moved: bool) -> str:
    steps = []
    if moved:
        steps.append(
            "delete the new checkpoint, and start the source with the options that resume(...) gives: "
            f".options(**again.options()). If records may be skipped or read again, {_APPEND}"
        )
    if replays:
        steps.append(
            "if reading these records again is correct (upserts of the same values, or only new files "
            "exist), give the sink accept_replay=True"
        )
    return "; ".join(steps)


def _counted(sources: int) -> str:
    return "1 source" if sources == 1 else f"{sources} sources"


def text_of(source: Iterable[str]) -> str:
    """Source positions as text for a message."""
    return " | ".join(source) or "no offsets"
