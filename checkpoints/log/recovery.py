"""Opening a changelog: to write (claim an epoch, recover, checkpoint), to read (the newest durable view), and
creating one.

Opening to write takes these steps, in this order. Take the lock. Claim an epoch: a journal made with
`O_EXCL`. Read the older journal. Write what is accepted of it as a checkpoint at the head of the own journal,
and sync it. Prove that no process has claimed a higher epoch meanwhile. Only then is anything published,
deleted or acknowledged; `ownership` says why this is enough. Files of an older epoch are never appended to or
truncated, because their writer may still be running.
"""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from keyfold.checkpoints.log.dead_standbys import remove_dead_standbys
from keyfold.checkpoints.log.descriptors import limit_told, raise_limit
from keyfold.checkpoints.log.ownership import Ownership, highest_epoch, journal_epochs, remove_journals_below
from keyfold.checkpoints.log.writer import Writer
from keyfold.checkpoints.manifest import state as states
from keyfold.checkpoints.manifest.config import LogConfig
from keyfold.checkpoints.manifest.idempotence import is_app
from keyfold.checkpoints.manifest.identity import (
    ChangelogMeta,
    read_identity,
    remove_unfinished,
    replace_identity,
)
from keyfold.checkpoints.manifest.journal import (
    JournalWriter,
    Loaded,
    begin_journal,
    read_durable,
    read_further,
    read_head,
    read_journal,
)
from keyfold.checkpoints.manifest.state import State
from keyfold.statestore import filenames
from keyfold.statestore.errors import (
    ChangelogLocked,
    ConfigError,
    Damaged,
    KeyfoldError,
    NotAChangelog,
    ViewExpired,
    storage_errors,
)
from keyfold.statestore.files import Files, OpenFile
from keyfold.statestore.schema.columns import Columns

log = logging.getLogger("keyfold")

_LOADS_MAX: Final = 100


@dataclass(frozen=True)
class NewChangelog:
    """Properties of a new changelog. An existing changelog has its own.

    `app` is the `ChangelogMeta.app` of the changelog that it is a copy of. The default is the directory's
    name.
    """

    partitions: int
    columns: Columns | None
    config: LogConfig
    app: str = ""


def open_writer(
    files: Files,
    root: Path,
    creation: NewChangelog | None,
    clock_ms: Callable[[], int],
    *,
    steal: bool,
    lock: OpenFile | None = None,
) -> Writer:
    """The writer of the changelog at `root`. If there is no changelog and `creation` is given, creates it.

    Raises the process's limit of open files, see `descriptors`.

    Args:
        lock: the writer's lock, if the caller holds it already. It is closed if this raises.

    Raises:
        NotAChangelog, UnsupportedFormat, Damaged: see `read_identity` and `read_journal`; nothing changed.
        ChangelogLocked: another living writer exists and `steal` is False.
        StorageFailed: the disk is read-only, full or failed, or too many files are open.
    """
    ownership: Ownership | None = None
    raise_limit()
    try:
        new = creation is not None and not files.exists(root / filenames.IDENTITY)
        if creation is not None and new:
            check_creatable(files, root)
            for made in files.make_directory(root):
                files.sync_directory(made.parent)
            for directory in (root / filenames.MANIFEST, root / filenames.READERS, root / filenames.WORK):
                files.make_directory(directory, below=root)
        elif read_identity(files, root).snapshot:
            raise ConfigError(
                "A snapshot is read-only and cannot be opened to write.", path=root, expected="a changelog",
                found="a snapshot", remedy="create a changelog from it with Changelog.clone(snapshot, path)",
            )  # fmt: skip
        if not new and not files.is_directory(root / filenames.MANIFEST):
            raise _no_manifest(files, root)
        lock = lock_of_writer(files, root, steal=steal) if lock is None else lock
        if lock is None:
            raise refusal(files, root)
        held, lock = lock, None
        ownership = Ownership(files, root, held)
        if creation is not None and not files.exists(root / filenames.IDENTITY):
            return _create(files, root, creation, ownership, clock_ms)
        return _recover(files, root, ownership, clock_ms)
    except BaseException:
        if lock is not None:
            files.close(lock)
        if ownership is not None:
            ownership.close()
        told = storage_errors(
            "The changelog cannot be opened to write.", root, expected="a writable directory",
            remedy='free or repair the disk, grant this user the right to write, or open it with mode="r"'
            if files.is_directory(root)
            else "choose a path in a directory where this user may write",
        )  # fmt: skip
        with told, limit_told(root, "the changelog cannot be opened to write"):
            raise


