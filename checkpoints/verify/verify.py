"""Whether a changelog is as it was written: every checksum of everything that counts, and what must agree.

`verify` looks at what a reader sees, beside a living writer if there is one, changes nothing, and does not
stop at the first damage. What is checked:

- the identity against its own checksum;
- the head's slots, the journal line by line and as a whole, and the state that its lines give
  (`manifest`);
- of a snapshot the list of its files (`snapshot_list`), and that it names what the manifest names;
- every segment that the manifest names: its bytes against marks or index, its records against what the
  manifest says of them (`segments`);
- what the manifest says is folded, by folding it (`folds`).

Files that nobody names are listed, and are no damage: they do not exist. Last values are not looked at: the
log is the truth, and a store that cannot be used is built anew.
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

#: Called with the bytes of segments checked so far, and of all of them.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Unnamed:
    """A file or directory that the manifest does not name, and what it seems to be."""

    path: Path
    what: str


@dataclass
class Verification:
    """What `verify` found.

    Attributes:
        damages: every place that is not as it was written; empty where all is sound.
        checked: files, bytes, blocks and records that were looked at and are readable.
        line: the last manifest line that was checked, 0 where none could be.
        unnamed: what else lies in the directory.
        notes: what a crash may leave, or a living writer, and what is no damage.
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
    """Check everything that counts of the changelog at `path`, to the end whatever is found.

    Raises:
        NotAChangelog: the path holds none.
        FormatTooNew: a later version made it.
    """
    files, root = located(path, None, files)
    damages = Damages()
    identity = _check_identity(files, root, damages)
    lock = ViewLock(files, root)
    try:
        manifest = check_manifest(files, root, identity, damages)
        lock.record(manifest.durable_n)
        result = Verification(root, damages, notes=manifest.notes)
        result.checked = Counted(files=1 + 2 * (manifest.journal is not None), bytes=manifest.bytes)
        if manifest.state is None:
            result.notes.append("without a manifest it is not known which segments count: none was checked")
            return result
        result.line = manifest.state.n
        # Read again: a living writer may have added a column since, and then records of it.
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
    for number, p in enumerate(state.partitions):
        directory = filenames.partition(root, number)
        before = len(result.damages)
        for segment in p.segments:
            found = Damages()
            partition = (number, len(state.partitions))
            result.checked += check_segment(files, directory, segment, partition, found, p.clean_end, columns)
            for damage in found:
                if manifest.partial and damage.missing:
                    result.notes.append(
                        f"{damage.path} is gone; the lines that cannot be read may have said so"
                    )
                else:
                    result.damages.append(damage)
            done += segment.size
            if progress is not None:
                progress(done, total)
        if len(result.damages) > before or manifest.partial:
            result.notes.append(
                f"partition {number}: whether keys are unique where they were folded cannot be proved, "
                "because not all records can be read"
            )
            continue
        found = Damages()
        check_folds(files, directory, number, p, found)
        result.damages.extend(found)


def _check_lists(files: Files, root: Path, state: State, result: Verification) -> None:
    """The lists of a snapshot's files: of each generation, and what the newest one names."""
    for epoch in list_epochs(files, root):
        if epoch <= state.epoch:
            _check_list(files, root, epoch, state, result)
    if state.epoch not in list_epochs(files, root):
        path = filenames.snapshot_files(root, state.epoch)
        result.damages.append(
            Damage(path, "byte 0", "A snapshot has no list of its files.", "the list", MISSING)
        )


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
            str(filenames.partition(Path(), number) / name)
            for number, p in enumerate(state.partitions)
            for segment in p.segments
            for name in (segment.name, filenames.segment_index(segment.name))
        }
        differing = sorted(named ^ set(listed))
        if differing:
            found.add(
                path, "byte 0", "A snapshot's list names other files than its manifest.",
                f"{len(named)} files of segments", f"{len(differing)} differ, such as {differing[0]}",
            )  # fmt: skip
    result.damages.extend(found)


_STRANGER: Final = "not of this changelog"


def _unnamed(files: Files, root: Path, manifest: Manifest, state: State) -> Iterator[Unnamed]:
    """What lies in the directory and does not count: what others put there, and what dead writers left.

    Not listed is what keyfold keeps beside the log and removes by itself: last values, views of readers,
    requests, standbys, files of the writer that lives.
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
    own |= {filenames.partition(root, number).name for number in range(len(state.partitions))}
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
    for number, p in enumerate(state.partitions):
        named = {s.name for s in p.segments}
        named |= {filenames.segment_index(s.name) for s in p.segments if s.sealed}
        directory_ = filenames.partition(root, number)
        for name in files.list_directory(directory_):
            if name not in named:
                left = "never committed, replaced by the cleaner, or being written now"
                what = _STRANGER if filenames.segment_epoch(name) is None else left
                yield Unnamed(directory_ / name, what)
