"""The options `where` and `columns`, and a schema of the user: they give a part of the whole read, and the
rest is not decoded.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

from keyfold import Changelog
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.keys.partitioner import partition_of
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.segment.message import selected
from keyfold.streaming.pieces import Piece
from keyfold.streaming.source import KeyfoldSource
from keyfold.streaming.where import selection_of
from support.faults.inject import Watched
from support.key_kinds import ATOMIC, Kind, field, ordered
from support.source import QUIET, TYPED, Driver, read_batch, rows_of, table

COMPARE = {"=": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
#: An interval has no literal here.
KEYS = [kind for kind in ATOMIC if kind.json != "interval day to second"]


def literal(value: Any) -> str:
    """A value as `where` takes it."""
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float):
        special = math.isnan(value) or math.isinf(value)
        return f"'{'NaN' if math.isnan(value) else str(value) + 'inity'}'" if special else repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    text = str(value).replace("'", "''")
    return f"'{text}'"


class Condition:
    """Conditions on the first key columns, as text and as a function."""

    def __init__(self, draw: Any, names: list[str], values: dict[str, list[Any]]) -> None:
        self.parts: list[tuple[str, str, tuple[Any, ...]]] = []
        exact = draw(st.integers(0, len(names)))
        self.parts += [(name, "=", (draw(st.sampled_from(values[name])),)) for name in names[:exact]]
        if exact < len(names):
            name = names[exact]
            signs = [*COMPARE, "BETWEEN", *(["IN"] if exact == len(names) - 1 else [])]
            for sign in draw(st.lists(st.sampled_from(signs), min_size=exact == 0, max_size=2)):
                count = {"BETWEEN": 2, "IN": draw(st.integers(1, 3))}.get(sign, 1)
                some = st.lists(st.sampled_from(values[name]), min_size=count, max_size=count)
                self.parts.append((name, sign, tuple(draw(some))))
            if draw(st.booleans()):
                self.parts.reverse()

    @property
    def text(self) -> str:
        def one(name: str, sign: str, values: tuple[Any, ...]) -> str:
            texts = [literal(v) for v in values]
            if sign == "IN":
                return f"{name} IN ({', '.join(texts)})"
            return f"`{name}` {sign} " + " and ".join(texts)

        return " AND ".join(itertools.starmap(one, self.parts))

    def holds(self, row: dict[str, Any]) -> bool:
        return all(self._holds(ordered(row[n]), sign, [*map(ordered, vs)]) for n, sign, vs in self.parts)

    @staticmethod
    def _holds(found: Any, sign: str, values: list[Any]) -> bool:
        if sign == "IN":
            return found in values
        if sign == "BETWEEN":
            return bool(values[0] <= found <= values[1])
        return bool(COMPARE[sign](found, values[0]))


def write(root: Path, draw: Any, kinds: list[Kind]) -> dict[str, list[Any]]:
    """A changelog with updates, deletes, several segments and schemas. Returns some values of each key
    column; half of them are in no key.
    """
    values = {f"k{i}": draw(st.lists(k.values, min_size=2, max_size=8)) for i, k in enumerate(kinds)}
    keys = [field(name, kind.json) for name, kind in zip(values, kinds, strict=True)]
    columns = Columns({"type": "struct", "fields": [*keys, field("a", "long")]}, tuple(values))
    config = {**QUIET, "segment.bytes": 1024, "compression.type": draw(st.sampled_from(["none", "zstd"]))}
    with Changelog.open(root, partitions=draw(st.integers(1, 3)), columns=columns, config=config) as log:
        for number in range(draw(st.integers(1, 4))):
            if number == 2:
                added = {"type": "struct", "fields": [*keys, field("b", "string")]}
                columns = columns.accepts(Columns(added, columns.keys))
                log.engine.set_columns(columns)
            count = draw(st.integers(1, 30))
            rows = {
                n: [draw(st.sampled_from(vs[: -(len(vs) // 2)])) for _ in range(count)]
                for n, vs in values.items()
            }
            schema = columns.arrow_schema()
            data = {n: pa.array(rows[n], schema.field(n).type) for n in rows}
            data["a"] = pa.array(range(count), pa.int64())
            if number >= 2:
                data["b"] = pa.array([f"b{n}" for n in range(count)])
            data["_deleted"] = pa.array([draw(st.integers(0, 4)) == 0 for _ in range(count)])
            log.append(pa.table(data))
            if draw(st.booleans()):
                log.compact(full=draw(st.booleans()))
    return values


@given(data=st.data())
@settings(deadline=None)
def test_a_filtered_read_is_the_whole_read_filtered(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("where") / "log"
    values = write(root, data.draw, data.draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)))
    condition = Condition(data.draw, list(values), values)
    if not condition.text:
        return
    for mode in ("state", "changes"):
        whole = read_batch(root, mode=mode)
        names = data.draw(
            st.lists(st.sampled_from(list(whole[0]) if whole else ["a"]), min_size=1, unique=True)
        )
        found = read_batch(root, mode=mode, where=condition.text, columns=",".join(names))
        expected = [{name: row[name] for name in names} for row in whole if condition.holds(row)]
        assert Counter(map(repr, found)) == Counter(map(repr, expected)), condition.text


def test_any_two_conditions_are_both_met(tmp_path: Path) -> None:
    """All pairs of them on small keys, with the least and the greatest values."""
    numbers, texts = [-128, 0, 1, 127], ["", "a", "a\0", "b"]
    fields = [field("a", "byte"), field("b", "string"), field("v", "long")]
    columns = Columns({"type": "struct", "fields": fields}, ("a", "b"))
    rows: list[dict[str, Any]] = [{"a": a, "b": b} for a in numbers for b in texts]
    keys = columns.encode_keys(
        [pa.array([r[n] for r in rows], t) for n, t in (("a", pa.int8()), ("b", pa.string()))]
    )
    simple = [("a", sign, a) for sign in COMPARE for a in numbers]
    on_b = [("b", sign, b) for sign in COMPARE for b in texts]
    lists = [("b", "IN", ("a", "b")), ("b", "IN", ("", "a", "z"))]
    exact = [("a", "=", a) for a in numbers]
    cases: list[tuple[Any, ...]] = [*itertools.product(simple, repeat=2)]
    cases += itertools.product(exact, [*on_b, *lists], [*on_b, *lists])
    for case in cases:
        text = " AND ".join(
            f"{n} IN ({', '.join(map(literal, v))})" if sign == "IN" else f"{n} {sign} {literal(v)}"
            for n, sign, v in case
        )
        selection = selection_of(text, columns, tmp_path)
        held = pa.array([True] * len(rows)) if selection.filter is None else selection.filter(keys)
        found = [row for row, wanted in zip(rows, held.to_pylist(), strict=True) if wanted]
        assert found == [
            row for row in rows
            if all(row[n] in v if sign == "IN" else COMPARE[sign](row[n], v) for n, sign, v in case)
        ], text  # fmt: skip
        partitions = {partition_of(columns.encode_key(*row.values()), 5) for row in found}
        assert partitions <= set(selection.partitions(5))


def test_the_keys_of_a_raw_changelog_are_the_column_key(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", partitions=3, config=QUIET) as log:
        log.append(table(("a", "1"), ("ab", "2"), ("b", "3"), ("it's", "4"), ("ab", "5")))
    read = {
        "key = 'ab'": [b"5"],
        "key == X'6162'": [b"5"],
        "key = 'it''s'": [b"4"],
        "`key` > 'a' AND key <= 'b'": [b"3", b"5"],
        "key in ('a', X'62', 'no')": [b"1", b"3"],
        "key = 'a' AND key = 'b'": [],
    }
    for where, expected in read.items():
        for mode in ("state", "log"):
            rows = read_batch(tmp_path / "log", where=where, mode=mode)
            values = sorted(row["value"] for row in rows)
            assert values == (sorted([*expected, b"2"]) if mode == "log" and b"5" in expected else expected)


def test_a_stream_gives_only_wanted_keys_and_columns(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", partitions=2, columns=TYPED, config=QUIET) as log:
        log.append({"word": ["a", "b"], "n": [1, 2]})
        options = {"startingOffsets": "earliest", "where": "word = 'a'", "columns": "n,_deleted"}
        stream = Driver(tmp_path / "log", options)
        assert stream.trigger() == [{"n": 1, "_deleted": False}]
        log.append({"word": ["b"], "n": [3]})
        assert stream.trigger() == []
        log.append({"word": ["a"], "n": [None], "_deleted": [True]})
        assert stream.trigger() == [{"n": None, "_deleted": True}]


PAIR = Columns(
    {"type": "struct", "fields": [field("a", "long"), field("b", "date"), field("v", "string")]}, ("a", "b")
)


@pytest.mark.parametrize(
    ("where", "parts"),
    [
        ("v = 'x'", ["not a key column", "a, b", "filter the DataFrame"]),
        ("b = '2026-01-01'", ["first key columns", "an = condition on 'a'"]),
        ("a > 1 AND b = '2026-01-01'", ["first key columns", "an = condition on 'a'"]),
        ("a IN (1, 2) AND b = '2026-01-01'", ["IN for 'a'"]),
        ("a = 'x'", ["type of the key column 'a'", "int64", "text"]),
        ("a = 1.5", ["type of the key column 'a'"]),
        ("a = NULL", ["another form"]),
        ("a = 9223372036854775808", ["'a'", "int64"]),
        ("a = 1 AND b = '2026-13-01'", ["type of the key column 'b'"]),
        ("a = 1 OR a = 2", ["another form"]),
        ("a <> 1", ["another form"]),
        ("a = 1 AND", ["another form", "an end"]),
        ("a IN (1 2)", ["another form", "without commas"]),
        ("a BETWEEN 1 OR 2", ["another form"]),
        ("a = 1; DROP", ["another form", "character 6"]),
        ("", ["another form"]),
    ],
)
def test_other_conditions_are_refused_when_the_data_is_loaded(
    where: str, parts: list[str], tmp_path: Path
) -> None:
    Changelog.open(tmp_path / "log", columns=PAIR, config=QUIET).close()
    with pytest.raises(ConfigError) as e:
        KeyfoldSource({"path": str(tmp_path / "log"), "where": where}).schema()
    for part in ["The option 'where' is refused", *parts]:
        assert part in str(e.value)


def test_unknown_columns_are_refused_with_those_there_are(tmp_path: Path) -> None:
    Changelog.open(tmp_path / "log", columns=TYPED, config=QUIET).close()
    for columns in ("word,m", "n,n", "N"):
        with pytest.raises(ConfigError, match=r"some of word, n, price, tags, seen(.|\n)*found"):
            KeyfoldSource({"path": str(tmp_path / "log"), "columns": columns}).schema()
    for columns in ("", "a,,b", ","):
        with pytest.raises(ConfigError, match="'columns'"):
            KeyfoldSource({"path": str(tmp_path / "log"), "columns": columns})


def test_names_with_commas_are_in_backquotes(tmp_path: Path) -> None:
    fields = [field(name, "long") for name in ("a,b", "c`d", "e f")]
    columns = Columns({"type": "struct", "fields": fields}, ("a,b",))
    with Changelog.open(tmp_path / "log", columns=columns, config=QUIET) as log:
        log.append({"a,b": [1], "c`d": [2], "e f": [3]})
    assert read_batch(tmp_path / "log", columns="`c``d`, e f ,`a,b`", where="`a,b` = 1") == [
        {"c`d": 2, "e f": 3, "a,b": 1}
    ]


NESTED = Columns(
    {
        "type": "struct",
        "fields": [
            field("k", "string"),
            field("s", {"type": "struct", "fields": [field("x", "long"), field("y", "string")]}),
            field("long", "string"),
        ],
    },
    ("k",),
)


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    with Changelog.open(tmp_path / "log", partitions=4, columns=NESTED, config=QUIET) as log:
        for _ in range(2):
            keys = [f"k{n}" for n in range(200)]
            values = [{"x": n, "y": "y"} if n % 3 else None for n in range(200)]
            log.append({"k": keys, "s": values, "long": ["z" * 100] * 200})
    return tmp_path / "log"


def test_a_users_schema_may_have_fewer_columns_and_fields(nested: Path) -> None:
    part = T.StructType().add("s", T.StructType().add("y", T.StringType())).add("k", T.StringType())
    reader = KeyfoldSource({"path": str(nested)}).reader(part)
    rows = rows_of(reader, reader.partitions())
    expected = [{"s": row["s"] and {"y": row["s"]["y"]}, "k": row["k"]} for row in read_batch(nested)]
    assert rows == expected
    for wrong in (
        T.StructType().add("s", T.StructType().add("z", T.StringType())),
        T.StructType().add("k", T.BinaryType()),
        T.StructType(),
    ):
        with pytest.raises(ConfigError, match="schema"):
            KeyfoldSource({"path": str(nested)}).reader(wrong)


class Decoded:
    """Counts the bytes of the blocks, or of their parts, that Arrow gets to decode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0

        def counted(block: pa.Buffer, nodes: Sequence[int], buffers: Sequence[int]) -> bytes:
            part = selected(block, nodes, buffers)
            self.bytes += len(part)
            return part

        monkeypatch.setattr("keyfold.statestore.segment.block_columns.selected", counted)

    def of(self, path: Path, **options: str) -> int:
        self.bytes = 0
        assert read_batch(path, **options)
        return self.bytes


