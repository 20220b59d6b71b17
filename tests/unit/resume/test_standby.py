"""A standby follows every change of a log, deletes and rollbacks too, and becomes its only writer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pytest

from keyfold import Changelog, Standby, restore
from keyfold.checkpoints.cleaner.retention import apply_retention
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import (
    ChangelogLocked,
    ConfigError,
    KeyfoldError,
    NotAChangelog,
    StorageFailed,
)
from keyfold.statestore.files import LOCAL, Files, OpenFile
from support.changelogs import Living
from support.faults.inject import FailAt, KillAt, Killed, PauseAt, changes, on
from support.lifecycle import bury
from support.waiting import eventually

CONFIG = {"cleaner.threads": 0, "anchors.auto": 0, "delete.retention.ms": 0}


def table(**rows: str | None) -> pa.Table:
    return pa.table({"key": list(rows), "value": pa.array(list(rows.values()), pa.string())})


def values(log: Changelog) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in log.store().all()}


def is_warm(standby: Standby) -> bool:
    return not any(standby.lag().values())


def left_of_standbys(path: Path) -> list[str]:
    return [p.name for p in (path / "work").iterdir() if p.name.startswith("standby-")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def log(path: Path) -> Iterator[Changelog]:
    with Changelog.open(path, partitions=2, config=CONFIG) as log:
        log.append(table(a="1", b="1", c="1"))
        yield log


@contextmanager
def asleep(files: PauseAt) -> Iterator[None]:
    """A standby with these files sees nothing of what is written meanwhile."""
    gate = files.gate(on("read", path="*.head"))
    gate.wait()
    try:
        yield
    finally:
        gate.resume()


# -- taking over ---------------------------------------------------------------------------------------------


def test_it_goes_on_after_a_writer_that_was_killed(path: Path) -> None:
    with Living(path) as writer:
        writer.append("a", "1")
        with Standby(path) as standby:
            eventually(lambda: is_warm(standby))
            writer.append("b", "2")
            writer.kill()
            log = standby.take_over(timeout=60)
    with log:
        assert values(log) == {"a": "1", "b": "2"}
        with log.transaction(app_id="append", batch_id=2) as store:
            store.put(b"a", b"3")
        assert values(log) == {"a": "3", "b": "2"}
        assert restore(path).to_dict() == {b"a": b"3", b"b": b"2"}
    assert verify(path).damages == []


def test_the_stores_are_those_it_kept_warm(
    path: Path, log: Changelog, caplog: pytest.LogCaptureFixture
) -> None:
    """What it had followed is not read again."""
    with Standby(path) as standby:
        eventually(lambda: is_warm(standby))
        log.close()
        for segment in path.glob("*/*.arrows"):
            segment.rename(segment.with_suffix(".away"))
        for store in path.glob("store-*"):
            shutil.rmtree(store)
        with standby.take_over(timeout=60) as mine:
            assert values(mine) == {"a": "1", "b": "1", "c": "1"}
    assert left_of_standbys(path) == []
    assert "rebuilt" not in caplog.text


def test_of_the_old_writers_stores_nothing_stays(path: Path, log: Changelog) -> None:
    log.store()
    old = {p.name for p in path.glob("store-*")}
    with Standby(path) as standby:
        eventually(lambda: is_warm(standby))
        log.close()
        with standby.take_over(timeout=60) as mine:
            eventually(lambda: old.isdisjoint(p.name for p in path.glob("store-*")))
            assert values(mine) == {"a": "1", "b": "1", "c": "1"}
    assert len(list(path.glob("store-*"))) == 1


def test_it_returns_with_complete_last_values(path: Path, log: Changelog) -> None:
    """What was committed just before the end is in them, though there was no time to follow it."""
    with Standby(path) as standby, ThreadPoolExecutor(1) as pool:
        eventually(lambda: is_warm(standby))
        waiting = pool.submit(standby.take_over, timeout=60)
        log.append(table(**{f"k{i}": "1" for i in range(20_000)}))
        log.close()
        with waiting.result() as mine:
            assert mine.engine._updater.lag() == {0: 0, 1: 0}
            assert len(values(mine)) == 20_003


def test_it_lags_by_the_records_it_has_not_applied(path: Path, log: Changelog) -> None:
    files = PauseAt(on("map", path="*.arrows"))
    with Standby(path, files=files) as standby:
        files.wait()
        lag = standby.lag()
        log.append(table(d="1"))
        assert sum(lag.values()) == 3
        assert sum(standby.lag().values()) == 4
        files.resume()
        eventually(lambda: standby.lag() == {0: 0, 1: 0})


def test_a_writer_that_hangs_is_fenced(path: Path) -> None:
    with Living(path) as writer, Standby(path) as standby:
        writer.append("a", "1")
        os.kill(writer.pid, signal.SIGSTOP)
        with standby.take_over(steal=True) as mine:
            mine.append(table(d="2"))
            os.kill(writer.pid, signal.SIGCONT)
            with pytest.raises(AssertionError):
                writer.append("d", "1")
            assert values(mine) == {"a": "1", "d": "2"}
        assert restore(path).to_dict() == {b"a": b"1", b"d": b"2"}


def test_a_living_writer_is_waited_for_so_long(path: Path, log: Changelog) -> None:
    with Standby(path) as standby:
        for seconds in (0, 0.1):
            with pytest.raises(ChangelogLocked):
                standby.take_over(timeout=seconds)
        log.append(table(a="2"))
        log.close()
        with standby.take_over(timeout=60) as mine:
            assert values(mine)["a"] == "2"
            with pytest.raises(ConfigError, match="ended"):
                standby.take_over()


class LockCounting(Files):
    """Counts how often the writer's lock was got."""

    def __init__(self) -> None:
        self.got = 0
        self.tried = 0

    def lock(self, path: Path) -> OpenFile | None:
        found = super().lock(path)
        if path.name == "lock":
            self.tried += 1
            self.got += found is not None
        return found


