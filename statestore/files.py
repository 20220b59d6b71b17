"""The only module that opens, writes, syncs, renames, lists or deletes files (elsewhere than here: `remote`).

`Files` is the seam: a test hands in a subclass that records, fails, kills or pauses at the n-th operation.
Every operation runs inside the context that `_operation` gives, so such a subclass overrides that one method
to see them all, before and after.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa

Data: TypeAlias = bytes | bytearray | memoryview | pa.Buffer

#: Linux writes at most this many bytes in one call; larger data goes in several.
_WRITE_BYTES_MAX = 1 << 30

_UNWATCHED: AbstractContextManager[None] = contextlib.nullcontext()


#: The locks of this process by descriptor. A fork waits until none is being taken or given up.
_locks: dict[int, OpenFile] = {}
_locks_change = threading.RLock()


class OpenFile:
    """A file that is being written: its descriptor, path, and length as written so far."""

    __slots__ = ("fd", "path", "position")

    def __init__(self, fd: int, path: Path, position: int = 0) -> None:
        self.fd = fd
        self.path = path
        self.position = position


class Files:
    """File operations on the local file system. All paths are `Path`s, all sizes bytes.

    Raises `OSError` as the operating system gives it; callers turn it into an error of keyfold where they
    know more.
    """

    #: Whether `lock` works here, and with it all that relies on knowing who is alive.
    has_locks = True

    def _operation(
        self,
        name: str,
        path: Path,
        *,
        file: OpenFile | None = None,
        data: Sequence[Data] = (),
        position: int = 0,
        target: Path | None = None,
    ) -> AbstractContextManager[None]:
        """The context that the operation `name` on `path` runs in; `close` alone has none. For tests.

        `position` is where `data` goes, or the size to truncate to; `target` the new name of a rename. Where
        the operation itself opens a file, leaving the context must not raise after it succeeded: the file
        would leak.
        """
        return _UNWATCHED

    # -- writing ---------------------------------------------------------------------------------------------

    def create(self, path: Path) -> OpenFile:
        """A new, empty file. Raises `FileExistsError`: no name is ever used twice."""
        with self._operation("create", path):
            return OpenFile(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644), path)

    def append(self, file: OpenFile, chunks: Sequence[Data]) -> None:
        """Write all `chunks` behind what was written so far. After an error a part of them may be there."""
        with self._operation("append", file.path, file=file, data=chunks, position=file.position):
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                while len(view):
                    done = os.pwrite(file.fd, view[:_WRITE_BYTES_MAX], file.position)
                    file.position += done
                    view = view[done:]

    def overwrite(self, file: OpenFile, data: bytes, position: int) -> None:
        """Write `data` at `position` in place; does not move the end that `append` uses."""
        with self._operation("overwrite", file.path, file=file, data=[data], position=position):
            if os.pwrite(file.fd, data, position) != len(data):
                raise OSError(errno.EIO, "short write", str(file.path))

    def truncate(self, file: OpenFile, size: int) -> None:
        """Cut the file to `size` bytes."""
        with self._operation("truncate", file.path, file=file, position=size):
            os.ftruncate(file.fd, size)
            file.position = size

    def sync(self, file: OpenFile) -> None:
        """`fdatasync`: the file's bytes and length survive a power loss after this returns. Never retried."""
        with self._operation("sync", file.path, file=file):
            os.fdatasync(file.fd)

    def sync_path(self, path: Path) -> None:
        """`fsync` of a file that another program wrote. Its name needs a `sync_directory` as well."""
        with self._operation("sync_path", path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def close(self, file: OpenFile) -> None:
        if file.fd >= 0:
            with _locks_change:
                _locks.pop(file.fd, None)
                os.close(file.fd)
                file.fd = -1

    def write_whole(self, path: Path, data: bytes) -> None:
        """Replace `path` by `data` so that after a crash either the old or the new content is there, whole.

        Two threads must not replace the same path at once: they share the temporary name `path` + ".tmp".
        """
        temporary = path.with_name(path.name + ".tmp")
        with contextlib.suppress(FileNotFoundError):
            self.unlink(temporary)
        file = self.create(temporary)
        try:
            self.append(file, [data])
            self.sync(file)
        finally:
            self.close(file)
        self.rename(temporary, path)
        self.sync_directory(path.parent)

    # -- names -----------------------------------------------------------------------------------------------

    def make_directory(self, path: Path, below: Path | None = None) -> list[Path]:
        """Create `path` and missing parents; nothing happens where it is there already.

        Returns the directories that were made, outermost first. None of the names is durable before a
        `sync_directory` of its parent. A directory that was found may not be durable either: whoever made it
        may have died before that sync.

        Args:
            below: a directory above `path` that is never created. Raises `FileNotFoundError` without it.
        """
        if self.is_directory(path):
            return []
        if path == below:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        made = self.make_directory(path.parent, below)
        with self._operation("mkdir", path):
            path.mkdir(exist_ok=True)
        return [*made, path]

    def sync_directory(self, path: Path) -> None:
        """`fsync` of a directory: names created, renamed or removed in it survive a power loss."""
        with self._operation("sync_directory", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def open_directory(self, path: Path) -> OpenFile:
        """The directory, which keeps its identity while it is open: no other one gets its inode number."""
        with self._operation("open_directory", path):
            return OpenFile(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path)

    def is_in_place(self, file: OpenFile) -> bool:
        """Whether the path of an open file or directory still leads to that very file or directory; False for
        one that another thread has closed meanwhile.
        """
        with self._operation("is_in_place", file.path):
            try:
                return os.path.samestat(os.stat(file.path), os.fstat(file.fd))
            except (FileNotFoundError, NotADirectoryError):
                return False
            except OSError as e:
                if e.errno == errno.EBADF:
                    return False
                raise

    def unlink(self, path: Path, within: OpenFile | None = None) -> None:
        """Remove a file. With `within`, an open directory above it, the file is looked for in that directory,
        whatever its path leads to now.
        """
        with self._operation("unlink", path):
            if within is None:
                os.unlink(path)
            else:
                os.unlink(path.relative_to(within.path), dir_fd=within.fd)

    def rename(self, path: Path, target: Path) -> None:
        """Give a file or a directory another name. Durable after a `sync_directory` of both parents."""
        with self._operation("rename", path, target=target):
            os.rename(path, target)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and all in it. Never raises: what cannot be removed stays."""
        with self._operation("remove_tree", path):
            shutil.rmtree(path, ignore_errors=True)

    # -- reading ---------------------------------------------------------------------------------------------

    def list_directory(self, path: Path) -> list[str]:
        """The names in `path`, sorted; empty where there is no such directory."""
        with self._operation("list_directory", path):
            try:
                return sorted(os.listdir(path))
            except FileNotFoundError:
                return []

    def exists(self, path: Path) -> bool:
        with self._operation("exists", path):
            return path.exists()

    def is_directory(self, path: Path) -> bool:
        with self._operation("is_directory", path):
            return path.is_dir()

    def size(self, path: Path) -> int:
        with self._operation("size", path):
            return path.stat().st_size

    def modified_ms(self, path: Path) -> int:
        with self._operation("modified_ms", path):
            return path.stat().st_mtime_ns // 1_000_000

    def read(self, path: Path, position: int = 0, length: int | None = None) -> bytes:
        """Up to `length` bytes from `position`, to the end without it."""
        with self._operation("read", path, position=position), open(path, "rb") as f:
            f.seek(position)
            return f.read() if length is None else f.read(length)

    def map(self, path: Path) -> pa.Buffer:
        """The file's bytes as they are now, mapped read-only. The mapping lives as long as the buffer.

        Arrow's mapping, because Python's `mmap` keeps a descriptor open for each. A medium that fails while a
        page is read, or a file that is cut below the page, kills the process (SIGBUS) instead of raising.
        """
        with self._operation("map", path), pa.memory_map(str(path)) as file:
            return file.read_buffer()

    def free_bytes(self, path: Path) -> int:
        with self._operation("free_bytes", path):
            return shutil.disk_usage(path).free

    # -- locks -----------------------------------------------------------------------------------------------

    def lock(self, path: Path) -> OpenFile | None:
        """The file at `path`, made if missing, locked for this holder (`flock`); None where another holds it.

        The lock ends with `close` or the process; one that is forked from it does not hold it. A file that
        was replaced or removed between opening and locking is tried again, so the returned lock is always on
        the file that the path names at that moment.
        """
        with self._operation("lock", path):
            while True:
                with _locks_change:
                    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
                    file = _locks[fd] = OpenFile(fd, path)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.path.samestat(os.stat(path), os.fstat(fd)):
                        return file
                except BlockingIOError:
                    Files.close(self, file)
                    return None
                except FileNotFoundError:
                    pass
                except BaseException:
                    Files.close(self, file)
                    raise
                Files.close(self, file)


def _after_fork() -> None:
    """A lock belongs to all processes that have its descriptor open: a child would keep that of a parent that
    has died.
    """
    for fd, file in _locks.items():
        os.close(fd)
        file.fd = -1
    _locks.clear()
    _locks_change.release()


os.register_at_fork(
    before=_locks_change.acquire, after_in_parent=_locks_change.release, after_in_child=_after_fork
)


def temporary() -> Path:
    """A path that nobody has, in the system's directory for temporary files (`TMPDIR`)."""
    return Path(tempfile.gettempdir()) / f"keyfold-{uuid.uuid4().hex}"


#: The real file system.
LOCAL = Files()


def hold_descriptor() -> int:
    """A descriptor of no file: freeing it makes room for another one. Raises `OSError`: none is left.

    No operation on files, so no test sees it.
    """
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def free_descriptor(fd: int) -> None:
    os.close(fd)


def count_descriptors(below: int) -> int:
    """How many descriptors with a lower number are open; counted without opening one."""
    found = 0
    for fd in range(below):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            found += 1
    return found
