"""Small changelogs that several tests look at, copy or damage, and where their files are."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from crc32c import crc32c

from keyfold import Changelog
from keyfold.checkpoints.manifest.journal import Head, decode_line, encode_line

BY_HAND = {"cleaner.threads": 0}


class Clock:
    """A clock that stands until a test sets it."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


def rows(*pairs: tuple[str, str | None]) -> pa.Table:
    keys = pa.array([key.encode() for key, _ in pairs], pa.binary())
    return pa.table({"key": keys, "value": pa.array([v and v.encode() for _, v in pairs], pa.binary())})


def make_closed(root: Path) -> Path:
    """A changelog with folded and unfolded sealed segments, a tombstone and an anchor."""
    with Changelog.open(root, partitions=2, config=BY_HAND) as log:
        log.append(rows(*((f"k{i}", f"v{i}") for i in range(20))))
        log.anchor("first")
        log.append(rows(*((f"k{i}", None if i % 3 else "new") for i in range(10))))
        log.compact()
        log.append(rows(*((f"k{i}", "again") for i in range(5, 15))))
    return root


def make_crashed(root: Path) -> Path:
    """A changelog as a writer leaves it that dies: its last segments are not sealed, marks vouch for them."""
    living = root.with_name("living")
    with Changelog.open(living, partitions=2, config=BY_HAND) as log:
        for n in range(4):
            log.append(rows(*((f"k{i}", f"{n}") for i in range(12))))
        shutil.copytree(living, root, ignore=shutil.ignore_patterns("store-*"))
    return root


#: The time of the first commit of `make_hourly`, 12:00.
START_MS = 1_357_041_600_000
#: Its state as of commit 3.
STATE_3 = {b"a": b"2", b"b": b"2", b"k0": b"0", b"k1": b"1", b"k2": b"2"}


def make_hourly(root: Path) -> Path:
    """Six commits, one per hour, in two partitions, nothing folded: batch n of "loader" is commit n + 1."""
    config = {**BY_HAND, "anchors.auto": 0, "segment.bytes": 1024}
    clock = iter(range(START_MS, START_MS + 10**12, 3_600_000)).__next__
    now = [clock()]
    with Changelog.open(root, partitions=2, config=config, clock_ms=lambda: now[0]) as log:
        for n in range(6):
            log.append(rows(("a", f"{n}"), ("b", f"{n}"), (f"k{n}", f"{n}")), app_id="loader", batch_id=n)
            now[0] = clock()
    return root


def journal_of(root: Path) -> Path:
    return max(root.glob("manifest/*.journal"), key=lambda path: int(path.stem))


def head_of(root: Path) -> Path:
    return journal_of(root).with_suffix(".head")


def segment_of(root: Path) -> Path:
    return max(root.glob("*/*.arrows"), key=lambda path: path.stat().st_size)


def index_of(root: Path) -> Path:
    return segment_of(root).with_suffix(".index")


def identity_of(root: Path) -> Path:
    return root / "changelog.json"


def flip(path: Path, position: int, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= bits
    path.write_bytes(data)


def rewrite(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the checkpoint line of a changelog that was opened and closed, with checksums that fit."""
    Changelog.open(root).close()
    path = journal_of(root)
    line = decode_line(path.read_bytes().rstrip(b"\n"))
    assert line is not None
    seq = line["seq"]
    change(line)
    raw = encode_line(line)
    path.write_bytes(raw)
    head_of(root).write_bytes(Head(len(raw), seq, crc32c(raw)).encode() + b" " * 64)


#: The command, as it is installed beside the interpreter of the tests.
KEYFOLD = str(Path(sys.executable).with_name("keyfold"))

_LIVING = """
import sys, pyarrow as pa
from keyfold import Changelog
with Changelog.open(sys.argv[1], partitions=2, config={"cleaner.threads": 0}) as log:
    print("open", flush=True)
    for line in sys.stdin:
        key, _, value = line.rstrip("\\n").partition("=")
        log.append(pa.table({"key": [key.encode()], "value": [value.encode()]}))
        print("committed", flush=True)
"""


class Living:
    """A writer in another process. A context manager; it ends, closing the changelog, with the context."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LIVING, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._answer("open")

    def append(self, key: str, value: str) -> None:
        """Returns when the record is committed."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{key}={value}\n")
        self._process.stdin.flush()
        self._answer("committed")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self, wanted: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == wanted + "\n"

    def __enter__(self) -> Living:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)
