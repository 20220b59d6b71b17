"""What Spark's `offsets/<batch>` says, in both of its formats, and which entry is the one before."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from keyfold.sink.offset_log import LocalOffsetLog, parse, positions
from keyfold.statestore.errors import Damaged
from keyfold.statestore.files import LOCAL, Files

KAFKA = '{"events":{"0":7,"1":9}}'


@pytest.fixture
def log(tmp_path: Path) -> LocalOffsetLog:
    (tmp_path / "offsets").mkdir()
    return LocalOffsetLog(LOCAL, tmp_path)


def write(log: LocalOffsetLog, batch: int, *sources: str, version: str = "v1") -> None:
    text = "\n".join([version, '{"batchWatermarkMs":0}', *sources])
    (Path(str(log)) / "offsets" / str(batch)).write_text(text)


def test_an_entry_has_one_text_per_source(log: LocalOffsetLog) -> None:
    write(log, 0, KAFKA, "-", '{"logOffset":3}')
    assert positions(log, 0) == ((KAFKA, "-", '{"logOffset":3}'), ())


def test_sources_with_names_come_in_the_order_of_their_names(log: LocalOffsetLog) -> None:
    write(log, 0, f"10:{KAFKA}", "2:-", '1:{"a":"b:c"}', version="v2")
    assert positions(log, 0)[0] == ('{"a":"b:c"}', "-", KAFKA)


def test_the_entry_before_is_that_of_the_largest_smaller_batch(log: LocalOffsetLog) -> None:
    for batch in (2, 9, 10, 17):
        write(log, batch, str(batch))
    (Path(str(log)) / "offsets" / ".17.crc").touch()
    for name in (".16.crc", "16.tmp", ".16.tmp.crc", "18.tmp"):
        (Path(str(log)) / "offsets" / name).touch()
    assert positions(log, 17) == (("17",), ("10",))
    assert positions(log, 10) == (("10",), ("9",))
    assert positions(log, 9) == (("9",), ("2",))
    assert positions(log, 2) == (("2",), ())


def test_a_missing_entry_is_refused_with_its_path(log: LocalOffsetLog) -> None:
    with pytest.raises(Damaged, match="no such entry") as caught:
        positions(log, 4)
    assert caught.value.path == f"{log}/offsets/4"


@pytest.mark.parametrize(
    "entry",
    [b"", b"v1", b"v3\n{}\n1", b"v2\n{}\nno name", b"\xff\xfe\n\n", b"{}\nv1\n"],
)
def test_an_entry_that_is_none_is_refused(log: LocalOffsetLog, entry: bytes) -> None:
    with pytest.raises(Damaged, match="Cannot read the source offsets"):
        parse(entry, log, 0)


def test_an_entry_without_metadata_has_an_empty_line(log: LocalOffsetLog) -> None:
    assert parse(b"v1\n\n-\n", log, 0) == ("-",)


class Recorder(Files):
    """Notes the name and path of every sync."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Path]] = []

    def _operation(self, name: str, path: Path, **rest: Any) -> AbstractContextManager[None]:
        if name.startswith("sync"):
            self.seen.append((name, path))
        return super()._operation(name, path, **rest)


def test_a_sync_covers_entries_their_checksums_and_every_directory_of_the_query(log: LocalOffsetLog) -> None:
    """Without its checksum Spark could not read a file, without its directory the file has no name."""
    root = Path(str(log))
    for batch in (0, 1):
        write(log, batch, "a")
        (root / "offsets" / f".{batch}.crc").touch()
    (root / "metadata").touch()
    (root / ".metadata.crc").touch()
    files = Recorder()
    recorded = LocalOffsetLog(files, root)
    entry = [("sync_path", "offsets/0"), ("sync_path", "offsets/.0.crc"), ("sync_directory", "offsets")]
    query = [("sync_path", "metadata"), ("sync_path", ".metadata.crc"), ("sync_directory", "")]
    recorded.sync(0)
    expected = [(name, root / path) for name, path in (*entry, *query)]
    assert files.seen == [*expected, ("sync_directory", root.parent)]
    files.seen.clear()
    recorded.sync(1)
    assert files.seen == [(name, root / path.replace("0", "1")) for name, path in entry]


def test_what_sources_keep_of_their_own_is_synced_once(log: LocalOffsetLog) -> None:
    """Where a Kafka source began, and which files are in which batch of a file source. Spark deletes old ones
    while this runs.
    """
    root = Path(str(log))
    write(log, 0, "a")
    (root / "metadata").touch()
    for source, name in (("0", "0"), ("0", ".0.crc"), ("1", "7"), ("1", "9.compact"), ("1", ".10.x.tmp")):
        (root / "sources" / source).mkdir(parents=True, exist_ok=True)
        (root / "sources" / source / name).touch()

    class Vanishing(Recorder):
        def list_directory(self, path: Path) -> list[str]:
            """One that is gone when it is to be synced."""
            return [*super().list_directory(path), *(["6"] if path.name == "1" else [])]

    files = Vanishing()
    recorded = LocalOffsetLog(files, root)
    recorded.sync(0)
    synced = {(name, str(path.relative_to(root))) for name, path in files.seen if root in path.parents}
    paths = {path for name, path in synced if name == "sync_path"}
    assert {path for path in paths if path.startswith("sources")} == {
        "sources/0/0", "sources/0/.0.crc", "sources/1/6", "sources/1/7", "sources/1/9.compact",
    }  # fmt: skip
    assert {"sources", "sources/0", "sources/1"} <= {
        path for name, path in synced if name == "sync_directory"
    }
    files.seen.clear()
    (root / "sources" / "1" / "10").touch()
    recorded.sync(0)
    seen = [(name, str(path.relative_to(root))) for name, path in files.seen if "sources" in path.parts]
    assert seen == [("sync_path", "sources/1/10"), ("sync_directory", "sources/1")]


def test_the_query_is_made_durable_once_and_each_entry_by_itself(log: LocalOffsetLog) -> None:
    """With files for which fsync fails where they are missing, so that each is seen to be synced."""
    write(log, 0, "a")
    with pytest.raises(FileNotFoundError):
        log.sync(0)
    (Path(str(log)) / "metadata").write_text("{}")
    log.sync(0)
    (Path(str(log)) / "metadata").unlink()
    write(log, 1, "b")
    log.sync(1)
    with pytest.raises(FileNotFoundError):
        log.sync(2)
