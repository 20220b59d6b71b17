"""How manifest lines name segments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

from keyfold.statestore.segment import Mark, Segment

Line: TypeAlias = dict[str, Any]

#: More marks than this on one segment are thinned out: every second one goes, which makes checked ranges
#: longer.
_MARKS_MAX = 512


def segment_line(s: Segment) -> Line:
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
    else:
        line["marks"] = [[m.position, m.next_offset, m.crc] for m in s.marks]
    return line


def segment_from(line: Line) -> Segment:
    return Segment(
        line["file"], line["base"], line["next"], line["size"], line["records"], line["tombstones"],
        line["max_timestamp"], line["created"], line.get("index_crc"),
        tuple(Mark(*m) for m in line.get("marks", ())),
    )  # fmt: skip


def piece_line(after: Segment, *, begun: bool) -> Line:
    """How a line names a segment that grew or was sealed; `begun`: the manifest has not named it before."""
    line = segment_line(after)
    if not after.sealed:
        del line["marks"]
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


def thin(marks: tuple[Mark, ...]) -> tuple[Mark, ...]:
    """At most `_MARKS_MAX` marks; the first and the last stay."""
    return marks if len(marks) <= _MARKS_MAX else (*marks[:-1:2], marks[-1])
