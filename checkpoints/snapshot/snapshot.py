"""Snapshots: a changelog as of a commit, as a self-contained, read-only copy.

A snapshot has the layout of a changelog, so every reader of changelogs can read it. Segments are written
first, then the journal with a single line, then its head: without the head no reader sees the snapshot. A new
snapshot's `changelog.json` is written last of all; without it there is no snapshot. If a snapshot is taken
again in the same place, existing files are not written again.

Files of earlier snapshots only are removed when the new one is complete and no reader needs them. On a local
disk readers hold locks in the snapshot, and exactly the files of living readers are kept. A store without
locks does not know its readers. There the files of the snapshot before are kept until the next one is
complete, so a reader may use a snapshot until the second one after it is complete. At most two generations
exist, while a third is being written.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from keyfold.checkpoints.log.ownership import journal_epochs, remove_journals_below
from keyfold.checkpoints.log.reader_marks import now_ms, oldest_view
from keyfold.checkpoints.log.recovery import View
from keyfold.checkpoints.manifest import state as states
from keyfold.checkpoints.manifest.identity import ChangelogMeta, read_identity, write_identity
from keyfold.checkpoints.manifest.journal import JournalWriter, begin_journal, read_head
from keyfold.checkpoints.manifest.state import Commit, State
from keyfold.checkpoints.snapshot.file_list import Listed, SnapshotFile, list_epochs, read_list, write_list
from keyfold.statestore import filenames
from keyfold.statestore.errors import ConfigError, Damaged, NotAChangelog, storage_errors
from keyfold.statestore.files import Files
from keyfold.statestore.segment.block import encode
from keyfold.statestore.segment.reader import SegmentReader
from keyfold.statestore.segment.writer import Segment, SegmentWriter, block_of

#: Bytes of a file that are read, verified and written at a time.
_PIECE_BYTES: Final = 8 << 20
#: Above any number that a writer assigns, so that a segment cut for a snapshot has a unique name.
_CUT_NUMBER: Final = 10**9


@dataclass(frozen=True)
class Snapshot:
    """A completed snapshot.

    Attributes:
        commit: the last commit in it.
        files: path in the snapshot → its entry.
        bytes_written: bytes of the files that were written; the others came from an earlier snapshot.
    """

    path: str
    commit: int
    files: Listed
    bytes_written: int

    @property
    def bytes(self) -> int:
        return sum(f.bytes for f in self.files.values())


@dataclass(frozen=True)
class Location:
    """Files below a path: of the source, or of the snapshot."""

    files: Files
    root: Path


def take(
    source: Location,
    identity: ChangelogMeta,
    state: State,
    commit: Commit,
    to: Location,
    check: Callable[[], None] = lambda: None,
) -> Snapshot:
    """Write the snapshot of `commit`. The caller protects the files of that commit.

    Args:
        check: called before each piece of a file. An error that it raises ends the snapshot.

    Raises:
        ConfigError: see `check_destination`.
        Damaged: a segment of the source, or an existing file list, does not match its checksums.
        StorageFailed: the destination cannot be written.
    """
    with _writing(to):
        return _Taking(source, to, identity, _generations(to, identity), check).run(state, commit)


def check_destination(to: Location, identity: ChangelogMeta) -> None:
    """Check that a snapshot of this changelog can be taken there, before anything else is done.

    Raises:
        ConfigError: the destination holds something else.
        Damaged: the file list of an existing snapshot is damaged.
        StorageFailed: the destination cannot be read.
    """
    with _writing(to):
        _generations(to, identity)


def _writing(to: Location) -> contextlib.AbstractContextManager[None]:
    return storage_errors(
        "The snapshot could not be written; the previous one is unchanged.", to.root,
        expected="a writable destination",
        remedy="free or repair the destination, then take the snapshot again",
    )  # fmt: skip


def clone(snapshot: Location, to: Location, uuid: str) -> None:
    """Create a changelog from a snapshot, with its own identity, ready to be opened.

    Raises:
        NotAChangelog: there is no snapshot. ConfigError: the destination is not empty.
        Damaged: a file does not match the snapshot's list.
        StorageFailed: the destination cannot be written.
    """
    view = View(snapshot.files, snapshot.root)
    listed = read_list(snapshot.files, snapshot.root, view.state.epoch)
    if listed is None:
        raise NotAChangelog(
            "Not a snapshot.", path=snapshot.root, expected="a directory that Changelog.snapshot has written",
            found="a changelog" if not view.identity.snapshot else "a snapshot without its file list",
            remedy="take a snapshot of it, and clone the snapshot",
        )  # fmt: skip
    is_file = to.files.exists(to.root) and not to.files.is_directory(to.root)
    if is_file or to.files.list_directory(to.root):
        what = "the path is a file" if is_file else "the directory is not empty"
        raise ConfigError(
            f"Cannot create a changelog here: {what}.",
            path=to.root, expected="an empty directory, or a path that does not exist",
            found="a file" if is_file else "a directory with entries", remedy="choose another path",
        )  # fmt: skip
    with storage_errors(
        "The changelog could not be written.", to.root, expected="a writable disk",
        remedy="free or repair the disk, remove the incomplete changelog, then clone again",
    ):  # fmt: skip
        partitions = [
            filenames.partition(to.root, partition) for partition in range(view.identity.partitions)
        ]
        own_names = (filenames.MANIFEST, filenames.READERS, filenames.WORK)
        for directory in (to.root, *(to.root / name for name in own_names), *partitions):
            for made in to.files.make_directory(directory):
                to.files.sync_directory(made.parent)
        for path, expected in listed.items():
            found = _copied(snapshot, to, Path(path), expected.records)
            if found != expected:
                raise Damaged(
                    "A file of the snapshot is damaged.", path=snapshot.root / path,
                    position="byte 0", expected=f"{expected.bytes} bytes, sha256 {expected.sha256}",
                    found=f"{found.bytes} bytes, sha256 {found.sha256}",
                    remedy="clone another snapshot; no changelog was created",
                )  # fmt: skip
        for directory in partitions:
            to.files.sync_directory(directory)
        # The folder of snapshots belongs to the original changelog.
        config = replace(view.identity.config, snapshot_dest="")
        own = replace(view.identity, uuid=uuid, snapshot=False, config=config)
        _begin(to, view.state, view.state.epoch + 1, own)
        write_identity(to.files, to.root, own)


# -- taking --------------------------------------------------------------------------------------------------


class _Taking:
    """A snapshot in progress: its files, and how many bytes had to be written."""

    def __init__(
        self,
        source: Location,
        to: Location,
        identity: ChangelogMeta,
        before: dict[int, Listed],
        check: Callable[[], None],
    ) -> None:
        self._check = check
        self._source = source
        self._to = to
        self._identity = replace(identity, snapshot=True)
        #: file lists by epoch; readers use the last one now
        self._generations = before
        self._before = {path: file for files in before.values() for path, file in files.items()}
        self._files: Listed = {}
        self._written = 0

    def run(self, state: State, commit: Commit) -> Snapshot:
        files, root = self._to.files, self._to.root
        # Above every epoch of the source, because every writer begins with a line.
        epoch = max(state.seq, *journal_epochs(files, root), *list_epochs(files, root), 0) + 1
        own_names = (filenames.MANIFEST, filenames.READERS) if files.has_locks else (filenames.MANIFEST,)
        for directory in (root, *(root / name for name in own_names)):
            for made in files.make_directory(directory):
                files.sync_directory(made.parent)
        kept = self._state(state, commit, epoch)
        write_list(files, root, epoch, commit, self._files)
        new = not files.exists(root / filenames.IDENTITY)
        if not new and read_identity(files, root) != self._identity:
            # Settings and added columns may have changed. The earlier content is readable with them too.
            write_identity(files, root, self._identity)
        # Its one line has the number of the epoch. Readers use it to mark the generation that they hold.
        _begin(self._to, replace(kept, seq=epoch - 1), epoch, self._identity)
        if new:
            write_identity(files, root, self._identity)
        self._sweep(epoch)
        return Snapshot(str(root), commit.number, self._files, self._written)

    def _state(self, state: State, commit: Commit, epoch: int) -> State:
        parts: dict[int, tuple[set[str], tuple[Segment, ...]]] = {}
        for partition, end in enumerate(commit.ends):
            self._to.files.make_directory(filenames.partition(self._to.root, partition))
            out: set[str] = set()
            added: list[Segment] = []
            for segment in state.partitions[partition].segments:
                if segment.sealed and segment.next <= end:
                    self._segment(partition, segment)
                    continue
                # A segment that may grow, or of which a part is wanted, gets a new name: files never change.
                out.add(segment.name)
                if segment.base < end:
                    name = filenames.segment_name(segment.base, epoch, _CUT_NUMBER + len(out))
                    added += self._cut(partition, segment, min(segment.next, end), name)
            parts[partition] = out, tuple(added)
            self._to.files.sync_directory(filenames.partition(self._to.root, partition))
        return states.truncated(state, commit.number, commit.ends, parts)

    def _segment(self, partition: int, segment: Segment) -> None:
        """Copy one segment and its index and verify their checksums, unless they exist already."""
        directory = filenames.partition(self._source.root, partition)
        paths = [_inside(partition, name) for name in (segment.name, filenames.segment_index(segment.name))]
        if all(self._is_there(path) for path in paths):
            for path in paths:
                self._files[str(path)] = self._before[str(path)]
            return
        SegmentReader(self._source.files, directory, segment).verify()
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                # A part of an earlier attempt. A file that is in use is never replaced.
                self._to.files.unlink(self._to.root / path)
            self._add(path, _copied(self._source, self._to, path, segment.records, self._check))

    def _is_there(self, path: Path) -> bool:
        """Whether the previous snapshot has the whole file. Names are never reused, so it is the same
        file.
        """
        known = self._before.get(str(path))
        if known is None:
            return False
        with contextlib.suppress(FileNotFoundError):
            return self._to.files.size(self._to.root / path) == known.bytes
        return False

    def _cut(self, partition: int, segment: Segment, end: int, name: str) -> list[Segment]:
        """The records of a segment below `end`, as a segment of the snapshot."""
        directory = filenames.partition(self._source.root, partition)
        target = filenames.partition(self._to.root, partition)
        for file in (name, filenames.segment_index(name)):
            # Of an earlier, failed attempt: no snapshot has this number.
            with contextlib.suppress(FileNotFoundError):
                self._to.files.unlink(target / file)
        reader = SegmentReader(self._source.files, directory, segment)
        writer = SegmentWriter(
            self._to.files, target, name, segment.base, segment.created_ms, reader.schema()
        )
        with contextlib.closing(writer):
            grown = writer.segment
            for batch in reader.batches(segment.base, end):
                self._check()
                data = encode(batch, self._identity.config.codec)
                grown = writer.append([block_of(batch, data)], batch.column("offset")[-1].as_py() + 1)
            if not grown.records:
                writer.abandon(None)
                return []
            sealed = writer.seal(replace(grown, next=end))
        for file in (name, filenames.segment_index(name)):
            path = _inside(partition, file)
            self._add(path, _measured(self._to, path, sealed.records))
        return [sealed]

    def _add(self, path: Path, file: SnapshotFile) -> None:
        self._files[str(path)] = file
        self._written += file.bytes

    def _sweep(self, epoch: int) -> None:
        """Remove the files of older snapshots without readers, and of failed attempts. A failure here is
        harmless.
        """
        files, root = self._to.files, self._to.root
        with contextlib.suppress(OSError):
            spared = self._spared()
            named = set(self._files).union(*(self._generations[older] for older in spared))
            for older in list_epochs(files, root):
                if older < epoch and older not in spared:
                    files.unlink(filenames.snapshot_files(root, older))
            remove_journals_below(files, root, epoch)
            for partition in range(self._identity.partitions):
                for name in files.list_directory(filenames.partition(root, partition)):
                    if str(_inside(partition, name)) not in named:
                        files.unlink(filenames.partition(root, partition) / name)

    def _spared(self) -> list[int]:
        """The earlier generations that may have readers."""
        if not self._to.files.has_locks:
            return sorted(self._generations)[-1:]
        oldest = oldest_view(self._to.files, self._to.root, now_ms())
        return [] if oldest is None else [epoch for epoch in self._generations if epoch >= oldest]


# -- parts ---------------------------------------------------------------------------------------------------


def _inside(partition: int, name: str) -> Path:
    """The entry of a partition's file in the list of a snapshot."""
    return filenames.partition(Path(), partition) / name


