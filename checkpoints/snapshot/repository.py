"""A folder of snapshots of one changelog, as the policy keeps it: `<dest>/<commit, 12 digits>/`. Each is
self-contained.

`changelog.json` is written last and removed first. Without it a snapshot is incomplete: it is never used, and
the next cleanup removes it.
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

#: Number of snapshots to keep, not counting pinned ones.
KEPT = 2


@dataclass(frozen=True)
class KeptSnapshot:
    """A complete snapshot in a folder of snapshots.

    Attributes:
        commit: the last commit in it. `ends` holds every partition's end offset after that commit.
        bytes: total size of its files.
        rollbacks: number of rollbacks of the changelog before it.
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
    """The complete snapshots in `dest`, ascending by commit. Without `uuid`: of any changelog.

    Raises:
        OSError: `dest` cannot be read.
    """
    found = (_whole(Location(dest.files, dest.root / name)) for name in _entries(dest))
    ordered = sorted((s for s in found if s is not None), key=lambda s: s.commit)
    return [s for s in ordered if uuid is None or s.uuid == uuid]


def newest(place: Location) -> Location:
    """The location of the snapshot: `place` itself, or the newest complete one if `place` is a folder of
    them.

    Raises:
        NotAChangelog: it is a folder of snapshots, and none is complete.
        ConfigError: it holds snapshots of several changelogs.
    """
    try:
        if place.files.exists(place.root / filenames.IDENTITY) or not _entries(place):
            return place
    except NotADirectoryError:
        return place  # reading its identity reports what it is
    kept = kept_snapshots(place)
    if not kept:
        raise NotAChangelog(
            "The folder holds no complete snapshot.", path=place.root, expected="a complete snapshot",
            found="incomplete snapshots only", remedy="take a snapshot, or give another path",
        )  # fmt: skip
    if len({s.uuid for s in kept}) > 1:
        raise ConfigError(
            "The folder holds snapshots of several changelogs.", path=place.root,
            expected="snapshots of one changelog",
            found=", ".join(s.path.rpartition("/")[2] for s in kept),
            remedy="give the path of one snapshot; give each changelog its own snapshot.dest",
        )  # fmt: skip
    return Location(place.files, filenames.kept_snapshot(place.root, kept[-1].commit))


def set_pin(dest: Location, uuid: str, commit: int, pinned: bool) -> KeptSnapshot:
    """Pin a snapshot, so that the policy keeps it for ever, or unpin it. Durable when this returns.

    Raises:
        ConfigError: there is no complete snapshot of that commit.
    """
    is_pinned = _one(dest, uuid, commit).pinned
    path = filenames.snapshot_pin(filenames.kept_snapshot(dest.root, commit))
    if pinned and not is_pinned:
        dest.files.write_whole(path, b"the policy does not remove this snapshot\n")
    elif not pinned and is_pinned:
        dest.files.unlink(path)
        dest.files.sync_directory(path.parent)
    # Check again, because the policy may have removed it meanwhile.
    return _one(dest, uuid, commit)


def clear(dest: Location, uuid: str) -> None:
    """Remove older snapshots of this changelog than the newest two, and incomplete ones, unless they are
    pinned.

    A snapshot with a living reader is kept until the next call. A store without locks does not know its
    readers.

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
        # A reader takes its lock before it reads the identity, so later readers find an incomplete snapshot.
        if (
            not dest.files.exists(path / filenames.IDENTITY)
            and oldest_view(dest.files, path, now_ms()) is None
        ):
            dest.files.remove_tree(path)


def _one(dest: Location, uuid: str, commit: int) -> KeptSnapshot:
    kept = {s.commit: s for s in kept_snapshots(dest, uuid)}
    if commit not in kept:
        raise ConfigError(
            f"A snapshot of commit {commit} does not exist.", path=dest.root,
            expected=f"one of {', '.join(map(str, kept)) or '(none)'}", found=commit,
            remedy="correct the commit number",
        )  # fmt: skip
    return kept[commit]


def _entries(dest: Location) -> list[str]:
    listed = dest.files.list_directory(dest.root)
    return [name for name in listed if filenames.kept_snapshot_commit(name) is not None]


def _whole(place: Location) -> KeptSnapshot | None:
    """The snapshot at `place`. None if there is none or it is incomplete."""
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
