"""One pass over a whole log: keyfold's cleaner beside Kafka's own, on the same records, in the same run.

    make bench BENCH=benchmarks/cleaner.py ARGS="--records 10e6 --keys 1e6 --rounds 5"

Kafka's side is `org.apache.kafka.storage.internals.log.Cleaner` of 4.1.0 from its jars, called as a broker's
cleaner thread calls it (`KafkaCleaner.java`, compiled here), in a JVM that has cleaned a smaller log before.
keyfold's is `log.compact()` of one partition. Both read segments of `--segment-bytes` from a warm page cache,
write the cleaned ones and sync them; neither is throttled; both may have 128 MiB for the map.

Keys have 16 bytes, values 100: 50 random hexadecimal digits and 50 bytes that are always the same. Keys are
drawn uniformly, or zipfian with exponent 1.0 over all of them. Kafka's batches have 16 KiB, its producer's
default. The two must keep equally many records, or nothing is printed.

`fold` is keyfold's core alone: mapped batches in, batches out, nothing checked or written. The sides take
turns, for machines are not equally fast all the time; one round of keyfold goes before that is not counted.
Rates are of all records and file bytes of the log, the median of the rounds. The rate by processor time, that
of all threads of the process, says more where other programs run; so does the ratio in brackets. Memory is
anonymous memory (RssAnon) of the process at its highest, sampled, with interpreter or JVM; mapped files do
not count. Both sides use the same codec. --linearity and --two measure keyfold alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keyfold import Changelog
from keyfold.checkpoints.compaction.fold import OffsetMap, compact

KEY_BYTES, VALUE_BYTES = 16, 100
RECORD_BYTES = KEY_BYTES + VALUE_BYTES
RANDOM_DIGITS = 50
BATCH_BYTES = 16 << 10
MAP_BYTES = 128 << 20
WARM_RECORDS = 1_000_000
APPEND_RECORDS = 200_000
#: Those that both sides know.
CODECS = ("none", "lz4", "zstd")
HERE = Path(__file__).resolve().parent
JARS = HERE.parent / ".kafka-jars"


@dataclass(frozen=True)
class Round:
    """One pass. Bytes are file bytes."""

    seconds: float
    processor_seconds: float
    bytes_before: int
    bytes_after: int
    read: int
    kept: int


@dataclass(frozen=True)
class Measured:
    """Rounds of one process."""

    rounds: list[Round]
    anonymous_bytes: int

    @property
    def seconds(self) -> float:
        return statistics.median(r.seconds for r in self.rounds)

    @property
    def processor_seconds(self) -> float:
        return statistics.median(r.processor_seconds for r in self.rounds)

    def line(self, name: str) -> str:
        one, all_seconds = self.rounds[0], [r.seconds for r in self.rounds]
        return (
            f"  {name:14} {one.read / self.seconds / 1e6:7.3f} M records/s"
            f" {one.bytes_before / self.seconds / 1e6:6.0f} MB/s"
            f"  {one.read / self.processor_seconds / 1e6:7.3f} M/s by processor time"
            f"  {self.anonymous_bytes >> 20:5} MB  {min(all_seconds):.2f}-{max(all_seconds):.2f} s"
        )


# -- the records ---------------------------------------------------------------------------------------------


def key_numbers(distribution: str, records: int, keys: int) -> npt.NDArray[np.int64]:
    rng = np.random.default_rng(1)
    if distribution == "uniform":
        return rng.integers(0, keys, records)
    weights = np.cumsum(1 / np.arange(1, keys + 1))
    ranks = np.searchsorted(weights, rng.random(records) * weights[-1])
    # The frequent keys are not neighbours of each other.
    found: npt.NDArray[np.int64] = rng.permutation(keys)[ranks]
    return found


def write_raw(path: Path, numbers: npt.NDArray[np.int64]) -> None:
    """A file of records of 16 + 100 bytes, from which both sides are filled."""
    rng = np.random.default_rng(2)
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    with path.open("wb") as file:
        for start in range(0, len(numbers), APPEND_RECORDS):
            part = numbers[start : start + APPEND_RECORDS].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            rows = np.full((len(part), RECORD_BYTES), ord("-"), np.uint8)
            shifts = np.arange(16, dtype=np.uint64) * np.uint64(4)
            rows[:, :KEY_BYTES] = digits[((part[:, None] >> shifts) & np.uint64(15)).astype(np.intp)]
            random = rng.integers(0, 16, (len(part), RANDOM_DIGITS), np.uint8)
            rows[:, KEY_BYTES : KEY_BYTES + RANDOM_DIGITS] = digits[random]
            rows.tofile(file)


def tables(path: Path) -> Iterator[pa.Table]:
    rows = np.memmap(path, np.uint8, "r").reshape(-1, RECORD_BYTES)
    for start in range(0, len(rows), APPEND_RECORDS):
        part = rows[start : start + APPEND_RECORDS]
        columns = []
        for first, last in ((0, KEY_BYTES), (KEY_BYTES, RECORD_BYTES)):
            offsets = np.arange(0, (len(part) + 1) * (last - first), last - first, dtype=np.int32)
            data = np.ascontiguousarray(part[:, first:last])
            buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
            columns.append(pa.Array.from_buffers(pa.binary(), len(part), buffers))
        yield pa.table(columns, names=["key", "value"])


# -- keyfold, in a process of its own ------------------------------------------------------------------------


def fill(raw: Path, path: Path, compression: str, segment_bytes: int, partitions: int) -> None:
    config = {
        "anchors.auto": 0,
        "cleaner.dedupe.buffer.size": MAP_BYTES,
        # `compact()` cleans as many partitions at a time; the pool is kept from cleaning by itself.
        "cleaner.threads": partitions,
        "min.cleanable.dirty.ratio": 1,
        # Until it is cleaned: last values are then not kept up in the background.
        "cleanup.policy": "delete",
        "compression.type": compression,
        "segment.bytes": segment_bytes,
    }
    with Changelog.open(path, partitions=partitions, config=config) as log:
        for table in tables(raw):
            log.append(table)


def copied(path: Path) -> Path:
    """A copy whose segments are links: the cleaner replaces them whole."""
    copy = path.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)

    def link(source: str, target: str) -> None:
        os.link(source, target) if source.endswith(".arrows") else shutil.copy2(source, target)

    shutil.copytree(path, copy, copy_function=link)
    return copy


def kept_bytes(log: Changelog) -> int:
    return sum(p.bytes for p in log.state.partitions)


def clean(path: Path) -> Round:
    copy = copied(path)
    with Changelog.open(copy), Changelog.open(copy, config={"cleanup.policy": "compact"}) as log:
        before = kept_bytes(log)
        began, began_cpu = time.perf_counter(), time.process_time()
        passes = log.compact()
        seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        kept = sum(s.records_kept for s in passes)
        return Round(seconds, cpu, before, kept_bytes(log), sum(s.records_read for s in passes), kept)


def second_pass(path: Path) -> Round:
    """A pass over what `clean` has left; it should find nothing to do."""
    copy = path.with_name("copy")
    with Changelog.open(copy) as log:
        before = kept_bytes(log)
        began, began_cpu = time.perf_counter(), time.process_time()
        passes = log.compact()
        seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        return Round(seconds, cpu, before, kept_bytes(log), sum(s.records_read for s in passes), len(passes))


def fold(path: Path) -> Round:
    segments = sorted((path / "0").glob("*.arrows"))

    def source() -> Iterator[pa.RecordBatch]:
        for segment in segments:
            yield from pa.ipc.open_stream(pa.memory_map(str(segment)))

    began, began_cpu = time.perf_counter(), time.process_time()
    kept = sum(b.num_rows for b in compact(source, OffsetMap.build(source, 0, (), MAP_BYTES), 0))
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    size = sum(s.stat().st_size for s in segments)
    return Round(seconds, cpu, size, size, sum(b.num_rows for b in source()), kept)


WORK = {"clean": clean, "second": second_pass, "fold": fold}


def child(what: str, path: Path) -> None:
    """One round for each line that is read."""
    pa.set_cpu_count(1)
    WORK[what](path)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(vars(WORK[what](path))), flush=True)


# -- both sides, from outside --------------------------------------------------------------------------------


class Side:
    """A process that does a round when it is told to; its anonymous memory is watched meanwhile."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._command = command
        self.rounds: list[Round] = []
        self.anonymous_bytes = 0
        threading.Thread(target=self._watch, daemon=True).start()
        self._line()

    def round(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.rounds.append(Round(**json.loads(self._line())))

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self._command)} ended with {self._process.wait()}")
        return line

    def end(self) -> Measured:
        self._process.communicate()
        return Measured(self.rounds, self.anonymous_bytes)

    def _watch(self) -> None:
        status = Path(f"/proc/{self._process.pid}/status")
        with contextlib.suppress(OSError):
            while True:
                for line in status.read_text().splitlines():
                    if line.startswith("RssAnon"):
                        self.anonymous_bytes = max(self.anonymous_bytes, int(line.split()[1]) * 1024)
                time.sleep(0.01)


