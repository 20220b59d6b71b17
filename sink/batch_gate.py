"""Decides which batches a sink accepts, and what their commits record. The same for every sink.

A micro-batch of a query is identified by the query's id, its batch id and its source offsets, which are read
from the query's checkpoint and committed with the batch. A call outside of a query has only a batch id: an id
that was committed before adds nothing, as with `Changelog.append`. Such a call has no digest, so reusing an
id for other rows is not detected. The app of a query refuses such calls, because they would hide the offsets
of its sources.
"""

from __future__ import annotations

import difflib
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from pyspark.sql import DataFrame, SparkSession

from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.log.writer import Batch
from keyfold.checkpoints.manifest import idempotence
from keyfold.checkpoints.manifest.idempotence import OnReset, Reset, SourceBatch
from keyfold.checkpoints.manifest.identity import ChangelogMeta
from keyfold.checkpoints.manifest.resumption import QueryStart
from keyfold.checkpoints.manifest.state import Commit, State
from keyfold.sink import offset_log
from keyfold.sink.offset_log import OffsetLog
from keyfold.sink.query_plan import query_start
from keyfold.statestore.errors import BatchConflict, ConfigError, StorageFailed, reason
from keyfold.statestore.files import Files

_log = logging.getLogger("keyfold")

#: In a column's metadata: the uuid of the changelog that has the rest of the state.
CONTINUES: Final = "keyfold.continues"

_CONNECT: Final = "pyspark.sql.connect."


@dataclass(frozen=True)
class IncomingBatch:
    """One call of a sink.

    Attributes:
        run: The run of the calling query; empty without a query.
        sync: Makes durable what Spark wrote about the batch, if anything.
        skips: Whether the batch has no rows on purpose.
    """

    batch: int
    stream: SourceBatch | None
    sync: Callable[[], None]
    run: str = ""
    skips: bool = False


