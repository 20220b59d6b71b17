"""Rows of typed columns that tasks write aside: the log gets every value exactly, whichever Arrow types Spark
has for it.
"""

from __future__ import annotations

import datetime as dt
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspark")

from keyfold import Changelog
from keyfold.checkpoints.log.writer import Batch
from keyfold.sink.arrow_rows import NO_KEY, NOT_UTF8, Problem, Shape, problem_of
from keyfold.sink.staging import Stage, Staged, blocks_by_partition, refused_row
from keyfold.statestore import filenames
from keyfold.statestore.files import LOCAL
from keyfold.statestore.schema.columns import Columns
from support import key_kinds
from support.key_kinds import Kind, field
from support.typed_golden import array, exact, map_of

TIMES = key_kinds.NAIVE.map(lambda time: time.replace(tzinfo=dt.timezone.utc))
MAPS = st.dictionaries(key_kinds.TEXTS, st.none() | TIMES, max_size=3).map(lambda made: list(made.items()))
VARIANTS = st.fixed_dictionaries({"value": st.binary(max_size=5), "metadata": st.binary(max_size=5)})
#: A struct whose fields are never null, but it may be.
STRICT = {"type": "struct", "fields": [
    field("i", "integer", False), field("t", "timestamp", False), field("s", {"type": "struct", "fields": [
        field("b", "string", False)]}, False),
]}  # fmt: skip
STRICTS = st.fixed_dictionaries(
    {"i": st.integers(0, 9), "t": TIMES, "s": st.fixed_dictionaries({"b": key_kinds.TEXTS})}
)
STRICT_MAPS = st.dictionaries(st.integers(0, 9), st.none() | STRICTS, max_size=3).map(
    lambda d: list(d.items())
)
KINDS = key_kinds.KINDS | st.sampled_from(
    [
        Kind(map_of("string", "timestamp"), MAPS),
        Kind("variant", VARIANTS),
        Kind("void", st.none()),
        Kind(STRICT, STRICTS),
        Kind(array(STRICT), st.lists(st.none() | STRICTS, max_size=3)),
        Kind(map_of("integer", STRICT), STRICT_MAPS),
    ]
)  # fmt: skip


def as_spark_may_have_it(kind: pa.DataType, zone: str, large: bool) -> pa.DataType:
    """The type with 64-bit offsets, or timestamps in the zone of the session."""

    def inner(of: pa.Field) -> pa.Field:
        return of.with_type(as_spark_may_have_it(of.type, zone, large))

    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp("us", zone)
    if pa.types.is_string(kind) and large:
        return pa.large_string()
    if pa.types.is_binary(kind) and large:
        return pa.large_binary()
    if pa.types.is_map(kind):
        return pa.map_(inner(kind.key_field), inner(kind.item_field))
    if pa.types.is_list(kind):
        return pa.list_(inner(kind.value_field))
    return pa.struct([inner(of) for of in kind]) if pa.types.is_struct(kind) else kind


def columns_of(*kinds: Any) -> Columns:
    """A key column `k` of strings, and value columns `v0`, `v1`, …"""
    fields = [field("k", "string"), *(field(f"v{i}", kind) for i, kind in enumerate(kinds))]
    return Columns({"type": "struct", "fields": fields}, ("k",))


def shape_of(columns: Columns, values: int | None = None) -> Shape:
    """Rows with the first `values` of the value columns, all by default."""
    names = tuple(of.name for of in columns.value_type)
    return Shape(("k",), names if values is None else names[:values], columns.value_type)


def rows_of(
    keys: list[str], values: list[pa.Array], deletes: list[bool | None] | None = None
) -> pa.RecordBatch:
    rows = {"key_0": pa.array(keys, pa.string()), **{f"value_{i}": v for i, v in enumerate(values)}}
    if deletes is not None:
        rows["deletes"] = pa.array(deletes, pa.bool_())
    return pa.RecordBatch.from_pydict(rows)


def commit(log: Changelog, stage: Stage, staged: list[Staged]) -> None:
    parts = blocks_by_partition(LOCAL, stage, staged, lambda: log.engine.identity.value_type)
    log.engine.writer.commit(parts, Batch("test", stage.batch))


