"""The rows of docs/encoding.md: keyfold writes and reads its test vectors, and a reader made from the page
alone reads them, and those of keys.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keyfold.statestore.schema import rows
from keyfold.statestore.schema.row_values import RowValues
from keyfold.statestore.schema.spark_types import arrow_schema
from support.foreign_encoding import Misfit, read_key, read_row
from support.key_kinds import field, parsed_types, parsed_value

PAGE = Path(__file__).resolve().parents[3] / "docs/encoding.md"


def _vectors(heading: str) -> list[tuple[str, str, bytes]]:
    table = PAGE.read_text().split(f"{heading}\n")[1].split("\n#")[0]
    lines = [line[1:-1].split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    return [
        (kinds.strip(), values.strip(" `"), bytes.fromhex(raw.strip(" `").replace("no bytes", "")))
        for kinds, values, raw in lines
    ]


KEYS, ROWS = _vectors("### Test vectors"), _vectors("#### Test vectors of rows")


def _fields(kinds: str) -> list[dict[str, Any]]:
    return [field(f"c{i}", kind) for i, kind in enumerate(parsed_types(kinds))]


def _values(fields: list[dict[str, Any]], text: str) -> dict[str, Any]:
    schema = arrow_schema(fields)
    values = json.loads(f"[{text}]")
    parsed = [parsed_value(value, f.type) for value, f in zip(values, schema, strict=True)]
    # As Arrow has them, a float rounded to its type.
    return {f.name: pa.array([v], f.type)[0].as_py() for v, f in zip(parsed, schema, strict=True)}


def shown(value: object) -> str:
    """A NaN is not equal to itself, and -0.0 equals 0.0; time zones named UTC are the same."""
    return re.sub(r"<UTC>|zoneinfo\.ZoneInfo\(key='UTC'\)", "datetime.timezone.utc", repr(value))


@pytest.mark.parametrize(("kinds", "text", "raw"), ROWS)
def test_each_row_of_the_page_is_written_and_read(kinds: str, text: str, raw: bytes) -> None:
    fields = _fields(kinds)
    kind, expected = pa.struct(list(arrow_schema(fields))), _values(fields, text)
    packed = rows.encode(pa.array([expected], kind), 1)
    assert packed.to_pylist() == [raw]
    assert RowValues(kind).encode(expected, 1) == raw
    assert shown(rows.decode(packed, kind)[0].as_py()) == shown(expected)
    assert shown(RowValues(kind).decode(raw)) == shown(expected)


@pytest.mark.parametrize(("kinds", "text", "raw"), ROWS)
def test_a_reader_made_from_the_page_reads_each_row(kinds: str, text: str, raw: bytes) -> None:
    fields = _fields(kinds)
    assert shown(read_row(raw, [fields])) == shown((1, _values(fields, text)))
    with pytest.raises(Misfit):
        read_row(raw + b"\0", [fields])
    with pytest.raises(Misfit):
        read_row(b"\2" + raw[1:], [fields])


@pytest.mark.parametrize(("kinds", "text", "raw"), KEYS)
def test_a_reader_made_from_the_page_reads_each_key(kinds: str, text: str, raw: bytes) -> None:
    fields = _fields(kinds)
    expected = [0.0 if value == 0 and isinstance(value, float) else value
                for value in _values(fields, text).values()]  # fmt: skip
    assert shown(read_key(raw, [f["type"] for f in fields])) == shown(expected)


def test_the_row_vectors_have_every_type_of_the_table() -> None:
    table = PAGE.read_text().split("### Rows")[1].split("| type | fixed part |")[1].split("\n\n")[0]
    named = [name.strip() for line in table.splitlines()[2:] for name in line.split("|")[1].split(",")]
    assert len(named) >= 16
    used = " ".join(kinds for kinds, _, _ in ROWS)
    assert [name for name in named if name not in used] == []


def test_the_worked_example_is_a_row() -> None:
    example = PAGE.read_text().split("A row of the columns")[1].split("```text\n")[1].split("```")[0]
    raw = bytes.fromhex("".join(part.strip() for part in example.splitlines()[1].split("|")))
    kind = pa.struct([("word", pa.string()), ("count", pa.int32())])
    assert rows.encode(pa.array([{"word": "to", "count": 2}], kind), 1).to_pylist() == [raw]
