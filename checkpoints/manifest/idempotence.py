"""Whether a batch is new, was applied already, or is not what it claims to be. Pure.

A streaming batch is the same batch if its source offsets are the same: its rows may come in another order
when Spark computes it again. `append` without Spark has no source offsets and compares a digest of the rows,
for the last batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Final, Literal, TypeAlias

from keyfold.checkpoints.manifest.resumption import QueryStart, check_resumed, text_of
from keyfold.checkpoints.manifest.source_offsets import same_positions
from keyfold.checkpoints.manifest.state import Commit, State
from keyfold.statestore.errors import BatchConflict, ConfigError

OnReset: TypeAlias = Literal["refuse", "append", "restore"]

_SHOWN_CHARACTERS: Final = 80


#: The app of the commits in which a state was written into a new changelog. What other apps had committed
#: before is not among its commits.
COPIED_APP: Final = "restore"
APP_CHARACTERS_MAX: Final = 255
BATCH_MAX: Final = (1 << 63) - 1


def checked_app(app_id: object) -> str:
    """The name of an app. Raises `ConfigError` for what is none."""
    if isinstance(app_id, str) and is_app(app_id):
        return app_id
    raise ConfigError(
        "That is no app id.", expected=f"1 to {APP_CHARACTERS_MAX} characters of valid Unicode, the same for "
        "the life of the job",
        found=ascii(app_id)[:_SHOWN_CHARACTERS], remedy="correct app_id=",
    )  # fmt: skip


def checked_batch(batch_id: object) -> int:
    """The number of a batch. Raises `ConfigError` for what is none."""
    if isinstance(batch_id, Integral) and not isinstance(batch_id, bool) and 0 <= int(batch_id) <= BATCH_MAX:
        return int(batch_id)
    raise ConfigError(
        "That is no batch id.", expected="a whole number from 0 to 2**63 - 1",
        found=ascii(batch_id)[:_SHOWN_CHARACTERS],
        remedy="correct batch_id=; in foreachBatch, pass on what it gives",
    )  # fmt: skip


def is_app(name: str) -> bool:
    """Whether an app can have this name. A lone surrogate has no bytes in UTF-8."""
    return 0 < len(name) <= APP_CHARACTERS_MAX and not any("\ud800" <= c <= "\udfff" for c in name)


def appended(state: State, app: str, batch: int, digest: str) -> Commit | None:
    """The commit that holds a batch without source offsets; None where the batch is new.

    A batch below the last one is one that was committed before, as long as the commits that are kept do not
    say otherwise. Where its own commit is gone, the app's last one is given.

    Args:
        digest: of the rows; empty where it is not known.

    Raises:
        BatchConflict: this batch id was committed with other rows, or was passed over by a later one; or the
            app belongs to a query.
    """
    last = state.apps.get(app)
    if last is None:
        return None
    if last.query:
        raise BatchConflict(
            f"The app {app!r} belongs to a streaming query.",
            expected="an app id of its own",
            found=repr(app),
            remedy="append under another app_id",
        )
    if batch > last.batch:
        return None
    found = last if batch == last.batch else _earlier(state, last, batch)
    if found is not None and found.batch == batch and digest and found.digest and digest != found.digest:
        raise BatchConflict(
            f"Batch {batch} of app {app!r} was committed with other rows.",
            expected=f"the rows of commit {found.number} (digest {found.digest})", found=f"digest {digest}",
            remedy="use the next batch id for new rows",
        )  # fmt: skip
    return found


def _earlier(state: State, last: Commit, batch: int) -> Commit:
    """The commit of a batch below the last one, or the last one where it is gone.

    Raises `BatchConflict` where no commit can have held it: every commit between those of the batches next to
    it is there.
    """
    own = [c for c in (*state.commits, last) if c.app == last.app]
    found = [c for c in own if c.batch == batch]
    if found:
        return found[-1]
    above = min((c for c in own if c.batch > batch), key=lambda c: c.batch)
    below = max((c for c in own if c.batch < batch), key=lambda c: c.batch, default=None)
    copied = not state.commits or state.commits[0].app == COPIED_APP
    if below is None and copied:
        return last
    first = 1 if below is None else below.number + 1
    between = {c.number for c in state.commits if first <= c.number < above.number}
    if len(between) < above.number - first:
        return last
    raise BatchConflict(
        f"Batch {batch} of app {last.app!r} was never committed, and a later one was.",
        expected=f"a batch id above {last.batch}, or one that was committed", found=f"batch {batch}",
        remedy="give batches in ascending order; use the next batch id for these rows",
    )  # fmt: skip


@dataclass(frozen=True)
class SourceBatch:
    """A micro-batch of a streaming query: `source` is where it ends, `previous` where the batch before it
    ended.

    Both are one JSON text per source, as Spark keeps them in `offsets/<batch id>`; empty where they are not
    known.

    Attributes:
        start: how the query begins; asked for where the query is new to its app.
        skips: all batches up to this one, and this one, are left out on purpose.
    """

    query: str
    batch: int
    source: tuple[str, ...]
    previous: tuple[str, ...]
    start: Callable[[], QueryStart]
    skips: bool = False


@dataclass(frozen=True)
class Reset:
    """What to do with a new query of a known app.

    Attributes:
        on_reset: "refuse" it; "append" all that it reads; "restore": take it if it goes on exactly where the
            commit ended that `resume` has pinned.
        accept_replay: with "restore", take sources too that keep no position to go on from.
    """

    on_reset: OnReset
    accept_replay: bool = False


def admits_stream(state: State, changelog: str, app: str, b: SourceBatch, reset: Reset) -> bool:
    """True where the batch is new, False where it was applied already.

    Args:
        changelog: its uuid.

    Raises:
        BatchConflict: the batch does not follow from the last commit of its query: a checkpoint that was
            deleted, put back from an older copy, or edited; or batches that the sink was not called for.
    """
    last = state.apps.get(app)
    if last is None:
        return True
    if last.query != b.query:
        _check_reset(state, changelog, b, last, reset)
        return True
    if b.batch == last.batch:
        if not same_positions(b.source, last.source):
            raise BatchConflict(
                f"Batch {b.batch} of app {last.app!r} comes again with other source offsets.",
                expected=f"the offsets of commit {last.number}: {text_of(last.source)}",
                found=text_of(b.source),
                remedy="the query's checkpoint is not the one that this batch was committed from: put that "
                "one back, or delete it and start from resume(...)",
            )
        return False
    if b.batch < last.batch:
        if b.skips:
            return False
        raise BatchConflict(
            f"Batch {b.batch} of app {last.app!r} comes after batch {last.batch} was committed.",
            expected=f"batch {last.batch} again, or a later one", found=f"batch {b.batch}",
            remedy="an older copy of the query's checkpoint was put back: put the newest one back, or delete "
            "it and start from resume(...)",
        )  # fmt: skip
    if not b.skips and not same_positions(b.previous, last.source):
        raise _gap(b, last)
    return True


def _gap(b: SourceBatch, last: Commit) -> BatchConflict:
    """Records were read between the last commit and this batch. Without any, the positions are equal."""
    lost = "the checkpoint is not the one of that commit: delete it and start from resume(...)"
    missing = range(last.batch + 1, b.batch)
    if missing:
        which = f"batch {missing[0]}" if len(missing) == 1 else f"batches {missing[0]} to {missing[-1]}"
        lost = (
            f"if your function has returned for {which} without a call of the sink, as "
            f"`if df.isEmpty(): return` does, call sink.skip({missing[-1]}) in it once, and from then on "
            f"sink.skip(batch_id, df) instead of returning. If it has not, {lost}"
        )
    return BatchConflict(
        f"Batch {b.batch} of app {last.app!r} does not begin where the last commit ended.",
        expected=f"source offsets {text_of(last.source)} (commit {last.number}, batch {last.batch})",
        found=text_of(b.previous), remedy=lost,
    )  # fmt: skip


def _check_reset(state: State, changelog: str, b: SourceBatch, last: Commit, reset: Reset) -> None:
    if reset.on_reset == "append":
        return
    if reset.on_reset == "restore":
        if not any(a.app == last.app and a.commit == last.number for a in state.anchors.values()):
            raise BatchConflict(
                f"The app {last.app!r} starts again with a new query, and nobody has resumed it.",
                expected=f"resume(...) for commit {last.number} before the query starts",
                found=_query(b.query),
                remedy=f"call resume(path, app_id={last.app!r}), and start the query from its state and "
                "options",
            )  # fmt: skip
        check_resumed(last, b.batch, b.start(), changelog, accept_replay=reset.accept_replay)
        return
    raise BatchConflict(
        f"The app {last.app!r} has committed {last.batch + 1} batches or more with another query.",
        expected=f"{_query(last.query)}, which ended at {text_of(last.source)}",
        found=_query(b.query),
        remedy="the checkpoint was deleted or is a new one: start from resume(...) with "
        'on_reset="restore", or say on_reset="append" to write all that the query reads now after what is '
        "there",
    )


def _query(query: str) -> str:
    return f"query {query}" if query else "no query: append was called"
