"""`restore`: the state of a changelog as of a commit, exactly: compacted section plus tail, folded to the
last values.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from keyfold.checkpoints import reading
from keyfold.checkpoints.fold import last_values
from keyfold.checkpoints.opening import View
from keyfold.checkpoints.state import Commit, PartitionState, State
from keyfold.checkpoints.views import ViewLock
from keyfold.statestore import names
from keyfold.statestore.blocks import RECORD_SCHEMA
from keyfold.statestore.errors import CompactedAway, ConfigError
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.hashing import partition_of
from keyfold.statestore.kv import PartitionedStore
from keyfold.statestore.lastvalues import Identity as StoreIdentity
from keyfold.statestore.lastvalues import LastValues
from keyfold.statestore.segment import Segment

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession

#: A point in a changelog's life: None (now), a commit number, `(app_id, batch_id)`, an anchor's name, or a
#: time.
At: TypeAlias = "int | tuple[str, int] | str | datetime.datetime | None"


def restore(
    path: str | Path,
    *,
    at: At = None,
    partitions: Sequence[int] | None = None,
    progress: bool = False,
    files: Files = LOCAL,
) -> RestoredState:
    """The state of the changelog at `path`, as of `at`; nothing is read before one of its `to_…` methods is
    called.

    The files of the view stay until the result is closed or forgotten. A writer may go on meanwhile.

    Args:
        at: a commit number, `(app_id, batch_id)`, an anchor's name, a time (the last commit not after it;
            without a time zone: UTC), or None for the last commit.
        partitions: only these.
        progress: show a bar while reading.

    Raises:
        NotAChangelog, Damaged, FormatTooNew: see there.
        CompactedAway: the exact state at `at` no longer exists.
        ConfigError: there is no such commit, anchor or partition.
    """
    root = Path(path)
    with ExitStack() as stack:
        lock = ViewLock(files, root) if files.exists(root / names.IDENTITY) else None
        if lock is not None:
            stack.callback(lock.close)
        view = View(files, root)
        if lock is not None:
            lock.record(view.state.n)
        ends = ends_at(view.state, root, at)
        wanted = range(len(ends)) if partitions is None else sorted(set(partitions))
        for number in wanted:
            reading.partition_state(view.state, root, number)
        stack.pop_all()
        return RestoredState(files, root, view, ends, tuple(wanted), lock, progress)


def ends_at(state: State, root: Path, at: At) -> tuple[int, ...]:
    """The end offset of every partition as of `at`. Raises `CompactedAway`, `ConfigError`."""
    if at is None:
        return state.ends
    if isinstance(at, str):
        anchor = state.anchors.get(at)
        if anchor is None:
            raise ConfigError(
                "There is no such anchor.",
                path=root,
                expected=", ".join(sorted(state.anchors)) or "no anchor is set",
                found=repr(at),
                remedy="name one that exists",
            )
        return anchor.ends
    commit = commit_at(state, root, at)
    if not state.restorable(commit.ends) and not any(
        a.commit == commit.number for a in state.anchors.values()
    ):
        raise _compacted_away(state, root, f"commit {commit.number}")
    return commit.ends


def commit_at(state: State, root: Path, at: int | tuple[str, int] | datetime.datetime) -> Commit:
    """The commit that `at` means. Raises `CompactedAway` where it was folded away, `ConfigError` where it
    never was.
    """
    if isinstance(at, datetime.datetime):
        moment = at if at.tzinfo else at.replace(tzinfo=datetime.timezone.utc)
        limit = moment.timestamp() * 1000
        found = [c for c in state.commits if c.time_ms <= limit]
        if found:
            return found[-1]
        raise _compacted_away(state, root, f"{moment.isoformat()}")
    if isinstance(at, tuple):
        app, batch = at
        last = state.apps.get(app)
        match = [c for c in (*state.commits, *([last] if last else [])) if c.app == app and c.batch == batch]
        if match:
            return match[-1]
        if last is None or batch > last.batch:
            raise ConfigError(
                "There is no such batch.",
                path=root,
                position=f"app {app!r}, batch {batch}",
                expected=f"an app of {', '.join(sorted(state.apps)) or '(none)'}, a batch it has committed",
                found="no commit of it",
                remedy="correct `at=`",
            )
        raise _compacted_away(state, root, f"batch {batch} of app {app!r}")
    if isinstance(at, bool) or not isinstance(at, int):
        raise ConfigError(
            "`at` is no point in a changelog's life.",
            path=root,
            expected="a commit number, (app_id, batch_id), an anchor's name, a datetime or None",
            found=type(at).__name__,
            remedy="correct `at=`",
        )
    for commit in state.commits:
        if commit.number == at:
            return commit
    if not 1 <= at < state.next_commit:
        raise ConfigError(
            "There is no such commit.",
            path=root,
            expected=f"a number from 1 to {state.next_commit - 1}",
            found=at,
            remedy="correct `at=`",
        )
    raise _compacted_away(state, root, f"commit {at}")


def _compacted_away(state: State, root: Path, what: str) -> CompactedAway:
    exact = [c.number for c in state.commits if state.restorable(c.ends)]
    nearest = f"commits {exact[0]} to {exact[-1]}" if exact else "the newest state only"
    if state.anchors:
        nearest += ", anchors " + ", ".join(sorted(state.anchors))
    return CompactedAway(
        "The exact state at that point was folded away.",
        path=root,
        position=what,
        expected=nearest,
        found=what,
        remedy="restore at one of those; set an anchor before compaction to keep a point",
    )


def state_batches(
    files: Files, directory: Path, segments: tuple[Segment, ...], end: int, unique_below: int = 0
) -> Iterator[pa.RecordBatch]:
    """The last record of every key of one partition below offset `end`, deletes left out, in offset order.

    `unique_below`: no two records below that offset have the same key, see `unique_below_of`.
    """
    return last_values(
        lambda: reading.read_segments(files, directory, segments, 0, end), min(unique_below, end)
    )


def unique_below_of(p: PartitionState) -> int:
    """How far passes have come, or the first anchor inside the clean section: below, no key occurs twice."""
    return min((p.unique_end, *p.splits))


class RestoredState:
    """The state of a changelog as of one commit. A context manager; closing it lets the cleaner delete its
    files.

    A changelog with typed columns gives them back as they were written, others give `key` and `value` bytes.
    """

    def __init__(
        self,
        files: Files,
        root: Path,
        view: View,
        ends: tuple[int, ...],
        partitions: tuple[int, ...],
        lock: ViewLock | None,
        progress: bool,
    ) -> None:
        self.path = root
        #: end offset of each partition: the state is the fold of the records below
        self.ends = ends
        self.partitions = partitions
        self.columns = view.identity.columns
        self._files = files
        self._identity = view.identity
        self._state = view.state
        self._progress = progress
        self._finalizer = weakref.finalize(self, lock.close) if lock is not None else None

    def close(self) -> None:
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> RestoredState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The last record of every key, as bytes, partition by partition: offset, timestamp, key, value,
        headers.
        """
        with self._bar() as advance:
            for number in self.partitions:
                yield from self._partition(number)
                advance()

    def to_arrow(self) -> pa.Table:
        """One row per key: the typed columns, or `key` and `value` as binary. Row order has no meaning."""
        if self.columns is None:
            return pa.Table.from_batches(self._all(), RECORD_SCHEMA).select(["key", "value"])
        columns = self.columns
        tables = [columns.decode(b.column("key"), b.column("value")) for b in self._all()]
        return pa.concat_tables([columns.arrow_schema().empty_table(), *tables])

    def to_pandas(self) -> pd.DataFrame:
        """`to_arrow` as a pandas DataFrame, by Arrow's own conversion of types."""
        return self.to_arrow().to_pandas()

    def to_dict(self) -> dict[Any, Any]:
        """Raw: key bytes → value bytes. Typed: the key (a tuple where it has several columns) → column →
        value.
        """
        if self.columns is None:
            table = self.to_arrow()
            return dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
        table = self.to_arrow()
        keys = [table[name].to_pylist() for name in self.columns.keys]
        rows = table.drop_columns(list(self.columns.keys)).to_pylist()
        if not rows:
            rows = [{} for _ in range(table.num_rows)]
        return dict(zip(keys[0] if len(keys) == 1 else zip(*keys, strict=True), rows, strict=True))

    def to_spark(self, spark: SparkSession) -> DataFrame:
        """The state as a DataFrame, with the types it was written with, read by Spark's tasks in parallel."""
        offsets = ",".join(str(e) for e in self.ends)
        reader = spark.read.format("keyfold").option("endOffsets", offsets)
        if len(self.partitions) < len(self.ends):
            reader = reader.option("partitions", ",".join(str(p) for p in self.partitions))
        return reader.load(str(self.path.resolve()))

    def to_store(self, path: str | Path) -> PartitionedStore:
        """A new RocksDB store of the state in the directory `path`, open: get, get_all, range, prefix, all,
        close.
        """
        target = Path(path)
        if self._files.list_directory(target):
            raise ConfigError(
                "A store cannot be made there.", path=target, expected="an empty or missing directory",
                found="a directory with entries", remedy="choose another path",
            )  # fmt: skip
        self._files.make_directory(target)
        stores: dict[int, LastValues] = {}
        for number in self.partitions:
            identity = StoreIdentity(self._identity.uuid, number, self._state.partitions[number].generation)
            store = LastValues.open(target / f"partition-{number}", identity, files=self._files)
            pending = list(self._partition(number))
            if pending:
                store.apply(pa.concat_batches(pending), self.ends[number])
            stores[number] = store
        count = len(self.ends)
        ordered = list(stores.values())
        place = {number: i for i, number in enumerate(stores)}
        return PartitionedStore(ordered, lambda key: place[partition_of(key, count)])

    def _partition(self, number: int) -> Iterator[pa.RecordBatch]:
        p = self._state.partitions[number]
        directory = names.partition(self.path, number)
        return state_batches(self._files, directory, p.segments, self.ends[number], unique_below_of(p))

    def _all(self) -> list[pa.RecordBatch]:
        """All partitions, two at a time."""
        with self._bar() as advance, ThreadPoolExecutor(2) as pool:

            def one(number: int) -> list[pa.RecordBatch]:
                found = list(self._partition(number))
                advance()
                return found

            return [batch for found in pool.map(one, self.partitions) for batch in found]

    def _bar(self) -> _Bar:
        return _Bar(len(self.partitions), self._progress)


class _Bar:
    """A progress bar over partitions, or nothing."""

    def __init__(self, total: int, shown: bool) -> None:
        self._progress = Progress(
            TextColumn("restoring"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("partitions"),
            TimeRemainingColumn(),
            disable=not shown,
        )
        self._total = total

    def __enter__(self) -> Any:
        self._progress.start()
        task = self._progress.add_task("restoring", total=self._total)
        return lambda: self._progress.advance(task)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
