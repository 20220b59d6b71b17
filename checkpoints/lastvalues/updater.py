"""Applies committed records to the last-value stores on a background thread: those of a writer, or those of a
standby, which follows a writer in another process.

The stores lag the log. A reader of a key waits until the store of its partition has reached the current
commit. The backlog is read again from the log rather than held in memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

from keyfold.checkpoints.lastvalues.current import CurrentValues
from keyfold.checkpoints.lastvalues.directories import StoreDirs, WriterStoreDirs
from keyfold.checkpoints.lastvalues.stores import Followed, KeptStores, files_told, out_of_files
from keyfold.checkpoints.log.writer import Writer
from keyfold.checkpoints.manifest.state import State
from keyfold.statestore.errors import Damaged, KeyfoldError, StorageFailed, WriterFenced
from keyfold.statestore.kv.api import ReadOnlyStore, StoreClosed
from keyfold.statestore.rocksdb.snapshot import RecordCursor
from keyfold.statestore.rocksdb.store import LastValues, StoreUnusable

log = logging.getLogger("keyfold")

T = TypeVar("T")

#: Small commits are let pile up for so long before they are applied together.
_LINGER_SECONDS: Final = 0.5
#: After a failure nothing is tried again for so long, unless somebody waits.
_REST_SECONDS: Final = 5.0
#: Nobody waits for longer without a look of its own at what it waits for.
_LOOK_SECONDS: Final = 1.0
_READS_MAX: Final = 3


class StateUpdater:
    """The last values of all partitions. One thread applies; who reads waits until it has reached the present
    commit.

    Without a `compact` policy nobody is expected to ask for last values, so they are only followed once
    somebody does.

    Args:
        place: where the stores are.
        eager: follow although nobody has asked for last values yet.
        linger_seconds: small commits pile up for so long before they are applied together.
    """

    def __init__(
        self, followed: Followed, place: StoreDirs, *, eager: bool, linger_seconds: float = _LINGER_SECONDS
    ) -> None:
        self._followed = followed
        self._kept = KeptStores(followed, place)
        self._linger_seconds = linger_seconds
        self._eager = eager
        #: partitions that somebody waits for; the offsets that all must reach because somebody waits for all
        self._wanted: set[int] = set()
        self._wanted_ends: tuple[int, ...] | None = None
        #: those who wait for all partitions as of one commit
        self._asked: list[Future[RecordCursor]] = []
        self._behind_since: float | None = None
        #: whether the stores are to be removed, because a read has failed
        self._distrusted = False
        #: what keeps the stores from going on, until they have, and how often they could not
        self._failure: BaseException | None = None
        self._failures = 0
        self._retry_at = 0.0
        self._stop = False
        self._changed = threading.Condition()
        #: held while stores are brought to a state
        self._applying = threading.Lock()
        #: whether all stores are at one and the same state
        self._whole = False
        self._thread: threading.Thread | None = None
        self._values = CurrentValues(self, len(followed.state.partitions))
        followed.on_change(self._notice)
        if eager and any(followed.state.ends):
            self._notice(followed.state)

    @classmethod
    def of_writer(cls, writer: Writer) -> StateUpdater:
        """The updater of a writer, which goes on with the stores of the writer before."""
        eager = "compact" in writer.identity.config.cleanup_policy
        return cls(writer, WriterStoreDirs(writer), eager=eager)

    # -- for readers -------------------------------------------------------------------------------

    def current(self) -> ReadOnlyStore:
        """The last values, each read as of the commit that is current at that read, or a later one.

        Reads raise:
            Damaged: the log cannot be read. StorageFailed: the stores cannot be written.
        """
        return self._values

    def reach(self, partition: int) -> LastValues:
        """The store of a partition once it has reached the present commit. Raises as reads of `current`."""
        p = self._followed.state.partitions[partition]
        below = p.end
        store = self._kept.ready(partition, p, below)
        if store is not None:
            return store
        with self._changed:
            self._eager, failures = True, self._failures
            while store is None:
                self._check(failures)
                self._wanted.add(partition)
                self._start()
                self._changed.wait(_LOOK_SECONDS)
                store = self._kept.ready(partition, self._followed.state.partitions[partition], below)
        return store

    def wait(self, target: tuple[int, ...], seconds: float) -> bool:
        """Whether the stores have reached these offsets; waits that long for it. Raises as reads of
        `current`.
        """
        if self._eager and self._reached(target):
            return True
        until = time.monotonic() + seconds
        with self._changed:
            self._eager, failures = True, self._failures
            while not self._reached(target):
                self._check(failures)
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._want_all()
                self._changed.wait(min(left, _LOOK_SECONDS))
        return True

    def catch_up(self) -> None:
        """Wait until all stores have reached the commit that is current now. Raises as reads of `current`."""
        target = self._followed.state.ends
        while not self.wait(target, _LOOK_SECONDS):
            pass

    def whole_cursor(self) -> RecordCursor:
        """All partitions as of one commit: the one that is current at this call, or a later one. Raises as
        reads of `current`.
        """
        cursor = self._cursor_now()
        if cursor is not None:
            return cursor
        asked: Future[RecordCursor] = Future()
        with self._changed:
            self._eager, failures = True, self._failures
            self._asked.append(asked)
            try:
                while not asked.done():
                    self._check(failures)
                    self._want_all()
                    self._changed.wait(_LOOK_SECONDS)
            finally:
                self._asked.remove(asked)
        return asked.result()

    def _cursor_now(self) -> RecordCursor | None:
        """Over the stores, if all of them are at the commit that is current at this call."""
        target = self._followed.state.ends
        if not self._applying.acquire(blocking=False):
            return None
        try:
            database = self._kept.database
            if database is None or not self._whole or self._distrusted or not self._reached(target):
                return None
            return database.cursor()
        finally:
            self._applying.release()

    def read(self, ask: Callable[[], T]) -> T:
        """What `ask` reads of stores that are ready: again where rows were removed meanwhile, and after they
        are built again where they are damaged. Raises `StoreClosed` where the changelog is closed meanwhile.
        """
        kept = self._kept
        for _ in range(_READS_MAX):
            clearings, exhausted = kept.clearings, None
            try:
                found = ask()
                if kept.clearings == clearings:
                    return found
            except StoreClosed as e:
                if self._stop:
                    raise self._closed(StoreClosed) from e
                if kept.clearings == clearings:
                    raise
            except StoreUnusable as e:
                exhausted = out_of_files(e, self._followed.root)
                if exhausted is None:
                    log.warning("changelog %s: cannot read the last values: %s", self._followed.root, str(e))
                    self._await_rebuilt(clearings)
            if exhausted is not None:
                # Out here: the frames of the first error can refer to an iterator that keeps RocksDB's lock.
                raise exhausted
        return ask()

    def _await_rebuilt(self, clearings: int) -> None:
        with self._changed:
            failures = self._failures
            self._distrust(clearings)
            while self._kept.clearings == clearings:
                self._check(failures)
                self._changed.wait(_LOOK_SECONDS)

    @property
    def clearings(self) -> int:
        """Goes up before rows of any store are removed to build them again."""
        return self._kept.clearings

    def distrust(self, error: StoreUnusable, clearings: int) -> KeyfoldError:
        """Have the stores built again, unless they were already since the count was `clearings`; returns the
        error to raise in the middle of a read as of one commit.
        """
        exhausted = out_of_files(error, self._followed.root)
        if exhausted is not None:
            return exhausted
        log.warning("changelog %s: cannot read the last values: %s", self._followed.root, str(error))
        with self._changed:
            self._distrust(clearings)
        kind = Damaged if str(error.found).startswith("Corruption") else StorageFailed
        return kind(
            "The last values cannot be read to the end.", path=error.path, position="a snapshot, or a range",
            expected="blocks that match their checksums", found=error.found,
            remedy="read again: the last values are rebuilt from the log, which is not affected",
        )  # fmt: skip

    def _distrust(self, clearings: int) -> None:
        """The caller holds `_changed`."""
        if self._kept.clearings == clearings:
            self._distrusted = True
            self._start()

    def lag(self) -> dict[int, int]:
        """Partition → how many offsets the store has not applied yet."""
        return {n: self._kept.lag(n, p) for n, p in enumerate(self._followed.state.partitions)}

    def lag_bytes(self) -> int:
        """About how many bytes of the log the stores have not applied yet."""
        state = self._followed.state
        found = 0
        for partition in self._kept.behind(state):
            p = state.partitions[partition]
            found += self._kept.lag(partition, p) * p.bytes // max(1, p.end - p.start)
        return found

    def wait_for_room(self) -> None:
        """Hold a writer back while the stores are more than `store.backlog.bytes` behind."""
        bound = self._followed.identity.config.store_backlog_bytes
        while self._eager and not self._stop and self._failure is None and self.lag_bytes() > bound:
            with self._changed:
                self._want_all()
                self._changed.wait(_LOOK_SECONDS)

    def hand_over(self, writer: Writer) -> None:
        """Go on after `writer`, which has taken over the changelog that was followed, with the same stores
        in the place of a writer's.
        """
        self._halt()
        self._followed, self._linger_seconds = writer, _LINGER_SECONDS
        self._kept.move(writer, WriterStoreDirs(writer))
        self._failure, self._stop = None, False
        writer.on_change(self._notice)
        with self._changed:
            self._start()

    def close(self) -> None:
        self._halt()
        self._kept.close()

    def _halt(self) -> None:
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _check(self, failures: int) -> None:
        """Raises the failure of the stores, if there was one since the count was `failures`: an earlier one
        may be over.
        """
        if self._failure is not None and self._failures > failures:
            raise self._failure
        if self._stop:
            raise self._closed(WriterFenced)

    def _closed(self, kind: type[KeyfoldError]) -> KeyfoldError:
        return kind(
            "The changelog was closed while it was being read.", path=self._followed.root,
            expected="an open changelog", found="a changelog that this process has closed",
            remedy="open it again; close it only when the threads that read it have ended",
        )  # fmt: skip

    def _reached(self, target: tuple[int, ...]) -> bool:
        """Whether all is applied below these offsets, or below the end where a rollback has cut the log."""
        pairs = zip(self._followed.state.partitions, target, strict=True)
        return all(self._kept.ready(n, p, below) is not None for n, (p, below) in enumerate(pairs))

    # -- the thread --------------------------------------------------------------------------------

    def _notice(self, state: State) -> None:
        if self._eager and self._behind_since is None and not self._stop:
            now = time.monotonic()
            if now >= self._retry_at:
                with self._changed:
                    self._behind_since = now
                    self._start()

    def _want_all(self) -> None:
        """Have all stores brought to the commit that is current now, or was when somebody first wanted it.
        The caller holds `_changed`.
        """
        if self._wanted_ends is None:
            self._wanted_ends = self._followed.state.ends
        self._start()

    def _start(self) -> None:
        """Have the thread look at what is to be done. The caller holds `_changed`."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="keyfold-last-values", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    if self._stop:
                        return
                    seconds = self._seconds_left()
                    if seconds is None or seconds > 0:
                        self._changed.wait(seconds)
                        continue
                    wanted, self._wanted = sorted(self._wanted), set()
                    ends, asked = self._wanted_ends, tuple(self._asked)
                    all_of_them = ends is not None or self._seconds_left() == 0
                with self._applying, files_told(self._followed.root):
                    self._go_on(wanted, all_of_them, ends, asked)
                if all_of_them:
                    # What kept the stores from going on before is over.
                    self._failure = None
        except BaseException as e:
            log.error(
                "changelog %s: the updater of the last values stopped: %s",
                self._followed.root,
                type(e).__name__,
            )
            with self._changed:
                self._failure = e
                self._failures += 1
                self._wanted_ends = self._behind_since = None
                self._retry_at = time.monotonic() + _REST_SECONDS
                self._thread = None
                self._changed.notify_all()

    def _seconds_left(self) -> float | None:
        """Until there is something to do; None: until it is told."""
        if self._wanted or self._wanted_ends or self._distrusted:
            return 0
        if self._behind_since is None:
            return None
        return max(0, self._behind_since + self._linger_seconds - time.monotonic())

    def _go_on(
        self,
        wanted: Sequence[int],
        all_of_them: bool,
        ends: tuple[int, ...] | None,
        asked: Sequence[Future[RecordCursor]],
    ) -> None:
        """Bring stores to the present commit: those that are wanted, then the others if it is time to.

        A reader of a single key comes first: after each step the others wait for it. A reader of all
        partitions is served nevertheless. It takes finitely many steps to reach `ends`, and what was
        committed meanwhile is then applied without a pause.

        Args:
            ends: where the stores must be for those who wait for all of them; None where nobody does.
            asked: who gets the stores as of one commit, once they are all there.
        """
        if self._distrusted:
            self._kept.discard()
            self._distrusted = False
        with self._followed.pin() as state:
            self._whole = False
            for _ in self._kept.follow(state, wanted):
                self._tell()
            if all_of_them:
                lacking = [] if ends is None else self._kept.below(state, ends)
                if lacking:
                    for _ in self._kept.follow(state, lacking):
                        self._tell()
                        if self._stop or self._wanted:
                            return
                if self._wanted_ends is ends:
                    self._wanted_ends = None
                for _ in self._kept.follow(state, self._kept.behind(state)):
                    self._tell()
                    if self._stop or (self._wanted and ends is None):
                        return
                self._whole = True
                self._behind_since = None
                self._answer(asked)
            if self._behind_since is None and (self._followed.state is not state or not all_of_them):
                self._behind_since = time.monotonic()
            self._tell()

    def _answer(self, asked: Sequence[Future[RecordCursor]]) -> None:
        """Give the stores as they are now to those who have asked before they were brought here."""
        database = self._kept.database
        for each in asked:
            if database is None or self._distrusted or each.done():
                continue
            try:
                each.set_result(database.cursor())
            except (StoreUnusable, StoreClosed) as e:
                each.set_exception(e)

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
