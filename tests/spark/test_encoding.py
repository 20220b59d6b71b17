"""Records of a DataFrame have what Spark had: every value of every type, in every session."""

from __future__ import annotations

import datetime as dt
import math
import random
import struct as packing
import tempfile
from decimal import Context, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfold.statestore.errors import BadRecord, ConfigError, SchemaMismatch
from keyfold.statestore.keys.partitioner import partitions_of
from keyfold.statestore.schema import spark_types
from keyfold.statestore.schema.columns import Columns
from support import key_kinds
from support.encodings import SESSIONS, encoded, sessions_of
from support.key_kinds import Kind
from support.typed_golden import GOLDEN, UTC, exact

pytest.importorskip("pyspark")

from pyspark.sql import types as T
from pyspark.sql.types import VariantVal

from keyfold import ChangelogSink
from keyfold.sink.encoding import RowEncoding
from keyfold.sink.staging import Stage, refused_row, staged_by_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="module")
def sessions(spark: SparkSession) -> list[SparkSession]:
    return sessions_of(spark)


def decoded(encoding: RowEncoding, df: DataFrame) -> list[dict[str, Any]]:
    assert encoding.columns is not None
    records = encoded(encoding, df)
    table = encoding.columns.decode(records["key"], records["value"])
    table.validate(full=True)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def refused(encoding: RowEncoding, df: DataFrame) -> BadRecord:
    """The error of the tasks for a row of the DataFrame."""
    with tempfile.TemporaryDirectory() as directory:
        stage = Stage(directory, 0, 1, 0, encoding.shape(encoding.columns))
        found = refused_row(staged_by_tasks(encoding.select(df), stage), stage)
    assert found is not None
    return found


# -- values of every type ------------------------------------------------------------------------------------


def test_a_value_of_each_type_comes_back_from_keys_and_values(sessions: list[SparkSession]) -> None:
    select = ", ".join(f"{case.sql} as v{i}" for i, case in enumerate(GOLDEN))
    select += ", " + ", ".join(f"{c.sql} as k{i}" for i, c in enumerate(GOLDEN) if c.in_key)
    keys = [f"k{i}" for i, case in enumerate(GOLDEN) if case.in_key]
    for session in sessions[:2]:
        df = session.sql(f"select {select}")
        encoding = RowEncoding(df.schema, keys)
        assert encoding.columns is not None
        kinds = {f["name"]: spark_types.sql_text(f["type"]) for f in encoding.columns.schema_json["fields"]}
        (row,) = decoded(encoding, df)
        for i, case in enumerate(GOLDEN):
            assert kinds[f"v{i}"] == spark_types.sql_text(case.kind)
            assert exact(row[f"v{i}"]) == exact(case.value)
            assert not case.in_key or exact(row[f"k{i}"]) == exact(one_zero(case.value))
        key = encoded(encoding, df)["key"][0].as_py()
        assert key == encoding.columns.encode_key(*(case.value for case in GOLDEN if case.in_key))


def test_every_character_is_written_as_single_keys_are(spark: SparkSession) -> None:
    characters = [chr(c) for c in (*range(0x3000), *range(0xD700, 0xD800), *range(0xE000, 0x10FFFF, 97))]
    rows = [("".join(characters[i : i + 64]), i) for i in range(0, len(characters), 64)]
    df = spark.createDataFrame(rows, "s string, i int")
    encoding = RowEncoding(df.schema, ["s", "i"], column_list=[])
    assert encoding.columns is not None
    keys = encoded(encoding, df)["key"].to_pylist()
    assert keys == [encoding.columns.encode_key(*row) for row in rows]
    assert [(row["s"], row["i"]) for row in decoded(encoding, df)] == rows


