"""A typed changelog takes only records of its columns: one other record, and no whole state can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfold import Changelog, restore
from keyfold.checkpoints.log import ingest
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import BadRecord, SchemaMismatch
from keyfold.statestore.schema.columns import Columns
from support.changelogs import BY_HAND
from support.key_kinds import KINDS

SECRET = b"hunter2"


def field(name: str, kind: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": True, "metadata": {}}


JSON = Columns(
    {"type": "struct", "fields": [field("k", "long"), field("v", "double"), field("t", "timestamp")]},
    ("k",), "json",
)  # fmt: skip
RAW_TEXT = Columns({"type": "struct", "fields": [field("k", "string"), field("v", "string")]}, ("k",), "raw")
TWO_KEYS = Columns(
    {"type": "struct", "fields": [field("a", "long"), field("b", "string"), field("v", "long")]},
    ("a", "b"), "json",
)  # fmt: skip

#: Keys of `JSON`.
SEVEN, EIGHT = (b"\x80" + b"\0" * 6 + bytes([n]) for n in (7, 8))

GOOD = {
    "json": (JSON, SEVEN, b'{"v":1.5,"t":"2013-01-31T10:00:00.000000Z"}'),
    "raw": (RAW_TEXT, "é".encode(), b""),
    "two keys": (TWO_KEYS, SEVEN + b"x", b'{"v":1}'),
}


def table(*pairs: tuple[bytes, bytes | None]) -> pa.Table:
    keys = pa.array([key for key, _ in pairs], pa.binary())
    return pa.table({"key": keys, "value": pa.array([value for _, value in pairs], pa.binary())})


@pytest.mark.parametrize("name", GOOD)
def test_records_of_the_columns_and_deletes_are_taken(name: str, tmp_path: Path) -> None:
    columns, key, value = GOOD[name]
    with Changelog.open(tmp_path / "log", columns=columns, config=BY_HAND) as log:
        log.append(table((key, value), (key, None), (key, value)))
    assert restore(tmp_path / "log").to_arrow().num_rows == 1
    assert verify(tmp_path / "log").damages == []


#: Which columns, key, value, and what the position of the error says besides the row.
BAD: list[tuple[str, bytes, bytes | None, str]] = [
    ("json", b"", b"{}", "key, column 'k'"),
    ("json", SEVEN[1:], b"{}", "key, column 'k'"),
    ("json", SEVEN + b"\0", b"{}", "key, column 'k'"),
    ("json", SECRET + SEVEN, b"{}", "key, column 'k'"),
    ("json", SEVEN, b"", "value"),
    ("json", SEVEN, SECRET, "value"),
    ("json", SEVEN, b"null", "value"),
    ("json", SEVEN, b"[1]", "value"),
    ("json", SEVEN, b'{"v":"hunter2"}', "value, column 'v'"),
    ("json", SEVEN, b'{"v":1e400}', "value"),
    ("json", SEVEN, b'{"v":1,"t":7}', "value, column 't'"),
    ("json", SEVEN, b'{"v":1,"t":"hunter2"}', "value, column 't'"),
    ("json", SEVEN, b'{"v":1,"hunter2":1}', "value"),
    ("json", SEVEN, b'{"v":1', "value"),
    ("json", SEVEN, b'{"v":1}\n{"v":2}', "value"),
    ("json", SEVEN, b'{"v":1}\xff', "value"),
    ("raw", b"\xff", b"", "key, column 'k'"),
    ("raw", b"a", b"\xff\xfe", "value, column 'v'"),
    ("two keys", SEVEN[1:], b"{}", "key, column 'a'"),
    ("two keys", SEVEN + b"\xff", b"{}", "key, column 'b'"),
]


@pytest.mark.parametrize("row", [0, 1, 5, 11])
@pytest.mark.parametrize(("name", "bad_key", "bad_value", "part"), BAD)
def test_another_record_is_refused_by_row_and_column(
    name: str, bad_key: bytes, bad_value: bytes | None, part: str, row: int
) -> None:
    columns, key, value = GOOD[name]
    pairs: list[tuple[bytes, bytes | None]] = [(key, value)] * 12
    pairs[row] = (bad_key, bad_value)
    with pytest.raises(BadRecord) as refused:
        ingest.normalize(table(*pairs), 0, columns)
    assert refused.value.position == f"row {row}, {part}"
    assert refused.value.expected
    assert refused.value.remedy
    assert SECRET.decode() not in str(refused.value)


def test_after_a_refusal_nothing_is_written_and_the_writer_goes_on(tmp_path: Path) -> None:
    columns, key, value = GOOD["json"]
    with Changelog.open(tmp_path / "log", columns=columns, config=BY_HAND) as log:
        with pytest.raises(BadRecord, match="row 1, value"):
            log.append(table((key, value), (key, SECRET)))
        assert log.end_offsets() == {0: 0}
        log.append(table((key, value)))
    assert restore(tmp_path / "log").to_arrow().num_rows == 1


def test_the_row_is_that_of_the_whole_table_also_behind_many(tmp_path: Path) -> None:
    columns, key, value = GOOD["raw"]
    count = 150_000
    pairs = [(key, value)] * count + [(key, b"\xff")]
    with Changelog.open(tmp_path / "log", columns=columns, config=BY_HAND) as log:
        with pytest.raises(BadRecord, match=rf"row {count}, value"):
            log.append(table(*pairs))


def test_a_transaction_commits_only_records_of_the_columns(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", columns=JSON, config=BY_HAND) as log:
        with pytest.raises(BadRecord):
            with log.transaction(app_id="a", batch_id=0) as store:
                store.put(SEVEN, SECRET)
        assert log.end_offsets() == {0: 0}
        with log.transaction(app_id="a", batch_id=0) as store:
            store.put(SEVEN, b"{}")
    assert restore(tmp_path / "log").to_dict() == {7: {"v": None, "t": None}}


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=1, max_size=30))
def test_the_first_bad_record_is_found_wherever_it_is(rows: list[tuple[bool, int]]) -> None:
    bad = [b"", SECRET, b'{"v":"x"}', b'{"x":1}', b'{"v":1}{"v":2}', b" {}"]
    values = [b'{"v":1}' if good else bad[which] for good, which in rows]
    # A space before the brace says that floats are text, and is a form of its own.
    first = next((i for i, value in enumerate(values) if value not in (b'{"v":1}', b" {}")), None)
    found = JSON.misfit(pa.array([SEVEN] * len(values)), pa.array(values, pa.binary()))
    assert (None if found is None else found.row) == first


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_every_key_that_encode_key_gives_fits(data: st.DataObject) -> None:
    kind = data.draw(KINDS)
    of = Columns({"type": "struct", "fields": [field("k", kind.json)]}, ("k",), "json")
    keys = [of.encode_key({"k": data.draw(kind.values)}) for _ in range(3)]
    assert of.misfit(pa.array(keys, pa.binary()), pa.array([b"{}"] * 3, pa.binary())) is None


def test_a_directory_whose_keys_have_another_encoding_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be misread: its partitions and its lookups are those of other bytes."""
    root = tmp_path / "log"
    kept = JSON.to_json()
    del kept["key_encoding"]
    with monkeypatch.context() as older:
        older.setattr(Columns, "to_json", lambda _: {**kept, "key_format": "json"})
        Changelog.open(root, columns=JSON, config=BY_HAND).close()
    for read in (Changelog.open, restore, verify):
        with pytest.raises(SchemaMismatch, match="cannot read the keys") as refused:
            read(root)
        assert refused.value.path == str(root / "changelog.json")
        assert refused.value.position == '"key_encoding" in "schema"'


