"""Whether a batch is new, was applied already, or is not what it claims to be. Pure.

A streaming batch is the same batch if its source offsets are the same: its rows may come in another order
when Spark computes it again. `append` without Spark has no source offsets and compares a digest of the rows,
for the last batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from keyfold.checkpoints.state import Commit, State
from keyfold.statestore.errors import BatchConflict

OnReset: TypeAlias = Literal["refuse", "append", "restore"]


def admits_append(state: State, app: str, batch: int, digest: str) -> bool:
    """True where the batch is new, False where it was applied already.

    Raises:
        BatchConflict: the last batch of this app had the same id and other rows, or the app belongs to a
            query.
    """
    last = state.apps.get(app)
    if last is None:
        return True
    if last.query:
        raise BatchConflict(
            f"The app {app!r} belongs to a streaming query.",
            expected="an app id of its own",
            found=repr(app),
            remedy="append under another app_id",
        )
    if batch == last.batch and digest and last.digest and digest != last.digest:
        raise BatchConflict(
            f"Batch {batch} of app {app!r} was committed with other rows.",
            expected=f"the rows of commit {last.number} (digest {last.digest})", found=f"digest {digest}",
            remedy="use the next batch id for new rows",
        )  # fmt: skip
    return batch > last.batch


@dataclass(frozen=True)
class StreamBatch:
    """A micro-batch of a streaming query: `source` is where it ends, `previous` where the batch before it
    ended.

    Both are one JSON text per source, as Spark keeps them in `offsets/<batch id>`; empty where they are not
    known.
    """

    app: str
    query: str
    batch: int
    source: tuple[str, ...]
    previous: tuple[str, ...]


def admits_stream(state: State, b: StreamBatch, on_reset: OnReset) -> bool:
    """True where the batch is new, False where it was applied already.

    Raises:
        BatchConflict: the batch does not follow from the last commit of its query: a checkpoint that was
            deleted, put back from an older copy, or edited.
    """
    last = state.apps.get(b.app)
    if last is None:
        return True
    if last.query != b.query:
        return _admits_reset(state, b, last, on_reset)
    if b.batch == last.batch:
        if b.source != last.source:
            raise _conflict(
                f"Batch {b.batch} of app {b.app!r} comes again with other source offsets.",
                f"the offsets of commit {last.number}: {_text(last.source)}",
                _text(b.source),
                "the query's checkpoint is not the one that this batch was committed from: put that one "
                "back, or delete it and start from resume(...)",
            )
        return False
    if b.batch < last.batch:
        raise _conflict(
            f"Batch {b.batch} of app {b.app!r} comes after batch {last.batch} was committed.",
            f"batch {last.batch} again, or a later one",
            f"batch {b.batch}",
            "an older copy of the query's checkpoint was put back: put the newest one back, or delete it and "
            "start from resume(...)",
        )
    if b.previous != last.source:
        raise _conflict(
            f"Batch {b.batch} of app {b.app!r} does not begin where the last commit ended.",
            f"source offsets {_text(last.source)} (commit {last.number}, batch {last.batch})",
            _text(b.previous),
            "batches are missing: the checkpoint is not the one of that commit; delete it and start from "
            "resume(...)",
        )
    return True


def _admits_reset(state: State, b: StreamBatch, last: Commit, on_reset: OnReset) -> bool:
    if on_reset == "append":
        return True
    pinned = any(a.app == b.app and a.commit == last.number for a in state.anchors.values())
    if on_reset == "restore" and pinned:
        return True
    found = f"query {b.query}" if b.query else "no query: append was called"
    if on_reset == "restore":
        raise _conflict(
            f"The app {b.app!r} starts again with a new query, and nobody has resumed it.",
            f"resume(...) for commit {last.number} before the query starts", found,
            f"call resume(path, app_id={b.app!r}), and start the query from its state and options",
        )  # fmt: skip
    raise _conflict(
        f"The app {b.app!r} has committed {last.batch + 1} batches or more with another query.",
        f"query {last.query or '(append)'}, which ended at {_text(last.source)}",
        found,
        'the checkpoint was deleted or is a new one: start from resume(...) with on_reset="restore", or say '
        'on_reset="append" to write everything that the query reads now behind what is there',
    )


def _conflict(what: str, expected: str, found: str, remedy: str) -> BatchConflict:
    return BatchConflict(what, expected=expected, found=found, remedy=remedy)


def _text(source: tuple[str, ...]) -> str:
    return " | ".join(source) or "no offsets"
