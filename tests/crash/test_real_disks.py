"""The real thing: a full tmpfs, an fdatasync that fails under strace, an ext4 that loses its power."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from keyfold import Changelog, restore
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import StorageFailed, WriterFenced
from support.faults.machines import Ext4, ext4, run_injected, tmpfs
from support.soaking import Soak, in_rounds

CONFIG = {"cleaner.threads": 0, "cleanup.policy": "delete"}

#: Appends batches of one key each, and tells a number once it is acknowledged.
APPENDER = """
import sys, pyarrow as pa
from keyfold import Changelog
from keyfold.statestore.errors import KeyfoldError
try:
    with Changelog.open(sys.argv[1], config={"cleaner.threads": 0, "cleanup.policy": "delete"}) as log:
        number = log.last_batch("n")
        for number in range(0 if number is None else number + 1, 1000000):
            log.append(pa.table({"key": ["k"], "value": [str(number)]}), app_id="n", batch_id=number)
            print(number, flush=True)
except KeyfoldError as e:
    print(type(e).__name__, flush=True)
"""


def numbers(path: Path) -> list[bytes]:
    with Changelog.open(path, mode="r") as log:
        return [v for b in log.read(0) for v in b["value"].to_pylist()]


def fill(log: Changelog, table: pa.Table) -> None:
    for _ in range(100):
        log.append(table)


def test_a_full_disk_stops_the_writer_loses_nothing_and_can_be_read_and_gone_on_with(tmp_path: Path) -> None:
    table = pa.table({"key": [f"k{i}" for i in range(100)], "value": ["v" * 1000] * 100})
    with tmpfs(tmp_path, 2 << 20) as disk:
        (disk / "ballast").write_bytes(bytes(512 << 10))
        log = Changelog.open(disk / "log", config={**CONFIG, "compression.type": "none"})
        with pytest.raises(StorageFailed, match="No space left on device"):
            fill(log, table)
        committed = log.state.next_commit - 1
        assert 0 < committed < 100
        with pytest.raises(WriterFenced):
            log.append(table)
        log.close()
        assert sum(b.num_rows for b in _records(disk / "log")) == 100 * committed
        (disk / "ballast").unlink()
        with Changelog.open(disk / "log") as again:
            again.append(table)
        assert sum(b.num_rows for b in _records(disk / "log")) == 100 * (committed + 1)


def _records(path: Path) -> list[pa.RecordBatch]:
    with Changelog.open(path, mode="r") as log:
        return list(log.read(0))


def test_an_fdatasync_that_fails_is_the_end_of_the_writer_and_of_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "log"
    done = run_injected([sys.executable, "-c", APPENDER, str(path)], tmp_path, "fdatasync:error=EIO:when=15")
    told = done.stdout.split()
    assert told[-1] == "StorageFailed"
    found = numbers(path)
    assert found[: len(told) - 1] == [n.encode() for n in told[:-1]]
    assert verify(path).sound
    with Changelog.open(path) as log:
        last = log.last_batch("n") or 0
        log.append(pa.table({"key": ["k"], "value": ["after"]}), app_id="n", batch_id=last + 1)
    assert restore(path).to_dict() == {b"k": b"after"}


def test_an_ext4_that_loses_its_power_keeps_every_acknowledged_batch(tmp_path: Path, soak: bool) -> None:
    def lose(seed: int, figures: Soak) -> None:
        with ext4(tmp_path) as disk:
            path = disk.path / "log"
            told = -1
            for _ in range(30 if soak else 4):
                told = written_and_lost(disk, path, told)
                figures.count("power losses of an ext4")

    in_rounds("power-losses-of-ext4", 0, lose, soak=soak)


def written_and_lost(disk: Ext4, path: Path, told: int) -> int:
    """The last batch that is there after some were written and the power went; `told` were there before."""
    writer = subprocess.Popen([sys.executable, "-c", APPENDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(20):
        told = int(writer.stdout.readline())
    writer.kill()
    told = max([told, *(int(line) for line in writer.stdout if line.endswith("\n"))])
    writer.wait()
    # mappings of what was read in the round before
    gc.collect()
    disk.lose_power()
    with Changelog.open(path) as log:
        found = [v for b in log.read(0) for v in b["value"].to_pylist()]
        assert found == [b"%d" % n for n in range(len(found))]
        assert len(found) in (told + 1, told + 2)
    assert verify(path).sound
    return len(found) - 1
