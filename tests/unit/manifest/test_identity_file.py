"""`changelog.json`: what is accepted of it, and what is damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyfold.checkpoints.manifest.identity_file import MAGIC, encode_fields, read_fields, read_uuid
from keyfold.statestore import filenames
from keyfold.statestore.errors import Damaged
from keyfold.statestore.files import LOCAL
from keyfold.statestore.segment.block import FORMAT_VERSION

FIELDS = {"magic": MAGIC, "version": FORMAT_VERSION, "uuid": "c0ffee", "partitions": 4}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    (tmp_path / filenames.IDENTITY).write_bytes(encode_fields(FIELDS))
    read = read_fields(LOCAL, tmp_path)
    assert {name: read[name] for name in FIELDS} == FIELDS
    assert read_uuid(LOCAL, tmp_path) == "c0ffee"


def test_another_value_with_the_same_checksum_is_damage(tmp_path: Path) -> None:
    data = encode_fields(FIELDS)
    for was, now in ((b"c0ffee", b"c0ffed"), (b": 4", b": 5")):
        (tmp_path / filenames.IDENTITY).write_bytes(data.replace(was, now))
        with pytest.raises(Damaged, match="crc32c"):
            read_uuid(LOCAL, tmp_path)


def test_a_sound_file_without_its_uuid_is_damage(tmp_path: Path) -> None:
    (tmp_path / filenames.IDENTITY).write_bytes(encode_fields({"magic": MAGIC, "version": FORMAT_VERSION}))
    with pytest.raises(Damaged, match="uuid"):
        read_uuid(LOCAL, tmp_path)
