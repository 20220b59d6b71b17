"""Sessions whose settings must not change what the sink writes, and what it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from keyfold.sink.encoding import RowEncoding

#: Settings that change how Spark writes dates, numbers, nulls and names. None may change a byte here.
SESSIONS: list[dict[str, str]] = [
    {},
    {
        "spark.sql.session.timeZone": "America/New_York",
        "spark.sql.ansi.enabled": "false",
        "spark.sql.legacy.timeParserPolicy": "LEGACY",
        "spark.sql.jsonGenerator.ignoreNullFields": "false",
        "spark.sql.caseSensitive": "true",
    },
    {
        "spark.sql.session.timeZone": "Pacific/Apia",
        "spark.sql.ansi.enabled": "true",
        "spark.sql.legacy.timeParserPolicy": "EXCEPTION",
        "spark.sql.legacy.interval.enabled": "true",
        "spark.sql.timestampType": "TIMESTAMP_NTZ",
        "spark.sql.parser.escapedStringLiterals": "true",
    },
    {
        "spark.sql.session.timeZone": "Asia/Kolkata",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.legacy.charVarcharAsString": "true",
    },
]


def sessions_of(spark: SparkSession) -> list[SparkSession]:
    """One session for each of `SESSIONS`."""
    made = []
    for options in SESSIONS:
        session = spark.newSession()
        for name, value in options.items():
            session.conf.set(name, value)
        made.append(session)
    return made


def encoded(encoding: RowEncoding, df: DataFrame) -> pa.Table:
    """The records of a DataFrame, with the keys and values that a task gives them: the key is null where a
    part of it is, the value where the row deletes its key.
    """
    from keyfold.sink.arrow_batches import arrow_batches
    from keyfold.sink.arrow_rows import deleted, in_order, key_columns, keys_of, values_of

    selected = encoding.select(df)
    # Not `toArrow`: it fails for a null struct with a field that is not nullable.
    batches = list(arrow_batches(selected))
    records = pa.Table.from_batches(batches) if batches else selected.toArrow()
    records = records.combine_chunks()
    names = key_columns(records.column_names)
    (batch,) = records.to_batches() or [pa.RecordBatch.from_pylist([], records.schema)]
    whole = pa.array(
        [all(column[row].is_valid for column in map(batch.column, names)) for row in range(len(batch))]
    )
    found = iter(keys_of(batch.filter(whole.cast(pa.bool_()))).to_pylist())
    keys = pa.array([next(found) if is_whole else None for is_whole in whole.to_pylist()], pa.binary())
    values = values_of(batch, encoding.shape(encoding.columns))
    made = in_order(pa.RecordBatch.from_arrays([values], ["value"]), None, deleted(batch))
    others = records.select([n for n in records.column_names if n.startswith("sequence_") or n in _KAFKA])
    return others.add_column(0, "value", made["value"]).add_column(0, "key", keys)


_KAFKA = ("headers", "timestamp")
