"""`TaskSink`: a job in Samza's manner, whose state is the changelog's last values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from pyspark.sql import DataFrame

from keyfold.checkpoints import records
from keyfold.checkpoints.admission import OnReset
from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.transaction import Transaction
from keyfold.sink.delivery import Delivery, batch_of, consume
from keyfold.sink.foreach_batch import ForeachBatch
from keyfold.statestore.errors import SchemaMismatch
from keyfold.statestore.files import LOCAL, Files

#: Reads a batch, and reads and writes the store.
Process: TypeAlias = Callable[[DataFrame, Transaction], None]


class TaskSink(ForeachBatch):
    """Calls `process(df, store)` for each micro-batch; what it writes to the store is the batch's commit.

        def process(df, store):
            for row in df.toLocalIterator():
                store.put(row.word.encode(), …)

        query = words.writeStream.foreachBatch(TaskSink("var/last", process)).option(…).start()

    `store` has `get, get_all, put, put_all, delete, range, prefix, all` on bytes, and its reads see its own
    writes. An exception in `process` commits nothing. `process` runs on the driver; of a stateful query it
    has to read every partition of `df`. A batch that Spark delivers again is read to its end, and `process`
    is not called.

    Args:
        path: the changelog, created where there is none.
        process: called once for each new batch. It must not keep the store.
        partitions: of a new changelog (default 1); an existing one must have as many.
        app_id: names the job for the changelog's life; the name of the directory by default.
        config: settings by Kafka's names, kept in the changelog.
        on_reset: see `ChangelogSink`. This job's state is the changelog itself, so that "restore" only
            continues the source where `resume` says.
        steal: take over from a writer in another process, which is fenced.
        files: for tests.

    Raises:
        ConfigError, SchemaMismatch, NotAChangelog, FormatTooNew, Damaged, ChangelogLocked, StorageFailed: see
            there.
    """

    def __init__(
        self,
        path: str | Path,
        process: Process,
        *,
        partitions: int | None = None,
        app_id: str | None = None,
        config: Mapping[str, object] | None = None,
        on_reset: OnReset = "refuse",
        steal: bool = False,
        files: Files = LOCAL,
    ) -> None:
        super().__init__(
            path,
            partitions=partitions,
            config=config,
            app_id=app_id,
            on_reset=on_reset,
            steal=steal,
            files=files,
        )
        self._process = process
        self._opened(None)

    def _deliver(self, df: DataFrame, delivery: Delivery) -> None:
        log = self._opened(None)
        host, writer = log.host, log.host.writer
        with host.transactions:
            if not self._intake.admits(df, writer.state, delivery):
                consume(df)
                return
            host.wait_for_room()
            syncing = writer.pool.submit(delivery.sync)
            with host.transaction() as store:
                self._process(df, store)
                batches = records.checked(store.changes(), writer.clock_ms())
            parts = records.partitioned(batches, log.partitions, log.config.codec, writer.pool)
            syncing.result()
            with writer.exclusive:
                if self._intake.admits(df, writer.state, delivery):
                    writer.commit(parts, batch_of(writer.state, delivery))

    def _check_kind(self, log: Changelog) -> None:
        if log.columns is not None:
            raise SchemaMismatch(
                "The changelog has typed columns; a task writes bytes.",
                path=self.path,
                expected="a changelog of raw bytes",
                found=f"keys {', '.join(log.columns.keys)}",
                remedy="give the task a changelog of its own",
            )
