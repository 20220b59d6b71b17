"""Blocks: bytes of records, and the records again."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from keyfold.statestore.segment.block import (
    RECORD_SCHEMA,
    decode,
    decode_stream,
    encode,
    no_headers,
    record_batch,
    stream_header,
)
from keyfold.statestore.segment.message import is_compressed, rebase


def batch_of(count: int, base: int = 0) -> pa.RecordBatch:
    keys = pa.array([b"k%d" % n for n in range(count)])
    values = pa.array([None if n % 3 == 0 else b"value %d" % n for n in range(count)], pa.binary())
    times = pa.array(np.arange(count)).cast(pa.timestamp("ms"))
    return record_batch(np.arange(base, base + count), times, keys, values, no_headers(count))


@pytest.mark.parametrize("count", [1, 2, 50, 3_000, 100_000])
@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_a_block_is_decoded_to_its_records(count: int, codec: str | None) -> None:
    batch = batch_of(count)
    found = decode(encode(batch, codec))
    found.validate(full=True)
    assert found.equals(batch)
    assert found.schema.equals(RECORD_SCHEMA, check_metadata=True)


@pytest.mark.parametrize("base", [0, 1, 1 << 40])
@pytest.mark.parametrize("count", [1, 2, 50, 3_000, 100_000])
@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_a_block_with_other_offsets_is_the_block_that_these_offsets_make(
    count: int, codec: str | None, base: int
) -> None:
    """Also if they need more or fewer bytes, so that every other buffer moves."""
    block = encode(batch_of(count), codec)
    placed, wanted = pa.py_buffer(rebase(block, base)), batch_of(count, base)
    assert decode(placed, own=False).equals(wanted)
    header = stream_header(RECORD_SCHEMA)
    stream = pa.py_buffer(header + placed.to_pybytes() * 2)
    assert [b.num_rows for b in decode_stream(stream, len(header))] == [count, count]
    assert placed.size == encode(wanted, codec).size
    assert decode(block).equals(batch_of(count))


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_block_is_compressed_if_that_makes_it_smaller(codec: str) -> None:
    """A commit of few rows would take longer to compress than to write."""
    for count in (1, 2, 8, 200, 3_000):
        batch = batch_of(count)
        block, plain = encode(batch, codec), encode(batch)
        assert is_compressed(block) == (count > 8)
        assert block.size < plain.size if is_compressed(block) else block.equals(plain)


_THREADS = """
import os, sys, pyarrow as pa
from keyfold.statestore.segment.block import decode
block = pa.py_buffer(bytes.fromhex(sys.stdin.read()))
before = len(os.listdir("/proc/self/task"))
decode(block)
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_small_compressed_block_starts_no_threads_of_arrow(codec: str) -> None:
    """On a busy machine, waiting for them takes a hundred times as long as the block."""
    block = encode(batch_of(50), codec).to_pybytes().hex()
    done = subprocess.run(
        [sys.executable, "-c", _THREADS], input=block, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_offsets_of_a_foreign_block_that_leave_its_bytes_are_refused(codec: str | None) -> None:
    batch = batch_of(50)
    _, offsets, data = batch.column("key").buffers()
    wrong = np.frombuffer(offsets, np.int32).copy()
    wrong[5] = 1 << 30
    keys = pa.Array.from_buffers(pa.binary(), 50, [None, pa.py_buffer(wrong), data])
    columns = [keys if name == "key" else batch.column(name) for name in batch.schema.names]
    block = encode(pa.RecordBatch.from_arrays(columns, schema=batch.schema), codec)
    with pytest.raises(pa.ArrowInvalid, match="out of bounds"):
        decode(block, own=False)
