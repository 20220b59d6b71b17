"""`ChangelogSink`'s columns: what makes up key and value, what deletes, what orders, what may change."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import functions as F

from keyfold import Changelog, ChangelogSink, restore
from keyfold.statestore.errors import BadRecord, ConfigError, SchemaMismatch
from support.streams import pairs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = "k string, op string, seq int, v long"


def changes(spark: SparkSession, *rows: tuple[object, ...], schema: str = COLUMNS) -> DataFrame:
    return spark.createDataFrame([*rows], schema).coalesce(1)


def never(spark: SparkSession, schema: str) -> DataFrame:
    """Rows that fail as soon as one is read."""
    return changes(spark, *[(None,) * len(schema.split(","))], schema=schema).where(
        F.raise_error(F.lit("a row was read")).isNull()
    )


def test_apply_as_deletes_makes_tombstones(spark: SparkSession, tmp_path: Path) -> None:
    frame = changes(spark, ("a", "put", 1, 10), ("b", "put", 2, 20), ("a", "del", 3, None))
    with ChangelogSink(tmp_path / "log", keys="k", apply_as_deletes="op = 'del'", column_list=["v"]) as sink:
        sink(frame, 0)
        assert pairs(sink.log) == [(b"a", {"v": 10}), (b"b", {"v": 20}), (b"a", None)]
        assert restore(tmp_path / "log").to_dict() == {"b": {"v": 20}}
        assert sink.log.get("a") is None


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, ["op", "seq", "v"]),
        ({"column_list": ["v", "op"]}, ["op", "v"]),
        ({"column_list": "v"}, ["v"]),
        ({"except_column_list": ["op", "seq"]}, ["v"]),
    ],
)
def test_column_lists_choose_what_makes_up_the_value(
    spark: SparkSession, tmp_path: Path, given: dict[str, Any], kept: list[str]
) -> None:
    with ChangelogSink(tmp_path / "log", keys="k", **given) as sink:
        sink(changes(spark, ("a", "put", 1, 10)), 0)
        ((_, value),) = restore(tmp_path / "log").to_dict().items()
        assert list(value) == kept


def test_several_key_columns_are_one_key(spark: SparkSession, tmp_path: Path) -> None:
    with ChangelogSink(tmp_path / "log", keys=["k", "seq"], column_list="v", partitions=4) as sink:
        sink(changes(spark, ("a", "", 1, 10), ("a", "", 2, 20), ("a", "", 1, 30)), 0)
        assert restore(tmp_path / "log").to_dict() == {("a", 1): {"v": 30}, ("a", 2): {"v": 20}}


# -- order ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["tasks", "driver"])
def test_sequence_by_orders_the_changes_of_a_key(spark: SparkSession, tmp_path: Path, placement: Any) -> None:
    rows = spark.range(0, 4000, 1, 3).selectExpr(
        "cast(id % 50 as string) k", "cast((id * 7919) % 4000 as int) seq", "id v"
    )
    with ChangelogSink(
        tmp_path / "log", keys="k", sequence_by="seq", partitions=5, placement=placement
    ) as sink:
        sink(rows, 0)
        assert len(pairs(sink.log)) == 4000
        for partition in range(5):
            seen: dict[bytes, int] = {}
            for batch in sink.log.read(partition):
                table = sink.log.columns.decode(batch.column("key"), batch.column("value"))  # type: ignore[union-attr]
                for key, sequence in zip(table["k"].to_pylist(), table["seq"].to_pylist(), strict=True):
                    assert seen.get(key, -1) < sequence
                    seen[key] = sequence
                assert set(table["k"].to_pylist()) <= {
                    k for k in map(str, range(50)) if sink.log.partition(k.encode()) == partition
                }


def test_sequence_by_orders_the_changes_of_equal_keys_however_they_are_written(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Both zeros are one key, and so are all NaNs: also in structs."""
    rows = [(f, {"x": f}, "a", seq, seq) for f in (0.0, math.nan) for seq in range(40)]
    frame = spark.createDataFrame(rows, "d double, s struct<x: double>, k string, seq int, v int")
    negative = {"d": F.expr("if(seq % 2 = 0, d, -d)"), "s": F.expr("if(seq % 2 = 0, s, struct(-s.x as x))")}
    shuffled = frame.withColumns(negative).repartition(4).orderBy(F.rand(7))
    with ChangelogSink(
        tmp_path / "log", keys=["d", "s", "k"], sequence_by="seq", column_list="v", partitions=5
    ) as sink:
        sink(shuffled, 0)
    found = restore(tmp_path / "log").to_arrow()
    assert found["v"].to_pylist() == [39, 39]


