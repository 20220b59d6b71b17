"""The fault harness does what it says, and finds in a toy log what it is meant to find."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keyfold.statestore.files import LOCAL, Files, OpenFile
from support.faults.inject import QUICK, FailAt, KillAt, Killed, PauseAt, on
from support.faults.toy_log import BUGS, NAME_AGAIN, Broken, ToyLog, fault_in, read_numbers, read_state, run


def never(number: int) -> None:
    """Nobody is told."""


def fresh(path: Path) -> Path:
    path.mkdir()
    return path


# -- KillAt ----------------------------------------------------------------------------------------------


def write_three(files: Files, directory: Path) -> OpenFile:
    file = files.create(directory / "a")
    files.append(file, [b"0123", b"4567"])
    files.sync(file)
    return file


def test_a_run_without_a_kill_counts_its_changes_and_no_reads(tmp_path: Path) -> None:
    files = KillAt()
    file = write_three(files, tmp_path)
    files.read(tmp_path / "a")
    files.list_directory(tmp_path)
    files.close(file)
    assert files.count == 3
    assert not files.dead


def test_the_killed_operation_does_not_happen_and_the_ones_before_did(tmp_path: Path) -> None:
    lengths = []
    for n in range(4):
        directory = fresh(tmp_path / f"{n}")
        files = KillAt(n)
        try:
            write_three(files, directory)
        except Killed:
            assert files.dead
        lengths.append(LOCAL.size(directory / "a") if LOCAL.exists(directory / "a") else None)
        files.release()
    assert lengths == [None, 0, 8, 8]


def test_halfway_writes_half_of_the_bytes_and_finishes_what_has_no_half(tmp_path: Path) -> None:
    lengths = []
    for n in range(4):
        directory = fresh(tmp_path / f"{n}")
        files = KillAt(n, halfway=True)
        try:
            write_three(files, directory)
        except Killed:
            assert files.dead
        lengths.append(LOCAL.size(directory / "a"))
        files.release()
    assert lengths == [0, 4, 8, 8]


def test_halfway_overwrites_half_and_removes_half_of_a_tree(tmp_path: Path) -> None:
    (tmp_path / "tree" / "in").mkdir(parents=True)
    for name in ("a", "b", "in/c", "in/d"):
        (tmp_path / "tree" / name).write_bytes(b"")
    files = KillAt(0, halfway=True)
    with pytest.raises(Killed):
        files.remove_tree(tmp_path / "tree")
    assert len([p for p in (tmp_path / "tree").rglob("*") if p.is_file()]) == 2

    files = KillAt(2, halfway=True)
    file = files.create(tmp_path / "a")
    files.append(file, [b"........"])
    with pytest.raises(Killed):
        files.overwrite(file, b"abcd", 2)
    files.release()
    assert LOCAL.read(tmp_path / "a") == b"..ab...."


def test_halfway_what_has_no_half_has_happened_and_does_not_return(tmp_path: Path) -> None:
    files = KillAt(0, halfway=True, only=on("rename"))
    with pytest.raises(Killed):
        files.write_whole(tmp_path / "a", b"x")
    assert LOCAL.list_directory(tmp_path) == ["a"]
    with pytest.raises(Killed):
        KillAt(0, halfway=True).unlink(tmp_path / "a")
    assert LOCAL.list_directory(tmp_path) == []


def test_the_dead_can_only_close(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    files = KillAt(2)
    with pytest.raises(Killed):
        write_three(files, tmp_path)
    for act in (
        lambda: files.create(tmp_path / "b"),
        lambda: files.list_directory(tmp_path),
        lambda: files.map(tmp_path / "a"),
        lambda: files.lock(tmp_path / "lock"),
    ):
        with pytest.raises(Killed):
            act()
    files.release()
    assert len(os.listdir("/proc/self/fd")) == before
    assert LOCAL.list_directory(tmp_path) == ["a"]


def test_a_dead_process_holds_no_lock_once_released(tmp_path: Path) -> None:
    files = KillAt(1)
    assert files.lock(tmp_path / "lock") is not None
    with pytest.raises(Killed):
        files.create(tmp_path / "a")
    assert LOCAL.lock(tmp_path / "lock") is None
    files.release()
    again = LOCAL.lock(tmp_path / "lock")
    assert again is not None
    LOCAL.close(again)


def test_all_threads_of_a_process_die_at_once(tmp_path: Path) -> None:
    files = KillAt(50)
    ready = threading.Barrier(4)

    def write(number: int) -> int:
        file = files.create(tmp_path / f"{number}")
        ready.wait()
        done = 0
        with contextlib.suppress(Killed):
            while True:
                files.append(file, [b"x"])
                done += 1
        return done

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(write, range(4)))
    files.release()
    assert files.count == 51
    # An append that was under way in another thread is done, but its thread did not live to see it.
    written = sum(LOCAL.size(tmp_path / f"{n}") for n in range(4))
    assert written == 46
    assert 46 - 3 <= sum(done) <= 46


# -- FailAt ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_the_failing_operation_does_nothing_and_later_ones_work(tmp_path: Path, error: int) -> None:
    files = FailAt(1, error)
    file = files.create(tmp_path / "a")
    with pytest.raises(OSError, match=os.strerror(error)) as raised:
        files.append(file, [b"lost"])
    assert raised.value.errno == error
    assert file.position == 0
    files.append(file, [b"kept"])
    files.close(file)
    assert LOCAL.read(tmp_path / "a") == b"kept"
    assert files.failed == 1


def test_a_disk_can_fail_from_then_on(tmp_path: Path) -> None:
    files = FailAt(1, errno.EROFS, forever=True)
    file = files.create(tmp_path / "a")
    for _ in range(3):
        with pytest.raises(OSError, match="Read-only"):
            files.sync(file)
    files.close(file)
    assert files.failed == 3
    assert files.read(tmp_path / "a") == b""


def test_only_selected_operations_fail(tmp_path: Path) -> None:
    files = FailAt(1, only=on("sync", path="*.journal"))
    data, journal = files.create(tmp_path / "a.arrows"), files.create(tmp_path / "1.journal")
    for file in (data, data, journal, data):
        files.sync(file)
    with pytest.raises(OSError, match=r"1\.journal"):
        files.sync(journal)
    files.close(data)
    files.close(journal)


def test_reads_can_fail(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    files = FailAt(0, only=on("read", "map"))
    with pytest.raises(OSError, match="Input/output"):
        files.map(tmp_path / "a")
    assert files.map(tmp_path / "a").size == 1


def test_a_write_can_fail_with_half_of_its_bytes_written(tmp_path: Path) -> None:
    files = FailAt(1, errno.ENOSPC, halfway=True)
    file = files.create(tmp_path / "a")
    with pytest.raises(OSError, match="No space"):
        files.append(file, [b"0123", b"45"])
    assert file.position == 3
    files.close(file)
    assert LOCAL.read(tmp_path / "a") == b"012"


# -- PauseAt ---------------------------------------------------------------------------------------------


def test_the_first_selected_operation_stops_until_it_is_let_go(tmp_path: Path) -> None:
    files = PauseAt(on("create", path="*/b"))
    paths = [tmp_path / name for name in ("a", "b", "c")]
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(lambda: [files.create(path) for path in paths])
        files.wait()
        assert LOCAL.list_directory(tmp_path) == ["a"]
        files.close(files.create(tmp_path / "d"))
        files.resume()
        for file in made.result():
            files.close(file)
    assert LOCAL.list_directory(tmp_path) == ["a", "b", "c", "d"]


def test_an_operation_passes_a_gate_where_another_one_stands(tmp_path: Path) -> None:
    files = PauseAt(on("create"))
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(files.create, tmp_path / "first")
        files.wait()
        files.close(files.create(tmp_path / "second"))
        assert LOCAL.list_directory(tmp_path) == ["second"]
        files.resume()
        files.close(made.result())


def test_an_operation_can_stop_when_it_has_happened_and_at_a_second_gate(tmp_path: Path) -> None:
    files = PauseAt(on("create"), after=True)
    second = files.gate(on("append"))
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write_three, files, tmp_path)
        files.wait()
        assert LOCAL.size(tmp_path / "a") == 0
        files.resume()
        second.wait()
        assert LOCAL.size(tmp_path / "a") == 0
        second.resume()
        files.close(written.result())
    assert LOCAL.size(tmp_path / "a") == 8


def test_a_reader_between_journal_and_segment_is_interleaved_with_a_cleaner(tmp_path: Path) -> None:
    """The toy's readers have no views: the harness shows it, the same in every run."""
    log = ToyLog(QUICK, tmp_path / "log", never)
    log.commit(0)
    log.commit(1)
    reader = PauseAt(on("read", path="*/segment-*"))
    with ThreadPoolExecutor(1) as pool:
        numbers = pool.submit(read_numbers, reader, tmp_path / "log")
        reader.wait()
        log.compact()
        reader.resume()
        with pytest.raises((Broken, FileNotFoundError)):
            numbers.result()
    assert read_numbers(LOCAL, tmp_path / "log") == [0, 1]
    log.close()


