"""Driving a task as `TaskSink` does, with Arrow batches instead of Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from keyfold import Changelog
from keyfold.checkpoints.manifest import idempotence
from keyfold.checkpoints.manifest.state import Commit
from keyfold.sink.task_runner import TaskRunner

APP = "task"

#: What a test has done to a task's store.
Call = Callable[[Any], object]


def batch_of(count: int) -> pa.RecordBatch:
    return pa.record_batch({"row": pa.array(range(count), pa.int64())})


def deliver(
    log: Changelog, runner: TaskRunner, batches: Iterable[pa.RecordBatch], batch_id: int
) -> Commit | None:
    """Commit one micro-batch; None where it was committed before."""
    engine = log.engine
    with engine.transactions:
        if idempotence.appended(log.state, APP, batch_id, "") is not None:
            return None
        ran = runner.run(engine, batches)
        commit = engine.append(ran.changes, APP, batch_id, takes_turn=False)
        ran.committed()
        return commit


class Script:
    """A task that does what it is told: `process` makes as many of the `calls` as it gets rows."""

    def __init__(self, **attributes: Any) -> None:
        self.calls: list[Call] = []
        for name, value in attributes.items():
            setattr(self, name, value)

    def process(self, records: pa.RecordBatch, store: Any) -> None:
        for _ in range(records.num_rows):
            self.calls.pop(0)(store)


class Driver:
    """A `Script` with these attributes on a changelog, its batches numbered on from the last one."""

    def __init__(self, log: Changelog, **attributes: Any) -> None:
        self.log = log
        self.task = Script(**attributes)
        self.runner = TaskRunner(self.task)

    def run(self, *calls: Call) -> Commit | None:
        """The calls as one micro-batch."""
        self.task.calls = list(calls)
        last = self.log.last_batch(APP)
        return deliver(self.log, self.runner, [batch_of(len(calls))], 0 if last is None else last + 1)

    def ask(self, question: Callable[[Any], Any]) -> Any:
        """The answer of a store, in a micro-batch of its own."""
        answers: list[Any] = []
        self.run(lambda store: answers.append(question(store)))
        return answers[0]


def records(log: Changelog) -> list[tuple[bytes, bytes | None]]:
    """Key and value of every record, partition by partition."""
    return [
        pair
        for partition in range(log.partitions)
        for batch in log.read(partition)
        for pair in zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True)
    ]
