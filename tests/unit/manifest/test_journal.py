"""Journals and heads: what is accepted of them, and what is damage."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from keyfold.checkpoints.manifest.entries import CheckpointEntry
from keyfold.checkpoints.manifest.journal import (
    Head,
    JournalWriter,
    apply_next,
    decode_line,
    encode_line,
    read_durable,
    read_further,
    read_head,
    read_journal,
    slots_of,
)
from keyfold.checkpoints.manifest.segment_lines import Line
from keyfold.checkpoints.manifest.state import State, empty
from keyfold.statestore import filenames
from keyfold.statestore.errors import Damaged, UnsupportedFormat
from keyfold.statestore.files import LOCAL

ID = "c0ffee"


def anchor(n: int) -> Line:
    return {"seq": n, "t": "anchor", "name": f"a{n}", "commit": 1, "ends": [0], "app": ""}


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Epoch 1 with a checkpoint (line 1) and the anchors of lines 2 to 5, all published."""
    (tmp_path / filenames.MANIFEST).mkdir()
    writer = JournalWriter(LOCAL, tmp_path, 1)
    writer.append(CheckpointEntry(empty(1, 1, seq=1), ID).to_line())
    writer.publish(1)
    for n in range(2, 6):
        writer.append(anchor(n))
        writer.publish(n)
    writer.close()
    return tmp_path


def head_of(root: Path) -> Head:
    head = read_head(LOCAL, filenames.head(root, 1))
    assert head is not None
    return head


def load(root: Path) -> State | None:
    loaded = read_journal(LOCAL, root, 1, ID, read_head(LOCAL, filenames.head(root, 1)))
    return None if loaded is None else loaded.state


def test_a_line_is_its_checksum_and_its_json() -> None:
    assert encode_line({"seq": 7})[9:] == b'{"seq":7}\n'
    assert decode_line(encode_line({"seq": 7})[:-1]) == {"seq": 7}


def test_a_line_with_any_flipped_bit_is_refused() -> None:
    raw = encode_line({"seq": 7, "t": "anchor"})[:-1]
    for i in range(len(raw)):
        for bit in range(8):
            flipped = bytearray(raw)
            flipped[i] ^= 1 << bit
            assert decode_line(bytes(flipped)) is None or flipped[:8].lower() == raw[:8]


def test_the_whole_journal_is_read_back(journal: Path) -> None:
    state = load(journal)
    assert state is not None
    assert (state.seq, sorted(state.anchors)) == (5, ["a2", "a3", "a4", "a5"])


def test_readers_stop_at_the_head(journal: Path) -> None:
    path = filenames.journal(journal, 1)
    path.write_bytes(path.read_bytes() + encode_line(anchor(6)))
    assert read_durable(LOCAL, journal, 1, ID, head_of(journal)).state.seq == 5
    assert load(journal).seq == 6  # type: ignore[union-attr]  # recovery takes what is whole


def test_a_reader_that_follows_reads_only_what_is_new(journal: Path) -> None:
    head = head_of(journal)
    path = filenames.journal(journal, 1)
    data = path.read_bytes()
    at = data.index(encode_line(anchor(4)))
    from crc32c import crc32c

    before = read_durable(LOCAL, journal, 1, ID, Head(at, 3, crc32c(data[:at])))
    after = read_further(LOCAL, journal, 1, ID, head, before)
    assert (before.state.seq, after.state.seq, after.crc) == (3, 5, head.crc)


@pytest.mark.parametrize("cut", [1, 9, 30])
def test_a_torn_line_behind_the_head_is_cut_off_and_counted(journal: Path, cut: int) -> None:
    path = filenames.journal(journal, 1)
    whole = path.read_bytes()
    path.write_bytes(whole + encode_line(anchor(6))[:cut])
    loaded = read_journal(LOCAL, journal, 1, ID, head_of(journal))
    assert loaded is not None
    assert (loaded.state.seq, loaded.length, loaded.torn) == (5, len(whole), cut)


def test_a_journal_shorter_than_its_head_is_damage(journal: Path) -> None:
    path = filenames.journal(journal, 1)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(Damaged, match="shorter than its head"):
        load(journal)
    with pytest.raises(Damaged):
        read_durable(LOCAL, journal, 1, ID, head_of(journal))


def test_a_bad_line_before_a_good_one_is_damage_even_without_a_head(journal: Path) -> None:
    path = filenames.journal(journal, 1)
    filenames.head(journal, 1).unlink()
    data = bytearray(path.read_bytes())
    data[data.index(encode_line(anchor(4))) + 12] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match="intact lines follow it"):
        load(journal)


