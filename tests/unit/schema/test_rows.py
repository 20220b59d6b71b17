"""Rows: typed values as bytes, and back."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold.statestore.schema import rows
from support.value_kinds import columns


@given(columns(), st.integers(0, 65535))
def test_decoded_rows_are_the_values(values: pa.StructArray, schema_id: int) -> None:
    packed = rows.encode(values, schema_id)
    packed.validate(full=True)
    again = rows.decode(packed, values.type)
    again.validate(full=True)
    assert again.type == values.type
    assert repr(again.to_pylist()) == repr(values.to_pylist())  # NaN equals NaN, -0.0 is not 0.0
    assert set(rows.schema_ids(packed.drop_null()).tolist()) <= {schema_id}


@given(columns())
def test_a_row_does_not_depend_on_the_rows_beside_it(values: pa.StructArray) -> None:
    """Nor on what Arrow keeps where a value is null."""
    each = [rows.encode(pa.array([value], values.type), 1)[0].as_py() for value in values.to_pylist()]
    assert rows.encode(values, 1).to_pylist() == each


@given(columns(), st.data())
def test_other_bytes_are_refused_or_are_values_of_the_type(
    values: pa.StructArray, data: st.DataObject
) -> None:
    packed = [row for row in rows.encode(values, 1).to_pylist() if row is not None]
    if not packed:
        return
    i = data.draw(st.integers(0, len(packed) - 1))
    row = bytearray(packed[i])
    match data.draw(st.sampled_from(["cut", "grow", "flip"])):
        case "cut":
            del row[data.draw(st.integers(0, len(row) - 1)) :]
        case "grow":
            row += data.draw(st.binary(min_size=1, max_size=9))
        case _:
            row[data.draw(st.integers(0, len(row) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    packed[i] = bytes(row)
    try:
        found = rows.decode(pa.array(packed, pa.binary()), values.type)
    except ValueError:
        return
    found.validate(full=True)
    assert len(found) == len(packed)


def test_the_bytes_of_a_row() -> None:
    kind = pa.struct(
        [
            pa.field("n", pa.int64()),
            pa.field("s", pa.string()),
            pa.field("gone", pa.int32()),
            pa.field("tags", pa.list_(pa.field("element", pa.string()))),
        ]
    )
    row = {"n": -2, "s": "añ", "gone": None, "tags": ["x", None, "yz"]}
    tags = struct.pack("<IB3I", 3, 0b010, 1, 1, 3) + b"xyz"
    fixed = struct.pack("<qIiI", -2, 3, 0, 3 + len(tags))
    expected = b"\x05\x00" + bytes([0b0100]) + fixed + "añ".encode() + tags
    assert rows.encode(pa.array([row], kind), 5).to_pylist() == [expected]


def test_garbage_below_a_null_is_not_kept() -> None:
    """Arrow allows any value and any list where the validity says null."""
    values = pa.array([1, 2], pa.int64())
    hidden = pa.Array.from_buffers(pa.int64(), 2, [pa.py_buffer(b"\x01"), values.buffers()[1]])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), values, mask=pa.array([False, True]))
    texts = pa.Array.from_buffers(
        pa.string(), 2, [pa.py_buffer(b"\x01"), *pa.array(["a", "b"]).buffers()[1:]]
    )
    kind = pa.StructArray.from_arrays([hidden, lists, texts], ["a", "b", "c"])
    expected = pa.array([{"a": 1, "b": [1], "c": "a"}, {"a": None, "b": None, "c": None}], kind.type)
    assert rows.encode(kind, 1).equals(rows.encode(expected, 1))


@pytest.mark.parametrize("row", [b"", b"\x01"])
def test_a_row_without_a_schema_id_is_refused(row: bytes) -> None:
    with pytest.raises(ValueError, match="too short"):
        rows.decode(pa.array([row], pa.binary()), pa.struct([]))
