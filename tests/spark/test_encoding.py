"""Spark writes the bytes that the format says, in every session, and they give back what Spark had."""

from __future__ import annotations

import datetime as dt
import math
import random
import struct as packing
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfold.statestore.errors import BadRecord, ConfigError, SchemaMismatch
from keyfold.statestore.keys.partitioner import partitions_of
from keyfold.statestore.schema.columns import Columns
from support import key_kinds
from support.encodings import SESSIONS, encoded, sessions_of
from support.key_kinds import Kind
from support.typed_golden import GOLDEN, NOT_FINITE, UTC, exact

pytest.importorskip("pyspark")

from pyspark.errors import PySparkException
from pyspark.sql import types as T

from keyfold.sink.encoding import RowEncoding, refusal

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
    with pytest.raises(PySparkException) as caught:
        encoded(encoding, df)
    found = refusal(caught.value)
    assert found is not None
    return found


# -- the format ----------------------------------------------------------------------------------------------


def test_spark_writes_the_golden_bytes(sessions: list[SparkSession]) -> None:
    for cases, mark in ((GOLDEN, ""), (NOT_FINITE, " ")):
        select = ", ".join(f"{case.sql} as v{i}" for i, case in enumerate(cases))
        select += ", " + ", ".join(f"{c.sql} as k{i}" for i, c in enumerate(cases) if c.in_key)
        keys = [f"k{i}" for i, case in enumerate(cases) if case.in_key]
        value = mark + "{" + ",".join(f'"v{i}":{case.text}' for i, case in enumerate(cases)) + "}"
        for session in sessions[:2]:
            df = session.sql(f"select {select}")
            encoding = RowEncoding(df.schema, keys)
            assert encoding.columns is not None
            record = encoded(encoding, df).to_pylist()[0]
            assert record["value"].decode() == value
            assert record["key"] == encoding.columns.encode_key(
                *(case.value for case in cases if case.in_key)
            )


def test_every_character_is_written_as_single_keys_are(spark: SparkSession) -> None:
    characters = [chr(c) for c in (*range(0x3000), *range(0xD700, 0xD800), *range(0xE000, 0x10FFFF, 97))]
    rows = [("".join(characters[i : i + 64]), i) for i in range(0, len(characters), 64)]
    df = spark.createDataFrame(rows, "s string, i int")
    encoding = RowEncoding(df.schema, ["s", "i"], column_list=[])
    assert encoding.columns is not None
    keys = encoded(encoding, df)["key"].to_pylist()
    assert keys == [encoding.columns.encode_key(*row) for row in rows]
    assert [(row["s"], row["i"]) for row in decoded(encoding, df)] == rows


def test_times_that_only_a_key_can_hold_come_back(sessions: list[SparkSession]) -> None:
    for session in sessions[:2]:
        df = session.sql(
            "select interval '-1 02:03:04.5' day to second as d, interval '7' hour as h, time'10:00:00' as t"
        )
        encoding = RowEncoding(df.schema, ["d", "h", "t"])
        there = df.toArrow()
        found = decoded(encoding, df)
        assert found == there.to_pylist()
        assert encoding.columns is not None
        assert encoding.columns.encode_key(*found[0].values()) == encoded(encoding, df)["key"][0].as_py()
        assert encoding.columns.arrow_schema().types == there.schema.types


def test_a_date_and_time_of_any_year_can_be_a_key(spark: SparkSession) -> None:
    micros = [-(1 << 63), -62_135_596_800_000_001, 0, 253_402_300_800_000_000, (1 << 63) - 1]
    df = spark.createDataFrame([(m,) for m in micros], "m long").selectExpr(
        "timestamp_micros(m) as t", "make_date(int(10000 + m % 7), 1, 1) as d", "m"
    )
    encoding = RowEncoding(df.schema, ["t", "d"])
    assert encoding.columns is not None
    records = encoded(encoding, df)
    found = encoding.columns.decode(records["key"], records["value"])
    assert found["t"].cast(pa.int64()).to_pylist() == micros
    assert (
        found["d"].cast(pa.int32()).to_pylist()
        == df.selectExpr("unix_date(d) as n").toArrow()["n"].to_pylist()
    )


NAN_INSIDE = [
    "array(1.5D, {})",
    "map({}, 1)",
    "map('a', {})",
    "named_struct('n', 1, 'd', {})",
    "array(map(1, named_struct('a', array({}))))",
]


