"""A folder of snapshots of one changelog, as the policy keeps it: `<dest>/<commit, 12 digits>/`, each by
itself whole.

Without `changelog.json`, which is written last and removed first, a snapshot is half: it is never taken for
one, and goes with the next clearing.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from keyfold.checkpoints.log.reader_marks import now_ms, oldest_view
from keyfold.checkpoints.log.recovery import View
from keyfold.checkpoints.snapshot.file_list import read_list
from keyfold.checkpoints.snapshot.snapshot import Location
from keyfold.statestore import filenames
from keyfold.statestore.errors import ConfigError, KeyfoldError, NotAChangelog

#: So many stay, besides those that are pinned.
KEPT = 2


@dataclass(frozen=True)
class KeptSnapshot:
    """A whole snapshot in a folder of them.

    Attributes:
        commit: the last commit in it; `ends` holds every partition's end offset behind that.
        bytes: of its files.
        rollbacks: how many the changelog had seen by then.
        pinned: the policy does not remove it.
    """

    path: str
    commit: int
    time_ms: int
    bytes: int
    ends: tuple[int, ...]
    rollbacks: int
    uuid: str
    pinned: bool


def kept_snapshots(dest: Location, uuid: str | None = None) -> list[KeptSnapshot]:
    """The whole snapshots in `dest`, ascending by commit; of any changelog without `uuid`.

    Raises:
        OSError: `dest` cannot be read.
    """
    found = (_whole(Location(dest.files, dest.root / name)) for name in _entries(dest))
    ordered = sorted((s for s in found if s is not None), key=lambda s: s.commit)
    return [s for s in ordered if uuid is None or s.uuid == uuid]


def newest(place: Location) -> Location:
    """Where the snapshot is: `place`, or the newest whole one where that is a folder of them.

    Raises:
        NotAChangelog: it is a folder of snapshots of which none is whole.
        ConfigError: there are snapshots of several changelogs.
    """
    try:
        if place.files.exists(place.root / filenames.IDENTITY) or not _entries(place):
            return place
    except NotADirectoryError:
        return place  # whoever reads its identity says what it is
    kept = kept_snapshots(place)
    if not kept:
        raise NotAChangelog(
            "There is no whole snapshot.", path=place.root, expected="a snapshot that was taken to its end",
            found="only parts of some", remedy="take one, or give the path of another place",
        )  # fmt: skip
    if len({s.uuid for s in kept}) > 1:
        raise ConfigError(
            "Here are snapshots of several changelogs.", path=place.root, expected="those of one",
            found=", ".join(s.path.rpartition("/")[2] for s in kept),
            remedy="give the path of one snapshot; let every changelog have its own snapshot.dest",
        )  # fmt: skip
    return Location(place.files, filenames.kept_snapshot(place.root, kept[-1].commit))


def set_pin(dest: Location, uuid: str, commit: int, pinned: bool) -> KeptSnapshot:
    """Let the policy keep a snapshot for ever, or not any more. Durable when this returns.

    Raises:
        ConfigError: there is no whole snapshot of that commit.
    """
    is_pinned = _one(dest, uuid, commit).pinned
    path = filenames.snapshot_pin(filenames.kept_snapshot(dest.root, commit))
    if pinned and not is_pinned:
        dest.files.write_whole(path, b"the policy does not remove this snapshot\n")
    elif not pinned and is_pinned:
        dest.files.unlink(path)
        dest.files.sync_directory(path.parent)
    # Looked at again, because the policy may have removed it meanwhile.
    return _one(dest, uuid, commit)


def clear(dest: Location, uuid: str) -> None:
    """Remove older snapshots of this changelog than the newest two, and half ones, unless they are pinned.

    One that has a living reader stays until the next time; a store without locks knows of no readers.

    Raises:
        OSError: something cannot be removed.
    """
    kept = kept_snapshots(dest, uuid)
    unpinned = [s.commit for s in kept if not s.pinned]
    for commit in unpinned[:-KEPT]:
        path = filenames.kept_snapshot(dest.root, commit)
        if oldest_view(dest.files, path, now_ms()) is None:
            dest.files.unlink(path / filenames.IDENTITY)
            dest.files.sync_directory(path)
    for name in _entries(dest):
        path = dest.root / name
        # A reader takes its lock before it reads the identity: whoever has come since finds a half one.
        if (
            not dest.files.exists(path / filenames.IDENTITY)
            and oldest_view(dest.files, path, now_ms()) is None
        ):
            dest.files.remove_tree(path)


def _one(dest: Location, uuid: str, commit: int) -> KeptSnapshot:
    kept = {s.commit: s for s in kept_snapshots(dest, uuid)}
    if commit not in kept:
        raise ConfigError(
            "There is no snapshot of that commit.", path=dest.root,
            expected=f"one of {', '.join(map(str, kept)) or '(none)'}", found=commit,
            remedy="correct the number",
        )  # fmt: skip
    return kept[commit]


def _entries(dest: Location) -> list[str]:
    listed = dest.files.list_directory(dest.root)
    return [name for name in listed if filenames.kept_snapshot_commit(name) is not None]


def _whole(place: Location) -> KeptSnapshot | None:
    """The snapshot at `place`, None where there is none, or half of one."""
    if not place.files.exists(place.root / filenames.IDENTITY):
        return None
    with contextlib.suppress(KeyfoldError, FileNotFoundError):
        view = View(place.files, place.root)
        files = read_list(place.files, place.root, view.state.epoch)
        if view.identity.snapshot and files is not None and view.state.commits:
            last = view.state.commits[-1]
            return KeptSnapshot(
                path=str(place.root),
                commit=last.number,
                time_ms=last.time_ms,
                bytes=sum(f.bytes for f in files.values()),
                ends=view.state.ends,
                rollbacks=view.state.partitions[0].generation,
                uuid=view.identity.uuid,
                pinned=place.files.exists(filenames.snapshot_pin(place.root)),
            )
    return None