# -- the toy log under kills and errors ------------------------------------------------------------------


def found_by_kill(tmp_path: Path, bug: str | None, halfway: bool) -> set[str]:
    """What is wrong after a kill at each operation, before it or in the middle of it."""
    counting = KillAt()
    run(counting, fresh(tmp_path / "counting") / "log", never, bug)
    found = set()
    for n in range(counting.count + 1):
        root = fresh(tmp_path / f"{n}") / "log"
        told: list[int] = []
        files = KillAt(n, halfway=halfway)
        with contextlib.suppress(Killed):
            run(files, root, told.append, bug)
        assert files.dead == (n < counting.count)
        files.release()
        found.add(fault_in(QUICK, root, told))
    return {what for what in found if what is not None}


@pytest.mark.parametrize("halfway", [False, True])
def test_the_right_log_survives_a_kill_at_every_operation(tmp_path: Path, halfway: bool) -> None:
    assert found_by_kill(tmp_path, None, halfway) == set()


def test_kills_alone_find_only_the_name_that_is_used_again(tmp_path: Path) -> None:
    """A killed process leaves its page cache behind, so what was never synced is all there."""
    found = [bug for n, bug in enumerate(BUGS) if found_by_kill(fresh(tmp_path / f"{n}"), bug, halfway=True)]
    assert found == [NAME_AGAIN]


@pytest.mark.parametrize(("error", "halfway"), [(errno.EIO, False), (errno.ENOSPC, True)])
def test_the_right_log_loses_nothing_acknowledged_when_any_operation_fails(
    tmp_path: Path, error: int, halfway: bool
) -> None:
    counting = FailAt(None)
    run(counting, fresh(tmp_path / "counting") / "log", never)
    for n in range(counting.count):
        root = fresh(tmp_path / f"{n}") / "log"
        told: list[int] = []
        files = FailAt(n, error, halfway=halfway)
        with pytest.raises(OSError, match=os.strerror(error)):
            run(files, root, told.append)
        assert files.failed == 1
        assert fault_in(QUICK, root, told) is None


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    root = tmp_path / "log"
    run(QUICK, root, never)
    before = read_state(LOCAL, root)
    with open(root / "journal-2", "ab") as f:
        f.write(b"0badc0de {")
    assert read_state(LOCAL, root) == before
