"""Writes a restored state to a RocksDB store or to another changelog.

Both process the state in pieces of some tens of megabytes, so its size does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa

from keyfold.checkpoints.compaction.fold import gathered
from keyfold.checkpoints.log import ingest
from keyfold.checkpoints.log.reader_marks import now_ms
from keyfold.checkpoints.log.recovery import NewChangelog, open_writer
from keyfold.checkpoints.log.writer import Batch, Writer
from keyfold.checkpoints.manifest.idempotence import COPIED_APP
from keyfold.checkpoints.manifest.identity import ChangelogMeta
from keyfold.checkpoints.manifest.journal import decode_line, encode_line
from keyfold.checkpoints.manifest.state import Commit
from keyfold.statestore import filenames
from keyfold.statestore.errors import (
    ChangelogLocked,
    ConfigError,
    SchemaMismatch,
    StorageFailed,
    storage_errors,
)
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.kv.typed_columns import ColumnsView, LastValuesView
from keyfold.statestore.paths import AnyPath
from keyfold.statestore.remote_files import writable
from keyfold.statestore.rocksdb.format import ALL_PARTITIONS
from keyfold.statestore.rocksdb.store import LastValues, StoreId, StoreUnusable
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.segment.block import RECORD_SCHEMA

#: The file beside a store that says what its typed columns are: a line as in a journal.
_COLUMNS: Final = "columns.json"
#: Bytes of the state per sorted file of a store, or per commit of a changelog.
_STEP_ROWS: Final = 1 << 20
_STEP_BYTES: Final = 16 << 20

#: The app that commits the copied state if the state has no app of its own.


def write_store(
    files: Files, target: Path, changelog: str, batches: Iterable[pa.RecordBatch], columns: Columns | None
) -> LastValuesView:
    """Write a new store in the directory `target` from records with unique keys. Returns it open.

    After an error nothing remains. An error of `batches` passes through.

    Raises:
        ConfigError: the directory is not empty.
        StorageFailed: the store cannot be written.
    """
    _check_free(files, target, "A store")
    try:
        files.make_directory(target)
        store = LastValues.open(target, StoreId(changelog, ALL_PARTITIONS, 0), files=files)
        try:
            store.load(_ranges(batches if columns is None else map(columns.packed, batches)))
            if columns is not None:
                files.write_whole(target / _COLUMNS, encode_line(columns.to_json()))
        except BaseException:
            store.destroy()
            raise
    except (OSError, StoreUnusable) as e:
        files.remove_tree(target)
        raise StorageFailed(
            "The store cannot be written.", path=target, expected="a writable directory",
            found=e.strerror if isinstance(e, OSError) else e.found, remedy="free or repair the disk",
        ) from e  # fmt: skip
    return store if columns is None else ColumnsView(store, columns, owns=True)


def _ranges(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[list[pa.RecordBatch], int]]:
    applied = 0
    for few in gathered(batches, _STEP_ROWS, _STEP_BYTES):
        # Offsets of several partitions: the store only needs them to ascend.
        applied = max(applied, *(batch.column("offset")[-1].as_py() for batch in few)) + 1
        yield few, applied
    if not applied:
        # Without a range the store would have no identity, and `open_store` would refuse it.
        yield [pa.RecordBatch.from_pylist([], RECORD_SCHEMA)], 1


def open_store(path: AnyPath, *, files: Files = LOCAL) -> LastValuesView:
    """Open a store that `RestoredState.to_store` wrote: get, get_all, range, prefix, all, snapshot, close.
    With typed columns keys and values are those of `ColumnsView`.

    Raises:
        ConfigError: the directory is not such a store, or it cannot be opened.
    """
    directory = writable(path, files)
    found: object = "no store"
    # RocksDB creates what is missing, even in a directory of something else.
    if files.exists(directory / "CURRENT"):
        try:
            columns = _columns_of(files, directory)
            store = LastValues.open(directory, None, files=files)
            return store if columns is None else ColumnsView(store, columns, owns=True)
        except (StoreUnusable, SchemaMismatch) as e:
            found = e
    raise ConfigError(
        "Not a store that can be opened.", path=directory,
        expected="a directory that `to_store` has written and that is not open elsewhere", found=found,
        remedy="restore it again from the changelog",
    )  # fmt: skip


def _columns_of(files: Files, directory: Path) -> Columns | None:
    """The typed columns of a store; None for a store of bytes. Raises `StoreUnusable`."""
    path = directory / _COLUMNS
    if not files.exists(path):
        return None
    line = decode_line(files.read(path).rstrip(b"\n"))
    if line is None:
        raise StoreUnusable(f"{_COLUMNS} does not match its checksum")
    return Columns.from_json(line, path=path)


def write_changelog(
    files: Files,
    target: Path,
    source: ChangelogMeta,
    batches: Iterator[pa.RecordBatch],
    apps: Iterable[Commit],
    *,
    partitions: int | None,
    config: Mapping[str, object],
) -> None:
    """Create a changelog at `target` with these records and the last commit of every app.

    It is written under a temporary name beside `target`, and renamed when it is complete.

    Raises:
        ConfigError: `target` is not empty. StorageFailed: the changelog cannot be written.
    """
    _check_free(files, target, "A changelog")
    # A folder of snapshots belongs to one changelog.
    settings = source.config.with_changes({"snapshot.dest": "", **config})
    creation = NewChangelog(partitions or source.partitions, source.columns, settings, source.app)
    unfinished = target.with_name(f".{target.name}.restoring")
    _remove_unfinished(files, unfinished)
    try:
        writer = open_writer(files, unfinished, creation, now_ms, steal=False)
        try:
            _commit_all(writer, batches, apps)
        finally:
            writer.close()
        files.rename(unfinished, target)
        files.sync_directory(target.parent)
    except BaseException:
        files.remove_tree(unfinished)
        with storage_errors(
            "The changelog cannot be written.", target, expected="a disk with free space",
            remedy="free or repair the disk",
        ):  # fmt: skip
            raise


def _remove_unfinished(files: Files, directory: Path) -> None:
    """Remove the remains of an earlier call that was killed. Raises `ChangelogLocked` if it is still
    running.
    """
    if files.is_directory(directory):
        lock = files.lock(directory / filenames.LOCK)
        if lock is None:
            raise ChangelogLocked(
                "Another process restores to the same path.", path=directory, expected="one process",
                found="two", remedy="wait for it, or choose another path",
            )  # fmt: skip
        files.close(lock)
        files.remove_tree(directory)


def _commit_all(writer: Writer, batches: Iterator[pa.RecordBatch], apps: Iterable[Commit]) -> None:
    # Also for an empty state: the apps have committed more than this changelog holds.
    writer.commit({}, Batch(COPIED_APP, 0))
    for number, few in enumerate(gathered(batches, _STEP_ROWS, _STEP_BYTES), 1):
        rows = [ingest.unplaced(batch) for batch in few]
        writer.commit(ingest.blocks_of(writer, rows), Batch(COPIED_APP, number))
    for app in sorted(apps, key=lambda c: c.number):
        if app.app != COPIED_APP:
            writer.commit({}, Batch(app.app, app.batch, app.query, app.source, app.digest))


def _check_free(files: Files, target: Path, what: str) -> None:
    """Raises `ConfigError` if something else is at the path."""
    if files.exists(target) and (not files.is_directory(target) or files.list_directory(target)):
        raise ConfigError(
            f"{what} cannot be created here.", path=target,
            expected="an empty directory, or a path that does not exist",
            found="a directory with entries" if files.is_directory(target) else "a file",
            remedy="choose another path",
        )  # fmt: skip
