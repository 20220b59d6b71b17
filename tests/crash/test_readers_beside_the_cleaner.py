"""Readers, in this and in other processes, while the writer appends and cleans: no hole, no error, no other
view.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pyarrow as pa

from keyfold import Changelog
from keyfold.statestore.files import LOCAL
from support.faults.inject import PauseAt, on
from support.folds import IN_MEMORY

CONFIG = {"segment.bytes": 2048, "cleaner.threads": 0, "delete.retention.ms": 10**12, "anchors.auto": 0}
KEYS = 20

#: Follows a changelog until it is told to stop; prints how many views it read. Each view must hold every
#: key's last value as of the view's end: values count up by one with every record of a key.
READER = f"""
KEYS = {KEYS}
import sys
from keyfold import Changelog
views = 0
while True:
    with Changelog.open(sys.argv[1], mode="r") as log:
        end = log.end_offsets()[0]
        last = {{}}
        offset = 0
        for batch in log.read(0):
            for row in batch.select(["offset", "key", "value"]).to_pylist():
                assert offset <= row["offset"] < end, (offset, row["offset"], end)
                offset = row["offset"] + 1
                last[row["key"]] = int(row["value"])
        assert offset == end, "the last record is missing"
        rounds = end // KEYS
        assert sorted(last.values()) == [rounds - 1] * KEYS, (end, last)
        views += 1
        if log.last_batch("stop") is not None:
            break
print(views)
"""


def one_round(number: int) -> pa.Table:
    return pa.table({"key": [f"k{i}" for i in range(KEYS)], "value": [str(number)] * KEYS})


def test_readers_in_other_processes_see_whole_views_through_a_thousand_swaps(tmp_path: Path) -> None:
    swaps = 1000
    directory = tempfile.TemporaryDirectory(dir=IN_MEMORY or tmp_path)
    path = Path(directory.name) / "log"
    with directory, Changelog.open(path, config=CONFIG) as log:
        log.append(one_round(0))
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", READER, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for _ in range(2)
        ]
        for number in range(1, swaps + 1):
            log.append(one_round(number))
            log.compact()
        log.append(one_round(swaps + 1).slice(0, 0), app_id="stop")
        for reader in readers:
            out, err = reader.communicate(timeout=120)
            assert reader.returncode == 0, err.decode()
            assert int(out) >= 1


def test_a_slow_reader_keeps_its_view_and_its_files_go_when_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Changelog.open(path, config=CONFIG) as log:
        for number in range(30):
            log.append(one_round(number))
        before = set((path / "0").glob("*.arrows"))
        batches = log.read(0)
        first = next(batches)
        with Changelog.open(path, mode="r") as reader:
            log.compact()
            assert before <= set((path / "0").glob("*.arrows"))
            assert first.num_rows + sum(b.num_rows for b in batches) == 30 * KEYS
            assert sum(b.num_rows for b in reader.read(0)) == 30 * KEYS
        log.append(one_round(30))
        log.compact()
        assert not before & set((path / "0").glob("*.arrows"))


def test_appends_go_on_while_a_pass_is_writing_its_copy(tmp_path: Path) -> None:
    # the second index is that of the pass; the first, of the active segment, is sealed under the writer's
    # lock
    files = PauseAt(on("create", path="*-1-2.index"))
    with Changelog.open(tmp_path / "log", config=CONFIG, files=files) as log:
        log.append(one_round(0))
        log.append(one_round(1))
        cleaning = threading.Thread(target=log.compact)
        cleaning.start()
        files.wait()
        log.append(one_round(2))
        assert sum(b.num_rows for b in log.read(0)) == 3 * KEYS
        files.resume()
        cleaning.join()
        assert log.state.partitions[0].clean_end == 2 * KEYS
        assert {v for b in log.read(0, 2 * KEYS) for v in b["value"].to_pylist()} == {b"2"}


def test_a_reader_that_died_holds_nothing_back(tmp_path: Path) -> None:
    path = tmp_path / "log"
    code = (
        "import os, signal, sys; from keyfold import Changelog\n"
        "log = Changelog.open(sys.argv[1], mode='r')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with Changelog.open(path, config=CONFIG) as log:
        for number in range(10):
            log.append(one_round(number))
        before = set((path / "0").glob("*.arrows"))
        subprocess.run([sys.executable, "-c", code, path], stdout=subprocess.PIPE, check=False)
        assert list((path / "readers").iterdir())
        log.compact()
        assert not before & set((path / "0").glob("*.arrows"))
        assert not list((path / "readers").iterdir())


def test_the_background_cleaner_folds_what_is_dirty_enough(tmp_path: Path) -> None:
    config = {**CONFIG, "cleaner.threads": 1, "cleaner.backoff.ms": 20}
    with Changelog.open(tmp_path / "log", config=config) as log:
        for number in range(200):
            log.append(one_round(number))
            if log.state.partitions[0].clean_end > 0 and number > 50:
                break
        else:
            raise AssertionError("nothing was cleaned")
        assert log.state.partitions[0].records < (number + 1) * KEYS
        assert dict(log.store().all()) == {f"k{i}".encode(): str(number).encode() for i in range(KEYS)}
    assert LOCAL.list_directory(tmp_path / "log" / "work") == []
