"""A small log with faults that can be planted, to show what the fault harness finds.

log/current           names the journal that counts
log/journal-<n>       lines of CRC32C and JSON: the state at its beginning, then commits and compactions
log/segment-<n>-<m>   numbers
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from crc32c import crc32c

from keyfold.statestore.files import Files

NO_DATA_SYNC: Final = "the segment is not synced before the journal's line"
NO_DIRECTORY_SYNC: Final = "the directory is not synced after a segment was made"
EARLY: Final = "a commit is acknowledged before the journal's sync"
NO_RENAME_SYNC: Final = "the directory is not synced after a rename"
NAME_AGAIN: Final = "the compacted segment takes the name of an old one"
#: Planted faults that one life and one power loss can show.
BUGS: Final = (NO_DATA_SYNC, NO_DIRECTORY_SYNC, EARLY, NO_RENAME_SYNC, NAME_AGAIN)

TRUSTING: Final = "opening acknowledges what it reads before it has synced it"
RETRYING: Final = "a sync that failed is tried again"

#: Longer than a sector, so that a number can be torn.
_NUMBER_BYTES: Final = 700

Told = Callable[[int], object]
Entry = tuple[str, int, int]


class Broken(Exception):
    """What the journal promises is not there."""


def read_state(files: Files, root: Path) -> list[Entry]:
    """Name, length and CRC32C of each segment that counts. A torn last line is cut off."""
    if not files.exists(root / "current"):
        return []
    path = root / files.read(root / "current").decode()
    if not files.exists(path):
        raise Broken(f"{path.name} is missing")
    state: list[Entry] | None = None
    for raw in files.read(path).split(b"\n")[:-1]:
        if raw[:9] != b"%08x " % crc32c(raw[9:]):
            break
        line = json.loads(raw[9:])
        entries = [(str(name), int(length), int(crc)) for name, length, crc in line["segments"]]
        state = entries if state is None or line["all"] else state + entries
    if state is None:
        raise Broken(f"{path.name} has no state")
    return state


def read_numbers(files: Files, root: Path) -> list[int]:
    """All numbers in the log. Raises `Broken`."""
    numbers: list[int] = []
    for name, length, crc in read_state(files, root):
        if not files.exists(root / name):
            raise Broken(f"{name} is missing")
        data = files.read(root / name, 0, length)
        if len(data) != length or crc32c(data) != crc:
            raise Broken(f"{name} is damaged")
        numbers += [int(n) for n in data.split()]
    return numbers


class ToyLog:
    """Appends numbers. `told` gets each number once it is durable, those found when opening as well."""

    def __init__(self, files: Files, root: Path, told: Told, bug: str | None = None) -> None:
        self._files = files
        self._root = root
        self._told = told
        self._bug = bug
        files.make_directory(root)
        files.sync_directory(root.parent)
        self._state = read_state(files, root)
        numbers = read_numbers(files, root)
        if bug == TRUSTING:
            self._tell(numbers)
        self._epoch = 1 + max((int(n.split("-")[1]) for n in self._names("journal-")), default=0)
        self._segments = 0
        name = f"journal-{self._epoch}"
        self._journal = files.create(root / name)
        self._line(self._state, all_of_it=True)
        files.sync_directory(root)
        self._set_current(name)
        self._tell(numbers)
        for other in set(self._names("journal-")) - {name}:
            files.unlink(root / other)

    def commit(self, number: int) -> None:
        entry = self._segment(b"%d" % number + b" " * _NUMBER_BYTES)
        self._state = [*self._state, entry]
        self._line([entry], all_of_it=False, early=[number])
        self._tell([number])

    def compact(self) -> None:
        """All segments into one."""
        old = self._state
        numbers = b"".join(self._files.read(self._root / name, 0, length) for name, length, _ in old).split()
        data = b"".join(number.rjust(_NUMBER_BYTES) for number in numbers)
        if self._bug == NAME_AGAIN:
            entry = (old[0][0], len(data), crc32c(data))
            self._files.write_whole(self._root / entry[0], data)
        else:
            entry = self._segment(data)
        self._line([entry], all_of_it=True)
        self._state = [entry]
        for name, _, _ in old:
            if name != entry[0]:
                self._files.unlink(self._root / name)

    def close(self) -> None:
        self._files.close(self._journal)

    def _segment(self, data: bytes) -> Entry:
        name = f"segment-{self._epoch}-{self._segments}"
        self._segments += 1
        file = self._files.create(self._root / name)
        try:
            self._files.append(file, [data[:300], data[300:]])
            if self._bug != NO_DATA_SYNC:
                self._files.sync(file)
        finally:
            self._files.close(file)
        if self._bug != NO_DIRECTORY_SYNC:
            self._files.sync_directory(self._root)
        return name, len(data), crc32c(data)

    def _line(self, segments: list[Entry], *, all_of_it: bool, early: list[int] | None = None) -> None:
        body = json.dumps({"all": all_of_it, "segments": segments}).encode()
        self._files.append(self._journal, [b"%08x %s\n" % (crc32c(body), body)])
        if self._bug == EARLY:
            self._tell(early or [])
        try:
            self._files.sync(self._journal)
        except OSError:
            if self._bug != RETRYING:
                raise
            self._files.sync(self._journal)

    def _set_current(self, name: str) -> None:
        path = self._root / "current"
        if self._bug != NO_RENAME_SYNC:
            self._files.write_whole(path, name.encode())
            return
        temporary = path.with_suffix(".new")
        file = self._files.create(temporary)
        self._files.append(file, [name.encode()])
        self._files.sync(file)
        self._files.close(file)
        with self._files._operation("rename", temporary, target=path):
            os.rename(temporary, path)

    def _names(self, start: str) -> list[str]:
        return [n for n in self._files.list_directory(self._root) if n.startswith(start)]

    def _tell(self, numbers: list[int]) -> None:
        for number in numbers:
            self._told(number)


def run(files: Files, root: Path, told: Told, bug: str | None = None) -> None:
    """Two lives of a log: five commits, a compaction, a second opening."""
    log = ToyLog(files, root, told, bug)
    for number in (0, 1, 2):
        log.commit(number)
    log.compact()
    log.commit(3)
    log.close()
    log = ToyLog(files, root, told, bug)
    log.commit(4)
    log.close()


def fault_in(files: Files, root: Path, told: list[int]) -> str | None:
    """What is wrong with the log at `root` for somebody who was told these numbers; None if nothing."""
    try:
        numbers = read_numbers(files, root)
        ToyLog(files, root, lambda number: None).close()
        again = read_numbers(files, root)
    except Broken as e:
        return str(e)
    if numbers != list(range(len(numbers))) or again != numbers:
        return f"found {numbers}, after opening {again}"
    if told and max(told) >= len(numbers):
        return f"{max(told)} was acknowledged, found {numbers}"
    return None
