"""What RocksDB and rocksdict need: options, errors, a cursor that tells failure from end, a close that waits.

Traps seen in rocksdict 0.3.29, each with a test in `tests/unit/test_lastvalues*.py`:

- `raw_mode` always: the other mode unpickles values. On reopen the options are given for the column family
  too, or those that were saved win.
- `items()` ends in silence at a corrupt block. A `Cursor` asks for the `status()` wherever it stops.
- `Snapshot.iter()` also gives what was written after the snapshot. An iterator alone keeps the moment it was
  made at, so a `Cursor` is one, whatever it is used for.
- `set_iterate_upper_bound` points into memory that is freed with the `ReadOptions`, and
  `set_iterate_lower_bound` sets the upper bound: a `Cursor` seeks to its start and compares with its end.
- An iterator keeps the database open, and locked, after `close()`: cursors are closed before it.
- `close()` fails while another thread is inside a call: `close_database` waits.
- Nearly every error is a plain `Exception`: the beginning of the message says which.
"""

from __future__ import annotations

import errno
import functools
import os
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
#: RocksDB starts 16 at every opening, which took a third of the time of opening a small store.
_OPENING_THREADS = 2
_LOG_BYTES_MAX = 1 << 20
_MANIFEST_BYTES_MAX = 4 << 20
_CLOSE_WAIT_S = 60.0

#: A list of keys is split over the cores in parts of at least so many.
_PART_KEYS_MIN = 2_048

#: How RocksDB's messages begin, and what they mean.
_CAUSES = (
    ("IO error: lock hold by current process", "the last-value store is open in this process already"),
    ("IO error: While lock file", "the last-value store is open in another process"),
    ("IO error: No space left", "the disk of the last-value store is full"),
    ("Corruption", "the last-value store is damaged"),
    ("IO error", "the last-value store cannot be read or written"),
)

REBUILT = "nothing: the store is built again from the log"


class StoreUnusable(KeyfoldError):
    """A last-value store cannot be used: another identity or version, damage, a lock, a failed disk.

    For the code above, which then builds the store again in a new directory; users do not get to see it.
    """


def unusable(directory: Path, error: Exception) -> StoreUnusable:
    message = str(error)
    what = next((what for start, what in _CAUSES if message.startswith(start)), "the last-value store failed")
    if is_too_many_files(message):
        what = "the process has as many files open as it may"
    return StoreUnusable(what, path=directory, found=message, remedy=REBUILT)


def is_too_many_files(message: str) -> bool:
    """Whether a store failed because too many files are open; it is not damaged then."""
    return os.strerror(errno.EMFILE) in message or os.strerror(errno.ENFILE) in message


#: So many files that may hold any key are put together into one: where a store is written to, and where it
#: is only read.
FILES_OF_WRITTEN = 4
FILES_OF_READ = 2


def open_files_max() -> int:
    """How many files of one database are open: an eighth of what the process may have, 256 at most."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_OPEN_FILES_MIN, min(_OPEN_FILES_MAX, soft // _OPEN_FILES_SHARE))


def database_options() -> Options:
    """Files are mapped, not compressed, and not cached; checks on, small logs.

    With a million keys of 116 bytes, lists of keys were found 1.7 times as fast as through a block cache of
    32 MiB over lz4, single keys in a tenth of the time (the cache was too small for the filter of a large
    file), without that memory; the files are 1.7 times as large. The page cache bounds itself.
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
    """Called in a child. The pool of threads is one for a whole process, and RocksDB does not know that they
    are gone.
    """
    global _used
    _used = "never" if _used == "never" else "before the fork"


def open_database(directory: Path, options: Options) -> Rdict:
    """Checksums verified, no write-ahead log.

    Raises:
        StoreUnusable: it is locked or damaged, or cannot be written.
        ConfigError: the process was forked from one that had used RocksDB.
    """
    global _used
    if _used == "before the fork":
        raise ConfigError(
            "Last values cannot be used in a process that was forked from one that used them.",
            path=directory,
            expected="a process with threads of RocksDB, which do not survive a fork", found="a fork",
            remedy='start it by multiprocessing.get_context("spawn"), or read with mode="r"',
        )  # fmt: skip
    _used = "here"
    writing = WriteOptions()
    # A property, whatever the stub says.
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
    """Take the file over by a hard link instead of a copy."""
    moving = IngestExternalFileOptions()
    moving.set_move_files(True)
    return moving


def close_database(db: Rdict, directory: Path) -> None:
    """Close, once other threads are out of their calls. Raises `StoreUnusable`."""
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


def get_many(db: Rdict, keys: list[bytes]) -> list[bytes | None]:
    """The values of `keys`; large lists on all cores. Raises what rocksdict raises."""
    parts = max(1, min(CORES, len(keys) // _PART_KEYS_MIN))
    size = -(-len(keys) // parts)
    get = cast(Any, db.get)
    others = [_pool().submit(get, keys[size * n : size * (n + 1)]) for n in range(1, parts)]
    values: list[bytes | None] = get(keys[:size])
    for other in others:
        values += other.result()
    return values


#: that this process may run on
CORES = len(os.sched_getaffinity(0))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Shared by all stores of the process. A list of keys is looked up without holding the interpreter."""
    return ThreadPoolExecutor(max(1, CORES - 1), thread_name_prefix="keyfold-get")


# Threads do not survive a fork.
os.register_at_fork(after_in_child=_pool.cache_clear)


class Cursor:
    """One RocksDB iterator: the database as it was when it was made, moved to wherever the next read is.

    Several readers, also in several threads, can share one: each read seeks first.

    Args:
        key_skip, value_skip: bytes to leave out in front of the keys and values of a run.
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
        """Up to `rows_max` rows with `start` <= key < `end`, and the key to go on at: None after the last."""
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
        """An iterator that stands nowhere is at the end, or has failed."""
        try:
            iterator.status()
        except Exception as error:
            raise unusable(self._directory, error) from error
