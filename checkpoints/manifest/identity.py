"""`changelog.json`: the identity of a changelog. Created once. Later the writer changes settings and adds
columns only.

It is the last file that is written when a changelog is created, so a directory without it is not a changelog.
A CRC32C over all other fields protects it: a wrong number of partitions would send keys to wrong partitions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from keyfold.checkpoints.manifest.config import LogConfig
from keyfold.checkpoints.manifest.identity_file import (
    MAGIC,
    damaged,
    encode_fields,
    read_fields,
    replacement,
)
from keyfold.statestore import filenames
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.files import Files
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.segment.block import FORMAT_VERSION

PARTITIONER: Final = "pmod(xxhash64(key, 42), partitions)"
PARTITIONS_MAX: Final = 10_000


@dataclass(frozen=True)
class ChangelogMeta:
    """The content of `changelog.json`.

    Attributes:
        columns: None for a changelog of raw bytes (like Kafka's).
        app: the default app of sinks: the name of the directory when the changelog was created. It does not
            change if the directory is renamed, nor in snapshots and clones.
        snapshot: this is a read-only copy.
    """

    uuid: str
    partitions: int
    columns: Columns | None
    config: LogConfig
    app: str
    snapshot: bool = False

    def encode(self) -> bytes:
        fields: dict[str, Any] = {
            "magic": MAGIC,
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
        return encode_fields(fields)


def check_partitions(partitions: object) -> int:
    """Raises `ConfigError` unless it is a whole number from 1 to 10,000."""
    if isinstance(partitions, int) and not isinstance(partitions, bool) and 1 <= partitions <= PARTITIONS_MAX:
        return partitions
    raise ConfigError(
        "Invalid number of partitions.", expected=f"a whole number from 1 to {PARTITIONS_MAX}",
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
    """The identity of the changelog at `root`.

    Raises:
        NotAChangelog: `changelog.json` does not exist.
        Damaged: its checksum or its content is wrong.
        FormatTooNew: a later version of keyfold made it.
        SchemaMismatch: its keys have an encoding that this version of keyfold does not read.
    """
    fields = read_fields(files, root)
    try:
        kept, path = fields["schema"], root / filenames.IDENTITY
        columns = None if kept is None else Columns.from_json(kept, path=path)
        config = LogConfig().with_changes(fields["config"])
        snapshot = bool(fields.get("snapshot", False))
        uuid, app = str(fields["uuid"]), str(fields["app"])
        return ChangelogMeta(uuid, int(fields["partitions"]), columns, config, app, snapshot)
    except (KeyError, ValueError, TypeError, AttributeError) as e:
        raise damaged(root / filenames.IDENTITY, e) from e


def merged_config(files: Files, root: Path, changes: Mapping[str, object]) -> LogConfig:
    """The settings of the changelog at `root`, or the defaults if there is none yet, with some changed.

    Raises `ConfigError`, and the errors of `read_identity`.
    """
    exists = bool(changes) and files.exists(root / filenames.IDENTITY)
    return (read_identity(files, root).config if exists else LogConfig()).with_changes(changes)


def write_identity(files: Files, root: Path, identity: ChangelogMeta) -> None:
    """Replace `changelog.json` atomically.

    If a file system may expose a partly written file when this process dies, `changelog.json.tmp` holds the
    whole content first.
    """
    path, data = root / filenames.IDENTITY, identity.encode()
    if files.has_locks:
        files.write_whole(path, data)
        return
    files.write_whole(replacement(path), data)
    files.write_whole(path, data)
    files.unlink(replacement(path))


def replace_identity(
    files: Files, root: Path, identity: ChangelogMeta, epoch: int, prove: Callable[[], None]
) -> None:
    """Replace the `changelog.json` of a changelog by the writer with this epoch.

    `prove` is called when the new content is ready. It raises if another writer has taken over. A later
    writer removes such content before it reads the identity, so old content cannot replace newer content.
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
    """Remove replacements of the identity that writers with an epoch below this one have prepared."""
    for name in files.list_directory(root):
        epoch = filenames.identity_temporary_epoch(name)
        if epoch is not None and epoch < below:
            with contextlib.suppress(FileNotFoundError):
                files.unlink(root / name)
