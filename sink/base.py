"""The common part of the `foreachBatch` functions in this package: one changelog, one batch at a time."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import NoReturn

from pyspark.sql import DataFrame, SparkSession

from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.log.reader import looked_at
from keyfold.checkpoints.log.writer import Batch, BlockFactory
from keyfold.checkpoints.manifest.idempotence import OnReset
from keyfold.checkpoints.manifest.identity import check_partitions, merged_config, read_identity
from keyfold.checkpoints.manifest.state import Commit, State
from keyfold.sink.batch_gate import (
    BatchGate,
    IncomingBatch,
    check_dataframe,
    connect_refused,
    consume,
)
from keyfold.statestore import filenames
from keyfold.statestore.closing import Closing
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.files import Files
from keyfold.statestore.paths import AnyPath
from keyfold.statestore.remote_files import writable
from keyfold.statestore.schema.columns import Columns


class ForeachBatch(Closing):
    """A function for `foreachBatch`, bound to one changelog. Each query calls it on its own thread.

    `_opened` opens the changelog, and reopens it if its writer was fenced, which runs recovery.
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
        # Spark's JVM and its workers have their own working directories.
        self.path = writable(path, files)
        self._files = files
        self._intake = BatchGate(files, self.path, app_id, on_reset, accept_replay=accept_replay)
        self._partitions = partitions
        config = {} if config is None else config
        with looked_at(self.path):
            merged_config(files, self.path, config)
        self._config = dict(config)
        self._steal = steal
        self._log: Changelog | None = None
        #: uuid of the changelog that was opened first
        self._uuid: str | None = None
        self._closed = False
        self._lock = threading.Lock()
        if partitions is not None:
            check_partitions(partitions)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {str(self.path)!r}{', closed' if self._closed else ''}>"

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Commit one batch. It is durable when this returns. Spark calls this for `foreachBatch`; you can
        also call it directly.

        One call takes all rows of a batch: a second call in the same run of the query is refused. Pass a
        batch without rows for the changelog too, or call `skip`.

        A direct call, outside of a query, identifies the batch by its id alone. A committed id adds nothing.

        Raises:
            BadRecord: A row cannot be written, for example because it has no key.
            BatchConflict: The batch does not follow the last committed batch, or is passed a second time.
            ConfigError: The batch id is not that of the calling query, or the DataFrame cannot be used.
            SchemaMismatch: The columns are not those of the changelog.
            StorageFailed, WriterFenced: The commit failed.
            Any error that Spark raises while it computes the batch.
            In every case nothing is committed, and the sink can still be used.
        """
        check_dataframe(df)
        delivery = self._intake.identify(df.sparkSession, batch_id)
        with self._lock:
            self._check_open()
            self._deliver(df, delivery)

    def skip(self, batch_id: int, df: DataFrame | None = None) -> None:
        """Commit a batch without rows for this changelog: only its source offsets.

        Use this in a foreachBatch function that would otherwise return without calling the sink. Uncommitted
        records look lost, so the next batch would be refused unless the skipped batch had no records at all.

        Args:
            batch_id: The id of the running batch, or of an earlier one. In the latter case, all batches from
                the last commit up to that one are skipped, for a function that left them out before.
            df: The batch. A stateful query fails unless its batch is read to the end; this reads it.

        Raises:
            The same errors as a call of the sink.
        """
        if df is not None:
            check_dataframe(df)
        session = SparkSession.getActiveSession() if df is None else df.sparkSession
        if session is None:
            raise ConfigError(
                "No active Spark session.", path=self.path,
                expected="a call inside a foreachBatch function", found="no session", remedy="also pass df",
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
        """Commit a batch. Does nothing if another sink of this process has committed it since the check.

        Args:
            first, then: called before and after the commit, if there is one.
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
        """Read a batch that was already committed to its end, or a stateful query would fail."""
        consume(df)
        self._intake.delivered(log, delivery)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("The sink is closed.", path=self.path, remedy="create a new sink")

    @abstractmethod
    def _deliver(self, df: DataFrame, delivery: IncomingBatch) -> None:
        """Commit the batch unless it is already committed."""

    @abstractmethod
    def _check_kind(self, log: Changelog) -> None:
        """Raises `SchemaMismatch` if the changelog has another kind of rows."""

    @property
    def log(self) -> Changelog:
        """The changelog that this sink writes. Raises `ConfigError` before it exists and after `close`."""
        if self._log is None or self._closed:
            raise ConfigError(
                "The sink has no open changelog.",
                path=self.path,
                expected="an open sink whose first batch has created the changelog",
                found="a closed sink" if self._closed else "no changelog yet",
                remedy="use `log` after the first batch and before close()",
            )
        return self._log

    def _opened(self, columns: Columns | None) -> Changelog:
        """The changelog, created with `columns` if it does not exist."""
        if self._log is not None and self._log.engine.fenced:
            # Never steal here: a writer that took over from this one keeps the changelog.
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
        """A sink that has opened its changelog never creates or writes another one.

        Raises:
            NotAChangelog: The changelog was moved or removed.
            ConfigError: Another changelog has taken its path.
        """
        if self._uuid is None:
            return
        found = read_identity(self._files, self.path).uuid
        if found != self._uuid:
            raise ConfigError(
                "The path of the sink now holds another changelog.", path=self.path, expected=self._uuid,
                found=found, remedy="restore the changelog that the query wrote, then restart the query",
            )  # fmt: skip

    def close(self) -> None:
        """Release the changelog. The last sink of this process releases the writer."""
        with self._lock:
            self._closed = True
            if self._log is not None:
                self._log.close()

    def __reduce__(self) -> NoReturn:
        """Only Spark Connect sends a foreachBatch function to another process."""
        raise connect_refused()
