"""What a disk may look like after a power loss, from the operations that were recorded on a real directory.

The rules. Bytes are certain once a `sync` of their file has returned that began after they were written; a
name (made, renamed, removed) once a `sync_directory` of its directory has. Everything else may be there or
not, each file and each name for itself: bytes may be missing, cut anywhere, torn at 512-byte sectors, or
zeros where only the length was kept. After a sync that failed, what it should have covered never becomes
certain, whatever later syncs say: Linux marks the pages clean and forgets them. A rename within a directory
happens wholly or not at all; across directories it is two changes. Locks are gone. A process that is killed
leaves all that it wrote, so one `Disk` may see several lives before the power goes.

The order. Each operation counts twice, when it starts and when it has ended, in the order in which these
moments pass the recorder's lock. A write that ran beside a sync is not covered by it. The power may go after
each moment.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from keyfold.statestore.files import OpenFile
from support.faults.crash_outcomes import (
    CORNERS,
    Apart,
    Change,
    Choice,
    Drawn,
    Link,
    Moment,
    Node,
    Write,
    units,
)
from support.faults.inject import CHANGES, FailAt, KillAt, Operation, Selection, Watched, changes

#: After these there is less that may be left, after all other operations there is more.
_SYNCS = frozenset({"sync", "sync_path", "sync_directory"})


#: Every path under a directory with its bytes, None for a directory; one in a directory follows it.
Tree = dict[str, bytes | None]


@dataclass(frozen=True)
class Left:
    """What a power loss may leave behind.

    Attributes:
        tree: of the disk's `base`.
        choice: what became of the changes that were not certain.
        point: how many moments had passed, the last of them `after`.
        marks: what had been marked by then: what the outside world had been told.
    """

    tree: Tree = field(repr=False)
    choice: str
    point: int
    after: str
    marks: tuple[str, ...]

    def __str__(self) -> str:
        return f"power lost at {self.point}, after {self.after}; left: {self.choice}; marks: {self.marks}"


@dataclass(frozen=True)
class State(Left):
    """The same as a real directory.

    Attributes:
        path: stands for the disk's `base`; removed when the next state is asked for.
    """

    path: Path


class Disk:
    """Records what happens under `base` through one `PowerLoss` or several, and tells what a loss may leave.

    What is there at the beginning is certain. Whatever has a name that starts with one of `ignored` is not
    recorded.
    """

    def __init__(self, base: Path, ignored: Sequence[str] = ("store-",)) -> None:
        self.base = base.resolve()
        self._ignored = tuple(ignored)
        self._lock = threading.Lock()
        self._moments: list[str] = []
        self._telling: list[int] = [0]
        self._marks: list[tuple[int, str]] = []
        self._nodes: list[Node] = []
        self._inodes: dict[tuple[int, int], Node] = {}
        self._root = self._scan(self.base)

    # -- recording ---------------------------------------------------------------------------------------

    def mark(self, label: str) -> None:
        """Note that something was promised at this moment: a batch acknowledged, a position given out."""
        with self._lock:
            self._marks.append((self._moment(f"mark {label}", telling=True), label))

    def begin(self, operation: Operation) -> tuple[int, list[Change]]:
        """The moment, and the changes that the operation makes certain once it has ended."""
        with self._lock:
            name = operation.name
            moment = self._moment(f"start of {self._describe(operation)}", telling=name not in _SYNCS)
            node: Node | None = None
            if name in ("sync_directory", "sync_path"):
                node = self._find(operation.path)
            elif name == "sync" and operation.file is not None:
                node = self._node_of(operation.file)
            covered: Sequence[Change] = () if node is None else node.changes()
            return moment, [c for c in covered if c.certain is None and not c.forgotten]

    def end(self, operation: Operation, begun: tuple[int, list[Change]], error: BaseException | None) -> None:
        """The operation is over, successfully or not; `begun` is what `begin` gave."""
        start, covered = begun
        with self._lock:
            how = "end of" if error is None else type(error).__name__ + " from"
            moment = self._moment(f"{how} {self._describe(operation)}", telling=False)
            for change in covered:
                if error is None:
                    # of two syncs at once, the first that returned counts
                    change.certain = moment if change.certain is None else change.certain
                elif isinstance(error, OSError):
                    change.forgotten = True
            if operation.file is not None:
                self._record_write(operation, operation.file, start, error)
            elif not self._is_ignored(operation.path):
                self._record_names(operation, start)

    def _record_write(
        self, operation: Operation, file: OpenFile, start: int, error: BaseException | None
    ) -> None:
        node = self._node_of(file)
        if node is None or operation.name == "sync":
            return
        write = Write(start, position=operation.position)
        if operation.name != "truncate":
            write.data = operation.bytes
            if error is not None:
                # only the file can tell how much was done
                write.data = os.pread(file.fd, len(write.data), operation.position)
        elif os.fstat(file.fd).st_size != operation.position:
            return
        node.writes.append(write)

    def _record_names(self, operation: Operation, start: int) -> None:
        """What the directory itself shows is recorded: that is right for what failed half-way, too."""
        path = operation.path
        if operation.name == "rename" and operation.target is not None:
            self._record_rename(path, operation.target, start)
        elif operation.name in ("unlink", "remove_tree"):
            self._record_removed(path, start)
        elif operation.name in ("create", "mkdir", "lock"):
            parent = self._find(path.parent)
            if parent is not None and self._find(path) is None and os.path.lexists(path):
                self._link(parent, start, {path.name: self._new(path)})

    def _record_rename(self, old: Path, new: Path, start: int) -> None:
        node, source, target = self._find(old), self._find(old.parent), self._find(new.parent)
        if node is None or source is None or target is None or os.path.lexists(old):
            return
        if source is target:
            self._link(source, start, {old.name: None, new.name: node})
        else:
            self._link(target, start, {new.name: node})
            self._link(source, start, {old.name: None})

    def _record_removed(self, path: Path, start: int) -> None:
        parent, node = self._find(path.parent), self._find(path)
        if parent is None or node is None:
            return
        for name in list(node.live):
            self._record_removed(path / name, start)
        if not os.path.lexists(path):
            self._link(parent, start, {path.name: None})

    def _link(self, parent: Node, start: int, names: dict[str, Node | None]) -> None:
        parent.links.append(Link(start, names=names))
        for name, node in names.items():
            if node is None:
                parent.live.pop(name, None)
            else:
                parent.live[name] = node

    def _moment(self, what: str, telling: bool) -> int:
        """After a `telling` moment there is more that may be left, or more that was promised."""
        self._moments.append(what)
        if telling:
            self._telling.append(len(self._moments))
        return len(self._moments) - 1

    def _describe(self, operation: Operation) -> str:
        path = operation.path
        return f"{operation.name} {path.relative_to(self.base) if path.is_relative_to(self.base) else path}"

    def _is_ignored(self, path: Path) -> bool:
        parts = self._parts(path)
        return parts is None or any(part.startswith(self._ignored) for part in parts)

    def _parts(self, path: Path) -> tuple[str, ...] | None:
        """Names from `base` to `path`; None for a path elsewhere."""
        path = path.parent.resolve() / path.name
        return path.relative_to(self.base).parts if path.is_relative_to(self.base) else None

    def _find(self, path: Path) -> Node | None:
        parts = self._parts(path)
        node = None if parts is None else self._root
        for part in parts or ():
            node = None if node is None else node.live.get(part)
        return node

    def _node_of(self, file: OpenFile) -> Node | None:
        """By inode: an open file stays the same one when its name changes."""
        if file.fd < 0:
            return None
        found = os.fstat(file.fd)
        return self._inodes.get((found.st_dev, found.st_ino))

    def _new(self, path: Path) -> Node:
        found = os.lstat(path)
        label = str(path.resolve().relative_to(self.base))
        node = Node(len(self._nodes), label, path.is_dir())
        self._nodes.append(node)
        self._inodes[found.st_dev, found.st_ino] = node
        return node

    def _scan(self, path: Path) -> Node:
        node = self._new(path)
        if node.is_directory:
            node.live = {p.name: self._scan(p) for p in sorted(path.iterdir()) if not self._is_ignored(p)}
            node.links.append(Link(-1, certain=-1, names=dict(node.live)))
        else:
            node.writes.append(Write(-1, certain=-1, data=path.read_bytes()))
        return node

    # -- what may be left --------------------------------------------------------------------------------

    def states(
        self, into: Path, *, seeds: Sequence[int] = (1, 2), apart: bool = True, copy_ignored: bool = False
    ) -> Iterator[State]:
        """All that `left` gives, as directories.

        Each is made in `into` and removed again when the next one is asked for. All operations must have
        ended.

        Args:
            copy_ignored: put what is in the ignored directories now into each state, too; else they are
            missing.
        """
        for number, left in enumerate(self.left(seeds=seeds, apart=apart)):
            path = into / f"state-{number}"
            try:
                self._write(left.tree, path, copy_ignored)
                yield State(left.tree, left.choice, left.point, left.after, left.marks, path)
            finally:
                shutil.rmtree(path, ignore_errors=True)

    def left(self, *, seeds: Sequence[int] = (1, 2), apart: bool = True) -> Iterator[Left]:
        """Every different tree that a loss at any moment may leave, by the corners, by `apart` and by
        `seeds`.

        Args:
            seeds: for each seed one state per moment in which files and names meet fates of their own.
            apart: also, for each file and each name that is not certain: only it is kept, and all but it.
        """
        seen: set[bytes] = set()
        for point in self._telling:
            marks = tuple(label for marked, label in self._marks if marked < point)
            moment = Moment(point)
            for choice in self._choices(point, seeds, apart):
                tree = self._tree(moment, choice)
                digest = _digest(tree, len(marks))
                if digest not in seen:
                    seen.add(digest)
                    after = self._moments[point - 1] if point else "nothing"
                    yield Left(tree, choice.name, point, after, marks)

    def unrecorded(self) -> list[str]:
        """Paths where the directory is not as recorded: somebody went around the seam, or the model errs."""
        now = self._tree(Moment(len(self._moments)), CORNERS["everything"])
        real: Tree = {}
        for path in self.base.rglob("*"):
            if not self._is_ignored(path):
                real[str(path.relative_to(self.base))] = None if path.is_dir() else path.read_bytes()
        paths = {*now, *real}
        return sorted(p for p in paths if p not in now or p not in real or now[p] != real[p])

    def _choices(self, point: int, seeds: Sequence[int], apart: bool) -> Iterator[Choice]:
        yield from CORNERS.values()
        uncertain = [unit for node in self._nodes for unit in units(node, point)] if apart else []
        for label, unit in uncertain:
            yield Apart(label, unit, keeps=True)
            yield Apart(label, unit, keeps=False)
        for seed in seeds:
            yield Drawn(seed, point)

    def _tree(self, moment: Moment, choice: Choice) -> Tree:
        tree: Tree = {}

        def walk(node: Node, path: str) -> None:
            if not node.is_directory:
                tree[path] = moment.content(node, choice)
                return
            if path:
                tree[path] = None
            for name, child in moment.names(node, choice).items():
                walk(child, f"{path}/{name}" if path else name)

        walk(self._root, "")
        return tree

    def _write(self, tree: Tree, into: Path, copy_ignored: bool) -> None:
        written(tree, into)
        if copy_ignored:
            for directory in ["", *(name for name, content in tree.items() if content is None)]:
                for path in sorted((self.base / directory).glob("*")):
                    if path.is_dir() and path.name.startswith(self._ignored):
                        shutil.copytree(path, into / directory / path.name)


def written(tree: Tree, into: Path) -> None:
    """Make the directory `into`, and in it all that `tree` names."""
    into.mkdir(parents=True)
    for name, content in tree.items():
        if content is None:
            (into / name).mkdir()
        else:
            (into / name).write_bytes(content)


def tree_of(directory: Path) -> Tree:
    paths = sorted(directory.rglob("*"))
    return {str(p.relative_to(directory)): None if p.is_dir() else p.read_bytes() for p in paths}


def _digest(tree: Tree, marks: int) -> bytes:
    digest = hashlib.blake2b(b"%d" % marks, digest_size=16)
    for name, content in sorted(tree.items()):
        digest.update(f"{name}\0{'directory' if content is None else len(content)}\0".encode())
        digest.update(content or b"")
    return digest.digest()


# -- the seam --------------------------------------------------------------------------------------------


class PowerLoss(Watched):
    """Tells a `Disk` every operation that changes something. Several of them may tell the same disk."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        if operation.name not in CHANGES:
            with super().around(operation):
                yield
            return
        begun = self.disk.begin(operation)
        try:
            with super().around(operation):
                yield
        except BaseException as e:
            self.disk.end(operation, begun, e)
            raise
        self.disk.end(operation, begun, None)


class KilledPowerLoss(PowerLoss, KillAt):
    """A life that ends with kill -9 and leaves a page cache to the next life on the same disk."""

    def __init__(
        self, disk: Disk, n: int | None, *, halfway: bool = False, only: Selection = changes
    ) -> None:
        PowerLoss.__init__(self, disk)
        KillAt.__init__(self, n, halfway=halfway, only=only)


class FailingPowerLoss(PowerLoss, FailAt):
    """A disk that fails once, or from then on, and loses power later."""

    def __init__(
        self,
        disk: Disk,
        n: int | None,
        error: int = errno.EIO,
        *,
        forever: bool = False,
        halfway: bool = False,
        only: Selection = changes,
    ) -> None:
        PowerLoss.__init__(self, disk)
        FailAt.__init__(self, n, error, forever=forever, halfway=halfway, only=only)
