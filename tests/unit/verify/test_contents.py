"""`verify` finds what contradicts itself though all checksums are right: what a bug of a writer leaves."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c

from keyfold import Changelog
from keyfold.checkpoints.log.ownership import journal_epochs
from keyfold.checkpoints.log.reader_marks import ViewLock
from keyfold.checkpoints.manifest.journal import Head
from keyfold.checkpoints.manifest.segment_lines import segment_line
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore import filenames
from keyfold.statestore.files import LOCAL
from keyfold.statestore.segment.block import RECORD_SCHEMA, encode
from keyfold.statestore.segment.writer import SegmentWriter, block_of
from support.changelogs import BY_HAND, make_crashed, rewrite


def _first(line: dict[str, Any]) -> dict[str, Any]:
    """The first partition of a checkpoint line."""
    first: dict[str, Any] = line["partitions"][0]
    return first


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda x: x.pop("apps"), "invalid content"),
        (lambda x: x.update(changelog="0" * 32), "another changelog"),
        (lambda x: x.update(epoch=99), "epoch differs from its name"),
        (lambda x: x.update(seq=99), "names another line"),
        (lambda x: x["partitions"].pop(), "changelog.json disagree"),
        (lambda x: x["commits"].reverse(), "out of order"),
        (lambda x: x.update(next_commit=2), "beyond the log's end"),
        (lambda x: x["apps"]["append"]["ends"].reverse(), "beyond the log's end"),
        (lambda x: x["anchors"][0].update(ends=[1, 1]), "compacted away"),
        (lambda x: _first(x).update(start=999), "out of order"),
        (lambda x: _first(x).update(clean_end=999), "out of order"),
        (lambda x: _first(x)["passes"].append([999, 0]), "passes are out of order"),
        (lambda x: _first(x).update(dropped_tombstones=[999]), "in the dirty section"),
        (lambda x: _first(x).update(end=999), "do not end where"),
        (lambda x: _first(x)["segments"].pop(-1), "do not end where"),
        (lambda x: _first(x)["segments"].append(_first(x)["segments"][0]), "named twice"),
        (lambda x: _first(x)["segments"][1].update(base=999), "does not begin where"),
        (lambda x: _first(x)["segments"][0].update(file=f"{0:020}-99-1.arrows"), "a name of a later epoch"),
        (lambda x: _first(x)["segments"][0].update(records=999), "more records than offsets"),
        (lambda x: _first(x)["segments"][0].update(max_timestamp=1), "counts of a segment do not match"),
        (lambda x: _first(x)["segments"][0].update(tombstones=0), "counts of a segment do not match"),
        (lambda x: _first(x)["segments"][0].update(size=400), "another segment"),
    ],
)
def test_a_manifest_that_contradicts_itself_or_the_files_is_damage(
    change: Callable[[dict[str, Any]], object], what: str, closed: Path
) -> None:
    rewrite(closed, change)
    assert any(what in damage.what for damage in verify(closed).damages)


def test_marks_that_do_not_lead_to_the_end_are_damage(tmp_path: Path) -> None:
    crashed = make_crashed(tmp_path / "log")
    rewrite(crashed, lambda x: _first(x)["segments"][-1]["marks"].pop())
    assert any("marks of segment" in damage.what for damage in verify(crashed).damages)


def _batch(keys: list[bytes], offsets: list[int]) -> pa.RecordBatch:
    columns = [pa.array(offsets, pa.int64()), pa.array([0] * len(keys), pa.timestamp("ms")), pa.array(keys)]
    empty = [pa.nulls(len(keys), RECORD_SCHEMA.field(name).type) for name in ("value", "headers")]
    return pa.RecordBatch.from_arrays([*columns, *empty], schema=RECORD_SCHEMA)


def place_segment(
    root: Path,
    batch: pa.RecordBatch,
    next_offset: int,
    *,
    data: bytes | None = None,
    entry: tuple[int, bytes] = (0, b""),
    clean_end: int | None = None,
) -> Path:
    """Make partition 0 of a new changelog one sealed segment of one block, with checksums that fit.

    Args:
        data: the block's bytes, those of `batch` without it.
        entry: bytes to put at a position of the index.
        clean_end: how far a pass may have left records out; everywhere by default.
    """
    Changelog.open(root, partitions=2, config=BY_HAND).close()
    (root / "0").mkdir(exist_ok=True)
    path = root / "0" / f"{0:020}-1-1.arrows"

    def place(line: dict[str, Any]) -> None:
        writer = SegmentWriter(LOCAL, root / "0", path.name, 0, 0)
        writer.append([block_of(batch, data or encode(batch))], next_offset)
        sealed = writer.seal(writer.segment)
        index = bytearray(path.with_suffix(".index").read_bytes())
        index[entry[0] : entry[0] + len(entry[1])] = entry[1]
        path.with_suffix(".index").write_bytes(index)
        segment = segment_line(replace(sealed, index_crc=crc32c(index)))
        folded = next_offset if clean_end is None else clean_end
        _first(line).update(end=next_offset, clean_end=folded, unique_end=folded, segments=[segment])

    rewrite(root, place)
    return path


#: Keys of partition 0 of 2, and one of partition 1.
HERE = [b"c", b"d"]
THERE = b"b"


def test_a_segment_that_is_placed_by_hand_is_sound(tmp_path: Path) -> None:
    """Otherwise the tests below would find what they did not plant."""
    place_segment(tmp_path / "log", _batch(HERE, [0, 4]), 5)
    assert verify(tmp_path / "log").damages == []


@pytest.mark.parametrize(
    ("keys", "offsets", "next_offset", "what"),
    [
        (HERE, [3, 1], 4, "do not ascend"),
        (HERE, [1, 1], 4, "do not ascend"),
        (HERE, [-1, 1], 4, "do not ascend"),
        (HERE, [0, 4], 4, "do not ascend"),
        ([HERE[0], THERE], [0, 1], 2, "wrong partition"),
    ],
)
def test_records_where_they_may_not_be_are_damage(
    keys: list[bytes], offsets: list[int], next_offset: int, what: str, tmp_path: Path
) -> None:
    path = place_segment(tmp_path / "log", _batch(keys, offsets), next_offset)
    (damage,) = verify(tmp_path / "log").damages
    assert damage.path == path
    assert what in damage.what


@pytest.mark.parametrize("clean_end", range(6))
@pytest.mark.parametrize("offsets", [[0, 4], [1, 4], [0, 1], [3, 4], [2, 3]])
def test_a_record_that_is_missing_where_nothing_was_folded_is_damage(
    offsets: list[int], clean_end: int, tmp_path: Path
) -> None:
    """In front of the first record, between two, and after the last one; said once, with the first offset."""
    path = place_segment(tmp_path / "log", _batch(HERE, offsets), 5, clean_end=clean_end)
    missing = sorted(set(range(clean_end, 5)) - set(offsets))
    found = verify(tmp_path / "log").damages
    assert [damage.path for damage in found] == [path] * bool(missing)
    for damage in found:
        assert "record is missing" in damage.what
        assert damage.position == f"partition 0, offset {missing[0]}"


@pytest.mark.parametrize(
    ("position", "value", "what"),
    [
        (32, struct.pack("<q", 1), "does not match its block"),
        (32 + 8, struct.pack("<q", 9), "does not match its block"),
        (32 + 32, struct.pack("<q", 9), "does not match its block"),
        (32 + 40, struct.pack("<I", 9), "does not match its block"),
        (32 + 16, struct.pack("<q", 8), "leave a gap"),
        (28, struct.pack("<I", 1), "do not match their checksum"),
    ],
)
def test_an_index_that_says_other_things_than_its_segment_is_damage(
    position: int, value: bytes, what: str, tmp_path: Path
) -> None:
    path = place_segment(tmp_path / "log", _batch(HERE, [0, 4]), 5, entry=(position, value))
    found = verify(tmp_path / "log")
    assert {damage.path for damage in found.damages} == {path}
    assert any(what in damage.what for damage in found.damages)


def test_a_block_with_a_right_checksum_that_is_none_is_damage(tmp_path: Path) -> None:
    place_segment(tmp_path / "log", _batch(HERE, [0, 4]), 5, data=b"x" * 64)
    (damage,) = verify(tmp_path / "log").damages
    assert "invalid content" in damage.what


# -- what is said of a journal -------------------------------------------------------------------------------


def _journal(root: Path) -> tuple[int, Path]:
    epoch = max(journal_epochs(LOCAL, root))
    return epoch, filenames.journal(root, epoch)


def test_a_head_that_ends_inside_a_line_is_damage(closed: Path) -> None:
    epoch, journal = _journal(closed)
    data = journal.read_bytes()[:-3]
    head = Head(len(data), 1, crc32c(data)).encode()
    filenames.head(closed, epoch).write_bytes(head + b" " * len(head))
    assert "A head ends inside a line." in [damage.what for damage in verify(closed).damages]


def test_a_damaged_line_is_told_with_the_checksum_that_it_says_and_the_one_that_it_has(closed: Path) -> None:
    _, journal = _journal(closed)
    first, rest = journal.read_bytes().split(b"\n", 1)
    changed = first.replace(b'"seq"', b'"sec"', 1)
    journal.write_bytes(changed + b"\n" + rest)
    (damage,) = [d for d in verify(closed).damages if d.what == "A manifest line is damaged."]
    assert first[:8].decode() in damage.expected
    assert damage.found == f"crc32c {crc32c(changed[9:]):08x}"


def test_the_files_of_the_durable_line_are_kept_while_they_are_checked(
    closed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked: list[int] = []
    monkeypatch.setattr(ViewLock, "record", lambda self, seq: marked.append(seq))
    assert verify(closed).line == marked[-1] > 0
