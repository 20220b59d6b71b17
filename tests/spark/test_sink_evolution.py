"""Columns that change while a `ChangelogSink` writes: what a reader sees, and what a batch becomes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from keyfold import Changelog, ChangelogSink
from keyfold.checkpoints.log.writer import Writer
from keyfold.checkpoints.manifest.identity import read_identity
from keyfold.sink.staging import Stage
from keyfold.statestore.errors import StorageFailed
from keyfold.statestore.files import LOCAL
from support.streams import pairs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def rows(spark: SparkSession, schema: str, *values: tuple[Any, ...]) -> DataFrame:
    return spark.createDataFrame([*values], schema).coalesce(1)


def names(log: Changelog) -> list[str]:
    """The value columns in `changelog.json`."""
    columns = read_identity(LOCAL, log.path).columns
    assert columns is not None
    return [field.name for field in columns.value_type]


def test_a_column_is_known_before_a_record_with_it_is_committed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And if the commit fails, a column without data is left, which the next attempt uses."""
    with ChangelogSink(tmp_path / "log", keys="k") as sink:
        sink(rows(spark, "k string, v long", ("a", 1)), 0)
        commit, seen = Writer.commit, []

        def watched(writer: Writer, *given: Any) -> Any:
            seen.append(names(sink.log))
            if len(seen) == 1:
                raise StorageFailed("The disk is full.", remedy="free some space")
            return commit(writer, *given)

        monkeypatch.setattr(Writer, "commit", watched)
        added = rows(spark, "k string, v long, w string", ("b", 2, "x"))
        with pytest.raises(StorageFailed):
            sink(added, 1)
        assert pairs(sink.log) == [(b"a", {"v": 1, "w": None})]
        sink(added, 1)
        assert seen == [["v", "w"]] * 2
        assert pairs(sink.log) == [(b"a", {"v": 1, "w": None}), (b"b", {"v": 2, "w": "x"})]


@pytest.mark.parametrize("codec", ["none", "lz4"])
@pytest.mark.parametrize("placement", ["tasks", "driver"])
def test_a_column_that_another_sink_adds_while_rows_are_staged_is_null(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: Any, codec: str
) -> None:
    """Both add one: each gets the other's, in the order of their commits."""
    path, config = tmp_path / "log", {"compression.type": codec}
    with (
        ChangelogSink(path, keys="k", config=config, placement=placement) as slow,
        ChangelogSink(path, keys="k", app_id="b") as fast,
    ):
        slow(rows(spark, "k string, v long", ("a", 1)), 0)
        staged: Callable[..., Any] = ChangelogSink._staged

        def overtaken(sink: ChangelogSink, records: DataFrame, stage: Stage) -> Any:
            done = staged(sink, records, stage)
            monkeypatch.undo()
            fast(rows(spark, "k string, v long, f double", ("b", 2, 0.5)), 0)
            return done

        monkeypatch.setattr(ChangelogSink, "_staged", overtaken)
        slow(rows(spark, "k string, v long, s string", ("c", 3, "x")), 1)
        assert names(slow.log) == ["v", "f", "s"]
        assert pairs(slow.log) == [
            (b"a", {"v": 1, "f": None, "s": None}),
            (b"b", {"v": 2, "f": 0.5, "s": None}),
            (b"c", {"v": 3, "f": None, "s": "x"}),
        ]


def test_a_batch_may_leave_columns_out_and_have_narrower_ones(spark: SparkSession, tmp_path: Path) -> None:
    """As after a deploy that was rolled back."""
    with ChangelogSink(tmp_path / "log", keys="k") as sink:
        sink(rows(spark, "k string, v int, s struct<x:int>, n array<int>", ("a", 1, (1,), [1])), 0)
        wide = "k string, v long, s struct<x:long,y:string>, n array<long>, w string"
        sink(rows(spark, wide, ("b", 1 << 40, (2, "y"), [1 << 40, None], "w")), 1)
        sink(rows(spark, "k string, v int, s struct<x:int>", ("c", 3, (3,))), 2)
        sink(rows(spark, "k string", ("d",)), 3)
        assert pairs(sink.log) == [
            (b"a", {"v": 1, "s": {"x": 1, "y": None}, "n": [1], "w": None}),
            (b"b", {"v": 1 << 40, "s": {"x": 2, "y": "y"}, "n": [1 << 40, None], "w": "w"}),
            (b"c", {"v": 3, "s": {"x": 3, "y": None}, "n": None, "w": None}),
            (b"d", {"v": None, "s": None, "n": None, "w": None}),
        ]
        assert len(sink.log.state.commits) == 4