def _no_manifest(files: Files, root: Path) -> Damaged:
    """The error if `changelog.json` exists and the manifest does not: the committed segments are unknown."""
    there = [name for name in files.list_directory(root) if name not in (filenames.LOCK, filenames.MANIFEST)]
    return Damaged(
        "The manifest of this changelog is missing.", path=root / filenames.MANIFEST,
        expected="a directory with a journal", found="no directory; other entries: " + ", ".join(there),
        remedy="put manifest/ back from a copy of this directory, or create a changelog from a snapshot with "
        "Changelog.clone(snapshot, path). Leave the other files unchanged until then",
    )  # fmt: skip


def check_creatable(files: Files, root: Path) -> None:
    """Raises `NotAChangelog` if the path holds something else than an unfinished changelog."""
    if files.exists(root) and not files.is_directory(root):
        what, found, remedy = "the path is a file", "a file", "choose another path"
    else:
        own = {filenames.LOCK, filenames.MANIFEST, filenames.READERS, filenames.WORK}
        foreign = [
            n
            for n in files.list_directory(root)
            if n not in own and filenames.identity_temporary_epoch(n) is None
        ]
        if not foreign:
            return
        what = "the directory is not empty"
        found = f"a directory with {len(foreign)} other entries, such as {foreign[0]!r}"
        remedy = f"choose another path, or put {filenames.IDENTITY} back if this was a changelog"
    raise NotAChangelog(
        f"Cannot create a changelog here: {what}.",
        path=root,
        expected="an empty directory, or a path that does not exist",
        found=found,
        remedy=remedy,
    )


def lock_of_writer(files: Files, root: Path, *, steal: bool) -> OpenFile | None:
    """The writer's lock; None if another writer lives and `steal` is False. The lock is never taken from a
    process that is creating the changelog. Raises `OSError`.
    """
    path = root / filenames.LOCK
    lock = files.lock(path)
    if lock is None and steal and files.exists(root / filenames.IDENTITY):
        log.warning("changelog %s: taking the lock from %s", root, _holder(files, path))
        with contextlib.suppress(FileNotFoundError):
            files.unlink(path)
        lock = files.lock(path)
    return lock


def refusal(files: Files, root: Path) -> ChangelogLocked:
    """The error if another writer lives."""
    return ChangelogLocked(
        "Another writer holds this changelog.", path=root, expected="no living writer",
        found=_holder(files, root / filenames.LOCK),
        remedy='end that process, open with mode="r" to read, or open with steal=True to fence the writer',
    )  # fmt: skip


def _holder(files: Files, path: Path) -> str:
    try:
        holder = json.loads(files.read(path))
        return f"pid {holder['pid']}, epoch {holder['epoch']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that is opening it now"


def _claim(files: Files, root: Path) -> tuple[int, JournalWriter]:
    while True:
        epoch = highest_epoch(files, root) + 1
        with contextlib.suppress(FileExistsError):
            return epoch, JournalWriter(files, root, epoch)


def _create(
    files: Files, root: Path, creation: NewChangelog, ownership: Ownership, clock_ms: Callable[[], int]
) -> Writer:
    """Create a changelog. `changelog.json` is written last: without it there is no changelog, and an
    unfinished creation is started over.

    The lock is never taken from a process that is creating the changelog, so only one does it at a time.
    """
    for epoch in journal_epochs(files, root):
        log.info("changelog %s: starting over after an unfinished creation", root)
        remove_journals_below(files, root, epoch + 1, ownership.directory)
    # After a crash, directories may exist and not be durable.
    files.sync_directory(root.parent)
    files.sync_directory(root)
    epoch, journal = _claim(files, root)
    try:
        remove_unfinished(files, root, epoch + 1)
        ownership.sign(epoch)
        app = creation.app or _app_of(root)
        identity = ChangelogMeta(
            uuid.uuid4().hex, creation.partitions, creation.columns, creation.config, app
        )
        empty = states.empty(creation.partitions, epoch)
        state = begin_journal(
            journal, empty, epoch, identity, lambda: _check_first(ownership, root, epoch, journal)
        )
        replace_identity(files, root, identity, epoch, lambda: _check_first(ownership, root, epoch, journal))
    except BaseException:
        journal.close()
        raise
    ownership.enter(epoch, journal)
    return Writer(files, root, identity, ownership, journal, state, clock_ms)


