"""Verifies the manifest: head, journal, and the consistency of a journal's lines.

Readers stop at the first damage. This checks everything: each slot of the head, each line regardless of the
line before it, and the state that results from the lines before the first damaged one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from crc32c import crc32c

from keyfold.checkpoints.log.ownership import journal_epochs
from keyfold.checkpoints.manifest.entries import CheckpointEntry, apply_line
from keyfold.checkpoints.manifest.identity import ChangelogMeta
from keyfold.checkpoints.manifest.journal import Head, decode_line
from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.checkpoints.manifest.segment_lines import Line
from keyfold.checkpoints.manifest.state import Commit, State
from keyfold.checkpoints.verify.findings import MISSING, Damages
from keyfold.statestore import filenames
from keyfold.statestore.errors import FormatTooNew
from keyfold.statestore.files import Files
from keyfold.statestore.segment.block import FORMAT_VERSION

_SLOT_BYTES: Final = 64
_HEAD_BYTES: Final = 2 * _SLOT_BYTES
#: A living writer may roll its journal, or write a slot, while it is being checked.
_LOOKS_MAX: Final = 100


@dataclass
class Manifest:
    """The content of the manifest, as found.

    Attributes:
        state: the state after the last line before the first damage; None if not even a checkpoint is intact.
        durable_n: the last line that readers use; 0 if unknown.
        partial: a durable line could not be read, so `state` is an older state.
        journal: the journal in use, None if there is none.
    """

    state: State | None = None
    durable_seq: int = 0
    partial: bool = False
    journal: Path | None = None
    bytes: int = 0
    notes: list[str] = field(default_factory=list)


def check_manifest(files: Files, root: Path, identity: ChangelogMeta | None, damages: Damages) -> Manifest:
    """Verify the journal in use and its head. `identity` is None if the identity itself is damaged.

    Raises:
        FormatTooNew: a later version of keyfold wrote it.
    """
    for _ in range(_LOOKS_MAX):
        found = Damages()
        try:
            manifest = _check_newest(files, root, identity, found)
        except FileNotFoundError:
            continue
        damages.extend(found)
        return manifest
    damages.add(
        root / filenames.MANIFEST, "byte 0", "Journals vanish while they are read.", "a journal", "none"
    )
    return Manifest()


def _check_newest(files: Files, root: Path, identity: ChangelogMeta | None, damages: Damages) -> Manifest:
    manifest = Manifest()
    epochs = journal_epochs(files, root)[::-1]
    if not epochs:
        damages.add(root / filenames.MANIFEST, "byte 0", "The manifest has no journal.", "a journal", "none")
        return manifest
    headless: list[int] = []
    for epoch in epochs:
        head = _check_head(files, filenames.head(root, epoch), damages)
        if head is not None:
            break
        headless.append(epoch)
    else:
        epoch, head = _newest_with_checkpoint(files, root, epochs), None
        headless.remove(epoch)
        _report_no_head(files, filenames.head(root, epoch), damages)
    manifest.notes += [
        f"epoch {other} was claimed and has no head: an opening died there, or is in progress"
        for other in headless
    ]
    manifest.journal = filenames.journal(root, epoch)
    try:
        data = files.read(manifest.journal)
    except FileNotFoundError:
        raise
    except OSError as e:
        damages.add_unreadable(manifest.journal, e)
        return manifest
    manifest.bytes = len(data) + _HEAD_BYTES
    _check_journal(data, epoch, head, identity, manifest, damages)
    if manifest.state is not None:
        check_agreement(manifest.state, identity, manifest.journal, damages)
    return manifest


def _report_no_head(files: Files, path: Path, damages: Damages) -> None:
    """Report a head that is missing or too short. A head without a valid slot was reported already."""
    if not files.exists(path):
        damages.add(path, "byte 0", "A journal has no head.", "the head", MISSING)
    elif (size := files.size(path)) < _HEAD_BYTES:
        damages.add(path, f"byte {size}", "A head is too short.", f"{_HEAD_BYTES} bytes", f"{size} bytes")


def _newest_with_checkpoint(files: Files, root: Path, epochs: list[int]) -> int:
    for epoch in epochs:
        first = files.read(filenames.journal(root, epoch)).partition(b"\n")[0]
        if decode_line(first) is not None:
            return epoch
    return epochs[0]


# -- the head ------------------------------------------------------------------------------------------------


def _check_head(files: Files, path: Path, damages: Damages) -> Head | None:
    """The head that readers use, None if there is none. A slot that is neither valid nor blank is damage."""
    for _ in range(_LOOKS_MAX):
        try:
            data = files.read(path)
        except FileNotFoundError:
            return None
        slots = [data[start : start + _SLOT_BYTES] for start in (0, _SLOT_BYTES)]
        heads = [_head_in(slot) for slot in slots]
        bad = [i for i in (0, 1) if heads[i] is None and (i == 0 or slots[i].strip(b" "))]
        if not bad:
            break
    valid = [head for head in heads if head is not None]
    # A writer that dies while it creates its head leaves only a first slot.
    if len(data) not in (_HEAD_BYTES, _SLOT_BYTES) and (valid or len(data) > _HEAD_BYTES):
        damages.add(
            path,
            f"byte {len(data)}",
            "A head has the wrong size.",
            f"{_HEAD_BYTES} bytes",
            f"{len(data)} bytes",
        )
    if len(data) >= _HEAD_BYTES:
        for i in bad:
            damages.add(
                path, f"bytes {i * _SLOT_BYTES} to {(i + 1) * _SLOT_BYTES}",
                "A slot of a head is damaged; a power loss during its write has the same effect.",
                "a slot with its CRC32C", "another CRC32C or form",
            )  # fmt: skip
    return max(valid, key=lambda head: head.length, default=None)


def _head_in(slot: bytes) -> Head | None:
    try:
        length, seq, crc, _ = slot.split()
        head = Head(int(length), int(seq), int(crc, 16))
    except ValueError:
        return None
    return head if head.encode() == slot else None


# -- the journal ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """One line of a journal: its number in the file, its bytes [start, end), its content if intact."""

    number: int
    start: int
    end: int
    line: Line | None
    what_for: str


def _places(data: bytes) -> Iterator[_Place]:
    """The lines in order. Adjacent damaged lines count as one. A line without a newline is damaged."""
    bad_from: tuple[int, int] | None = None
    found = "no line"
    start = number = 0
    while start < len(data):
        number += 1
        newline = data.find(b"\n", start)
        end = len(data) if newline < 0 else newline + 1
        raw = data[start:newline] if newline >= 0 else data[start:]
        line = None if newline < 0 else decode_line(raw)
        if line is None:
            bad_from = bad_from or (number, start)
            found = f"crc32c {crc32c(raw[9:]):08x}" if newline >= 0 else "a line that does not end"
        else:
            if bad_from is not None:
                yield _Place(*bad_from, start, None, found)
                bad_from = None
            yield _Place(number, start, end, line, "")
        start = end
    if bad_from is not None:
        yield _Place(*bad_from, len(data), None, found)


def _check_journal(
    data: bytes,
    epoch: int,
    head: Head | None,
    identity: ChangelogMeta | None,
    manifest: Manifest,
    damages: Damages,
) -> None:
    path = manifest.journal or Path()
    durable = 0 if head is None else head.length
    places = list(_places(data))
    last_sound = max((p.start for p in places if p.line is not None), default=-1)
    for place in places:
        if place.line is not None:
            if not manifest.partial:
                manifest.partial = not _apply(place, epoch, identity, manifest, path, damages)
            if (
                not manifest.partial
                and place.end == durable
                and head is not None
                and manifest.state is not None
            ):
                manifest.durable_seq = manifest.state.seq
                _compare_head(data, head, manifest.state.seq, path, damages)
        elif place.start < max(durable, last_sound):
            manifest.partial = True
            stated = data[place.start : place.start + 8].decode("ascii", "backslashreplace")
            damages.add(
                path, f"line {place.number}, bytes {place.start} to {place.end}",
                "A manifest line is damaged.", f"crc32c {stated}, as it begins", place.what_for,
            )  # fmt: skip
        else:
            manifest.notes.append(
                f"{place.end - place.start} bytes after line {place.number - 1} of {path.name} are a "
                "line that was never acknowledged; the next opening to write discards it"
            )
    if len(data) < durable:
        manifest.partial = True
        damages.add(
            path, f"byte {len(data)}", "A journal is shorter than its head says.", f"{durable} bytes",
            f"{len(data)} bytes"
        )  # fmt: skip
    elif not manifest.partial and head is not None and not any(p.end == durable for p in places):
        damages.add(path, f"byte {durable}", "A head ends inside a line.", "the end of a line", "its middle")


def _apply(
    place: _Place,
    epoch: int,
    identity: ChangelogMeta | None,
    manifest: Manifest,
    path: Path,
    damages: Damages,
) -> bool:
    """Apply one intact line to the state. False if its content is invalid."""
    line = place.line or {}
    where = f"line {place.number}, byte {place.start}"
    try:
        if manifest.state is not None:
            manifest.state = apply_line(manifest.state, line)
            return True
        if line.get("version", 0) > FORMAT_VERSION:
            raise FormatTooNew(
                "The manifest was written by a later version of keyfold.", path=path, position=where,
                expected=f"version {FORMAT_VERSION} or lower", found=line["version"],
                remedy="upgrade keyfold",
            )  # fmt: skip
        manifest.state = CheckpointEntry.from_line(line).state
    except (KeyError, ValueError, TypeError, IndexError) as e:
        damages.add(
            path, where, "A manifest line has a valid checksum but invalid content.",
            "a line that follows from the lines before it", f"{type(e).__name__}: {e}",
        )  # fmt: skip
        return False
    if identity is not None and line.get("changelog") != identity.uuid:
        damages.add(
            path, where, "A journal belongs to another changelog.", identity.uuid, line.get("changelog")
        )
    if manifest.state.epoch != epoch:
        damages.add(path, where, "A journal's epoch differs from its name.", epoch, manifest.state.epoch)
    return True


def _compare_head(data: bytes, head: Head, seq: int, path: Path, damages: Damages) -> None:
    found = crc32c(data[: head.length])
    if found != head.crc:
        damages.add(
            path, f"bytes 0 to {head.length}", "A journal does not match its head.",
            f"crc32c {head.crc:08x}", f"crc32c {found:08x}",
        )  # fmt: skip
    if seq != head.seq:
        damages.add(
            path, f"byte {head.length}", "A head names another line than the journal's last.", head.seq, seq
        )


# -- consistency ---------------------------------------------------------------------------------------------


def check_agreement(state: State, identity: ChangelogMeta | None, path: Path, damages: Damages) -> None:
    """Check what is true in every state that a writer produces. `path` is the journal that is reported."""

    def wrong(where: str, what: str, expected: object, found: object) -> None:
        damages.add(path, where, what, expected, found)

    if identity is not None and len(state.partitions) != identity.partitions:
        wrong(
            "partitions",
            "The manifest and changelog.json disagree.",
            identity.partitions,
            len(state.partitions),
        )
    for partition, p in enumerate(state.partitions):
        for what, expected, found in _partition_faults(p, state.epoch):
            wrong(f"partition {partition}", what, expected, found)
    last = (0, (0,) * len(state.partitions))
    for commit in state.commits:
        if commit.number <= last[0] or not _not_before(commit.ends, last[1]):
            wrong(
                f"commit {commit.number}",
                "Commits are out of order.",
                f"later than commit {last[0]}",
                "an earlier one",
            )
        last = (commit.number, commit.ends)
    everything: list[tuple[str, Commit]] = [("commit", c) for c in state.commits]
    everything += [("the last commit of an app,", c) for c in state.apps.values()]
    for what, commit in everything:
        if commit.number >= state.next_commit or not _not_before(state.ends, commit.ends):
            wrong(
                f"{what} {commit.number}", "A commit is beyond the log's end.",
                f"below commit {state.next_commit}, ends up to {state.ends}", f"ends {commit.ends}",
            )  # fmt: skip
    for anchor in state.anchors.values():
        # Data that retention has removed is no damage.
        if len(anchor.ends) != len(state.partitions) or state.folded_away(anchor.ends):
            wrong(
                f"anchor {anchor.name!r}",
                "The state at an anchor was compacted away.",
                "an exact state",
                anchor.ends,
            )


def _not_before(ends: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return len(ends) == len(others) and all(a >= b for a, b in zip(ends, others, strict=True))


def _partition_faults(p: PartitionState, epoch: int) -> Iterator[tuple[str, object, object]]:
    """Problems of one partition: its segments must cover its offsets without overlap or gap, up to its
    end.
    """
    if not 0 <= p.start <= p.clean_end <= p.end:
        yield "Offsets are out of order.", "0 <= start <= clean end <= end", (p.start, p.clean_end, p.end)
    if not p.start <= p.unique_end <= p.clean_end or p.swept_end > p.unique_end:
        found_ends = (p.start, p.swept_end, p.unique_end, p.clean_end)
        yield "Ends of passes are out of order.", "start and swept end <= unique end <= clean end", found_ends
    if not all(a < b for a, b in pairwise((p.start, *p.splits, p.clean_end))) and p.splits:
        yield "Splits are out of order.", f"ascending between {p.start} and {p.clean_end}", p.splits
    passes = [x.clean_end for x in p.passes]
    if passes != sorted(passes) or (passes and passes[-1] > p.clean_end):
        yield "Cleaner passes are out of order.", f"ascending, up to {p.clean_end}", passes
    if p.dropped_tombstone >= max(p.clean_end, 1):
        yield "A tombstone was dropped in the dirty section.", f"below {p.clean_end}", p.dropped_tombstone
    if len({s.name for s in p.segments}) < len(p.segments):
        yield "A segment is named twice.", "each once", "two of one name"
    covered = p.start
    for s in (*p.segments, None):
        base = p.end if s is None else s.base
        # If no record of a group is kept, a pass writes no segment, so the clean section may have gaps.
        if base < covered or covered < base > p.clean_end:
            place = "The segments do not end where the partition does" if s is None else (
                f"Segment {s.name} does not begin where the one before it ends"
            )  # fmt: skip
            yield f"{place}.", covered, base
        covered = base if s is None else s.next
    for s in p.segments:
        made = filenames.segment_epoch(s.name)
        if made is None or made > epoch:
            yield (
                f"Segment {s.name} has a name of a later epoch, or an invalid one.",
                f"epoch 1 to {epoch}",
                made,
            )
        if not (0 <= s.tombstones <= s.records <= s.next - s.base and s.size > 0):
            found = f"{s.records} records, {s.tombstones} tombstones, {s.size} bytes"
            yield (
                f"Segment {s.name} has more records than offsets.",
                f"at most {s.next - s.base} records",
                found,
            )
        if not s.sealed:
            ends = [(m.position, m.next_offset) for m in s.marks]
            if not ends or ends != sorted(ends) or ends[-1] != (s.size, s.next):
                last = ends[-1] if ends else "no mark"
                yield f"The marks of segment {s.name} do not lead to its end.", (s.size, s.next), last
