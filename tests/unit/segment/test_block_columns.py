"""Some columns of a block: what they hold, and that the others are not decompressed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold import Changelog
from keyfold.statestore.files import LOCAL
from keyfold.statestore.projection import as_type
from keyfold.statestore.segment.block import HEADERS_TYPE, RECORD_SCHEMA, encode, record_batch
from keyfold.statestore.segment.block_columns import BlockColumns
from keyfold.statestore.segment.message import selected
from keyfold.statestore.segment.reader import SegmentReader
from support.value_kinds import columns

CODECS = [None, "lz4", "zstd"]
NAMES = RECORD_SCHEMA.names
CONFIG = {"anchors.auto": 0, "cleaner.threads": 0}


def records_of(values: pa.Array) -> pa.RecordBatch:
    rows = np.arange(len(values))
    headers = pa.array(
        [[{"key": "h", "value": b"x" * (n % 3)}] if n % 2 else None for n in rows], HEADERS_TYPE
    )
    keys = pa.array([b"key %d" % n for n in rows], pa.binary())
    return record_batch(rows, pa.array(rows).cast(pa.timestamp("ms")), keys, values, headers)


def values_in(batch: pa.RecordBatch, name: str) -> str:
    """NaN equals NaN here."""
    return repr(batch.column("value").field(name).to_pylist())


@given(columns().filter(len), st.sampled_from(CODECS), st.data())
def test_some_columns_of_a_block_are_those_of_the_whole(
    values: pa.StructArray, codec: str | None, data: st.DataObject
) -> None:
    batch = records_of(values)
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    fields = [field for field in values.type if data.draw(st.booleans())]
    chosen = BlockColumns.of(batch.schema, names, pa.struct(fields))
    found = chosen.decode(encode(batch, codec))
    found.validate(full=True)
    assert found.schema.names == [name for name in NAMES if name in names]
    assert found.num_rows == batch.num_rows
    for name in {*names} - {"value"}:
        assert found.column(name).equals(batch.column(name))
    if "value" in names:
        assert found.column("value").type == pa.struct(fields)
        assert found.column("value").is_null().equals(values.is_null())
        for field in fields:
            assert values_in(found, field.name) == values_in(batch, field.name)


def part_of(data: st.DataObject, kind: pa.DataType) -> pa.DataType:
    """A type with some of the fields, also of structs within, in any order."""
    if not pa.types.is_struct(kind):
        return kind
    some = [field for field in kind if data.draw(st.booleans())]
    return pa.struct([f.with_type(part_of(data, f.type)) for f in data.draw(st.permutations(some))])


@given(columns().filter(len), st.sampled_from(CODECS), st.data())
def test_structs_within_may_have_fewer_fields(
    values: pa.StructArray, codec: str | None, data: st.DataObject
) -> None:
    batch = records_of(values)
    wanted = part_of(data, values.type)
    found = BlockColumns.of(batch.schema, ["value"], wanted).decode(encode(batch, codec))
    found.validate(full=True)
    given_, expected = (as_type(b.column("value"), wanted) for b in (found, batch))
    assert repr(given_.to_pylist()) == repr(expected.to_pylist())


@pytest.mark.parametrize("codec", CODECS)
def test_of_raw_values_only_the_presence_is_read(codec: str | None) -> None:
    batch = records_of(pa.array([b"", None, b"long" * 10_000]))
    chosen = BlockColumns.of(batch.schema, ["value"], pa.struct([]))
    block = encode(batch, codec)
    assert len(selected(block, chosen.nodes, chosen.buffers)) < 10_000
    assert chosen.decode(block).column("value").to_pylist() == [{}, None, {}]
    assert as_type(batch.column("value"), pa.struct([])).to_pylist() == [{}, None, {}]


@pytest.mark.parametrize("codec", CODECS)
def test_the_bytes_of_other_columns_are_not_read(codec: str | None) -> None:
    """They are left out of what Arrow gets."""
    values = pa.StructArray.from_arrays(
        [pa.array(np.arange(5000) % 7), pa.array([f"text {n % 100}" for n in range(5000)])], ["a", "b"]
    )
    batch = records_of(values)
    block = encode(batch, codec)
    wanted = BlockColumns.of(batch.schema, ["value"], pa.struct([values.type.field("a")]))
    kept = selected(block, wanted.nodes, wanted.buffers)
    assert len(kept) < block.size / 3
    assert wanted.decode(block).column("value").field("a").equals(values.field("a"))


def test_a_block_of_other_columns_is_refused() -> None:
    batch = records_of(pa.array([b"value"]))
    typed = records_of(pa.array([{"a": 1, "b": 2}]))
    with pytest.raises(ValueError, match="not an Arrow record batch of these columns"):
        BlockColumns.of(typed.schema, NAMES).decode(encode(batch))


def written(path: Path, codecs: Sequence[str], *, gaps: bool) -> pa.Table:
    """A changelog with one block for each codec, of which the last have a further column; what it holds."""
    with Changelog.open(path, keys="k", config=CONFIG) as log:
        for block, codec in enumerate(codecs):
            log.engine.configure({"compression.type": codec})
            keys = [f"{row // (2 if gaps else 1)} {block}" for row in range(40)]
            rows = {"k": keys, "a": [*range(40)], "b": [None, "text", "", "b"] * 10, "c": [b"bytes"] * 40}
            log.append(pa.table(rows | {"_deleted": [n % 8 == 7 for n in range(40)]}))
        if gaps:
            log.compact()
        return pa.Table.from_batches(log.read(0))


@pytest.mark.parametrize("codecs", [("none", "zstd", "lz4", "none"), ("zstd", "none", "zstd")])
@pytest.mark.parametrize("kind", ["crashed", "sealed", "gaps"])
def test_a_segment_is_read_by_columns(tmp_path: Path, codecs: Sequence[str], kind: str) -> None:
    """By a reader that has read its keys before, and by a new one."""
    path = tmp_path / "log"
    if kind == "crashed":
        with Changelog.open(tmp_path / "living", keys="k", config=CONFIG):
            whole = written(tmp_path / "living", codecs, gaps=False)
            shutil.copytree(tmp_path / "living", path)
    else:
        whole = written(path, codecs, gaps=kind == "gaps")
    with Changelog.open(path, mode="r") as log:
        (segment,) = log.state.partitions[0].segments
        values = log.identity.value_type
    assert segment.sealed == (kind != "crashed")
    absent = pa.field("absent", pa.int32())
    for some in [c for n in range(4) for c in combinations([*values, absent], n)]:
        kind_ = pa.struct(list(some))
        for names in (NAMES, ["offset", "value"], ["offset", "key", "value"], ["offset"], ["offset", "key"]):
            reader = SegmentReader(LOCAL, path / "0", segment, kind_, names)
            for keys_first in (False, True):
                keys = list(reader.batches(keys_only=True)) if keys_first else []
                assert all(batch.schema.names == ["offset", "key"] for batch in keys)
                found = pa.Table.from_batches(reader.batches(35, segment.next - 5))
                low, high = 35, segment.next - 5
                expected = whole.filter([low <= offset < high for offset in whole["offset"].to_pylist()])
                assert found.schema.names == names
                for name in {*names} - {"value"}:
                    assert found[name].equals(expected[name])
                if "value" in names:
                    assert found["value"].to_pylist() == [
                        value and {f.name: value.get(f.name) for f in some}
                        for value in expected["value"].to_pylist()
                    ]
