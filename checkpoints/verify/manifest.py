"""Verifies the manifest: head, journal, and the consistency of a journal's lines.

Readers stop at the first damage. This checks everything: each slot of the head, each line regardless of the
line before it, and the state that results from the lines before the first damaged one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Final

from crc32c import crc32c

from keyfold.checkpoints.log.ownership import journal_epochs
from keyfold.checkpoints.manifest.identity import ChangelogMeta
from keyfold.checkpoints.manifest.journal import (
    HEAD_BYTES,
    SLOT_BYTES,
    Head,
    RawLine,
    apply_next,
    decode_line,
    scan,
    slots_of,
)
from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.checkpoints.manifest.state import Commit, State
from keyfold.checkpoints.verify.findings import MISSING, Damages
from keyfold.statestore import filenames
from keyfold.statestore.errors import Damaged
from keyfold.statestore.files import Files

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
        UnsupportedFormat: it has another version of the format.
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
    manifest.bytes = len(data) + HEAD_BYTES
    _check_journal(data, epoch, head, identity, manifest, damages)
    if manifest.state is not None:
        check_agreement(manifest.state, identity, manifest.journal, damages)
    return manifest


def _report_no_head(files: Files, path: Path, damages: Damages) -> None:
    """Report a head that is missing or too short. A head without a valid slot was reported already."""
    if not files.exists(path):
        damages.add(path, "byte 0", "A journal has no head.", "the head", MISSING)
    elif (size := files.size(path)) < HEAD_BYTES:
        damages.add(path, f"byte {size}", "A head is too short.", f"{HEAD_BYTES} bytes", f"{size} bytes")


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
        heads = slots_of(data)
        bad = [i for i in (0, 1) if heads[i] is None and (i == 0 or data[SLOT_BYTES:HEAD_BYTES].strip(b" "))]
        if not bad:
            break
    valid = [head for head in heads if head is not None]
    # A writer that dies while it creates its head leaves only a first slot.
    if len(data) not in (HEAD_BYTES, SLOT_BYTES) and (valid or len(data) > HEAD_BYTES):
        expected, size = f"{HEAD_BYTES} bytes", f"{len(data)} bytes"
        damages.add(path, f"byte {len(data)}", "A head has the wrong size.", expected, size)
    if len(data) >= HEAD_BYTES:
        for i in bad:
            damages.add(
                path, f"bytes {i * SLOT_BYTES} to {(i + 1) * SLOT_BYTES}",
                "A slot of a head is damaged; a power loss during its write has the same effect.",
                "a slot with its CRC32C", "another CRC32C or form",
            )  # fmt: skip
    return max(valid, key=lambda head: head.length, default=None)


# -- the journal ---------------------------------------------------------------------------------------------


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
    lines = list(scan(data))
    last_sound = max((raw.start for raw in lines if raw.content is not None), default=-1)
    for sound, group in groupby(lines, lambda raw: raw.is_sound):
        if not sound:
            _report_damaged(data, list(group), max(durable, last_sound), manifest, path, damages)
            continue
        for raw in group:
            if not manifest.partial:
                manifest.partial = not _apply(raw, epoch, identity, manifest, path, damages)
            state = None if manifest.partial else manifest.state
            if state is not None and head is not None and raw.end == durable:
                manifest.durable_seq = state.seq
                _compare_head(data, head, state.seq, path, damages)
    if len(data) < durable:
        manifest.partial = True
        damages.add(
            path, f"byte {len(data)}", "A journal is shorter than its head says.", f"{durable} bytes",
            f"{len(data)} bytes"
        )  # fmt: skip
    elif not manifest.partial and head is not None and not any(raw.end == durable for raw in lines):
        damages.add(path, f"byte {durable}", "A head ends inside a line.", "the end of a line", "its middle")


def _report_damaged(
    data: bytes, bad: list[RawLine], durable: int, manifest: Manifest, path: Path, damages: Damages
) -> None:
    """Report adjacent damaged lines as one. After `durable` they are the remains of a write."""
    first, last = bad[0], bad[-1]
    if first.start < durable:
        manifest.partial = True
        stated = data[first.start : first.start + 8].decode("ascii", "backslashreplace")
        raw = data[last.start : last.end]
        damages.add(
            path, f"line {first.number}, bytes {first.start} to {last.end}",
            "A manifest line is damaged.", f"crc32c {stated}, which the line begins with",
            f"crc32c {crc32c(raw[9:-1]):08x}" if raw.endswith(b"\n") else "a line that does not end",
        )  # fmt: skip
    else:
        manifest.notes.append(
            f"{last.end - first.start} bytes after line {first.number - 1} of {path.name} are a "
            "line that was never acknowledged; the next opening to write discards it"
        )


def _apply(
    raw: RawLine,
    epoch: int,
    identity: ChangelogMeta | None,
    manifest: Manifest,
    path: Path,
    damages: Damages,
) -> bool:
    """Apply one intact line to the state. False if its content is invalid."""
    line, where = raw.content or {}, f"line {raw.number}, byte {raw.start}"
    first = manifest.state is None
    try:
        manifest.state = apply_next(manifest.state, line, path, where)
    except Damaged as e:
        damages.add_error(e, path)
        return False
    if first and identity is not None and line.get("changelog") != identity.uuid:
        damages.add(
            path, where, "A journal belongs to another changelog.", identity.uuid, line.get("changelog")
        )
    if first and manifest.state.epoch != epoch:
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
