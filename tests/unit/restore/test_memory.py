"""What a restore keeps in memory does not grow with the state: remote files and decoded keys go to disk."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pytest

from keyfold import Changelog, RestoredState, restore
from keyfold.checkpoints.log import rereading
from keyfold.statestore import remote_files
from keyfold.statestore.errors import StorageFailed
from support.changelogs import BY_HAND

_PEAK = """
import os, sys, threading, time
import pyarrow.fs
from keyfold import restore
def anonymous():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous")) >> 10
filesystem = pyarrow.fs.LocalFileSystem() if sys.argv[2] == "remote" else None
peak = before = anonymous()
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
rows = sum(batch.num_rows for batch in restore(sys.argv[1], filesystem=filesystem).batches())
print(rows, peak - before)
os._exit(0)
"""


def peak_mib(path: Path, where: str) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(path), where],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    rows, peak = done.stdout.split()
    return int(rows), int(peak)


def long_keys(count: int, distinct: int, width: int) -> pa.Array:
    keys = np.full((count, width), ord("k"), np.uint8)
    numbers = np.random.default_rng(1).integers(0, distinct, count).astype(">u8")
    keys[:, :8] = numbers.view(np.uint8).reshape(-1, 8)
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(keys.tobytes())]
    )


def test_a_remote_segment_is_not_held_in_memory(tmp_path: Path) -> None:
    with Changelog.open(
        tmp_path / "log", config={**BY_HAND, "segment.bytes": "1GiB", "compression.type": "none"}
    ) as log:
        for n in range(4):
            values = pa.array([bytes([n]) * 1_000_000] * 48, pa.binary())
            log.append(pa.table({"key": [f"{n}-{i}" for i in range(48)], "value": values}))
        log.snapshot(tmp_path / "snapshot")
    assert (tmp_path / "snapshot" / "0").is_dir()
    rows, peak = peak_mib(tmp_path / "snapshot", "remote")
    assert rows == 192
    assert peak < 100


def test_the_keys_of_a_compressed_tail_are_not_held_in_memory(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config={**BY_HAND, "compression.type": "lz4"}) as log:
        for _ in range(4):
            keys = long_keys(40_000, 5000, 1000)
            log.append(pa.table({"key": keys, "value": pa.array([b"v"] * len(keys), pa.binary())}))
    rows, peak = peak_mib(tmp_path / "log", "here")
    assert 4000 < rows <= 5000
    assert peak < 100


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files, with every key of a copy kept there."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(rereading, "_HELD_BYTES", -1)
    monkeypatch.setattr(remote_files, "_PIECE_BYTES", 1000)
    return tmp_path / "temporary"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Changelog]:
    config = {**BY_HAND, "compression.type": "zstd", "anchors.auto": 0}
    with Changelog.open(tmp_path / "log", partitions=2, config=config) as log:
        for n in range(3):
            keys = [f"{'k' * (i % 7)}{i}" for i in range(0, 500, n + 1)]
            log.append(pa.table({"key": keys, "value": [f"{n}"] * len(keys)}))
            if n == 0:
                log.compact()
        yield log


EXPECTED = {
    f"{'k' * (i % 7)}{i}".encode(): b"2" if i % 3 == 0 else b"1" if i % 2 == 0 else b"0" for i in range(500)
}


def restored(log: Changelog, to: str, **part: object) -> RestoredState:
    if to == "here":
        return restore(log.path, **part)  # type: ignore[arg-type]
    log.snapshot(log.path.parent / "snapshot")
    return restore(
        str(log.path.parent / "snapshot"),
        filesystem=pyarrow.fs.LocalFileSystem(),
        **part,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("to", ["here", "elsewhere"])
def test_states_are_the_same_out_of_temporary_files_and_nothing_stays_of_these(
    log: Changelog, temporary: Path, to: str
) -> None:
    assert restored(log, to).to_dict() == EXPECTED
    some = {key: value for key, value in EXPECTED.items() if key.startswith(b"kk")}
    assert restored(log, to, prefix="kk").to_dict() == some
    changed = {key: value for key, value in EXPECTED.items() if value != b"0"}
    assert restored(log, to, since=1).to_dict() == changed
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("to", ["here", "elsewhere"])
def test_a_process_that_is_killed_leaves_no_temporary_file(log: Changelog, temporary: Path, to: str) -> None:
    batches = restored(log, to).batches()
    assert next(batches).num_rows
    assert list(temporary.rglob("*")) == []


@pytest.mark.parametrize("to", ["here", "elsewhere"])
def test_no_room_for_temporary_files_is_told_with_what_to_do(
    log: Changelog, tmp_path: Path, temporary: Path, to: str
) -> None:
    state = restored(log, to)
    temporary.rmdir()
    temporary.write_text("a file is in the way")
    with pytest.raises(StorageFailed, match="TMPDIR"):
        state.to_dict()
