"""The core of log compaction alone: the offset map, the copy of what stays, and the last value of every key.

    python benchmarks/fold.py [--records 10e6] [--keys 1e6] [--key-bytes 16] [--ragged] [--runs 5] [--profile]

Records have a key, a value of 100 bytes, and lie in blocks of about 2 MiB in a memory-mapped Arrow stream,
as in a segment; nothing is written. Uniform keys, and zipfian ones (exponent 1.1). "clean + dirty" has
every key once in the clean section and as many dirty records again, so that half of the records are looked
up in the map. Rates are of all records read. Memory is anonymous memory above the input at its highest,
sampled; mapped pages do not count. Beside the wall clock stands processor time, which says more where other
programs run.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from keyfold.checkpoints.compaction.fold import OffsetMap, compact, last_values
from keyfold.statestore.segment.block import BLOCK_BYTES, RECORD_SCHEMA

VALUE_BYTES = 100
BUDGET_BYTES = 128 << 20


def binary(lengths: np.ndarray, data: bytes | np.ndarray) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.Array.from_buffers(pa.binary(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def blocks(numbers: np.ndarray, key_bytes: int, ragged: bool) -> Iterator[pa.RecordBatch]:
    """Records whose key is a scrambled number in hexadecimal, padded in front, or cut by up to 8 bytes."""
    rng = np.random.default_rng(2)
    rows = BLOCK_BYTES // (key_bytes + VALUE_BYTES)
    for start in range(0, len(numbers), rows):
        part = numbers[start : start + rows].astype(np.uint64)
        digits = (part * np.uint64(0x9E3779B97F4A7C15))[:, None] >> (
            np.arange(16, dtype=np.uint64) * np.uint64(4)
        )
        text = np.full((len(part), key_bytes), ord("k"), np.uint8)
        text[:, -16:] = np.frombuffer(b"0123456789abcdef", np.uint8)[
            (digits & np.uint64(15)).astype(np.int64)
        ]
        lengths = np.full(len(part), key_bytes)
        keys = text.reshape(-1)
        if ragged:
            lengths = key_bytes - (part % np.uint64(9)).astype(np.int64)
            keys = text[np.arange(key_bytes) < lengths[:, None]]
        count = len(part)
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(np.arange(start, start + count)),
                pa.array(np.full(count, 1_700_000_000_000), pa.timestamp("ms")),
                binary(lengths, np.ascontiguousarray(keys)),
                binary(np.full(count, VALUE_BYTES), rng.bytes(count * VALUE_BYTES)),
                pa.nulls(count, RECORD_SCHEMA.field("headers").type),
            ],
            schema=RECORD_SCHEMA,
        )


def mapped(path: Path, found: Iterator[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The batches as views of a mapped file."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, RECORD_SCHEMA) as stream:
        for batch in found:
            stream.write_batch(batch)
    return list(pa.ipc.open_stream(pa.memory_map(str(path))))


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


class Peak:
    """The most anonymous memory while it is entered, above that at the beginning."""

    def __enter__(self) -> Peak:
        pa.default_memory_pool().release_unused()
        self.bytes, self._start, self._stop = 0, anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self.bytes = max(self.bytes, anonymous_bytes() - self._start)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(runs: int, records: int, what: str, work: Callable[[], object]) -> None:
    work()
    wall, cpu, memory = [], [], []
    for _ in range(runs):
        with Peak() as peak:
            began, began_cpu = time.perf_counter(), time.thread_time()
            work()
            wall.append(time.perf_counter() - began)
            cpu.append(time.thread_time() - began_cpu)
        memory.append(peak.bytes)
    rate, cpu_rate = records / statistics.median(wall) / 1e6, records / statistics.median(cpu) / 1e6
    print(
        f"  {what:28} {rate:6.2f} M records/s   {cpu_rate:6.2f} by processor time   {max(memory) >> 20:4} MB"
    )


def drain(batches: Iterator[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


def scenario(name: str, runs: int, log: list[pa.RecordBatch], first_dirty: int, profile: bool) -> None:
    records = sum(batch.num_rows for batch in log)
    print(f"{name}: {records / 1e6:g} M records")

    def build() -> OffsetMap:
        return OffsetMap.build(lambda: log, first_dirty, (), BUDGET_BYTES)

    offset_map = build()
    kept = drain(compact(lambda: log, offset_map, 0))
    print(f"  {offset_map.distinct_keys} keys in the map, {kept} records stay")
    measure(runs, records, "map", build)
    measure(runs, records, "map and copy", lambda: drain(compact(lambda: log, build(), 0)))
    measure(runs, records, "last values", lambda: drain(last_values(lambda: log, first_dirty)))
    if profile:
        with cProfile.Profile() as profiler:
            drain(compact(lambda: log, build(), 0))
        pstats.Stats(profiler).sort_stats("tottime").print_stats(15)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=float, default=10e6)
    parser.add_argument("--keys", type=float, default=1e6)
    parser.add_argument("--key-bytes", type=int, default=16, help="at least 16")
    parser.add_argument(
        "--ragged", action="store_true", help="keys of several lengths, up to 8 bytes shorter"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--directory", type=Path, help="where the input is written")
    args = parser.parse_args()
    records, keys = int(args.records), int(args.keys)
    rng = np.random.default_rng(1)
    uniform = rng.integers(0, keys, records)
    zipfian = np.concatenate([some[some <= keys] for some in (rng.zipf(1.1, records) for _ in range(3))])[
        :records
    ]
    twice = np.concatenate([rng.permutation(keys), rng.integers(0, keys, keys)])
    with tempfile.TemporaryDirectory(prefix="keyfold-bench-", dir=args.directory) as directory:
        for name, numbers, first_dirty in (
            ("uniform", uniform, 0),
            ("zipfian", zipfian, 0),
            ("clean + dirty", twice, keys),
        ):
            log = mapped(Path(directory) / name, blocks(numbers, args.key_bytes, args.ragged))
            scenario(name, args.runs, log, first_dirty, args.profile)


if __name__ == "__main__":
    main()
