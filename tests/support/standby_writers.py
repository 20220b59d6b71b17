"""Processes that stand by for a changelog and, as its writer, commit at full speed until they are killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest

from keyfold import Changelog, Standby

PARTITIONS: Final = 4
CONFIG: Final = {"cleaner.threads": 0, "anchors.auto": 0, "delete.retention.ms": 0, "segment.bytes": 64 << 10}
APP: Final = "load"
_COMPACT_EVERY: Final = 25
_PATIENCE_S: Final = 60.0

Rows = list[tuple[bytes, bytes | None]]


def appended(batch: int) -> Rows:
    """What an even batch appends: new keys, one that comes again and again, and deletes of earlier ones."""
    new: Rows = [(b"new-%d-%d" % (batch, i), b"%d" % batch) for i in range(8)]
    old: Rows = [(b"new-%d-%d" % (batch - 40, i), None) for i in range(4)] if batch >= 40 else []
    return [*new, (b"often-%d" % (batch % 7), b"%d" % batch), *old]


def counters(batch: int) -> list[bytes]:
    """The counters that an odd batch counts up in a transaction."""
    return [b"counter-%d" % (batch * 3 + i) for i in (0, 1, 5)] + [b"all"]


def counter(name: bytes) -> bytes:
    return name if name == b"all" else b"counter-%d" % (int(name.split(b"-")[1]) % 20)


def model(batches: int) -> tuple[dict[bytes, bytes], int]:
    """State and number of records behind so many batches."""
    state: dict[bytes, bytes] = {}
    records = 0
    for batch in range(batches):
        rows: Rows = appended(batch)
        if batch % 2:
            rows = [(k, b"%d" % (int(state.get(k, b"0")) + 1)) for k in map(counter, counters(batch))]
        records += len(rows)
        for key, value in rows:
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value
    return state, records


def stand_and_write(path: str, told: str) -> None:
    """The life of one process: a standby, then the writer. Each line in `told` says what has happened."""
    fd = os.open(told, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with Standby(path) as standby:
        log = standby.take_over()
    last = log.last_batch(APP)
    batch = -1 if last is None else last
    os.write(fd, b"writer %d %d\n" % (os.getpid(), batch))
    while True:
        batch += 1
        if batch % 2:
            with log.transaction(app_id=APP, batch_id=batch) as store:
                for key in map(counter, counters(batch)):
                    store.put(key, b"%d" % (int(store.get(key) or b"0") + 1))
        else:
            rows = appended(batch)
            keys, values = (pa.array(column, pa.binary()) for column in zip(*rows, strict=True))
            log.append(pa.table({"key": keys, "value": values}), app_id=APP, batch_id=batch)
        os.write(fd, b"batch %d %d\n" % (os.getpid(), batch))
        if batch % _COMPACT_EVERY == _COMPACT_EVERY - 1:
            log.compact()


class Relay:
    """A writer and two standbys, of which one takes over whenever the writer is killed."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.told = path.with_name("told")
        self.told.touch()
        self._random = random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        # Loaded before `main` is known: what the others fork from is told where this module is.
        self._context.set_forkserver_preload(["keyfold.checkpoints", "support.standing"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
            forkserver.ensure_running()
        self._living: dict[int, BaseProcess] = {}
        self._read = 0
        self._writers: list[int] = []

    def run(self, takeovers: int) -> None:
        """Kill one writer after another: at random moments, counted in batches, because a busy machine may
        be slow.
        """
        with self._ended():
            for _ in range(3):
                self._start()
            for _ in range(takeovers):
                pid = self._writer()
                self._wait_for(pid, batches=self._random.randrange(12))
                time.sleep(self._random.uniform(0, 0.03))
                self._kill(pid)
                self._start()
            self._writer()

    def _start(self) -> None:
        process = self._context.Process(
            target=stand_and_write, args=(str(self.path), str(self.told)), daemon=True
        )
        process.start()
        assert process.pid is not None
        self._living[process.pid] = process

    def _writer(self) -> int:
        """The process that has become the writer since the last call."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            text = self.told.read_text()
            said = text[self._read : text.rfind("\n") + 1]
            for line in said.splitlines():
                if line.startswith("writer"):
                    self._read = text.index(line, self._read) + len(line) + 1
                    return int(line.split()[1])
            assert time.monotonic() < until, "no standby has taken over"
            time.sleep(0.01)

    def _wait_for(self, pid: int, batches: int) -> None:
        """Until the writer has acknowledged so many."""
        until = time.monotonic() + _PATIENCE_S
        while self.told.read_text().count(f"batch {pid} ") < batches:
            assert time.monotonic() < until, "the writer does not commit"
            time.sleep(0.005)

    def _kill(self, pid: int) -> None:
        process = self._living.pop(pid)
        os.kill(pid, signal.SIGKILL)
        process.join()

    @contextmanager
    def _ended(self) -> Iterator[None]:
        try:
            yield
        finally:
            for pid in list(self._living):
                self._kill(pid)


def prepared(path: Path) -> None:
    """A new changelog for a relay."""
    Changelog.open(path, partitions=PARTITIONS, config=CONFIG).close()
