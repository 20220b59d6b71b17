"""`spark.read.format("keyfold")` in Spark itself: types, rows, one view per DataFrame, whole messages."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from keyfold import Changelog, restore
from keyfold.checkpoints.log.typed_rows import DELETED
from support.encodings import encoded
from support.source import QUIET, TYPED, clean, leases, log_rows, table

pytest.importorskip("pyspark")

from pyspark.errors import AnalysisException, PythonException
from pyspark.sql import functions as F

from keyfold.sink.encoding import RowEncoding

if TYPE_CHECKING:
    from pyspark.sql import DataFrameReader, SparkSession


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "words"


@pytest.fixture
def read(spark: SparkSession) -> Callable[[], DataFrameReader]:
    return lambda: spark.read.format("keyfold")


def test_every_mode_has_its_columns_and_rows(read: Callable[[], DataFrameReader], path: Path) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(table(*((f"k{i}", str(i)) for i in range(40)), timestamp_ms=86_400_001))
        log.append(table(("k0", None), ("k1", "new")))
        expected = log_rows(log)
    state = read().load(str(path))
    assert state.schema.simpleString() == (
        "struct<key:binary,value:binary,partition:int,offset:bigint,timestamp:timestamp>"
    )
    assert {bytes(r.key): bytes(r.value) for r in state.collect()} == restore(path).to_dict()
    log_df = read().option("mode", "log").option("includeHeaders", "true").load(str(path))
    assert log_df.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )
    rows = log_df.collect()
    assert [(r.partition, r.offset, bytes(r.key), r.value and bytes(r.value)) for r in rows] == expected
    assert {(r.topic, r.timestampType) for r in rows} == {("words", 0)}
    first = log_df.select(F.min("timestamp").cast("string")).first()
    assert first is not None
    assert first[0] == "1970-01-02 00:00:00.001"


def test_typed_columns_come_back_with_their_types_and_values(
    spark: SparkSession, read: Callable[[], DataFrameReader], path: Path
) -> None:
    """Written by Spark's own encoding, read in a session with another time zone."""
    written = spark.createDataFrame(
        [
            (
                "ä",
                1,
                Decimal("1.50"),
                ["a", None],
                datetime.datetime(2013, 1, 31, 5, 6, 7, 123456, tzinfo=datetime.timezone.utc),
            ),
            ("b", 2**53 + 1, None, None, None),
        ],
        "word string, n long, price decimal(9,2), tags array<string>, seen timestamp",
    )
    encoding = RowEncoding(written.schema, "word")
    records = encoded(encoding, written)
    with Changelog.open(path, columns=encoding.columns, config=QUIET) as log:
        log.append(records)
        log.append({"word": ["c", "d", "d"], "n": [None, 0, None], DELETED: [True, False, True]})
    df = read().load(str(path))
    assert df.schema.simpleString() == written.schema.simpleString()
    assert sorted(df.collect()) == sorted(written.collect())
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        row = read().load(str(path)).where("word = 'ä'").select(F.col("seen").cast("string")).first()
        assert row is not None
        assert row[0] == "2013-01-31 00:06:07.123456"
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    changes = read().option("mode", "changes").load(str(path))
    assert changes.where("_deleted").select("word", "n").distinct().orderBy("word").collect() == [
        ("c", None),
        ("d", None),
    ]
    assert changes.groupBy("word").count().count() == 4


def test_a_dataframe_is_of_one_view_whatever_happens_to_the_log(
    read: Callable[[], DataFrameReader], path: Path
) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1"), ("b", "1")))
        log.append(table(("a", "2")))
        df = read().option("mode", "log").load(str(path))
        before = df.collect()
        log.append(table(("a", "3")))
        clean(log)
        assert df.collect() == before
        assert df.count() == 3
        fresh = read().option("mode", "log").load(str(path))
        assert [(r.offset, bytes(r.value)) for r in fresh.collect()] == [(1, b"1"), (3, b"3")]
        assert len(leases(path)) == 2


def test_a_view_that_was_not_kept_is_told_with_what_to_do(
    read: Callable[[], DataFrameReader], path: Path
) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1")))
        df = read().option("mode", "log").load(str(path))
        df.collect()
        for lease in leases(path):
            (path / "readers" / lease).unlink()
        log.append(table(("a", "2")))
        clean(log)
        with pytest.raises(PythonException, match=r"ViewExpired(.|\n)*load the DataFrame again"):
            df.collect()


def test_restored_state_becomes_a_dataframe(
    spark: SparkSession, read: Callable[[], DataFrameReader], path: Path
) -> None:
    with Changelog.open(path, partitions=2, columns=TYPED, config=QUIET) as log:
        log.append({"word": ["a", "b"], "n": [1, 2]})
        log.append({"word": ["a"], "n": [3]})
        with restore(path, at=1) as state:
            log.append({"word": ["a"], "n": [4]})
            assert {r.word: r.n for r in state.to_spark(spark).collect()} == {"a": 1, "b": 2}
        with restore(path, partitions=[log.partition(b"a")]) as part:
            assert "a" in {r.word for r in part.to_spark(spark).collect()}


