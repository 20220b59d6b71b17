"""Verifies that a changelog is as it was written: every checksum of all data in use, and its consistency.

`verify` checks what a reader sees, also while a writer is active. It changes nothing, and does not stop at
the first damage. It checks:

- the identity against its own checksum;
- the head's slots, the journal line by line and as a whole, and the state that its lines give (`manifest`);
- for a snapshot the list of its files (`snapshot_list`), and that it agrees with the manifest;
- every segment that the manifest names: its bytes against marks or index, its records against the manifest
  (`segments`);
- the sections that the manifest says are compacted, by folding them (`folds`).

Files that are not named anywhere are listed and are no damage: they are not part of the log. Last values are
not checked: the log is the source of truth, and a store that cannot be used is rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from keyfold.checkpoints.log.reader_marks import ViewLock
from keyfold.checkpoints.manifest.identity import ChangelogMeta, read_identity
from keyfold.checkpoints.manifest.state import State
from keyfold.checkpoints.snapshot.file_list import list_epochs, read_list
from keyfold.checkpoints.verify.findings import MISSING, Damage, Damages
from keyfold.checkpoints.verify.folds import check_folds
from keyfold.checkpoints.verify.manifest import Manifest, check_manifest
from keyfold.checkpoints.verify.segments import Counted, check_segment
from keyfold.statestore import filenames
from keyfold.statestore.errors import Damaged
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.paths import AnyPath
from keyfold.statestore.remote_files import located
from keyfold.statestore.schema.columns import Columns

__all__ = ["Damage", "Unnamed", "Verification", "verify"]

#: Called with the number of verified bytes of segments, and their total.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Unnamed:
    """A file or directory that the manifest does not name, and its likely origin."""

    path: Path
    what: str


@dataclass
class Verification:
    """The result of `verify`.

    Attributes:
        damages: every place that differs from what was written; empty if all data is intact.
        checked: number of files, bytes, blocks and records that were checked and are readable.
        line: the last manifest line that was checked, 0 if there was none.
        unnamed: other files in the directory.
        notes: observations that are no damage: remains of a crash, or the work of an active writer.
    """

    path: Path
    damages: list[Damage] = field(default_factory=Damages)
    checked: Counted = field(default_factory=Counted)
    line: int = 0
    unnamed: list[Unnamed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.damages


def verify(path: AnyPath, *, files: Files = LOCAL, progress: Progress | None = None) -> Verification:
    """Check all data in use of the changelog at `path`, to the end even if damage is found.

    Raises:
        NotAChangelog: the path is not a changelog.
        UnsupportedFormat: it has another version of the format.
    """
    files, root = located(path, None, files)
    damages = Damages()
    identity = _check_identity(files, root, damages)
    lock = ViewLock(files, root)
    try:
        manifest = check_manifest(files, root, identity, damages)
        lock.record(manifest.durable_seq)
        result = Verification(root, damages, notes=manifest.notes)
        result.checked = Counted(files=1 + 2 * (manifest.journal is not None), bytes=manifest.bytes)
        if manifest.state is None:
            result.notes.append("no segment was checked: without a manifest it is unknown which are in use")
            return result
        result.line = manifest.state.seq
        # Read it again: an active writer may have added a column since, and then records with it.
        newest = _check_identity(files, root, Damages()) or identity
        columns = None if newest is None else newest.columns
        _check_segments(files, root, manifest, manifest.state, result, columns, progress)
        if newest is not None and newest.snapshot:
            _check_lists(files, root, manifest.state, result)
        result.unnamed = list(_unnamed(files, root, manifest, manifest.state))
        return result
    finally:
        lock.close()


def _check_identity(files: Files, root: Path, damages: Damages) -> ChangelogMeta | None:
    path = root / filenames.IDENTITY
    try:
        return read_identity(files, root)
    except Damaged as e:
        damages.add_error(e, path)
    except OSError as e:
        damages.add_unreadable(path, e)
    return None


def _check_segments(
    files: Files,
    root: Path,
    manifest: Manifest,
    state: State,
    result: Verification,
    columns: Columns | None,
    progress: Progress | None,
) -> None:
    total = sum(p.bytes for p in state.partitions)
    done = 0
    for partition, p in enumerate(state.partitions):
        directory = filenames.partition(root, partition)
        before = len(result.damages)
        for segment in p.segments:
            found = Damages()
            of = (partition, len(state.partitions))
            result.checked += check_segment(files, directory, segment, of, found, p.clean_end, columns)
            for damage in found:
                if manifest.partial and damage.missing:
                    result.notes.append(
                        f"{damage.path} is missing; a manifest line that cannot be read may have removed it"
                    )
                else:
                    result.damages.append(damage)
            done += segment.size
            if progress is not None:
                progress(done, total)
        if len(result.damages) > before or manifest.partial:
            result.notes.append(
                f"partition {partition}: the uniqueness of compacted keys could not be proved, "
                "because not all records can be read"
            )
            continue
        found = Damages()
        check_folds(files, directory, partition, p, found)
        result.damages.extend(found)


def _check_lists(files: Files, root: Path, state: State, result: Verification) -> None:
    """Verify the file lists of a snapshot: of each generation, and the files that the newest one names."""
    epochs = list_epochs(files, root)
    for epoch in epochs:
        if epoch <= state.epoch:
            _check_list(files, root, epoch, state, result)
    if state.epoch not in epochs:
        path = filenames.snapshot_files(root, state.epoch)
        result.damages.append(Damage(path, "byte 0", "A snapshot has no file list.", "the list", MISSING))


def _check_list(files: Files, root: Path, epoch: int, state: State, result: Verification) -> None:
    path, found = filenames.snapshot_files(root, epoch), Damages()
    try:
        listed = read_list(files, root, epoch)
    except Damaged as e:
        found.add_error(e, path)
        listed = None
    except OSError as e:
        found.add_unreadable(path, e)
        listed = None
    if listed is not None and epoch == state.epoch:
        result.checked += Counted(files=1, bytes=files.size(path))
        named = {
            str(filenames.partition(Path(), partition) / name)
            for partition, p in enumerate(state.partitions)
            for segment in p.segments
            for name in (segment.name, filenames.segment_index(segment.name))
        }
        differing = sorted(named ^ set(listed))
        if differing:
            found.add(
                path, "byte 0", "A snapshot's file list does not agree with its manifest.",
                f"{len(named)} files of segments", f"{len(differing)} differ, such as {differing[0]}",
            )  # fmt: skip
    result.damages.extend(found)


_STRANGER: Final = "not part of this changelog"


def _unnamed(files: Files, root: Path, manifest: Manifest, state: State) -> Iterator[Unnamed]:
    """Files in the directory that are not in use: those of other programs, and remains of dead writers.

    Files that keyfold keeps beside the log and removes by itself are not listed: last values, views of
    readers, requests, standbys, files of the active writer.
    """
    own = {
        filenames.IDENTITY,
        filenames.LOCK,
        filenames.MANIFEST,
        filenames.READERS,
        filenames.REQUESTS,
        filenames.WORK,
    }
    own |= {filenames.snapshot_pin(root).name}
    own |= {filenames.partition(root, partition).name for partition in range(len(state.partitions))}
    for name in files.list_directory(root):
        temporary = filenames.identity_temporary_epoch(name) is not None
        if name not in own and filenames.store_epoch(name) is None and not temporary:
            yield Unnamed(root / name, _STRANGER)
    for directory, is_own in (
        (filenames.READERS, filenames.is_of_reader),
        (filenames.REQUESTS, filenames.is_request),
    ):
        for name in files.list_directory(root / directory):
            if not is_own(name):
                yield Unnamed(root / directory / name, _STRANGER)
    epoch = state.epoch if manifest.journal is None else filenames.journal_epoch(manifest.journal.name) or 0
    for name in files.list_directory(root / filenames.MANIFEST):
        found = filenames.manifest_epoch(name)
        if found != epoch:
            what = _STRANGER if found is None else "of another epoch, or a claim"
            yield Unnamed(root / filenames.MANIFEST / name, what)
    for name in files.list_directory(root / filenames.WORK):
        if filenames.standby_id(name) is None and name != filenames.work(root, epoch).name:
            what = "files of tasks that were not committed" if name.isdecimal() else _STRANGER
            yield Unnamed(root / filenames.WORK / name, what)
    for partition, p in enumerate(state.partitions):
        named = {s.name for s in p.segments}
        named |= {filenames.segment_index(s.name) for s in p.segments if s.sealed}
        directory_ = filenames.partition(root, partition)
        for name in files.list_directory(directory_):
            if name not in named:
                left = "never committed, replaced by the cleaner, or being written now"
                what = _STRANGER if filenames.segment_epoch(name) is None else left
                yield Unnamed(directory_ / name, what)
