"""Batches that are made ahead: all of them, in order, in bounded memory, and no thread stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from keyfold.checkpoints.log import ahead as module
from keyfold.checkpoints.log.ahead import ahead

Source = Callable[[], Iterator[pa.RecordBatch]]


def batch(source: int, number: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"source": [source], "number": [number]})


def source_of(source: int, count: int) -> Source:
    return lambda: (batch(source, number) for number in range(count))


def living() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "keyfold-ahead"]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("room", [0, 16, 1000])
def test_every_batch_comes_once_and_each_source_in_its_order(
    monkeypatch: pytest.MonkeyPatch, threads: int, room: int
) -> None:
    monkeypatch.setattr(module, "AHEAD_BYTES", room)
    counts = [3, 0, 50, 1, 20]
    expected = [(source, number) for source, count in enumerate(counts) for number in range(count)]
    made = ahead([source_of(s, count) for s, count in enumerate(counts)], threads)
    found = [(b["source"][0].as_py(), b["number"][0].as_py()) for b in made]
    assert (found if threads == 1 else sorted(found)) == expected
    for source in range(len(counts)):
        own = [number for s, number in found if s == source]
        assert own == sorted(own)
    assert living() == []
    assert list(ahead([])) == []


def test_no_more_is_made_ahead_than_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    size = batch(0, 0).nbytes
    monkeypatch.setattr(module, "AHEAD_BYTES", 4 * size)
    made = 0

    def source() -> Iterator[pa.RecordBatch]:
        nonlocal made
        for number in range(100):
            made += 1
            yield batch(0, number)

    for taken, _ in enumerate(ahead([source], 1), 1):
        # What waits, what is being taken, and what is made and finds no room.
        assert made <= taken + 4 + 1
    assert made == 100


def test_what_a_source_raises_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad() -> Iterator[pa.RecordBatch]:
        yield batch(0, 0)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(ahead([source_of(1, 10**6), bad], 2))
    assert living() == []


def test_who_takes_no_more_ends_all() -> None:
    batches = ahead([source_of(0, 10**6), source_of(1, 10**6)], 2)
    next(batches)
    assert len(living()) == 2
    batches.close()
    assert living() == []