def test_a_bad_line_before_a_good_one_whose_newline_is_lost_is_damage(journal: Path) -> None:
    path = filenames.journal(journal, 1)
    filenames.head(journal, 1).unlink()
    path.write_bytes(path.read_bytes().replace(b'"a4"', b'"a9"')[:-1])
    with pytest.raises(Damaged, match="damaged"):
        load(journal)


@pytest.mark.parametrize("first", [False, True], ids=["a later line", "the checkpoint"])
def test_a_last_line_without_its_newline_was_never_acknowledged(journal: Path, first: bool) -> None:
    path = filenames.journal(journal, 1)
    filenames.head(journal, 1).unlink()
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"\n")] if first else data[:-1])
    loaded = read_journal(LOCAL, journal, 1, ID, None)
    if first:
        assert loaded is None
    else:
        assert loaded is not None
        assert (loaded.state.seq, loaded.torn) == (4, len(encode_line(anchor(5))) - 1)


def test_a_bad_checkpoint_before_a_good_line_is_damage(journal: Path) -> None:
    path = filenames.journal(journal, 1)
    filenames.head(journal, 1).unlink()
    path.write_bytes(b"x" + path.read_bytes()[1:])
    with pytest.raises(Damaged):
        load(journal)


def test_an_opening_that_died_leaves_a_journal_that_counts_for_nothing(journal: Path) -> None:
    filenames.head(journal, 1).unlink()
    path = filenames.journal(journal, 1)
    for content in (b"", path.read_bytes()[:40]):
        path.write_bytes(content)
        assert load(journal) is None


def test_a_lost_line_is_damage(journal: Path) -> None:
    path = filenames.journal(journal, 1)
    filenames.head(journal, 1).unlink()
    path.write_bytes(path.read_bytes().replace(encode_line(anchor(3)), b""))
    with pytest.raises(Damaged, match="invalid content"):
        load(journal)


def test_the_journal_of_another_changelog_is_refused(journal: Path) -> None:
    with pytest.raises(Damaged, match="another changelog"):
        read_journal(LOCAL, journal, 1, "decaf", None)


@pytest.mark.parametrize("version", [1, 99])
def test_another_format_is_refused(journal: Path, version: int) -> None:
    line = CheckpointEntry(empty(1, 1, seq=1), ID).to_line()
    line["version"] = version
    filenames.journal(journal, 1).write_bytes(encode_line(line))
    filenames.head(journal, 1).unlink()
    with pytest.raises(UnsupportedFormat, match=f"format version {version}"):
        load(journal)


_COMMIT: Line = {
    "seq": 2, "t": "commit", "commit": 1, "time": 5, "app": "a", "query": "", "batch": 1, "source": [],
    "digest": "", "parts": {"0": [{"name": "0-1-1.arrows", "base": 0, "records": 1}]}, "keep": 1,
}  # fmt: skip


@pytest.mark.parametrize("value", [None, "x", 5, -1, 1.5, True, [], [1], {}, {"x": 1}], ids=repr)
@pytest.mark.parametrize(
    ("before", "line"),
    [
        (None, CheckpointEntry(empty(1, 1, seq=1), ID).to_line()),
        (empty(1, 1, seq=1), _COMMIT),
        (empty(1, 1, seq=1), anchor(2)),
        (empty(1, 1, seq=1), {"seq": 2, "t": "rollback", "commit": 1, "ends": [0], "parts": {}}),
    ],
    ids=["checkpoint", "commit", "anchor", "rollback"],
)
def test_a_field_with_a_value_of_another_kind_is_damage_or_is_read(
    before: State | None, line: Line, value: object
) -> None:
    for name in line:
        with suppress(Damaged, UnsupportedFormat):
            apply_next(before, {**line, name: value}, Path("j"), "line 1")


def test_a_torn_head_leaves_the_other_slot(journal: Path) -> None:
    path = filenames.head(journal, 1)
    data = bytearray(path.read_bytes())
    newest = head_of(journal)
    for start in (0, 64):
        torn = data.copy()
        torn[start + 5 : start + 40] = bytes(35)
        path.write_bytes(torn)
        left = read_head(LOCAL, path)
        assert left is not None
        assert left.seq in (newest.seq, newest.seq - 1)


@pytest.mark.parametrize("position", [19, 40, 49, 58])
def test_a_slot_with_another_digit_is_not_valid(position: int) -> None:
    """The last digit of the length, of the line, of the journal's checksum, of the slot's own."""
    slot = Head(700, 5, 0x12345678).encode()
    other = b"1" if slot[position : position + 1] != b"1" else b"2"
    changed = slot[:position] + other + slot[position + 1 :]
    assert slots_of(slot + changed) == [Head(700, 5, 0x12345678), None]


def test_an_epoch_is_claimed_once(journal: Path) -> None:
    with pytest.raises(FileExistsError):
        JournalWriter(LOCAL, journal, 1)