def test_a_date_and_time_of_any_year_comes_back(spark: SparkSession) -> None:
    """Python has no such dates, but Arrow has."""
    micros = [-(1 << 63), -62_135_596_800_000_001, 0, 253_402_300_800_000_000, (1 << 63) - 1]
    df = spark.createDataFrame([(m,) for m in micros], "m long").selectExpr(
        "timestamp_micros(m) as t", "make_date(int(10000 + m % 7), 1, 1) as d", "m",
        "timestamp_ntz'9999-12-31 23:59:59.999999' + interval '0.000001' second as n",
    )  # fmt: skip
    days = df.selectExpr("unix_date(d) as n").toArrow()["n"].to_pylist()
    for keys in (["t", "d"], ["m"]):
        encoding = RowEncoding(df.schema, keys)
        assert encoding.columns is not None
        records = encoded(encoding, df)
        found = encoding.columns.decode(records["key"], records["value"])
        assert found["t"].cast(pa.int64()).to_pylist() == micros
        assert found["d"].cast(pa.int32()).to_pylist() == days
        assert set(found["n"].cast(pa.int64()).to_pylist()) == {253_402_300_800_000_000}


def test_a_key_has_its_columns_in_the_order_of_keys(spark: SparkSession) -> None:
    df = spark.sql("select 1 as a, 'x' as b, 2 as c")
    encoding = RowEncoding(df.schema, ["b", "a"])
    assert encoding.columns is not None
    assert encoded(encoding, df)["key"].to_pylist() == [b"x\0\x80\0\0\1"]
    assert encoding.columns.encode_key("x", 1) == b"x\0\x80\0\0\1"


# -- order and partition -------------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 8)
@given(kinds=st.lists(key_kinds.KINDS, min_size=1, max_size=3), data=st.data())
def test_spark_orders_and_partitions_rows_as_their_keys(
    spark: SparkSession, kinds: list[Kind], data: st.DataObject
) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.timeType.enabled", "true")  # or Spark refuses `distinct` of times
    rows = data.draw(st.lists(st.tuples(*(kind.values for kind in kinds)), min_size=1, max_size=20))
    table = pa.Table.from_arrays(key_kinds.columns_of(kinds, rows), schema=key_kinds.schema_of(kinds))
    df = session.createDataFrame(table)
    encoding = RowEncoding(df.schema, df.columns)
    in_order = encoded(encoding, df.orderBy(*df.columns).coalesce(1))["key"].to_pylist()
    assert in_order == sorted(in_order)
    keys = encoded(encoding, df)["key"]
    expected = df.distinct().count()
    assert len(set(keys.to_pylist())) == expected
    partitions = spark.createDataFrame(pa.table({"key": keys})).selectExpr("pmod(xxhash64(key), 7) as p")
    assert partitions.toArrow()["p"].to_pylist() == partitions_of(keys.combine_chunks(), 7).tolist()


# -- the round trip ------------------------------------------------------------------------------------------

STRINGS = [
    "",
    " ",
    "NaN",
    "Infinity",
    "null",
    '"',
    "\\",
    "\\u0041",
    '{"a":1}',
    "\n",
    "\r\n",
    "\0",
    "\x7f",
    "é",
]
STRINGS += ["e\u0301", "\u2028", "\ufeff", "\ufffe", "\U0010ffff", "😀", "\ue000", "/", "<b>", "a" * 300]
DOUBLES = [0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, -2.2250738585072014e-308, 1.7976931348623157e308]
DOUBLES += [2e-3, 1e23, 2.0**-44, 9007199254740993.0, 0.1, 1.0]
FLOATS = [
    0.0,
    -0.0,
    math.nan,
    math.inf,
    -math.inf,
    2.0**-149,
    -(2.0**-126),
    3.4028234663852886e38,
    1.0,
    2.0**24,
]
MICROS_MAX = 315_537_897_599_999_999  # from the first to the last microsecond of the years 1 to 9999
EDGES = [0, 1, MICROS_MAX, 62_135_596_800_000_000, 62_135_596_799_999_999, 49_916_304_000_000_000]
ATOMIC: list[T.DataType] = [
    *(T.BooleanType(), T.ByteType(), T.ShortType(), T.IntegerType(), T.LongType(), T.FloatType()),
    *(T.DoubleType(), T.StringType(), T.BinaryType(), T.DateType(), T.TimestampType(), T.TimestampNTZType()),
    *(T.DayTimeIntervalType(), T.TimeType()),
]
NAMES = ["x", "X", "a.b", 'q"', "`", "é", " ", "key", "value", "\n", "n\\", "element"]


