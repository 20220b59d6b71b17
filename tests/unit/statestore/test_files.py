"""`Files` on the real file system."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from keyfold.statestore import files as module
from keyfold.statestore.files import LOCAL, Data, Files, OpenFile
from support.faults.inject import KillAt, Killed, Operation, Watched
from support.faults.machines import tmpfs
from support.faults.powerloss import Disk, PowerLoss


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- writing ---------------------------------------------------------------------------------------------


def test_create_refuses_a_name_that_exists(tmp_path: Path) -> None:
    LOCAL.close(LOCAL.create(tmp_path / "a"))
    before = open_descriptors()
    with pytest.raises(FileExistsError):
        LOCAL.create(tmp_path / "a")
    assert open_descriptors() == before


def test_create_refuses_a_name_that_is_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        LOCAL.create(tmp_path / "a")


def test_append_writes_every_kind_of_buffer_and_empty_ones_in_order(tmp_path: Path) -> None:
    numbers = np.arange(6, dtype="<i4").reshape(2, 3)
    chunks: list[Data] = [b"one", b"", bytearray(b"two"), memoryview(b"-three-")[1:6], pa.py_buffer(b"four")]
    file = LOCAL.create(tmp_path / "a")
    LOCAL.append(file, chunks)
    LOCAL.append(file, [])
    LOCAL.append(file, [numbers.data, pa.py_buffer(b"")])
    assert file.position == 15 + 24
    assert LOCAL.read(tmp_path / "a") == b"onetwothreefour" + numbers.tobytes()
    LOCAL.close(file)


def test_append_of_many_chunks_keeps_their_order(tmp_path: Path) -> None:
    chunks = [b"%05d," % i for i in range(5000)]
    file = LOCAL.create(tmp_path / "a")
    LOCAL.append(file, chunks)
    LOCAL.close(file)
    assert LOCAL.read(tmp_path / "a") == b"".join(chunks)


def test_append_of_a_chunk_longer_than_one_call_writes_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WRITE_BYTES_MAX", 1000)
    data = np.random.default_rng(1).bytes(12_345)
    file = LOCAL.create(tmp_path / "a")
    LOCAL.append(file, [data[:5], data[5:]])
    LOCAL.close(file)
    assert LOCAL.read(tmp_path / "a") == data


def test_append_of_a_large_chunk(tmp_path: Path) -> None:
    data = np.arange(4 << 20, dtype=np.int64)
    file = LOCAL.create(tmp_path / "a")
    LOCAL.append(file, [data.data])
    LOCAL.close(file)
    assert np.array_equal(np.frombuffer(LOCAL.map(tmp_path / "a"), np.int64), data)


def test_after_a_full_disk_the_position_is_behind_the_bytes_that_were_written(tmp_path: Path) -> None:
    with tmpfs(tmp_path, 64 << 10) as disk:
        file = LOCAL.create(disk / "a")
        with pytest.raises(OSError, match="No space left"):
            LOCAL.append(file, [b"x" * 40_000, b"y" * 40_000])
        assert 40_000 <= file.position < 80_000
        assert file.position == LOCAL.size(disk / "a")
        LOCAL.close(file)


def test_overwrite_does_not_move_the_end(tmp_path: Path) -> None:
    file = LOCAL.create(tmp_path / "a")
    LOCAL.append(file, [b"0123456789"])
    LOCAL.overwrite(file, b"ab", 3)
    LOCAL.append(file, [b"!"])
    LOCAL.close(file)
    assert LOCAL.read(tmp_path / "a") == b"012ab56789!"


def test_append_goes_on_where_truncate_cut(tmp_path: Path) -> None:
    file = LOCAL.create(tmp_path / "a")
    LOCAL.append(file, [b"0123456789"])
    LOCAL.truncate(file, 4)
    LOCAL.append(file, [b"!"])
    LOCAL.close(file)
    assert LOCAL.read(tmp_path / "a") == b"0123!"


def test_a_closed_file_can_be_closed_again_and_not_written(tmp_path: Path) -> None:
    file = LOCAL.create(tmp_path / "a")
    LOCAL.close(file)
    LOCAL.close(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        LOCAL.append(file, [b"x"])
    with pytest.raises(ValueError, match="negative"):
        LOCAL.sync(file)


# -- write_whole -----------------------------------------------------------------------------------------


def test_write_whole_makes_and_replaces_and_leaves_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "a.tmp").write_bytes(b"left over from a crash, and longer than what comes")
    LOCAL.write_whole(tmp_path / "a", b"old")
    LOCAL.write_whole(tmp_path / "a", b"new")
    assert LOCAL.read(tmp_path / "a") == b"new"
    assert LOCAL.list_directory(tmp_path) == ["a"]


@pytest.mark.parametrize("halfway", [False, True])
def test_write_whole_killed_anywhere_leaves_old_or_new(tmp_path: Path, halfway: bool) -> None:
    seen: list[bytes] = []
    count = 7
    for n in range(count + 1):
        path = tmp_path / f"{n}"
        LOCAL.write_whole(path, b"old" * 1000)
        killed = KillAt(n, halfway=halfway)
        try:
            killed.write_whole(path, b"new" * 1000)
        except Killed:
            assert n < count
        seen.append(LOCAL.read(path)[:3])
        assert LOCAL.size(path) == 3000
        killed.release()
    assert killed.count == count - 1
    assert set(seen) == {b"old", b"new"}


def test_write_whole_survives_a_power_loss_anywhere_as_old_or_new(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    files = PowerLoss(disk)
    path = disk.base / "a"
    for content in ("old", "new"):
        disk.mark(f"write {content}")
        files.write_whole(path, content.encode() * 400)
        disk.mark(f"wrote {content}")
    allowed: list[set[str | None]] = [{None}, {None, "old"}, {"old"}, {"old", "new"}, {"new"}]
    seen = set()
    for state in disk.states(tmp_path / "states"):
        data = (state.path / "a").read_bytes() if (state.path / "a").exists() else None
        found = None if data is None else data[:3].decode()
        assert data is None or data == data[:3] * 400, str(state)
        assert found in allowed[len(state.marks)], str(state)
        seen.add((len(state.marks), found))
    assert seen == {(marks, found) for marks, several in enumerate(allowed) for found in several}


# -- names -----------------------------------------------------------------------------------------------


def test_make_directory_says_which_directories_it_made(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b" / "c"
    assert LOCAL.make_directory(inner) == [tmp_path / "a", tmp_path / "a" / "b", inner]
    assert LOCAL.make_directory(inner) == []
    assert LOCAL.make_directory(tmp_path / "a" / "d") == [tmp_path / "a" / "d"]
    assert inner.is_dir()


def test_make_directory_refuses_the_name_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(FileExistsError):
        LOCAL.make_directory(tmp_path / "a")


def test_remove_tree_removes_all_and_passes_over_what_is_missing(tmp_path: Path) -> None:
    LOCAL.make_directory(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "c").write_bytes(b"x")
    LOCAL.remove_tree(tmp_path / "a")
    LOCAL.remove_tree(tmp_path / "a")
    assert not LOCAL.exists(tmp_path / "a")


def test_list_directory_is_sorted_and_empty_where_nothing_is(tmp_path: Path) -> None:
    for name in ("b", "a", "10", "9"):
        (tmp_path / name).write_bytes(b"")
    assert LOCAL.list_directory(tmp_path) == ["10", "9", "a", "b"]
    assert LOCAL.list_directory(tmp_path / "missing") == []


# -- reading ---------------------------------------------------------------------------------------------


def test_read_gives_the_asked_range_and_less_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    assert LOCAL.read(tmp_path / "a", 3) == b"3456789"
    assert LOCAL.read(tmp_path / "a", 3, 4) == b"3456"
    assert LOCAL.read(tmp_path / "a", 8, 4) == b"89"
    assert LOCAL.read(tmp_path / "a", 10, 4) == b""
    assert LOCAL.read(tmp_path / "a", 99) == b""


def test_map_of_an_empty_file_is_an_empty_buffer(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    assert LOCAL.map(tmp_path / "a").to_pybytes() == b""


def test_map_shows_the_length_of_the_moment_and_outlives_the_name(tmp_path: Path) -> None:
    file = LOCAL.create(tmp_path / "a")
    LOCAL.append(file, [b"x" * 5000])
    data = LOCAL.map(tmp_path / "a")
    LOCAL.append(file, [b"y" * 5000])
    LOCAL.unlink(tmp_path / "a")
    LOCAL.close(file)
    assert data.to_pybytes() == b"x" * 5000


def test_map_keeps_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5000)
    before = open_descriptors()
    maps = [LOCAL.map(tmp_path / "a") for _ in range(50)]
    assert open_descriptors() == before
    assert all(m.size == 5000 for m in maps)


def test_map_of_a_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LOCAL.map(tmp_path / "a")


def test_modified_is_in_whole_milliseconds_cut_not_rounded(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    os.utime(tmp_path / "a", ns=(0, 1_700_000_000_123_999_999))
    assert LOCAL.modified_ms(tmp_path / "a") == 1_700_000_000_123


def test_a_file_is_in_place_only_while_its_path_leads_to_it(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    directory, file = LOCAL.open_directory(tmp_path / "d"), LOCAL.create(tmp_path / "d" / "a")
    assert LOCAL.is_in_place(directory)
    assert LOCAL.is_in_place(file)
    LOCAL.rename(tmp_path / "d" / "a", tmp_path / "d" / "b")
    LOCAL.close(LOCAL.create(tmp_path / "d" / "a"))
    assert not LOCAL.is_in_place(file)
    for _ in range(20):
        shutil.rmtree(tmp_path / "d")
        assert not LOCAL.is_in_place(directory)
        assert not LOCAL.is_in_place(file)
        (tmp_path / "d").mkdir()
        assert not LOCAL.is_in_place(directory), "the new one has got the number of the one that is open"
    LOCAL.close(file)
    LOCAL.close(directory)


def test_a_file_is_unlinked_in_the_directory_that_is_open_wherever_it_is_now(tmp_path: Path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    directory = LOCAL.open_directory(tmp_path / "d")
    LOCAL.close(LOCAL.create(tmp_path / "d" / "e" / "a"))
    LOCAL.rename(tmp_path / "d", tmp_path / "moved")
    (tmp_path / "d" / "e").mkdir(parents=True)
    LOCAL.close(LOCAL.create(tmp_path / "d" / "e" / "a"))
    LOCAL.unlink(tmp_path / "d" / "e" / "a", directory)
    assert (tmp_path / "d" / "e" / "a").exists()
    assert not (tmp_path / "moved" / "e" / "a").exists()
    LOCAL.close(directory)


def test_a_directory_that_must_be_there_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LOCAL.make_directory(tmp_path / "gone" / "a" / "b", below=tmp_path / "gone")
    assert not (tmp_path / "gone").exists()
    made = LOCAL.make_directory(tmp_path / "a" / "b", below=tmp_path)
    assert made == [tmp_path / "a", tmp_path / "a" / "b"]


# -- the seam --------------------------------------------------------------------------------------------


class Listing(Watched):
    def __init__(self) -> None:
        self.seen: list[Operation] = []

    def _operation(self, name: str, path: Path, **details: object):  # type: ignore[no-untyped-def]
        self.seen.append(Operation(name, path))
        return super()._operation(name, path, **details)  # type: ignore[arg-type]


def test_every_method_passes_the_seam(tmp_path: Path) -> None:
    """A method that opens or asks the disk without the seam would escape every fault test."""
    files = Listing()
    path = tmp_path / "a"
    (tmp_path / "other").write_bytes(b"x")
    file = files.create(path)
    lock = files.lock(tmp_path / "lock")
    assert isinstance(lock, OpenFile)
    calls: dict[str, Callable[[], object]] = {
        "append": lambda: files.append(file, [b"x"]),
        "overwrite": lambda: files.overwrite(file, b"y", 0),
        "truncate": lambda: files.truncate(file, 0),
        "sync": lambda: files.sync(file),
        "sync_path": lambda: files.sync_path(path),
        "write_whole": lambda: files.write_whole(path, b"x"),
        "make_directory": lambda: files.make_directory(tmp_path / "d"),
        "sync_directory": lambda: files.sync_directory(tmp_path),
        "rename": lambda: files.rename(tmp_path / "other", tmp_path / "another"),
        "unlink": lambda: files.unlink(tmp_path / "another"),
        "is_in_place": lambda: files.is_in_place(file),
        "remove_tree": lambda: files.remove_tree(tmp_path / "d"),
    }
    for name in (
        "list_directory",
        "exists",
        "is_directory",
        "size",
        "modified_ms",
        "read",
        "map",
        "free_bytes",
    ):
        target = tmp_path if name in ("list_directory", "is_directory") else path
        calls[name] = lambda name=name, target=target: getattr(files, name)(target)  # type: ignore[misc]
    public = {name for name, _ in inspect.getmembers(Files, inspect.isfunction) if not name.startswith("_")}
    assert set(calls) == public - {"create", "lock", "open_directory", "close"}
    for name, call in calls.items():
        files.seen.clear()
        call()
        last = {"write_whole": "sync_directory", "make_directory": "mkdir"}.get(name, name)
        assert files.seen[-1].name == last
    files.close(file)
    files.close(lock)
