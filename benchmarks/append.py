"""Append of Arrow tables against the disk's own sequential write rate, measured in turn in the same run.

    python benchmarks/append.py [--directory DIR] [--runs 7] [--mb 128]

The peer writes as many bytes in 2 MiB chunks to one new file and calls `fdatasync` once. Both rates count
file bytes.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from keyfold import Changelog

KEY_BYTES, VALUE_BYTES = 16, 100


def table(rows: int) -> pa.Table:
    """Random keys out of 200,000 and random values."""
    rng = np.random.default_rng(7)
    keys = np.char.zfill(rng.integers(0, 200_000, rows).astype(f"S{KEY_BYTES}"), KEY_BYTES)
    values = rng.bytes(rows * VALUE_BYTES)
    offsets = pa.py_buffer(np.arange(0, (rows + 1) * VALUE_BYTES, VALUE_BYTES, dtype=np.int32))
    column = pa.Array.from_buffers(pa.binary(), rows, [None, offsets, pa.py_buffer(values)])
    return pa.table({"key": pa.array(keys.tolist(), pa.binary()), "value": column})


def sequential_write(directory: Path, size: int) -> float:
    """Bytes per second of one new file with one fdatasync."""
    chunk = np.random.default_rng(1).bytes(2 << 20)
    began = time.perf_counter()
    with open(directory / "sequential", "wb", buffering=0) as f:
        for _ in range(max(1, size // len(chunk))):
            f.write(chunk)
        os.fdatasync(f.fileno())
    seconds = time.perf_counter() - began
    os.unlink(directory / "sequential")
    return max(1, size // len(chunk)) * len(chunk) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--mb", type=int, default=128, help="bytes of keys and values per append, in MB")
    args = parser.parse_args()
    rows = args.mb * 1_000_000 // (KEY_BYTES + VALUE_BYTES)
    records = table(rows)
    directory = Path(tempfile.mkdtemp(prefix="keyfold-bench-", dir=args.directory))
    config = {"cleaner.threads": 0, "cleanup.policy": "delete", "segment.bytes": "1GiB"}
    try:
        for partitions in (1, 4):
            ours, disk = [], []
            with Changelog.open(directory / f"log-{partitions}", partitions=partitions, config=config) as log:
                log.append(records)
                for _ in range(args.runs):
                    before = sum(p.bytes for p in log.state.partitions)
                    began = time.perf_counter()
                    log.append(records)
                    seconds = time.perf_counter() - began
                    size = sum(p.bytes for p in log.state.partitions) - before
                    ours.append(size / seconds)
                    disk.append(sequential_write(directory, size))
            rate, peer = statistics.median(ours), statistics.median(disk)
            print(
                f"{partitions} partition(s): append {rate / 1e6:.0f} MB/s "
                f"({rows / (size / rate) / 1e6:.2f} M records/s), "
                f"disk {peer / 1e6:.0f} MB/s, ratio {rate / peer:.2f}"
            )
        print(
            f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB "
            f"(table {args.mb} MB)"
        )
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
