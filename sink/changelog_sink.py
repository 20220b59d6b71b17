"""`ChangelogSink`: the function for `foreachBatch` that writes a query's rows to a changelog.

Follow one write: `ChangelogSink.__call__` → `RowEncoding.select` (the columns of key and value) → `Stage` (in
each task: blocks into a file aside) → `Engine.commit` (nobody else's turn, a new batch) →
`Writer.commit` (blocks into the segments, one line of the manifest).
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, TypedDict, get_args

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.engine import Engine
from keyfold.checkpoints.log.recovery import check_creatable
from keyfold.checkpoints.manifest.idempotence import OnReset
from keyfold.checkpoints.manifest.identity import read_identity
from keyfold.sink import staging
from keyfold.sink.arrow_rows import key_columns
from keyfold.sink.base import ForeachBatch
from keyfold.sink.batch_gate import CONTINUES, IncomingBatch, choice
from keyfold.sink.encoding import RowEncoding, check_arguments
from keyfold.sink.small_batches import SmallBatches
from keyfold.sink.staging import Stage, Staged
from keyfold.statestore import filenames
from keyfold.statestore.errors import ConfigError, SchemaMismatch
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.paths import AnyPath
from keyfold.statestore.schema.columns import Columns

Names: TypeAlias = str | Sequence[str] | None
Placement: TypeAlias = Literal["auto", "tasks", "driver"]


class _Arguments(TypedDict):
    """The arguments of `RowEncoding` except schema and keys."""

    apply_as_deletes: str | None
    sequence_by: Names
    column_list: Names
    except_column_list: Names


class ChangelogSink(ForeachBatch):
    """Writes each micro-batch of a query to the changelog at `path`, as one commit: atomic, once, in order.

        sink = ChangelogSink("var/counts", keys="word", partitions=4)
        query = counts.writeStream.outputMode("update").foreachBatch(sink).option(…).start()

    A batch that Spark delivers again adds nothing. One query writes one changelog. Sinks in one process share
    the writer, so creating a sink twice is harmless. Rows keep the order of the DataFrame. Their timestamp is
    the time of the batch, or their own in Kafka's shape.

    Args:
        path: The changelog, created if it does not exist: at once if its columns are known (Kafka's shape),
            otherwise with the first batch.
        keys: The key columns. None for a DataFrame in Kafka's shape (`key`, `value`, and optionally
            `timestamp` and `headers`).
        partitions: Number of partitions for a new changelog (default 1). For an existing one it must match.
        app_id: Names the job for the life of the changelog. Defaults to the name of the directory when the
            changelog was created; it is stored in the changelog.
        apply_as_deletes: A SQL condition. Rows for which it is true delete their key.
        sequence_by: Columns or SQL expressions that order the changes of one key within a batch. Rows with
            equal values keep their order. Needs a shuffle.
        column_list, except_column_list: The columns of the value; all columns except the keys by default.
        config: Settings by Kafka's names, stored in the changelog.
        on_reset: What to do when the app is known but the query is new because its checkpoint was deleted:
            "refuse" it, "append" everything it reads, or "restore", which accepts the query if it continues
            exactly where `resume` says. Each source must begin where the resumed commit ended, and each
            aggregation must begin with the state of that commit.
        accept_replay: With "restore", also accept sources without a position to continue from, such as files
            and rates. Records that they deliver again are written again.
        placement: Where blocks are encoded: by the "tasks", which must see the changelog's disk, or on the
            "driver", to which every row is then sent. "auto" means tasks if Spark runs only on this machine.
            Except with "tasks", the driver also encodes a small batch that follows a small one, which is
            faster. If it turns out not to be small, it is computed again for the tasks.
        steal: Take over from a writer in another process, which is fenced.
        files: For tests.

    Raises:
        ConfigError: An argument is refused. Column names are checked against the first batch, before any row
            is read. Or the batch is from an `aggregate` that was resumed from another changelog.
        SchemaMismatch: The columns are not those of the changelog. Value columns may be
            added, left out, or have a wider type.
        See `Changelog.open` for the other errors.
    """

    def __init__(
        self,
        path: AnyPath,
        *,
        keys: Names = None,
        partitions: int | None = None,
        app_id: str | None = None,
        apply_as_deletes: str | None = None,
        sequence_by: Names = None,
        column_list: Names = None,
        except_column_list: Names = None,
        config: Mapping[str, object] | None = None,
        on_reset: OnReset = "refuse",
        accept_replay: bool = False,
        placement: Placement = "auto",
        steal: bool = False,
        files: Files = LOCAL,
    ) -> None:
        if placement not in get_args(Placement):
            raise choice("placement", placement, get_args(Placement))
        check_arguments(keys, apply_as_deletes, sequence_by, column_list, except_column_list)
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
        self._keys = keys
        self._placement = placement
        self._arguments = _Arguments(
            apply_as_deletes=apply_as_deletes,
            sequence_by=sequence_by,
            column_list=column_list,
            except_column_list=except_column_list,
        )
        self._encoding: tuple[str, RowEncoding] | None = None
        self._small = SmallBatches()
        if not keys or files.exists(self.path / filenames.IDENTITY):
            self._opened(None)
        else:
            check_creatable(files, self.path)

    def _deliver(self, df: DataFrame, delivery: IncomingBatch) -> None:
        encoding = self._encoding_for(df)
        log = self._opened(encoding.columns)
        shape = encoding.shape(self._accepted(log, encoding.columns))
        engine = log.engine
        if not self._intake.admits(df.sparkSession, log, delivery):
            self._pass_over(df, log, delivery)
            return
        engine.wait_for_room()
        syncing = engine.submit(delivery.sync)
        with self._working_directory(engine) as directory:
            stage = Stage(
                str(directory), delivery.batch, log.partitions, engine.clock_ms(), shape, log.config.codec
            )
            staged = self._staged(encoding.select(df), stage)
            syncing.result()
            parts = staging.blocks_by_partition(
                self._files, stage, staged, lambda: engine.identity.value_type
            )
            # Readers must know a column before a segment has it.
            added = self._added_columns(log, encoding.columns)
            self._commit(df.sparkSession, log, delivery, parts, first=added)

    def _staged(self, records: DataFrame, stage: Stage) -> list[Staged]:
        records = self._ordered(records, stage.partitions) if self._arguments["sequence_by"] else records
        tasks_only = self._placement == "tasks"
        staged = None if tasks_only else self._small.staged(self._files, records, stage)
        if staged is None and self._by_tasks(records):
            staged = staging.staged_by_tasks(records, stage)
        elif staged is None:
            staged = staging.staged_on_driver(self._files, records, stage)
        self._small.note(staged)
        bad = staging.refused_row(staged, stage)
        if bad is not None:
            raise bad
        return staged

    def _ordered(self, records: DataFrame, partitions: int) -> DataFrame:
        """All rows of a key in one task, ordered by `sequence_by`. Rows with equal values stay in order."""
        sequence = [name for name in records.columns if name.startswith("sequence_")]
        keys = key_columns(records.columns)
        kept = [name for name in records.columns if name not in sequence]
        shuffled = int(records.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
        tasks = max(1, min(partitions, shuffled))
        unordered = F.lit(False)
        for name in sequence:
            unordered = unordered | F.col(name).isNull()
        # Spark hashes equal keys alike: both zeros, and all NaNs, also in structs.
        return (
            records.withColumn("row", F.monotonically_increasing_id())
            .repartitionById(tasks, F.pmod(F.xxhash64(*keys), F.lit(tasks)).cast("int"))
            .sortWithinPartitions(*sequence, "row")
            .select(*kept, "row", unordered.alias("unordered"))
        )

    def _accepted(self, log: Changelog, columns: Columns | None) -> Columns | None:
        """The columns of the changelog with this batch. Raises `SchemaMismatch`."""
        return None if log.columns is None or columns is None else log.columns.accepts(columns)

    def _added_columns(self, log: Changelog, columns: Columns | None) -> Callable[[], None]:
        """Takes columns that the batch has added into the changelog."""

        def add() -> None:
            accepted = self._accepted(log, columns)
            if accepted is not None:
                log.engine.set_columns(accepted)

        return add

    @contextlib.contextmanager
    def _working_directory(self, engine: Engine) -> Iterator[Path]:
        """The directory that the tasks of one batch write to. It is removed with the batch."""
        directory = filenames.work(self.path, engine.opened_epoch, uuid.uuid4().hex)
        self._files.make_directory(directory, below=self.path)
        try:
            yield directory
        finally:
            self._files.remove_tree(directory)

    def _by_tasks(self, df: DataFrame) -> bool:
        if self._placement == "auto":
            return str(df.sparkSession.sparkContext.master).startswith("local")
        return self._placement == "tasks"

    # -- columns ---------------------------------------------------------------------------------------------

    def _encoding_for(self, df: DataFrame) -> RowEncoding:
        schema = df.schema
        known = schema.json()
        if self._encoding is None or self._encoding[0] != known:
            self._check_continued(schema)
            self._encoding = known, RowEncoding(schema, self._keys, **self._arguments)
        return self._encoding[1]

    def _check_continued(self, schema: StructType) -> None:
        """A resumed aggregation returns only changed groups; the others are in the changelog it continues."""
        continued = {f.metadata[CONTINUES] for f in schema.fields if CONTINUES in (f.metadata or {})}
        if not continued:
            return
        here = self._files.exists(self.path / filenames.IDENTITY)
        found = read_identity(self._files, self.path).uuid if here else "a new changelog"
        if continued != {found}:
            raise ConfigError(
                "A resumed aggregation returns only changed groups; this changelog does not have the others.",
                path=self.path, expected=f"the changelog {', '.join(sorted(continued))}",
                found=found, remedy="write to the resumed changelog, or use aggregate(…, whole=True)",
            )  # fmt: skip

    def _check_kind(self, log: Changelog) -> None:
        if bool(self._keys) == (log.columns is not None):
            return
        typed = "no typed columns" if log.columns is None else f"keys {', '.join(log.columns.keys)}"
        raise SchemaMismatch(
            "The changelog has another kind of rows.",
            path=self.path,
            expected=typed,
            found=f"keys={self._keys!r}",
            remedy="leave out keys=, and pass a DataFrame with key and value"
            if log.columns is None
            else "name its key columns: keys=",
        )
