"""The fields of `changelog.json`, checked but not interpreted.

A Spark task reads them to see that it still reads the changelog that was planned. It needs neither the
settings nor the columns, so it does not import what interprets them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from crc32c import crc32c

from keyfold.statestore import filenames
from keyfold.statestore.errors import Damaged, NotAChangelog
from keyfold.statestore.files import Files
from keyfold.statestore.segment.block import FORMAT_VERSION, check_version

MAGIC: Final = "keyfold changelog"


def encode_fields(fields: dict[str, Any]) -> bytes:
    """The bytes of `changelog.json`: the fields and their CRC32C."""
    # Over the bytes, because another language may write the same JSON differently.
    covered = json.dumps(fields, indent=2).removesuffix("\n}").encode() + b",\n  "
    return covered + b'"crc32c": "%08x"\n}\n' % crc32c(covered)


def _check_crc(raw: bytes, stated: str) -> None:
    found = crc32c(raw[: raw.rindex(b'"crc32c"')])
    if int(stated, 16) != found:
        raise ValueError(f"crc32c {found:08x}, the file says {stated}")


def read_fields(files: Files, root: Path) -> dict[str, Any]:
    """The fields of the `changelog.json` at `root`, if magic, version and checksum are right.

    Raises:
        NotAChangelog: `changelog.json` does not exist.
        Damaged: its checksum is wrong, or it is not JSON of a changelog.
        UnsupportedFormat: it has another version of the format.
    """
    path = root / filenames.IDENTITY
    try:
        raw = _whole(files, path, files.read(path))
    except (FileNotFoundError, NotADirectoryError):
        raise NotAChangelog(
            "Not a changelog.", path=root, expected=f"a directory with {filenames.IDENTITY}",
            found="a directory without it" if files.is_directory(root)
            else "a file" if files.exists(root) else "no directory",
            remedy="correct the path, or create the changelog by opening it to write",
        ) from None  # fmt: skip
    try:
        fields: dict[str, Any] = json.loads(raw)
        if fields["magic"] != MAGIC:
            raise ValueError(f"magic {fields['magic']!r}")
        version = int(fields["version"])
        if version <= FORMAT_VERSION:  # a later one may have another checksum
            _check_crc(raw, fields["crc32c"])
        check_version(version, path)
        return fields
    except (KeyError, ValueError, TypeError, AttributeError) as e:
        raise damaged(path, e) from e


def read_uuid(files: Files, root: Path) -> str:
    """Which changelog is at `root`. Raises what `read_fields` raises."""
    try:
        return str(read_fields(files, root)["uuid"])
    except KeyError as e:
        raise damaged(root / filenames.IDENTITY, e) from e


def damaged(path: Path, e: Exception) -> Damaged:
    """The error for a `changelog.json` that cannot be read or interpreted."""
    return Damaged(
        f"{filenames.IDENTITY} is damaged.", path=path, position="byte 0",
        expected="JSON of a keyfold changelog with its CRC32C", found=f"{type(e).__name__}: {e}",
        remedy="put the file back from a copy of this directory (a snapshot's own file differs), or "
        "create a changelog from a snapshot with Changelog.clone(snapshot, path)",
    )  # fmt: skip


def replacement(path: Path) -> Path:
    """Where the whole new content is, while `path` is replaced in a way that a reader may see half of."""
    return path.with_name(path.name + ".tmp")


def _whole(files: Files, path: Path, raw: bytes) -> bytes:
    """The intended content of `path` if a process died while replacing it; otherwise `raw`, its content."""
    if raw.endswith(b"}\n"):
        return raw
    try:
        whole = files.read(replacement(path))
    except FileNotFoundError:
        return raw
    return whole if whole.startswith(raw) else raw