def test_changes_that_are_equal_in_sequence_by_keep_their_order(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.range(0, 3000, 1, 3).selectExpr(
        "cast(id % 3 as string) k", "cast(id / 1500 as int) s", "id v"
    )
    with ChangelogSink(tmp_path / "log", keys="k", sequence_by=["-s"], column_list="v") as sink:
        sink(rows, 0)
        values = [value["v"] for _, value in pairs(sink.log)]
        assert values == [*range(1500, 3000), *range(1500)]


def test_a_null_in_sequence_by_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with ChangelogSink(tmp_path / "log", keys="k", sequence_by=["seq", "v"]) as sink:
        with pytest.raises(BadRecord, match="null in sequence_by") as caught:
            sink(changes(spark, ("a", "", 1, 1), ("b", "", 2, None), ("c", "", None, 2)), 0)
        assert caught.value.position in (
            "batch 0, Spark partition 0, row 1",
            "batch 0, Spark partition 0, row 2",
        )
        for null_first, null_second in ((None, 2), (2, None)):
            with pytest.raises(BadRecord, match="null in sequence_by") as caught:
                sink(changes(spark, ("a", "", 1, 1), ("b", "", null_first, null_second)), 0)
            assert caught.value.position == "batch 0, Spark partition 0, row 1"
        assert pairs(sink.log) == []


def test_a_null_key_is_named_by_its_place_before_the_sort(spark: SparkSession, tmp_path: Path) -> None:
    with ChangelogSink(tmp_path / "log", keys="k", sequence_by="seq") as sink:
        with pytest.raises(BadRecord, match="no key") as caught:
            sink(changes(spark, ("a", "", 3, 1), ("b", "", 2, 1), (None, "", 1, 2)), 0)
        assert caught.value.position == "batch 0, Spark partition 0, row 2"


# -- mistakes, before a row is read --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keys": "kk"}, "did you mean 'k'"),
        ({"keys": "k", "column_list": ["seqq"]}, "did you mean 'seq'"),
        ({"keys": "k", "except_column_list": ["opp"]}, "did you mean 'op'"),
        ({"keys": "k", "apply_as_deletes": "ops = 'del'"}, "apply_as_deletes"),
        ({"keys": "k", "apply_as_deletes": "op"}, "boolean"),
        ({"keys": "k", "sequence_by": "sequence"}, "sequence_by"),
        ({"keys": "k", "column_list": "v", "except_column_list": "v"}, "exclude each other"),
        ({}, "Kafka"),
    ],
)
def test_a_column_that_does_not_exist_is_refused_before_a_row_is_read(
    spark: SparkSession, tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with ChangelogSink(tmp_path / "log", **given) as sink:
            sink(never(spark, COLUMNS), 0)
    assert list((tmp_path / "log").rglob("*.arrows")) == []


# -- another schema ------------------------------------------------------------------------------------------


def test_an_added_nullable_column_is_taken_and_kept(spark: SparkSession, tmp_path: Path) -> None:
    with ChangelogSink(tmp_path / "log", keys="k") as sink:
        sink(changes(spark, ("a", 1, 2), schema="k string, v long, w long"), 0)
        sink(changes(spark, ("b", 1, 2, "x"), schema="k string, v long, w long, more string"), 1)
    with Changelog.open(tmp_path / "log", mode="r") as log:
        assert log.columns is not None
        assert log.columns.arrow_schema().names == ["k", "v", "w", "more"]
    assert restore(tmp_path / "log").to_dict() == {
        "a": {"v": 1, "w": 2, "more": None},
        "b": {"v": 1, "w": 2, "more": "x"},
    }


@pytest.mark.parametrize(
    ("schema", "difference"),
    [
        ("k string, v string, w long", "v bigint"),
        ("v long, w long, k int", "k string"),
    ],
)
def test_any_other_change_of_columns_is_refused_and_shown(
    spark: SparkSession, tmp_path: Path, schema: str, difference: str
) -> None:
    with ChangelogSink(tmp_path / "log", keys="k") as sink:
        sink(changes(spark, ("a", 1, 2), schema="k string, v long, w long"), 0)
        with pytest.raises(SchemaMismatch, match=difference):
            sink(never(spark, schema), 1)
        assert len(pairs(sink.log)) == 1
        assert [c.batch for c in sink.log.state.commits] == [0]


def test_other_keys_than_those_of_the_changelog_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    with ChangelogSink(tmp_path / "log", keys="k") as sink:
        sink(changes(spark, ("a", "put", 1, 10)), 0)
    with ChangelogSink(tmp_path / "log", keys="op") as other:
        with pytest.raises(SchemaMismatch, match="keys k"):
            other(never(spark, COLUMNS), 1)


def test_columns_of_a_batch_that_was_refused_are_not_kept(spark: SparkSession, tmp_path: Path) -> None:
    with ChangelogSink(tmp_path / "log", keys="k") as sink:
        sink(changes(spark, ("a", 1, 2), schema="k string, v long, w long"), 0)
        with pytest.raises(BadRecord):
            sink(changes(spark, (None, 1, 2, 3), schema="k string, v long, w long, x long"), 1)
        assert sink.log.columns is not None
        assert "x" not in sink.log.columns.arrow_schema().names
