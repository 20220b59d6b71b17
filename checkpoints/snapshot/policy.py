"""Takes a snapshot of a changelog in the background when one is due, and keeps the newest two.

A snapshot is due after `snapshot.commits` commits, or when the bytes that the log has gained since the last
one exceed `snapshot.dirty.ratio` of these bytes and the last snapshot together. This is Raft's rule with
u = 1 / ratio - 1 (Ongaro's dissertation, section 5.1.3), in the terms of `min.cleanable.dirty.ratio`. The
cleaner's thread only checks whether one is due. A separate thread takes it, so that neither commits nor
passes wait for a slow destination.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from keyfold.checkpoints.log.writer import Writer
from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.checkpoints.manifest.state import State
from keyfold.checkpoints.snapshot.repository import KeptSnapshot, clear, kept_snapshots
from keyfold.checkpoints.snapshot.snapshot import Location, take
from keyfold.statestore import filenames
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.remote_files import located

log = logging.getLogger("keyfold")

_BACKOFF_SECONDS: Final = 15.0
_BACKOFF_SECONDS_MAX: Final = 3600.0
#: A remote destination that does not respond must not prevent a changelog from being closed.
_CLOSE_SECONDS: Final = 10.0


class _Stopped(Exception):
    """The changelog is being closed, or another process has become the writer."""


class SnapshotPolicy:
    """The snapshots of one writer. The cleaner's thread calls `look` repeatedly.

    Attributes:
        taken, failed: number of snapshots taken, and of failed attempts, since the changelog was opened.
        failure: why the last attempt failed; empty if it did not.
    """

    def __init__(self, writer: Writer) -> None:
        self.taken = 0
        self.failed = 0
        self.failure = ""
        self._writer = writer
        #: the changelog that `_last` is about; None before the first look
        self._dest: str | None = None
        self._last: KeptSnapshot | None = None
        self._rest_seconds = _BACKOFF_SECONDS
        self._retry_at = 0.0
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def last_commit(self) -> int:
        """The commit of the newest snapshot, 0 if none is known."""
        return 0 if self._last is None else self._last.commit

    def look(self) -> None:
        """Start to take a snapshot if one is due. Returns at once."""
        with self._lock:
            if self._closing.is_set() or time.monotonic() < self._retry_at or not self._may_be_due():
                return
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self.run, name="keyfold-snapshot", daemon=True)
                self._thread.start()

    def run(self) -> None:
        """Take a snapshot if one is due. Does not raise: failures are logged and retried later."""
        try:
            self._run()
        except _Stopped:
            return
        except Exception as e:
            self.failed += 1
            self.failure = str(e)
            self._retry_at = time.monotonic() + self._rest_seconds
            root, rest = self._writer.root, self._rest_seconds
            log.error("changelog %s: the snapshot failed, next attempt in %.0f s: %s", root, rest, e)
            self._rest_seconds = min(2 * rest, _BACKOFF_SECONDS_MAX)
        else:
            self.failure = ""
            self._rest_seconds = _BACKOFF_SECONDS

    def close(self) -> None:
        """Stop a running snapshot at the next piece of a file."""
        with self._lock:
            self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    # -- is one due --------------------------------------------------------------------------------

    def _may_be_due(self) -> bool:
        config = self._writer.identity.config
        if not config.snapshot_dest or self._writer.fenced:
            return False
        return self._dest != config.snapshot_dest or self._is_due(self._writer.state)

    def _is_due(self, state: State) -> bool:
        if not state.commits:
            return False
        last, number = self._last, state.commits[-1].number
        if last is None:
            return True
        if number <= last.commit:
            return False
        if last.rollbacks != state.partitions[0].generation:
            return True
        config = self._writer.identity.config
        if 0 < config.snapshot_commits <= number - last.commit:
            return True
        behind = sum(_bytes_behind(p, end) for p, end in zip(state.partitions, last.ends, strict=True))
        ratio = config.snapshot_dirty_ratio
        return behind * (1 - ratio) > ratio * last.bytes

    # -- taking one --------------------------------------------------------------------------------

    def _run(self) -> None:
        writer, uuid = self._writer, self._writer.identity.uuid
        dest = writer.identity.config.snapshot_dest
        place = Location(*located(dest, None, writer.files))
        if dest != self._dest:
            self._last, self._dest = None, None
            self._last = _newest_of(place, uuid)
            self._dest = dest
        self._check()
        with writer.pin() as state:
            if self._is_due(state):
                commit = state.commits[-1]
                to = Location(place.files, filenames.kept_snapshot(place.root, commit.number))
                done = take(
                    Location(writer.files, writer.root), writer.identity, state, commit, to, self._check
                )
                self._last = _newest_of(place, uuid)
                self.taken += 1
                log.info(
                    "changelog %s: snapshot of commit %d, %d bytes", writer.root, done.commit, done.bytes
                )
        self._check()
        clear(place, uuid)

    def _check(self) -> None:
        writer = self._writer
        if self._closing.is_set() or not writer.ownership.is_proven():
            raise _Stopped


def _newest_of(place: Location, uuid: str) -> KeptSnapshot | None:
    """The newest snapshot of this changelog. Raises `ConfigError` if another changelog uses the folder."""
    kept = kept_snapshots(place)
    foreign = [s.path for s in kept if s.uuid != uuid]
    if foreign:
        raise ConfigError(
            "The folder holds snapshots of another changelog.", path=place.root,
            expected="a folder for this changelog alone", found=foreign[0],
            remedy="set snapshot.dest to another folder",
        )  # fmt: skip
    return kept[-1] if kept else None


def _bytes_behind(p: PartitionState, end: int) -> int:
    """Approximate bytes of a partition after an offset."""
    later = [s for s in p.segments if s.next > end]
    return sum(s.size * (s.next - max(s.base, end)) // max(1, s.next - s.base) for s in later)
