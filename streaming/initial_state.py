"""A restored state as the initial state of `transformWithState` and `transformWithStateInPandas`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.group import GroupedData

from keyfold.checkpoints.manifest.identity import ChangelogMeta, read_identity
from keyfold.checkpoints.resume.resume import Resumed
from keyfold.sink.query_plan import STATE_OF
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.files import LOCAL
from keyfold.statestore.schema.spark_types import quoted
from keyfold.streaming.rows import Rows


def initial_state(
    spark: SparkSession, resumed: Resumed, keys: str | Sequence[str] | None = None
) -> GroupedData:
    """The state of `resumed`, grouped by its keys, for `initialState=`.

        again = resume("var/counts", app_id="counts", checkpoint="var/checkpoint")
        live = spark.readStream.format("keyfold").options(**again.options()).load("var/words")
        counts = live.groupBy("word").transformWithStateInPandas(
            Counter(), "word string, n long", "Update", "none", initialState=initial_state(spark, again)
        )

    The processor's `handleInitialState` gets the columns that were written. Spark takes them in with batch 0,
    and again if it has to run that batch again; by then the sink may have committed it. So the commit has to
    be kept in the query's checkpoint: `resume(checkpoint=…)`. After batch 0, Spark ignores what it
    is given, which then is empty.

    The query needs Spark's RocksDB state store, and protobuf where Python runs.

    Args:
        keys: the columns to group by, in the order of the query's own `groupBy`; the changelog's key columns
            by default, of a raw changelog `key`.

    Raises:
        ConfigError: `resumed` is not kept in a checkpoint, or a column does not exist.
    """
    if resumed.checkpoint is None:
        raise ConfigError(
            "An initial state must be the state of one commit, however often the first batch runs.",
            path=resumed.path, expected="resume(path, app_id, checkpoint=…)", found="no checkpoint",
            remedy="give resume the checkpointLocation of the query",
        )  # fmt: skip
    if keys is None:
        wanted = ("key",) if resumed.columns is None else resumed.columns.keys
    else:
        wanted = (keys,) if isinstance(keys, str) else tuple(keys)
    frame = _nothing(spark, resumed) if resumed.is_seeded else resumed.state.to_spark(spark)
    unknown = [name for name in wanted if name not in frame.columns]
    if unknown or not wanted:
        raise ConfigError(
            "Cannot group the state by these columns.", path=resumed.path, expected=", ".join(frame.columns),
            found=", ".join(unknown) or "no keys", remedy="name columns of the state",
        )  # fmt: skip
    # A sink asks the query's plan whether its state begins with that of the resumed commit.
    state = {STATE_OF: {"changelog": resumed.uuid, "commit": resumed.commit.number}}
    marked = [F.col(quoted(n)).alias(n, metadata={**_metadata(frame, n), **state}) for n in wanted]
    return frame.withColumns(dict(zip(wanted, marked, strict=True))).groupBy(*map(quoted, wanted))


def _metadata(frame: DataFrame, name: str) -> dict[str, Any]:
    return next(field.metadata or {} for field in frame.schema.fields if field.name == name)


def _nothing(spark: SparkSession, resumed: Resumed) -> DataFrame:
    """A state without rows; its columns are those of `to_spark`."""
    identity: ChangelogMeta = read_identity(LOCAL, resumed.path)
    rows = Rows("state", identity.columns, resumed.path.name, False)
    return spark.createDataFrame([], rows.schema(resumed.path))
