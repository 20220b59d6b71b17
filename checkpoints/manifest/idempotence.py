"""Decides whether a batch is new, was applied already, or conflicts with an earlier batch. Pure.

Two streaming batches are the same batch if their source offsets are equal: Spark may compute the rows in
another order the second time. `append` without Spark has no source offsets. It compares a digest of the rows,
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


#: The app of commits that wrote a restored state into a new changelog. Earlier commits of other apps are not
#: in that changelog.
COPIED_APP: Final = "restore"
APP_CHARACTERS_MAX: Final = 255
BATCH_MAX: Final = (1 << 63) - 1


def checked_app(app_id: object) -> str:
    """The id of an app. Raises `ConfigError` if it is invalid."""
    if isinstance(app_id, str) and is_app(app_id):
        return app_id
    raise ConfigError(
        "Invalid app id.", expected=f"1 to {APP_CHARACTERS_MAX} characters of valid Unicode, the same in "
        "every run of the job",
        found=ascii(app_id)[:_SHOWN_CHARACTERS], remedy="correct `app_id=`",
    )  # fmt: skip


def checked_batch(batch_id: object) -> int:
    """The id of a batch. Raises `ConfigError` if it is invalid."""
    if isinstance(batch_id, Integral) and not isinstance(batch_id, bool) and 0 <= int(batch_id) <= BATCH_MAX:
        return int(batch_id)
    raise ConfigError(
        "Invalid batch id.", expected="a whole number from 0 to 2**63 - 1",
        found=ascii(batch_id)[:_SHOWN_CHARACTERS],
        remedy="correct batch_id=; in foreachBatch, pass its batch id on unchanged",
    )  # fmt: skip


def is_app(name: str) -> bool:
    """Whether this is a valid app id. A lone surrogate cannot be encoded in UTF-8."""
    return 0 < len(name) <= APP_CHARACTERS_MAX and not any("\ud800" <= c <= "\udfff" for c in name)


def appended(state: State, app: str, batch: int, digest: str) -> Commit | None:
    """The commit of a batch without source offsets. None if the batch is new.

    A batch id below the last one counts as committed unless the retained commits prove otherwise. If its own
    commit is no longer retained, the app's last commit is returned.

    Args:
        digest: the digest of the rows; empty if it is unknown.

    Raises:
        BatchConflict: this batch id was committed with other rows, or a later batch was committed without it;
            or the app belongs to a query.
    """
    last = state.apps.get(app)
    if last is None:
        return None
    if last.query:
        raise BatchConflict(
            f"The app {app!r} belongs to a streaming query.",
            expected="an app id of its own",
            found=repr(app),
            remedy="append with another app_id",
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
    """The commit of a batch below the last one. The last commit if that one is no longer retained.

    Raises `BatchConflict` if the batch was never committed: all commits from the batch before it to the batch
    after it are retained, and none is its own.
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
        f"Batch {batch} of app {last.app!r} was never committed, but a later batch was.",
        expected=f"a batch id above {last.batch}, or one that was committed", found=f"batch {batch}",
        remedy="append batches in ascending order; use the next batch id for these rows",
    )  # fmt: skip


@dataclass(frozen=True)
class SourceBatch:
    """A micro-batch of a streaming query. `source` is where it ends; `previous` is where the batch before it
    ended.

    Both hold one JSON text per source, as Spark stores them in `offsets/<batch id>`. They are empty if
    unknown.

    Attributes:
        start: returns how the query begins. Called if the query is new to its app.
        skips: all batches up to and including this one are skipped on purpose.
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
        on_reset: "refuse" it; "append" everything that it reads; "restore": accept it if it continues exactly
            where the commit that `resume` pinned ended.
        accept_replay: with "restore", also accept sources that keep no position to continue from.
    """

    on_reset: OnReset
    accept_replay: bool = False


def admits_stream(state: State, changelog: str, app: str, b: SourceBatch, reset: Reset) -> bool:
    """True if the batch is new, False if it was applied already.

    Args:
        changelog: the changelog's uuid.

    Raises:
        BatchConflict: the batch does not follow the last commit of its query. The checkpoint was deleted,
            restored from an older copy or edited, or the sink was not called for some batches.
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
                f"Batch {b.batch} of app {last.app!r} was delivered again with other source offsets.",
                expected=f"the offsets of commit {last.number}: {text_of(last.source)}",
                found=text_of(b.source),
                remedy="the query's checkpoint is not the one that committed this batch: put that "
                "checkpoint back, or delete it and start from resume(...)",
            )
        return False
    if b.batch < last.batch:
        if b.skips:
            return False
        raise BatchConflict(
            f"Batch {b.batch} of app {last.app!r} was delivered after batch {last.batch} was committed.",
            expected=f"batch {last.batch} again, or a later one", found=f"batch {b.batch}",
            remedy="an older copy of the query's checkpoint was put back: put the newest one back, or delete "
            "it and start from resume(...)",
        )  # fmt: skip
    if not b.skips and not same_positions(b.previous, last.source):
        raise _gap(b, last)
    return True


def _gap(b: SourceBatch, last: Commit) -> BatchConflict:
    """The error for records that were read between the last commit and this batch. If there are none, the
    positions are equal.
    """
    lost = "the checkpoint is not the one of that commit: delete it and start from resume(...)"
    missing = range(last.batch + 1, b.batch)
    if missing:
        which = f"batch {missing[0]}" if len(missing) == 1 else f"batches {missing[0]} to {missing[-1]}"
        lost = (
            f"if your function returned for {which} without calling the sink, as in "
            f"`if df.isEmpty(): return`, call sink.skip({missing[-1]}) in it once, and from then on "
            f"sink.skip(batch_id, df) instead of returning. Otherwise {lost}"
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
                f"The app {last.app!r} starts again with a new query that was not resumed.",
                expected=f"resume(...) for commit {last.number} before the query starts",
                found=_query(b.query),
                remedy=f"call resume(path, app_id={last.app!r}), and start the query from its state and "
                "options",
            )  # fmt: skip
        check_resumed(last, b.batch, b.start(), changelog, accept_replay=reset.accept_replay)
        return
    raise BatchConflict(
        f"The app {last.app!r} has already committed with another query, up to batch {last.batch}.",
        expected=f"{_query(last.query)}, which ended at {text_of(last.source)}",
        found=_query(b.query),
        remedy="the checkpoint was deleted or is new: start from resume(...) with "
        'on_reset="restore", or set on_reset="append" to append everything that the new query reads to the '
        "existing data",
    )


def _query(query: str) -> str:
    return f"query {query}" if query else "no query: the batch came from append"
