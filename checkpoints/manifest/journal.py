r"""Journals: the files of the manifest. One per epoch: lines with a checksum each, and a head in a second
file.

A line is the CRC32C of the JSON after it, as eight hexadecimal digits, a space, the JSON, a newline:

    1f0a77c2 {"seq":7,"t":"commit","commit":3,…}

The head says how much of the journal is durable. It has two slots of 64 bytes, written in turn, so that a
torn write leaves the other one intact. The valid slot with the larger length counts:

    0                    20 21                   41 42       50 51       59  60      64
    | journal bytes, 20 d. |_| line number, 20 d. |_| crc, 8 hex |_| slot crc |\n| spaces |

`crc` is the CRC32C of the journal's bytes up to that length, `slot crc` that of the slot's first 51 bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from crc32c import crc32c

from keyfold.checkpoints.manifest.entries import CheckpointEntry, apply_line
from keyfold.checkpoints.manifest.identity import ChangelogMeta
from keyfold.checkpoints.manifest.segment_lines import Line
from keyfold.checkpoints.manifest.state import State, pruned
from keyfold.statestore import filenames
from keyfold.statestore.errors import Damaged
from keyfold.statestore.files import Files, OpenFile
from keyfold.statestore.segment.block import check_version

SLOT_BYTES: Final = 64
HEAD_BYTES: Final = 2 * SLOT_BYTES
_SLOT = re.compile(rb"^([0-9]{20}) ([0-9]{20}) ([0-9a-f]{8}) ([0-9a-f]{8})\n {4}$")
_REMEDY: Final = "restore from a snapshot or a copy; a damaged manifest cannot be repaired"


@dataclass(frozen=True, slots=True)
class Head:
    """The first `length` bytes of a journal are durable, end with line `seq`, and have this CRC32C."""

    length: int
    seq: int
    crc: int

    def encode(self) -> bytes:
        text = b"%020d %020d %08x " % (self.length, self.seq, self.crc)
        return text + b"%08x\n    " % crc32c(text)


def read_head(files: Files, path: Path) -> Head | None:
    """The head at `path`. None if it does not exist or none of its slots is valid."""
    try:
        heads = slots_of(files.read(path))
    except FileNotFoundError:
        return None
    return max((head for head in heads if head is not None), key=lambda head: head.length, default=None)


def slots_of(data: bytes) -> list[Head | None]:
    """The two slots of a head file; None for a slot that is not valid."""
    heads: list[Head | None] = []
    for slot in (data[:SLOT_BYTES], data[SLOT_BYTES:HEAD_BYTES]):
        found = _SLOT.match(slot)
        valid = found is not None and crc32c(slot[:51]) == int(found[4], 16)
        heads.append(Head(int(found[1]), int(found[2]), int(found[3], 16)) if found and valid else None)
    return heads


def encode_line(line: Line) -> bytes:
    body = json.dumps(line, separators=(",", ":"), ensure_ascii=True).encode()
    return b"%08x %s\n" % (crc32c(body), body)


def decode_line(raw: bytes) -> Line | None:
    """The line in `raw` (without its newline). None if the checksum or the form is wrong."""
    if len(raw) < 10 or raw[8:9] != b" ":
        return None
    try:
        if int(raw[:8], 16) != crc32c(raw[9:]):
            return None
        line = json.loads(raw[9:])
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line of what was read of a journal: its bytes [start, end), and its content; None if damaged.

    A line without its newline is torn, even if its content is intact.
    """

    number: int
    start: int
    end: int
    content: Line | None
    torn: bool

    @property
    def is_sound(self) -> bool:
        return self.content is not None and not self.torn


def scan(data: bytes) -> Iterator[RawLine]:
    """The lines in order, damaged ones too."""
    start = number = 0
    while start < len(data):
        number += 1
        newline = data.find(b"\n", start)
        end = newline + 1 or len(data)
        torn = newline < 0
        yield RawLine(number, start, end, decode_line(data[start : end if torn else newline]), torn)
        start = end


def apply_next(state: State | None, line: Line, path: Path, position: str) -> State:
    """The state after one more intact line. Without a state the line must be a checkpoint.

    Raises `Damaged` if the line does not follow from the state, and `UnsupportedFormat`.
    """
    try:
        if state is not None:
            return apply_line(state, line)
        if line["t"] == CheckpointEntry.KIND:
            check_version(int(line["version"]), path, position)
        return CheckpointEntry.from_line(line).state
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as e:
        raise Damaged(
            "A manifest line has a valid checksum but invalid content.", path=path,
            position=position, expected="a line that follows from the lines before it",
            found=f"{type(e).__name__}: {e}", remedy=_REMEDY,
        ) from e  # fmt: skip


class JournalWriter:
    """Appends lines to the journal of one epoch. `append` is durable when it returns; `publish` lets readers
    see it.
    """

    def __init__(self, files: Files, root: Path, epoch: int) -> None:
        """Claim `epoch`. Raises `FileExistsError` if another process has claimed it."""
        self._files = files
        self._journal: OpenFile = files.create(filenames.journal(root, epoch))
        self._head: OpenFile | None = None
        self._head_path = filenames.head(root, epoch)
        self._crc = 0
        self._slot = 0
        try:
            files.sync_directory(root / filenames.MANIFEST)
        except BaseException:
            self.end()
            raise

    @property
    def size(self) -> int:
        return self._journal.position

    def is_in_place(self) -> bool:
        """Whether the path still leads to this journal."""
        return self._files.is_in_place(self._journal)

    def append(self, line: Line) -> None:
        """Write one line and sync it. Never retry after an error: the end of the journal is unknown then."""
        raw = encode_line(line)
        self._files.append(self._journal, [raw])
        self._files.sync(self._journal)
        self._crc = crc32c(raw, self._crc)

    def end(self) -> None:
        """End the journal. On a file system where a file is complete only once it is closed, this comes
        before its head is written.
        """
        self._files.close(self._journal)

    def publish(self, seq: int) -> None:
        """Overwrite the head: everything appended so far, up to line `seq`, is durable."""
        slot = Head(self._journal.position, seq, self._crc).encode()
        if self._head is None:
            self._head = self._files.create(self._head_path)
            self._files.append(self._head, [slot, b" " * SLOT_BYTES])
            self._files.sync(self._head)
            self._files.sync_directory(self._head_path.parent)
        else:
            self._slot ^= SLOT_BYTES
            self._files.overwrite(self._head, slot, self._slot)

    def close(self) -> None:
        self.end()
        if self._head is not None:
            self._files.close(self._head)


