"""What must not grow: each figure is a ratio of two measurements of one run.

    python benchmarks/growth.py [--commits 100000] [--anchors 10000] [--mib 400] [--partitions 1000]
                                [--only commits,passes,...] [--directory DIR]

commits    a commit of one record to a young log and to an old one, by turns; opening after that many
passes     a cleaner pass over the same log with no anchor, a fifth of them, all of them; over a clean log
targets    the highest anonymous memory of streaming a state to another place, of a small and of a large state
partitions commits, gets, opening and closing with 1 and with 1,000 partitions

Times are medians of what is said, in a directory in memory unless another one is given: what is compared is
the work, not the disk.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import _partitions
import numpy as np
import pyarrow as pa
import pyarrow.fs

from keyfold import Changelog, restore

_BY_HAND = {"cleaner.threads": 0}
_SLICE = 1_000
_TARGETS = ("batches", "to_store", "to_changelog")


def line(what: str, before: float, after: float, unit: str, wanted: str) -> None:
    ratio = after / before if before else float("nan")
    print(f"  {what:58} {before:10.3f} {after:10.3f} {unit:4} x{ratio:7.2f}   {wanted}", flush=True)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# -- commits ---------------------------------------------------------------------------------------------


def commits(directory: Path, count: int) -> None:
    """The log stays dirty, so that nothing is folded away and every commit could be restored."""
    path, tables = directory / "commits", [one(n) for n in range(97)]
    config = {**_BY_HAND, "anchors.auto": 3}
    with (
        Changelog.open(path, config=config) as log,
        Changelog.open(directory / "young", config=config) as young,
    ):
        empty = timed(lambda: restore(path).close())
        for n in range(count):
            log.append(tables[n % 97])
        kept = len(log.state.commits)
        # Imports and the first segment are not what grows. By turns, so that both meet the same machine.
        took: list[list[float]] = [[], []]
        for n in range(_SLICE + 100):
            for times, commit in zip(took, (young.append, log.append), strict=True):
                times.append(timed(partial(commit, tables[n % 97])))
    first, last = (statistics.median(times[100:]) for times in took)
    opened = statistics.median(timed(lambda: Changelog.open(path, mode="r").close()) for _ in range(3))
    written = statistics.median(timed(lambda: Changelog.open(path).close()) for _ in range(3))
    print(f"commits: {count:,} of one record; {kept:,} commits are kept in the manifest")
    line(f"a commit: {_SLICE:,} of a young log, of this one", 1e3 * first, 1e3 * last, "ms", "at most x1.2")
    line("opened to read: empty, after all of them", empty, opened, "s", "below 1 s")
    line("opened to write and closed: to read, to write", opened, written, "s", "below 1 s")


def one(n: int) -> pa.Table:
    return pa.table({"key": pa.array([b"k%d" % n], pa.binary()), "value": pa.array([b"v" * 50], pa.binary())})


# -- passes ----------------------------------------------------------------------------------------------


def passes(directory: Path, anchors: int) -> None:
    """Ten records and a new value of each key between any two anchors."""
    print(f"passes: {10 * anchors:,} records of 1,000 keys in {anchors:,} commits")
    took = {share: one_pass(directory / f"anchors-{share}", anchors, share) for share in (0, 5, 1)}
    line(f"a pass: no anchor, {anchors // 5:,}", took[0][0], took[5][0], "s", "")
    line(f"a pass: {anchors // 5:,} anchors, {anchors:,}", took[5][0], took[1][0], "s", "at most x6: linear")
    line("compact() again: seconds, manifest lines", took[0][1], took[0][2], "", "one line at most")


def one_pass(path: Path, count: int, share: int) -> tuple[float, float, int]:
    """Seconds of a pass, with an anchor at each `share`-th commit (0: at none), and of another one over the
    clean log, with the manifest lines that it wrote.
    """
    with Changelog.open(path, config={**_BY_HAND, "anchors.auto": 0}) as log:
        for n in range(count):
            keys = [b"k%d" % ((10 * n + i) % 1_000) for i in range(10)]
            log.append(pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(keys, pa.binary())}))
            if share and n % share == 0:
                log.anchor(f"a{n}")
        took = timed(log.compact)
        before = log.state.seq
        again = timed(log.compact)
        return took, again, log.state.seq - before


# -- targets ---------------------------------------------------------------------------------------------


def targets(directory: Path, mib: int) -> None:
    """Each target in a process of its own, from a log and from a snapshot that is no local disk."""
    print(f"targets: states of {mib // 4} and of {mib} MiB; anonymous memory at its highest")
    places = {size: make_state(directory / f"state-{size}", size) for size in (mib // 4, mib)}
    for source in ("log", "snapshot"):
        for target in _TARGETS:
            small, large = (
                anonymous_mib(place, source, target, directory / f"{source}-{target}-{size}")
                for size, place in places.items()
            )
            line(f"{target} from a {source}", small, large, "MB", "below 300 MB")


def make_state(path: Path, mib: int) -> Path:
    """Half of it is compacted, half is a tail of compressed blocks."""
    random, rows = np.random.default_rng(mib), 8 << 10
    with Changelog.open(path / "log", config={**_BY_HAND, "compression.type": "lz4"}) as log:
        for n in range(mib):
            values = pa.array([random.bytes(128)] * rows, pa.binary())
            keys = pa.array([b"%012d" % (n * rows + i) for i in range(rows)], pa.binary())
            log.append(pa.table({"key": keys, "value": values}))
            if n == mib // 2:
                log.compact()
        log.snapshot(path / "snapshot")
    return path


def anonymous_mib(place: Path, source: str, target: str, into: Path) -> float:
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps([str(place), source, target, str(into)])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        print(f"  {target} from a {source} failed: {done.stderr.strip().splitlines()[-1]}")
        return float("nan")
    return float(done.stdout.split()[-1])


def child(place: str, source: str, target: str, into: str) -> None:
    """Stream one state to one target; print the growth of this process's anonymous memory at its highest."""
    before, highest, over = anonymous_kib(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            highest[0] = max(highest[0], anonymous_kib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    remote = pa.fs.SubTreeFileSystem(place, pa.fs.LocalFileSystem()) if source == "snapshot" else None
    try:
        root = source if remote is not None else f"{place}/{source}"
        with restore(root, filesystem=remote) as restored:
            if target == "batches":
                for _ in restored.batches():
                    pass
            elif target == "to_store":
                restored.to_store(into).close()
            else:
                restored.to_changelog(into)
    finally:
        over.set()
        watcher.join()
    print(max(0, highest[0] - before) / 1024)


def anonymous_kib() -> int:
    for row in Path("/proc/self/status").read_text().splitlines():
        if row.startswith("RssAnon:"):
            return int(row.split()[1])
    return 0


# -- partitions ------------------------------------------------------------------------------------------


def partitions(directory: Path, count: int) -> None:
    print(f"partitions: 1, and {count:,}; each commit to all of them")
    before, after = (_partitions.measure(number, directory) for number in (1, count))
    wanted = {
        "first get": "below 1 s",
        "get": "below 20 us",
        "commit to all": "below 0.5 s",
        "close": "below 2 s",
    }
    for step, seconds in after.items():
        if step == "descriptors":
            line(step, before[step], seconds, "", "")
        else:
            line(step, 1e3 * before[step], 1e3 * seconds, "ms", wanted.get(step, ""))


# -- all -------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--commits", type=int, default=100_000)
    parser.add_argument("--anchors", type=int, default=10_000)
    parser.add_argument("--mib", type=int, default=400)
    parser.add_argument("--partitions", type=int, default=1_000)
    parser.add_argument("--only", default="commits,passes,targets,partitions")
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(*json.loads(given.child))
        return
    parts: dict[str, Callable[[Path], None]] = {
        "commits": lambda directory: commits(directory, given.commits),
        "passes": lambda directory: passes(directory, given.anchors),
        "targets": lambda directory: targets(directory, given.mib),
        "partitions": lambda directory: partitions(directory, given.partitions),
    }
    print(f"{'':60} {'':10} {'':10}      ratio   wanted")
    for name in given.only.split(","):
        with tempfile.TemporaryDirectory(dir=given.directory if given.directory.exists() else None) as path:
            parts[name](Path(path))
        gc.collect()


if __name__ == "__main__":
    os.environ.setdefault("RUST_LOG", "error")
    main()
