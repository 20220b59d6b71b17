"""keyfold: a Spark Structured Streaming changelog sink with compacted state.

Public is what this module and `keyfold.errors` export. Everything else may change in any release.
Nothing is loaded before it is asked for: `import keyfold` imports neither pyarrow nor pyspark.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from keyfold import errors as errors
    from keyfold.checkpoints.changelog import Changelog as Changelog
    from keyfold.checkpoints.restore.dataset import ChangelogDataset as ChangelogDataset
    from keyfold.checkpoints.restore.dataset import dataset as dataset
    from keyfold.checkpoints.restore.restore import RestoredState as RestoredState
    from keyfold.checkpoints.restore.restore import restore as restore
    from keyfold.checkpoints.restore.targets import open_store as open_store
    from keyfold.checkpoints.resume.resume import Resumed as Resumed
    from keyfold.checkpoints.resume.resume import resume as resume
    from keyfold.checkpoints.resume.resume import resume_if_lost as resume_if_lost
    from keyfold.checkpoints.standby import Standby as Standby
    from keyfold.sink.changelog_sink import ChangelogSink as ChangelogSink
    from keyfold.sink.task_sink import Store as Store
    from keyfold.sink.task_sink import Task as Task
    from keyfold.sink.task_sink import TaskSink as TaskSink
    from keyfold.statestore.kv.serdes import BytesSerde as BytesSerde
    from keyfold.statestore.kv.serdes import Int64Serde as Int64Serde
    from keyfold.statestore.kv.serdes import JsonSerde as JsonSerde
    from keyfold.statestore.kv.serdes import StringSerde as StringSerde
    from keyfold.streaming.aggregate import aggregate as aggregate
    from keyfold.streaming.initial_state import initial_state as initial_state
    from keyfold.streaming.kafka import kafka_stream as kafka_stream
    from keyfold.streaming.source import register as register

    open = Changelog.open

#: Annotated, so that type checkers elsewhere do not take the rest for unreachable.
_PLATFORM: str = sys.platform
if _PLATFORM != "linux":
    raise ImportError(f"keyfold runs on Linux only, and this is {_PLATFORM}: its locks and syncs are Linux's")

__version__: Final = "0.1.0"

__all__ = [
    "BytesSerde",
    "Changelog",
    "ChangelogDataset",
    "ChangelogSink",
    "Int64Serde",
    "JsonSerde",
    "RestoredState",
    "Resumed",
    "Standby",
    "Store",
    "StringSerde",
    "Task",
    "TaskSink",
    "__version__",
    "aggregate",
    "dataset",
    "errors",
    "initial_state",
    "kafka_stream",
    "open",
    "open_store",
    "register",
    "restore",
    "resume",
    "resume_if_lost",
]

#: Where each name is.
_MODULES: Final = {
    "BytesSerde": "keyfold.statestore.kv.serdes",
    "Changelog": "keyfold.checkpoints.changelog",
    "ChangelogDataset": "keyfold.checkpoints.restore.dataset",
    "ChangelogSink": "keyfold.sink.changelog_sink",
    "Int64Serde": "keyfold.statestore.kv.serdes",
    "JsonSerde": "keyfold.statestore.kv.serdes",
    "RestoredState": "keyfold.checkpoints.restore.restore",
    "Resumed": "keyfold.checkpoints.resume.resume",
    "Standby": "keyfold.checkpoints.standby",
    "Store": "keyfold.sink.task_sink",
    "StringSerde": "keyfold.statestore.kv.serdes",
    "Task": "keyfold.sink.task_sink",
    "TaskSink": "keyfold.sink.task_sink",
    "aggregate": "keyfold.streaming.aggregate",
    "dataset": "keyfold.checkpoints.restore.dataset",
    "initial_state": "keyfold.streaming.initial_state",
    "kafka_stream": "keyfold.streaming.kafka",
    "open_store": "keyfold.checkpoints.restore.targets",
    "register": "keyfold.streaming.source",
    "restore": "keyfold.checkpoints.restore.restore",
    "resume": "keyfold.checkpoints.resume.resume",
    "resume_if_lost": "keyfold.checkpoints.resume.resume",
}


if not TYPE_CHECKING:  # a type checker takes every name for known where it sees `__getattr__`

    def __getattr__(name: str) -> object:
        found: object
        if name == "errors":
            found = import_module("keyfold.errors")
        elif name == "open":
            found = import_module("keyfold.checkpoints.changelog").Changelog.open
        elif name in _MODULES:
            found = getattr(import_module(_MODULES[name]), name)
        else:
            raise AttributeError(f"module 'keyfold' has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
