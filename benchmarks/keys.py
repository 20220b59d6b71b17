"""Keys of typed columns: columns to bytes and back, beside a plain copy of the same bytes.

    python benchmarks/keys.py [--rows 1000000] [--rounds 5]

Rates are medians, on one core. `partition` is the partition of each key, as a sink's task computes it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from keyfold.statestore.keys.partitioner import partitions_of
from keyfold.statestore.schema.key_codec import encode
from keyfold.statestore.schema.key_decoder import decode


def columns(rows: int) -> dict[str, list[pa.Array]]:
    random = np.random.default_rng(11)
    number = pa.array(random.integers(-(1 << 63), (1 << 63) - 1, rows))
    text = pa.array([f"user-{n:07d}" for n in random.integers(0, rows, rows).tolist()])
    start = pa.array(random.integers(0, 1 << 50, rows)).cast(pa.timestamp("us", "UTC"))
    end = pa.array(random.integers(0, 1 << 50, rows)).cast(pa.timestamp("us", "UTC"))
    window = pa.StructArray.from_arrays([start, end], ["start", "end"])
    return {
        "bigint": [number],
        "string, bigint": [text, number],
        "timestamp, timestamp, string": [start, end, text],
        "window, string": [window, text],
    }


def rate(work: Callable[[], object], rows: int, rounds: int) -> float:
    """Million rows per second."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return rows / statistics.median(times) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows, rounds = options.rows, options.rounds
    print(f"{'M rows/s':32} {'encode':>8} {'decode':>8} {'partition':>10} {'copy':>8}")
    for name, key in columns(rows).items():
        keys = encode(key)
        schema = pa.schema([pa.field(str(i), column.type) for i, column in enumerate(key)])
        assert decode(keys, schema).equals(pa.Table.from_arrays(key, schema=schema))
        data = np.frombuffer(keys.buffers()[2], np.uint8)
        work: list[Callable[[], object]] = [
            lambda key=key: encode(key),  # type: ignore[misc]
            lambda keys=keys, schema=schema: decode(keys, schema),  # type: ignore[misc]
            lambda keys=keys: partitions_of(keys, 16),  # type: ignore[misc]
            data.copy,
        ]
        encoded, decoded, partitioned, copied = (rate(w, rows, rounds) for w in work)
        print(f"{name:32} {encoded:8.1f} {decoded:8.1f} {partitioned:10.1f} {copied:8.0f}")


if __name__ == "__main__":
    main()