def test_columns_that_spark_does_not_need_do_no_harm(read: Callable[[], DataFrameReader], path: Path) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(table(*((f"k{i}", str(i)) for i in range(1000))))
        df = read().option("mode", "log").load(str(path))
        assert df.count() == 1000
        assert df.select("offset").where("partition = 0").agg(F.max("offset")).first() == (
            log.end_offsets()[0] - 1,
        )
        assert len(df.select("key").limit(3).collect()) == 3


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            {"stratingOffsets": "latest"},
            ["Unknown option 'stratingoffsets'", "expected: startingOffsets"],
        ),
        ({"mode": "chnges"}, ["'mode'", "expected: changes"]),
        ({"at": "99"}, ["Commit 99 does not exist", "a number from 1 to 1", "what to do"]),
        ({"maxOffsetsPerTrigger": "5"}, ["'maxOffsetsPerTrigger'", "not for a batch"]),
    ],
)
def test_a_bad_option_is_refused_with_the_whole_message(
    read: Callable[[], DataFrameReader], path: Path, options: dict[str, str], parts: list[str]
) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1")))
    with pytest.raises(AnalysisException) as e:
        read().options(**options).load(str(path)).collect()
    for part in parts:
        assert part in str(e.value)


def test_a_path_without_a_changelog_is_refused(read: Callable[[], DataFrameReader], tmp_path: Path) -> None:
    with pytest.raises(AnalysisException, match=r"Not a changelog(.|\n)*nowhere(.|\n)*correct the path"):
        read().load(str(tmp_path / "nowhere"))


def test_damage_is_never_served(read: Callable[[], DataFrameReader], path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1" * 1000)))
    (segment,) = (path / "0").glob("*.arrows")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    with pytest.raises(PythonException, match="Committed bytes of a segment are damaged"):
        read().load(str(path)).collect()


def test_a_large_log_is_read_by_several_tasks(read: Callable[[], DataFrameReader], path: Path) -> None:
    keys = pa.array([b"%016d" % i for i in range(400_000)])
    values = pa.array([b"x" * 200] * 400_000)
    # Tasks are planned by the bytes of segments.
    with Changelog.open(path, config={**QUIET, "compression.type": "none"}) as log:
        log.append(pa.table({"key": keys, "value": values}))
    df = read().option("mode", "log").load(str(path))
    assert df.rdd.getNumPartitions() >= 2
    assert df.agg(F.count("*"), F.countDistinct("key"), F.max("offset")).first() == (
        400_000,
        400_000,
        399_999,
    )


def test_only_the_columns_and_keys_that_are_named_are_given(
    read: Callable[[], DataFrameReader], path: Path
) -> None:
    with Changelog.open(path, partitions=3, columns=TYPED, config=QUIET) as log:
        log.append({"word": [f"w{n}" for n in range(100)], "n": list(range(100))})
        log.append({"word": ["w7"], "n": [700]})
    assert read().option("columns", "n,word").load(str(path)).columns == ["n", "word"]
    assert read().option("columns", "word").load(str(path)).count() == 100
    assert read().schema("n long").load(str(path)).agg(F.sum("n")).first() == (99 * 50 - 7 + 700,)
    one = read().option("where", "word = 'w7'").load(str(path))
    assert one.rdd.getNumPartitions() == 1
    assert [(r.word, r.n) for r in one.collect()] == [("w7", 700)]
    some = read().option("columns", "n").option("where", "word >= 'w98' AND word < 'x'").load(str(path))
    assert sorted(r.n for r in some.collect()) == [98, 99]
    with pytest.raises(AnalysisException, match=r"'columns'(.|\n)*some of word, n, price, tags, seen"):
        read().option("columns", "word,m").load(str(path))


def test_spark_s_filter_pushdown_changes_nothing(spark: SparkSession, path: Path) -> None:
    """With it, Spark reads all queries on one DataFrame with the filters that it pushed last."""
    with Changelog.open(path, partitions=3, columns=TYPED, config=QUIET) as log:
        log.append({"word": [f"w{n}" for n in range(10)], "n": list(range(10))})
    session = spark.newSession()
    for enabled in ("true", "false"):
        session.conf.set("spark.sql.python.filterPushdown.enabled", enabled)
        df = session.read.format("keyfold").load(str(path))
        one, two = df.where("word = 'w1'"), df.where("word = 'w2'")
        assert one.union(two).count() == 2
        assert [r.n for r in one.collect()] == [1]
        assert df.count() == 10
