"""One micro-batch in: a DataFrame's rows become blocks per partition, and one commit.

    changelog_sink   `ChangelogSink`: rows are changes, written as they are
    task             `TaskSink`: a function reads and writes the last values, its changes are the commit
    foreach_batch    what the two have in common
    delivery         which batches are taken: admission, continuity, what the commit says of them
    query            the query that calls, and the offsets that its checkpoint keeps
    staging          blocks written aside by tasks, and how they get into the log
    encoding         rows to key and value bytes, in the JVM

Nothing in here decides what counts: that is `keyfold.checkpoints`. RocksDB is never opened in a task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keyfold.sink.changelog_sink import ChangelogSink as ChangelogSink
    from keyfold.sink.task import TaskSink as TaskSink

__all__ = ["ChangelogSink", "TaskSink"]


def __getattr__(name: str) -> object:
    # Spark's Python workers import `keyfold.sink.staging` and through it this module. What a sink needs
    # besides takes three times as long to import as all that a task needs, and a worker that was idle for a
    # minute starts anew.
    if name == "ChangelogSink":
        from keyfold.sink.changelog_sink import ChangelogSink

        return ChangelogSink
    if name == "TaskSink":
        from keyfold.sink.task import TaskSink

        return TaskSink
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
