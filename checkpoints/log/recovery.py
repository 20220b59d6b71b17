"""Opening a changelog: to write (claim an epoch, recover, check-point), to read (the newest durable view), to
create it.

Opening to write, in this order: the lock; the claim (a journal made with `O_EXCL`); the older journal; what
is accepted of it, as a checkpoint at the head of the own journal, synced; the proof that nobody has claimed a
higher epoch meanwhile; only then is anything published, deleted or acknowledged. `ownership` says why that is
enough. Files of an older epoch are never appended to nor cut, because their writer may still be running.
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
from keyfold.checkpoints.log.descriptors import is_too_many, raise_limit, too_many_files
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
    StorageFailed,
)
from keyfold.statestore.files import Files, OpenFile
from keyfold.statestore.schema.columns import Columns

log = logging.getLogger("keyfold")

_LOADS_MAX: Final = 100


@dataclass(frozen=True)
class NewChangelog:
    """What a new changelog gets that an existing one has already.

    `app` is the `ChangelogMeta.app` of one that it is a copy of; by default it gets the directory's name.
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
    """The writer of the changelog at `root`, which is created first where `creation` is given and none is
    there.

    Args:
        lock: the writer's lock where the caller holds it already; it is closed if this raises.

    Raises:
        NotAChangelog, FormatTooNew, Damaged: see there; nothing was changed.
        ChangelogLocked: another writer lives and `steal` is False.
        StorageFailed: the disk is read-only, full, or failed, or too many files are open.

    Raises the limit of open files, see `descriptors`.
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
                "This is a snapshot, which is only read.", path=root, expected="a changelog",
                found="a snapshot", remedy="make a changelog of it with Changelog.clone(snapshot, path)",
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
    except BaseException as e:
        if lock is not None:
            files.close(lock)
        if ownership is not None:
            ownership.close()
        if not isinstance(e, OSError):
            raise
        if is_too_many(e):
            raise too_many_files(e, root, "the changelog cannot be opened to write") from e
        raise StorageFailed(
            "The changelog cannot be opened to write.", path=e.filename or root,
            expected="a directory that can be written", found=f"{type(e).__name__}: {e.strerror or e}",
            remedy='free or repair the disk, or open it with mode="r"',
        ) from e  # fmt: skip


def _no_manifest(files: Files, root: Path) -> Damaged:
    """The error where `changelog.json` is there and the manifest is not: no segment is known to count."""
    there = [name for name in files.list_directory(root) if name not in (filenames.LOCK, filenames.MANIFEST)]
    return Damaged(
        "The manifest of this changelog is gone.", path=root / filenames.MANIFEST,
        expected="a directory with a journal", found="none; still there: " + ", ".join(there),
        remedy="put manifest/ back from a copy of this directory, or make a changelog of a snapshot with "
        "Changelog.clone(snapshot, path); leave what is still there as it is until then",
    )  # fmt: skip


def check_creatable(files: Files, root: Path) -> None:
    """Raises `NotAChangelog` where something else is in the way of a new changelog."""
    if files.exists(root) and not files.is_directory(root):
        found = "a file"
    else:
        own = {filenames.LOCK, filenames.MANIFEST, filenames.READERS, filenames.WORK}
        foreign = [
            n
            for n in files.list_directory(root)
            if n not in own and filenames.identity_temporary_epoch(n) is None
        ]
        if not foreign:
            return
        found = f"a directory with {len(foreign)} other entries, such as {foreign[0]!r}"
    raise NotAChangelog(
        "A changelog cannot be created here.",
        path=root,
        expected="an empty or missing directory",
        found=found,
        remedy=f"choose another path, or put {filenames.IDENTITY} back if this was a changelog",
    )


def lock_of_writer(files: Files, root: Path, *, steal: bool) -> OpenFile | None:
    """The writer's lock, None where another writer lives and it is not taken from that one; it is never taken
    from one that is creating the changelog. Raises `OSError`.
    """
    path = root / filenames.LOCK
    lock = files.lock(path)
    if lock is None and steal and files.exists(root / filenames.IDENTITY):
        log.warning("changelog %s: the lock is taken from %s", root, _holder(files, path))
        with contextlib.suppress(FileNotFoundError):
            files.unlink(path)
        lock = files.lock(path)
    return lock


def refusal(files: Files, root: Path) -> ChangelogLocked:
    """The error where another writer lives."""
    return ChangelogLocked(
        "Another writer holds this changelog.", path=root, expected="no living writer",
        found=_holder(files, root / filenames.LOCK),
        remedy='end that process, read with mode="r", or open with steal=True to fence it',
    )  # fmt: skip


def _holder(files: Files, path: Path) -> str:
    try:
        holder = json.loads(files.read(path))
        return f"pid {holder['pid']}, epoch {holder['epoch']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that is just opening it"


def _claim(files: Files, root: Path) -> tuple[int, JournalWriter]:
    while True:
        epoch = highest_epoch(files, root) + 1
        with contextlib.suppress(FileExistsError):
            return epoch, JournalWriter(files, root, epoch)


def _create(
    files: Files, root: Path, creation: NewChangelog, ownership: Ownership, clock_ms: Callable[[], int]
) -> Writer:
    """`changelog.json` comes last: without it there is no changelog, and whatever is there is begun anew.

    Nobody takes the lock from a process that is creating the changelog, so there is one at a time.
    """
    for epoch in journal_epochs(files, root):
        log.info("changelog %s: an unfinished creation is begun anew", root)
        remove_journals_below(files, root, epoch + 1, ownership.directory)
    # A crash may have left directories that are there and not durable.
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
        # It may have been replaced by a writer that died, or stopped, before that was durable.
        files.sync_directory(root)
        before = _newest_journal(files, root, epoch, identity)
        if before.torn:
            log.warning(
                "changelog %s: cut %d bytes of a torn, unacknowledged line from the manifest of epoch %d",
                root, before.torn, before.state.epoch,
            )  # fmt: skip
        state = begin_journal(
            journal, before.state, epoch, identity,
            lambda: _check_first(ownership, root, epoch, journal),
        )  # fmt: skip
    except BaseException as e:
        try:
            if isinstance(e, KeyfoldError | FileNotFoundError):
                # What was read may have been removed by the one who has taken over.
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
        writer.garbage.add(state.n, _unnamed(files, root, state))
        writer.garbage.collect()
        remove_dead_standbys(files, root)
    except BaseException:
        journal.close()
        raise
    return writer


def _check_first(ownership: Ownership, root: Path, epoch: int, journal: JournalWriter) -> None:
    """The proof of a writer that is being opened, see `ownership`."""
    reason = ownership.loss(epoch, journal)
    if reason is not None:
        raise ChangelogLocked(
            "Another process took this changelog while it was being opened.", path=root,
            expected="one process that opens it", found=reason,
            remedy="open it again once the other one has ended, or with steal=True to fence it",
        )  # fmt: skip


def _take_back(files: Files, root: Path, ownership: Ownership, epoch: int, journal: JournalWriter) -> None:
    """Remove a claim that came to nothing, unless readers may have seen what it says."""
    with contextlib.suppress(OSError):
        if not files.exists(filenames.head(root, epoch)) and journal.is_in_place():
            files.unlink(filenames.journal(root, epoch), ownership.directory)
    journal.close()


def _newest_journal(files: Files, root: Path, below: int, identity: ChangelogMeta) -> Loaded:
    for epoch in reversed(journal_epochs(files, root)):
        if epoch < below:
            # One that vanishes was taken back, or removed by somebody with a higher claim than this one.
            with contextlib.suppress(FileNotFoundError):
                head = read_head(files, filenames.head(root, epoch))
                loaded = read_journal(files, root, epoch, identity.uuid, head)
                if loaded is not None:
                    _check_partitions(root, loaded.state, identity)
                    return loaded
    raise Damaged(
        "There is no whole manifest journal.", path=root / filenames.MANIFEST,
        expected="a journal with a sound checkpoint line", found="none",
        remedy="restore from a snapshot or a copy",
    )  # fmt: skip


def _check_partitions(root: Path, state: State, identity: ChangelogMeta) -> None:
    if len(state.partitions) != identity.partitions:
        raise Damaged(
            "The manifest and the identity disagree.", path=root / filenames.IDENTITY,
            expected=f"{len(state.partitions)} partitions, as in the manifest", found=identity.partitions,
            remedy=f"put {filenames.IDENTITY} back from a copy",
        )  # fmt: skip


def _unnamed(files: Files, root: Path, state: State) -> list[Path]:
    """Files of older epochs that the manifest does not name: what crashed writers and cleaners left."""
    found = []
    for number, partition in enumerate(state.partitions):
        named = {s.name for s in partition.segments}
        named |= {filenames.segment_index(s.name) for s in partition.segments if s.sealed}
        directory = filenames.partition(root, number)
        for name in files.list_directory(directory):
            made = filenames.segment_epoch(name)
            if made is not None and made < state.epoch and name not in named:
                found.append(directory / name)
    work = files.list_directory(root / filenames.WORK)
    found += [root / filenames.WORK / n for n in work if n.isdigit() and int(n) < state.epoch]
    return found


class View:
    """The newest durable state, for readers in any process; `refresh` follows it."""

    def __init__(self, files: Files, root: Path) -> None:
        self.files = files
        self.root = root
        self.identity = read_identity(files, root)
        self._loaded = self._load(None)

    @property
    def state(self) -> State:
        return self._loaded.state

    def refresh(self) -> State:
        self._loaded = self._load(self._loaded)
        return self._loaded.state

    def _load(self, before: Loaded | None) -> Loaded:
        """A journal can be rolled away between the look at its head and reading it; then look again."""
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
        raise Damaged(
            "There is no manifest that can be read.", path=self.root / filenames.MANIFEST,
            expected="a journal with its head", found="none" if failure is None else "journals that vanish",
            remedy="open the changelog to write once, which recovers it, or restore from a snapshot",
        )  # fmt: skip