def begin_journal(
    journal: JournalWriter,
    state: State,
    epoch: int,
    identity: ChangelogMeta,
    prove: Callable[[], None] = lambda: None,
    *,
    only: bool = False,
) -> State:
    """Write the whole state as the first line of a new journal, durable and visible. Returns the state with
    its new line number.

    Args:
        prove: called when the line is durable. Raises if another process has taken over; then the line is not
            published.
        only: no further line follows, as in a snapshot.
    """
    kept = pruned(state, identity.config.commits_retained)
    state = replace(kept, seq=kept.seq + 1, epoch=epoch)
    journal.append(CheckpointEntry(state, identity.uuid).to_line())
    if only:
        journal.end()
    prove()
    journal.publish(state.seq)
    return state


@dataclass(frozen=True, slots=True)
class Loaded:
    """The content of a journal: the state after its last accepted line, and the length up to there in bytes.

    `torn` is the number of bytes after that, which were not accepted.
    """

    state: State
    length: int
    crc: int
    torn: int = 0


def read_journal(files: Files, root: Path, epoch: int, identity: str, head: Head | None) -> Loaded | None:
    """For recovery: everything valid in a journal, without a torn last line.

    None if the journal's checkpoint is incomplete and no head says that it was durable: an opening that died.

    Raises:
        Damaged: the journal is shorter than its head says, or an intact line follows a damaged one.
        UnsupportedFormat: it has another version of the format.
    """
    path = filenames.journal(root, epoch)
    data = files.read(path)
    loaded = _fold(data, path, identity, None)
    if head is not None and (loaded is None or loaded.length < head.length):
        raise Damaged(
            "A manifest journal is damaged, or shorter than its head says.", path=path,
            position=f"byte {loaded.length if loaded else 0}", expected=f"{head.length} durable bytes",
            found=f"{loaded.length if loaded else 0} intact bytes of {len(data)}", remedy=_REMEDY,
        )  # fmt: skip
    length = loaded.length if loaded else 0
    # A torn last line with intact content counts: it was written after the damaged one was durable.
    if any(raw.content is not None for raw in scan(data[length:]) if raw.number > 1):
        raise _damaged_line(path, length)
    return replace(loaded, torn=len(data) - length) if loaded else None


def read_durable(files: Files, root: Path, epoch: int, identity: str, head: Head) -> Loaded:
    """For readers: the journal up to its head, without the bytes after it. Raises `Damaged`,
    `FileNotFoundError`.
    """
    path = filenames.journal(root, epoch)
    data = files.read(path, 0, head.length)
    if len(data) < head.length or crc32c(data) != head.crc:
        raise Damaged(
            "A manifest journal does not match its head.", path=path,
            position=f"bytes 0 to {head.length}", expected=f"crc32c {head.crc:08x}",
            found=f"{len(data)} bytes, crc32c {crc32c(data):08x}", remedy=_REMEDY,
        )  # fmt: skip
    loaded = _fold(data, path, identity, None)
    if loaded is None or loaded.length != head.length:
        raise _damaged_line(path, loaded.length if loaded else 0)
    return loaded


def read_further(files: Files, root: Path, epoch: int, identity: str, head: Head, before: Loaded) -> Loaded:
    """For readers that follow: only the lines from `before` to the head of the same journal."""
    path = filenames.journal(root, epoch)
    data = files.read(path, before.length, head.length - before.length)
    if crc32c(data, before.crc) != head.crc:
        return read_durable(files, root, epoch, identity, head)
    loaded = _fold(data, path, identity, before)
    if loaded is None or loaded.length != head.length:
        raise _damaged_line(path, loaded.length if loaded else 0)
    return loaded


def _fold(data: bytes, path: Path, identity: str, before: Loaded | None) -> Loaded | None:
    """Apply the intact lines of `data`, which begins after `before`. None if it does not start with an intact
    checkpoint.
    """
    state = before.state if before else None
    start = before.length if before else 0
    end = 0
    for raw in scan(data):
        if raw.content is None or raw.torn:
            break
        first, state = state is None, apply_next(state, raw.content, path, f"byte {start + raw.start}")
        if first and raw.content.get("changelog") != identity:
            raise Damaged(
                "A manifest journal belongs to another changelog.", path=path, position="line 1",
                expected=identity, found=raw.content.get("changelog"),
                remedy="put the journals of this changelog back",
            )  # fmt: skip
        end = raw.end
    if state is None:
        return None
    return Loaded(state, start + end, crc32c(data[:end], before.crc if before else 0))


def _damaged_line(path: Path, position: int) -> Damaged:
    return Damaged(
        "A manifest line is damaged, and intact lines follow it.",
        path=path,
        position=f"byte {position}",
        expected="a line that matches its CRC32C",
        found="a line with another CRC32C",
        remedy=_REMEDY,
    )
