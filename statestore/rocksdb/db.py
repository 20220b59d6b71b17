"""Helpers for RocksDB and rocksdict: options, errors, a cursor that detects failures, a close that waits.

Known pitfalls of rocksdict 0.3.29, each with a test in `tests/unit/rocksdb` or `tests/unit/lastvalues`:

- Always use `raw_mode`: the other mode unpickles values. On reopen, pass the options for the column family
  too, or the saved ones win.
- `items()` ends without an error at a corrupt block. A `Cursor` checks `status()` wherever it stops.
- `Snapshot.iter()` also returns rows written after the snapshot. Only an iterator keeps the state as of its
  creation, so every `Cursor` is an iterator.
- `set_iterate_upper_bound` points into memory that is freed with the `ReadOptions`, and
  `set_iterate_lower_bound` sets the upper bound. A `Cursor` seeks to its start and compares with its end.
- An iterator keeps the database open, and locked, after `close()`: cursors are closed first.
- `close()` fails while another thread is inside a call: `close_database` waits.
- Nearly every error is a plain `Exception`: only the beginning of its message identifies it.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, cast

from rocksdict import (
    BlockBasedOptions,
    DbClosedError,
    DBCompressionType,
    IngestExternalFileOptions,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    WriteOptions,
)

from keyfold.statestore.errors import ConfigError, KeyfoldError
from keyfold.statestore.kv.api import closed
from keyfold.statestore.rocksdb.sst_writer import BLOCK_BYTES

_WRITE_BUFFER_BYTES = 8 << 20
_OPEN_FILES_MAX = 256
_OPEN_FILES_MIN = 20
_OPEN_FILES_SHARE = 8
#: RocksDB's default is 16 threads per opening, which took a third of the time of opening a small store.
_OPENING_THREADS = 2
_LOG_BYTES_MAX = 1 << 20
_MANIFEST_BYTES_MAX = 4 << 20
_CLOSE_WAIT_S = 60.0

#: The versions of rocksdict, from and below, whose RocksDB is known to read the files of `sst_writer`: those
#: that the tests have run with.
_TESTED = ((0, 3, 29), (0, 3, 30))

#: A list of keys is split over the cores in parts of at least this size.
_PART_KEYS_MIN = 2_048

#: The beginnings of RocksDB's messages, and what they mean.
_CAUSES = (
    ("IO error: lock hold by current process", "the last-value store is already open in this process"),
    ("IO error: While lock file", "the last-value store is open in another process"),
    ("IO error: No space left", "the disk of the last-value store is full"),
    ("Corruption", "the last-value store is damaged"),
    ("IO error", "the last-value store cannot be read or written"),
)

REBUILT = "nothing: the store is rebuilt from the log"


class StoreUnusable(KeyfoldError):
    """A last-value store cannot be used: another identity or version, damage, a lock, a failed disk.

    An internal error: the caller then rebuilds the store in a new directory. Users do not see it.
    """


def unusable(directory: Path, error: Exception) -> StoreUnusable:
    message = str(error)
    what = next((what for start, what in _CAUSES if message.startswith(start)), "the last-value store failed")
    if too_many_files(message):
        what = "the process has too many open files"
    return StoreUnusable(what, path=directory, found=message, remedy=REBUILT)


def too_many_files(message: str) -> OSError | None:
    """The error of the system if a store failed because too many files are open. It is then not damaged."""
    # The text of EMFILE is the beginning of that of ENFILE.
    found = (number for number in (errno.ENFILE, errno.EMFILE) if os.strerror(number) in message)
    return next((OSError(number, os.strerror(number)) for number in found), None)


#: RocksDB's level 0 compaction trigger while the store is written to, and while it is only read.
FILES_OF_WRITTEN = 4
FILES_OF_READ = 2


def open_files_max() -> int:
    """The maximum number of open files of one database: an eighth of the process limit, at most 256."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_OPEN_FILES_MIN, min(_OPEN_FILES_MAX, soft // _OPEN_FILES_SHARE))


def database_options() -> Options:
    """Files are mapped, uncompressed and not cached, with all checks on and small logs.

    With a million keys of 116 bytes, lookups of lists of keys were 1.7 times as fast as with lz4 and a block
    cache of 32 MiB, and lookups of single keys took a tenth of the time (the cache was too small for the
    filter of a large file). No cache memory is used; the files are 1.7 times as large.
    """
    blocks = BlockBasedOptions()
    blocks.disable_cache()
    blocks.set_bloom_filter(10, False)
    blocks.set_block_size(BLOCK_BYTES)
    blocks.set_block_restart_interval(4)
    blocks.set_format_version(6)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(blocks)
    options.set_compression_type(DBCompressionType.none())
    options.set_allow_mmap_reads(True)
    options.set_level_zero_file_num_compaction_trigger(FILES_OF_READ)
    options.set_paranoid_checks(True)
    options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
    options.set_max_write_buffer_number(2)
    options.set_max_open_files(open_files_max())
    options.set_max_file_opening_threads(_OPENING_THREADS)
    options.set_bytes_per_sync(1 << 20)
    options.set_max_manifest_file_size(_MANIFEST_BYTES_MAX)
    options.set_manifest_preallocation_size(64 << 10)
    options.set_max_log_file_size(_LOG_BYTES_MAX)
    options.set_keep_log_file_num(2)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options


