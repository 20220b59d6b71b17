"""`TaskSink`: a stateful task in the style of Samza. Its state is the last values of the changelog.

This module has all names that a task needs: `Task`, `Store`, and the serdes for its stores' keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

from pyspark.sql import DataFrame

from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.engine import Engine
from keyfold.checkpoints.manifest.idempotence import OnReset
from keyfold.checkpoints.transaction import Transaction
from keyfold.sink.arrow_batches import arrow_batches
from keyfold.sink.base import ForeachBatch
from keyfold.sink.batch_gate import IncomingBatch
from keyfold.sink.named_stores import NamedStores, Store
from keyfold.sink.task_runner import Task, TaskLike, TaskResult, TaskRunner, is_task
from keyfold.statestore.errors import SchemaMismatch
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.kv.serdes import BytesSerde, Int64Serde, JsonSerde, StringSerde
from keyfold.statestore.paths import AnyPath

__all__ = [
    "BytesSerde",
    "Int64Serde",
    "JsonSerde",
    "NamedStores",
    "Process",
    "Store",
    "StringSerde",
    "Task",
    "TaskSink",
]

#: Reads a batch, and reads and writes the store.
Process: TypeAlias = Callable[[DataFrame, Transaction], None]


class TaskSink(ForeachBatch):
    """Calls a task for each micro-batch. The task's writes to its store are the batch's commit.

        class Visits:
            stores = {"visits": Store(StringSerde(), Int64Serde(), ttl=timedelta(days=30))}

            def process(self, records, store):
                visits = store["visits"]
                for user in records["user"].to_pylist():
                    visits.put(user, (visits.get(user) or 0) + 1)

        query = clicks.writeStream.foreachBatch(TaskSink("var/visits", Visits())).option(…).start()

    A task is an object with `process(records, store)`, which is called for each Arrow batch of the
    micro-batch. At most two partitions are in memory at a time. It may have `window`, `stores` and
    `window_interval`: see `Task`. A function `process(df, store)` is called once, with the DataFrame and a
    store of bytes. In a stateful query it must read every partition of `df`.

    A store has `get, get_all, put, put_all, delete, delete_all, range, prefix, all`, and its reads see its
    own writes. `get_all` and `put_all` also accept Arrow arrays. Tasks run on the driver. After an exception
    nothing is committed. If Spark delivers a batch again, it is read to its end without calling the task.

    Args:
        path: The changelog, created if it does not exist.
        process: The task. It must not keep the store.
        partitions: Number of partitions for a new changelog (default 1). For an existing one it must match.
        app_id: Names the job for the life of the changelog. Defaults to the name of the directory when the
            changelog was created; it is stored in the changelog.
        config: Settings by Kafka's names, stored in the changelog.
        on_reset, accept_replay: See `ChangelogSink`. The state of a task is the changelog itself, so
            "restore" only makes the source continue where `resume` says.
        steal: Take over from a writer in another process, which is fenced.
        files: For tests.

    Raises:
        ConfigError: An argument is refused, or the task, its stores or their serdes are invalid.
        SchemaMismatch: The changelog has typed columns.
        See `Changelog.open` for the other errors.
    """

    def __init__(
        self,
        path: AnyPath,
        process: Process | TaskLike,
        *,
        partitions: int | None = None,
        app_id: str | None = None,
        config: Mapping[str, object] | None = None,
        on_reset: OnReset = "refuse",
        accept_replay: bool = False,
        steal: bool = False,
        files: Files = LOCAL,
    ) -> None:
        self._function = None if is_task(process) else cast(Process, process)
        self._runner = TaskRunner(cast(TaskLike, process)) if self._function is None else None
        super().__init__(
            path,
            partitions=partitions,
            config=config,
            app_id=app_id,
            on_reset=on_reset,
            accept_replay=accept_replay,
            steal=steal,
            files=files,
        )
        self._opened(None)

    def _deliver(self, df: DataFrame, delivery: IncomingBatch) -> None:
        log = self._opened(None)
        engine = log.engine
        with engine.transactions:
            if not self._intake.admits(df.sparkSession, log, delivery):
                self._pass_over(df, log, delivery)
                return
            engine.wait_for_room()
            syncing = engine.submit(delivery.sync)
            ran = self._run(engine, df)
            parts = engine.blocks_of(ran.changes)
            syncing.result()
            self._commit(df.sparkSession, log, delivery, parts, then=ran.committed, takes_turn=False)

    def _run(self, engine: Engine, df: DataFrame) -> TaskResult:
        if self._runner is not None:
            return self._runner.run(engine, arrow_batches(df))
        assert self._function is not None
        with engine.transaction() as store:
            self._function(df, store)
            return TaskResult(store.changes(), lambda: None)

    def _check_kind(self, log: Changelog) -> None:
        if log.columns is not None:
            raise SchemaMismatch(
                "The changelog has typed columns, but a task writes bytes.",
                path=self.path,
                expected="a changelog of raw bytes",
                found=f"keys {', '.join(log.columns.keys)}",
                remedy="use a separate changelog for the task",
            )