def keyfold(what: str, path: Path) -> Side:
    return Side([sys.executable, __file__, "--child", what, "--log", str(path)])


class Kafka:
    """Kafka's cleaner, compiled into a folder."""

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        java = f"{os.environ['JAVA_HOME']}/bin/" if os.environ.get("JAVA_HOME") else ""
        if shutil.which(f"{java}javac") is None:
            raise SystemExit("No javac. On Debian and Ubuntu: apt-get install openjdk-17-jdk-headless")
        source = str(HERE / "KafkaCleaner.java")
        subprocess.run([f"{java}javac", "-cp", f"{JARS}/*", "-d", str(folder), source], check=True)
        # A broker's usual heap.
        options = ["-Xms256m", "-Xmx1g", "-cp", f"{folder}:{JARS}/*"]
        self._java = [f"{java}java", *options, "KafkaCleaner"]
        self._segment_bytes = str(segment_bytes)

    def fill(self, raw: Path, log: Path, records: int, compression: str) -> None:
        what = ["fill", str(raw), str(log), str(records), compression, self._segment_bytes, str(BATCH_BYTES)]
        subprocess.run([*self._java, *what], check=True, stderr=subprocess.DEVNULL)

    def clean(self, log: Path, warm: Path) -> Side:
        return Side([*self._java, "clean", str(log), str(warm), self._segment_bytes])


