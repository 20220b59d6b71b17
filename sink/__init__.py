"""One micro-batch in: a DataFrame's rows become blocks per partition, and one commit.

    changelog_sink   `ChangelogSink`: rows are changes, written as they are
    task             `TaskSink`: a task reads and writes the last values, its changes are the commit
    task_runner      one micro-batch of a task: expiry, process, window
    named_stores     the stores of a task by their names, with serdes, and without what has expired
    expiry           which entries have outlived their ttl and become tombstones
    arrow_batches    a DataFrame's rows on the driver, a partition at a time
    foreach_batch    what the two sinks have in common
    delivery         which batches are taken: admission, continuity, what the commit says of them
    query            the query that calls, and the offsets that its checkpoint keeps
    query_plan       how that query begins: where its sources do, and what its state does with
    staging          blocks written aside by tasks, and how they get into the log
    encoding         rows to key and value bytes, in the JVM

Nothing in here decides what counts: that is `keyfold.checkpoints`. RocksDB is never opened in a task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keyfold.sink.changelog_sink import ChangelogSink as ChangelogSink
    from keyfold.sink.task import Store as Store
    from keyfold.sink.task import Task as Task
    from keyfold.sink.task import TaskSink as TaskSink

__all__ = ["ChangelogSink", "Store", "Task", "TaskSink"]


def __getattr__(name: str) -> object:
    # Spark's Python workers import `keyfold.sink.staging` and through it this module. What a sink needs
    # besides takes three times as long to import as all that a task needs, and a worker that was idle for a
    # minute starts anew.
    if name == "ChangelogSink":
        from keyfold.sink.changelog_sink import ChangelogSink

        return ChangelogSink
    if name in ("Store", "Task", "TaskSink"):
        from keyfold.sink import task

        return getattr(task, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