def decoded(log: Changelog, partition: int) -> list[dict[str, Any]]:
    columns = log.columns
    assert columns is not None
    rows: list[dict[str, Any]] = []
    for batch in log.read(partition):
        batch.validate(full=True)
        assert batch.column("value").type == columns.value_type
        rows += columns.decode(batch.column("key"), batch.column("value")).to_pylist()
    return rows


@given(
    kinds=st.lists(KINDS, max_size=4),
    added=st.lists(KINDS, max_size=2),
    later=st.lists(KINDS, max_size=1),
    zone=st.sampled_from(["UTC", "America/New_York"]),
    large=st.booleans(),
    codec=st.sampled_from([None, "lz4", "zstd"]),
    deletes=st.booleans(),
    data=st.data(),
)
def test_the_log_has_every_value_exactly(
    kinds: list[Kind],
    added: list[Kind],
    later: list[Kind],
    zone: str,
    large: bool,
    codec: str | None,
    deletes: bool,
    data: st.DataObject,
) -> None:
    """`added`: columns of the changelog that the rows lack; `later`: those that it gets meanwhile."""
    count = data.draw(st.integers(1, 12))
    keys = data.draw(st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=count, max_size=count))
    gone = [deletes and flag for flag in data.draw(st.lists(st.booleans(), min_size=count, max_size=count))]
    made, expected = [], []
    for kind in kinds:
        values = data.draw(st.lists(st.none() | kind.values, min_size=count, max_size=count))
        column = pa.array(values, kind.arrow)
        expected.append(column.to_pylist())
        made.append(column.cast(as_spark_may_have_it(kind.arrow, zone, large)))
    columns = columns_of(*(kind.json for kind in kinds + added))
    after = columns_of(*(kind.json for kind in kinds + added + later))
    stage = Stage("", 0, 2, 5, shape_of(columns, len(kinds)))
    with tempfile.TemporaryDirectory() as directory:
        stage = Stage(directory, 0, 2, 5, stage.shape, codec)
        rows = rows_of(keys, made, [flag or None for flag in gone] if deletes else None)
        split = data.draw(st.integers(0, count))
        staged = stage.run(LOCAL, [rows.slice(0, split), rows.slice(split)], 0, 0)
        assert refused_row(staged, stage) is None
        with Changelog.open(Path(directory) / "log", partitions=2, columns=columns) as log:
            log.engine.set_columns(columns.accepts(after))
            columns_of_values = [of.name for of in after.value_type]
            commit(log, stage, staged)
            for p in range(2):
                wanted = [
                    {"k": key} | dict.fromkeys(columns_of_values, None)
                    | {f"v{i}": values[row] for i, values in enumerate(expected) if not gone[row]}
                    for row, key in enumerate(keys) if log.partition(key.encode()) == p
                ]  # fmt: skip
                assert exact(decoded(log, p)) == exact(wanted)
            assert sum(s.tombstones for part in log.state.partitions for s in part.segments) == sum(gone)


@pytest.mark.parametrize("partitions", [1, 3])
def test_nothing_of_a_row_that_deletes_stays_but_its_key(tmp_path: Path, partitions: int) -> None:
    columns = columns_of("string", {"type": "array", "elementType": "string", "containsNull": True})
    stage = Stage(str(tmp_path), 0, partitions, 0, shape_of(columns))
    texts = [f"secret-{i}" if i % 2 else f"known-{i}" for i in range(20)]
    rows = rows_of([f"key-{i}" for i in range(20)], [pa.array(texts), pa.array([[t] for t in texts])],
                   [i % 2 == 1 for i in range(20)])  # fmt: skip
    stage.run(LOCAL, [rows], 0, 0)
    written = filenames.staged(tmp_path, 0, 0, 0).read_bytes()
    assert written.count(b"known-") >= 20
    assert b"secret-" not in written


@pytest.mark.parametrize("deletes", [None, [True, False, None]])
def test_a_value_without_columns_is_still_no_tombstone(
    tmp_path: Path, deletes: list[bool | None] | None
) -> None:
    columns = columns_of()
    stage = Stage(str(tmp_path), 0, 2, 0, shape_of(columns))
    with Changelog.open(tmp_path / "log", partitions=2, columns=columns) as log:
        commit(log, stage, stage.run(LOCAL, [rows_of(["a", "b", "c"], [], deletes)], 0, 0))
        values = {
            key: value
            for p in range(2)
            for batch in log.read(p)
            for key, value in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True)
        }
    assert values == {b"a": {} if deletes is None else None, b"b": {}, b"c": {}}