def compare(
    folder: Path, distribution: str, compression: str, records: int, args: argparse.Namespace
) -> None:
    raw, ours, theirs = folder / "raw", folder / "keyfold", folder / "kafka" / "log-0"
    write_raw(raw, key_numbers(distribution, records, int(args.keys)))
    print(f"{distribution}, {compression}: {records / 1e6:g} M records, {args.keys / 1e6:g} M keys")
    fill(raw, ours, compression, args.segment_bytes, 1)
    kafka = Kafka(folder, args.segment_bytes)
    kafka.fill(raw, theirs, records, compression)
    warm = folder / "warm" / "log-0"
    kafka.fill(raw, warm, min(records, WARM_RECORDS), compression)
    raw.unlink()
    sides = kafka.clean(theirs, warm), keyfold("clean", ours), keyfold("fold", ours)
    # In turn: the machine is not equally fast all the time.
    for _ in range(args.rounds):
        for side in sides:
            side.round()
    a, b, core = (side.end() for side in sides)
    if len({r.kept for each in (a, b, core) for r in each.rounds}) != 1:
        raise SystemExit("They do not keep equally many records.")
    again = keyfold("second", ours)
    again.round()
    second = again.end().rounds[0]
    print(a.line("Kafka 4.1.0"), b.line("keyfold"), core.line("keyfold's fold"), sep="\n")
    print(
        f"  {b.rounds[0].kept} records stay; keyfold / Kafka {ratio(a, b)}, fold / Kafka {ratio(a, core)},"
        f" memory {b.anonymous_bytes / a.anonymous_bytes:.2f} x;"
        f" second pass: {second.read} records read, {second.seconds * 1e3:.1f} ms",
        flush=True,
    )


def ratio(a: Measured, b: Measured) -> str:
    """How many times faster `b` is: the median over the rounds, and by processor time."""
    each = [one.seconds / other.seconds for one, other in zip(a.rounds, b.rounds, strict=True)]
    return f"{statistics.median(each):.2f} x ({a.processor_seconds / b.processor_seconds:.2f} x)"


def alone(folder: Path, records: int, partitions: Sequence[int], args: argparse.Namespace) -> list[Measured]:
    """keyfold on uniform keys, in turns with these numbers of partitions; `compact()` cleans all partitions
    at the same time.
    """
    raw = folder / "raw"
    write_raw(raw, key_numbers("uniform", records, int(args.keys)))
    sides = []
    for count in partitions:
        log = folder / str(count) / "keyfold"
        fill(raw, log, args.compression or "none", args.segment_bytes, count)
        sides.append(keyfold("clean", log))
    raw.unlink()
    for _ in range(args.rounds):
        for side in sides:
            side.round()
    return [side.end() for side in sides]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=float, default=10e6)
    parser.add_argument("--keys", type=float, default=1e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--segment-bytes", type=int, default=128 << 20)
    parser.add_argument("--distribution", choices=["uniform", "zipfian"], help="default: both")
    parser.add_argument("--compression", choices=CODECS, help="of both sides; default: each, or none")
    parser.add_argument("--linearity", action="store_true", help="1 M, 10 M and 40 M records")
    parser.add_argument("--two", action="store_true", help="two partitions on two cores beside one")
    parser.add_argument("--directory", type=Path, help="where the logs are written")
    parser.add_argument("--child", choices=sorted(WORK), help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.log)
        return
    if not (JARS / "complete").exists():
        raise SystemExit("No Kafka jars: `make setup` fetches them where Maven (mvn) is installed.")

    def folder() -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="keyfold-bench-", dir=args.directory)

    if args.linearity:
        for records in (1_000_000, 10_000_000, 40_000_000):
            with folder() as name:
                (found,) = alone(Path(name), records, (1,), args)
            print(
                found.line(f"{records // 1_000_000} M records"),
                f" {found.seconds / records * 1e9:.0f} ns/record",
            )
    elif args.two:
        with folder() as name:
            one, two = alone(Path(name), int(args.records), (1, 2), args)
        print(one.line("1 partition"), two.line("2 partitions"), f"  two / one {ratio(one, two)}", sep="\n")
    else:
        for distribution in (args.distribution,) if args.distribution else ("uniform", "zipfian"):
            for compression in (args.compression,) if args.compression else CODECS:
                with folder() as name:
                    compare(Path(name), distribution, compression, int(args.records), args)


if __name__ == "__main__":
    main()