@pytest.mark.parametrize("sql", NAN_INSIDE)
@pytest.mark.parametrize("number", ["double('NaN')", "float('-Infinity')", "double('Infinity')"])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(
    spark: SparkSession, sql: str, number: str
) -> None:
    """And only there: in the second row it is null, or none."""
    other = "0.5D" if sql.startswith("map({}") else f"if(id = 0, {number}, null)"
    held = f"if(id = 0, {sql.format(number)}, {sql.format(other)})"
    df = spark.range(0, 2, 1, 1).selectExpr("id", "1.5D as d", f"{held} as v")
    encoding = RowEncoding(df.schema, "id")
    texts = encoded(encoding, df)["value"].to_pylist()
    assert [text[:1] for text in texts] == [b" ", b"{"]
    expected = [{name: row[name] for name in ("id", "d", "v")} for row in df.toArrow().to_pylist()]
    assert exact(decoded(encoding, df)) == exact(expected)


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
    rows = data.draw(st.lists(st.tuples(*(kind.values for kind in kinds)), min_size=1, max_size=20))
    table = pa.Table.from_arrays(key_kinds.columns_of(kinds, rows), schema=key_kinds.schema_of(kinds))
    df = spark.createDataFrame(table)
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
    """Types and values, in every session; and a key has the bytes that it has alone, one text per value."""
    chance = random.Random(seed)
    fields = [T.StructField(f"v{i}", kind) for i, kind in enumerate(value_types)]
    fields += [T.StructField(f"k{i}", kind, False) for i, kind in enumerate(key_types)]
    schema = T.StructType(fields)
    rows = [{f.name: sample(chance, f.dataType, f.nullable) for f in fields} for _ in range(ROWS)]
    expected = sessions[0].createDataFrame(rows, schema).toArrow()

    df = sessions[session].createDataFrame(rows, schema)
    encoding = RowEncoding(df.schema, [f"k{i}" for i in range(len(key_types))], value_format="json")
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


def test_the_same_rows_have_the_same_bytes_in_every_session(sessions: list[SparkSession]) -> None:
    chance = random.Random(3)
    kinds = [*ATOMIC, T.ArrayType(T.TimestampType()), T.StructType([T.StructField("d", T.DateType())])]
    schema = T.StructType([T.StructField(f"c{i}", kind) for i, kind in enumerate(kinds)])
    rows = [{f.name: sample(chance, f.dataType) for f in schema} for _ in range(200)]
    written = []
    for session in sessions:
        df = session.createDataFrame(rows, schema)
        values = encoded(RowEncoding(df.schema, "c7", value_format="json"), df)["value"].to_pylist()
        keys = encoded(RowEncoding(df.schema, schema.names, column_list=[]), df)["key"].to_pylist()
        written.append((values, keys))
    assert all(other == written[0] for other in written)


# -- which columns -------------------------------------------------------------------------------------------


