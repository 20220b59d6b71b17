"""Parts of a block: the same as the whole block without the rest, for every type and codec."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold.statestore.projection import as_type
from keyfold.statestore.segment.block import encode, no_headers, record_batch
from keyfold.statestore.segment.selected import PRESENCE, decode_part, part_of
from support.key_kinds import KINDS, Kind, schema_of

MAPS = Kind(
    {"type": "map", "keyType": "string", "valueType": "long", "valueContainsNull": True},
    st.lists(
        st.tuples(st.text(max_size=2), st.none() | st.integers(0, 9)), max_size=2, unique_by=lambda e: e[0]
    ),
)
VOID = Kind("void", st.none())
ALL = KINDS | st.sampled_from([MAPS, VOID])


def part(draw: Any, kind: pa.DataType) -> pa.DataType:
    """A type with some of the fields, which may be in another order."""
    if not pa.types.is_struct(kind):
        return kind
    chosen = draw(st.lists(st.sampled_from(range(kind.num_fields)), unique=True)) if kind.num_fields else []
    return pa.struct([kind.field(i).with_type(part(draw, kind.field(i).type)) for i in chosen])


@given(data=st.data(), codec=st.sampled_from([None, "lz4", "zstd"]))
def test_a_part_of_a_block_is_what_projection_makes_of_the_whole(
    data: st.DataObject, codec: str | None
) -> None:
    kinds = data.draw(st.lists(ALL, max_size=4))
    count = data.draw(st.integers(1, 20))
    fields = schema_of(kinds)
    rows = st.none() | st.fixed_dictionaries(
        {f.name: st.none() | kind.values for f, kind in zip(fields, kinds, strict=True)}
    )
    values = pa.array(data.draw(st.lists(rows, min_size=count, max_size=count)), pa.struct(list(fields)))
    times = pa.array([0] * count, pa.timestamp("ms"))
    keys = pa.array([b"k%d" % n for n in range(count)])
    batch = record_batch(np.arange(count), times, keys, values, no_headers(count))
    block = pa.py_buffer(encode(batch, codec).to_pybytes())
    wanted = part(data.draw, values.type)
    needed = batch.schema.set(3, pa.field("value", part_of(values.type, wanted)))
    found = decode_part(block, batch.schema, needed)
    found.validate(full=True)
    # NaN is not equal to itself.
    assert repr(as_type(found.column("value"), wanted).to_pylist()) == repr(
        as_type(values, wanted).to_pylist()
    )
    for name in ("offset", "timestamp", "key"):
        alone = decode_part(block, batch.schema, pa.schema([batch.schema.field(name)]))
        assert alone.column(0).equals(batch.column(name))
    assert found.column("headers").equals(batch.column("headers"))


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_headers_and_presence_of_raw_values(codec: str | None) -> None:
    headers = pa.array(
        [[{"key": "h", "value": b"1"}, {"key": "i", "value": None}], None, []], no_headers(0).type
    )
    times = pa.array([1, 2, 3], pa.timestamp("ms"))
    values = pa.array([b"", None, b"x"])
    batch = record_batch(np.arange(3), times, pa.array([b"a", b"", b"c"]), values, headers)
    block = pa.py_buffer(encode(batch, codec).to_pybytes())
    needed = batch.schema.set(3, pa.field("value", part_of(values.type, PRESENCE)))
    found = decode_part(block, batch.schema, needed)
    found.validate(full=True)
    assert found.column("headers").equals(headers)
    assert found.column("value").is_valid().to_pylist() == [True, False, True]
