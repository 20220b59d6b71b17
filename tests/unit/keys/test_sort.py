"""Keys in the order of their bytes, as Python and RocksDB have it."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold.statestore.errors import BadRecord
from keyfold.statestore.keys.sort import key_order

_KEYS = st.lists(st.binary(max_size=20) | st.text("ab\0\xff", max_size=30).map(lambda s: s.encode("latin-1")))


def ordered(keys: list[bytes]) -> list[bytes]:
    array = pa.array(keys, pa.binary())
    order = key_order(array)
    assert sorted(order.tolist()) == list(range(len(keys)))
    found: list[bytes] = array.take(pa.array(order)).to_pylist()
    return found


@given(_KEYS)
def test_the_order_is_that_of_bytes(keys: list[bytes]) -> None:
    assert ordered(keys) == sorted(keys)


@given(_KEYS, st.binary(max_size=600))
def test_what_all_have_in_common_changes_nothing(keys: list[bytes], prefix: bytes) -> None:
    assert ordered([prefix + key for key in keys]) == sorted(prefix + key for key in keys)


@pytest.mark.parametrize("zeros", range(20))
def test_a_key_comes_before_itself_with_zeros_behind(zeros: int) -> None:
    keys = [b"key" + b"\0" * n for n in range(zeros, -1, -1)]
    assert ordered(keys) == sorted(keys)


@pytest.mark.parametrize("length", [247, 248, 255, 256, 257, 300, 5000])
def test_keys_that_differ_only_far_behind(length: int) -> None:
    keys = [b"x" * length + tail for tail in (b"b", b"", b"a", b"\0", b"\xff", b"ab")]
    keys += [b"y" * length + tail for tail in (b"2", b"1")]
    assert ordered(keys) == sorted(keys)


@given(st.lists(st.binary(min_size=17, max_size=17), min_size=1), st.integers(1, 3), st.randoms())
def test_keys_of_one_width_all_of_which_come_several_times(
    keys: list[bytes], times: int, draw: random.Random
) -> None:
    several = keys * times
    draw.shuffle(several)
    assert ordered(several) == sorted(several)


def test_many_keys_with_few_prefixes() -> None:
    draw = random.Random(7)
    keys = [
        draw.choice((b"a", b"aircraft/", b"b/longer/than/a/word/")) + b"%d" % draw.randrange(10**6)
        for _ in range(20_000)
    ]
    assert ordered(keys) == sorted(keys)


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_a_slice_is_ordered_by_itself(kind: pa.DataType) -> None:
    array = pa.array([b"z", b"c", b"a", b"b", b"y"], kind)
    assert key_order(array.slice(1, 3)).tolist() == [1, 2, 0]


def test_no_keys() -> None:
    assert key_order(pa.array([], pa.binary())).tolist() == []


def test_a_null_is_refused() -> None:
    with pytest.raises(BadRecord):
        key_order(pa.array([b"a", None], pa.binary()))


def test_fixed_width_keys_of_all_bytes() -> None:
    rows = np.random.default_rng(3).integers(0, 256, (5000, 16), np.uint8)
    rows[::2, :8] = rows[0, :8]
    keys = [row.tobytes() for row in rows]
    assert ordered(keys) == sorted(keys)