def _begin(to: Location, state: State, epoch: int, identity: ChangelogMeta) -> None:
    """Write the journal with its one line, then the head, which makes a snapshot or a clone visible."""
    journal = JournalWriter(to.files, to.root, epoch)
    try:
        begin_journal(journal, state, epoch, identity, only=True)
    finally:
        journal.close()


def _generations(to: Location, identity: ChangelogMeta) -> dict[int, Listed]:
    """The file lists of the existing snapshot, and of earlier ones whose files were kept.

    Raises `ConfigError` if it belongs to another changelog, `Damaged` if a list is damaged.
    """
    if not to.files.exists(to.root / filenames.IDENTITY):
        own = {filenames.MANIFEST, filenames.READERS, f"{filenames.IDENTITY}.tmp"}
        foreign = [n for n in to.files.list_directory(to.root) if n not in own and not n.isdigit()]
        if not foreign:
            return {}
        found = f"a directory with {foreign[0]!r}"
    else:
        there = read_identity(to.files, to.root)
        if there.snapshot and there.uuid == identity.uuid:
            seen = [
                e
                for e in journal_epochs(to.files, to.root)
                if read_head(to.files, filenames.head(to.root, e))
            ]
            # A higher list is of a failed attempt.
            lists = {
                e: read_list(to.files, to.root, e)
                for e in list_epochs(to.files, to.root)
                if e <= max(seen, default=0)
            }
            return {epoch: files for epoch, files in lists.items() if files is not None}
        found = f"{'a snapshot of' if there.snapshot else 'the changelog'} {there.uuid}"
    raise ConfigError(
        "Cannot take a snapshot here: the destination holds something else.", path=to.root,
        expected="an empty destination, or an earlier snapshot of the same changelog", found=found,
        remedy="choose another destination",
    )  # fmt: skip


def _copied(
    source: Location, to: Location, path: Path, records: int, check: Callable[[], None] = lambda: None
) -> SnapshotFile:
    """Copy a file. Returns its size and checksum."""
    digest, count = hashlib.sha256(), 0
    file = to.files.create(to.root / path)
    try:
        for piece in _pieces(source.files, source.root / path):
            check()
            to.files.append(file, [piece])
            digest.update(piece)
            count += len(piece)
        to.files.sync(file)
    finally:
        to.files.close(file)
    return SnapshotFile(count, records, digest.hexdigest())


def _measured(place: Location, path: Path, records: int) -> SnapshotFile:
    digest, count = hashlib.sha256(), 0
    for piece in _pieces(place.files, place.root / path):
        digest.update(piece)
        count += len(piece)
    return SnapshotFile(count, records, digest.hexdigest())


def _pieces(files: Files, path: Path) -> Iterator[bytes]:
    size = files.size(path)
    for position in range(0, size, _PIECE_BYTES):
        yield files.read(path, position, min(_PIECE_BYTES, size - position))
