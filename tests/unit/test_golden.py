"""A directory of format version 2, written once and kept: read as it was, and damage in it is refused."""

from __future__ import annotations

import datetime as dt
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from crc32c import crc32c

from keyfold import Changelog, restore
from keyfold.checkpoints.manifest.identity import read_identity
from keyfold.checkpoints.manifest.journal import decode_line, encode_line, read_head
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import CompactedAway, Damaged
from keyfold.statestore.filenames import segment_index, segment_name
from keyfold.statestore.files import LOCAL
from keyfold.statestore.segment.reader import SegmentReader
from keyfold.statestore.segment.writer import SegmentWriter, block_of
from support import golden

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests" / "golden" / "v2-whole"
STATE = {b"a": b"3", b"c": b"1", b"": b"empty key", b"d": b"\x00\xff", b"e": b"5"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A copy: readers leave marks, and writers write."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "log"))


def test_its_state_and_its_records_are_what_they_were(path: Path) -> None:
    assert verify(path).sound
    assert restore(path).to_dict() == STATE
    assert restore(path, at="kept").to_dict() == {**{k: v for k, v in STATE.items() if k != b"e"}, b"a": b"2"}
    with pytest.raises(CompactedAway):
        restore(path, at=1)
    with Changelog.open(path, mode="r") as log:
        assert (log.last_batch("loader"), log.last_batch("other"), log.partitions) == (8, 1, 2)
        found = {(p, r["offset"], r["key"]) for p in range(2) for b in log.read(p) for r in b.to_pylist()}
        assert all(log.partition(key) == p for p, _, key in found)
        assert sum(log.end_offsets().values()) == 9


def test_it_can_be_written_on(path: Path) -> None:
    with Changelog.open(path) as log:
        assert dict(log.store().all()) == STATE
        log.drop_anchor("kept")
        log.compact()
        assert restore(path).to_dict() == STATE


def test_what_is_written_again_has_the_same_bytes() -> None:
    """Reading alone would not see a writer that orders, spaces or ends its files in another way."""
    for line in (GOLDEN / "manifest" / "1.journal").read_bytes().splitlines(keepends=True):
        read = decode_line(line[:-1])
        assert read is not None
        assert encode_line(read) == line
    head = read_head(LOCAL, GOLDEN / "manifest" / "1.head")
    assert head is not None
    assert head.encode() in (GOLDEN / "manifest" / "1.head").read_bytes()
    assert read_identity(LOCAL, GOLDEN).encode() == (GOLDEN / "changelog.json").read_bytes()
    for file in GOLDEN.rglob("*.arrows"):
        assert segment_name(*(int(part) for part in file.stem.split("-"))) == file.name
    assert encode_line({"app": "é"}).endswith(rb' {"app":"\u00e9"}' + b"\n")


def test_a_segment_that_is_sealed_again_has_the_same_bytes(path: Path, tmp_path: Path) -> None:
    """Its blocks as they are: index, checksums and the end of the stream are made anew."""
    with Changelog.open(path, mode="r") as log:
        sealed = [(p, s) for p in range(2) for s in log.state.partitions[p].segments if s.sealed]
    assert len(sealed) == 2
    for partition, segment in sealed:
        directory = GOLDEN / str(partition)
        reader = SegmentReader(LOCAL, directory, segment)
        data = (directory / segment.name).read_bytes()
        writer = SegmentWriter(LOCAL, tmp_path, segment.name, segment.base, segment.created_ms)
        for batch, entry in zip(reader.batches(), reader.index(), strict=True):
            start = int(entry["position"])
            block = block_of(batch, data[start : start + int(entry["length"])])
            written = writer.append([block], block.last + 1)
        again = writer.seal(replace(written, next=segment.next))
        assert again == segment
        assert (tmp_path / segment.name).read_bytes() == data
        index = segment_index(segment.name)
        assert (tmp_path / index).read_bytes() == (directory / index).read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        str(p.relative_to(GOLDEN))
        for p in sorted(GOLDEN.rglob("*"))
        if p.suffix in {".arrows", ".index", ".journal", ".json"}
    ],
)
def test_a_flipped_byte_in_any_file_is_refused_or_found(path: Path, name: str) -> None:
    file = path / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x04
    file.write_bytes(data)
    try:
        sound = verify(path).sound
    except Damaged:
        sound = False
    assert not sound


KEPT = GOLDEN.parent


def of(tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(KEPT / name, tmp_path / name))


def test_a_torn_last_line_is_cut_off_and_nothing_else_is_lost(tmp_path: Path) -> None:
    """Crash state C2."""
    path = of(tmp_path, "v2-torn")
    assert verify(path).sound
    assert restore(path).to_dict() == STATE
    with Changelog.open(path) as log:
        assert dict(log.store().all()) == STATE
        log.append([{"key": b"f", "value": b"6"}])
    assert restore(path).to_dict() == {**STATE, b"f": b"6"}


