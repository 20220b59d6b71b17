"""What a restored state becomes on disk besides files: one RocksDB store, or another changelog.

Both take the state as it comes, some tens of megabytes at a time, so that its size does not matter.
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
from keyfold.checkpoints.manifest.state import Commit
from keyfold.statestore import filenames
from keyfold.statestore.errors import ChangelogLocked, ConfigError, StorageFailed
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.kv.stores import ReadOnlyStore
from keyfold.statestore.paths import AnyPath
from keyfold.statestore.remote_files import writable
from keyfold.statestore.rocksdb.format import ALL_PARTITIONS
from keyfold.statestore.rocksdb.store import LastValues, StoreId, StoreUnusable
from keyfold.statestore.segment.block import RECORD_SCHEMA

#: So much of the state is in one sorted file of a store, or in one commit of a changelog.
_STEP_ROWS: Final = 1 << 20
_STEP_BYTES: Final = 16 << 20

#: The app that has committed what was copied, where the state has no app of its own.


def write_store(files: Files, target: Path, changelog: str, batches: Iterable[pa.RecordBatch]) -> LastValues:
    """A new store in the directory `target`, of records with unique keys. It is left open.

    Raises:
        ConfigError: the directory is not empty. StorageFailed: it cannot be written. What `batches` raises.
        Nothing is left behind then.
    """
    _check_free(files, target, "A store")
    try:
        files.make_directory(target)
        store = LastValues.open(target, StoreId(changelog, ALL_PARTITIONS, 0), files=files)
        try:
            store.load(_ranges(batches))
        except BaseException:
            store.destroy()
            raise
    except (OSError, StoreUnusable) as e:
        files.remove_tree(target)
        raise StorageFailed(
            "The store cannot be written.", path=target, expected="a directory that can be written",
            found=e.strerror if isinstance(e, OSError) else e.found, remedy="free or repair the disk",
        ) from e  # fmt: skip
    return store


def _ranges(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[list[pa.RecordBatch], int]]:
    applied = 0
    for few in gathered(batches, _STEP_ROWS, _STEP_BYTES):
        # Offsets of several partitions: the store only has to be told that it goes on.
        applied = max(applied, *(batch.column("offset")[-1].as_py() for batch in few)) + 1
        yield few, applied
    if not applied:
        # Without a range the store would not say what it is, and `open_store` would refuse it.
        yield [pa.RecordBatch.from_pylist([], RECORD_SCHEMA)], 1


def open_store(path: AnyPath, *, files: Files = LOCAL) -> ReadOnlyStore:
    """A store that `RestoredState.to_store` has made: get, get_all, range, prefix, all, snapshot, close.

    Raises:
        ConfigError: there is none, or it cannot be opened.
    """
    directory = writable(path, files)
    found: object = "none"
    # RocksDB makes what is missing, also where something else is.
    if files.exists(directory / "CURRENT"):
        try:
            return LastValues.open(directory, None, files=files)
        except StoreUnusable as e:
            found = e
    raise ConfigError(
        "There is no store that can be opened.", path=directory,
        expected="a directory that `to_store` has written, and nobody has open", found=found,
        remedy="restore it again from the changelog",
    )  # fmt: skip


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
    """A new changelog at `target` with these records and the last commit of every app.

    It is made beside `target`, and gets its name when it is whole.

    Raises:
        ConfigError: something is at `target`. StorageFailed: see there.
    """
    _check_free(files, target, "A changelog")
    # A folder of snapshots is of one changelog.
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
    except OSError as e:
        files.remove_tree(unfinished)
        raise StorageFailed(
            "The changelog cannot be written.", path=e.filename or target, expected="a disk with room",
            found=e.strerror or e, remedy="free or repair the disk",
        ) from e  # fmt: skip
    except BaseException:
        files.remove_tree(unfinished)
        raise


def _remove_unfinished(files: Files, directory: Path) -> None:
    """What an earlier call has left that was killed. Raises `ChangelogLocked` where it is still at it."""
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
    count, codec = writer.identity.partitions, writer.identity.config.codec
    # Also of an empty state: it says that the apps had committed more than is here.
    writer.commit({}, Batch(COPIED_APP, 0))
    for number, few in enumerate(gathered(batches, _STEP_ROWS, _STEP_BYTES), 1):
        rows = ingest.normalize(pa.Table.from_batches(few).drop_columns(["offset"]), writer.clock_ms())
        writer.commit(ingest.partition_blocks(rows, count, codec, writer.pool), Batch(COPIED_APP, number))
    for app in sorted(apps, key=lambda c: c.number):
        if app.app != COPIED_APP:
            writer.commit({}, Batch(app.app, app.batch, app.query, app.source, app.digest))


def _check_free(files: Files, target: Path, what: str) -> None:
    """Raises `ConfigError` where something is in the way."""
    if files.exists(target) and (not files.is_directory(target) or files.list_directory(target)):
        raise ConfigError(
            f"{what} cannot be made there.", path=target, expected="an empty or missing directory",
            found="a directory with entries" if files.is_directory(target) else "a file",
            remedy="choose another path",
        )  # fmt: skip