# -- rows that cannot be written -----------------------------------------------------------------------------

WRONG = pa.array([b"\xff"]).view(pa.string())


def with_wrong_text(kind: Any, row: int, rows: int) -> pa.Array:
    """A column whose only string that is not UTF-8 is in this row."""
    if kind == "string":
        return pa.concat_arrays(
            [pa.array(["é"] * row, pa.string()), WRONG, pa.array([None] * (rows - row - 1), pa.string())]
        )
    if kind == "array":
        inner = with_wrong_text("string", 2 * row + 1, 2 * rows)
        return pa.ListArray.from_arrays(pa.array(range(0, 2 * rows + 1, 2), pa.int32()), inner)
    if kind == "map":
        inner = with_wrong_text("string", row, rows)
        places, numbers = pa.array(range(rows + 1), pa.int32()), pa.array(range(rows))
        # A null is no key of a map.
        return pa.MapArray.from_arrays(places, numbers, inner)
    return pa.StructArray.from_arrays(
        [pa.array(range(rows)), with_wrong_text("array", row, rows)], names=["n", "s"]
    )


@pytest.mark.parametrize("kind", ["string", "array", "map", "struct"])
@pytest.mark.parametrize("row", [0, 3, 6])
@pytest.mark.parametrize("start", [0, 2])
def test_a_string_that_is_not_utf8_is_found_in_its_row_and_column(kind: str, row: int, start: int) -> None:
    column = with_wrong_text(kind, row, 7)
    rows = rows_of(list("abcdefg"), [pa.array(["x"] * 7), column]).slice(start)
    assert problem_of(rows) == (Problem(NOT_UTF8, row - start, 2) if row >= start else None)
    for gone in (True, False):
        deletes = [gone if i == row else None for i in range(7)]
        found = problem_of(rows_of(list("abcdefg"), [pa.array(["x"] * 7), column], deletes))
        assert found == (None if gone else Problem(NOT_UTF8, row, 2))


def test_the_first_row_with_wrong_text_is_named_with_its_column(tmp_path: Path) -> None:
    columns = columns_of("string", "string", "string")
    stage = Stage(str(tmp_path), 7, 2, 0, shape_of(columns))
    values = [with_wrong_text("string", row, 6) for row in (5, 3, 4)]
    good = rows_of(["a"], [pa.array(["x"])] * 3)
    staged = stage.run(LOCAL, [good, rows_of(list("abcdef"), values)], 2, 0)
    error = refused_row(staged, stage)
    assert error is not None
    assert error.what == "Column 'v1' has a string that is not valid UTF-8."
    assert error.position == "batch 7, Spark partition 2, row 4"
    assert "make_valid_utf8" in str(error.remedy)


def test_a_key_with_wrong_text_is_refused_also_where_it_deletes(tmp_path: Path) -> None:
    rows = pa.RecordBatch.from_pydict({"key_0": WRONG, "value_0": pa.array([1]), "deletes": pa.array([True])})
    assert problem_of(rows) == Problem(NOT_UTF8, 0, 0)
    missing = pa.RecordBatch.from_pydict({"key_0": pa.array(["a", None]), "key_1": pa.array([None, 1])})
    assert problem_of(missing) == Problem(NO_KEY, 0)


def test_rows_in_another_order_are_named_where_they_were() -> None:
    """After a sort, `row` has Spark's partition and row before it."""
    columns = columns_of("string")
    stage = Stage("", 1, 2, 0, shape_of(columns))
    rows = rows_of(list("ab"), [with_wrong_text("string", 1, 2)])
    rows = rows.append_column("row", pa.array([0, (3 << 33) + 12]))
    error = refused_row(stage.run(LOCAL, [rows], 0, 0), stage)
    assert error is not None
    assert error.position == "batch 1, Spark partition 3, row 12"


def test_large_rows_make_blocks_of_about_two_mebibytes_by_column(tmp_path: Path) -> None:
    columns = columns_of("string", "double")
    stage = Stage(str(tmp_path), 0, 1, 0, shape_of(columns))
    rows = rows_of(
        [f"{i}" for i in range(20_000)], [pa.array(["x" * 500] * 20_000), pa.array(np.ones(20_000))]
    )
    staged = stage.run(LOCAL, [rows], 0, 0)
    assert sum(s.records for s in staged) == 20_000
    assert 4 <= len(staged) <= 6
