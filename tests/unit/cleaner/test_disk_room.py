"""A pass asks for the room that it can need before it begins."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from keyfold import Changelog, restore
from keyfold.checkpoints.cleaner.clean_pass import clean_partition
from keyfold.statestore.errors import StorageFailed
from keyfold.statestore.files import Data, Files, OpenFile
from keyfold.statestore.segment.block import encode, no_headers, record_batch
from keyfold.statestore.segment.message import size_of

CONFIG = {"cleaner.threads": 0, "anchors.auto": 0, "segment.bytes": "64MiB", "compression.type": "none"}


def batch(keys: list[bytes], values: list[bytes | None]) -> pa.RecordBatch:
    return record_batch(
        np.arange(len(keys)), pa.array([0] * len(keys), pa.timestamp("ms")), pa.array(keys, pa.binary()),
        pa.array(values, pa.binary()), no_headers(len(keys)),
    )  # fmt: skip


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
@pytest.mark.parametrize("rows", [0, 1, 7, 1000])
def test_the_size_of_a_block_without_compression_is_found_without_decoding_it(
    codec: str | None, rows: int
) -> None:
    random.seed(rows)
    keys = [b"key-%d" % (n % 3) for n in range(rows)]
    values = [None if n % 5 == 0 else random.randbytes(n % 11) + bytes(50) for n in range(rows)]
    plain = encode(batch(keys, values))
    block = encode(batch(keys, values), codec)
    found = size_of(block)
    assert (found.stored, found.codec, found.records) == (block.size, codec if rows > 7 else None, rows)
    assert plain.size <= found.raw <= plain.size + 256
    assert found.raw_keys == (sum(map(len, keys)) + 4 * (rows + 1) if rows else found.raw_keys)


def test_bytes_that_are_no_block_have_no_size() -> None:
    block = encode(batch([b"a", b"b"], [b"1" * 2000, None]), "zstd").to_pybytes()
    for size in range(len(block)):
        with pytest.raises(ValueError, match="not an Arrow record batch"):
            size_of(pa.py_buffer(block[:size][:200]))
    for seed in range(2000):
        changed = bytearray(block)
        changed[random.Random(seed).randrange(len(block))] ^= 1 << seed % 8
        with suppress(ValueError):
            size_of(pa.py_buffer(bytes(changed)))


class Counted(Files):
    """As much room as is said; counts what is written beside the manifest."""

    free = 1 << 40
    written = 0

    def free_bytes(self, path: Path) -> int:
        return self.free

    def append(self, file: OpenFile, chunks: Sequence[Data]) -> None:
        self.written += sum(memoryview(chunk).nbytes for chunk in chunks)
        super().append(file, chunks)


@pytest.mark.parametrize("rows", [3, 2000])
@pytest.mark.parametrize("before", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("after", ["none", "lz4", "zstd"])
def test_a_pass_never_takes_more_room_than_it_asks_for(
    before: str, after: str, rows: int, tmp_path: Path
) -> None:
    """Whatever the codec was, is, and does; copies and spilled keys together."""
    files = Counted()
    config = {**CONFIG, "compression.type": before, "delete.retention.ms": 0}
    with Changelog.open(tmp_path / "log", config=config, files=files) as log:
        for number in range(6):
            keys = pa.array([b"k%06d" % (n + number * rows // 2) for n in range(rows)], pa.binary())
            values = pa.array([None if n % 9 == 0 else b"%09d" % n * 50 for n in range(rows)], pa.binary())
            log.append(pa.table({"key": keys, "value": values}))
        log.engine.configure({"compression.type": after})
        expected = restore(log.path).to_dict()
        for _ in range(2):
            log.engine.writer.seal_active()
            files.free, line = 0, log.state.seq
            with pytest.raises(StorageFailed, match="Not enough disk space for a cleaner pass") as refused:
                log.compact()
            assert log.state.seq == line
            files.free, files.written = int(str(refused.value.expected).split()[0]), 0
            (done,) = log.compact()
            assert done.bytes_written <= files.written <= files.free
            assert restore(log.path).to_dict() == expected
            files.free = 1 << 40


class Leaving(Counted):
    """Says so often that there is room, and that there is none from then on."""

    looks: int | None = None

    def free_bytes(self, path: Path) -> int:
        if self.looks is None:
            return super().free_bytes(path)
        self.looks -= 1
        return self.free if self.looks >= 0 else 0


def put(log: Changelog, first: int, count: int) -> None:
    """Long keys and short values, in a segment of their own."""
    keys = pa.array([b"%0200d" % n for n in range(first, first + count)], pa.binary())
    log.append(pa.table({"key": keys, "value": pa.array([b"v"] * count, pa.binary())}))
    log.engine.writer.seal_active()


def asked(files: Counted, log: Changelog, *, spill_all: bool) -> int:
    """What a pass asks for; it has written nothing before."""
    files.free, files.written, line = 0, 0, log.state.seq
    with pytest.raises(StorageFailed, match="Not enough disk space for a cleaner pass") as refused:
        clean_partition(log.engine.writer, 0, spill_all=spill_all)
    assert (files.written, log.state.seq) == (0, line)
    return int(str(refused.value.expected).split()[0])


@pytest.mark.parametrize("spill_all", [False, True])
def test_a_pass_asks_before_it_writes_and_for_keys_that_it_moves_too(spill_all: bool, tmp_path: Path) -> None:
    files = Counted()
    with Changelog.open(tmp_path / "log", config=CONFIG, files=files) as log:
        for number in range(3):
            put(log, 1000 * number, 1000)
        files.free = asked(files, log, spill_all=spill_all)
        done = clean_partition(log.engine.writer, 0, spill_all=spill_all)
        assert done is not None
        keys = 3000 * 200 if spill_all else 0
        assert done.bytes_written + keys <= files.written <= files.free


def test_a_pass_asks_for_the_largest_of_its_groups(tmp_path: Path) -> None:
    """What it has asked for is enough to its end."""
    files = Counted()
    with Changelog.open(tmp_path / "log", config={**CONFIG, "segment.bytes": 20_000}, files=files) as log:
        for count in (10, 10, 500, 10):
            put(log, 0, count)
        files.free = asked(files, log, spill_all=False)
        assert clean_partition(log.engine.writer, 0) is not None
        assert len(restore(log.path).to_dict()) == 500


@pytest.mark.parametrize("looks", [1, 2])
def test_room_that_goes_during_a_pass_is_missed_before_the_next_group_is_copied(
    looks: int, tmp_path: Path
) -> None:
    files = Leaving()
    with Changelog.open(tmp_path / "log", config={**CONFIG, "segment.bytes": 20_000}, files=files) as log:
        for count in (70, 70, 70):
            put(log, 0, count)
        files.looks, files.written = looks, 0
        with pytest.raises(StorageFailed, match="Not enough disk space for a cleaner pass"):
            clean_partition(log.engine.writer, 0)
        # At most a manifest line for each group that it had asked for.
        assert files.written < (looks - 1) * 20_000 + 1000
        files.looks = None
        assert len(restore(log.path).to_dict()) == 70
        assert clean_partition(log.engine.writer, 0) is not None