def test_columns_that_are_not_asked_for_are_not_decompressed(
    nested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = Decoded(monkeypatch)
    keys = decoded.of(nested, columns="k")
    with_numbers = decoded.of(nested, columns="k,s")
    whole = sum(path.stat().st_size for path in nested.glob("?/*.arrows"))
    assert 0 < keys < with_numbers < whole
    # A nested field alone.
    part = T.StructType().add("s", T.StructType().add("x", T.LongType()))
    decoded.bytes = 0
    reader = KeyfoldSource({"path": str(nested)}).reader(part)
    assert rows_of(reader, reader.partitions())
    assert keys < decoded.bytes < with_numbers


def test_a_block_without_a_wanted_key_is_not_decoded_further(
    nested: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Changelog.open(nested, config=QUIET) as log:
        log.append({"k": ["only"], "s": [None], "long": ["z"]})
    decoded = Decoded(monkeypatch)
    assert decoded.of(nested, where="k = 'only'") < decoded.of(nested, columns="k")


def test_a_whole_key_is_looked_for_in_one_partition(nested: Path) -> None:
    source = KeyfoldSource({"path": str(nested), "where": "k = 'k7'"})
    schema = source.schema()
    pieces = [piece for piece in source.reader(schema).partitions() if isinstance(piece, Piece)]
    assert len(pieces) == 1

    mapped = set()

    class Seen(Watched):
        def map(self, path: Path) -> pa.Buffer:
            mapped.add(path.parent.name)
            return super().map(path)

    rows = list(pieces[0].records(Seen(), NESTED.value_type))
    assert sum(batch.num_rows for batch in rows) == 1
    assert mapped == {str(pieces[0].partition)}
