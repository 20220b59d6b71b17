"""The only module that opens, writes, syncs, renames, lists or deletes files on a local disk.

`Files` is the seam for tests: a subclass records, fails, kills or pauses at the n-th operation. Every
operation runs inside the context that `_operation` returns, so a subclass overrides this one method to see
the beginning and the end of every operation. `remote_files` is the same for remote file systems.
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

#: Linux writes at most this many bytes in one call; larger data takes several calls.
_WRITE_BYTES_MAX = 1 << 30

_UNWATCHED: AbstractContextManager[None] = contextlib.nullcontext()


#: The locks of this process by descriptor. A fork waits until no lock is being acquired or released.
_locks: dict[int, OpenFile] = {}
_locks_change = threading.RLock()


class OpenFile:
    """A file that is being written: its descriptor, its path, and the number of bytes written so far."""

    __slots__ = ("fd", "path", "position")

    def __init__(self, fd: int, path: Path, position: int = 0) -> None:
        self.fd = fd
        self.path = path
        self.position = position


class Files:
    """File operations on the local file system. All paths are `Path`s, all sizes bytes.

    Raises `OSError` as the operating system reports it. Callers that know more turn it into a keyfold error.
    """

    #: Whether `lock` works, and with it everything that must know which processes are alive.
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
        """The context in which the operation `name` on `path` runs. Only `close` has none. For tests.

        `position` is where `data` is written, or the size to truncate to; `target` is the new name of a
        rename. If the operation opens a file and succeeds, leaving the context must not raise: the file would
        leak.
        """
        return _UNWATCHED

    # -- writing ---------------------------------------------------------------------------------------------

    def create(self, path: Path) -> OpenFile:
        """Create an empty file. Raises `FileExistsError`: no name is ever used twice."""
        with self._operation("create", path):
            return OpenFile(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644), path)

    def append(self, file: OpenFile, chunks: Sequence[Data]) -> None:
        """Append all `chunks`. After an error, some of their bytes may have been written."""
        with self._operation("append", file.path, file=file, data=chunks, position=file.position):
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                while len(view):
                    done = os.pwrite(file.fd, view[:_WRITE_BYTES_MAX], file.position)
                    file.position += done
                    view = view[done:]

    def overwrite(self, file: OpenFile, data: bytes, position: int) -> None:
        """Write `data` at `position` in place. `append` still continues at the old end."""
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
        """`fsync` a file that another program wrote. Its name needs a `sync_directory` as well."""
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
        """Replace the content of `path` atomically: after a crash the file has its old or its new content.

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
        """Create `path` and its missing parents. An existing directory is left alone.

        Returns the directories that were created, outermost first. Their names are durable only after a
        `sync_directory` of each parent. An existing directory may not be durable either: the process that
        created it may have died before that sync.

        Args:
            below: An ancestor of `path` that is never created. If it does not exist, `FileNotFoundError` is
                raised.
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
        """`fsync` a directory: names created, renamed or removed in it survive a power loss."""
        with self._operation("sync_directory", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def open_directory(self, path: Path) -> OpenFile:
        """Open a directory. While it is open, its inode number is not reused."""
        with self._operation("open_directory", path):
            return OpenFile(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path)

    def is_in_place(self, file: OpenFile) -> bool:
        """Whether the path of an open file or directory still names that file or directory.

        False if another thread has closed it in the meantime.
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
        """Remove a file. If an open ancestor directory `within` is given, the path is resolved relative to
        it, even if the directory has been renamed or replaced since.
        """
        with self._operation("unlink", path):
            if within is None:
                os.unlink(path)
            else:
                os.unlink(path.relative_to(within.path), dir_fd=within.fd)

    def rename(self, path: Path, target: Path) -> None:
        """Rename a file or directory. Durable after a `sync_directory` of both parents."""
        with self._operation("rename", path, target=target):
            os.rename(path, target)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and its contents. Never raises: what cannot be removed is kept."""
        with self._operation("remove_tree", path):
            shutil.rmtree(path, ignore_errors=True)

    # -- reading ---------------------------------------------------------------------------------------------

    def list_directory(self, path: Path) -> list[str]:
        """The names in `path`, sorted. Empty if the directory does not exist."""
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
        """Up to `length` bytes from `position`, or all bytes up to the end."""
        with self._operation("read", path, position=position), open(path, "rb") as f:
            f.seek(position)
            return f.read() if length is None else f.read(length)

    def map(self, path: Path) -> pa.Buffer:
        """Map the file's current bytes, read-only. The mapping lives as long as the buffer.

        This uses Arrow's mapping because Python's `mmap` keeps a descriptor open for each file. If the disk
        fails while a page is read, or the file is truncated below the page, the process is killed (SIGBUS)
        instead of raising an exception.
        """
        with self._operation("map", path), pa.memory_map(str(path)) as file:
            return file.read_buffer()

    def free_bytes(self, path: Path) -> int:
        with self._operation("free_bytes", path):
            return shutil.disk_usage(path).free

    # -- locks -----------------------------------------------------------------------------------------------

    def lock(self, path: Path) -> OpenFile | None:
        """Lock the file at `path` with `flock`, creating it if needed. None if another holder has the lock.

        The lock ends with `close` or with the process. A forked child does not hold it. If the file was
        replaced or removed between opening and locking, the attempt is repeated, so the returned lock is
        always on the file that the path names at that moment.
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
    """Close inherited locks. A lock belongs to every process with its descriptor open, so a child would keep
    the lock of a parent that has died.
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
    """An unused path in the system's directory for temporary files (`TMPDIR`)."""
    return Path(tempfile.gettempdir()) / f"keyfold-{uuid.uuid4().hex}"


#: The real file system.
LOCAL = Files()


def hold_descriptor() -> int:
    """Reserve a descriptor, so that freeing it makes room for another. Raises `OSError` if none is left.

    This is not a file operation, so `_operation` does not see it.
    """
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def free_descriptor(fd: int) -> None:
    os.close(fd)


def count_descriptors(below: int) -> int:
    """The number of open descriptors with a lower number. Counting does not open one."""
    found = 0
    for fd in range(below):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            found += 1
    return found
