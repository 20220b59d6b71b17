"""Too few open files: many partitions work below a low limit, and where it is met nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent.parent

COMMON = """
import errno, os, resource, sys
from contextlib import suppress
from pathlib import Path
soft, hard = int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
import pyarrow as pa
from keyfold import Changelog
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import StorageFailed
path = Path(sys.argv[1])
def table(count, value):
    return pa.table({"key": [f"k{n}" for n in range(count)], "value": [value] * count})
"""

MANY = """
with Changelog.open(path, partitions=400, config={"cleaner.threads": 0, "anchors.auto": 0}) as log:
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    for n in range(3):
        log.append(table(4000, str(n)))
        assert log.get(b"k17") == str(n).encode()
        with log.transaction(app_id="t", batch_id=n) as store:
            assert store.get(b"k3999") == str(n).encode()
            store.put(b"k3999", b"changed")
    log.compact()
    assert set(dict(log.store().all()).values()) == {b"2", b"changed"}
    log.append(table(4000, "3"))
with Changelog.open(path) as log:
    log.append(table(4000, "4"))
    assert set(dict(log.store().all()).values()) == {b"4"}
with Changelog.open(path, mode="r") as log:
    assert log.get(b"k17") == b"4"
assert verify(path).damages == []
"""

MORE_THAN_THE_LIMIT = """
with Changelog.open(path, partitions=300, config={"cleaner.threads": 0}) as log:
    log.append(table(5, "1"))
    for attempt in range(2):
        with suppress(StorageFailed):
            log.append(table(5000, "2"))
            raise AssertionError("300 segments cannot be open")
        assert not log.engine.writer.fenced
        log.append(table(5, "3"))
        assert dict(log.store().all()) == {b"k%d" % n: b"3" for n in range(5)}
    try:
        log.append(table(5000, "2"))
    except StorageFailed as e:
        print(e)
assert verify(path).damages == []
"""

#: Everything else holds files until so many can be opened.
EXHAUSTED = """
log = Changelog.open(path, partitions=3, config={"cleaner.threads": 0, "segment.bytes": 8192})
expected = {}
refused = done = 0
for free in [*range(24), *range(12)]:
    held = []
    with suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    for fd in held[:free]:
        os.close(fd)
    try:
        log.append(table(7, f"batch {free}"), app_id="a", batch_id=refused + done)
        expected, done = {b"k%d" % n: b"batch %d" % free for n in range(7)}, done + 1
    except StorageFailed as e:
        refused += 1
        assert "ulimit -n" in str(e) and "nothing of this batch was committed" in str(e), e
    finally:
        for fd in held[free:]:
            os.close(fd)
    assert not log.engine.writer.fenced, free
    assert dict(log.store().all()) == expected, free
log.append(table(7, "last"), app_id="b")
log.close()
with Changelog.open(path) as log:
    assert set(dict(log.store().all()).values()) == {b"last"}
assert verify(path).damages == []
print("refused", refused, "done", done)
"""


def run(script: str, path: Path, soft: int, hard: int) -> str:
    search = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", COMMON + script, str(path), str(soft), str(hard)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    return done.stdout


@pytest.mark.parametrize(("soft", "hard"), [(1024, 1024), (200, 2048)])
def test_400_partitions_work_below_a_low_limit_and_the_soft_one_is_raised(
    tmp_path: Path, soft: int, hard: int
) -> None:
    run(MANY, tmp_path / "log", soft, hard)


def test_a_batch_that_needs_more_open_files_than_there_may_be_is_refused_and_the_writer_goes_on(
    tmp_path: Path,
) -> None:
    said = run(MORE_THAN_THE_LIMIT, tmp_path / "log", 220, 220)
    for part in (
        "nothing of this batch was committed",
        "fewer than 220 open files",
        "RLIMIT_NOFILE",
        "ulimit -n",
    ):
        assert part in said


def test_wherever_open_files_run_out_a_batch_is_committed_or_refused_and_the_writer_goes_on(
    tmp_path: Path,
) -> None:
    said = run(EXHAUSTED, tmp_path / "log", 256, 256).split()
    assert int(said[1]) > 3
    assert int(said[3]) > 3
