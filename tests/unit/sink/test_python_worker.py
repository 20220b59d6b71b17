"""The Python worker of a task: what Spark sends is acknowledged at once, and modules are collected once."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

pytest.importorskip("pyspark")

from keyfold.sink import python_worker, staging
from keyfold.sink.python_worker import without_delays
from keyfold.sink.staging import Stage

linux = pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="only Linux has TCP_QUICKACK")


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The JVM's end, and the worker's end, whose acknowledgements are delayed as in a worker that reads."""
    monkeypatch.setattr(python_worker, "_FILES_LOOKED_AT", range(3, 512))
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as a,
    ):
        b, _ = server.accept()
        with b:
            delay(b)
            yield a, b


def delay(worker: socket.socket) -> None:
    worker.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)


def is_delayed(worker: socket.socket) -> bool:
    return not worker.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK)


@linux
def test_every_batch_is_acknowledged_as_it_arrives(connection: tuple[socket.socket, socket.socket]) -> None:
    """The kernel goes back to delays when the worker sends, so every batch has to do it."""
    _, worker = connection
    assert is_delayed(worker)
    seen = []
    for number in without_delays(range(3)):
        seen.append((number, is_delayed(worker)))
        delay(worker)
    assert seen == [(0, False), (1, False), (2, False)]


@linux
def test_the_mark_after_the_last_batch_does_not_wait(connection: tuple[socket.socket, socket.socket]) -> None:
    """As Spark sends it: rows, then the mark in a packet of its own, with Nagle's algorithm."""
    jvm, worker = connection
    waits = []
    for _ in range(5):
        delay(worker)
        jvm.sendall(b"rows")
        jvm.sendall(b"mark")
        for _ in without_delays([worker.recv(4)]):
            began = time.perf_counter()
            assert worker.recv(4) == b"mark"
            waits.append(time.perf_counter() - began)
        worker.sendall(b"done")
        assert jvm.recv(4) == b"done"
    assert min(waits) < 0.02


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_no_file_is_closed_or_changed(
    connection: tuple[socket.socket, socket.socket], tmp_path: Path, timeout: float | None
) -> None:
    """Not even for a program that reads its sockets with a default timeout, or without blocking."""
    jvm, worker = connection
    jvm.setblocking(False)
    left, right = socket.socketpair()
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with left, right, udp, open(tmp_path / "file", "wb") as file:
        before = open_files()
        socket.setdefaulttimeout(timeout)
        try:
            for _ in without_delays("ab"):
                assert open_files() == before
            unfinished = without_delays("ab")
            next(unfinished)
            del unfinished
        finally:
            socket.setdefaulttimeout(None)
        gc.collect()
        assert open_files() == before
        assert [os.get_blocking(s.fileno()) for s in (jvm, worker, left, udp)] == [False, True, True, True]
        assert not file.closed


def open_files() -> dict[str, str]:
    directory = Path("/proc/self/fd")
    return {
        name: os.readlink(directory / name) for name in os.listdir(directory) if (directory / name).exists()
    }


def test_a_task_uses_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(partitionId=lambda: 3, taskAttemptId=lambda: 4)
    monkeypatch.setattr("keyfold.sink.staging.TaskContext.get", lambda: context)
    passed = []

    def noted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            passed.append(batch)
            yield batch

    monkeypatch.setattr(staging, "without_delays", noted)
    python_worker.freeze_loaded.cache_clear()
    gc.unfreeze()
    try:
        rows = pa.RecordBatch.from_pydict({"key": pa.array([b"a"]), "value": pa.array([b"1"])})
        (facts,) = Stage(str(tmp_path), 0, 1, 0)(iter([rows]))
        assert facts.num_rows == 1
        assert passed == [rows]
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
