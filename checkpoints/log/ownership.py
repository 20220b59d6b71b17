"""The writer of a changelog, and how it proves that it is the writer before it acknowledges or deletes
anything.

A process that opens a changelog to write does this, in this order:

1. It makes `manifest/<epoch>.journal` with `O_EXCL`, one epoch above the highest: the **claim**.
2. It reads the journal with the highest epoch below its own that has a whole checkpoint: its **base**.
3. It writes that state as the checkpoint of its own journal, and syncs it.
4. It lists the manifest and finds no claim above its own: the **proof**.

From then on it is the writer: it publishes its head, deletes files and acknowledges batches. It repeats the
proof after the manifest line of every commit and before every deletion. Why this is enough, for a writer X:

- Assume a claim Y above X that X did not see. Then Y claimed after X had listed the manifest. So X's journal,
  with everything X had synced by then, existed before Y read anything. Y takes the highest whole journal
  below its own: the journal of X, or one between them. The claim of that one also came after X's proof, so
  the same holds for it. Everything that X acknowledged, and every file that X committed, is therefore in the
  base of each later writer.
- A claim Y that X saw makes X stop. X has acknowledged and deleted nothing since its last proof. So it does
  not matter if Y's base lacks X's last lines, or holds a line that X never acknowledged.
- So a file of an earlier epoch that X's state does not name is named by no later state, and is read only by
  readers that `reader_marks` knows: names are never used twice, and later states derive from X's journal
  only. X may delete it even if another writer takes over between the proof and the deletion. The same holds
  for the journals below X: a process that could still read one finds a higher claim afterwards, and stops.
- A process that stopped before its proof leaves a journal whose checkpoint may become whole late. It is a
  valid base: it holds everything that was acknowledged before its claim, and its writer acknowledges nothing.

An empty directory proves nothing. So the writer's own journal must be in the list, and path, lock and journal
must still be the directory and the files that the writer has open. A directory that was moved, removed or
created again under the same name is not the one that it writes to.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from keyfold.checkpoints.log.processes import OwnProcess, ProcessLock
from keyfold.checkpoints.manifest.journal import JournalWriter
from keyfold.statestore import filenames
from keyfold.statestore.errors import StorageFailed, WriterFenced, reason
from keyfold.statestore.files import Files, OpenFile

log = logging.getLogger("keyfold")

#: Looking at the claims opens a file. It changes nothing, so it may be retried.
_PATIENCE_SECONDS: Final = 5.0

_MOVED = "the directory was moved, removed or created again under the same name"
_LOCK_GONE = "the lock was lost: another process has taken over, or the lock file was removed"
_JOURNAL_GONE = "its journal was removed"
_REOPEN = "close this changelog and open it again: opening recovers it"
_REPAIR = "free or repair the disk, then " + _REOPEN
_ELSEWHERE = (
    "close this changelog, find out where its directory is now, and open it there. If it was removed, "
    "opening this path to write creates an empty changelog"
)
_EMPTIED = (
    "close this changelog and check whether its files exist. If they do, open it again. If they were "
    "removed, opening this path to write creates an empty changelog; clone a snapshot or put a copy back"
)
_LOOK = "; last_batch(app_id) then returns the last committed batch"

_REMEDIES: Final = {_MOVED: _ELSEWHERE, _LOCK_GONE: _EMPTIED, _JOURNAL_GONE: _EMPTIED}


class Ownership:
    """A writer's right to write. It is lost at the first failed write or sync, or when another writer or
    another directory is found in its place. From then on every check raises.

    Attributes:
        directory: the root directory of the changelog, open.
        exclusive: held while lines are written and while the epoch changes.
    """

    def __init__(self, files: Files, root: Path, lock: OpenFile) -> None:
        """Takes over `lock`, even if it raises `OSError`."""
        self.process = OwnProcess(root)
        self.exclusive = ProcessLock(self.process)
        self._files = files
        self._root = root
        self._lock = lock
        self._epoch = 0
        self._journal: JournalWriter | None = None
        self._fenced: str | None = None
        self._remedy = _REOPEN
        try:
            self.directory = files.open_directory(root)
        except BaseException:
            files.close(lock)
            raise

    def sign(self, epoch: int) -> None:
        """Write the holder into the lock file. Raises `OSError`."""
        self._files.truncate(self._lock, 0)
        self._files.append(self._lock, [json.dumps({"pid": os.getpid(), "epoch": epoch}).encode()])

    def enter(self, epoch: int, journal: JournalWriter) -> None:
        """Make this the writer's epoch and its journal from now on."""
        self._epoch, self._journal = epoch, journal

    def close(self) -> None:
        """Release the lock."""
        self._fenced = self._fenced or "it was closed"
        self._files.close(self._lock)
        self._files.close(self.directory)

    # -- the proof -------------------------------------------------------------------------------------------

    def misplaced(self) -> str | None:
        """Why the path no longer leads to what the writer has open; None if it does."""
        if not self._files.is_in_place(self.directory):
            return _MOVED
        if not self._files.is_in_place(self._lock):
            return _LOCK_GONE
        return None

    def loss(self, epoch: int, journal: JournalWriter) -> str | None:
        """Why the writer with this claim is not, or no longer, the writer; None if it is."""
        epochs = self._epochs()
        if epochs and epochs[-1] > epoch and self._files.is_in_place(self.directory):
            return f"a writer with epoch {epochs[-1]} has taken over"
        missing = epoch not in epochs or not journal.is_in_place()
        return self.misplaced() or (_JOURNAL_GONE if missing else None)

    def _epochs(self) -> list[int]:
        """`journal_epochs`, retried for a while if other threads use up the open files."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return journal_epochs(self._files, self._root)
            except OSError as e:
                if e.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() >= until:
                    raise
            time.sleep(_PATIENCE_SECONDS / 500)

    def prove(self, outcome: str = "") -> None:
        """Raise `WriterFenced` unless this is the writer at this moment, see above.

        Args:
            outcome: what an error says about the data that is being written.
        """
        self.check_usable(outcome)
        if self._lost() is not None:
            # The epoch changes while the writer rolls its journal. Then look again afterwards.
            with self.exclusive:
                reason = self._lost()
                if reason is not None:
                    self.fence(reason)
                self.check_usable(outcome)

    def prove_claim(self, epoch: int, journal: JournalWriter) -> None:
        """The same for a claim that has its checkpoint, before the writer enters it. Called with `exclusive`
        held.
        """
        reason = self.loss(epoch, journal)
        if reason is not None:
            self.fence(reason)
        self.check_usable()

    def is_proven(self) -> bool:
        """Whether this is provably the writer."""
        try:
            self.prove()
        except (WriterFenced, OSError):
            return False
        return True

    def check_place(self, outcome: str = "") -> None:
        """Raise `WriterFenced` unless the path leads to what the writer has open. Takes a few microseconds
        and no lock.
        """
        reason = self.misplaced()
        if reason is not None:
            # The list of claims gives a more specific reason than a lost lock.
            self.fence(self._lost() or reason)
        self.check_usable(outcome)

    def is_placed(self) -> bool:
        """Whether the path leads to what the writer has open. If not, the writer is fenced."""
        with contextlib.suppress(WriterFenced):
            self.check_place()
            return True
        return self.misplaced() is None

    def _lost(self) -> str | None:
        assert self._journal is not None
        return self.loss(self._epoch, self._journal)

    # -- fencing ---------------------------------------------------------------------------------------------

    @property
    def fenced(self) -> bool:
        """Whether every further write is refused."""
        return self._fenced is not None

    def fence(self, reason: str, remedy: str | None = None) -> None:
        """Refuse every further write. `remedy` is shown in errors; by default it follows from the reason."""
        if self._fenced is None:
            self._fenced = reason
            self._remedy = remedy or _REMEDIES.get(reason, _REOPEN)
            log.error("changelog %s: writer of epoch %d is fenced: %s", self._root, self._epoch, reason)

    def check_usable(self, outcome: str = "") -> None:
        """Raise `WriterFenced` if the writer is fenced."""
        if self._fenced is not None:
            raise WriterFenced(
                f"This writer is fenced and cannot write any more{outcome and '; '}{outcome}.",
                path=self._root,
                expected="a writer without failures, in its own directory", found=self._fenced,
                remedy=self._remedy + (_LOOK if outcome.startswith("whether") else ""),
            )  # fmt: skip

    @contextlib.contextmanager
    def failures(self, what: str, outcome: str = "") -> Iterator[None]:
        """Fence the writer if writing `what` fails. Raises `StorageFailed`, or `WriterFenced` if the path
        does not lead to what the writer has open.
        """
        try:
            yield
        except OSError as e:
            with contextlib.suppress(OSError):
                if self.misplaced() is not None:
                    # The path leads elsewhere. That is not the fault of the disk.
                    self.check_place(outcome)
            self.fence(f"writing {what} failed: {e.strerror or e}", _REPAIR)
            raise StorageFailed(
                f"Writing {what} failed{outcome and '; '}{outcome}.", path=e.filename or self._root,
                expected="a write and an fsync that succeed", found=reason(e),
                remedy="free or repair the disk, then open the changelog again"
                + (_LOOK if outcome.startswith("whether") else "; earlier commits are safe"),
            ) from e  # fmt: skip


def highest_epoch(files: Files, root: Path) -> int:
    """The highest claimed epoch, 0 if none is claimed."""
    return max(journal_epochs(files, root), default=0)


def journal_epochs(files: Files, root: Path) -> list[int]:
    """The epochs of all journals, ascending."""
    found = (filenames.journal_epoch(name) for name in files.list_directory(root / filenames.MANIFEST))
    return sorted(epoch for epoch in found if epoch is not None)


def remove_journals_below(files: Files, root: Path, epoch: int, within: OpenFile | None = None) -> None:
    """Remove older journals. Call it when a newer checkpoint is durable and its writer has proven itself."""
    for older in journal_epochs(files, root):
        if older < epoch:
            for path in (filenames.head(root, older), filenames.journal(root, older)):
                with contextlib.suppress(FileNotFoundError):
                    files.unlink(path, within)
