"""A pass replaces groups of segments one after the other: room, what stays where it is, passes broken off
between groups.
"""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from keyfold import Changelog, restore
from keyfold.checkpoints.cleaner import clean_pass
from keyfold.checkpoints.cleaner.clean_pass import Aborted, clean_partition
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import CompactedAway, StorageFailed
from keyfold.statestore.files import LOCAL, Files

SEGMENT = 1 << 16
#: Equal values would be next to nothing in a compressed segment, and all of them in one group.
CONFIG = {
    "cleaner.threads": 0,
    "segment.bytes": SEGMENT,
    "anchors.auto": 0,
    "delete.retention.ms": 10**12,
    "compression.type": "none",
}
VALUE = b"v" * 1000


class StopAt:
    """A pace that stops the pass at its n-th call."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, size: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise Aborted


def append(log: Changelog, keys: range, value: bytes = VALUE) -> None:
    log.append(pa.table({"key": [b"%d" % k for k in keys], "value": [value] * len(keys)}))


def filled(tmp_path: Path, *, files: Files = LOCAL, **config: object) -> Changelog:
    """Ten segments with 600 keys, clean, and one dirty segment that overwrites ten keys of the first."""
    log = Changelog.open(tmp_path / "log", config={**CONFIG, **config}, files=files)
    for start in range(0, 600, 60):
        append(log, range(start, start + 60))
        log.engine.writer.seal_active()
    log.compact()
    append(log, range(10), b"new")
    log.engine.writer.seal_active()
    return log


def expected() -> dict[bytes, bytes]:
    return {b"%d" % k: b"new" if k < 10 else VALUE for k in range(600)}


def segments(log: Changelog) -> list[str]:
    return [s.name for s in log.state.partitions[0].segments]


def test_segments_in_which_nothing_is_obsolete_stay_where_they_are(tmp_path: Path) -> None:
    with filled(tmp_path) as log:
        before = segments(log)
        done = clean_partition(log.engine.writer, 0)
        assert done is not None
        assert len(set(before) & set(segments(log))) >= 8
        assert done.bytes_written < done.bytes_kept / 3
        assert done.records_kept == 600
        assert restore(log.path).to_dict() == expected()


@pytest.mark.parametrize("changed", [0, 3, 5])
def test_what_lies_in_front_of_the_first_change_of_a_segment_is_copied_too(
    tmp_path: Path, changed: int
) -> None:
    """Records so large that each is a batch of its own for the fold."""
    large = b"v" * (1 << 20)
    with Changelog.open(tmp_path / "log", config={**CONFIG, "segment.bytes": "6MiB"}) as log:
        for key in range(6):
            append(log, range(key, key + 1), large)
        log.compact()
        append(log, range(changed, changed + 1), b"new")
        log.compact()
        state = restore(log.path).to_dict()
        assert state == {b"%d" % k: b"new" if k == changed else large for k in range(6)}


def on_disk(root: Path) -> int:
    """Bytes of the partition's files, with those that are unlinked and still mapped."""
    named = sum(f.stat().st_size for f in (root / "0").iterdir() if f.is_file())
    mapped = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.search(r" (\d+) +(/.*\.arrows) \(deleted\)$", line)
        if found and str(root) in found[2]:
            low, high = (int(x, 16) for x in line.split()[0].split("-"))
            mapped.add((found[1], high - low))
    return named + sum(size for _, size in mapped)


def test_a_pass_takes_the_room_of_one_group_and_not_of_the_log(tmp_path: Path) -> None:
    most = 0

    class Watching(Files):
        def create(self, path: Path) -> object:  # type: ignore[override]
            nonlocal most
            if watching:
                most = max(most, on_disk(tmp_path / "log"))
            return super().create(path)

    watching = False
    with Changelog.open(tmp_path / "log", config=CONFIG, files=Watching()) as log:
        for start in range(0, 600, 60):
            append(log, range(start, start + 60))
            log.engine.writer.seal_active()
        log.compact()
        for start in range(0, 600, 30):
            append(log, range(start, start + 20), b"2" * 1500)
            append(log, range(start, start + 10), b"3" * 1500)
            log.engine.writer.seal_active()
        before, watching = on_disk(log.path), True
        assert clean_partition(log.engine.writer, 0) is not None
    assert before > 15 * SEGMENT
    assert before < most <= before + 1.5 * SEGMENT