def _app_of(root: Path) -> str:
    """The name of the directory, if it can name an app."""
    name = root.absolute().name
    return name if is_app(name) else "changelog"


def _recover(files: Files, root: Path, ownership: Ownership, clock_ms: Callable[[], int]) -> Writer:
    epoch, journal = _claim(files, root)
    try:
        ownership.sign(epoch)
        remove_unfinished(files, root, epoch)
        identity = read_identity(files, root)
        # A writer that died or stopped may have replaced it without making that durable.
        files.sync_directory(root)
        before = _newest_journal(files, root, epoch, identity)
        if before.torn:
            log.warning(
                "changelog %s: discarded %d bytes of a torn, unacknowledged line of the manifest of epoch %d",
                root, before.torn, before.state.epoch,
            )  # fmt: skip
        state = begin_journal(
            journal, before.state, epoch, identity,
            lambda: _check_first(ownership, root, epoch, journal),
        )  # fmt: skip
    except BaseException as e:
        try:
            if isinstance(e, KeyfoldError | FileNotFoundError):
                # The process that has taken over may have removed what was read.
                _check_first(ownership, root, epoch, journal)
        finally:
            _take_back(files, root, ownership, epoch, journal)
        raise
    ownership.enter(epoch, journal)
    try:
        for directory in (root / filenames.READERS, root / filenames.WORK):
            files.make_directory(directory, below=root)
        writer = Writer(files, root, identity, ownership, journal, state, clock_ms)
        remove_journals_below(files, root, epoch, ownership.directory)
        writer.garbage.add(state.seq, _unnamed(files, root, state))
        writer.garbage.collect()
        remove_dead_standbys(files, root)
    except BaseException:
        journal.close()
        raise
    return writer


def _check_first(ownership: Ownership, root: Path, epoch: int, journal: JournalWriter) -> None:
    """The proof of a writer that is opening, see `ownership`."""
    reason = ownership.loss(epoch, journal)
    if reason is not None:
        raise ChangelogLocked(
            "Another process took over this changelog while it was being opened.", path=root,
            expected="only one process that opens it", found=reason,
            remedy="open it again when the other process has ended, or open with steal=True to fence it",
        )  # fmt: skip


def _take_back(files: Files, root: Path, ownership: Ownership, epoch: int, journal: JournalWriter) -> None:
    """Remove the claim of an opening that failed, unless readers may have seen its journal."""
    with contextlib.suppress(OSError):
        if not files.exists(filenames.head(root, epoch)) and journal.is_in_place():
            files.unlink(filenames.journal(root, epoch), ownership.directory)
    journal.close()


def _newest_journal(files: Files, root: Path, below: int, identity: ChangelogMeta) -> Loaded:
    for epoch in reversed(journal_epochs(files, root)):
        if epoch < below:
            # A journal that vanishes was taken back, or removed by a process with a higher claim.
            with contextlib.suppress(FileNotFoundError):
                head = read_head(files, filenames.head(root, epoch))
                loaded = read_journal(files, root, epoch, identity.uuid, head)
                if loaded is not None:
                    _check_partitions(root, loaded.state, identity)
                    return loaded
    raise Damaged(
        "The manifest has no complete journal.", path=root / filenames.MANIFEST,
        expected="a journal with an intact checkpoint line", found="no such journal",
        remedy="restore from a snapshot or a copy",
    )  # fmt: skip