def decimals() -> st.SearchStrategy[T.DataType]:
    sizes = st.integers(1, 38).flatmap(lambda p: st.tuples(st.just(p), st.integers(0, p)))
    return sizes.map(lambda size: T.DecimalType(*size))


def structs(kinds: st.SearchStrategy[T.DataType]) -> st.SearchStrategy[T.DataType]:
    # All fields nullable: Spark's own toArrow() fails for a struct that is null and has a field that is not.
    member = st.tuples(st.sampled_from(NAMES), kinds)
    members = st.lists(member, max_size=3, unique_by=lambda m: m[0])
    return members.map(lambda m: T.StructType([T.StructField(*parts) for parts in m]))


def nested(atomic: st.SearchStrategy[T.DataType], maps: bool, depth: int) -> st.SearchStrategy[T.DataType]:
    if not depth:
        return atomic
    inner = nested(atomic, maps, depth - 1)
    kinds = [atomic, atomic, st.builds(T.ArrayType, inner, st.booleans()), structs(inner)]
    if maps:
        # Python's dictionaries, which Spark takes for maps, have no lists or dictionaries as keys.
        kinds.append(st.builds(T.MapType, atomic, inner, st.booleans()))
    return st.one_of(kinds)


WIDE = Context(prec=40)
INTEGERS = {T.ByteType: 7, T.ShortType: 15, T.IntegerType: 31, T.LongType: 63}
ANY_ATOMIC = st.one_of(st.sampled_from(ATOMIC), decimals())
KEY_TYPES = nested(ANY_ATOMIC, False, 2)
# Columns of nulls only at the top: Spark cannot be given arrays of them.
VALUE_TYPES = st.one_of(nested(ANY_ATOMIC, True, 3), nested(ANY_ATOMIC, True, 3), st.just(T.NullType()))


def sample(chance: random.Random, kind: T.DataType, nullable: bool = True) -> Any:
    """A value of a type: an edge of its range, any value of it, or null."""
    if isinstance(kind, T.NullType) or (nullable and chance.random() < 0.2):
        return None
    if isinstance(kind, T.StructType):
        return {f.name: sample(chance, f.dataType, f.nullable) for f in kind}
    length = chance.choice([0, 1, 2, 4])
    if isinstance(kind, T.ArrayType):
        return [sample(chance, kind.elementType, kind.containsNull) for _ in range(length)]
    if isinstance(kind, T.MapType):
        return {
            sample(chance, kind.keyType, False): sample(chance, kind.valueType, kind.valueContainsNull)
            for _ in range(length)
        }
    return sample_atomic(chance, kind)


def sample_atomic(chance: random.Random, kind: T.DataType) -> Any:
    if isinstance(kind, T.BooleanType):
        return chance.random() < 0.5
    if isinstance(kind, T.StringType):
        return "".join(chance.choice(STRINGS) for _ in range(chance.choice([1, 1, 3])))
    if isinstance(kind, T.BinaryType):
        return chance.randbytes(chance.choice([0, 1, 2, 20]))
    if isinstance(kind, T.DoubleType):
        return chance.choice([*DOUBLES, packing.unpack("<d", chance.randbytes(8))[0]])
    if isinstance(kind, T.FloatType):
        return chance.choice([*FLOATS, packing.unpack("<f", chance.randbytes(4))[0]])
    if isinstance(kind, T.DecimalType):
        digits = chance.choice([0, 1, 10**kind.precision - 1, chance.randrange(10**kind.precision)])
        return Decimal(chance.choice(["", "-"]) + str(digits)).scaleb(-kind.scale, WIDE)
    if isinstance(kind, (T.DateType, T.TimestampType, T.TimestampNTZType)):
        micros = chance.choice([*EDGES, chance.randint(0, MICROS_MAX)])
        moment = dt.datetime(1, 1, 1, tzinfo=UTC) + dt.timedelta(microseconds=micros)
        if isinstance(kind, T.DateType):
            return moment.date()
        return moment if isinstance(kind, T.TimestampType) else moment.replace(tzinfo=None)
    if isinstance(kind, T.DayTimeIntervalType):
        return dt.timedelta(microseconds=chance.choice([0, -1, 1 << 62, chance.randint(-(1 << 62), 1 << 62)]))
    if isinstance(kind, T.TimeType):
        return chance.choice([dt.time.min, dt.time.max, dt.time(chance.randrange(24), 1, 2, 3)])
    top = next(2**bits for integer, bits in INTEGERS.items() if isinstance(kind, integer))
    return chance.choice([0, -1, -top, top - 1, chance.randrange(-top, top)])


