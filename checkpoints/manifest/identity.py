"""`changelog.json`: what a changelog is. Made once; only settings and added columns change later, by the
writer.

It is the last file that creating a changelog writes, so a directory without it is no changelog. A CRC32C over
all other fields guards it: a wrong number of partitions would send every key to the wrong place.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from crc32c import crc32c

from keyfold.checkpoints.manifest.config import LogConfig
from keyfold.statestore import filenames
from keyfold.statestore.errors import ConfigError, Damaged, FormatTooNew, NotAChangelog
from keyfold.statestore.files import Files
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.segment.block import FORMAT_VERSION

PARTITIONER: Final = "pmod(xxhash64(key, 42), partitions)"
PARTITIONS_MAX: Final = 10_000


@dataclass(frozen=True)
class ChangelogMeta:
    """What `changelog.json` says.

    Attributes:
        columns: None for a changelog of raw bytes (Kafka's shape).
        app: whose batches a sink writes that names no app: the name of the directory when the changelog was
            created. It stays the same where the directory gets another name, and in snapshots and clones.
        snapshot: this is a copy to be read, which nobody writes to.
    """

    uuid: str
    partitions: int
    columns: Columns | None
    config: LogConfig
    app: str
    snapshot: bool = False

    def encode(self) -> bytes:
        fields: dict[str, Any] = {
            "magic": "keyfold changelog",
            "version": FORMAT_VERSION,
            "uuid": self.uuid,
            "partitions": self.partitions,
            "partitioner": PARTITIONER,
            "schema": None if self.columns is None else self.columns.to_json(),
            "config": self.config.changed(),
            "app": self.app,
        }
        if self.snapshot:
            fields["snapshot"] = True
        # Over the bytes, because another language writes the same JSON in another way.
        covered = json.dumps(fields, indent=2).removesuffix("\n}").encode() + b",\n  "
        return covered + b'"crc32c": "%08x"\n}\n' % crc32c(covered)


def _check_crc(raw: bytes, stated: str) -> None:
    found = crc32c(raw[: raw.rindex(b'"crc32c"')])
    if int(stated, 16) != found:
        raise ValueError(f"crc32c {found:08x}, the file says {stated}")


def check_partitions(partitions: object) -> int:
    """Raises `ConfigError` unless it is a whole number from 1 to 10,000."""
    if isinstance(partitions, int) and not isinstance(partitions, bool) and 1 <= partitions <= PARTITIONS_MAX:
        return partitions
    raise ConfigError(
        "That is no number of partitions.", expected=f"a whole number from 1 to {PARTITIONS_MAX}",
        found=repr(partitions), remedy="correct `partitions=`",
    )  # fmt: skip


def check_same_partitions(root: Path, identity: ChangelogMeta, partitions: int | None) -> None:
    if partitions is not None and partitions != identity.partitions:
        raise ConfigError(
            "The number of partitions of a changelog cannot change.", path=root, expected=identity.partitions,
            found=partitions,
            remedy="leave `partitions=` out; to change it, restore into a new changelog",
        )  # fmt: skip


def read_identity(files: Files, root: Path) -> ChangelogMeta:
    """What the changelog at `root` is.

    Raises:
        NotAChangelog: there is no `changelog.json`.
        Damaged: it is not what was written.
        FormatTooNew: a later version made it.
    """
    path = root / filenames.IDENTITY
    try:
        raw = _whole(files, path, files.read(path))
    except (FileNotFoundError, NotADirectoryError):
        raise NotAChangelog(
            "This is not a changelog.", path=root, expected=f"a directory with {filenames.IDENTITY}",
            found="a directory without it" if files.is_directory(root)
            else "a file" if files.exists(root) else "no directory",
            remedy="correct the path, or create the changelog by opening it to write",
        ) from None  # fmt: skip
    try:
        fields = json.loads(raw)
        if fields["magic"] != "keyfold changelog":
            raise ValueError(f"magic {fields['magic']!r}")
        version = int(fields["version"])
        if version > FORMAT_VERSION:
            raise FormatTooNew(
                "This changelog was made by a later version of keyfold.", path=path,
                expected=f"version {FORMAT_VERSION} or lower", found=version, remedy="upgrade keyfold",
            )  # fmt: skip
        _check_crc(raw, fields["crc32c"])
        columns = None if fields["schema"] is None else Columns.from_json(fields["schema"])
        config = LogConfig().with_changes(fields["config"])
        snapshot = bool(fields.get("snapshot", False))
        uuid, app = str(fields["uuid"]), str(fields["app"])
        return ChangelogMeta(uuid, int(fields["partitions"]), columns, config, app, snapshot)
    except (KeyError, ValueError, TypeError, AttributeError) as e:
        raise Damaged(
            "The identity of a changelog is not as it was written.", path=path, position="byte 0",
            expected="JSON of a keyfold changelog with its CRC32C", found=f"{type(e).__name__}: {e}",
            remedy="put the file back from a copy of this directory (that of a snapshot differs), or make "
            "a changelog of a snapshot with Changelog.clone(snapshot, path)",
        ) from e  # fmt: skip


def write_identity(files: Files, root: Path, identity: ChangelogMeta) -> None:
    """Replace `changelog.json`, whole or not at all.

    Where a store may show a part of it when this process dies, `changelog.json.tmp` holds all of it first.
    """
    path, data = root / filenames.IDENTITY, identity.encode()
    if files.has_locks:
        files.write_whole(path, data)
        return
    files.write_whole(_replacement(path), data)
    files.write_whole(path, data)
    files.unlink(_replacement(path))


def _replacement(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _whole(files: Files, path: Path, raw: bytes) -> bytes:
    """What `path` was about to hold where whoever replaced it died within; else `raw`, what it holds."""
    if raw.endswith(b"}\n"):
        return raw
    try:
        whole = files.read(_replacement(path))
    except FileNotFoundError:
        return raw
    return whole if whole.startswith(raw) else raw


def replace_identity(
    files: Files, root: Path, identity: ChangelogMeta, epoch: int, prove: Callable[[], None]
) -> None:
    """Replace the `changelog.json` of a changelog by the writer with this epoch.

    `prove` is called when all is ready, and raises where another writer has taken over. Whoever takes over
    later removes what is ready before it reads the identity, so that no old content can replace a newer one.
    """
    temporary = filenames.identity_temporary(root, epoch)
    file = files.create(temporary)
    try:
        files.append(file, [identity.encode()])
        files.sync(file)
    finally:
        files.close(file)
    prove()
    files.rename(temporary, root / filenames.IDENTITY)
    files.sync_directory(root)


def remove_unfinished(files: Files, root: Path, below: int) -> None:
    """Remove what writers with an epoch below this one would have replaced the identity by."""
    for name in files.list_directory(root):
        epoch = filenames.identity_temporary_epoch(name)
        if epoch is not None and epoch < below:
            with contextlib.suppress(FileNotFoundError):
                files.unlink(root / name)
