"""Views of readers: which readers may still need a file that the cleaner has replaced.

A reader takes the lock on `readers/<id>.view`, then loads the manifest, then writes the number of the line it
saw into that file. A process that deletes files publishes its manifest line first and looks at the marks
afterwards. A file that was replaced at line n is kept while a living reader has written no number, or a
number below n. A lock ends with its process, so a dead reader keeps nothing.

If planning and reading happen in different processes (Spark), no lock can span them. Then a lease
`readers/<id>.lease` holds the line number and an expiry time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from keyfold.statestore import filenames
from keyfold.statestore.errors import ViewExpired
from keyfold.statestore.files import Files, OpenFile
from keyfold.statestore.segment.writer import Segment

if TYPE_CHECKING:
    from keyfold.checkpoints.log.ownership import Ownership

log = logging.getLogger("keyfold")


def now_ms() -> int:
    """The clock of leases, and of changelogs that are opened without a clock."""
    return time.time_ns() // 1_000_000


_NUMBER_BYTES: Final = 21
#: Mark of a reader without a number yet: no file is deleted.
_LOADING: Final = -1


class ViewLock:
    """A living reader's mark in `readers/`. Close it when no more files of the view will be opened."""

    def __init__(self, files: Files, root: Path) -> None:
        self._files = files
        self._file: OpenFile | None = None
        try:
            _, self._file = new_lock(files, lambda identifier: filenames.view(root, identifier))
        except OSError as e:
            # On a read-only medium nothing is deleted. Without permission to write, the view has no mark and
            # may expire.
            if e.errno not in (errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOSPC):
                raise

    def record(self, seq: int) -> None:
        """Mark the view as that of manifest line `seq` or a later one."""
        if self._file is not None:
            # On a full disk the mark stays empty, which keeps every file.
            with contextlib.suppress(OSError):
                self._files.overwrite(self._file, b"%020d\n" % seq, 0)

    def close(self) -> None:
        file, self._file = self._file, None
        # A process forked from the reader's process has no lock: the mark belongs to the parent.
        if file is not None and file.fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(file.path)
            self._files.close(file)


def new_lock(files: Files, path_of: Callable[[str], Path]) -> tuple[str, OpenFile]:
    """A lock on a new file, and the id that is in its name.

    Testing whether a lock is held takes it for a moment. If that happens between creating the file and
    locking it, another file is made: a mark without a lock would protect nothing.
    """
    while True:
        identifier = uuid.uuid4().hex
        file = files.lock(path_of(identifier))
        if file is not None:
            return identifier, file


def write_lease(files: Files, root: Path, seq: int, expires_ms: int, lease: str | None = None) -> str:
    """Create a lease on the view of line `seq`, or renew `lease`. Returns its id.

    Raises:
        ViewExpired: the lease to renew is gone. Files of its view may be deleted.
    """
    identifier = uuid.uuid4().hex if lease is None else lease
    path = filenames.lease(root, identifier)
    if lease is not None and not files.exists(path):
        raise ViewExpired(
            "The lease of this view has expired.", path=path, expected="a lease that is renewed in time",
            found="no lease: it was removed", remedy="read again, or raise the option viewTimeoutMs",
        )  # fmt: skip
    files.write_whole(path, json.dumps({"seq": seq, "expires_ms": expires_ms}).encode())
    return identifier