def test_the_lock_is_taken_only_to_be_kept(path: Path, log: Changelog) -> None:
    """So a writer that is starting never meets it: before the one that ends its waiting it gets none."""
    files = LockCounting()
    with Standby(path, files=files) as standby:
        for _ in range(3):
            log.close()
            log = Changelog.open(path)
            eventually(lambda: is_warm(standby))
            with pytest.raises(ChangelogLocked):
                standby.take_over(timeout=0.05)
        assert (files.got, files.tried > 3) == (0, True)
        log.close()
        with standby.take_over(timeout=60):
            assert files.got == 1
            with subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"from keyfold import Changelog; Changelog.open({str(path)!r})",
                ],
                stderr=subprocess.PIPE,
            ) as late:
                assert b"ChangelogLocked" in late.communicate()[1]


def test_of_two_standbys_one_takes_over_and_the_other_stands_by_for_it(path: Path, log: Changelog) -> None:
    with Standby(path) as one, Standby(path) as two, ThreadPoolExecutor(2) as pool:
        waiting = {pool.submit(s.take_over, timeout=60): s for s in (one, two)}
        log.close()
        eventually(lambda: any(w.done() for w in waiting))
        (first,) = [w for w in waiting if w.done()]
        (second,) = set(waiting) - {first}
        with first.result() as writer:
            writer.append(table(a="2"))
            eventually(lambda: is_warm(waiting[second]))
            assert not second.done()
        with second.result() as writer:
            assert values(writer) == {"a": "2", "b": "1", "c": "1"}


# -- following -----------------------------------------------------------------------------------------------


def test_a_delete_that_was_compacted_away_while_it_slept_is_not_missed(path: Path, log: Changelog) -> None:
    files = PauseAt(on("read", path="nothing"))
    with Standby(path, files=files) as standby:
        eventually(lambda: is_warm(standby))
        with asleep(files):
            log.append(table(a=None, c=None))
            log.append(table(d="1"))
            log.compact()
            log.compact()
            assert max(p.dropped_tombstone for p in log.state.partitions) >= 0
        eventually(lambda: is_warm(standby))
        log.close()
        with standby.take_over(timeout=60) as mine:
            assert values(mine) == {"b": "1", "d": "1"}


def test_a_delete_that_was_dropped_after_a_later_one_is_not_missed(path: Path) -> None:
    """The highest dropped offset does not move then."""
    now = [1_000_000]
    config = CONFIG | {"delete.retention.ms": 1000}
    files = PauseAt(on("read", path="nothing"))
    with Changelog.open(path, config=config, clock_ms=lambda: now[0]) as log:
        log.append(table(a="1", b="1", c="1"))
        with Standby(path, files=files) as standby:
            eventually(lambda: is_warm(standby))
            seen = standby._updater._kept._seen[0]
            with asleep(files):
                log.append(table(a=None, x="1"))
                log.compact()
                now[0] += 5000
                log.append(table(y="1"))
                log.compact()
                assert log.state.partitions[0].dropped_tombstone == 3
            eventually(lambda: is_warm(standby))
            assert standby._updater._kept._seen[0] >= log.state.partitions[0].dropped_at > seen
            log.close()
            with standby.take_over(timeout=60) as mine:
                assert values(mine) == {"b": "1", "c": "1", "x": "1", "y": "1"}


