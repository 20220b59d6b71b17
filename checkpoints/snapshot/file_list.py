"""`manifest/<epoch>.files` of a snapshot: the list of its files, with their checksums.

The list is written once, before the head that makes it valid, and is never replaced. A CRC32C over all other
fields protects it, because a clone verifies the files against it.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from crc32c import crc32c

from keyfold.checkpoints.manifest.state import Commit
from keyfold.statestore import filenames
from keyfold.statestore.errors import Damaged
from keyfold.statestore.files import Files


@dataclass(frozen=True)
class SnapshotFile:
    """One file of a snapshot, as listed."""

    bytes: int
    records: int
    sha256: str


#: Path in a snapshot → its entry.
Listed: TypeAlias = dict[str, SnapshotFile]


def write_list(files: Files, root: Path, epoch: int, commit: Commit, listed: Listed) -> None:
    """Write the list of a snapshot, atomically if `files` can. Raises `OSError`."""
    fields: dict[str, Any] = {
        "commit": commit.number,
        "time": commit.time_ms,
        "files": {path: asdict(file) for path, file in sorted(listed.items())},
    }
    covered = json.dumps(fields, indent=1).removesuffix("\n}").encode() + b",\n "
    data = covered + b'"crc32c": "%08x"\n}\n' % crc32c(covered)
    files.write_whole(filenames.snapshot_files(root, epoch), data)


def read_list(files: Files, root: Path, epoch: int) -> Listed | None:
    """The list of the snapshot of an epoch that has its head. None if there is no list.

    Raises:
        Damaged: the list does not match its checksum.
    """
    path = filenames.snapshot_files(root, epoch)
    try:
        raw = files.read(path)
    except FileNotFoundError:
        return None
    covered = raw.rpartition(b'"crc32c"')[0]
    found = crc32c(covered)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        document: dict[str, Any] = json.loads(raw)
        if raw == covered + b'"crc32c": "%08x"\n}\n' % found:
            return {name: SnapshotFile(**file) for name, file in document["files"].items()}
    raise Damaged(
        "The file list of a snapshot is damaged.", path=path, position=f"bytes 0 to {len(raw)}",
        expected="JSON that ends with the CRC32C of the bytes before it", found=f"crc32c {found:08x}",
        remedy="restore from the snapshot, which needs no list; take a new snapshot to another place",
    )  # fmt: skip


def list_epochs(files: Files, root: Path) -> list[int]:
    """The epochs of all lists, including those of failed attempts, ascending."""
    found = (filenames.snapshot_files_epoch(name) for name in files.list_directory(root / filenames.MANIFEST))
    return sorted(epoch for epoch in found if epoch is not None)
