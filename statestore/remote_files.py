"""`Files` on a remote file system: an object store, or any file system of pyarrow or fsspec.

It implements only what snapshots need: files that are written once and then read. An object exists, complete
and durable, once its stream is closed. There are no locks, and nothing is truncated or overwritten in place.
"""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs

from keyfold.statestore.arguments import wrong_type
from keyfold.statestore.errors import ConfigError, StorageFailed, reason
from keyfold.statestore.files import LOCAL, Data, Files, OpenFile
from keyfold.statestore.paths import AnyPath, local_path, remote_scheme, text_of

#: How much of a remote file is in memory while it is copied to a temporary file.
_PIECE_BYTES: Final = 8 << 20


def located(place: AnyPath, filesystem: Any = None, files: Files = LOCAL) -> tuple[Files, Path]:
    """The `Files` that read and write `place`, and its path in them. A local path is absolute.

    Args:
        place: A local path (see `local_path`), or a URL that pyarrow (s3, gs, abfs, hdfs) or fsspec supports.
        filesystem: A `pyarrow.fs.FileSystem` or an fsspec file system, for credentials and endpoints. `place`
            is then a path in it.
        files: Used for a local `place`. If they have no locks, `place` is a path in them.

    Raises:
        ConfigError: `place` is not a path, or no file system supports the URL.
    """
    if filesystem is not None or not files.has_locks:
        text = text_of(place)
        if "://" in text:
            raise ConfigError(
                "filesystem= needs a path inside that file system, not a URL.",
                expected="a path without a scheme", found=text.partition("://")[0] + "://",
                remedy="remove the scheme, or leave out filesystem=",
            )  # fmt: skip
        return files if filesystem is None else RemoteFiles(_as_pyarrow(filesystem)), Path(text)
    scheme = remote_scheme(place)
    if scheme is None:
        return files, local_path(place)
    url = text_of(place)
    try:
        found, path = pa.fs.FileSystem.from_uri(url)
        return RemoteFiles(found), Path(path)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
        with contextlib.suppress(ImportError, ValueError, TypeError):
            from fsspec.core import url_to_fs

            fsspec_one, path = url_to_fs(url)
            if "://" not in path:
                return RemoteFiles(_as_pyarrow(fsspec_one)), Path(path)
        raise ConfigError(
            "No file system supports this URL.", expected="a URL that pyarrow.fs or fsspec supports",
            found=f"{scheme}://",
            remedy="correct the URL, install the fsspec package for it, or pass filesystem=",
        ) from e  # fmt: skip


def writable(place: AnyPath, files: Files = LOCAL) -> Path:
    """The absolute path of a directory for writing with locks and syncs. Raises `ConfigError`."""
    if not files.has_locks:
        raise ConfigError(
            "The file system is read-only for keyfold.", path=text_of(place), expected="a local directory",
            found="a remote file system", remedy="copy a snapshot to a local directory with Changelog.clone",
        )  # fmt: skip
    return local_path(place)


def _as_pyarrow(filesystem: Any) -> pa.fs.FileSystem:
    if isinstance(filesystem, pa.fs.FileSystem):
        return filesystem
    if not callable(getattr(filesystem, "info", None)):
        raise wrong_type("filesystem", filesystem, "a pyarrow.fs.FileSystem or an fsspec file system")
    return pa.fs.PyFileSystem(pa.fs.FSSpecHandler(filesystem))


class _Stream(OpenFile):
    """An object that is being written."""

    __slots__ = ("stream",)

    def __init__(self, stream: Any, path: Path) -> None:
        super().__init__(-1, path)
        self.stream = stream


