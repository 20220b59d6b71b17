"""How manifest lines name segments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypeAlias

from keyfold.statestore.segment.writer import Mark, Segment

Line: TypeAlias = dict[str, Any]

#: More marks than this on one segment are thinned out: every second one goes, which makes checked ranges
#: longer.
_MARKS_MAX: Final = 512


def segment_line(s: Segment, marks_max: int = _MARKS_MAX) -> Line:
    """A segment as checkpoints and swaps name it: whole, with the index's checksum or its marks."""
    line = _facts(s)
    if s.index_crc is None:
        line["marks"] = [[m.position, m.next_offset, m.crc] for m in thin(s.marks, marks_max)]
    return line


def _facts(s: Segment) -> Line:
    line: Line = {
        "file": s.name,
        "base": s.base,
        "next": s.next,
        "size": s.size,
        "records": s.records,
        "tombstones": s.tombstones,
        "max_timestamp": s.max_timestamp,
        "created": s.created_ms,
    }
    if s.index_crc is not None:
        line["index_crc"] = s.index_crc
    return line


def segment_from(line: Line) -> Segment:
    return Segment(
        line["file"], line["base"], line["next"], line["size"], line["records"], line["tombstones"],
        line["max_timestamp"], line["created"], line.get("index_crc"),
        tuple(Mark(*m) for m in line.get("marks", ())),
    )  # fmt: skip


def piece_line(after: Segment, *, begun: bool) -> Line:
    """How a line names a segment that grew or was sealed; `begun`: the manifest has not named it before.

    It costs the same however long the segment is: what was said before is not said again.
    """
    line = _facts(after)
    if not after.sealed:
        line["crc"] = after.marks[-1].crc
        if begun:
            line["start"] = [after.marks[0].position, after.marks[0].crc]
    return line


def grown(before: Segment | None, piece: Line) -> Segment:
    """The segment that a `piece_line` speaks of; `before` is what was known of it."""
    segment = segment_from(piece)
    if segment.sealed:
        return segment
    if before is None:
        position, crc = piece["start"]
        marks: tuple[Mark, ...] = (Mark(position, segment.base, crc),)
    else:
        marks = before.marks
    return replace(segment, marks=thin((*marks, Mark(segment.size, segment.next, piece["crc"]))))


def thin(marks: tuple[Mark, ...], most: int = _MARKS_MAX) -> tuple[Mark, ...]:
    """At most `most` marks, two or more; the first and the last stay."""
    while len(marks) > most:
        marks = (*marks[:-1:2], marks[-1])
    return marks
