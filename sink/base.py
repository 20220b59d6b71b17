"""What every function for `foreachBatch` in this room has: one changelog, one batch in flight at a time."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import NoReturn, TypeVar

from pyspark.sql import DataFrame, SparkSession

from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.log.writer import Batch, BlockFactory
from keyfold.checkpoints.manifest.config import LogConfig
from keyfold.checkpoints.manifest.idempotence import OnReset
from keyfold.checkpoints.manifest.identity import check_partitions, read_identity
from keyfold.checkpoints.manifest.state import Commit, State
from keyfold.sink.batch_gate import (
    BatchGate,
    IncomingBatch,
    check_dataframe,
    connect_refused,
    consume,
)
from keyfold.statestore import filenames
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.files import Files
from keyfold.statestore.paths import AnyPath
from keyfold.statestore.remote_files import writable
from keyfold.statestore.schema.columns import Columns

Self = TypeVar("Self", bound="ForeachBatch")


class ForeachBatch(ABC):
    """A function for `foreachBatch`, bound to one changelog. Queries call it on threads of their own.

    The changelog is opened by `_opened`, and again where its writer was fenced: that goes through recovery.
    """

    def __init__(
        self,
        path: AnyPath,
        *,
        partitions: int | None,
        config: Mapping[str, object] | None,
        app_id: str | None,
        on_reset: OnReset,
        accept_replay: bool,
        steal: bool,
        files: Files,
    ) -> None:
        # Spark's JVM and its workers have working directories of their own.
        self.path = writable(path, files)
        self._files = files
        self._intake = BatchGate(files, self.path, app_id, on_reset, accept_replay=accept_replay)
        self._partitions = partitions
        LogConfig().with_changes(config or {})
        self._config = dict(config or {})
        self._steal = steal
        self._log: Changelog | None = None
        #: of the changelog that was opened first
        self._uuid: str | None = None
        self._closed = False
        self._lock = threading.Lock()
        if partitions is not None:
            check_partitions(partitions)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {str(self.path)!r}{', closed' if self._closed else ''}>"

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Commit one batch, durable when this returns; for `foreachBatch`, or to be called by hand.

        One call takes all rows of a batch: a second one in the same run of the query is refused. A batch that
        has nothing for the changelog is given too, or skipped with `skip`.

        Called by hand, a batch is known by its id alone: one that was committed before adds nothing.

        Raises:
            BadRecord: a row that cannot be written, such as one without a key.
            BatchConflict: the batch does not follow from what was committed, or is given a second time.
            ConfigError, SchemaMismatch, StorageFailed, WriterFenced: see there.
            Whatever Spark raises while it computes the batch.
            In each case nothing of the call counts, and the sink can go on.
        """
        check_dataframe(df)
        delivery = self._intake.identify(df.sparkSession, batch_id)
        with self._lock:
            self._check_open()
            self._deliver(df, delivery)

    def skip(self, batch_id: int, df: DataFrame | None = None) -> None:
        """Commit that a batch has nothing for this changelog: its source offsets, and no rows.

        For a function of foreachBatch that would else return without a call of the sink. Records that nobody
        commits look like lost ones, so the next batch is refused unless the batch had no records at all.

        Args:
            batch_id: of the batch that is running. Or of an earlier one: then all batches from the last
                commit up to that one are skipped, for a function that has left them out before.
            df: the batch. A stateful query fails unless its batch is read to its end, which this does.

        Raises:
            What a call raises.
        """
        if df is not None:
            check_dataframe(df)
        session = SparkSession.getActiveSession() if df is None else df.sparkSession
        if session is None:
            raise ConfigError(
                "There is no Spark session whose batch could be skipped.", path=self.path,
                expected="a call in the function of foreachBatch", found="no session", remedy="pass df too",
            )  # fmt: skip
        delivery = self._intake.identify(session, batch_id, skips=True)
        with self._lock:
            self._check_open()
            if df is not None:
                consume(df)
            if self._log is None and not self._files.exists(self.path / filenames.IDENTITY):
                return  # the first batch of a changelog may be any
            self._commit(session, self._opened(None), delivery, {}, first=delivery.sync, takes_turn=False)

    def _commit(
        self,
        session: SparkSession,
        log: Changelog,
        delivery: IncomingBatch,
        parts: Mapping[int, BlockFactory],
        *,
        first: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
        takes_turn: bool = True,
    ) -> None:
        """Commit a batch. Another sink of this process may have committed it since this one has looked: then
        nothing is done.

        Args:
            first, then: what is done before the commit and after it, if there is one.
            takes_turn: see `Engine.commit`.
        """

        def admit(_: State) -> Batch | Commit:
            admitted = self._intake.admit(session, log, delivery)
            if first is not None and isinstance(admitted, Batch):
                first()
            return admitted

        def committed() -> None:
            self._intake.delivered(log, delivery)
            if then is not None:
                then()

        log.engine.commit(parts, admit, then=committed, takes_turn=takes_turn)

    def _pass_over(self, df: DataFrame, log: Changelog, delivery: IncomingBatch) -> None:
        """A batch that was committed before: read it to its end, or a stateful query would fail."""
        consume(df)
        self._intake.delivered(log, delivery)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("This sink was closed.", path=self.path, remedy="make a new one")

    @abstractmethod
    def _deliver(self, df: DataFrame, delivery: IncomingBatch) -> None:
        """Commit the batch, unless it was committed already."""

    @abstractmethod
    def _check_kind(self, log: Changelog) -> None:
        """Refuse a changelog that was made for other rows. Raises `SchemaMismatch`."""

    @property
    def log(self) -> Changelog:
        """The changelog that is written. Raises `ConfigError` before it exists, and after `close`."""
        if self._log is None or self._closed:
            raise ConfigError(
                "This sink has no open changelog.",
                path=self.path,
                expected="a sink that is open, and has made its changelog with the first batch",
                found="closed" if self._closed else "no changelog yet",
                remedy="ask after the first batch, and before close()",
            )
        return self._log

    def _opened(self, columns: Columns | None) -> Changelog:
        """The changelog, created with `columns` where there is none."""
        if self._log is not None and self._log.engine.fenced:
            # Never by stealing: whoever took over from this writer keeps the changelog.
            self._log.close()
            self._log, self._steal = None, False
        if self._log is None:
            self._check_same()
            log = Changelog.open(
                self.path,
                partitions=self._partitions,
                columns=columns,
                config=self._config,
                steal=self._steal,
                files=self._files,
            )
            try:
                self._check_kind(log)
            except BaseException:
                log.close()
                raise
            self._log, self._uuid = log, log.identity.uuid
        return self._log

    def _check_same(self) -> None:
        """Once a sink has had its changelog, it makes no other one, and writes no other one.

        Raises:
            NotAChangelog: it was moved or removed. ConfigError: another one is in its place.
        """
        if self._uuid is None:
            return
        found = read_identity(self._files, self.path).uuid
        if found != self._uuid:
            raise ConfigError(
                "Another changelog is at the path of this sink.", path=self.path, expected=self._uuid,
                found=found, remedy="put the one back that the query has written, and start the query again",
            )  # fmt: skip

    def close(self) -> None:
        """Give up the changelog; the last sink of this process gives up its writer."""
        with self._lock:
            self._closed = True
            if self._log is not None:
                self._log.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """Only Spark Connect sends the function of foreachBatch to another process."""
        raise connect_refused()
