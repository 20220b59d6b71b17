"""`keyfold.statestore.keys.partitioner`: the hash of Spark and of the xxhash package, whatever the keys."""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from keyfold.statestore.errors import BadRecord
from keyfold.statestore.keys import partitioner
from keyfold.statestore.keys.partitioner import partition_of, partitions_of, xxh64

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Key, Spark's `xxhash64(key)` and `pmod(xxhash64(key), 7)`, computed by Spark 4.3.0.
SPARK = [
    (b"", -7444071767201028348, 3),
    (b"a", -8582455328737087284, 3),
    (b"abc", 1423657621850124518, 4),
    (b"abcd", -6810745876291105281, 6),
    (b"tail-42", 8763402161035359172, 6),
    (b"N14228--", -2817994537169160423, 3),
    (b"key-0000000042", -3483622444951069724, 5),
    (b"0123456789abcdef", 152989496093262263, 1),
    (bytes(17), 1392075497497190139, 4),
    (bytes(range(31)), -8988936099728967847, 4),
    (bytes(range(32)), -8644129751861931918, 4),
    (bytes(range(33)), 2046936095001747419, 1),
    (bytes(range(255, 187, -1)), 4049650856264918321, 4),
    (b"\x00", -8959994473701255385, 5),
    (b"\xff" * 8, 3858142552250413010, 3),
    ("Zürich ✈".encode(), 1213809317664618075, 2),
]


def reference(key: bytes) -> int:
    unsigned = xxhash.xxh64_intdigest(key, partitioner.SEED)
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned


def some_keys(count: int, length_max: int, seed: int = 1) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(n) for n in rng.integers(0, length_max + 1, count).tolist()]


def test_hashes_and_partitions_are_sparks() -> None:
    """Constants that Spark computed; each key alone, all together, and many times over."""
    keys = [key for key, _, _ in SPARK]
    for repeated in (1, 200):
        array = pa.array(keys * repeated, pa.binary())
        assert xxh64(array).tolist() == [h for _, h, _ in SPARK] * repeated
        assert partitions_of(array, 7).tolist() == [p for _, _, p in SPARK] * repeated
    for key, hashed, partition in SPARK:
        assert xxh64(pa.array([key] * 3, pa.binary())).tolist() == [hashed] * 3
        assert partition_of(key, 7) == partition


@pytest.mark.parametrize("length", [*range(80), 127, 1023, 1024, 1025, 5000])
def test_keys_of_one_length_hash_as_the_package_says(length: int) -> None:
    keys = [bytes([i % 251, i % 7]) * length for i in range(300)]
    keys = [key[i % 2 : i % 2 + length] for i, key in enumerate(keys)]
    assert xxh64(pa.array(keys, pa.binary())).tolist() == [reference(k) for k in keys]


@pytest.mark.parametrize("length_max", [3, 9, 40, 200, 1100])
@pytest.mark.parametrize("count", [1, 5, 700, 20_000])
def test_keys_of_mixed_lengths_hash_as_the_package_says(count: int, length_max: int) -> None:
    keys = some_keys(count, length_max)
    assert xxh64(pa.array(keys, pa.binary())).tolist() == [reference(k) for k in keys]


@given(st.lists(st.binary(max_size=70), max_size=30), st.integers(0, 31), st.integers(0, 31), st.data())
def test_every_layout_of_an_array_gives_the_same_hashes(
    keys: list[bytes], start: int, stop: int, data: st.DataObject
) -> None:
    """Sliced, with large offsets, and beginning at any byte of memory."""
    array = pa.array(keys, data.draw(st.sampled_from([pa.binary(), pa.large_binary()])))
    expected = [reference(k) for k in keys]
    assert xxh64(array).tolist() == expected
    assert xxh64(array[start:stop]).tolist() == expected[start:stop]
    shift = data.draw(st.integers(1, 9))
    _, offsets, content = array.buffers()
    moved = pa.py_buffer(bytes(shift) + (content.to_pybytes() if content else b"")).slice(shift)
    odd = pa.Array.from_buffers(array.type, len(array), [None, offsets, moved])
    assert xxh64(odd).tolist() == expected


