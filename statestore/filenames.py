"""The names of all files and directories of a changelog. No other module knows them.

changelog.json                       identity
changelog.json.<epoch>.tmp           its next content, while it is being written
lock                                 held by the writer
manifest/<epoch>.journal .head       the committed state, and how far it is durable
manifest/<epoch>.files               in a snapshot: the list of its files, with checksums
readers/<id>.view  <id>.lease        views of readers, held by a lock or by a lease
requests/<id>.compact  <id>.answer   requests of other processes to the writer
work/<epoch>/<owner>/                uncommitted files of tasks, keys of a cleaner pass
work/standby-<id>/                   last values of a standby, its own while it holds the .lock next to it
store-<epoch>/                       last values, disposable
<partition>/<base>-<epoch>-<n>.arrows .index

A snapshot repository holds one directory <commit, 12 digits>/ per snapshot. A file `pinned` in it keeps the
snapshot from being removed.
"""

from __future__ import annotations

import re
from pathlib import Path

IDENTITY = "changelog.json"
LOCK = "lock"
MANIFEST = "manifest"
READERS = "readers"
REQUESTS = "requests"
WORK = "work"

_IDENTITY_TEMPORARY = re.compile(r"^changelog\.json\.([1-9][0-9]*)\.tmp$")
_JOURNAL = re.compile(r"^([1-9][0-9]*)\.journal$")
_MANIFEST = re.compile(r"^([1-9][0-9]*)\.(?:journal|head|files)$")
_LIST = re.compile(r"^([1-9][0-9]*)\.files$")
_SEGMENT = re.compile(r"^([0-9]{20})-([1-9][0-9]*)-([0-9]+)\.arrows$")
_STORE = re.compile(r"^store-([1-9][0-9]*)$")
_KEPT_SNAPSHOT = re.compile(r"^([0-9]{12})$")
_STANDBY = re.compile(r"^standby-([0-9a-f]+)(\.lock)?$")


def identity_temporary(root: Path, epoch: int) -> Path:
    return root / f"{IDENTITY}.{epoch}.tmp"


def identity_temporary_epoch(name: str) -> int | None:
    """The epoch of the writer that began to replace the identity; None for any other name."""
    found = _IDENTITY_TEMPORARY.match(name)
    return int(found[1]) if found else None


def journal(root: Path, epoch: int) -> Path:
    return root / MANIFEST / f"{epoch}.journal"


def head(root: Path, epoch: int) -> Path:
    return root / MANIFEST / f"{epoch}.head"


def snapshot_files(root: Path, epoch: int) -> Path:
    return root / MANIFEST / f"{epoch}.files"


def snapshot_files_epoch(name: str) -> int | None:
    """The epoch in the name of a snapshot's file list; None for any other name."""
    found = _LIST.match(name)
    return int(found[1]) if found else None


def manifest_epoch(name: str) -> int | None:
    """The epoch in the name of a journal, a head or a snapshot's file list; None for any other name."""
    found = _MANIFEST.match(name)
    return int(found[1]) if found else None


def journal_epoch(name: str) -> int | None:
    """The epoch in the name of a journal; None for any other name."""
    found = _JOURNAL.match(name)
    return int(found[1]) if found else None


def segment_name(base_offset: int, epoch: int, number: int) -> str:
    """The base offset has 20 digits as in Kafka, so that names sort. `number` is unique within the epoch."""
    return f"{base_offset:020d}-{epoch}-{number}.arrows"


def segment_epoch(name: str) -> int | None:
    """The epoch in which a segment or index was created; None for any other name."""
    found = _SEGMENT.match(name.replace(".index", ".arrows"))
    return int(found[2]) if found else None


def segment_index(segment: str) -> str:
    return segment.removesuffix(".arrows") + ".index"


def partition(root: Path, partition: int) -> Path:
    return root / str(partition)


def store(root: Path, epoch: int) -> Path:
    return root / f"store-{epoch}"


def store_epoch(name: str) -> int | None:
    found = _STORE.match(name)
    return int(found[1]) if found else None


def view(root: Path, reader: str) -> Path:
    return root / READERS / f"{reader}.view"


def lease(root: Path, reader: str) -> Path:
    return root / READERS / f"{reader}.lease"


def is_of_reader(name: str) -> bool:
    return name.endswith((".view", ".lease"))


def request(root: Path, identifier: str) -> Path:
    return root / REQUESTS / f"{identifier}.compact"


def request_id(name: str) -> str | None:
    """The id in the name of a request; None for any other name."""
    return name.removesuffix(".compact") if name.endswith(".compact") else None


def answer(root: Path, identifier: str) -> Path:
    return root / REQUESTS / f"{identifier}.answer"


def is_request(name: str) -> bool:
    """Whether a file is a request or an answer, complete or still being written."""
    return name.endswith((".compact", ".answer", ".answer.tmp"))


def answer_id(name: str) -> str | None:
    return name.removesuffix(".answer") if name.endswith(".answer") else None


def work(root: Path, epoch: int, owner: str | None = None) -> Path:
    directory = root / WORK / str(epoch)
    return directory if owner is None else directory / owner


def staged(directory: Path, batch: int, task: int, attempt: int) -> Path:
    """The staged blocks of one task attempt, in a directory from `work`."""
    return directory / f"{batch}-{task}-{attempt}.blocks"


def standby(root: Path, identifier: str) -> Path:
    return root / WORK / f"standby-{identifier}"


def standby_lock(root: Path, identifier: str) -> Path:
    return root / WORK / f"standby-{identifier}.lock"


def standby_id(name: str) -> str | None:
    """The id in the name of a standby's directory or lock; None for any other name."""
    found = _STANDBY.match(name)
    return found[1] if found else None


def kept_snapshot(dest: Path, commit: int) -> Path:
    """The snapshot of a commit in a snapshot repository. Names sort in commit order."""
    return dest / f"{commit:012d}"


def kept_snapshot_commit(name: str) -> int | None:
    found = _KEPT_SNAPSHOT.match(name)
    return int(found[1]) if found else None


def snapshot_pin(snapshot: Path) -> Path:
    return snapshot / "pinned"


def resume_pin(checkpoint: Path, changelog: str) -> Path:
    """The file in a query's checkpoint with the commit of this changelog (by uuid) that it resumed from."""
    return checkpoint / f"keyfold-resume-{changelog}"