COLUMN_LISTS: list[tuple[dict[str, Any], bytes]] = [
    ({}, b'{"a":1,"b":2,"s":"x"}'),
    ({"column_list": ["s", "a"]}, b'{"a":1,"s":"x"}'),
    ({"column_list": "a"}, b'{"a":1}'),
    ({"column_list": ["k", "s"]}, b"x"),
    ({"column_list": ["s"], "value_format": "json"}, b'{"s":"x"}'),
    ({"column_list": []}, b"{}"),
    ({"except_column_list": ["a", "s"]}, b'{"b":2}'),
    ({"except_column_list": "b"}, b'{"a":1,"s":"x"}'),
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
        ({"keys": "word", "value_format": "raw"}, "Format does not fit the columns"),
        ({"keys": "word", "value_format": "avro"}, "Unknown value_format"),
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
    ("interval '1 02:03:04.5' day to second", "cast({} as string)"),
    ("make_interval(1, 2)", "cast({} as string)"),
    ("parse_json('{}')", "to_json({})"),
    ("time'10:00:00'", "cast({} as string)"),
    ("st_geomfromwkb(x'0101000000000000000000F03F0000000000000040')", "st_asbinary({})"),
    ("array(named_struct('i', parse_json('1')))", "cast({} as string)"),
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
    assert encoded(encoding, df)["value"].to_pylist() == [None, b'{"v":2}', b"{}"]


def test_a_key_with_a_null_part_is_null(spark: SparkSession) -> None:
    df = spark.sql("select * from values ('a', 1), (null, 2), ('c', null), (null, null) as t(a, b)")
    assert encoded(RowEncoding(df.schema, ["a", "b"]), df)["key"].to_pylist() == [
        b"a\0\x80\0\0\1",
        None,
        None,
        None,
    ]
    assert encoded(RowEncoding(df.schema, "a"), df)["key"].to_pylist() == [b"a", None, b"c", None]
    numbers = RowEncoding(df.schema, "b", value_format="json")
    assert encoded(numbers, df)["key"].to_pylist() == [b"\x80\0\0\1", b"\x80\0\0\2", None, None]


def test_a_null_raw_value_is_refused_unless_the_row_deletes(spark: SparkSession) -> None:
    df = spark.sql("select * from values ('a', 'x'), ('b', null) as t(k, v)")
    error = refused(RowEncoding(df.schema, "k"), df)
    assert "'v' is null" in error.what
    assert error.remedy is not None
    assert "apply_as_deletes=" in error.remedy
    assert 'value_format="json"' in error.remedy
    deleting = RowEncoding(df.schema, "k", apply_as_deletes="v is null")
    assert encoded(deleting, df)["value"].to_pylist() == [b"x", None]
    assert encoded(RowEncoding(df.schema, "k", value_format="json"), df)["value"].to_pylist() == [
        b'{"v":"x"}',
        b"{}",
    ]


UNWRITABLE = [
    ("cast(x'73ff' as string)", "UTF-8"),
    ("array(array('a', null), array(cast(x'c080' as string)))", "UTF-8"),
    ("map(cast(x'eda080' as string), 1)", "UTF-8"),
    ("named_struct('x', 1, 'X', named_struct('y', cast(x'ff' as string)))", "UTF-8"),
    ("make_date(10000, 1, 1)", "0001 to 9999"),
    ("make_date(0, 12, 31)", "0001 to 9999"),
    ("timestamp_micros(253402300800000000)", "0001 to 9999"),
    ("timestamp_micros(-62135596800000001)", "0001 to 9999"),
    ("timestamp_micros(9223372036854775807)", "0001 to 9999"),
    ("timestamp_micros(-9223372036854775808)", "0001 to 9999"),
    ("timestamp_ntz'9999-12-31 23:59:59.999999' + interval '0.000001' second", "0001 to 9999"),
    ("timestamp_ntz'0001-01-01 00:00:00' - interval '0.000001' second", "0001 to 9999"),
    ("map(1, array(make_date(10000, 1, 1)))", "0001 to 9999"),
]


@pytest.mark.parametrize(("sql", "says"), UNWRITABLE, ids=[sql for sql, _ in UNWRITABLE])
def test_a_row_that_cannot_be_written_exactly_is_refused_by_column(
    sessions: list[SparkSession], sql: str, says: str
) -> None:
    df = sessions[0].sql(f"select id as k, if(id = 3, {sql}, null) as v, id = 3 as bad from range(5)")
    error = refused(RowEncoding(df.schema, "k"), df)
    assert "Column 'v'" in error.what
    assert says in error.what
    assert error.remedy
    fine = RowEncoding(df.schema, "k", apply_as_deletes="bad")
    assert encoded(fine, df)["value"].null_count == 1
    if "map" not in sql and says == "UTF-8":
        assert says in refused(RowEncoding(df.schema, ["k", "v"]), df.where("bad")).what


def test_any_column_that_cannot_be_written_is_named_in_keys_and_values(spark: SparkSession) -> None:
    """Not only the first one of those that could be refused."""
    good = ["'a'", "'b'", "date'2013-01-31'", "timestamp'2013-01-31 10:00:00'", "array('c')"]
    bad = ["cast(x'ff' as string)"] * 2 + ["make_date(0, 1, 1)", "timestamp_micros(-62135596800000001)"]
    bad.append("array(cast(x'ff' as string))")
    for wrong in range(len(good)):
        columns = [bad[i] if i == wrong else good[i] for i in range(len(good))]
        df = spark.sql("select 1 as n, " + ", ".join(f"{sql} as c{i}" for i, sql in enumerate(columns)))
        for keys in (["n"], df.columns[1:]):
            if keys == ["n"] or "ff" in bad[wrong]:
                assert f"Column 'c{wrong}'" in refused(RowEncoding(df.schema, keys), df).what


def test_a_raw_string_that_is_not_utf8_is_refused_in_keys_and_values(spark: SparkSession) -> None:
    df = spark.sql("select cast(x'ff' as string) as a, 'b' as b")
    assert "UTF-8" in refused(RowEncoding(df.schema, "a"), df).what
    assert "UTF-8" in refused(RowEncoding(df.schema, "b"), df).what


def test_other_errors_of_spark_are_no_refusal(spark: SparkSession) -> None:
    assert refusal(ValueError("keyfold: no")) is None
    with pytest.raises(PySparkException) as caught:
        spark.sql("select raise_error('mine')").collect()
    assert refusal(caught.value) is None


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
