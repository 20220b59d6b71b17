"""The query that calls a sink: its id, and the offsets of its sources before and after a batch.

Before it runs batch N, Spark writes `offsets/<N>` into the query's checkpoint:

    v1                                  or  v2
    {"batchWatermarkMs":0, …}               {"batchWatermarkMs":0, …}
    {"logOffset":0}                         0:{"logOffset":0}          one line per source,
    -                                       1:-                        "-" for a source without an offset

Sources keep their own files in `sources/<number>`: a Kafka source records where the query began, a file
source which files are in which batch.

Spark syncs none of these files. A sink syncs them before it commits the batch: a commit must never be durable
before the files that say which records it contains.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from pyspark.sql import SparkSession

from keyfold.statestore.errors import ConfigError, Damaged
from keyfold.statestore.files import Files

_LOCAL: Final = re.compile(r"^file:(?://)?(/.*)$|^(/.*)$")


@dataclass(frozen=True)
class RunningQuery:
    """The streaming query whose thread called the function.

    Attributes:
        run: Changes with every start of the query. A failed batch ends the run.
        checkpoint: A path or URI.
        execution: The query's object in the JVM.
    """

    id: str
    run: str
    batch: int
    output_mode: str
    checkpoint: str
    execution: Any


def running_query(session: SparkSession) -> RunningQuery | None:
    """The query that is calling; None outside of a query."""
    context = session.sparkContext
    query = context.getLocalProperty("sql.streaming.queryId")
    batch = context.getLocalProperty("streaming.sql.batchId")
    if query is None or batch is None:
        return None
    execution = _execution(session, query)
    if execution is None:
        raise ConfigError(
            "Cannot find the streaming query that calls this sink.",
            expected="an active query of this process",
            found=f"query {query}",
            remedy="call the sink on the thread of the foreachBatch function",
        )
    mode = str(execution.outputMode().toString()).lower()
    run, checkpoint = str(execution.runId().toString()), str(execution.resolvedCheckpointRoot())
    return RunningQuery(query, run, int(batch), mode, checkpoint, execution)


def is_active(session: SparkSession, query: str) -> bool:
    """Whether a query with this id is running in this process."""
    return _execution(session, query) is not None


def _execution(session: SparkSession, query: str) -> Any:
    """The JVM object of an active query of any session. `streams.get` finds only its own session's."""
    state: Any = session._jsparkSession.sharedState()
    return state.activeStreamingQueries().get(_uuid_class(session.sparkContext._jvm).fromString(query))


@functools.lru_cache(maxsize=1)
def _uuid_class(jvm: Any) -> Any:
    """Each part of its name is a call to the JVM, which looks for a class of that name."""
    return jvm.java.util.UUID


class OffsetLog(Protocol):
    """The entries of `offsets/` in a checkpoint."""

    def read(self, batch: int) -> bytes | None:
        """An entry; None if it does not exist."""

    def batches(self) -> Sequence[int]:
        """The batches that have an entry."""

    def sync(self, batch: int) -> None:
        """Make an entry and the sources' files durable, as far as the file system supports it."""

    def __str__(self) -> str:
        """The path or URI of the checkpoint."""


def offset_log(files: Files, session: SparkSession, checkpoint: str) -> OffsetLog:
    """The offset log of the checkpoint at a path or URI, on any file system that Spark supports."""
    local = _LOCAL.match(checkpoint)
    if local:
        return LocalOffsetLog(files, Path(local[1] or local[2]))
    return HadoopOffsetLog(session, checkpoint)


