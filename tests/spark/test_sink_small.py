"""Small batches, which the driver encodes: the log holds what it would hold if tasks had staged them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import PySparkException, SparkRuntimeException
from pyspark.sql import functions as F

from keyfold import ChangelogSink
from keyfold.sink import small_batches
from keyfold.sink.arrow_rows import RAW
from keyfold.sink.small_batches import SmallBatches
from keyfold.sink.staging import Stage, Staged
from keyfold.statestore.errors import BadRecord
from keyfold.statestore.files import LOCAL, Files, OpenFile
from support.streams import pairs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class DriversFiles(Files):
    """Counts the staging files that the driver has made: tasks make theirs in their own processes."""

    def __init__(self) -> None:
        self.staged = 0

    def _operation(
        self, name: str, path: Path, *, file: OpenFile | None = None, **rest: Any
    ) -> AbstractContextManager[None]:
        self.staged += name == "create" and path.suffix == ".blocks"
        return super()._operation(name, path, file=file, **rest)


def numbers(spark: SparkSession, *partitions: int, first: int = 0) -> DataFrame:
    """The rows of `expected`, in Spark partitions of these sizes."""
    room = max(partitions) + 1
    sizes = ",".join(map(str, partitions))
    ids = spark.range(0, room * len(partitions), 1, len(partitions))
    kept = ids.where(f"id % {room} < element_at(array({sizes}), int(id div {room}) + 1)")
    assert kept.rdd.getNumPartitions() == len(partitions)
    return kept.selectExpr("cast(id % 7 as string) key", f"cast(id + {first} as string) value")


def expected(*partitions: int, first: int = 0) -> list[int]:
    """The values of `numbers`, in order."""
    room = max(partitions) + 1
    return [first + place * room + n for place, size in enumerate(partitions) for n in range(size)]


@pytest.mark.parametrize(
    ("placement", "by_driver"),
    # The large batch is collected too: only afterwards it is known to be large.
    [("auto", [0, 1, 1, 1, 0]), ("tasks", [0, 0, 0, 0, 0]), ("driver", [1, 1, 1, 1, 1])],
)
def test_a_batch_that_follows_a_small_one_is_encoded_by_the_driver(
    spark: SparkSession, tmp_path: Path, placement: Any, by_driver: list[int]
) -> None:
    files, found = DriversFiles(), []
    with ChangelogSink(tmp_path / "log", placement=placement, files=files) as sink:
        for number, rows in enumerate((50, 40, 3, 5000, 1)):
            before = files.staged
            sink(numbers(spark, rows), number)
            found.append(files.staged - before)
        assert len(pairs(sink.log)) == 5094
    assert found == by_driver


@pytest.mark.parametrize(
    "partitions", [(3, 7), (3, 8), (9, 0), (8, 1), (30, 2, 9), (0, 8, 0), (2, 2, 2, 2, 2), (0, 0)]
)
def test_no_row_is_lost_however_many_arrive_after_a_small_batch(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitions: tuple[int, ...]
) -> None:
    """Around the number of rows that are collected at most; in the order of the DataFrame."""
    monkeypatch.setattr(small_batches, "COLLECTED_ROWS", 8)
    with ChangelogSink(tmp_path / "log", partitions=2) as sink:
        sink(numbers(spark, 2), 0)
        sink(numbers(spark, *partitions, first=700), 1)
        rows = [*expected(2), *expected(*partitions, first=700)]
        for partition in range(2):
            values = [int(v) for b in sink.log.read(partition) for v in b.column("value").to_pylist()]
            here = [n for n in rows if sink.log.partition(str(n % 7).encode()) == partition]
            assert values == here


def test_a_batch_that_was_too_large_is_computed_twice_and_the_next_ones_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_batches, "COLLECTED_ROWS", 8)
    computed = spark.sparkContext.accumulator(0)

    @F.udf("string")
    def counted(value: str) -> str:
        computed.add(1)
        return value

    with ChangelogSink(tmp_path / "log") as sink:
        sums = []
        for number, rows in enumerate((2, 2, 20, 2, 20, 0)):
            before = computed.value
            sink(numbers(spark, rows).withColumn("value", counted("value")), number)
            sums.append(computed.value - before)
        # Spark may apply the limit before the function.
        assert sums[:2] + sums[3:] == [2, 2, 2, 20, 0]
        assert 20 < sums[2] <= 40


def test_an_empty_batch_is_read_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChangelogSink(tmp_path / "log") as sink:
        sink(numbers(spark, 1), 0)
        monkeypatch.setattr("keyfold.sink.staging.staged_by_tasks", None)
        sink(numbers(spark, 0), 1)
        assert len(sink.log.state.commits) == 2


def test_a_bad_row_of_a_small_batch_is_named_as_tasks_name_it(spark: SparkSession, tmp_path: Path) -> None:
    bad = numbers(spark, 3, 4).withColumn("key", F.when(F.col("value") != "7", F.col("key")))
    with ChangelogSink(tmp_path / "log") as sink:
        sink(numbers(spark, 2), 0)
        with pytest.raises(BadRecord, match="no key") as caught:
            sink(bad, 1)
        assert caught.value.position == "batch 1, Spark partition 1, row 2"
        assert len(sink.log.state.commits) == 1
        sink(numbers(spark, 3, 4), 1)
        assert len(pairs(sink.log)) == 9


def test_what_spark_raises_in_a_small_batch_reaches_the_query(spark: SparkSession, tmp_path: Path) -> None:
    broken = numbers(spark, 3, 4).withColumn("value", F.expr("string(assert_true(value != '5'))"))
    with ChangelogSink(tmp_path / "log") as sink:
        sink(numbers(spark, 2), 0)
        with pytest.raises(PySparkException, match="is not true"):
            sink(broken, 1)
        assert not [p for p in (tmp_path / "log" / "work").rglob("*") if p.is_file()]
        sink(numbers(spark, 3), 1)
        assert len(pairs(sink.log)) == 5


class TooLarge:
    """A DataFrame whose rows the driver cannot hold."""

    def __init__(self, message: str) -> None:
        self.message = message

    def where(self, condition: object) -> TooLarge:
        return self

    def toArrow(self) -> None:
        raise SparkRuntimeException(self.message)


def test_a_batch_that_exceeds_sparks_limit_of_results_is_left_to_the_tasks(
    spark: SparkSession, tmp_path: Path
) -> None:
    stage, small = Stage(str(tmp_path), 1, 1, 0, RAW), SmallBatches()
    small.note([])
    limit = "Total size of serialized results of 4 tasks is bigger than spark.driver.maxResultSize (1 GiB)"
    given: Any = TooLarge(limit)
    assert small.staged(LOCAL, given, stage) is None
    small = SmallBatches()
    small.note([])
    given = TooLarge("division by zero")
    with pytest.raises(SparkRuntimeException, match="division by zero"):
        small.staged(LOCAL, given, stage)


@pytest.mark.parametrize(
    ("sizes", "is_collected"),
    [([(4096, 1 << 20)], True), ([(2048, 10), (2049, 10)], False), ([(1, (1 << 20) + 1)], False)],
)
def test_the_batch_before_is_large_by_its_rows_or_by_its_bytes(
    spark: SparkSession, tmp_path: Path, sizes: list[tuple[int, int]], is_collected: bool
) -> None:
    small = SmallBatches()
    small.note([Staged(0, 0, 0, 0, length, records, 0, 0, 0) for records, length in sizes])
    given: Any = TooLarge("collected")
    with pytest.raises(SparkRuntimeException, match="collected") if is_collected else nullcontext():
        assert small.staged(LOCAL, given, Stage(str(tmp_path), 1, 1, 0, RAW)) is None
