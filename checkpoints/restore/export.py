"""Exports a restored state for other tools: Parquet, Arrow IPC or CSV, partition by partition.

The formats are Arrow's own, and every byte goes through `Files`. The file is written under a temporary name,
synced, and renamed when it is complete. It is removed if writing fails.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from keyfold.checkpoints.log.ahead import ahead
from keyfold.checkpoints.restore.restore import RestoredState
from keyfold.statestore.errors import ConfigError, StorageFailed, reason
from keyfold.statestore.files import Files, OpenFile

_RAW: Final = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])


class _Sink(io.RawIOBase):
    """The file object that Arrow's writers write to: appends to one file."""

    def __init__(self, files: Files, file: OpenFile, to: Path) -> None:
        self._files = files
        self._file = file
        self._to = to

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with _written(self._to):
            self._files.append(self._file, [data])
        return memoryview(data).nbytes

    def tell(self) -> int:
        return self._file.position


_Writer = Callable[[_Sink, pa.Schema], AbstractContextManager[Any]]

#: File suffix → the function that writes record batches in this format.
FORMATS: Final[dict[str, _Writer]] = {
    ".parquet": lambda sink, schema: pyarrow.parquet.ParquetWriter(sink, schema, compression="zstd"),
    ".arrow": lambda sink, schema: pa.ipc.new_file(sink, schema),
    ".csv": lambda sink, schema: pyarrow.csv.CSVWriter(sink, schema),
}


def export(state: RestoredState, to: Path, files: Files) -> int:
    """Write the state to the new file `to`, in the format of its suffix. Returns the number of rows.

    Raises:
        ConfigError: the format does not support a column, such as nested ones or bytes that are not UTF-8 in
            CSV; or `to` exists already.
        StorageFailed: the file cannot be written.
    """
    schema = _RAW if state.columns is None else state.columns.arrow_schema()
    unfinished = to.with_name(f".{to.name}.restoring")
    with _written(to):
        with contextlib.suppress(FileNotFoundError):
            files.unlink(unfinished)  # left by a process that died
        file = files.create(unfinished)
    try:
        rows = 0
        made = closing(ahead([lambda: _batches(state, schema)], threads=1))
        with (
            _fitting(to, schema),
            made as batches,
            FORMATS[to.suffix](_Sink(files, file, to), schema) as writer,
        ):
            for batch in batches:
                writer.write_batch(batch)
                rows += batch.num_rows
        with _written(to):
            files.sync(file)
            if files.exists(to):
                raise ConfigError(
                    f"{to.name} already exists.", path=to, expected="a path that does not exist",
                    found="a file that was created meanwhile",
                    remedy="choose another path, or remove the file",
                )  # fmt: skip
            files.rename(unfinished, to)
            files.sync_directory(to.parent)
        return rows
    except BaseException:
        with contextlib.suppress(OSError):
            files.unlink(unfinished)
        raise
    finally:
        files.close(file)


@contextlib.contextmanager
def _written(to: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        missing = isinstance(e, FileNotFoundError | NotADirectoryError)
        raise StorageFailed(
            "The state could not be written.", path=to,
            expected="an existing directory with free space",
            found=reason(e),
            remedy="create the directory, or correct the path" if missing
            else "free or repair the disk, or choose another one, then restore again; no file was written",
        ) from e  # fmt: skip


def _batches(state: RestoredState, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for batch in state.batches():
        keys, values = batch.column("key"), batch.column("value")
        if state.columns is None:
            yield pa.RecordBatch.from_arrays([keys, values], schema=schema)
        else:
            yield from state.columns.decode(keys, values).to_batches()


@contextlib.contextmanager
def _fitting(to: Path, schema: pa.Schema) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as e:
        raise ConfigError(
            f"A {to.suffix} file cannot hold this state.", path=to,
            expected="columns that the format supports",
            found=", ".join(f"{field.name}: {field.type}" for field in schema),
            remedy="use .parquet or .arrow" if to.suffix == ".csv" else "use .arrow, or restore in Python",
        ) from e  # fmt: skip
