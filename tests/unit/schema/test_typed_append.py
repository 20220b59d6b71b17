"""A typed changelog takes rows of its columns, each with a value that its column can hold, and no others."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfold import Changelog, restore
from keyfold.checkpoints.log import ingest
from keyfold.checkpoints.log.typed_rows import DELETED
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import BadRecord, SchemaMismatch
from keyfold.statestore.schema.columns import Columns
from support.changelogs import BY_HAND
from support.key_kinds import KINDS

SECRET = "hunter2"
UTC = dt.timezone.utc


def field(name: str, kind: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": True, "metadata": {}}


def columns_of(keys: tuple[str, ...], **kinds: Any) -> Columns:
    return Columns({"type": "struct", "fields": [field(*pair) for pair in kinds.items()]}, keys)


COLUMNS = columns_of(
    ("k",),
    k="long",
    v="double",
    n="integer",
    t="timestamp",
    local="timestamp_ntz",
    s="string",
    b="binary",
    d="decimal(5,2)",
    day="date",
    flag="boolean",
    tags={"type": "array", "elementType": "short", "containsNull": True},
    at={"type": "struct", "fields": [field("x", "float"), field("y", "string")]},
)
TWO_KEYS = columns_of(("a", "b"), a="long", b="string", v="long")


def opened(path: Path, columns: Columns = COLUMNS) -> Changelog:
    return Changelog.open(path, columns=columns, config=BY_HAND)


# -- what is taken -------------------------------------------------------------------------------------------


def test_columns_may_be_left_out_and_come_in_any_order(tmp_path: Path) -> None:
    with opened(tmp_path / "log") as log:
        log.append({"s": ["a", "b"], "k": [1, 2]})
        log.append({"k": [2, 3], "s": ["gone", "c"], "_deleted": [True, None]})
        nothing = dict.fromkeys(COLUMNS.value_type.names)
        assert log.get(1) == {**nothing, "s": "a"}
        assert log.get(2) is None
        assert log.get(3) == {**nothing, "s": "c"}
    assert set(restore(tmp_path / "log").to_dict()) == {1, 3}
    assert verify(tmp_path / "log").sound


#: Column, what may be given, and what it is then.
SAFE: list[tuple[str, pa.Array, Any]] = [
    ("v", pa.array([7], pa.int8()), 7.0),
    ("v", pa.array([0.5], pa.float32()), 0.5),
    ("v", pa.array([1 << 53], pa.int64()), float(1 << 53)),
    ("n", pa.array([-7], pa.int64()), -7),
    ("n", pa.array([3.0], pa.float64()), 3),
    ("n", pa.array([True]).cast(pa.uint8()), 1),
    ("t", pa.array([5], pa.timestamp("ms", "Europe/Berlin")), dt.datetime(1970, 1, 1, 0, 0, 0, 5000, UTC)),
    ("t", pa.array([5000], pa.timestamp("ns", "UTC")), dt.datetime(1970, 1, 1, 0, 0, 0, 5, UTC)),
    ("local", pa.array([1], pa.timestamp("s")), dt.datetime(1970, 1, 1, 0, 0, 1)),  # noqa: DTZ001
    ("local", pa.array([1], pa.date32()), dt.datetime(1970, 1, 2)),  # noqa: DTZ001
    ("s", pa.array(["x"], pa.large_string()), "x"),
    ("s", pa.array(["x"], pa.string_view()), "x"),
    ("s", pa.array(["x"]).dictionary_encode(), "x"),
    ("b", pa.array([b"x"], pa.binary(1)), b"x"),
    ("b", pa.array([b"x"], pa.large_binary()), b"x"),
    ("d", pa.array([Decimal("1.5")], pa.decimal128(2, 1)), Decimal("1.50")),
    ("d", pa.array([Decimal("1.50000")], pa.decimal128(38, 5)), Decimal("1.50")),
    ("d", pa.array([12], pa.int16()), Decimal("12.00")),
    ("d", pa.array([1.1]), Decimal("1.10")),
    ("v", pa.array([Decimal("0.1")]), 0.1),
    ("day", pa.array([86_400_000], pa.date64()), dt.date(1970, 1, 2)),
    ("flag", pa.nulls(1), None),
    ("tags", pa.array([[1, None]], pa.large_list(pa.int64())), [1, None]),
    ("tags", pa.array([[1, 2]], pa.list_(pa.int32(), 2)), [1, 2]),
    ("tags", pa.array([[]], pa.list_(pa.int32(), 0)), []),
    ("tags", pa.array([[1, 2]], pa.list_(pa.dictionary(pa.int8(), pa.int16()))), [1, 2]),
    ("at", pa.array([{"y": "b", "x": 1.5}], pa.struct({"y": pa.dictionary(pa.int8(), pa.string()),
                                                       "x": pa.float64()})), {"x": 1.5, "y": "b"}),
    ("at", pa.array([{"y": "b", "x": 1.5}], pa.struct({"y": pa.string(), "x": pa.float64()})),
     {"x": 1.5, "y": "b"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given_", "value"), SAFE, ids=lambda x: str(getattr(x, "type", x)))
def test_another_type_is_taken_where_it_keeps_the_value(name: str, given_: pa.Array, value: Any) -> None:
    (batch,) = ingest.normalize({"k": [1], name: given_}, 0, COLUMNS)
    assert batch.column("value").type.equals(pa.struct([COLUMNS.value_type.field(name)]))
    assert batch.column("value").to_pylist() == [{name: value}]


def test_other_libraries_tables_are_taken(tmp_path: Path) -> None:
    when = [dt.datetime(2020, 1, 1, tzinfo=UTC), None]
    with opened(tmp_path / "log") as log:
        log.append(pl.DataFrame({"k": [1, 2], "t": when, "s": ["a", None], "tags": [[1], None]}))
        log.append(pd.DataFrame({"k": [3, 4], "t": pd.to_datetime(when), "s": ["a", None]}))
        log.append([{"k": 5, "t": when[0], "s": "a"}, {"k": 6, "t": None, "s": None}])
        found = {key: (value["t"], value["s"]) for key, value in log.store().all()}
    assert found == {key: (when[0], "a") if key % 2 else (None, None) for key in range(1, 7)}


def test_what_read_gives_can_be_appended_to_another_changelog(tmp_path: Path) -> None:
    with opened(tmp_path / "log") as log, opened(tmp_path / "copy") as copy:
        log.append({"k": [1, 2, 1], "s": ["a", "b", None], "_deleted": [False, False, True]})
        for batch in log.read(0):
            copy.append(batch.drop_columns(["offset"]))
        assert dict(copy.store().all()) == dict(log.store().all())
        times = [pa.Table.from_batches(of.read(0))["timestamp"] for of in (log, copy)]
        assert times[0] == times[1]


# -- what is refused -----------------------------------------------------------------------------------------

#: Column, values of which the last one is wrong, and whether a row or only the column is named.
WRONG: dict[str, tuple[str, pa.Array, bool]] = {
    "text for a number": ("v", pa.array(["1"]), False),
    "a number for text": ("s", pa.array([1]), False),
    "bytes for text": ("s", pa.array([b"a"]), False),
    "text for bytes": ("b", pa.array(["a"]), False),
    "a number for a boolean": ("flag", pa.array([1]), False),
    "a boolean for a number": ("n", pa.array([True]), False),
    "a number for a time": ("t", pa.array([1]), False),
    "a number for a decimal key": ("k", pa.array(["1"]), False),
    "a naive time for a moment": ("t", pa.array([1], pa.timestamp("us")), False),
    "a moment for a naive time": ("local", pa.array([1], pa.timestamp("us", "UTC")), False),
    "a moment for a date": ("day", pa.array([1], pa.timestamp("us", "UTC")), False),
    "a date for a moment": ("t", pa.array([1], pa.date32()), False),
    "a list for a number": ("n", pa.array([[1]]), False),
    "a number for a list": ("tags", pa.array([1]), False),
    "a struct that lacks a field": ("at", pa.array([{"x": 1.0}]), False),
    "a struct with one field more": ("at", pa.array([{"x": 1.0, "y": "", "z": 1}]), False),
    "too large": ("n", pa.array([1, 1 << 31]), True),
    "too large for the key": ("k", pa.array([1, 1 << 63], pa.uint64()), True),
    "a fraction": ("n", pa.array([1.0, 1.5]), True),
    "not a number": ("n", pa.array([1.0, float("nan")]), True),
    "a whole number that no double is": ("v", pa.array([1, (1 << 53) + 1]), True),
    "more than microseconds": ("t", pa.array([1000, 1001], pa.timestamp("ns", "UTC")), True),
    "more than microseconds, naive": ("local", pa.array([1000, 1001], pa.timestamp("ns")), True),
    "too many seconds": ("t", pa.array([0, 1 << 62], pa.timestamp("s", "UTC")), True),
    "too many digits after the point": (
        "d", pa.array([Decimal("1.500"), Decimal("1.501")], pa.decimal128(9, 3)), True
    ),
    "too many digits before the point": ("d", pa.array([999, 1000]), True),
    "a number that is rounded to a decimal": ("d", pa.array([1.25, 1.255]), True),
    "a number too large for a float": (
        "at", pa.array([{"x": 0.1, "y": ""}, {"x": 1e39, "y": ""}]), True
    ),
    "a decimal that no double is": (
        "v", pa.array([Decimal("0.5"), Decimal("0.12345678901234567891")], pa.decimal128(38, 20)), True
    ),
    "too large within a list": ("tags", pa.array([[1], [None, 40_000]]), True),
    "too large within a struct": (
        "at", pa.array([{"x": 1, "y": ""}, {"x": (1 << 24) + 1, "y": ""}]), True
    ),
    "too large within fixed lists": ("tags", pa.array([[1], [40_000]], pa.list_(pa.int64(), 1)), True),
}  # fmt: skip


@pytest.mark.parametrize("before", [0, 1, 2, 5, 700])
@pytest.mark.parametrize("what", WRONG)
def test_a_value_that_would_change_is_refused_by_column_and_row(
    what: str, before: int, tmp_path: Path
) -> None:
    name, column, has_row = WRONG[what]
    column = pa.concat_arrays([*[column.slice(0, 1)] * before, column]) if has_row else column
    rows = {"k": list(range(len(column))), name: column}
    with pytest.raises(BadRecord) as refused:
        ingest.normalize(rows, 0, COLUMNS)
    assert f"column {name!r}" in refused.value.what.lower()
    assert refused.value.position == (f"row {len(column) - 1}" if has_row else None)
    assert refused.value.expected == str(COLUMNS.arrow_schema().field(name).type)
    assert refused.value.remedy


def test_a_null_in_a_key_column_is_refused_by_column_and_row(tmp_path: Path) -> None:
    with opened(tmp_path / "log", TWO_KEYS) as log:
        for rows in (
            {"a": [1, 2], "b": ["x", None]},
            {"a": [1, 2], "b": ["x", None], "_deleted": [True] * 2},
        ):
            with pytest.raises(BadRecord, match="key column 'b'") as refused:
                log.append(rows)
            assert refused.value.position == "row 1"


@pytest.mark.parametrize(
    "names", [["v"], ["b", "v"], ["a", "b", "other"], ["a", "b", "v", "v"], ["a", "a", "b"], ["A", "b"], []]
)
def test_a_table_of_other_columns_is_refused_and_says_which_are_expected(
    names: list[str], tmp_path: Path
) -> None:
    arrays = [pa.array(["1"] if name == "b" else [1]) for name in names]
    with opened(tmp_path / "log", TWO_KEYS) as log:
        with pytest.raises(BadRecord) as refused:
            log.append(pa.Table.from_arrays(arrays, names))
        assert "a, b" in str(refused.value.expected)
        assert log.end_offsets() == {0: 0}


#: Records as `read` gives them: key, value, and what the error names.
RECORDS: list[tuple[bytes, pa.Array, str]] = [
    (b"", pa.array([{"v": 1.5}]), "row 1, key, column 'k'"),
    (b"\x80" + b"\0" * 6, pa.array([{"v": 1.5}]), "row 1, key, column 'k'"),
    (b"\x80" + b"\0" * 8, pa.array([{"v": 1.5}]), "row 1, key, column 'k'"),
    (SECRET.encode(), pa.array([{"v": 1.5}]), "row 1, key, column 'k'"),
    (COLUMNS.encode_key(7), pa.array([{"n": 1 << 40}]), "column 'n'"),
    (COLUMNS.encode_key(7), pa.array([{"n": SECRET}]), "column 'n'"),
    (COLUMNS.encode_key(7), pa.array([{"other": 1}]), "other"),
    (COLUMNS.encode_key(7), pa.array([b"{}"]), "bytes"),
]


@pytest.mark.parametrize(("key", "value", "named"), RECORDS)
def test_a_record_whose_bytes_are_not_of_the_columns_is_refused(
    key: bytes, value: pa.Array, named: str, tmp_path: Path
) -> None:
    """One such record, and the whole state could not be read."""
    good = pa.nulls(1, value.type)
    records = {"key": [COLUMNS.encode_key(1), key], "value": pa.concat_arrays([good, value])}
    with opened(tmp_path / "log") as log:
        with pytest.raises(BadRecord) as refused:
            log.append(records)
        assert named.lower() in str(refused.value).lower()
        assert SECRET not in str(refused.value)
        assert log.end_offsets() == {0: 0}


def test_after_a_refusal_nothing_is_written_and_the_writer_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path / "log") as log:
        for name, column, _ in WRONG.values():
            with pytest.raises(BadRecord):
                log.append({"k": list(range(len(column))), name: column}, app_id="a", batch_id=0)
        assert log.end_offsets() == {0: 0}
        assert log.last_batch("a") is None
        log.append({"k": [1], "v": [1.5]}, app_id="a", batch_id=0)
    assert restore(tmp_path / "log").to_arrow().num_rows == 1
    assert list(tmp_path.glob("log/*/*.arrows")) != []


def test_the_row_is_that_of_the_whole_table_also_after_many() -> None:
    count = 150_000
    rows = {"k": range(count + 1), "s": pa.array([SECRET] * count + [None]), "n": [1] * count + [1 << 40]}
    with pytest.raises(BadRecord, match=rf"row {count}\b") as refused:
        ingest.normalize(rows, 0, COLUMNS)
    assert SECRET not in str(refused.value)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.sampled_from([0, 5, None, 1 << 31, -(1 << 40)]), min_size=1, max_size=30))
def test_the_first_value_that_does_not_fit_is_found_wherever_it_is(values: list[int | None]) -> None:
    first = next((i for i, value in enumerate(values) if value is not None and abs(value) > 5), None)
    rows = {"k": range(len(values)), "n": pa.array(values, pa.int64())}
    try:
        ingest.normalize(rows, 0, COLUMNS)
        found = None
    except BadRecord as refused:
        found = int(str(refused.position).removeprefix("row "))
    assert found == first


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_every_key_that_encode_key_gives_fits(data: st.DataObject) -> None:
    kind = data.draw(KINDS)
    of = columns_of(("k",), k=kind.json)
    keys = [of.encode_key({"k": data.draw(kind.values)}) for _ in range(3)]
    assert of.misfit(pa.array(keys, pa.binary())) is None


# -- and what got in before ----------------------------------------------------------------------------------


def _spoiled(root: Path, partitions: int, keys: list[bytes]) -> list[tuple[int, int]]:
    """Partition and offset of the records with a key of 3 bytes."""
    rows = {"key": keys, "value": pa.array([{"v": 1.0}] * len(keys))}
    with Changelog.open(root, partitions=partitions, columns=COLUMNS, config=BY_HAND) as log:
        log.append(rows)
        return [
            (number, offset)
            for number in range(partitions)
            for batch in log.read(number)
            for offset, key in zip(*(batch.column(c).to_pylist() for c in ("offset", "key")), strict=True)
            if len(key) == 3
        ]


@pytest.mark.parametrize("closed", [True, False])
def test_verify_names_partition_and_offset_of_keys_that_are_not_of_the_columns(
    closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "log"
    keys = [b"%03d" % n if n % 7 == 3 else COLUMNS.encode_key(n) for n in range(40)]
    with monkeypatch.context() as patched:
        patched.setattr(Columns, "misfit", lambda *_: None)
        if closed:
            spoiled = _spoiled(root, 3, keys)
        else:
            with Changelog.open(root, partitions=3, columns=COLUMNS, config=BY_HAND):
                spoiled = _spoiled(root, 3, keys)
                patched.undo()
                assert len(verify(root).damages) == len(spoiled)
    assert len(spoiled) == 6
    found = verify(root)
    named = [d.position.split(", ", 1)[1] for d in found.damages]
    assert named == [f"partition {number}, offset {offset}" for number, offset in spoiled]
    with pytest.raises(SchemaMismatch, match="keyfold verify"):
        restore(root).to_arrow()


def test_a_block_of_other_keys_is_told_in_a_few_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Columns, "misfit", lambda *_: None)
        assert len(_spoiled(tmp_path / "log", 1, [b"abc"] * 5_000)) == 5_000
    found = verify(tmp_path / "log").damages
    assert [d.position.partition(", ")[2] for d in found] == [
        *(f"partition 0, offset {n}" for n in range(10)),
        "partition 0, offset 10, and perhaps more of this block",
    ]


def test_nothing_of_a_deleted_value_is_written(tmp_path: Path) -> None:
    """Not even below the null, where Arrow could keep it."""
    with Changelog.open(tmp_path / "log", keys="k", config={"compression.type": "none"}) as log:
        log.append({"k": ["a", "b"], "v": ["kept", "secret"], DELETED: [False, True]})
        assert (log.get("a"), log.get("b")) == ({"v": "kept"}, None)
    files = [file.read_bytes() for file in (tmp_path / "log" / "0").iterdir()]
    assert not any(b"secret" in content for content in files)