def test_what_a_rollback_takes_back_is_taken_back(
    path: Path, log: Changelog, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the log is as long as before when it is seen again."""
    log.append(table(a="2", d="2"))
    files = PauseAt(on("read", path="nothing"))
    with Standby(path, files=files) as standby:
        eventually(lambda: is_warm(standby))
        with asleep(files):
            log.rollback(to=1)
            log.append(table(a="3", d=None))
        eventually(lambda: is_warm(standby))
        log.append(table(e="3"))
        log.close()
        with standby.take_over(timeout=60) as mine:
            assert values(mine) == {"a": "3", "b": "1", "c": "1", "e": "3"}
    assert "rebuilt" not in caplog.text


def test_a_rollback_while_it_waits_to_be_warm_does_not_hold_it_up(path: Path, log: Changelog) -> None:
    log.append(table(a="2", d="2"))
    files = PauseAt(on("map", path="*.arrows"))
    with Standby(path, files=files) as standby, ThreadPoolExecutor(1) as pool:
        files.wait()
        waiting = pool.submit(standby.take_over, timeout=60)
        log.rollback(to=1)
        log.close()
        files.resume()
        with waiting.result() as mine:
            assert values(mine) == {"a": "1", "b": "1", "c": "1"}


def test_what_retention_drops_goes(path: Path) -> None:
    now = [1_000_000]
    config = {"cleaner.threads": 0, "cleanup.policy": "compact,delete", "retention.ms": 1000}
    with Changelog.open(path, config=config, clock_ms=lambda: now[0]) as log:
        log.append(table(old="1"))
        log.engine.writer.seal_active()
        log.append(table(new="1"))
        with Standby(path, clock_ms=lambda: now[0]) as standby:
            eventually(lambda: is_warm(standby))
            now[0] += 2000
            log.append(table(newer="1"))
            assert apply_retention(log.engine.writer) == 1
            eventually(lambda: is_warm(standby))
            log.close()
            with standby.take_over(timeout=60) as mine:
                assert values(mine) == {"new": "1", "newer": "1"}


def test_files_that_it_reads_are_spared_by_the_cleaner(path: Path, log: Changelog) -> None:
    files = PauseAt(on("map", path="*.arrows"))
    with Standby(path, files=files) as standby:
        files.wait()
        log.append(table(a="2", b="2", c="2"))
        log.compact()
        standby.lag()
        log.engine.writer.garbage.collect()
        files.resume()
        eventually(lambda: is_warm(standby))
    log.engine.writer.garbage.collect()
    named = {s.name for p in log.state.partitions for s in p.segments}
    assert {f.name for f in path.glob("*/*.arrows")} == named


def test_it_follows_a_log_without_compaction_too(path: Path) -> None:
    with Changelog.open(path, config={"cleaner.threads": 0, "cleanup.policy": "delete"}) as log:
        with Standby(path) as standby:
            log.append(table(a="1"))
            eventually(lambda: is_warm(standby))
            log.close()
            with standby.take_over(timeout=60) as mine:
                assert values(mine) == {"a": "1"}


# -- its end -------------------------------------------------------------------------------------------------

STANDING = """
import sys
from keyfold import Standby
with Standby(sys.argv[1]) as standby:
    while any(standby.lag().values()):
        pass
    print("warm", flush=True)
    sys.stdin.read()
"""


@contextmanager
def standing(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A warm standby in another process, which ends it when its input does."""
    with subprocess.Popen(
        [sys.executable, "-c", STANDING, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"warm\n"
        yield process
        process.communicate()


@pytest.mark.parametrize("by", ["writer", "standby"])
def test_what_a_killed_standby_leaves_is_removed(path: Path, log: Changelog, by: str) -> None:
    with standing(path) as living, standing(path) as killed:
        killed.kill()
        killed.wait()
        assert len(left_of_standbys(path)) == 4
        if by == "writer":
            log.close()
            Changelog.open(path).close()
        else:
            Standby(path).close()
        left = left_of_standbys(path)
        assert len(left) == 2
        assert len(list((path / "work").glob("standby-*/CURRENT"))) == 1
        living.communicate(b"")
    assert left_of_standbys(path) == []


def test_it_can_be_closed_while_it_waits(path: Path, log: Changelog) -> None:
    files = LockCounting()
    standby = Standby(path, files=files)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(standby.take_over)
        eventually(lambda: files.tried > 1)
        standby.close()
        with pytest.raises(ConfigError, match="ended"):
            waiting.result()
    with pytest.raises(ConfigError, match="ended"):
        standby.lag()
    standby.close()
    assert left_of_standbys(path) == []
    assert list((path / "readers").iterdir()) == []
    log.append(table(a="2"))


def test_a_snapshot_or_nothing_has_no_standby(tmp_path: Path, path: Path, log: Changelog) -> None:
    log.snapshot(tmp_path / "snapshot")
    before = sorted(p for p in (tmp_path / "snapshot").rglob("*"))
    with pytest.raises(ConfigError, match="snapshot has no writer"):
        Standby(tmp_path / "snapshot")
    with pytest.raises(NotAChangelog):
        Standby(tmp_path / "missing")
    assert sorted(p for p in (tmp_path / "snapshot").rglob("*")) == before
    assert not (tmp_path / "missing").exists()


def test_a_changelog_that_vanishes_is_told(tmp_path: Path, path: Path) -> None:
    Changelog.open(path, config=CONFIG).close()
    with Standby(path) as standby:
        path.rename(tmp_path / "away")
        with pytest.raises(KeyfoldError):
            standby.take_over(timeout=60)


# -- faults --------------------------------------------------------------------------------------------------


def test_it_stands_by_again_after_an_opening_that_failed(path: Path, log: Changelog) -> None:
    files = FailAt(0, only=on("create", path="*.journal"))
    with Standby(path, files=files) as standby:
        eventually(lambda: is_warm(standby))
        log.append(table(d="1"))
        log.close()
        with pytest.raises(StorageFailed):
            standby.take_over(timeout=60)
        with Changelog.open(path) as other:
            other.append(table(e="1"))
        with standby.take_over(timeout=60) as mine:
            assert values(mine) == {"a": "1", "b": "1", "c": "1", "d": "1", "e": "1"}


def test_a_store_that_cannot_be_moved_is_built_again(path: Path, log: Changelog) -> None:
    files = FailAt(0, only=on("rename", path="*store-*"))
    with Standby(path, files=files) as standby:
        eventually(lambda: is_warm(standby))
        log.append(table(a=None))
        log.close()
        with standby.take_over(timeout=60) as mine:
            assert files.failed == 1
            assert values(mine) == {"b": "1", "c": "1"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("halfway", [False, True], ids=["before", "halfway"])
def test_a_kill_at_any_operation_leaves_a_changelog_that_opens(
    tmp_path: Path, halfway: bool, soak: bool
) -> None:
    killed, n = True, 0
    while killed:
        path = tmp_path / f"log-{n}"
        with Changelog.open(path, partitions=2, config=CONFIG) as log:
            log.append(table(a="1", b="1", c="1"))
            log.append(table(a="2", b=None))
        files = KillAt(n, halfway=halfway, only=changes)
        others = set(threading.enumerate())
        killed = True
        with suppress(Killed):
            with Standby(path, files=files) as standby, standby.take_over(timeout=60) as mine:
                mine.append(table(d="1"), batch_id=2)
            killed = False
        for thread in set(threading.enumerate()) - others:
            if thread.name in ("keyfold-standby", "keyfold-last-values"):
                thread.join(10)
        bury(files)
        with Changelog.open(path) as log:
            assert values(log) in ({"a": "2", "c": "1"}, {"a": "2", "c": "1", "d": "1"})
            log.append(table(d="1"), batch_id=2)
            assert values(log) == {"a": "2", "c": "1", "d": "1"}
            assert left_of_standbys(path) == []
            assert len(list(path.glob("store-*"))) == 1
        assert verify(path).damages == []
        n += 1 if soak else 2
    assert n > 20


def test_the_real_files_are_the_default(path: Path, log: Changelog) -> None:
    with Standby(path) as standby:
        assert standby._files is LOCAL
