"""The model of a power loss: what it lets be lost, what never, and which planted faults it finds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyfold.statestore.files import LOCAL, Files, OpenFile
from support.faults.crash_outcomes import Write, kept, lost, prefix, sectors, zeros
from support.faults.inject import PauseAt, Selection, on
from support.faults.powerloss import Disk, FailingPowerLoss, PowerLoss, State

Act = Callable[[Files, Path], object]


Tree = dict[str, bytes | None]


def left(tmp_path: Path, *acts: Act, seeds: tuple[int, ...] = ()) -> list[tuple[State, Tree]]:
    """Every state that may be left while and after `acts` run, with its files (None: a directory)."""
    base = tmp_path / "disk"
    base.mkdir(exist_ok=True)
    disk = Disk(base)
    files = PowerLoss(disk)
    for number, act in enumerate(acts):
        disk.mark(f"{number}")
        act(files, base)
    disk.mark("end")
    assert disk.unrecorded() == []
    return [(state, contents(state.path)) for state in disk.states(tmp_path / "states", seeds=seeds)]


def contents(path: Path) -> Tree:
    return {str(p.relative_to(path)): None if p.is_dir() else p.read_bytes() for p in path.rglob("*")}


def at_end(states: list[tuple[State, Tree]]) -> list[Tree]:
    return [tree for state, tree in states if "end" in state.marks]


def written(name: str, *data: bytes, sync: bool = False, sync_directory: bool = False) -> Act:
    def act(files: Files, base: Path) -> None:
        file = files.create(base / name)
        for piece in data:
            files.append(file, [piece])
        if sync:
            files.sync(file)
        if sync_directory:
            files.sync_directory((base / name).parent)
        files.close(file)

    return act


# -- fates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fate", "result"),
    [
        (lost, b"0123456789"),
        (kept, b"01234567abcdef"),
        (zeros, b"0123456789" + bytes(4)),
        (prefix(1), b"01234567a9"),
        (prefix(3), b"01234567abc"),
        (prefix(0), b"0123456789"),
    ],
)
def test_the_fate_of_a_write_over_the_end_of_a_file(
    fate: Callable[[bytearray, Write], None], result: bytes
) -> None:
    content = bytearray(b"0123456789")
    fate(content, Write(0, position=8, data=b"abcdef"))
    assert bytes(content) == result


def test_a_torn_write_keeps_whole_sectors_of_the_file() -> None:
    content = bytearray(b"." * 600)
    sectors(lambda n: n == 1)(content, Write(0, position=500, data=b"x" * 1200))
    assert bytes(content) == b"." * 512 + b"x" * 512 + bytes(500 + 1200 - 1024)


def test_a_cut_is_done_or_not() -> None:
    for fate, result in ((kept, b"01"), (zeros, b"01"), (lost, b"0123"), (prefix(1), b"0123")):
        content = bytearray(b"0123")
        fate(content, Write(0, position=2))
        assert bytes(content) == result
    longer = bytearray(b"0123")
    kept(longer, Write(0, position=6))
    assert bytes(longer) == b"0123\0\0"


# -- what may be lost ------------------------------------------------------------------------------------


def test_a_file_that_was_synced_with_its_directory_is_always_there(tmp_path: Path) -> None:
    states = left(tmp_path, written("a", b"data", sync=True, sync_directory=True), seeds=(1, 2, 3))
    assert at_end(states) == [{"a": b"data"}]


def test_without_the_sync_of_its_directory_a_file_may_be_missing_but_is_whole(tmp_path: Path) -> None:
    assert at_end(left(tmp_path, written("a", b"data", sync=True))) == [{}, {"a": b"data"}]


def test_without_its_sync_a_file_may_be_empty_zeros_or_a_part(tmp_path: Path) -> None:
    states = at_end(left(tmp_path, written("a", b"x" * 1024, sync_directory=True)))
    zero = bytes(512)
    expected = [b"", b"x" * 1024, zero * 2, b"x" * 512, zero + b"x" * 512]
    assert sorted(tree["a"] or b"" for tree in states) == sorted(expected)


def test_bytes_after_the_last_sync_are_lost_alone(tmp_path: Path) -> None:
    def act(files: Files, base: Path) -> None:
        file = files.create(base / "a")
        files.append(file, [b"certain "])
        files.sync(file)
        files.append(file, [b"perhaps"])
        files.sync_directory(base)
        files.close(file)

    found = [tree["a"] or b"" for tree in at_end(left(tmp_path, act, seeds=tuple(range(20))))]
    assert all(data.startswith(b"certain ") for data in found)
    assert {b"certain ", b"certain perhaps", b"certain " + bytes(7)} < set(found)


def test_an_overwrite_without_sync_is_kept_lost_or_torn_and_hurts_nothing_else(
    tmp_path: Path,
) -> None:
    def act(files: Files, base: Path) -> None:
        file = files.create(base / "head")
        files.append(file, [b"A" * 64 + b"B" * 64])
        files.sync(file)
        files.sync_directory(base)
        files.overwrite(file, b"C" * 64, 64)
        files.close(file)

    found = {tree["head"] for tree in at_end(left(tmp_path, act, seeds=tuple(range(30))))}
    slots = {data[64:] for data in found if data is not None}
    assert all(data is not None and data[:64] == b"A" * 64 for data in found)
    assert {b"B" * 64, b"C" * 64, b"C" * 32 + b"B" * 32} < slots
    assert all(len(slot) == 64 and set(slot) <= set(b"BC") for slot in slots)


def test_each_file_is_lost_alone_and_kept_alone(tmp_path: Path) -> None:
    trees = at_end(left(tmp_path, *(written(name, b"x", sync_directory=True) for name in "abc")))
    kept_sets = {frozenset(name for name, data in tree.items() if data == b"x") for tree in trees}
    assert kept_sets == {frozenset(names) for names in ("", "a", "b", "c", "ab", "ac", "bc", "abc")}


def test_a_rename_may_be_undone_but_never_loses_both_names(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "a").write_bytes(b"old")

    def act(files: Files, base: Path) -> None:
        written("a.tmp", b"new", sync=True, sync_directory=True)(files, base)
        with files._operation("rename", base / "a.tmp", target=base / "a"):
            (base / "a.tmp").rename(base / "a")

    assert at_end(left(tmp_path, act)) == [{"a": b"old", "a.tmp": b"new"}, {"a": b"new"}]


def test_an_unlink_and_a_removed_tree_may_be_undone_until_the_directory_is_synced(tmp_path: Path) -> None:
    (tmp_path / "disk" / "d").mkdir(parents=True)
    for name in ("a", "d/b"):
        (tmp_path / "disk" / name).write_bytes(b"x")
    states = left(
        tmp_path,
        lambda files, base: files.unlink(base / "a"),
        lambda files, base: files.remove_tree(base / "d"),
        lambda files, base: files.sync_directory(base),
    )
    before = [tree for state, tree in states if state.marks[-1:] == ("2",)]
    all_back: Tree = {"a": b"x", "d": None, "d/b": b"x"}
    for gone in ([], ["a"], ["d", "d/b"], ["d/b"], ["a", "d", "d/b"]):
        assert {name: data for name, data in all_back.items() if name not in gone} in before
    assert at_end(states) == [{}]


def test_a_directory_that_was_not_synced_in_its_parent_takes_its_files_along(tmp_path: Path) -> None:
    def act(files: Files, base: Path) -> None:
        files.make_directory(base / "d" / "e")
        written("d/e/a", b"data", sync=True, sync_directory=True)(files, base)

    states = at_end(left(tmp_path, act))
    assert {} in states
    assert {"d": None} in states
    assert {"d": None, "d/e": None, "d/e/a": b"data"} in states


class PausedPowerLoss(PowerLoss, PauseAt):
    def __init__(self, disk: Disk, only: Selection) -> None:
        PowerLoss.__init__(self, disk)
        PauseAt.__init__(self, only)


def test_a_write_beside_a_sync_is_not_covered_by_it(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    files = PausedPowerLoss(disk, on("sync"))
    file = files.create(disk.base / "a")
    files.sync_directory(disk.base)
    files.append(file, [b"before"])
    with ThreadPoolExecutor(1) as pool:
        synced = pool.submit(files.sync, file)
        files.wait()
        files.append(file, [b" beside"])
        disk.mark("under way")
        files.resume()
        synced.result()
    disk.mark("end")
    files.close(file)
    found = [(s.marks, contents(s.path).get("a") or b"") for s in disk.states(tmp_path / "states")]
    at_last = {data for marks, data in found if "end" in marks}
    assert {b"before", b"before beside"} < at_last
    assert all(data.startswith(b"before") for data in at_last)
    assert b"" in {data for marks, data in found if marks == ("under way",)}


def test_of_two_syncs_at_once_the_first_that_returns_makes_certain(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    files = PausedPowerLoss(disk, on("sync_directory"))
    files.close(files.create(disk.base / "a"))
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(files.sync_directory, disk.base)
        files.wait()
        files.sync_directory(disk.base)
        disk.mark("one has returned")
        files.resume()
        slow.result()
    assert [contents(s.path) for s in disk.states(tmp_path / "states") if s.marks] == [{"a": b""}]


def test_what_a_failed_sync_should_have_covered_is_never_certain(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    files = FailingPowerLoss(disk, 0, only=on("sync"))
    file = files.create(disk.base / "a")
    files.sync_directory(disk.base)
    files.append(file, [b"x"])
    with pytest.raises(OSError, match="Input/output"):
        files.sync(file)
    files.append(file, [b"y"])
    files.sync(file)
    disk.mark("end")
    files.close(file)
    found = {(s.path / "a").read_bytes() for s in disk.states(tmp_path / "states") if s.marks}
    assert found == {b"xy", b"\0y"}


def test_a_cut_that_failed_is_not_recorded(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    files = FailingPowerLoss(disk, 0, only=on("truncate"))
    file = files.create(disk.base / "a")
    files.append(file, [b"0123"])
    with pytest.raises(OSError, match="Input/output"):
        files.truncate(file, 2)
    assert disk.unrecorded() == []
    files.truncate(file, 2)
    assert disk.unrecorded() == []
    files.close(file)


def test_a_mark_belongs_to_the_states_after_it(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    disk.mark("first")
    disk.mark("second")
    marks = [state.marks for state in disk.states(tmp_path / "states")]
    assert marks == [(), ("first",), ("first", "second")]


def test_ignored_directories_are_dropped_or_copied(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    files = PowerLoss(disk)
    files.make_directory(disk.base / "0" / "store-1")
    files.sync_directory(disk.base)
    (disk.base / "0" / "store-1" / "CURRENT").write_bytes(b"not through the seam")
    disk.mark("end")
    assert disk.unrecorded() == []
    copied: Tree = {"0": None, "0/store-1": None, "0/store-1/CURRENT": b"not through the seam"}
    for copy, expected in ((False, {"0": None}), (True, copied)):
        states = disk.states(tmp_path / "states", copy_ignored=copy)
        assert [contents(s.path) for s in states if s.marks] == [expected]


def test_who_goes_around_the_seam_is_seen(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    written("a", b"x")(PowerLoss(disk), disk.base)
    assert disk.unrecorded() == []
    written("b", b"x")(LOCAL, disk.base)
    (disk.base / "a").write_bytes(b"y")
    assert disk.unrecorded() == ["a", "b"]


def test_the_same_seed_gives_the_same_states(tmp_path: Path) -> None:
    acts = [written("a", b"x" * 3000, b"y" * 3000), written("b", b"z" * 100)]
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    first, second = (left(tmp_path / d, *acts, seeds=(7, 8)) for d in ("1", "2"))
    assert [tree for _, tree in first] == [tree for _, tree in second]
    assert any(state.choice == "seed 7" for state, _ in first)


class MeetingPowerLoss(PowerLoss):
    """Syncs wait for one another, so that all of them are under way at once."""

    def __init__(self, disk: Disk, threads: int) -> None:
        super().__init__(disk)
        self._meeting = threading.Barrier(threads, timeout=60)

    def sync(self, file: OpenFile) -> None:
        with self._operation("sync", file.path, file=file):
            self._meeting.wait()

    def sync_directory(self, path: Path) -> None:
        with self._operation("sync_directory", path):
            self._meeting.wait()


def test_threads_that_sync_at_once_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    files = MeetingPowerLoss(disk, 4)

    def write(number: int) -> None:
        file = files.create(disk.base / f"{number}")
        files.sync_directory(disk.base)
        for n in range(3):
            files.append(file, [b"%d" % n])
            files.sync(file)
            disk.mark(f"{number}:{n}")
        files.close(file)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert disk.unrecorded() == []
    marks: set[str] = set()
    for state in disk.states(tmp_path / "states"):
        marks.update(state.marks)
        for mark in state.marks:
            name, n = mark.split(":")
            assert (state.path / name).read_bytes().startswith(b"012"[: int(n) + 1]), str(state)
    assert len(marks) == 12


STEPS = ("create", "append", "overwrite", "truncate", "sync", "unlink", "write_whole", "names")


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2), st.binary(max_size=40)), max_size=25))
def test_the_model_agrees_with_the_directory_and_keeps_what_was_synced(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, bytes]]
) -> None:
    """`everything` is the directory itself; once all is synced, one state is left: the directory."""
    tmp_path = tmp_path_factory.mktemp("model")
    disk = Disk(tmp_path)
    files = PowerLoss(disk)
    opened: dict[int, OpenFile] = {}
    for name, number, data in steps:
        path = tmp_path / f"{number}"
        if name == "names":
            files.sync_directory(tmp_path)
        elif name == "write_whole":
            files.write_whole(path, data)
            opened.pop(number, None)
        elif name == "create" and not path.exists():
            opened[number] = files.create(path)
        elif name == "unlink" and path.exists():
            files.unlink(path)
            opened.pop(number, None)
        elif number in opened:
            file = opened[number]
            {
                "append": lambda file=file, data=data: files.append(file, [data]),
                "overwrite": lambda file=file, data=data: files.overwrite(file, data, min(3, file.position)),
                "truncate": lambda file=file, data=data: files.truncate(file, min(len(data), file.position)),
            }.get(name, lambda file=file: files.sync(file))()
    assert disk.unrecorded() == []
    for file in opened.values():
        files.sync(file)
    files.sync_directory(tmp_path)
    disk.mark("all certain")
    into = tmp_path_factory.mktemp("states")
    at_last = [contents(s.path) for s in disk.states(into, seeds=(1, 2, 3)) if s.marks]
    assert at_last == [contents(tmp_path)]