def drop_lease(files: Files, root: Path, lease: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        files.unlink(filenames.lease(root, lease))


def oldest_view(files: Files, root: Path, now_ms: int) -> int | None:
    """The lowest manifest line that a living reader may still use; None without readers, -1 while one is
    loading.

    Removes the marks of dead readers and expired leases. Only the writer calls this.
    """
    lowest: int | None = None
    for name in files.list_directory(root / filenames.READERS):
        path = root / filenames.READERS / name
        if name.endswith(".view"):
            seq = _view_number(files, path)
        elif name.endswith(".lease"):
            seq = _lease_number(files, path, now_ms)
        else:
            continue
        if seq is not None:
            lowest = seq if lowest is None else min(lowest, seq)
    return lowest


def _view_number(files: Files, path: Path) -> int | None:
    if not files.exists(path):
        return None
    held = files.lock(path)
    if held is not None:
        with contextlib.suppress(FileNotFoundError):
            files.unlink(path)
        files.close(held)
        return None
    try:
        text = files.read(path)
    except FileNotFoundError:
        return None
    return int(text) if len(text) == _NUMBER_BYTES and text.strip().isdigit() else _LOADING


def _lease_number(files: Files, path: Path, now_ms: int) -> int | None:
    try:
        lease = json.loads(files.read(path))
        if lease["expires_ms"] >= now_ms:
            return int(lease["seq"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        pass  # a lease that cannot be read protects nothing and is removed like an expired one
    with contextlib.suppress(FileNotFoundError):
        files.unlink(path)
    return None


class Garbage:
    """Files that no state names any more, and the manifest line that removed each batch of them.

    `hold` and `release` are for the views of this process. `collect` deletes the files that neither these
    views nor other processes need.
    """

    def __init__(self, files: Files, root: Path, ownership: Ownership) -> None:
        self._files = files
        self._root = root
        self._ownership = ownership
        self._waiting: list[tuple[int, list[Path]]] = []
        self._held: dict[int, int] = {}
        # A view can also be released by a finalizer. It can run at any point of this thread, even while the
        # thread holds the lock. So releases go into a queue that takes no lock.
        self._released: deque[int] = deque()
        self._lock = threading.Lock()

    def add(self, seq: int, paths: list[Path]) -> None:
        """Add files that are unnamed since line `seq`."""
        if paths:
            with self._lock:
                self._waiting.append((seq, paths))

    def add_segments(self, seq: int, partition: int, segments: Iterable[Segment]) -> None:
        """Add segments of a partition, with their indexes."""
        directory = filenames.partition(self._root, partition)
        paths = []
        for s in segments:
            paths.append(directory / s.name)
            if s.sealed:
                paths.append(directory / filenames.segment_index(s.name))
        self.add(seq, paths)

    def hold(self, seq: int) -> None:
        with self._lock:
            self._settle()
            self._held[seq] = self._held.get(seq, 0) + 1

    def release(self, seq: int) -> None:
        self._released.append(seq)

    def collect(self) -> int:
        """Delete the files that no view needs, while this is provably the writer. Returns their number."""
        if not self._waiting or not self._ownership.is_proven():
            return 0
        with self._lock:
            waiting = list(self._waiting)
        # Only files that were unnamed before this look: a reader may come after it.
        limit = oldest_view(self._files, self._root, now_ms())
        with self._lock:
            self._settle()
            for seq in self._held:
                limit = seq if limit is None else min(limit, seq)
            # By identity: a reader that stays open for days leaves thousands of files here, and each look
            # must remain cheap.
            still = {id(x) for x in self._waiting}
            ready = [x for x in waiting if id(x) in still and (limit is None or x[0] <= limit)]
            going = {id(x) for x in ready}
            self._waiting = [x for x in self._waiting if id(x) not in going]
        return sum(self._delete(seq, paths) for seq, paths in ready)

    def _settle(self) -> None:
        while self._released:
            seq = self._released.popleft()
            self._held[seq] -= 1
            if not self._held[seq]:
                del self._held[seq]

    def _delete(self, seq: int, paths: list[Path]) -> int:
        """Delete files. What cannot be deleted now is retried next time; it only takes disk space."""
        left = []
        for path in paths:
            try:
                if self._files.is_directory(path):
                    self._files.remove_tree(path)
                else:
                    self._files.unlink(path, self._ownership.directory)
            except FileNotFoundError:
                pass
            except OSError as e:
                log.warning("changelog %s: cannot delete %s: %s", self._root, path.name, e.strerror)
                left.append(path)
        self.add(seq, left)
        return len(paths) - len(left)