class _Calls:
    """The batches that this process has delivered, by run of a query.

    A run passes each batch to its function once: a batch that fails ends the run. So a second call for the
    same batch in the same run has different rows, which would be mistaken for the committed ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: uuid of the changelog and app → run and batch; one entry each, regardless of the number of batches
        self._last: dict[tuple[str, str], tuple[str, int]] = {}

    def note(self, changelog: str, app: str, delivery: IncomingBatch) -> None:
        if delivery.run:
            with self._lock:
                self._last[changelog, app] = delivery.run, delivery.batch

    def has(self, changelog: str, app: str, delivery: IncomingBatch) -> bool:
        with self._lock:
            return self._last.get((changelog, app)) == (delivery.run, delivery.batch)


_CALLS: Final = _Calls()


class BatchGate:
    """The batches of one app.

    Args:
        path: Path of the changelog, for messages.
        app_id: None for the changelog's own app; see `ChangelogMeta.app`.
        on_reset: What to do when a known app has a new query: "refuse" it, "append", or "restore" (accept the
            query if it continues exactly at the commit that `resume` has pinned).
        accept_replay: With "restore", also accept sources that have no position to continue from.
    """

    def __init__(
        self, files: Files, path: Path, app_id: str | None, on_reset: OnReset, *, accept_replay: bool
    ) -> None:
        if on_reset not in get_args(OnReset):
            raise choice("on_reset", on_reset, get_args(OnReset))
        if not isinstance(accept_replay, bool) or (accept_replay and on_reset != "restore"):
            raise ConfigError(
                "accept_replay= is invalid here.", path=path,
                expected='True or False, and True only with on_reset="restore"',
                found=f"accept_replay={accept_replay!r}, on_reset={on_reset!r}",
                remedy='leave out accept_replay=, or set on_reset="restore"',
            )  # fmt: skip
        self._app = None if app_id is None else idempotence.checked_app(app_id)
        self._files = files
        self._path = path
        self._reset = Reset(on_reset, accept_replay)
        self._log: tuple[str, OffsetLog] | None = None

    def app(self, identity: ChangelogMeta) -> str:
        """The app that the batches belong to."""
        return identity.app if self._app is None else self._app

    def identify(self, session: SparkSession, batch_id: int, *, skips: bool = False) -> IncomingBatch:
        """Identify the batch. A skipped batch may be an earlier one of the calling query.

        Raises:
            ConfigError: Not a batch id, a DataFrame of Spark Connect, or a query with outputMode("complete").
            Damaged: The query's checkpoint cannot be read.
        """
        batch = idempotence.checked_batch(batch_id)
        running = offset_log.running_query(session)
        if running is None:
            return IncomingBatch(batch, None, _nothing, skips=skips)
        if running.batch != batch and not (skips and batch < running.batch):
            raise ConfigError(
                "The batch id is not that of the calling query.",
                path=self._path,
                expected=running.batch,
                found=batch,
                remedy="pass the batch id that foreachBatch gives",
            )
        if running.output_mode == "complete":
            raise ConfigError(
                'outputMode("complete") is not supported: every batch has the whole result, and no deletes.',
                path=self._path,
                expected='outputMode("update") or outputMode("append")',
                found="complete",
                remedy='use outputMode("update"): it gives what changed, and the changelog keeps the rest',
            )
        offsets = self._offset_log(session, running.checkpoint)
        source, previous = offset_log.positions(offsets, batch)

        @functools.cache
        def start() -> QueryStart:
            return query_start(running.execution, source, previous)

        stream = SourceBatch(running.id, batch, source, previous, start, skips and batch < running.batch)
        return IncomingBatch(batch, stream, lambda: _sync(offsets, batch), running.run, skips)

    def admits(self, session: SparkSession, log: Changelog, delivery: IncomingBatch) -> bool:
        """True where the batch is new, False where it was committed already.

        Raises:
            BatchConflict: the batch does not follow from what was committed, see `manifest.idempotence`; or
                it has been delivered in this run of its query.
        """
        state, app, uuid = log.state, self.app(log.identity), log.identity.uuid
        if delivery.stream is None:
            if idempotence.appended(state, app, delivery.batch, "") is None:
                return True
        else:
            self._check_alone(session, state, app, delivery.stream)
            if idempotence.admits_stream(state, uuid, app, delivery.stream, self._reset):
                return True
            if _CALLS.has(uuid, app, delivery) and not delivery.skips:
                raise self._second_call(app, delivery)
        _log.info("changelog %s: batch %d is already committed", self._path, delivery.batch)
        return False

    def admit(self, session: SparkSession, log: Changelog, delivery: IncomingBatch) -> Batch | Commit:
        """What the commit of a new batch says; of one that was committed already, the app's last commit. For
        `Engine.commit`. Raises as `admits` does.
        """
        state, app = log.state, self.app(log.identity)
        return batch_of(state, app, delivery) if self.admits(session, log, delivery) else state.apps[app]

    def delivered(self, log: Changelog, delivery: IncomingBatch) -> None:
        """Record that the batch is committed, by this call or by an earlier one."""
        _CALLS.note(log.identity.uuid, self.app(log.identity), delivery)

    def _second_call(self, app: str, delivery: IncomingBatch) -> BatchConflict:
        return BatchConflict(
            "The sink was called twice for one batch: this call's rows would be dropped.", path=self._path,
            position=f"batch {delivery.batch} of app {app!r}", expected="one call for each batch",
            found="a second call in the same run of the query",
            remedy="union the DataFrames and call the sink once, or write each to its own changelog. The "
            "commit of this batch holds only the rows of the first call: undo it with "
            "Changelog.rollback(<the commit before it>) before you restart the query",
        )  # fmt: skip

    def _check_alone(self, session: SparkSession, state: State, app: str, b: SourceBatch) -> None:
        """Two concurrent queries would each look like a reset of the other."""
        last = state.apps.get(app)
        if last is None or last.query in ("", b.query) or not offset_log.is_active(session, last.query):
            return
        raise BatchConflict(
            f"Another running query writes the app {app!r}.",
            path=self._path,
            expected="one query for each changelog",
            found=f"queries {last.query} and {b.query}",
            remedy="stop one of them, or write each to its own changelog",
        )

    def _offset_log(self, session: SparkSession, checkpoint: str) -> OffsetLog:
        if self._log is None or self._log[0] != checkpoint:
            self._log = checkpoint, offset_log.offset_log(self._files, session, checkpoint)
        return self._log[1]


def batch_of(state: State, app: str, delivery: IncomingBatch) -> Batch:
    """What the commit records about the batch.

    The pin of `resume` is dropped by the second commit after the pinned one: a job that dies earlier must
    find the same state again.
    """
    b = delivery.stream
    if b is None:
        return Batch(app, delivery.batch)
    last = state.apps.get(app)
    pins: tuple[str, ...] = ()
    if last is not None and last.query == b.query:
        pins = tuple(a.name for a in state.anchors.values() if a.app == app and a.commit < last.number)
    return Batch(app, b.batch, query=b.query, source=b.source, unanchor=pins)


def consume(df: DataFrame) -> None:
    """Compute the batch and discard it: a stateful query fails unless every partition is read."""
    df.write.format("noop").mode("overwrite").save()


def check_dataframe(df: object) -> None:
    """Raises `ConfigError` unless `df` is a DataFrame of a Spark session in this process."""
    if type(df).__module__.startswith(_CONNECT):
        raise connect_refused()
    if not isinstance(df, DataFrame):
        raise ConfigError(
            "Not a DataFrame.",
            expected="pyspark.sql.DataFrame",
            found=type(df).__name__,
            remedy="pass the sink to foreachBatch, or call it with a DataFrame and a batch id",
        )


def connect_refused() -> ConfigError:
    """The error for Spark Connect, where a foreachBatch function runs in a server process."""
    return ConfigError(
        "Spark Connect is not supported.",
        expected="a Spark session in this process",
        found="a Spark Connect session",
        remedy="run the query in a session created with SparkSession.builder.master(...)",
    )


def choice(name: str, given: object, valid: Sequence[Any]) -> ConfigError:
    """The error for an argument with an invalid choice. It suggests the nearest valid one."""
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
            "Cannot sync the query's checkpoint; the batch is not committed.",
            path=str(offsets),
            expected="a successful fsync",
            found=reason(e),
            remedy="repair the disk, then restart the query",
        ) from e