def test_room_is_asked_for_before_every_group(tmp_path: Path) -> None:
    class Filling(Files):
        asked = 0
        full = False

        def free_bytes(self, path: Path) -> int:
            self.asked += 1
            return 10 if self.full and self.asked > 3 else 1 << 40

    files = Filling()
    with Changelog.open(tmp_path / "log", config=CONFIG, files=files) as log:
        for start in range(0, 600, 60):
            append(log, range(start, start + 60))
        log.compact()
        for start in range(0, 600, 30):
            append(log, range(start, start + 1), b"new")
        log.engine.writer.seal_active()
        files.asked, files.full = 0, True
        with pytest.raises(StorageFailed, match="Not enough disk space for a cleaner pass"):
            clean_partition(log.engine.writer, 0)
        files.full = False
        log.compact()
        assert restore(log.path).to_dict() == {
            b"%d" % k: b"new" if k % 30 == 0 else VALUE for k in range(600)
        }


@pytest.mark.parametrize(("codec", "segment_bytes"), [("none", SEGMENT), ("zstd", 4096)])
def test_a_pass_broken_off_anywhere_leaves_the_same_state_and_is_begun_again(
    tmp_path: Path, codec: str, segment_bytes: int
) -> None:
    config = {**CONFIG, "compression.type": codec, "segment.bytes": segment_bytes}
    with Changelog.open(tmp_path / "log", config=config) as log:
        for start in range(0, 300, 30):
            append(log, range(start, start + 30))
        log.compact()
        first_dirty = log.state.partitions[0].unique_end
        for start in range(0, 300, 20):
            append(log, range(start, start + 1), b"new")
        log.engine.writer.seal_active()
        wanted = {b"%d" % k: b"new" if k % 20 == 0 else VALUE for k in range(300)}
        swapped = set()
        steps = 0
        while True:
            try:
                assert clean_partition(log.engine.writer, 0, StopAt(steps)) is not None
            except Aborted:
                p = log.state.partitions[0]
                assert p.unique_end == first_dirty
                swapped.add(p.clean_end)
                assert restore(log.path).to_dict() == wanted
                assert dict(log.store().all()) == wanted
                files = {f.name for f in (log.path / "0").iterdir() if f.suffix == ".arrows"}
                assert files == set(segments(log))
                steps += 1
                continue
            break
        assert len(swapped) == 2  # before the first swap, and from it on
        assert steps > 20
        assert log.state.partitions[0].unique_end == log.state.partitions[0].end
        assert restore(log.path).to_dict() == wanted


def test_states_between_commits_are_refused_from_the_first_swap_of_a_pass_on(tmp_path: Path) -> None:
    """Else a point whose older records went with the first group would be restored without them."""
    with Changelog.open(tmp_path / "log", config=CONFIG) as log:
        append(log, range(60))
        log.engine.writer.seal_active()
        append(log, range(60, 120))
        log.engine.writer.seal_active()
        append(log, range(120), b"new")
        log.engine.writer.seal_active()
        for steps in range(60):
            try:
                clean_partition(log.engine.writer, 0, StopAt(steps))
            except Aborted:
                pass
            else:
                break
            whole = {b"%d" % k: VALUE for k in range(120)}
            try:
                assert restore(log.path, at=2).to_dict() == whole
            except CompactedAway:
                assert len(segments(log)) < 3 or log.state.partitions[0].records < 240
        with pytest.raises(CompactedAway):
            restore(log.path, at=2)


