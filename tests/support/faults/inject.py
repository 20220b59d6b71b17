"""Faults behind the file seam: kill, fail or pause at a chosen operation. Power loss is in `powerloss`.

Each is a `Files` to hand in where a `Files` is taken. They can be combined by inheriting from several; the
first named is the outermost, so a recorder goes before what it has to see. All are safe to use from several
threads: operations are counted in the order in which they start.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from keyfold.statestore.files import Data, Files, OpenFile

#: Operations that change the disk, or what is certain on it. These are counted unless a test selects others.
CHANGES: Final = frozenset(
    {
        "create", "append", "overwrite", "truncate", "sync", "sync_path", "rename", "mkdir", "sync_directory",
        "unlink", "remove_tree", "lock",
    }
)  # fmt: skip

#: Operations that return an open file: nothing may raise once they succeeded, or the descriptor leaks.
_OPENING: Final = frozenset({"create", "lock"})

_PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Operation:
    """One call on `Files`, as `Files._operation` tells it."""

    name: str
    path: Path
    file: OpenFile | None = None
    data: Sequence[Data] = ()
    position: int = 0
    target: Path | None = None

    @property
    def bytes(self) -> bytes:
        """All data of a write in one piece."""
        return b"".join(memoryview(chunk).cast("B") for chunk in self.data)


Selection = Callable[[Operation], bool]


def changes(operation: Operation) -> bool:
    """Select whatever changes the disk."""
    return operation.name in CHANGES


def on(*names: str, path: str = "*") -> Selection:
    """Select operations by name (any without names) and by a pattern for the whole path (rename: either)."""

    def selected(operation: Operation) -> bool:
        paths = [operation.path] if operation.target is None else [operation.path, operation.target]
        return (not names or operation.name in names) and any(fnmatch(str(p), path) for p in paths)

    return selected


class Watched(Files):
    """A `Files` whose operations pass through `around`; subclasses extend it and call `super().around`.

    Syncs are seen, but do not reach the disk unless `real_syncs` is set: a test that models the loss of
    power, or has none, would spend nine tenths of its time in them. A disk that really loses power needs
    them.
    """

    real_syncs = False

    def _operation(
        self,
        name: str,
        path: Path,
        *,
        file: OpenFile | None = None,
        data: Sequence[Data] = (),
        position: int = 0,
        target: Path | None = None,
    ) -> AbstractContextManager[None]:
        return self.around(Operation(name, path, file, data, position, target))

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        yield

    def sync(self, file: OpenFile) -> None:
        if self.real_syncs:
            super().sync(file)
        else:
            with self._operation("sync", file.path, file=file):
                os.fstat(file.fd)

    def sync_path(self, path: Path) -> None:
        if self.real_syncs:
            super().sync_path(path)
        else:
            with self._operation("sync_path", path):
                path.stat()

    def sync_directory(self, path: Path) -> None:
        if self.real_syncs:
            super().sync_directory(path)
        else:
            with self._operation("sync_directory", path):
                os.listdir(path)


#: For runs without a fault around those with one: recovery, comparison.
QUICK: Final = Watched()


class Killed(BaseException):
    """The process is dead. Not an `Exception`, so that no error handling brings it back to life."""


class KillAt(Watched):
    """Dies at the n-th selected operation (from 0), never with None. Every later operation raises `Killed`
    too.

    The n-th operation does not happen; with `halfway` it happens in part: half of the bytes are written, half
    of a tree is removed; what has no half happens wholly and the call does not return. `count` operations
    were seen, so a run with `KillAt()` tells how far to enumerate.

    A dead process holds no locks and no files: call `release` once the threads that used it have ended. Take
    a new object for the next life: a thread of this one that was forgotten stays dead.
    """

    def __init__(self, n: int | None = None, *, halfway: bool = False, only: Selection = changes) -> None:
        self.count = 0
        self.dead = False
        self._kill_n = n
        self._kill_halfway = halfway
        self._kill_only = only
        self._kill_lock = threading.Lock()
        self._held: set[OpenFile] = set()

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        with self._kill_lock:
            if self.dead:
                raise Killed
            if self._kill_only(operation):
                self.dead = self.count == self._kill_n
                self.count += 1
            mine = self.dead
        if mine and (not self._kill_halfway or _half(operation)):
            raise Killed
        with super().around(operation):
            yield
        if self.dead and operation.name not in _OPENING:
            raise Killed

    def create(self, path: Path) -> OpenFile:
        return self._hold(super().create(path))

    def lock(self, path: Path) -> OpenFile | None:
        file = super().lock(path)
        return None if file is None else self._hold(file)

    def close(self, file: OpenFile) -> None:
        """Works for the dead as well."""
        super().close(file)
        self._held.discard(file)

    def release(self) -> None:
        """Close all files that are still open, and with them their locks."""
        for file in list(self._held):
            self.close(file)

    def _hold(self, file: OpenFile) -> OpenFile:
        self._held.add(file)
        return file


def _half(operation: Operation) -> bool:
    """Do half of the operation; False where it has no half and is to be done wholly."""
    if operation.file is not None and operation.data:
        data = operation.bytes
        done = os.pwrite(operation.file.fd, data[: len(data) // 2], operation.position)
        if operation.name == "append":
            operation.file.position += done
    elif operation.name == "remove_tree":
        found = sorted(p for p in operation.path.rglob("*") if not p.is_dir())
        for path in found[: (len(found) + 1) // 2]:
            path.unlink()
    elif operation.name == "create":
        os.close(os.open(operation.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644))
    else:
        return operation.name in _OPENING
    return True


class FailAt(Watched):
    """The n-th selected operation (from 0) raises `OSError(error)`; it does nothing, a write with `halfway`
    half.

    With `forever` every selected operation from the n-th on fails. `failed` counts the failures: a test
    should look that there was one. `remove_tree` never fails, as in `Files`.
    """

    def __init__(
        self,
        n: int | None,
        error: int = errno.EIO,
        *,
        forever: bool = False,
        halfway: bool = False,
        only: Selection = changes,
    ) -> None:
        self.count = 0
        self.failed = 0
        self._fail_n = n
        self._fail_error = error
        self._fail_forever = forever
        self._fail_halfway = halfway
        self._fail_only = only
        self._fail_lock = threading.Lock()

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        with self._fail_lock:
            fails = False
            if operation.name != "remove_tree" and self._fail_only(operation):
                n = self._fail_n
                fails = n is not None and (self.count >= n if self._fail_forever else self.count == n)
                self.count += 1
                self.failed += fails
        if fails:
            if self._fail_halfway and operation.data:
                _half(operation)
            raise OSError(self._fail_error, os.strerror(self._fail_error), str(operation.path))
        with super().around(operation):
            yield


class Gate:
    """A place where the first operation that gets there stands until `resume`; later ones pass."""

    def __init__(self, only: Selection, after: bool) -> None:
        self._only = only
        self._after = after
        self._lock = threading.Lock()
        self._taken = False
        self._reached = threading.Event()
        self._opened = threading.Event()

    def wait(self) -> None:
        """Until a thread stands at the gate. Raises `TimeoutError` after a minute."""
        if not self._reached.wait(_PATIENCE_S):
            raise TimeoutError("no operation came to the gate")

    def resume(self) -> None:
        """Let the thread go on; before it came, there is no stop at all."""
        self._opened.set()

    def pass_through(self, operation: Operation, after: bool) -> None:
        with self._lock:
            if self._taken or after != self._after or not self._only(operation):
                return
            self._taken = True
        self._reached.set()
        if not self._opened.wait(_PATIENCE_S):
            raise TimeoutError(f"nobody opened the gate at {operation.name}")


class PauseAt(Watched):
    """Stops the first selected operation, before it happens or (`after`) once it has, until `resume` is
    called.

        files = PauseAt(on("unlink", path="*.arrows"))
        cleaner = threading.Thread(target=clean, args=(files,)); cleaner.start()
        files.wait()           # the cleaner is about to delete
        ...                    # whatever is to happen at this moment
        files.resume(); cleaner.join()

    Further stops are added with `gate`.
    """

    def __init__(self, only: Selection, *, after: bool = False) -> None:
        self._gates: list[Gate] = []
        first = self.gate(only, after=after)
        self.wait = first.wait
        self.resume = first.resume

    def gate(self, only: Selection, *, after: bool = False) -> Gate:
        gate = Gate(only, after)
        self._gates.append(gate)
        return gate

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        for gate in self._gates:
            gate.pass_through(operation, after=False)
        with super().around(operation):
            yield
        for gate in self._gates:
            gate.pass_through(operation, after=True)