def _check_partitions(root: Path, state: State, identity: ChangelogMeta) -> None:
    if len(state.partitions) != identity.partitions:
        raise Damaged(
            "The manifest and changelog.json disagree.", path=root / filenames.IDENTITY,
            expected=f"{len(state.partitions)} partitions, as in the manifest", found=identity.partitions,
            remedy=f"put {filenames.IDENTITY} back from a copy of this directory",
        )  # fmt: skip


def _unnamed(files: Files, root: Path, state: State) -> list[Path]:
    """Files of older epochs that the manifest does not name: crashed writers and cleaners left them."""
    found = []
    for partition, p in enumerate(state.partitions):
        named = {s.name for s in p.segments}
        named |= {filenames.segment_index(s.name) for s in p.segments if s.sealed}
        directory = filenames.partition(root, partition)
        for name in files.list_directory(directory):
            made = filenames.segment_epoch(name)
            if made is not None and made < state.epoch and name not in named:
                found.append(directory / name)
    work = files.list_directory(root / filenames.WORK)
    found += [root / filenames.WORK / n for n in work if n.isdigit() and int(n) < state.epoch]
    return found


def lost(files: Files, root: Path, error: ViewExpired) -> Damaged | None:
    """What to raise instead of `error` if the newest manifest still names the file that no longer exists."""
    partitions = View(files, root).state.partitions
    for number, partition in enumerate(partitions):
        directory = filenames.partition(root, number)
        for segment in partition.segments:
            names = segment.name, filenames.segment_index(segment.name)
            if any(error.path == str(directory / name) for name in names):
                return Damaged(
                    "A file that the manifest names is missing.", path=error.path,
                    expected="the file", found="no such file",
                    remedy="restore from a snapshot or a copy; `keyfold verify` lists all damage",
                )  # fmt: skip
    return None


class View:
    """The newest durable state, for readers in any process. `refresh` loads a newer one."""

    def __init__(self, files: Files, root: Path) -> None:
        self.files = files
        self.root = root
        self.identity = read_identity(files, root)
        self._loaded = self._load(None)
        # Again, after the state: it has all columns that a line names.
        self.identity = read_identity(files, root)

    @property
    def state(self) -> State:
        return self._loaded.state

    def refresh(self, *, columns: bool = False) -> State:
        """Load the newest state. `columns`: also those that were added and that no line names yet."""
        before = self._loaded
        loaded = self._load(before)
        if columns or loaded is not before:
            # Read after the state, so it has all columns that a line names; both are taken, or neither.
            self.identity = read_identity(self.files, self.root)
            self._loaded = loaded
        return loaded.state

    def _load(self, before: Loaded | None) -> Loaded:
        """Load the newest state. Retries if a journal is rolled away between reading its head and itself."""
        failure: Exception | None = None
        for _ in range(_LOADS_MAX):
            for epoch in reversed(journal_epochs(self.files, self.root)):
                head = read_head(self.files, filenames.head(self.root, epoch))
                if head is None:
                    continue
                try:
                    if before is not None and before.state.epoch == epoch and before.length <= head.length:
                        if before.length == head.length:
                            return before
                        return read_further(self.files, self.root, epoch, self.identity.uuid, head, before)
                    loaded = read_durable(self.files, self.root, epoch, self.identity.uuid, head)
                except FileNotFoundError as e:
                    failure = e
                    break
                _check_partitions(self.root, loaded.state, self.identity)
                return loaded
        if not self.files.is_directory(self.root / filenames.MANIFEST):
            raise _no_manifest(self.files, self.root)
        raise _no_readable_journal(self.root, journal_epochs(self.files, self.root), failure)


def _no_readable_journal(root: Path, epochs: list[int], failure: Exception | None) -> Damaged:
    """The error for readers. A journal without a head is incomplete to them; opening to write recovers it."""
    if failure is not None:
        found = "journals that vanish while they are read"
    else:
        found = "no journal" if not epochs else "a journal without a valid head"
    return Damaged(
        "The manifest has no readable journal.", path=root / filenames.MANIFEST,
        expected="a journal with a valid head", found=found,
        remedy="open the changelog to write once, which recovers it; if that fails, restore from a snapshot"
        if epochs else "restore from a snapshot or a copy",
    )  # fmt: skip
