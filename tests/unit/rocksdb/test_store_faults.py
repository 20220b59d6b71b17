"""The last-value store after kill -9 and damage: an earlier state or an error, never another value."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from keyfold.statestore.kv.api import StoreClosed
from keyfold.statestore.rocksdb import db
from keyfold.statestore.rocksdb import store as lastvalues
from keyfold.statestore.rocksdb.store import LastValues, StoreUnusable
from support.folds import IDENTITY, IN_MEMORY, Record, apply, folded, records_from

TESTS = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        yield Path(name) / "store-1"


@pytest.fixture(params=["write batch", "ingested file"])
def path_taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(lastvalues, "INGEST_ROWS", 1 if request.param == "ingested file" else 10**9)
    # RocksDB rests for a second when it cannot put damaged files together.
    monkeypatch.setattr(db, "FILES_OF_READ", 100)
    return str(request.param)


# -- damage -------------------------------------------------------------------------------------------------


def several_files(directory: Path) -> dict[int, dict[bytes, bytes]]:
    """A closed store of several files; its content at every offset that it may say it has applied."""
    states: dict[int, dict[bytes, bytes]] = {0: {}}
    records: list[Record] = []
    with LastValues.open(directory, IDENTITY) as store:
        for round_ in range(3):  # One file more, and RocksDB makes one of them all.
            entries: list[tuple[bytes, bytes | None]] = [
                (b"key%03d" % (n * 13 % 300), None if n % 10 == round_ else random.Random(n).randbytes(60))
                for n in range(round_ * 50, round_ * 50 + 150)
            ]
            new = records_from(len(records), *entries)
            records += new
            apply(store, new)
            states[len(records)] = folded(records)
            store.flush()
    return states


def refusals(directory: Path, states: dict[int, dict[bytes, bytes]]) -> int:
    """How many of four ways to ask a store end in `StoreUnusable`. The others must give right answers."""
    keys = sorted({key for state in states.values() for key in state})
    asked: list[Callable[[LastValues], dict[bytes, bytes | None]]] = [
        lambda store: {key: store.get(key) for key in keys},
        lambda store: dict(zip(keys, store.get_all(keys), strict=True)),
        lambda store: {**dict.fromkeys(keys), **dict(store.all())},
        lambda store: {**dict.fromkeys(keys), **dict(store.snapshot().range(b"", b"\xff"))},
    ]
    refused = len(asked)
    with suppress(StoreUnusable), LastValues.open(directory, IDENTITY) as store:
        state = states[store.applied]
        for ask in asked:
            with suppress(StoreUnusable):
                assert ask(store) == {key: state.get(key) for key in keys}
                refused -= 1
    return refused


def check_flips(directory: Path, scratch: Path, places: list[tuple[str, int, int]]) -> list[int]:
    """Flip bytes one after the other, from the same start. Returns the numbers of ways refused."""
    states = several_files(directory)
    refused = []
    for name, position, mask in places:
        shutil.copytree(directory, scratch)
        data = bytearray((scratch / name).read_bytes())
        data[position % len(data)] ^= mask
        (scratch / name).write_bytes(data)
        try:
            refused.append(refusals(scratch, states))
        except AssertionError:
            raise AssertionError(f"byte {position % len(data)} of {name}, changed by {mask}") from None
        shutil.rmtree(scratch)
    return refused


def every_place(directory: Path) -> Iterator[tuple[str, int, int]]:
    source = random.Random(1)
    for path in sorted(directory.iterdir()):
        if path.name not in ("LOCK", "LOG") and not path.name.startswith("LOG"):
            for position in range(path.stat().st_size):
                yield path.name, position, source.randrange(1, 256)


@pytest.mark.usefixtures("path_taken")
def test_a_flipped_byte_gives_right_answers_or_an_error(directory: Path, soak: bool) -> None:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as probe:
        several_files(Path(probe) / "probe")
        places = list(every_place(Path(probe) / "probe"))
    files = sorted(path for path, position, _ in places if position == 0)
    assert sum(name.endswith(".sst") for name in files) >= 3
    count = 2_000 if soak else 60
    chosen = random.Random().sample([place for place in places if place[0].endswith(".sst")], count)
    chosen += random.Random().sample([place for place in places if not place[0].endswith(".sst")], count // 3)
    refused = check_flips(directory, directory.with_name("scratch"), chosen)
    assert sum(ways > 0 for ways in refused) >= count // 6
    assert sum(ways < 4 for ways in refused) >= count // 6


def test_a_damaged_file_is_not_put_together_with_others(directory: Path) -> None:
    several_files(directory)
    places = [place for place in every_place(directory) if place[0].endswith(".sst") and place[1] < 3000]
    shutil.rmtree(directory)
    chosen = random.Random().sample(places, 4)
    assert len(check_flips(directory, directory.with_name("scratch"), chosen)) == 4


@pytest.mark.usefixtures("path_taken")
def test_a_missing_or_shortened_file_gives_right_answers_or_an_error(directory: Path) -> None:
    states = several_files(directory)
    scratch = directory.with_name("scratch")
    refused = []
    for path in directory.iterdir():
        for keep in (0, 0.5, None):
            shutil.copytree(directory, scratch)
            (scratch / path.name).unlink()
            if keep is not None:
                data = path.read_bytes()
                (scratch / path.name).write_bytes(data[: int(len(data) * keep)])
            refused.append(refusals(scratch, states))
            shutil.rmtree(scratch)
    assert sum(ways == 4 for ways in refused) >= 9


def test_a_scan_that_meets_a_damaged_block_raises_after_what_is_right(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lastvalues, "INGEST_ROWS", 1)
    table = {b"%05d" % n: random.Random(n).randbytes(50) for n in range(5_000)}
    with LastValues.open(directory, IDENTITY) as store:
        apply(store, [(n, key, value) for n, (key, value) in enumerate(table.items())])
    (file,) = directory.glob("*.sst")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with LastValues.open(directory, IDENTITY) as store:
        seen: list[tuple[bytes, bytes]] = []
        rows = store.all()
        with pytest.raises(StoreUnusable, match="damaged"):
            seen.extend(rows)
        with pytest.raises(StoreClosed):
            next(rows)
        assert 0 < len(seen) < 5_000
        assert seen == sorted(table.items())[: len(seen)]
        with closing(store.snapshot()) as snapshot, pytest.raises(StoreUnusable):
            snapshot.get_all(sorted(table))
        with pytest.raises(StoreUnusable, match="damaged"):
            store.get_all(sorted(table))


# -- kill -9 ------------------------------------------------------------------------------------------------

_LOG_RECORDS = 300


def log_batch(number: int) -> list[Record]:
    """Batch `number` of an endless log: every third one has many keys, the others few."""
    source = random.Random(number)
    keys = 500 if number % 3 == 0 else 30
    return [
        (
            number * _LOG_RECORDS + n,
            b"key%d" % source.randrange(keys),
            None if source.random() < 0.2 else b"%d " % number * source.randrange(1, 20),
        )
        for n in range(_LOG_RECORDS)
    ]


def apply_when_asked(directory: Path) -> None:
    """For every line that comes in: a process that applies the log, from where the store is, until it dies.

    Forked, so that what takes long, the imports, is done once.
    """
    lastvalues.INGEST_ROWS = 100
    for _ in sys.stdin:
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            if status != signal.SIGKILL:
                print("ended with status", status, flush=True)
            continue
        print("pid", os.getpid(), flush=True)
        end = time.monotonic() + 60  # In case nobody kills it.
        with LastValues.open(directory, IDENTITY) as store:
            while time.monotonic() < end:
                number = store.applied // _LOG_RECORDS
                apply(store, log_batch(number))
                if number % 4 == 1:
                    store.flush()
                print("applied", number, flush=True)
        os._exit(0)


def test_after_kill_9_the_store_is_the_fold_up_to_what_it_says_it_applied(
    directory: Path, soak: bool
) -> None:
    table: dict[bytes, bytes | None] = {}
    checked = grown = 0
    rounds = 100 if soak else 10
    path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    server = subprocess.Popen(
        [sys.executable, __file__, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )
    assert server.stdin is not None
    assert server.stdout is not None
    with server:
        for _ in range(rounds):
            server.stdin.write(b"\n")
            server.stdin.flush()
            while not (line := server.stdout.readline()).startswith(b"pid"):
                assert line, "the process that applies is gone"
                assert not line.startswith(b"ended"), line
            for _ in range(random.randrange(1, 30)):
                server.stdout.readline()
            time.sleep(random.uniform(0, 0.005))
            os.kill(int(line.split()[1]), signal.SIGKILL)
            with opened_when_free(directory) as store:
                assert store.applied % _LOG_RECORDS == 0
                batches = store.applied // _LOG_RECORDS
                assert batches >= checked, "what was flushed before is gone"
                grown += batches > checked
                for number in range(checked, batches):
                    table.update((key, value) for _, key, value in log_batch(number))
                checked = batches
                expected = {key: value for key, value in table.items() if value is not None}
                assert dict(store.all()) == expected
    assert grown >= rounds // 3


def opened_when_free(directory: Path) -> LastValues:
    """The lock of a process that was just killed is held until the kernel is done with it."""
    for _ in range(2_000):
        with suppress(StoreUnusable):
            return LastValues.open(directory, IDENTITY)
        time.sleep(0.005)
    return LastValues.open(directory, IDENTITY)


if __name__ == "__main__":
    apply_when_asked(Path(sys.argv[1]))