def one_zero(value: Any) -> Any:
    """As a key keeps it: without the sign of zero, floats that are equal are the same."""
    if isinstance(value, dict):
        return {name: one_zero(item) for name, item in value.items()}
    if isinstance(value, list):
        return [one_zero(item) for item in value]
    return value + 0.0 if isinstance(value, float) else value


ROWS = 30


def settled(value: object) -> object:
    """Maps in one order: each DataFrame made of Python's dicts has an order of its own for keys of bytes."""
    if isinstance(value, dict):
        return {name: settled(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        inner = [settled(one) for one in value]
        is_map = isinstance(value, list) and inner and all(isinstance(one, tuple) for one in value)
        return sorted(inner, key=repr) if is_map else type(value)(inner)
    return value


@settings(max_examples=settings().max_examples // 8)
@given(
    session=st.integers(0, len(SESSIONS) - 1),
    key_types=st.lists(KEY_TYPES, min_size=1, max_size=2),
    value_types=st.lists(VALUE_TYPES, min_size=0, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_any_row_of_any_schema_comes_back_exactly(
    sessions: list[SparkSession],
    session: int,
    key_types: list[T.DataType],
    value_types: list[T.DataType],
    seed: int,
) -> None:
    """Types and values, in every session; and a key has the bytes that it has alone."""
    chance = random.Random(seed)
    fields = [T.StructField(f"v{i}", kind) for i, kind in enumerate(value_types)]
    fields += [T.StructField(f"k{i}", kind, False) for i, kind in enumerate(key_types)]
    schema = T.StructType(fields)
    rows = [{f.name: sample(chance, f.dataType, f.nullable) for f in fields} for _ in range(ROWS)]
    expected = sessions[0].createDataFrame(rows, schema).toArrow()

    df = sessions[session].createDataFrame(rows, schema)
    encoding = RowEncoding(df.schema, [f"k{i}" for i in range(len(key_types))])
    assert encoding.columns is not None
    records = encoded(encoding, df)
    found = encoding.columns.decode(records["key"], records["value"])

    found.validate(full=True)
    assert [f.type for f in found.schema] == [f.type for f in expected.schema]
    for name in found.column_names:
        there = expected[name].to_pylist()
        here = [one_zero(value) for value in there] if name.startswith("k") else there
        assert exact(settled(found[name].to_pylist())) == exact(settled(here)), name

    names = encoding.columns.keys
    texts: dict[str, bytes] = {}
    for row, key in zip(found.select(names).to_pylist(), records["key"].to_pylist(), strict=True):
        assert encoding.columns.encode_key(row) == key
        assert texts.setdefault(exact(row), key) == key
    assert len(set(texts.values())) == len(texts)


KINDS_ALL: list[T.DataType] = [
    *ATOMIC, T.DecimalType(38, 10), T.NullType(), T.StructType(),
    T.ArrayType(T.TimestampType()), T.ArrayType(T.ArrayType(T.StringType()), False),
    T.MapType(T.StringType(), T.TimestampType()), T.MapType(T.LongType(), T.StructType().add("b", "binary")),
    T.StructType().add("x", "string").add("X", T.ArrayType(T.StructType().add("t", "timestamp"))),
    T.StructType().add("n", T.StructType().add("i", T.DayTimeIntervalType()).add("t", T.TimeType())),
]  # fmt: skip


@pytest.mark.parametrize("large", ["false", "true"])
def test_the_log_has_what_the_dataframe_had(sessions: list[SparkSession], tmp_path: Path, large: str) -> None:
    """Through the tasks, then, as a small batch after a small one, through the driver; in every session."""
    chance = random.Random(7)
    schema = T.StructType([T.StructField(f"c{i}", kind) for i, kind in enumerate(KINDS_ALL)])
    schema = schema.add("k", "long", False).add("gone", "boolean")
    rows = [
        {f.name: sample(chance, f.dataType) for f in schema}
        | {"k": k, "gone": chance.choice([True, False, None])}
        for k in range(60)
    ]
    for number, session in enumerate(sessions):
        df = session.createDataFrame(rows, schema)
        expected = {row["k"]: row for row in df.toArrow().to_pylist()}
        session.conf.set("spark.sql.execution.arrow.useLargeVarTypes", large)
        try:
            with ChangelogSink(
                tmp_path / f"log-{number}", keys="k", partitions=3, apply_as_deletes="gone",
                except_column_list="gone", config={"compression.type": "lz4"} if number % 2 else None,
            ) as sink:  # fmt: skip
                sink(df, 0)
                sink(df, 1)
                columns = sink.log.columns
                assert columns is not None
                found: dict[int, list[dict[str, Any]]] = {}
                for batch in (b for partition in range(3) for b in sink.log.read(partition)):
                    for row in columns.decode(batch.column("key"), batch.column("value")).to_pylist():
                        found.setdefault(row["k"], []).append(row)
        finally:
            session.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")
        assert len(found) == len(rows)
        for k, row in expected.items():
            wanted = dict.fromkeys(row, None) | {"k": k} if row["gone"] else row
            del wanted["gone"]
            assert [exact(settled(row)) for row in found[k]] == [exact(settled(wanted))] * 2


def test_the_same_rows_have_the_same_keys_and_values_in_every_session(sessions: list[SparkSession]) -> None:
    chance = random.Random(3)
    kinds = [*ATOMIC, T.ArrayType(T.TimestampType()), T.StructType([T.StructField("d", T.DateType())])]
    schema = T.StructType([T.StructField(f"c{i}", kind) for i, kind in enumerate(kinds)])
    rows = [{f.name: sample(chance, f.dataType) for f in schema} for _ in range(200)]
    written = []
    for session in sessions:
        df = session.createDataFrame(rows, schema)
        values = exact(encoded(RowEncoding(df.schema, "c7"), df)["value"].to_pylist())
        keys = encoded(RowEncoding(df.schema, schema.names, column_list=[]), df)["key"].to_pylist()
        written.append((values, keys))
    assert all(other == written[0] for other in written)


# -- which columns -------------------------------------------------------------------------------------------


COLUMN_LISTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"a": 1, "b": 2, "s": "x"}),
    ({"column_list": ["s", "a"]}, {"a": 1, "s": "x"}),
    ({"column_list": "a"}, {"a": 1}),
    ({"column_list": ["k", "s"]}, {"s": "x"}),
    ({"column_list": []}, {}),
    ({"except_column_list": ["a", "s"]}, {"b": 2}),
    ({"except_column_list": "b"}, {"a": 1, "s": "x"}),
]


def test_the_value_is_what_the_column_lists_say_and_keys_are_always_there(spark: SparkSession) -> None:
    df = spark.sql("select 1 as a, 'k' as k, 2 as b, 'x' as s")
    for options, value in COLUMN_LISTS:
        encoding = RowEncoding(df.schema, "k", **options)
        assert encoded(encoding, df).to_pylist() == [{"key": b"k", "value": value}]
    encoding = RowEncoding(df.schema, ["k"], except_column_list=["a"])
    assert decoded(encoding, df) == [{"k": "k", "b": 2, "s": "x"}]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"keys": "wrd"}, "did you mean 'word'"),
        ({"keys": "WORD"}, "did you mean 'word'"),
        ({"keys": ["word", "word"]}, "unique names"),
        ({"keys": "word", "column_list": ["coutn"]}, "did you mean 'count'"),
        ({"keys": "word", "except_column_list": ["zzz"]}, "one of word, count, at"),
        ({"keys": "word", "column_list": ["at"], "except_column_list": ["count"]}, "exclude each other"),
        ({"keys": "word", "except_column_list": ["word"]}, "contains a key column"),
        ({}, "keys="),
        ({"column_list": ["at"]}, "keys="),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused_when_the_sink_is_built(arguments: Any, says: str) -> None:
    schema = T.StructType().add("word", "string").add("count", "long").add("at", "timestamp")
    with pytest.raises(ConfigError, match=says):
        RowEncoding(schema, **arguments)