def test_an_anchor_made_during_a_pass_is_not_undercut(tmp_path: Path) -> None:
    """Before the first swap it ends the pass; afterwards the state that it would name is refused."""
    with filled(tmp_path) as log:
        before = restore(log.path).to_dict()
        calls = 0

        def pace(size: int) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                log.anchor("meanwhile", at=log.state.next_commit - 2)

        with pytest.raises(Aborted):
            clean_partition(log.engine.writer, 0, pace)
        assert calls > 3
        log.compact()
        assert restore(log.path).to_dict() == before
        assert restore(log.path, at="meanwhile").to_dict() == {b"%d" % k: VALUE for k in range(600)}


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_key_bytes_of_compressed_blocks_are_compared_in_a_temporary_file(
    tmp_path: Path, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the first of them: a small pass makes no file."""
    made: list[str] = []

    class Watching(Files):
        def create(self, path: Path) -> object:  # type: ignore[override]
            made.append(path.suffix)
            return super().create(path)

    config = {**CONFIG, "compression.type": compression, "delete.retention.ms": 0}
    with Changelog.open(tmp_path / "log", config=config, files=Watching()) as log:
        for value in (b"1", b"2"):
            append(log, range(2000), value)
        log.append(pa.table({"key": [b"7"], "value": pa.nulls(1, pa.binary())}))
        made.clear()
        monkeypatch.setattr(clean_pass, "_SPILL_FROM_BYTES", 20_000)
        log.compact()
        assert (".keys" in made) == (compression != "none")
        assert restore(log.path).to_dict() == {b"%d" % k: b"2" for k in range(2000) if k != 7}
        made.clear()
        monkeypatch.setattr(clean_pass, "_SPILL_FROM_BYTES", 0)
        log.compact()
        assert ".keys" in made  # the keys of expired tombstones
        assert restore(log.path).to_dict() == {b"%d" % k: b"2" for k in range(2000) if k != 7}
        assert not list((log.path / "work").rglob("*.keys"))
        monkeypatch.undo()
        made.clear()
        append(log, range(2000), b"3")
        assert log.compact()
        assert ".keys" not in made


def test_groups_that_vanish_leave_no_damage_to_verify(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config=CONFIG) as log:
        for start in range(0, 240, 60):
            append(log, range(start, start + 60))
            log.engine.writer.seal_active()
        log.compact()
        append(log, range(60, 180), b"new")
        log.compact()
        bounds = [(s.base, s.next) for s in log.state.partitions[0].segments]
        assert any(a[1] < b[0] for a, b in pairwise(bounds))
        assert verify(log.path).damages == []
        assert len(restore(log.path).to_dict()) == 240


@pytest.mark.parametrize("codecs", [("none", "lz4", "none"), ("lz4", "none", "zstd"), ("zstd", "lz4", "lz4")])
@pytest.mark.parametrize("sealed", [False, True], ids=["crashed", "sealed"])
def test_blocks_of_several_kinds_in_one_segment(
    tmp_path: Path, codecs: tuple[str, ...], sealed: bool
) -> None:
    """The setting may change at any time; keys of one width and of several."""
    config = {**CONFIG, "segment.bytes": "64MiB"}
    path = tmp_path / "log"
    expected: dict[bytes, bytes] = {}
    with Changelog.open(path, config=config) as log:
        for number in range(9):
            log.engine.configure({"compression.type": codecs[number // 3]})
            value = b"%d" % number
            append(log, range(100 + number % 2 * 10_000, 900 + number % 2 * 10_000), value)
            expected |= {
                b"%d" % k: value for k in range(100 + number % 2 * 10_000, 900 + number % 2 * 10_000)
            }
        append(log, range(0, 20_000, 7), b"last")
        expected |= {b"%d" % k: b"last" for k in range(0, 20_000, 7)}
        if not sealed:
            path = tmp_path / "crashed"
            shutil.copytree(log.path, path)
            (path / "lock").unlink()
        else:
            log.compact()
    with Changelog.open(path) as log:
        if not sealed:
            log.compact()
        assert log.state.partitions[0].records == len(expected)
        assert restore(path).to_dict() == expected


def test_compressed_blocks_with_gaps_become_dirty_again_when_an_anchor_goes(tmp_path: Path) -> None:
    """Where records are missing, offsets cannot be told from a block's first one."""
    config = {**CONFIG, "compression.type": "lz4", "segment.bytes": 64 << 20}
    with Changelog.open(tmp_path / "log", config=config) as log:
        append(log, range(10_000, 10_010), b"few")  # the first array of keys that is held is a short one
        for number in range(4):
            # Several blocks: each holds 2 MiB before it is compressed.
            append(log, range(10_000, 14_000, number + 1), b"%d" % number * 1500)
            if number == 1:
                log.anchor("keep")
        log.compact()
        kept = log.state.partitions[0].records
        expected = restore(log.path).to_dict()
        log.drop_anchor("keep")
        log.compact()
        assert log.state.partitions[0].records == len(expected) < kept
        assert restore(log.path).to_dict() == expected
