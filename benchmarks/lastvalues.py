"""Rates of one partition's last-value store: apply, get, get_all, scan.

    python benchmarks/lastvalues.py [--keys 300000] [--directory /tmp] [--typed]

Keys of 16 bytes, values of 100, half of them compressible. Medians of 5, of lists of 25; memory is the peak
of the whole process.

`--typed`: the columns of `restore.py --typed`, in a store of two partitions. Typed reads take turns with
reads of the same rows as bytes. Processor time is that of all threads: it says more where other programs run.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from keyfold import restore
from keyfold.statestore.rocksdb.store import LastValues, StoreId

sys.path.insert(0, str(Path(__file__).resolve().parent))

from restore import fill_typed

_IDENTITY = StoreId("00000000-0000-0000-0000-000000000000", 0, 0)
_REPEATS = 5
#: How many lists of random keys are asked for: never the same, for what was asked before is in the caches.
_LISTS = 25


def keys_of(ids: np.ndarray) -> pa.Array:
    """16 bytes each, in an order that has nothing to do with the ids."""
    mixed = ids.astype("u8") * np.uint64(0x9E3779B97F4A7C15)
    raw = np.stack([mixed, ids.astype("u8")], 1).tobytes()
    return pa.Array.from_buffers(pa.binary(16), len(ids), [None, pa.py_buffer(raw)]).cast(pa.binary())


def batch_of(ids: np.ndarray, offset: int, random: np.random.Generator) -> pa.RecordBatch:
    noise = np.zeros((len(ids), 100), "u1")
    noise[:, :50] = random.integers(0, 256, (len(ids), 50))
    values = pa.Array.from_buffers(pa.binary(100), len(ids), [None, pa.py_buffer(noise.tobytes())])
    offsets = np.arange(offset, offset + len(ids))
    return pa.record_batch(
        {"offset": offsets, "timestamp": offsets, "key": keys_of(ids), "value": values.cast(pa.binary())}
    )


def apply_rate(directory: Path, keys: int, rows: int, total: int) -> tuple[float, float]:
    """Rows per second into a store of `keys` keys, and the longest single apply in seconds."""
    random = np.random.default_rng(rows)
    longest_s = spent_s = 0.0
    with LastValues.open(directory / f"apply-{rows}", _IDENTITY) as store:
        for offset in range(0, total, rows):
            ids = random.integers(0, keys, 2 * rows) if rows < keys // 4 else random.permutation(keys)
            batch = batch_of(np.unique(ids)[:rows] if rows < keys // 4 else ids[:rows], offset, random)
            start = time.perf_counter()
            store.apply(batch, offset + rows)
            one_s = time.perf_counter() - start
            spent_s += one_s
            longest_s = max(longest_s, one_s)
    return total / spent_s, longest_s


def median_s(work: Callable[[], object], repeats: int = _REPEATS) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_rates(directory: Path, keys: int) -> Iterator[tuple[str, str]]:
    random = np.random.default_rng(7)
    with LastValues.open(directory / "read", _IDENTITY) as store:
        store.apply(batch_of(random.permutation(keys), 0, random), keys)
        stored = keys_of(np.arange(keys)).to_pylist()
        store.get_all(stored)

        def sample() -> list[bytes]:
            return [stored[n] for n in random.integers(0, keys, 10_000)]

        singles = []
        for key in sample():
            start = time.perf_counter()
            store.get(key)
            singles.append(time.perf_counter() - start)
        yield "get, p50 µs", f"{statistics.median(singles) * 1e6:.1f}"
        yield "get, p99 µs", f"{statistics.quantiles(singles, n=100)[98] * 1e6:.1f}"
        samples = [sample() for _ in range(_LISTS)]
        rate = 10_000 / median_s(lambda: store.get_all(samples.pop()), _LISTS)
        yield "get_all of 10,000, keys/s", f"{rate:,.0f}"
        columns = [pa.array(sample(), pa.binary()) for _ in range(_LISTS)]
        rate = 10_000 / median_s(lambda: store.get_all(columns.pop()), _LISTS)
        yield "get_all of 10,000 as Arrow, keys/s", f"{rate:,.0f}"
        missing = keys_of(np.arange(keys, keys + 10_000)).to_pylist()
        yield "get_all of 10,000 missing, keys/s", f"{10_000 / median_s(lambda: store.get_all(missing)):,.0f}"
        yield "all(), rows/s", f"{keys / median_s(lambda: sum(1 for _ in store.all())):,.0f}"
        prefix = stored[0][:2]
        yield "prefix() of a few rows, µs", f"{median_s(lambda: list(store.prefix(prefix))) * 1e6:.0f}"
        with store.snapshot() as snapshot:
            few = sample()[:1_000]
            rate = 1_000 / median_s(lambda: snapshot.get_all(few))
            yield "get_all of 1,000 in a snapshot, keys/s", f"{rate:,.0f}"


def typed_rates(directory: Path, keys: int) -> Iterator[tuple[str, str]]:
    """Each figure typed, then of the same rows as bytes."""
    random = np.random.default_rng(7)
    fill_typed(directory / "log", keys)
    with restore(directory / "log") as state:
        columns = state.columns
        typed = state.to_store(directory / "store")
    assert columns is not None
    # What it reads the rows from.
    raw: Any = vars(typed)["_reads"]
    times: dict[str, list[tuple[float, float]]] = {}

    def taken(name: str, work: Callable[[], object]) -> None:
        start, start_cpu = time.perf_counter(), time.process_time()
        work()
        took = time.perf_counter() - start, time.process_time() - start_cpu
        times.setdefault(name, []).append(took)

    def lists() -> tuple[pa.Array, pa.Array]:
        ids = pa.array(random.integers(0, keys, 10_000))
        return ids, columns.encode_keys([ids])

    for _ in range(_LISTS):
        for name, store, asked in zip(("typed", "raw"), (typed, raw), lists(), strict=True):
            taken(f"{name} get_all", partial(store.get_all, asked))
    ids, packed = lists()
    for key, data in zip(ids.to_pylist(), packed.to_pylist(), strict=True):
        taken("typed get", partial(typed.get, key))
        taken("raw get", partial(raw.get, data))
        row = raw.get(data)
        taken("decode", partial(columns.decode_row, row))
    typed.close()
    for name in ("typed get_all", "raw get_all"):
        wall, cpu = (statistics.median(column) for column in zip(*times[name], strict=True))
        rates = f"{10_000 / wall:,.0f} by wall time, {10_000 / cpu:,.0f} by processor time"
        yield f"{name} of 10,000 as Arrow, keys/s", rates
    for name in ("typed get", "raw get", "decode"):
        yield f"{name}, p50 µs", f"{statistics.median(wall for wall, _ in times[name]) * 1e6:.1f}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keys", type=int, default=300_000)
    arguments.add_argument("--directory", type=Path, default=None)
    arguments.add_argument("--typed", action="store_true", help="only typed columns")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as name:
        if given.typed:
            for what, figure in typed_rates(Path(name), given.keys):
                print(f"{what}: {figure}")
            return
        for rows in (1_000, 5_000, 19_999, 20_000, 100_000):
            rate, longest_s = apply_rate(Path(name), given.keys, rows, max(rows, given.keys * 2))
            print(f"apply {rows:>7,} at a time, rows/s: {rate:>9,.0f}   longest, ms: {longest_s * 1e3:,.0f}")
        for what, figure in read_rates(Path(name), given.keys):
            print(f"{what}: {figure}")
    print(f"peak memory, MiB: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10:,}")


if __name__ == "__main__":
    main()