REFUSED = [
    ("interval '1-2' year to month", "cast({} as string)"),
    ("make_interval(1, 2)", "cast({} as string)"),
    ("st_geomfromwkb(x'0101000000000000000000F03F0000000000000040')", "st_asbinary({})"),
    ("array(named_struct('i', interval '3' year))", "cast({} as string)"),
]


@pytest.mark.parametrize(("sql", "remedy"), REFUSED, ids=[sql for sql, _ in REFUSED])
def test_a_type_that_is_refused_is_accepted_after_the_remedy(
    spark: SparkSession, sql: str, remedy: str
) -> None:
    df = spark.sql(f"select 'k' as k, {sql} as v")
    with pytest.raises(SchemaMismatch, match="cannot be stored exactly") as caught:
        RowEncoding(df.schema, "k")
    assert caught.value.remedy
    if "array" not in sql:
        assert remedy.format("column").split("(")[0] in caught.value.remedy
    df = df.selectExpr("k", f"{remedy.format('v')} as v")
    assert encoded(RowEncoding(df.schema, "k"), df).num_rows == 1


def test_a_variant_can_be_a_value_but_no_key(spark: SparkSession) -> None:
    """Spark's own struct of two binaries gives the variant back."""
    df = spark.sql("""select 'k' as k, parse_json('{"a": [1.5, null, "é"]}') as v""")
    (row,) = decoded(RowEncoding(df.schema, "k"), df)
    assert VariantVal(row["v"]["value"], row["v"]["metadata"]).toPython() == {"a": [1.5, None, "é"]}
    with pytest.raises(SchemaMismatch, match="variant"):
        RowEncoding(df.schema, "v")