#: Whether RocksDB was used in this process, or in the one that it was forked from.
_used: Literal["never", "here", "before the fork"] = "never"


def forbid_after_fork() -> None:
    """Called in a forked child. RocksDB has one thread pool per process and does not know that its threads
    are gone.
    """
    global _used
    _used = "never" if _used == "never" else "before the fork"


def open_database(directory: Path, options: Options) -> Rdict:
    """Open a database that verifies checksums and has no write-ahead log.

    Raises:
        StoreUnusable: The database is locked or damaged, or cannot be written.
        ConfigError: The process was forked from one that had used RocksDB.
    """
    global _used
    if _used == "before the fork":
        raise ConfigError(
            "RocksDB cannot be used in a process forked from one that used it.",
            path=directory,
            expected="a process that was not forked: RocksDB's threads do not survive a fork",
            found="a forked process",
            remedy='start it with multiprocessing.get_context("spawn"), or read with mode="r"',
        )  # fmt: skip
    _used = "here"
    writing = WriteOptions()
    # A property, although the stub declares a method.
    writing.disable_wal = True  # type: ignore[method-assign, assignment]
    try:
        db = Rdict(str(directory), options, {"default": options})
        db.set_read_options(_read_options())
        db.set_write_options(writing)
    except Exception as error:
        raise unusable(directory, error) from error
    return db


def _read_options() -> ReadOptions:
    reading = ReadOptions()
    reading.set_verify_checksums(True)
    return reading


def moving_ingestion() -> IngestExternalFileOptions:
    """Ingest the file by a hard link instead of a copy."""
    moving = IngestExternalFileOptions()
    moving.set_move_files(True)
    return moving


def close_database(db: Rdict, directory: Path) -> None:
    """Close once the calls of other threads have returned. Raises `StoreUnusable`."""
    deadline = time.monotonic() + _CLOSE_WAIT_S
    while not _closed(db, directory, last=time.monotonic() > deadline):
        time.sleep(0.001)


def _closed(db: Rdict, directory: Path, *, last: bool) -> bool:
    try:
        db.close()
    except DbClosedError:
        return True
    except RuntimeError as error:  # "Already borrowed"
        if last:
            raise unusable(directory, error) from error
        return False
    except Exception as error:
        raise unusable(directory, error) from error
    return True


def takes_sorted_files(version: str) -> bool:
    """Whether this version of rocksdict is one that was tested with the files of `sst_writer`."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)$", version)
    return found is not None and _TESTED[0] <= tuple(int(part) for part in found.groups()) < _TESTED[1]


def get_many(db: Rdict, keys: list[bytes]) -> list[bytes | None]:
    """The values of `keys`. Large lists use all cores. Raises what rocksdict raises."""
    parts = max(1, min(CORES, len(keys) // _PART_KEYS_MIN))
    size = -(-len(keys) // parts)
    get = cast(Any, db.get)
    others = [_pool().submit(get, keys[size * n : size * (n + 1)]) for n in range(1, parts)]
    values: list[bytes | None] = get(keys[:size])
    for other in others:
        values += other.result()
    return values


#: The cores that this process may use.
CORES = len(os.sched_getaffinity(0))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Shared by all stores of the process. Lookups of lists of keys release the GIL."""
    return ThreadPoolExecutor(max(1, CORES - 1), thread_name_prefix="keyfold-get")


# Threads do not survive a fork.
os.register_at_fork(after_in_child=_pool.cache_clear)


class Cursor:
    """One RocksDB iterator over the database as of its creation. Each read moves it.

    Several readers, in any threads, can share a cursor: each read seeks first.

    Args:
        key_skip, value_skip: The number of leading bytes to strip from the keys and values of a run.
    """

    def __init__(self, db: Rdict, directory: Path, *, key_skip: int, value_skip: int) -> None:
        self._directory = directory
        self._key_skip = key_skip
        self._value_skip = value_skip
        self._moving = threading.Lock()
        try:
            self._iterator: RdictIter | None = db.iter(_read_options())
        except Exception as error:
            raise unusable(directory, error) from error

    def value(self, key: bytes) -> bytes | None:
        with self._moving:
            iterator = self._moved(key)
            found: bytes | None = iterator.value() if iterator.key() == key else None
            return found

    def run(self, start: bytes, end: bytes, rows_max: int) -> tuple[list[tuple[bytes, bytes]], bytes | None]:
        """Up to `rows_max` rows with `start` <= key < `end`, and the next key; None after the last row."""
        rows: list[tuple[bytes, bytes]] = []
        key_skip, value_skip = self._key_skip, self._value_skip
        with self._moving:
            iterator = self._moved(start)
            key, value, forward = iterator.key, iterator.value, iterator.next
            at = key()
            while at is not None and at < end and len(rows) < rows_max:
                rows.append((at[key_skip:], value()[value_skip:]))
                forward()
                at = key()
            if at is None:
                self._check(iterator)
            return rows, at if at is not None and at < end else None

    def close(self) -> None:
        with self._moving:
            self._iterator = None

    def _moved(self, key: bytes) -> RdictIter:
        iterator = self._iterator
        if iterator is None:
            raise closed("iterator")
        iterator.seek(key)
        if not iterator.valid():
            self._check(iterator)
        return iterator

    def _check(self, iterator: RdictIter) -> None:
        """An iterator without a position is at the end, or has failed."""
        try:
            iterator.status()
        except Exception as error:
            raise unusable(self._directory, error) from error
