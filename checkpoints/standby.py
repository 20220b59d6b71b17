"""A warm standby: follows a changelog that another process writes, and takes over when that process dies.

It reads the durable commits, as every reader does, and keeps last-value stores of its own up to date. The
writer's lock tells whether the writer lives: the kernel releases it with the process. A standby tries the
lock only in order to keep it, so it never blocks a writer that is starting. If there are several standbys,
one gets the lock and the others continue. Then it opens the changelog as usual: it claims the next epoch and
recovers. Its stores move to the location of a writer's stores, and missing records are read from the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from keyfold.checkpoints import engine as engines
from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.engine import Engine
from keyfold.checkpoints.lastvalues.directories import StandbyStoreDirs
from keyfold.checkpoints.lastvalues.updater import StateUpdater
from keyfold.checkpoints.log.processes import OwnProcess
from keyfold.checkpoints.log.reader_marks import ViewLock, now_ms
from keyfold.checkpoints.log.recovery import View, lock_of_writer, open_writer, refusal
from keyfold.checkpoints.manifest.identity import ChangelogMeta, read_identity
from keyfold.checkpoints.manifest.state import State
from keyfold.statestore import arguments
from keyfold.statestore.closing import Closing
from keyfold.statestore.errors import ConfigError, KeyfoldError, WriterFenced, storage_errors
from keyfold.statestore.files import LOCAL, Files, OpenFile
from keyfold.statestore.paths import AnyPath
from keyfold.statestore.remote_files import writable

log = logging.getLogger("keyfold")

#: Interval between looks at the manifest. New commits are applied together.
_POLL_SECONDS: Final = 0.05
_LINGER_SECONDS: Final = 0.1
#: Interval between attempts to take the writer's lock.
_LOOK_SECONDS: Final = 0.02
#: Delay after reading the manifest failed.
_REST_SECONDS: Final = 1.0


class Standby(Closing):
    """Follows the changelog at `path` and is ready to become its writer. A context manager.

        with Standby("var/counts") as standby:
            log = standby.take_over()

    Args:
        files, clock_ms: for tests.

    Raises:
        NotAChangelog, UnsupportedFormat, Damaged: see `Changelog.open`.
        ConfigError: it is a snapshot, which has no writer.
        StorageFailed: the changelog's directory cannot hold the standby's own last values.
    """

    def __init__(self, path: AnyPath, *, files: Files = LOCAL, clock_ms: Callable[[], int] = now_ms) -> None:
        self.path = writable(path, files)
        self._process = OwnProcess(self.path)
        self._files = files
        self._clock_ms = clock_ms
        if read_identity(files, self.path).snapshot:
            raise ConfigError(
                "A snapshot has no writer, so a standby cannot follow it.", path=self.path,
                expected="a changelog", found="a snapshot",
                remedy="create a changelog from it with Changelog.clone(snapshot, path)",
            )  # fmt: skip
        self._ended = threading.Event()
        #: held while the standby becomes the writer, or closes
        self._turning = threading.Lock()
        self._followed = _Followed(files, self.path)
        try:
            self._place = StandbyStoreDirs(files, self.path)
        except OSError:
            self._followed.close()
            with storage_errors(
                "A standby cannot write its last values here.", self.path, expected="a writable directory",
                remedy="free or repair the disk, or grant this user the right to write there",
            ):  # fmt: skip
                raise
        try:
            self._updater = StateUpdater(
                self._followed, self._place, eager=True, linger_seconds=_LINGER_SECONDS
            )
            self._thread = threading.Thread(target=self._follow, name="keyfold-standby", daemon=True)
            self._thread.start()
        except BaseException:
            self._place.close()
            self._followed.close()
            raise

    def __repr__(self) -> str:
        if self._ended.is_set() or not self._process.is_this():
            return f"<Standby of {str(self.path)!r}, ended>"
        lag = sum(self._updater.lag().values())
        return f"<Standby of {str(self.path)!r}, {lag} records behind>"

    def lag(self) -> dict[int, int]:
        """Partition → number of records by which its last values lag the newest durable commit.

        Raises:
            Damaged: the manifest cannot be read.
        """
        self._check_open()
        self._followed.refresh()
        return self._updater.lag()

    def take_over(self, *, timeout: float | None = None, steal: bool = False) -> Changelog:
        """Wait until the writer has died or closed the changelog, then become the writer.

        The last values are complete when this returns: they hold everything that was ever acknowledged. The
        lock is not tried before they have caught up with the current commit once, so that of two standbys the
        warm one takes over. This standby has ended then.

        Args:
            timeout: in seconds; None waits for ever.
            steal: do not wait: fence a writer that hangs.

        Raises:
            ChangelogLocked: the writer was still alive after `timeout` seconds.
            ConfigError: this standby is closed or has taken over already, or an argument is invalid.
            Damaged, StorageFailed: as for `Changelog.open`.
        """
        arguments.flag("steal", steal)
        until = None if timeout is None else time.monotonic() + arguments.seconds("timeout", timeout)
        self._check_open()
        self._followed.refresh()
        target = self._followed.state.ends
        while not self._is_warm(target):
            self._check_time(until)
        while True:
            with self._turning:
                self._check_open()
                lock = self._try_lock(steal)
                if lock is not None:
                    return self._become_writer(lock)
            self._check_time(until)
            self._ended.wait(_LOOK_SECONDS)

    def close(self) -> None:
        """Stop following, and remove the standby's stores. A changelog that it has taken over remains open.
        Does nothing in a forked process.
        """
        if not self._process.is_this():
            return
        with self._turning:
            if not self._ended.is_set():
                self._stop_following()
                self._updater.close()
                self._followed.close()
                self._place.close()

    # -- waiting -----------------------------------------------------------------------------------

    def _is_warm(self, target: tuple[int, ...]) -> bool:
        try:
            return self._updater.wait(target, _LOOK_SECONDS)
        except WriterFenced:
            self._check_open()
            raise

    def _try_lock(self, steal: bool) -> OpenFile | None:
        with storage_errors(
            "The writer's lock cannot be accessed.", self.path, expected="the directory of a changelog",
            remedy="put the changelog back, or follow another one",
        ):  # fmt: skip
            return lock_of_writer(self._files, self.path, steal=steal)

    def _check_time(self, until: float | None) -> None:
        if until is not None and time.monotonic() >= until:
            raise refusal(self._files, self.path)

    def _check_open(self) -> None:
        self._process.check()
        if self._ended.is_set():
            raise ConfigError(
                "This standby has ended: it was closed, or has taken over.", path=self.path,
                remedy="create another standby",
            )  # fmt: skip

    # -- taking over -------------------------------------------------------------------------------

    def _become_writer(self, lock: OpenFile) -> Changelog:
        """Following continues while the manifest is recovered, and also if that fails."""
        engine = engines.install(self.path, lambda: self._engine(lock))
        try:
            self._followed.close()
            self._place.close()
            engine.catch_up()
        except BaseException:
            engines.release(engine)
            raise
        return Changelog(self.path, engine, None, None)

    def _engine(self, lock: OpenFile) -> Engine:
        writer = open_writer(self._files, self.path, None, self._clock_ms, steal=False, lock=lock)
        try:
            self._stop_following()
            if writer.identity.uuid != self._followed.identity.uuid:
                self._updater.close()
                return Engine(writer)
            self._updater.hand_over(writer)
            return Engine(writer, self._updater)
        except BaseException:
            with ExitStack() as ended:
                for end in (writer, self._place, self._followed, self._updater):
                    ended.callback(end.close)
            raise

    def _stop_following(self) -> None:
        self._ended.set()
        self._thread.join()

    # -- the thread --------------------------------------------------------------------------------

    def _follow(self) -> None:
        rest = _POLL_SECONDS
        while not self._ended.wait(rest):
            try:
                self._followed.refresh()
                rest = _POLL_SECONDS
            except (KeyfoldError, OSError) as e:
                if rest == _POLL_SECONDS:
                    log.warning("changelog %s: a standby cannot follow: %s", self.path, e)
                rest = _REST_SECONDS


class _Followed:
    """The newest durable state, with a reader's mark on the files of the states in use."""

    def __init__(self, files: Files, root: Path) -> None:
        self.files = files
        self.root = root
        self._mark = ViewLock(files, root)
        try:
            self._view = View(files, root)
            self._mark.record(self._view.state.seq)
        except BaseException:
            self._mark.close()
            raise
        self._changing = threading.Lock()
        self._pinned = 0
        self._listeners: list[Callable[[State], None]] = []

    @property
    def identity(self) -> ChangelogMeta:
        return self._view.identity

    @property
    def state(self) -> State:
        return self._view.state

    def on_change(self, listener: Callable[[State], None]) -> None:
        self._listeners.append(listener)

    @contextmanager
    def pin(self) -> Iterator[State]:
        """While a caller is inside, the mark remains at the oldest state in use."""
        with self._changing:
            self._pinned += 1
            state = self._view.state
        try:
            yield state
        finally:
            with self._changing:
                self._pinned -= 1
                self._record()

    def refresh(self) -> None:
        """Load the newest durable commit."""
        with self._changing:
            before = self._view.state
            state = self._view.refresh()
            if state is before:
                return
            self._record()
        for listener in self._listeners:
            listener(state)

    def close(self) -> None:
        # If the mark cannot be removed now, the next call removes it.
        with suppress(OSError):
            self._mark.close()

    def _record(self) -> None:
        if not self._pinned:
            self._mark.record(self._view.state.seq)