class RemoteFiles(Files):
    """The operations of `Files` that work remotely; the others raise `OSError`.

    A file is complete once `close` has returned. A process that dies earlier may leave no file, an empty one
    or a part of it, depending on the store. So a file is replaced only while another complete copy exists.
    """

    has_locks = False

    def __init__(self, filesystem: pa.fs.FileSystem) -> None:
        self._fs = filesystem

    # -- writing ---------------------------------------------------------------------------------------------

    def create(self, path: Path) -> OpenFile:
        with self._operation("create", path):
            return _Stream(self._fs.open_output_stream(str(path)), path)

    def append(self, file: OpenFile, chunks: Sequence[Data]) -> None:
        assert isinstance(file, _Stream)
        with self._operation("append", file.path, file=file, data=chunks, position=file.position):
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                file.stream.write(view)
                file.position += len(view)

    def sync(self, file: OpenFile) -> None:
        """Nothing to do: an object is durable when it is closed."""

    def close(self, file: OpenFile) -> None:
        assert isinstance(file, _Stream)
        file.stream.close()

    def write_whole(self, path: Path, data: bytes) -> None:
        file = self.create(path)
        self.append(file, [data])
        self.close(file)

    def overwrite(self, file: OpenFile, data: bytes, position: int) -> None:
        raise _unsupported(file.path)

    def truncate(self, file: OpenFile, size: int) -> None:
        raise _unsupported(file.path)

    # -- names -----------------------------------------------------------------------------------------------

    def make_directory(self, path: Path, below: Path | None = None) -> list[Path]:
        """Create the directory if the file system has directories; an object store has only names."""
        with self._operation("mkdir", path):
            if not isinstance(self._fs, pa.fs.S3FileSystem):
                self._fs.create_dir(str(path), recursive=True)
        return []

    def sync_directory(self, path: Path) -> None:
        """Nothing to do."""

    def unlink(self, path: Path, within: OpenFile | None = None) -> None:
        with self._operation("unlink", path):
            self._fs.delete_file(str(path))

    def remove_tree(self, path: Path) -> None:
        with self._operation("remove_tree", path):
            self._fs.delete_dir(str(path))

    # -- reading ---------------------------------------------------------------------------------------------

    def list_directory(self, path: Path) -> list[str]:
        with self._operation("list_directory", path):
            chosen = pa.fs.FileSelector(str(path), allow_not_found=True)
            return sorted(info.base_name for info in self._fs.get_file_info(chosen))

    def exists(self, path: Path) -> bool:
        with self._operation("exists", path):
            return bool(self._info(path).type != pa.fs.FileType.NotFound)

    def is_directory(self, path: Path) -> bool:
        with self._operation("is_directory", path):
            return bool(self._info(path).type == pa.fs.FileType.Directory)

    def size(self, path: Path) -> int:
        with self._operation("size", path):
            size: int | None = self._info(path).size
            if size is None:
                raise FileNotFoundError(errno.ENOENT, "no such object", str(path))
            return size

    def read(self, path: Path, position: int = 0, length: int | None = None) -> bytes:
        with self._operation("read", path, position=position), self._fs.open_input_file(str(path)) as file:
            file.seek(position)
            data: bytes = file.read() if length is None else file.read(length)
            return data

    def map(self, path: Path) -> pa.Buffer:
        """The bytes, copied to a temporary file in `TMPDIR`, which is mapped and then unlinked. It is freed
        with the buffer or with the process. So memory does not grow with the file.

        Raises:
            StorageFailed: The temporary directory has no room for the file.
        """
        with self._operation("map", path), self._fs.open_input_stream(str(path)) as file:
            return _mapped(lambda: file.read(_PIECE_BYTES))

    def free_bytes(self, path: Path) -> int:
        """Practically unlimited."""
        return 1 << 62

    def lock(self, path: Path) -> OpenFile | None:
        raise OSError(errno.EROFS, "a remote file system has no locks", str(path))

    def _info(self, path: Path) -> pa.fs.FileInfo:
        return self._fs.get_file_info([str(path)])[0]


def _mapped(read: Callable[[], bytes]) -> pa.Buffer:
    """The pieces from `read`, until it returns an empty one, in an unlinked file."""
    with contextlib.ExitStack() as stack:
        with _room():
            spool = stack.enter_context(tempfile.NamedTemporaryFile(prefix="keyfold-", buffering=0))
        while piece := read():
            view = memoryview(piece)
            with _room():
                while len(view):
                    view = view[spool.write(view) :]
        with _room(), pa.memory_map(spool.name) as mapped:
            return mapped.read_buffer()


@contextlib.contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise StorageFailed(
            "Cannot copy a remote file to the temporary directory.", path=tempfile.gettempdir(),
            expected="a directory with enough free space", found=reason(e),
            remedy="free disk space, or set TMPDIR to a directory with enough space",
        ) from e  # fmt: skip


def _unsupported(path: Path) -> OSError:
    return OSError(errno.EOPNOTSUPP, "a remote file can be written only once", str(path))
