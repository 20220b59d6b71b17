"""What follows a typed changelog while columns are added; its damage, rows and blocks."""

from __future__ import annotations

import errno
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold import Changelog, restore
from keyfold.checkpoints.log import recovery
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import BadRecord, KeyfoldError
from keyfold.statestore.schema import rows
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.schema.python_values import to_python
from keyfold.statestore.schema.row_values import RowValues
from keyfold.statestore.segment.block import BLOCK_BYTES, no_headers, record_batch, schema_of, split
from support.changelogs import BY_HAND, flip
from support.key_kinds import ATOMIC, field
from support.typed_golden import exact

CONFIG = {**BY_HAND, "anchors.auto": 0}


def columns(**kinds: Any) -> Columns:
    fields = [field("k", "long"), *(field(*pair) for pair in kinds.items())]
    return Columns({"type": "struct", "fields": fields}, ("k",))


OLD = columns(a="integer")
NEW = OLD.accepts(columns(a="integer", b="string"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


# -- added columns -------------------------------------------------------------------------------------------


def test_a_view_of_the_last_values_has_a_column_that_is_added_later(path: Path) -> None:
    with Changelog.open(path, columns=OLD, config=CONFIG) as log:
        log.append({"k": [1], "a": [1]})
        view = log.store()
        log.engine.set_columns(NEW)
        log.append({"k": [2], "a": [2], "b": ["x"]})
        expected = {1: {"a": 1, "b": None}, 2: {"a": 2, "b": "x"}}
        assert dict(view.all()) == expected
        assert {key: view.get(key) for key in expected} == expected
        assert view.get_all(pa.array([2, 1])).to_pylist() == [expected[2], expected[1]]
        with view.snapshot() as still:
            log.engine.set_columns(NEW.accepts(columns(a="integer", b="string", c="long")))
            log.append({"k": [2], "c": [3]})
            assert dict(still.all()) == expected
        assert view.get(2) == {"a": None, "b": None, "c": 3}


def test_a_reader_that_could_not_read_the_columns_once_has_them_the_next_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a state whose columns it does not know, it would leave their values out for ever."""

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "failed")

    with Changelog.open(path, columns=OLD, config=CONFIG) as log:
        log.append({"k": [1], "a": [1]})
        with Changelog.open(path, mode="r") as reader:
            log.engine.set_columns(NEW)
            log.append({"k": [2], "b": ["x"]})
            with monkeypatch.context() as patched:
                patched.setattr(recovery, "read_identity", failing)
                with pytest.raises(OSError, match="failed"):
                    reader.refresh()
            assert reader.end_offsets() == {0: 1}
            reader.refresh()
            assert reader.get(2) == {"a": None, "b": "x"}


def test_a_batch_that_is_delivered_again_after_a_column_was_added_is_known(path: Path) -> None:
    batch = {"k": [1, 2], "a": [1, None], "_deleted": [False, True]}
    with Changelog.open(path, columns=OLD, config=CONFIG) as log:
        first = log.append(batch, app_id="x", batch_id=0)
        log.engine.set_columns(NEW)
        again = log.append(batch, app_id="x", batch_id=0)
        assert (again.number, again.applied) == (first.number, False)
        with pytest.raises(KeyfoldError):
            log.append({**batch, "b": ["new", None]}, app_id="x", batch_id=0)
        assert log.end_offsets() == {0: 2}


def test_a_segment_has_blocks_of_one_schema_and_the_cleaner_joins_those_of_several(path: Path) -> None:
    with Changelog.open(path, columns=OLD, config=CONFIG) as log:
        for number in range(4):
            log.append({"k": [number, 9], "a": [number, number]})
            grown = columns(a="integer", **{f"n{number}": "long"})
            log.engine.set_columns(log.columns.accepts(grown) if log.columns else grown)
            log.append({"k": [number + 10], f"n{number}": [number]})
        assert kinds_of(log) == [1, 2, 3, 4, 5]
        before = dict(log.store().all())
        log.compact()
        assert kinds_of(log) == [5]
        assert dict(log.store().all()) == before
    assert restore(path).to_dict() == before
    assert verify(path).damages == []


def kinds_of(log: Changelog) -> list[int]:
    """How many value columns each segment has, of which each block is read as such."""
    counts = []
    for segment in log.state.partitions[0].segments:
        data = (log.path / "0" / segment.name).read_bytes()
        with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
            kind = schema_of(pa.py_buffer(data)).field("value").type
            read = [batch for batch in stream if batch.num_rows]
            assert sum(batch.num_rows for batch in read) >= segment.records
            for batch in read:
                batch.validate(full=True)
        counts.append(kind.num_fields)
    return counts


# -- damage --------------------------------------------------------------------------------------------------


def test_verify_names_a_segment_whose_values_are_of_another_kind(path: Path) -> None:
    with Changelog.open(path, config=CONFIG) as log:
        log.append({"key": [OLD.encode_key(1)], "value": [b"x"]})
        log.engine.writer.replace_identity(replace(log.identity, columns=OLD))
    damages = [str(damage) for damage in verify(path).damages]
    assert any("another type" in damage and "a struct" in damage for damage in damages), damages


def test_verify_finds_any_flipped_byte_of_a_typed_segment(path: Path) -> None:
    with Changelog.open(path, columns=NEW, config=CONFIG) as log:
        log.append({"k": range(20), "a": range(20), "b": [f"text {n}" for n in range(20)]})
    (segment,) = path.glob("0/*.arrows")
    for position in range(0, segment.stat().st_size, 41):
        flip(segment, position)
        assert verify(path).damages, position
        flip(segment, position)
    assert verify(path).damages == []


# -- one row at a time ---------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(ATOMIC), max_size=10), st.integers(0, 65535), st.data())
def test_a_row_alone_is_that_of_many(kinds: list[Any], number: int, data: st.DataObject) -> None:
    kind = pa.struct([pa.field(f"f{i}", kind.arrow) for i, kind in enumerate(kinds)])
    value = {f"f{i}": data.draw(st.none() | kind.values) for i, kind in enumerate(kinds)}
    whole = pa.array([value], kind)
    packed = rows.encode(whole, number)[0].as_py()
    assert RowValues(kind).encode(value, number) == packed
    given_ = {name: item for name, item in value.items() if item is not None}
    assert RowValues(kind).encode(given_, number) == packed
    assert exact(RowValues(kind).decode(packed)) == exact(whole[0].as_py())


@given(st.lists(st.sampled_from(ATOMIC), min_size=1, max_size=4), st.data())
def test_a_key_alone_is_that_of_many(kinds: list[Any], data: st.DataObject) -> None:
    """Also of columns that were used and then sent to another process."""
    names = tuple(f"k{i}" for i in range(len(kinds)))
    fields = [field(name, kind.json) for name, kind in zip(names, kinds, strict=True)]
    of = Columns({"type": "struct", "fields": fields}, names)
    for _ in range(2):
        values = [data.draw(kind.values) for kind in kinds]
        arrays = [pa.array([value], kind.arrow) for value, kind in zip(values, kinds, strict=True)]
        (packed,) = of.encode_keys(arrays).to_pylist()
        assert of.encode_key(*values) == packed
        of = ForkingPickler.loads(ForkingPickler.dumps(of))
        assert of.decode_row(of.encode_row({})) == {}


@given(st.lists(st.sampled_from(ATOMIC), max_size=6), st.data())
def test_other_bytes_are_refused_alone_as_among_many(kinds: list[Any], data: st.DataObject) -> None:
    kind = pa.struct([pa.field(f"f{i}", kind.arrow) for i, kind in enumerate(kinds)])
    value = {f"f{i}": data.draw(st.none() | kind.values) for i, kind in enumerate(kinds)}
    row = bytearray(rows.encode(pa.array([value], kind), 1)[0].as_py())
    for _ in range(data.draw(st.integers(1, 3))):
        match data.draw(st.sampled_from(["cut", "grow", "flip"])):
            case "cut":
                del row[data.draw(st.integers(2, len(row))) :]
            case "grow":
                row += data.draw(st.binary(min_size=1, max_size=9))
            case _:
                row[data.draw(st.integers(0, len(row) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        many: str | None = exact(to_python(rows.decode(pa.array([bytes(row)]), kind), "")[0])
    except (ValueError, BadRecord):  # also a time that Python cannot represent
        many = None
    try:
        alone: str | None = exact(RowValues(kind).decode(bytes(row)))
    except (ValueError, BadRecord):
        alone = None
    assert alone == many


# -- blocks --------------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([0, 1, 1000, BLOCK_BYTES // 3, BLOCK_BYTES, 3 * BLOCK_BYTES]), max_size=12),
    st.booleans(),
    st.integers(0, 3),
)
def test_blocks_are_all_rows_in_order_and_about_as_large_as_they_should_be(
    sizes: list[int], nested: bool, start: int
) -> None:
    texts = pa.array(["x" * size for size in sizes], pa.string())
    column = pa.ListArray.from_arrays(pa.array(range(len(sizes) + 1), pa.int32()), texts) if nested else texts
    values = pa.StructArray.from_arrays([column, pa.array(range(len(sizes)), pa.int64())], ["s", "n"])
    count = len(sizes)
    keys = pa.array([b"k"] * count, pa.binary())
    times = pa.array(np.zeros(count, np.int64)).cast(pa.timestamp("ms"))
    batch = record_batch(np.arange(count), times, keys, values, no_headers(count)).slice(start)
    pieces = list(split(batch))
    assert pa.Table.from_batches(pieces, batch.schema).equals(pa.Table.from_batches([batch]))
    assert all(piece.num_rows for piece in pieces)
    if not nested:
        for piece in pieces:
            assert piece.num_rows == 1 or piece.column("value").nbytes < 2 * BLOCK_BYTES