def test_collated_strings_are_kept_in_values_and_refused_in_keys(spark: SparkSession) -> None:
    df = spark.sql("select 'k' as k, 'A' collate utf8_lcase as v, array('B' collate unicode_ci) as w")
    encoding = RowEncoding(df.schema, "k")
    assert encoding.columns is not None
    assert decoded(encoding, df) == [{"k": "k", "v": "A", "w": ["B"]}]
    restored = T.StructType.fromJson(Columns.from_json(encoding.columns.to_json()).schema_json)
    assert [f.dataType for f in restored] == [f.dataType for f in df.schema]
    assert spark.createDataFrame([("k", "A", ["B"])], restored).where("v = 'a'").count() == 1
    with pytest.raises(SchemaMismatch, match="collation"):
        RowEncoding(df.schema, "v")


def test_the_kept_schema_is_the_one_of_the_dataframe(spark: SparkSession) -> None:
    df = spark.sql("select 1 as a, 'k' as k, array(named_struct('x', 1.5)) as n, map('a', null) as m")
    encoding = RowEncoding(df.schema, "k", except_column_list=["a"])
    assert encoding.columns is not None
    assert T.StructType.fromJson(encoding.columns.schema_json) == T.StructType(df.schema.fields[1:])


def test_columns_that_differ_in_case_are_two_columns(spark: SparkSession) -> None:
    schema = T.StructType([T.StructField(n, T.IntegerType()) for n in ("x", "X", "a.b", "`", "k")])
    df = spark.createDataFrame([(1, 2, 3, 4, 5)], schema)
    assert decoded(RowEncoding(df.schema, ["X", "a.b"]), df) == [{"x": 1, "X": 2, "a.b": 3, "`": 4, "k": 5}]


