"""What the modes of the data source give in a batch, and the seed of a stream: columns, types, rows."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from keyfold import Changelog, restore
from keyfold.statestore.errors import CompactedAway, ConfigError, NotAChangelog
from keyfold.statestore.schema.columns import Columns
from keyfold.streaming.rows import Rows, arrow_schema
from keyfold.streaming.source import KeyfoldSource
from support.source import QUIET, TYPED, Driver, clean, log_rows, read_batch, rows_of, table

UTC = datetime.timezone.utc
SEEN = datetime.datetime(2013, 1, 31, 23, 59, 59, 123456, tzinfo=UTC)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "words"


@pytest.fixture
def typed(path: Path) -> Path:
    with Changelog.open(path, partitions=2, columns=TYPED, config=QUIET) as log:
        first = {"word": "ä", "n": 1, "price": Decimal("1.50"), "tags": ["a", None], "seen": SEEN}
        log.append(pa.Table.from_pylist([first, {"word": "b", "n": 2}], TYPED.arrow_schema()))
        log.append(
            {
                "word": ["b", "c"],
                "n": [None, 9007199254740993],
                "price": [None, Decimal("-0.01")],
                "_deleted": [True, False],
            }
        )
    return path


def test_the_state_of_a_typed_changelog_has_the_columns_that_were_written(typed: Path) -> None:
    rows = {row["word"]: row for row in read_batch(typed)}
    assert rows == {
        "ä": {"word": "ä", "n": 1, "price": Decimal("1.50"), "tags": ["a", None], "seen": SEEN},
        "c": {"word": "c", "n": 9007199254740993, "price": Decimal("-0.01"), "tags": None, "seen": None},
    }


def test_changes_of_a_typed_changelog_say_what_was_deleted(typed: Path) -> None:
    rows = read_batch(typed, mode="changes")
    assert [(r["_partition"], r["_offset"]) for r in rows] == sorted(
        (r["_partition"], r["_offset"]) for r in rows
    )
    by_word = {(row["word"], row["_deleted"]): row for row in rows}
    assert set(by_word) == {("ä", False), ("b", False), ("b", True), ("c", False)}
    deleted = by_word["b", True]
    assert [deleted[name] for name in ("n", "price", "tags", "seen")] == [None] * 4
    assert by_word["c", False]["n"] == 9007199254740993


def test_the_log_has_the_columns_of_kafka(path: Path) -> None:
    time = datetime.datetime(2020, 5, 17, 1, 2, 3, 4000, tzinfo=UTC)
    records = pa.table(
        {
            "key": pa.array([b"k", b"k"]),
            "value": pa.array([b"v", None], pa.binary()),
            "timestamp": pa.array([time, time], pa.timestamp("ms", "UTC")),
            "headers": pa.array([[{"key": "h", "value": b"\x00"}, {"key": "e", "value": None}], None]),
        }
    )
    with Changelog.open(path, config=QUIET) as log:
        log.append(records)
    first = {
        "key": b"k", "value": b"v", "topic": "words", "partition": 0, "offset": 0, "timestamp": time,
        "timestampType": 0,
    }  # fmt: skip
    second = {**first, "value": None, "offset": 1}
    assert read_batch(path, mode="log") == [first, second]
    headers = [{"key": "h", "value": b"\x00"}, {"key": "e", "value": None}]
    expected = [{**first, "headers": headers}, {**second, "headers": None}]
    assert read_batch(path, mode="log", includeHeaders="true") == expected


pairs = st.tuples(st.sampled_from("abcdefgh"), st.one_of(st.none(), st.text(max_size=3)))


@given(
    commits=st.lists(st.lists(pairs, max_size=6), max_size=6),
    at=st.integers(0, 6),
    partitions=st.integers(1, 3),
)
def test_every_mode_agrees_with_a_dict(
    commits: list[list[tuple[str, str | None]]],
    at: int,
    partitions: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("modes") / "log"
    state: dict[bytes, bytes] = {}
    states = [dict(state)]
    changes: list[tuple[bytes, bytes | None]] = []
    with Changelog.open(path, partitions=partitions, config=QUIET) as log:
        for rows in commits:
            log.append(table(*rows))
            for key, value in ((k.encode(), None if v is None else v.encode()) for k, v in rows):
                changes.append((key, value))
                state.pop(key, None) if value is None else state.update({key: value})
            states.append(dict(state))
        assert {r["key"]: r["value"] for r in read_batch(path)} == state
        if 1 <= at < len(states):
            assert {r["key"]: r["value"] for r in read_batch(path, at=str(at))} == states[at]
        records = read_batch(path, mode="log")
        assert [(r["partition"], r["offset"], r["key"], r["value"]) for r in records] == log_rows(log)
        seen = [(r["key"], r["value"], r["_deleted"]) for r in read_batch(path, mode="changes")]
        assert sorted(seen, key=repr) == sorted(((k, v, v is None) for k, v in changes), key=repr)
        for key in {k for k, _ in changes}:
            assert [v for k, v, _ in seen if k == key] == [v for k, v in changes if k == key]


# -- points in time -------------------------------------------------------------------------------------


@pytest.fixture
def folded(path: Path) -> Path:
    """Four commits, of which the second is anchored and the others are folded away."""
    with Changelog.open(path, config=QUIET) as log:
        for i in range(2):
            log.append(table(("a", str(i)), (f"b{i}", "x")))
        log.anchor("second")
        for i in range(2, 4):
            log.append(table(("a", str(i)), (f"b{i}", "x")))
        clean(log)
    return path


def test_the_state_at_an_anchor_is_exact_after_compaction(folded: Path) -> None:
    expected = {b"a": b"1", b"b0": b"x", b"b1": b"x"}
    for at in ("second", "2"):
        assert {r["key"]: r["value"] for r in read_batch(folded, at=at)} == expected


def test_a_state_that_was_folded_away_is_refused_with_what_is_left(folded: Path) -> None:
    with pytest.raises(CompactedAway, match="anchors second"):
        read_batch(folded, at="3")
    with pytest.raises(CompactedAway, match="no longer exists"):
        read_batch(folded, endOffsets="3")


@pytest.mark.parametrize(("at", "message"), [("99", "1 to 4"), ("nobody", "second")])
def test_a_point_that_never_was_is_refused_with_those_that_are(folded: Path, at: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_batch(folded, at=at)


def test_end_offsets_give_the_state_that_restore_sees(folded: Path) -> None:
    state = restore(folded, at="second")
    ends = ",".join(str(end) for end in state.ends)
    assert {r["key"]: r["value"] for r in read_batch(folded, endOffsets=ends)} == state.to_dict()


@pytest.mark.parametrize("ends", ["1,2", "99"])
def test_end_offsets_that_no_commit_had_are_refused(folded: Path, ends: str) -> None:
    with pytest.raises(ConfigError, match="Invalid end offsets"):
        read_batch(folded, endOffsets=ends)


@pytest.mark.parametrize("mode", ["state", "log", "changes"])
def test_partitions_can_be_chosen(path: Path, mode: str) -> None:
    with Changelog.open(path, partitions=3, config=QUIET) as log:
        log.append(table(*((f"k{i}", "x") for i in range(30))))
        expected = {row[2] for row in log_rows(log) if row[0] in (0, 2)}
    assert {row["key"] for row in read_batch(path, mode=mode, partitions="2,0")} == expected
    with pytest.raises(ConfigError, match=r"Partition -?[0-9]+ does not exist"):
        read_batch(path, mode=mode, partitions="3")


def test_a_batch_can_be_of_a_range(path: Path) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(table(*((f"k{i}", "x") for i in range(30))))
        expected = [row[:2] for row in log_rows(log) if 3 <= row[1] < 7]
        low, high = (json.dumps({"keyfold": log.identity.uuid, "offsets": {"0": o, "1": o}}) for o in (3, 7))
        rows = read_batch(path, mode="log", startingOffsets=low, endingOffsets=high)
        assert [(r["partition"], r["offset"]) for r in rows] == expected
        beyond = json.dumps({"keyfold": log.identity.uuid, "offsets": {"0": 3, "1": 99}})
        with pytest.raises(ConfigError, match="ends before"):
            read_batch(path, mode="log", endingOffsets=beyond)
        assert read_batch(path, mode="log", startingOffsets="latest") == []


# -- columns --------------------------------------------------------------------------------------------


def test_names_that_the_changes_need_are_refused(path: Path) -> None:
    fields: list[dict[str, object]] = [
        {"name": name, "type": "string", "nullable": True, "metadata": {}} for name in ("k", "_OFFSET", "v")
    ]
    columns = Columns({"type": "struct", "fields": fields}, ("k",))
    Changelog.open(path, columns=columns, config=QUIET).close()
    with pytest.raises(ConfigError, match=r"_OFFSET(.|\n)*\"log\""):
        read_batch(path, mode="changes")
    assert read_batch(path) == read_batch(path, mode="log") == []


def test_a_schema_of_the_user_has_to_fit_the_changelog_s(typed: Path) -> None:
    source = KeyfoldSource({"path": str(typed)})
    own = source.schema()
    strict = T.StructType([T.StructField(f.name, f.dataType, f.name != "word") for f in own])
    reader = KeyfoldSource({"path": str(typed)}).reader(strict)
    assert len(rows_of(reader, reader.partitions())) == 2
    for wrong in (
        T.StructType([*own.fields, T.StructField("more", T.DateType())]),
        T.StructType([*own.fields, own.fields[0]]),
        T.StructType([*own.fields[:-1], T.StructField("seen", T.DateType())]),
    ):
        with pytest.raises(ConfigError, match="schema"):
            KeyfoldSource({"path": str(typed)}).reader(wrong)


def test_batches_have_the_arrow_types_that_spark_compares_with(typed: Path) -> None:
    for mode in ("state", "changes", "log"):
        source = KeyfoldSource({"path": str(typed), "mode": mode})
        schema = source.schema()
        reader = source.reader(schema)
        for piece in reader.partitions():
            for batch in reader.read(piece):
                assert batch.schema.equals(to_arrow_schema(schema, timezone="UTC"))


NESTED = T.StructType(
    [
        T.StructField("boolean", T.BooleanType()),
        *(T.StructField(t.typeName(), t) for t in (T.ByteType(), T.ShortType(), T.IntegerType())),
        *(T.StructField(t.typeName(), t) for t in (T.LongType(), T.FloatType(), T.DoubleType())),
        *(T.StructField(t.typeName(), t) for t in (T.StringType(), T.BinaryType())),
        *(T.StructField(t.typeName(), t) for t in (T.DateType(), T.TimestampType(), T.TimestampNTZType())),
        T.StructField("decimal", T.DecimalType(38, 18), nullable=False),
        T.StructField("void", T.NullType()),
        T.StructField("collated", T.StringType("UTF8_LCASE")),
        T.StructField("array", T.ArrayType(T.ArrayType(T.DecimalType(5, 5), False), True)),
        T.StructField("map", T.MapType(T.StringType(), T.MapType(T.IntegerType(), T.TimestampType(), False))),
        T.StructField("struct", T.StructType().add("a", T.DateType(), False).add("b", T.StringType())),
    ]
)  # fmt: skip


def test_arrow_types_are_those_of_spark() -> None:
    assert arrow_schema(NESTED).equals(to_arrow_schema(NESTED, timezone="UTC"))


def test_a_typed_schema_comes_back_nullable_and_otherwise_the_same() -> None:
    columns = Columns(NESTED.jsonValue(), ("integer",))
    schema = Rows("state", columns, "t", False).schema(Path("t"))
    assert [(f.name, f.dataType) for f in schema] == [(f.name, f.dataType) for f in NESTED]
    assert all(f.nullable for f in schema)


def test_a_column_that_is_added_later_does_not_change_a_dataframe(typed: Path) -> None:
    source = KeyfoldSource({"path": str(typed)})
    schema = source.schema()
    added = {"name": "new", "type": "long", "nullable": True, "metadata": {}}
    fields: dict[str, Any] = {"type": "struct", "fields": [*TYPED.schema_json["fields"], added]}
    wider = TYPED.accepts(Columns(fields, TYPED.keys))
    with Changelog.open(typed, config=QUIET) as log:
        log.engine.set_columns(wider)
    reader = source.reader(schema)
    assert {row["word"] for row in rows_of(reader, reader.partitions())} == {"ä", "c"}
    assert [f.name for f in KeyfoldSource({"path": str(typed)}).schema()][-1] == "new"


@pytest.mark.parametrize("made", [False, True])
def test_a_path_without_a_changelog_is_refused(tmp_path: Path, made: bool) -> None:
    path = tmp_path / "nothing"
    if made:
        path.mkdir()
    with pytest.raises(NotAChangelog, match=str(path)):
        KeyfoldSource({"path": str(path)}).schema()


# -- seeds ----------------------------------------------------------------------------------------------


def seeds(query: Driver) -> list[dict[bytes, bytes]]:
    return [{r["key"]: r["value"] for r in rows} for rows in query.triggers()]


def test_a_seed_gives_the_state_of_its_commit_once(folded: Path) -> None:
    query = Driver(folded, {"mode": "state", "at": "2"})
    assert seeds(query) == [{b"a": b"1", b"b0": b"x", b"b1": b"x"}]
    with Changelog.open(folded, config=QUIET) as log:
        log.append(table(("c", "1")))
        assert seeds(query) == []
        query.start()
        assert seeds(query) == []


def test_a_seed_that_crashed_in_its_batch_is_given_again_as_it_was_planned(folded: Path) -> None:
    query = Driver(folded, {"at": "2"})
    first = query.trigger()
    query.options = {"at": "4"}
    query.start()
    assert query.run(0) == first
    assert query.trigger() is None


def test_a_seed_that_was_given_does_not_need_its_commit_any_more(folded: Path) -> None:
    query = Driver(folded, {"at": "2"})
    query.trigger()
    with Changelog.open(folded, config=QUIET) as log:
        log.drop_anchor("second")
        log.append(table(("a", "5")))
        clean(log)
    query.start()
    assert query.trigger() is None
    with pytest.raises(CompactedAway):
        query.run(0)


def test_the_offset_of_a_seed_has_the_documented_form(folded: Path) -> None:
    query = Driver(folded, {"at": "2"})
    query.trigger()
    uuid = restore(folded)._identity.uuid
    assert query.batches == [
        (json.dumps({"keyfold": uuid, "seed": None}), json.dumps({"keyfold": uuid, "seed": 2}))
    ]


@pytest.mark.parametrize(
    "offset", [{"keyfold": "0" * 32, "seed": None}, {"keyfold": "u", "offsets": {"0": 1}}]
)
def test_a_seed_refuses_the_checkpoint_of_something_else(folded: Path, offset: dict[str, Any]) -> None:
    query = Driver(folded, {"at": "2"})
    query.position = json.dumps(offset)
    with pytest.raises(ConfigError, match="of another"):
        query.trigger()
