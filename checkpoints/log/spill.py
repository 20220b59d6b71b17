"""Temporary files for key bytes that a pass needs again, instead of memory.

The keys of uncompressed blocks remain in the mapped segments. The keys of compressed blocks exist only while
the block is decoded, and so do arrays that were merged from many small blocks. They are written,
uncompressed, to files that are mapped as they grow. The first of them may remain in memory, so that a small
pass needs no file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keyfold.statestore.files import Files, OpenFile
from keyfold.statestore.keys.buffers import layout_of

#: The size of one file. The file is sparse until it is written, and mapped once.
_FILE_BYTES: Final = 64 << 20
_ALIGNMENT: Final = 8


class KeySpill:
    """Moves arrays of binary keys to mapped files in a directory of their own, which `close` removes.

    No name is durable and nothing is synced: the files are void when the process ends.

    Args:
        nameless: unlink files as soon as they are mapped, so that a killed process leaves nothing.
        memory_bytes: this many bytes of the first keys remain in memory and need no file.

    Raises (all methods):
        OSError: the disk is full or failed.
    """

    def __init__(
        self, files: Files, directory: Path, *, nameless: bool = False, memory_bytes: int = 0
    ) -> None:
        self._files = files
        self._nameless = nameless
        self._directory = directory
        self._memory_left = memory_bytes
        self._file: OpenFile | None = None
        self._data = pa.py_buffer(b"")
        self._number = 0
        self._used = 0
        self._even: dict[int, npt.NDArray[np.int32]] = {}

    def hold(self, keys: pa.Array) -> pa.Array:
        """The same keys, in a file."""
        layout = layout_of(keys)
        first, last = layout.span
        data = pa.foreign_buffer(first, last - first, keys) if first < last else pa.py_buffer(b"")
        if layout.width is not None:
            (place,) = self._write([data])
            return pa.Array.from_buffers(
                pa.binary(), layout.rows, [None, self._even_offsets(layout.width, layout.rows), place]
            )
        offsets = (layout.offsets[: layout.rows + 1] - layout.offsets[0]).astype(np.int32)
        places = self._write([pa.py_buffer(offsets), data])
        return pa.Array.from_buffers(pa.binary(), layout.rows, [None, *places])

    def _even_offsets(self, width: int, rows: int) -> pa.Buffer:
        """The Arrow offsets of keys of one width. All arrays of that width share them."""
        known = self._even.get(width)
        if known is None or len(known) <= rows:
            known = self._even[width] = np.arange(rows + 1, dtype=np.int32) * np.int32(width)
        return pa.py_buffer(known[: rows + 1])

    def _write(self, parts: list[pa.Buffer]) -> list[pa.Buffer]:
        sizes = [-(-part.size // _ALIGNMENT) * _ALIGNMENT for part in parts]
        self._memory_left -= sum(sizes)
        if self._memory_left >= 0:
            return [pa.py_buffer(part.to_pybytes()) for part in parts]
        if self._file is None or self._used + sum(sizes) > self._data.size:
            self._begin(max(_FILE_BYTES, sum(sizes)))
        file, data = self._file, self._data
        assert file is not None
        places = []
        for part, size in zip(parts, sizes, strict=True):
            self._files.append(file, [part, bytes(size - part.size)])
            places.append(data.slice(self._used, part.size))
            self._used += size
        return places

    def _begin(self, size: int) -> None:
        self._end()
        if self._nameless or not self._number:
            self._files.make_directory(self._directory, below=self._directory.parents[1])
        path = self._directory / f"{self._number}.keys"
        self._number += 1
        # From now on `close` closes it, whatever happens.
        file = self._file = self._files.create(path)
        self._files.truncate(file, size)
        self._data = self._files.map(path)
        if self._nameless:
            self._files.remove_tree(self._directory)
        file.position = self._used = 0

    def _end(self) -> None:
        if self._file is not None:
            self._files.close(self._file)
            self._file = None
        self._data = pa.py_buffer(b"")

    def close(self) -> None:
        """Remove the files. Arrays that were moved remain readable."""
        self._end()
        if self._number and not self._nameless:
            self._files.remove_tree(self._directory)