def test_another_dataframe_than_the_one_it_was_built_for_is_refused(spark: SparkSession) -> None:
    encoding = RowEncoding(spark.sql("select 1 as k, 2 as v").schema, "k")
    with pytest.raises(SchemaMismatch, match="changed between batches"):
        encoding.select(spark.sql("select 1 as k, 2L as v"))


# -- deletes, nulls, rows that cannot be written -------------------------------------------------------------


def test_rows_that_delete_have_a_null_value_and_only_those(spark: SparkSession) -> None:
    df = spark.sql("select * from values ('a', 1, 'D'), ('b', 2, 'U'), ('c', null, null) as t(k, v, op)")
    encoding = RowEncoding(df.schema, "k", except_column_list=["op"], apply_as_deletes="op = 'D'")
    assert encoded(encoding, df)["value"].to_pylist() == [None, {"v": 2}, {"v": None}]


def test_a_key_with_a_null_part_is_null(spark: SparkSession) -> None:
    df = spark.sql("select * from values ('a', 1), (null, 2), ('c', null), (null, null) as t(a, b)")
    assert encoded(RowEncoding(df.schema, ["a", "b"]), df)["key"].to_pylist() == [
        b"a\0\x80\0\0\1",
        None,
        None,
        None,
    ]
    assert encoded(RowEncoding(df.schema, "a"), df)["key"].to_pylist() == [b"a", None, b"c", None]
    numbers = RowEncoding(df.schema, "b")
    assert encoded(numbers, df)["key"].to_pylist() == [b"\x80\0\0\1", b"\x80\0\0\2", None, None]


UNWRITABLE = [
    "cast(x'73ff' as string)",
    "array(array('a', null), array(cast(x'c080' as string)))",
    "map(cast(x'eda080' as string), 1)",
    "map(1, array(null, cast(x'ff' as string)))",
    "named_struct('x', 1, 'X', named_struct('y', cast(x'ff' as string)))",
]


@pytest.mark.parametrize("sql", UNWRITABLE)
def test_a_string_that_is_not_utf8_is_refused_by_row_and_column(spark: SparkSession, sql: str) -> None:
    df = spark.range(0, 5, 1, 1).selectExpr(
        "id as k", "'a' as u", f"if(id = 3, {sql}, null) as v", "id = 3 as bad"
    )
    error = refused(RowEncoding(df.schema, "k"), df)
    assert error.what == "Column 'v' has a string that is not valid UTF-8."
    assert error.position == "batch 0, Spark partition 0, row 3"
    assert error.remedy
    fine = RowEncoding(df.schema, "k", apply_as_deletes="bad")
    assert encoded(fine, df)["value"].null_count == 1
    if "map" not in sql:
        assert "Column 'v'" in refused(RowEncoding(df.schema, ["k", "v"]), df.where("bad")).what


# -- expressions ---------------------------------------------------------------------------------------------


def test_sequence_columns_are_carried_along_by_expression(spark: SparkSession) -> None:
    df = spark.sql("select * from values ('a', 1, 7), ('b', 2, 8) as t(k, v, lsn)")
    encoding = RowEncoding(df.schema, "k", column_list=["v"], sequence_by=["lsn", "-v"])
    table = encoded(encoding, df)
    assert table.column_names == ["key", "value", "sequence_0", "sequence_1"]
    assert table["sequence_0"].to_pylist() == [7, 8]
    assert table["sequence_1"].to_pylist() == [-1, -2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"apply_as_deletes": "op = 'D'"}, "apply_as_deletes is not a SQL expression"),
        ({"apply_as_deletes": "v +"}, "apply_as_deletes is not a SQL expression"),
        ({"apply_as_deletes": "v"}, "apply_as_deletes is not a condition"),
        ({"sequence_by": "lsn"}, "sequence_by is not a SQL expression"),
        ({"sequence_by": "struct(v, k)"}, "cannot be ordered"),
    ],
    ids=str,
)
def test_an_expression_that_does_not_fit_is_refused(spark: SparkSession, options: Any, says: str) -> None:
    df = spark.sql("select 'a' as k, 1 as v")
    with pytest.raises(ConfigError, match=says):
        RowEncoding(df.schema, "k", **options).select(df)