def test_a_bad_line_before_a_good_one_is_refused_by_all(tmp_path: Path) -> None:
    """Crash state C4."""
    path = of(tmp_path, "v2-damaged-line")
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    for read in (restore, Changelog.open, lambda p: Changelog.open(p, mode="r")):
        with pytest.raises(Damaged) as refused:
            read(path)
        assert str(refused.value.path).endswith("manifest/1.journal")
    assert not verify(path).sound
    assert before.items() <= {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}.items()


def test_a_damaged_block_is_refused_where_it_is_read_and_only_there(tmp_path: Path) -> None:
    path = of(tmp_path, "v2-damaged-block")
    (damage,) = verify(path).damages
    assert str(damage.path).endswith("0/00000000000000000005-1-5.arrows")
    with pytest.raises(Damaged) as refused:
        restore(path).to_dict()
    assert str(refused.value.path).endswith("0/00000000000000000005-1-5.arrows")
    with Changelog.open(path, mode="r") as log:
        assert sum(b.num_rows for b in log.read(1)) == 2
        assert sum(b.num_rows for b in log.read(0, to=5)) == 4


def test_a_pass_that_was_killed_between_two_groups_is_gone_on_with(tmp_path: Path) -> None:
    """Crash state S3: one group is swapped, the copy of the next is whole but named by no line."""
    path = of(tmp_path, "v2-swapped")
    expected = {b"a": b"3", **{b"k%d" % n: b"x" * 300 for n in range(4)}}
    copy = path / "0" / "00000000000000000003-1-6.arrows"
    assert copy.exists()
    assert verify(path).sound
    assert restore(path).to_dict() == expected
    with Changelog.open(path) as log:
        p = log.state.partitions[0]
        assert (p.unique_end, p.clean_end) == (0, 12)
        assert not copy.exists()
        assert dict(log.store().all()) == expected
        log.compact()
        assert log.state.partitions[0].unique_end == 12
    assert verify(path).sound
    assert restore(path).to_dict() == expected


def test_typed_columns_are_what_they_were(tmp_path: Path) -> None:
    path = of(tmp_path, "v2-typed")
    assert verify(path).sound
    found = restore(path).to_arrow().to_pylist()
    assert {tuple(row[name] for name in golden.KEYS): row for row in found} == golden.TYPED_STATE
    before = restore(path, at="before").to_arrow().to_pylist()
    assert {row["user"]: row["note"] for row in before} == {"a": None, "": None}
    with Changelog.open(path, mode="r") as log:
        assert log.columns == golden.columns()[1]
        records = [r for p in range(2) for b in log.read(p) for r in b.to_pylist()]
        assert [r["value"] for r in records].count(None) == 1


def test_a_typed_directory_can_be_written_on(tmp_path: Path) -> None:
    path = of(tmp_path, "v2-typed")
    added = ("é", dt.date(2013, 1, 1))
    with Changelog.open(path) as log:
        value = {k: v for k, v in golden.TYPED_STATE[added].items() if k not in golden.KEYS}
        assert log.store().get(added) == value
        log.append(pa.table({"user": ["é"], "day": [added[1]], "note": ["again"]}))
        log.drop_anchor("before")
        log.compact()
        assert log.store().get(added) == {**dict.fromkeys(value), "note": "again"}
    rows = {row["user"]: row for row in restore(path).to_arrow().to_pylist()}
    assert rows["é"] == {**dict.fromkeys(rows["é"]), "user": "é", "day": added[1], "note": "again"}
    assert rows["a"] == golden.TYPED_STATE["a", dt.date(2013, 1, 1)]
    assert verify(path).sound


def test_the_directories_are_those_that_the_script_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody could make them again after a change of the format."""
    monkeypatch.setattr(golden, "GOLDEN", tmp_path / "golden")
    golden.main()
    made = {p.relative_to(tmp_path / "golden") for p in (tmp_path / "golden").rglob("*") if p.is_file()}
    assert made == {p.relative_to(KEPT) for p in KEPT.rglob("*") if p.is_file()}
    for name in ("v2-whole", "v2-typed"):
        identity = f"{name}/changelog.json"
        assert (tmp_path / "golden" / identity).read_bytes() == (KEPT / identity).read_bytes()


def test_the_example_of_the_format_page_is_a_line_of_it() -> None:
    page = (ROOT / "docs" / "format.md").read_text()
    line = (GOLDEN / "manifest" / "1.journal").read_bytes().split(b"\n")[1]
    assert line.decode() in page.replace("\n", "")
    assert line[:8].decode() == f"{crc32c(line[9:]):08x}"
