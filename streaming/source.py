"""Spark's data source `keyfold`: options in, readers out."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from keyfold.checkpoints.log.key_filter import Selection
from keyfold.checkpoints.manifest.identity import read_identity
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.files import LOCAL
from keyfold.streaming.batch_reader import KeyfoldReader
from keyfold.streaming.options import Kind, parse
from keyfold.streaming.rows import Rows, check_schema, selected
from keyfold.streaming.stream_reader import FollowingReader, SeedReader
from keyfold.streaming.where import selection_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class KeyfoldSource(DataSource):
    """`spark.read.format("keyfold")` and `spark.readStream.format("keyfold")`.

    What comes is said by `mode`:

    - `state`: one row per key. A typed changelog gives the columns that were written, with their types; a raw
      one `key`, `value`, `partition`, `offset`, `timestamp`.
    - `log`: the records, with the columns of Spark's Kafka source; `topic` is the directory's name.
    - `changes`: the records, typed: the columns that were written (`key`, `value` where raw), then
      `_deleted`, `_partition`, `_offset`, `_timestamp`. A delete has null in every value column.

    Without `mode` it is `changes` where an option about following is given (`startingOffsets`,
    `endingOffsets`, `failOnDataLoss`, `maxOffsetsPerTrigger`), else `state`. Spark asks for the columns
    before it says whether it reads or streams, so a stream has to name one of those options or the mode.

    Options (names without case, as in Spark):

    - `path`: the changelog's directory, as a rule given to `load`.
    - `at` (state): the number of a commit, or in a batch the name of an anchor: the exact state at that
      commit. In a stream this is a **seed**: the state of that commit is the first micro-batch, and nothing
      ever follows.
    - `endOffsets` (state, batch): `"12,40"`, the end of each partition, where a commit had these.
    - `view` (state, batch): with `endOffsets`, the files that hold that state, as `RestoredState.to_spark`
      gives it.
    - `columns`: `"user,n"`, only these columns, in this order; the others are not decoded. A name that has a
      comma is in backquotes. `.schema(…)` with fewer columns, or fewer fields in structs, does the same.
    - `where`: only these keys: `"user = 'ann' AND day >= '2026-01-01'"`. Conditions on key columns (`key` of
      a raw changelog), joined by AND: `=`, `<`, `<=`, `>`, `>=`, `BETWEEN … AND …`, `IN (…)`. Each key column
      before the last one that is named needs `=`; IN is for the last key column. Literals have the type of
      their column: numbers, TRUE, `'text'` (a quote is doubled, a backslash is itself), bytes as `X'00ff'`,
      dates and times in ISO 8601 in quotes (UTC without a time zone), `'NaN'`, `'Infinity'`. Where every key
      column has one value, the key is looked up in one partition. Else all keys are read, but only the blocks
      that have wanted ones are decoded further.
    - `partitions` (batch): `"0,3"`, only these.
    - `startingOffsets` (log, changes): `earliest` (the default, in streams too: a changelog read from its
      start is the whole state and then its changes), `latest`, or the JSON that the source itself keeps,
      `{"keyfold": "<uuid>", "offsets": {"0": 12, "1": 40}}`, for all partitions.
    - `endingOffsets` (log, changes, batch): `latest` (the default) or that JSON.
    - `maxOffsetsPerTrigger` (log, changes, stream): rows per micro-batch at most, shared out over the
      partitions.
    - `failOnDataLoss` (log, changes): `true` (the default) raises `CompactedAway` where records, or deletes,
      between the position and now are gone; `false` logs a warning and goes on.
    - `includeHeaders` (log): `true` adds the column `headers`.
    - `viewTimeoutMs`: how long the files of a view are kept for tasks that have not begun (default 10
      minutes); tasks that run keep them for as long as they take.

    A DataFrame is of one view: the newest commit when it was first computed. Nothing that is not committed is
    seen.

    Spark does not tell a Python data source which columns a query needs: without `columns` or `schema(…)`
    all are decoded, also by `count()`. A count needs the keys alone: `option("columns", "user")`.

    Spark evaluates the filters of a query, and nothing is pushed down, also where
    `spark.sql.python.filterPushdown.enabled` is true. Spark 4.3 then reads all queries on one DataFrame with
    the filters that it pushed last: rows of other queries are missing. `where` belongs to one DataFrame.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._parsed = parse(options)
        self._rows: Rows | None = None

    @classmethod
    def name(cls) -> str:
        return "keyfold"

    def schema(self) -> StructType:
        options = self._parsed
        self._selection()
        own = self._rows_of_now().schema(options.path)
        return own if options.columns is None else selected(own, options.columns, options.path)

    def reader(self, schema: StructType) -> KeyfoldReader:
        rows = self._checked("batch", schema)
        return KeyfoldReader(self._parsed, rows, schema, self._selection())

    def streamReader(self, schema: StructType) -> FollowingReader | SeedReader:
        rows = self._checked("stream", schema)
        kind = SeedReader if self._parsed.mode == "state" else FollowingReader
        return kind(self._parsed, rows, schema, self._selection())

    def _checked(self, kind: Kind, schema: StructType) -> Rows:
        self._parsed.check_kind(kind)
        check_schema(schema, self.schema(), self._parsed.path)
        return self._rows_of_now()

    def _selection(self) -> Selection | None:
        """The keys that the option `where` leaves; None for all."""
        options = self._parsed
        if options.where is None:
            return None
        return selection_of(options.where, self._rows_of_now().columns, options.path)

    def _rows_of_now(self) -> Rows:
        """What the changelog's columns were when Spark first asked; those added later are not read."""
        if self._rows is None:
            options = self._parsed
            identity = read_identity(LOCAL, options.path)
            self._rows = Rows(options.mode, identity.columns, options.path.name, options.include_headers)
        return self._rows


def register(spark: SparkSession) -> None:
    """Register `format("keyfold")` with a session that does not find it without help.

    Where keyfold is installed, or on `PYTHONPATH`, Spark finds the data source: no call is needed. Spark
    looks once, with the Python of its workers (`PYSPARK_PYTHON`). Call this where that Python gets keyfold
    later: by `--py-files`, by `SparkContext.addPyFile`, or by an install while the session runs. A second
    call does no harm.

    Raises:
        ConfigError: the session is one of Spark Connect.
    """
    if not hasattr(spark, "_jsparkSession"):
        raise ConfigError(
            "The data source is not offered to Spark Connect.", expected="a classic Spark session",
            found=type(spark).__module__, remedy="use SparkSession.builder.master(…)",
        )  # fmt: skip
    spark.dataSource.register(KeyfoldSource)
