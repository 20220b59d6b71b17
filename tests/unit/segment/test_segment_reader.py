"""Reading a segment from anywhere to anywhere: blocks of several kinds, sealed or not, with gaps or not."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

import pyarrow as pa
import pytest

from keyfold import Changelog
from keyfold.statestore.errors import Damaged
from keyfold.statestore.files import LOCAL
from keyfold.statestore.segment.reader import SegmentReader
from keyfold.statestore.segment.writer import Segment

CONFIG = {"anchors.auto": 0, "cleaner.threads": 0, "segment.bytes": "64MiB"}
CODECS = ("none", "lz4", "zstd")
#: Records of each block.
ROWS = 40


def written(path: Path, codecs: tuple[str, ...], *, gaps: bool) -> dict[int, tuple[bytes, bytes]]:
    """A changelog with one block for each codec; what it holds, by offset."""
    records: dict[int, tuple[bytes, bytes]] = {}
    with Changelog.open(path, config=CONFIG) as log:
        for block, codec in enumerate(codecs):
            log.engine.configure({"compression.type": codec})
            # With gaps, each second record is followed by a later one of its key.
            keys = [b"%d" % (row // (2 if gaps else 1) + 1000 * block) for row in range(ROWS)]
            values = [b"%d-%d" % (block, row) for row in range(ROWS)]
            base = sum(log.state.ends)
            log.append(pa.table({"key": keys, "value": values}))
            records |= {base + n: kv for n, kv in enumerate(zip(keys, values, strict=True))}
        if gaps:
            log.compact()
            records = {offset: kv for offset, kv in records.items() if offset % 2}
    return records


def the_segment(path: Path) -> Segment:
    with Changelog.open(path, mode="r") as log:
        (segment,) = log.state.partitions[0].segments
    return segment


def read(reader: SegmentReader, start: int, stop: int, *, keys_only: bool) -> dict[int, bytes]:
    """By offset the key, with the value behind it if that was asked for."""
    found: dict[int, bytes] = {}
    for batch in reader.batches(start, stop, keys_only=keys_only):
        values = [b""] * len(batch) if keys_only else [b" " + v for v in batch.column("value").to_pylist()]
        keys = batch.column("key").to_pylist()
        found |= zip(batch.column("offset").to_pylist(), map(bytes.__add__, keys, values), strict=True)
    return found


@pytest.mark.parametrize(
    "codecs", [*product(CODECS, repeat=2), ("lz4",) * 4, ("none", "zstd", "lz4", "none")]
)
@pytest.mark.parametrize("kind", ["crashed", "sealed", "gaps"])
def test_any_range_of_offsets_is_read(tmp_path: Path, codecs: tuple[str, ...], kind: str) -> None:
    """By a reader that has read before, which knows how its blocks are compressed, and by a new one."""
    path = tmp_path / "log"
    if kind == "crashed":
        with Changelog.open(tmp_path / "living", config=CONFIG):
            records = written(tmp_path / "living", codecs, gaps=False)
            shutil.copytree(tmp_path / "living", path)
    else:
        records = written(path, codecs, gaps=kind == "gaps")
    segment = the_segment(path)
    assert segment.sealed == (kind != "crashed")
    edges = [n * ROWS + d for n in range(len(codecs) + 1) for d in (-1, 0, 1)]
    used = SegmentReader(LOCAL, path / "0", segment)
    for start, stop, keys_only in product(edges, edges, (True, False)):
        expected = {
            offset: key if keys_only else key + b" " + value
            for offset, (key, value) in records.items()
            if start <= offset < stop
        }
        for reader in (used, SegmentReader(LOCAL, path / "0", segment)):
            assert read(reader, start, stop, keys_only=keys_only) == expected


@pytest.mark.parametrize("codec", CODECS)
def test_a_damaged_schema_message_is_found(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "log"
    written(path, (codec, codec), gaps=False)
    segment = the_segment(path)
    file = path / "0" / segment.name
    content = bytearray(file.read_bytes())
    content[20] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    with pytest.raises(Damaged, match=r"damaged[\s\S]*bytes 0 to "):
        SegmentReader(LOCAL, path / "0", segment).verify()
    with pytest.raises(Damaged, match=r"damaged[\s\S]*bytes 0 to "):
        read(SegmentReader(LOCAL, path / "0", segment), 0, segment.next, keys_only=False)
