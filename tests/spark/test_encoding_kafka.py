"""A DataFrame in Kafka's shape: its key and value are records as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from keyfold.statestore.errors import ConfigError
from support.encodings import encoded, sessions_of

pytest.importorskip("pyspark")

from keyfold.sink.encoding import RowEncoding

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KAFKA = """select {key} as key, {value} as value, 'words' as topic, 3 as partition, 9L as offset,
    timestamp'1969-12-31 23:59:58.4995Z' as timestamp, 0 as timestampType,
    array(struct('h' as key, x'ff' as value)) as headers"""


def test_kafkas_columns_are_taken_as_they_are(spark: SparkSession) -> None:
    for session in sessions_of(spark):
        for key, value in (
            ("x'ff'", "x'00fe'"),
            ("'k'", "cast(null as string)"),
            ("cast(null as binary)", "'v'"),
        ):
            df = session.sql(KAFKA.format(key=key, value=value))
            encoding = RowEncoding(df.schema)
            assert encoding.columns is None
            row = df.selectExpr("cast(key as binary)", "cast(value as binary)").collect()[0]
            assert encoded(encoding, df).to_pylist() == [
                {
                    "key": None if row[0] is None else bytes(row[0]),
                    "value": None if row[1] is None else bytes(row[1]),
                    "headers": [{"key": "h", "value": b"\xff"}],
                    "timestamp": -1501,
                }
            ]


def test_kafkas_shape_takes_deletes_and_sequences(spark: SparkSession) -> None:
    df = spark.sql("select * from values ('a', 'x'), ('b', '') as t(key, value)")
    encoding = RowEncoding(df.schema, apply_as_deletes="value = ''", sequence_by="value")
    assert encoded(encoding, df).to_pylist() == [
        {"key": b"a", "value": b"x", "sequence_0": "x"},
        {"key": b"b", "value": None, "sequence_0": ""},
    ]


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("select 'a' as key", "needs Kafka's columns"),
        ("select 'a' as key, 1 as value", "needs Kafka's columns"),
        ("select 'a' as key, 'b' as value, 1 as other", "found: other"),
        ("select 'a' as key, 'b' as value, 'now' as timestamp", "timestamp has the wrong type"),
        ("select 'a' as key, 'b' as value, map('a', 'b') as headers", "headers has the wrong type"),
        ("select 'a' as key, 'b' as value, 'c' as value", "each once"),
    ],
)
def test_other_columns_need_keys(spark: SparkSession, sql: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        RowEncoding(spark.sql(sql).schema)
    assert "keys=" in str(caught.value)