def positions(log: OffsetLog, batch: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The source offsets after `batch`, and after the batch before it.

    One JSON text per source, "-" for a source without an offset. The second tuple is empty for a query's
    first batch. Batch ids can have gaps.

    Raises:
        Damaged: The checkpoint has no entry for the batch, or the entry cannot be read.
    """
    text = log.read(batch)
    if text is None:
        raise _damaged(log, batch, "no such entry")
    before = log.read(batch - 1)
    if before is None:
        earlier = [n for n in log.batches() if n < batch]
        if not earlier:
            return parse(text, log, batch), ()
        before = log.read(max(earlier)) or b""
        return parse(text, log, batch), parse(before, log, max(earlier))
    return parse(text, log, batch), parse(before, log, batch - 1)


def parse(entry: bytes, log: OffsetLog, batch: int) -> tuple[str, ...]:
    """The sources' offsets in one entry. Raises `Damaged`."""
    try:
        version, _, *sources = entry.decode().rstrip("\n").split("\n")
    except ValueError:
        raise _damaged(log, batch, "fewer than two lines, or invalid UTF-8") from None
    if version == "v1":
        return tuple(sources)
    if version == "v2":
        named = [line.partition(":") for line in sources]
        if all(colon for _, colon, _ in named):
            return tuple(offset for _, _, offset in sorted(named, key=lambda n: (len(n[0]), n[0])))
        raise _damaged(log, batch, "a line without the name of its source")
    raise _damaged(log, batch, "a version that this keyfold does not support")


def _damaged(log: OffsetLog, batch: int, found: str) -> Damaged:
    return Damaged(
        "Cannot read the source offsets from the query's checkpoint.",
        path=f"{log}/offsets/{batch}",
        expected="an entry of Spark's offset log, version v1 or v2",
        found=found,
        remedy="delete the checkpoint and start the query from resume(...)",
    )


class LocalOffsetLog:
    """The offsets of a checkpoint on a local disk."""

    def __init__(self, files: Files, checkpoint: Path) -> None:
        self._files = files
        self._checkpoint = checkpoint
        self._offsets = checkpoint / "offsets"
        self._synced_before = False
        #: source → its files that are already durable
        self._synced_of: dict[str, set[str]] = {}

    def __str__(self) -> str:
        return str(self._checkpoint)

    def read(self, batch: int) -> bytes | None:
        try:
            return self._files.read(self._offsets / str(batch))
        except FileNotFoundError:
            return None

    def batches(self) -> Sequence[int]:
        return [int(name) for name in self._files.list_directory(self._offsets) if name.isdigit()]

    def sync(self, batch: int) -> None:
        # Each entry has a checksum file, without which Spark could not read the entry.
        self._sync_with_checksum(self._offsets / str(batch))
        self._files.sync_directory(self._offsets)
        self._sync_sources()
        if not self._synced_before:
            # The query's id: without it, Spark would treat the checkpoint as that of a new query.
            self._sync_with_checksum(self._checkpoint / "metadata")
            self._files.sync_directory(self._checkpoint)
            self._files.sync_directory(self._checkpoint.parent)
            self._synced_before = True

    def _sync_sources(self) -> None:
        sources = self._checkpoint / "sources"
        known = len(self._synced_of)
        for source in self._files.list_directory(sources):
            listed = self._files.list_directory(sources / source)
            kept = {name for name in listed if name.removesuffix(".compact").isdigit()}
            new = kept - self._synced_of.get(source, set())
            for name in sorted(new):
                # Spark may delete old files at the same time.
                with contextlib.suppress(FileNotFoundError):
                    self._sync_with_checksum(sources / source / name)
            if new:
                self._files.sync_directory(sources / source)
            self._synced_of[source] = kept
        if len(self._synced_of) > known:
            self._files.sync_directory(sources)

    def _sync_with_checksum(self, path: Path) -> None:
        self._files.sync_path(path)
        checksum = path.with_name(f".{path.name}.crc")
        if self._files.exists(checksum):
            self._files.sync_path(checksum)


class HadoopOffsetLog:
    """The offsets of a checkpoint on any file system that Spark can write to.

    These have no fsync: a closed file is as durable as it will get.
    """

    def __init__(self, session: SparkSession, checkpoint: str) -> None:
        jvm: Any = session.sparkContext._jvm
        configuration = session._jsparkSession.sessionState().newHadoopConf()
        self._jvm = jvm
        self._checkpoint = checkpoint
        self._offsets: Any = jvm.org.apache.hadoop.fs.Path(checkpoint, "offsets")
        self._system: Any = self._offsets.getFileSystem(configuration)

    def __str__(self) -> str:
        return self._checkpoint

    def read(self, batch: int) -> bytes | None:
        path = self._jvm.org.apache.hadoop.fs.Path(self._offsets, str(batch))
        if not self._system.exists(path):
            return None
        stream = self._system.open(path)
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def batches(self) -> Sequence[int]:
        found = [entry.getPath().getName() for entry in self._system.listStatus(self._offsets)]
        return [int(name) for name in found if name.isdigit()]

    def sync(self, batch: int) -> None:
        pass