# -- and what got in before ----------------------------------------------------------------------------------


def _spoiled(root: Path, partitions: int, rows: pa.Table) -> list[tuple[int, int]]:
    """Partition and offset of the records without a good value."""
    with Changelog.open(root, partitions=partitions, columns=JSON, config=BY_HAND) as log:
        log.append(rows)
        return [
            (number, offset)
            for number in range(partitions)
            for batch in log.read(number)
            for offset, value in zip(
                batch.column("offset").to_pylist(), batch.column("value").to_pylist(), strict=True
            )
            if value == SECRET
        ]


@pytest.mark.parametrize("closed", [True, False])
def test_verify_names_partition_and_offset_of_records_that_are_not_of_the_columns(
    closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "log"
    rows = table(*((JSON.encode_key(n), SECRET if n % 7 == 3 else b'{"v":1}') for n in range(40)))
    with monkeypatch.context() as patched:
        patched.setattr(Columns, "misfit", lambda *_: None)
        if closed:
            spoiled = _spoiled(root, 3, rows)
        else:
            with Changelog.open(root, partitions=3, columns=JSON, config=BY_HAND):
                spoiled = _spoiled(root, 3, rows)
                patched.undo()
                assert len(verify(root).damages) == len(spoiled)
    found = verify(root)
    named = [d.position.split(", ", 1)[1] for d in found.damages]
    assert named == [f"partition {number}, offset {offset}" for number, offset in spoiled]
    assert all(SECRET.decode() not in f"{d}" for d in found.damages)
    with pytest.raises(SchemaMismatch, match="keyfold verify"):
        restore(root).to_arrow()


def test_a_block_of_other_records_is_told_in_a_few_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Columns, "misfit", lambda *_: None)
        rows = table(*((JSON.encode_key(n), SECRET) for n in range(5_000)))
        assert len(_spoiled(tmp_path / "log", 1, rows)) == 5_000
    found = verify(tmp_path / "log").damages
    assert [d.position.partition(", ")[2] for d in found] == [
        *(f"partition 0, offset {n}" for n in range(10)),
        "partition 0, offset 10, and perhaps more of this block",
    ]