def test_strings_hash_as_their_utf8_bytes() -> None:
    words = ["", "a", "Zürich ✈", "x" * 100] * 100
    for kind in (pa.string(), pa.large_string()):
        assert xxh64(pa.array(words, kind)).tolist() == [reference(w.encode()) for w in words]


def test_more_keys_than_a_block_hash_the_same() -> None:
    """Blocks are a matter of speed only, also where the last one is short."""
    rng = np.random.default_rng(3)
    data, count = rng.bytes(16 * 20_001), 20_001
    offsets = pa.py_buffer(np.arange(count + 1, dtype=np.int32) * 16)
    array = pa.Array.from_buffers(pa.binary(), count, [None, offsets, pa.py_buffer(data)])
    assert xxh64(array).tolist() == [reference(data[i * 16 : i * 16 + 16]) for i in range(count)]


@pytest.mark.parametrize("rest", range(9))
def test_no_byte_behind_the_last_page_is_read(rest: int) -> None:
    """Keys at the very end of mapped memory, with a page behind them that must not be touched."""
    page = mmap.PAGESIZE
    mapped = mmap.mmap(-1, 2 * page)
    _protect(mapped, page)
    keys = [b"k" * (1 + i % 9) for i in range(400)]
    blob = b"".join(keys) + b"z" * rest
    keys.append(b"z" * rest)
    mapped[page - len(blob) : page] = blob
    content = pa.py_buffer(mapped).slice(page - len(blob), len(blob))
    offsets = np.concatenate([[0], np.cumsum([len(k) for k in keys])]).astype(np.int32)
    array = pa.Array.from_buffers(pa.binary(), len(keys), [None, pa.py_buffer(offsets), content])
    assert xxh64(array).tolist() == [reference(k) for k in keys]


def _protect(mapped: mmap.mmap, start: int) -> None:
    """Make everything from `start` on inaccessible: reading it is a segmentation fault."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    assert libc.mprotect(ctypes.c_void_p(address + start), ctypes.c_size_t(len(mapped) - start), 0) == 0


def test_an_empty_array_has_no_hashes() -> None:
    for kind in (pa.binary(), pa.large_binary(), pa.string()):
        assert xxh64(pa.array([], kind)).shape == (0,)
        assert partitions_of(pa.array([b"x"], pa.binary())[1:], 3).shape == (0,)


def test_types_of_the_results() -> None:
    keys = pa.array([b"a", b"bc"], pa.binary())
    assert xxh64(keys).dtype == np.int64
    assert partitions_of(keys, 5).dtype == np.int32
    assert partitions_of(keys, 1).tolist() == [0, 0]


@pytest.mark.parametrize("partitions", [1, 2, 3, 8, 1000])
def test_one_key_and_many_agree_on_the_partition(partitions: int) -> None:
    keys = some_keys(1000, 30)
    assert partitions_of(pa.array(keys, pa.binary()), partitions).tolist() == [
        partition_of(k, partitions) for k in keys
    ]


def test_a_null_key_is_refused() -> None:
    with pytest.raises(BadRecord, match="null"):
        xxh64(pa.array([b"a", None], pa.binary()))


def test_a_key_that_is_no_bytes_is_refused() -> None:
    with pytest.raises(BadRecord, match="int64"):
        xxh64(pa.array([1, 2]))


def test_offsets_that_point_beyond_the_data_are_refused() -> None:
    """An array that was never validated must not make us read foreign memory."""
    for damaged in ([0, 5, 3], [0, 2, 100], [-4, 2, 3]):
        offsets = np.array([0, 2, 3], np.int32)
        array = pa.Array.from_buffers(pa.binary(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(b"abc")])
        offsets[:] = damaged
        with pytest.raises(ValueError, match="offsets"):
            xxh64(array)


def test_spark_computes_these_hashes(spark: SparkSession) -> None:
    """The pinned constants, computed again by the Spark that is installed."""
    from pyspark.sql import functions as F

    frame = spark.createDataFrame([(bytearray(key),) for key, _, _ in SPARK], "key binary").coalesce(1)
    rows = frame.select("key", F.xxhash64("key"), F.pmod(F.xxhash64("key"), F.lit(7))).collect()
    assert [(bytes(key), hashed, partition) for key, hashed, partition in rows] == SPARK
