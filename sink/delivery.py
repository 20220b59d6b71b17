"""Which batches a sink takes, and what the commit says of them. The same for every sink.

A micro-batch of a query is known by the query's id, its batch id and its sources' offsets, which are read
from the query's checkpoint and committed with the batch. A call without a query has a batch id only: an id
that is not higher than the last one adds nothing, as with `Changelog.append`. There is no digest then, so an
id that comes again with other rows is not noticed; and a query's app does not take such calls, because they
would hide where its sources stand.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from pyspark.sql import DataFrame

from keyfold.checkpoints import admission
from keyfold.checkpoints.admission import OnReset, StreamBatch
from keyfold.checkpoints.state import State
from keyfold.checkpoints.writer import Batch
from keyfold.sink import query
from keyfold.sink.query import OffsetLog
from keyfold.statestore.errors import BatchConflict, ConfigError, StorageFailed
from keyfold.statestore.files import Files

log = logging.getLogger("keyfold")

#: In a column's metadata: the uuid of the changelog without which these rows are not the whole state.
CONTINUES: Final = "keyfold.continues"

_CONNECT: Final = "pyspark.sql.connect."


@dataclass(frozen=True)
class Delivery:
    """One call of a sink. `sync` makes durable what Spark wrote about the batch, if it wrote anything."""

    app: str
    batch: int
    stream: StreamBatch | None
    sync: Callable[[], None]


class Intake:
    """The batches of one app.

    Args:
        path: of the changelog, for messages.
        on_reset: what to do when a known app arrives with a new query: "refuse", "append", or "restore" (take
            it where `resume` has pinned the last commit).
    """

    def __init__(self, files: Files, path: Path, app_id: str | None, on_reset: OnReset) -> None:
        if on_reset not in get_args(OnReset):
            raise choice("on_reset", on_reset, get_args(OnReset))
        if app_id is not None and not (isinstance(app_id, str) and app_id):
            raise ConfigError(
                "That is no app id.",
                path=path,
                expected="a name that stays the same for the life of the job",
                found=repr(app_id),
                remedy="correct app_id=",
            )
        self.app = app_id or path.absolute().name
        self._files = files
        self._path = path
        self._on_reset = on_reset
        self._log: tuple[str, OffsetLog] | None = None

    def identify(self, df: DataFrame, batch_id: int) -> Delivery:
        """Which batch this is.

        Raises:
            ConfigError: no batch id, a DataFrame of Spark Connect, or a query with outputMode("complete").
            Damaged: the query's checkpoint cannot be read.
        """
        check_dataframe(df)
        if isinstance(batch_id, bool) or not isinstance(batch_id, int) or batch_id < 0:
            raise ConfigError(
                "That is no batch id.",
                path=self._path,
                expected="a whole number, 0 or higher",
                found=repr(batch_id),
                remedy="pass on what foreachBatch gives",
            )
        running = query.running_query(df.sparkSession)
        if running is None:
            return Delivery(self.app, batch_id, None, _nothing)
        if running.batch != batch_id:
            raise ConfigError(
                "The batch id is not that of the query that calls.",
                path=self._path,
                expected=running.batch,
                found=batch_id,
                remedy="pass on what foreachBatch gives",
            )
        if running.output_mode == "complete":
            raise ConfigError(
                'A query with outputMode("complete") gives its whole result in every batch, and no deletes.',
                path=self._path,
                expected='outputMode("update") or outputMode("append")',
                found="complete",
                remedy='use outputMode("update"): it gives what changed, and the changelog keeps the rest',
            )
        offsets = self._offset_log(df, running.checkpoint)
        source, previous = query.positions(offsets, batch_id)
        batch = StreamBatch(self.app, running.id, batch_id, source, previous)
        return Delivery(self.app, batch_id, batch, lambda: _sync(offsets, batch_id))

    def admits(self, df: DataFrame, state: State, delivery: Delivery) -> bool:
        """True where the batch is new, False where it was committed already.

        Raises:
            BatchConflict: the batch does not follow from what was committed; see `checkpoints.admission`.
        """
        if delivery.stream is None:
            new = admission.admits_append(state, delivery.app, delivery.batch, "")
        else:
            self._check_alone(df, state, delivery.stream)
            new = admission.admits_stream(state, delivery.stream, self._on_reset)
        if not new:
            log.info("changelog %s: batch %d was committed already", self._path, delivery.batch)
        return new

    def _check_alone(self, df: DataFrame, state: State, b: StreamBatch) -> None:
        """Two queries that run at once would each look like a reset of the other."""
        last = state.apps.get(b.app)
        if last is None or last.query in ("", b.query) or not query.is_active(df.sparkSession, last.query):
            return
        raise BatchConflict(
            f"Another query that is running writes the app {b.app!r}.",
            path=self._path,
            expected="one query for each changelog",
            found=f"queries {last.query} and {b.query}",
            remedy="stop one of them, or give each its own changelog",
        )

    def _offset_log(self, df: DataFrame, checkpoint: str) -> OffsetLog:
        if self._log is None or self._log[0] != checkpoint:
            self._log = checkpoint, query.offset_log(self._files, df.sparkSession, checkpoint)
        return self._log[1]


def batch_of(state: State, delivery: Delivery) -> Batch:
    """What the commit says of the batch.

    The pin of `resume` goes with the second commit behind the pinned one: a job that dies before must find
    the same state again.
    """
    b = delivery.stream
    if b is None:
        return Batch(delivery.app, delivery.batch)
    last = state.apps.get(b.app)
    pins: tuple[str, ...] = ()
    if last is not None and last.query == b.query:
        pins = tuple(a.name for a in state.anchors.values() if a.app == b.app and a.commit < last.number)
    return Batch(b.app, b.batch, query=b.query, source=b.source, unanchor=pins)


def consume(df: DataFrame) -> None:
    """Compute the batch and forget it: a stateful query fails unless every partition of it was read."""
    df.write.format("noop").mode("overwrite").save()


def check_dataframe(df: object) -> None:
    """Raises `ConfigError` for what is not a DataFrame of a Spark session in this process."""
    if type(df).__module__.startswith(_CONNECT):
        raise connect_refused()
    if not isinstance(df, DataFrame):
        raise ConfigError(
            "A sink takes a DataFrame.",
            expected="pyspark.sql.DataFrame",
            found=type(df).__name__,
            remedy="give the sink to foreachBatch, or call it with a DataFrame and a batch id",
        )


def connect_refused() -> ConfigError:
    """The error for Spark Connect, where the function of foreachBatch runs in a process of the server."""
    return ConfigError(
        "Spark Connect is not supported.",
        expected="a Spark session in this process",
        found="a Spark Connect session",
        remedy="run the query with a session that SparkSession.builder.master(...) makes",
    )


def choice(name: str, given: object, valid: Sequence[Any]) -> ConfigError:
    """The error for an argument that is none of the valid words; the nearest is named."""
    near = difflib.get_close_matches(str(given), [str(v) for v in valid], n=1, cutoff=0.4)
    return ConfigError(
        f"{name} cannot be {given!r}.",
        expected=", ".join(repr(v) for v in valid),
        found=repr(given),
        remedy=f"did you mean {near[0]!r}?" if near else "use one of them",
    )


def _nothing() -> None:
    pass


def _sync(offsets: OffsetLog, batch: int) -> None:
    try:
        offsets.sync(batch)
    except OSError as e:
        raise StorageFailed(
            "The query's checkpoint could not be made durable; nothing of this batch counts.",
            path=str(offsets),
            expected="an fsync that succeeds",
            found=f"{type(e).__name__}: {e.strerror or e}",
            remedy="repair the disk, then start the query again",
        ) from e
