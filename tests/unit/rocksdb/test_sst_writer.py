"""Sorted files made from Arrow columns, as RocksDB itself reads them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rocksdict import Rdict, WriteBatch

from keyfold.statestore.files import Files, OpenFile
from keyfold.statestore.rocksdb import database, sst_writer
from keyfold.statestore.rocksdb.db import (
    database_options,
    moving_ingestion,
    open_database,
    takes_sorted_files,
)
from keyfold.statestore.rocksdb.sst_writer import Rows, SortedFile

_VALUES = st.none() | st.binary(max_size=40) | st.integers(100, 20_000).map(lambda n: b"v" * n)
_ROWS = st.dictionaries(st.binary(max_size=12) | st.binary(min_size=110, max_size=150), _VALUES, max_size=60)


class CountedFiles(Files):
    """How many files keyfold itself has made."""

    created = 0

    def create(self, path: Path) -> OpenFile:
        self.created += 1
        return super().create(path)


def write(path: Path, *parts: Rows) -> None:
    made = SortedFile()
    with path.open("xb") as file:
        for part in parts:
            for blocks in made.add(part):
                file.write(blocks)
        file.writelines(made.finish())


def rows_of(rows: dict[bytes, bytes | None], prefix: bytes = b"", head: bytes = b"") -> Rows:
    keys = sorted(rows)
    heads = np.tile(np.frombuffer(head, np.uint8), (len(keys), 1)).reshape(len(keys), len(head))
    values = pa.array([rows[key] for key in keys], pa.binary())
    return Rows(prefix, pa.array(keys, pa.binary()), heads, values)


def ingested(directory: Path, *parts: Rows) -> Rdict:
    write(directory / "made.sst", *parts)
    db = open_database(directory / "db", database_options())
    db.ingest_external_file([str(directory / "made.sst")], moving_ingestion())
    return db


def everything(db: Rdict) -> dict[bytes, bytes]:
    """All rows, and no silent end at a block that cannot be read."""
    found: dict[bytes, bytes] = {}
    cursor = db.iter()
    cursor.seek_to_first()
    while cursor.valid():
        found[cursor.key()] = cursor.value()
        cursor.next()
    cursor.status()
    return found


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp())
    yield made
    shutil.rmtree(made)


@settings(max_examples=60)
@given(_ROWS.filter(bool), st.binary(max_size=3), st.binary(max_size=17))
def test_rocksdb_reads_what_was_put_in(rows: dict[bytes, bytes | None], prefix: bytes, head: bytes) -> None:
    with tempfile.TemporaryDirectory() as made:
        db = ingested(Path(made), rows_of(rows, prefix, head))
        expected = {prefix + key: head + value for key, value in rows.items() if value is not None}
        assert everything(db) == expected
        for key in rows:
            assert db.get(prefix + key) == expected.get(prefix + key)
        db.compact_range(None, None)
        assert everything(db) == expected
        db.close()


@settings(max_examples=40)
@given(_ROWS, _ROWS.filter(bool))
def test_a_file_covers_what_was_there_before(
    before: dict[bytes, bytes | None], rows: dict[bytes, bytes | None]
) -> None:
    with tempfile.TemporaryDirectory() as made:
        db = open_database(Path(made) / "db", database_options())
        for key, value in before.items():
            if value is not None:
                db[key] = value
        write(Path(made) / "made.sst", rows_of(rows))
        db.ingest_external_file([str(Path(made) / "made.sst")], moving_ingestion())
        both = {**before, **rows}
        assert everything(db) == {key: value for key, value in both.items() if value is not None}
        db.close()


@pytest.mark.parametrize("length", [0, 1, 126, 127, 128, 129, 16_383, 16_384, 2_097_151, 2_097_152])
def test_lengths_at_the_edges_of_varints(directory: Path, length: int) -> None:
    rows: dict[bytes, bytes | None] = {b"a": b"v" * length, b"b": b"", b"k" * length: b"v" * length}
    db = ingested(directory, rows_of(rows))
    assert everything(db) == rows
    db.close()


def test_files_of_many_parts_and_blocks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sst_writer, "_ROWS", 1000)
    monkeypatch.setattr(sst_writer, "_ROWS_BYTES", 30_000)
    rows: dict[bytes, bytes | None] = {b"%06d" % n: b"v" * (n % 97) for n in range(20_000)}
    for n in range(0, 20_000, 7):
        rows[b"%06d" % n] = None
    meta = rows_of({b"\0": b"first"})
    db = ingested(directory, meta, rows_of(rows, b"\1", b"head"))
    expected = {b"\1" + key: b"head" + value for key, value in rows.items() if value is not None}
    assert everything(db) == {b"\0": b"first", **expected}
    some = list(expected)[::501]
    assert [db.get(key) for key in some] == [expected[key] for key in some]
    db.close()


def test_a_value_larger_than_a_part(directory: Path) -> None:
    rows: dict[bytes, bytes | None] = {b"a": b"1", b"b": bytes(20 << 20), b"c": b"2", b"d": bytes(9 << 20)}
    db = ingested(directory, rows_of(rows))
    assert everything(db) == rows
    db.close()


def test_what_rocksdb_knows_of_the_file(directory: Path) -> None:
    db = ingested(directory, rows_of({b"a": b"1", b"b": None, b"c": b"22", b"d": b""}))
    (file,) = db.live_files()
    assert (file["start_key"], file["end_key"]) == (b"a", b"d")
    assert (file["num_entries"], file["num_deletions"]) == (4, 1)
    db.close()


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("0.3.28", False),
        ("0.3.29", True),
        ("0.3.30", False),
        ("1.0.0", False),
        ("0.3.29rc1", False),
        ("", False),
    ],
)
def test_rows_are_the_same_in_a_version_of_rocksdict_that_was_not_tested(
    version: str, tested: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There RocksDB writes its files itself."""
    monkeypatch.setattr(database, "version", lambda name: version)
    files = CountedFiles()
    rows: dict[bytes, bytes | None] = {b"%06d" % n: b"v" * (n % 97) for n in range(3_000)}
    store = database.Database.open(directory / "db", files=files)
    before = {b"\1" + b"000000": b"old", b"\1" + b"000008": b"old"}
    for key, value in before.items():
        batch = WriteBatch(raw_mode=True)
        batch[key] = value
        store.write(batch)
    for n in range(0, 3_000, 7):
        rows[b"%06d" % n] = None
    for _ in range(2):  # the second one replaces what the first has left
        store.ingest(
            store.write_file("load.tmp", [rows_of({b"\0": b"first"}), rows_of(rows, b"\1", b"head")])
        )
    expected = {b"\1" + key: b"head" + value for key, value in rows.items() if value is not None}
    assert everything(store._opened()) == {b"\0": b"first", **expected}
    store.close()
    assert (files.created > 0) == tested


def test_the_installed_rocksdict_is_one_that_was_tested() -> None:
    assert takes_sorted_files(metadata.version("rocksdict"))


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_flipped_byte_in_a_block_is_noticed(directory: Path, place: float) -> None:
    path = directory / "made.sst"
    write(path, rows_of({b"%06d" % n: b"value" for n in range(3000)}))
    data = bytearray(path.read_bytes())
    data[int(2000 * 22 * place)] ^= 4
    path.write_bytes(data)
    db = open_database(directory / "db", database_options())

    def read() -> None:
        db.ingest_external_file([str(path)], moving_ingestion())
        everything(db)

    with pytest.raises(Exception, match="Corruption"):
        read()
    db.close()
