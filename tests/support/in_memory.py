"""Files in a dictionary: for looking at many thousand small directories, each for a moment."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa

from keyfold.statestore.files import Data, Files, OpenFile


class _Content:
    """The bytes of a file, whatever its name is."""

    __slots__ = ("data",)

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)


class _Opened(OpenFile):
    __slots__ = ("what",)

    def __init__(self, path: Path, what: _Content | set[str]) -> None:
        super().__init__(0, path)
        self.what = what


class InMemory(Files):
    """A directory at `ROOT` and what is in it, for one thread. Nobody else holds a lock, nothing is full.

    Args:
        tree: each path below `ROOT` with its bytes, None for a directory.
    """

    ROOT: Final = Path("/in-memory")

    def __init__(self, tree: Mapping[str, bytes | None]) -> None:
        root = str(self.ROOT)
        self._files: dict[str, _Content] = {}
        self._directories: dict[str, set[str]] = {root: set()}
        for name, content in tree.items():
            path = f"{root}/{name}"
            above, _, last = path.rpartition("/")
            self._directories[above].add(last)
            if content is None:
                self._directories[path] = set()
            else:
                self._files[path] = _Content(content)

    def digest(self) -> bytes:
        """Of all names and bytes, but those of locks."""
        digest = hashlib.blake2b(digest_size=16)
        for path in sorted(self._directories):
            digest.update(f"{path}\0".encode())
        for path, content in sorted(self._files.items()):
            if not path.endswith("/lock"):
                digest.update(f"{path}\0{len(content.data)}\0".encode())
                digest.update(content.data)
        return digest.digest()

    # -- writing ---------------------------------------------------------------------------------------------

    def create(self, path: Path) -> OpenFile:
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        return self._made(path)

    def append(self, file: OpenFile, chunks: Sequence[Data]) -> None:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            self._write(file, view, file.position)
            file.position += len(view)

    def overwrite(self, file: OpenFile, data: bytes, position: int) -> None:
        self._write(file, memoryview(data), position)

    def truncate(self, file: OpenFile, size: int) -> None:
        data = self._opened(file)
        del data[size:]
        data.extend(bytes(size - len(data)))
        file.position = size

    def sync(self, file: OpenFile) -> None:
        self._opened(file)

    def sync_path(self, path: Path) -> None:
        self._content(path)

    def close(self, file: OpenFile) -> None:
        file.fd = -1

    # -- names -----------------------------------------------------------------------------------------------

    def make_directory(self, path: Path, below: Path | None = None) -> list[Path]:
        if self.is_directory(path):
            return []
        if path == below:
            raise _missing(path)
        made = self.make_directory(path.parent, below)
        self._directories[str(path.parent)].add(path.name)
        self._directories[str(path)] = set()
        return [*made, path]

    def sync_directory(self, path: Path) -> None:
        self._names(path)

    def open_directory(self, path: Path) -> OpenFile:
        return _Opened(path, self._names(path))

    def is_in_place(self, file: OpenFile) -> bool:
        assert isinstance(file, _Opened)
        text = str(file.path)
        return file.fd >= 0 and file.what is (self._files.get(text) or self._directories.get(text))

    def unlink(self, path: Path, within: OpenFile | None = None) -> None:
        if self._files.pop(str(path), None) is None:
            raise _missing(path)
        self._names(path.parent).remove(path.name)

    def rename(self, path: Path, target: Path) -> None:
        content, names = self._content(path), self._names(target.parent)
        self.unlink(path)
        self._files[str(target)] = content
        names.add(target.name)

    def remove_tree(self, path: Path) -> None:
        for name in sorted(self._directories.pop(str(path), ())):
            self._files.pop(str(path / name), None)
            self.remove_tree(path / name)
        self._directories.get(str(path.parent), set()).discard(path.name)

    # -- reading ---------------------------------------------------------------------------------------------

    def list_directory(self, path: Path) -> list[str]:
        return sorted(self._directories.get(str(path), ()))

    def exists(self, path: Path) -> bool:
        return str(path) in self._files or str(path) in self._directories

    def is_directory(self, path: Path) -> bool:
        return str(path) in self._directories

    def size(self, path: Path) -> int:
        return len(self._content(path).data)

    def modified_ms(self, path: Path) -> int:
        return 0

    def read(self, path: Path, position: int = 0, length: int | None = None) -> bytes:
        end = None if length is None else position + length
        return bytes(self._content(path).data[position:end])

    def map(self, path: Path) -> pa.Buffer:
        return pa.py_buffer(self.read(path))

    def free_bytes(self, path: Path) -> int:
        return 1 << 62

    def lock(self, path: Path) -> OpenFile | None:
        content = self._files.get(str(path))
        return self._made(path) if content is None else _Opened(path, content)

    # -- within ----------------------------------------------------------------------------------------------

    def _made(self, path: Path) -> OpenFile:
        self._names(path.parent).add(path.name)
        content = self._files[str(path)] = _Content()
        return _Opened(path, content)

    def _names(self, path: Path) -> set[str]:
        names = self._directories.get(str(path))
        if names is None:
            raise _missing(path)
        return names

    def _content(self, path: Path) -> _Content:
        content = self._files.get(str(path))
        if content is None:
            raise _missing(path)
        return content

    def _write(self, file: OpenFile, view: memoryview, position: int) -> None:
        data = self._opened(file)
        data.extend(bytes(max(0, position - len(data))))
        data[position : position + len(view)] = view

    @staticmethod
    def _opened(file: OpenFile) -> bytearray:
        assert isinstance(file, _Opened)
        assert isinstance(file.what, _Content)
        if file.fd < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(file.path))
        return file.what.data


def _missing(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
