"""How the manifest names segments."""

from __future__ import annotations

from dataclasses import dataclass, replace
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


def segment_from(line: Line) -> Segment:
    """Also of the line of a `Growth`, which has no marks."""
    return Segment(
        line["file"], line["base"], line["next"], line["size"], line["records"], line["tombstones"],
        line["max_timestamp"], line["created"], line.get("index_crc"),
        tuple(Mark(*m) for m in line["marks"]) if "marks" in line else (),
    )  # fmt: skip


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


def thin(marks: tuple[Mark, ...], most: int = _MARKS_MAX) -> tuple[Mark, ...]:
    """At most `most` marks, two or more; the first and the last stay."""
    while len(marks) > most:
        marks = (*marks[:-1:2], marks[-1])
    return marks


@dataclass(frozen=True, slots=True)
class Growth:
    """A segment that began, grew or was sealed, as it is now.

    It costs the same however long the segment is: what was said before is not said again.

    Attributes:
        segment: without marks.
        crc: of its bytes up to its size; None for a sealed one.
        start: position and CRC of its first mark; None where the manifest has named it before.
    """

    segment: Segment
    crc: int | None = None
    start: tuple[int, int] | None = None

    @classmethod
    def of(cls, after: Segment, *, begun: bool) -> Growth:
        """Args: begun: the manifest has not named it before."""
        bare = replace(after, marks=())
        if after.sealed:
            return cls(bare)
        first = after.marks[0]
        return cls(bare, after.marks[-1].crc, (first.position, first.crc) if begun else None)

    def to_json(self) -> Line:
        line = _facts(self.segment)
        if self.crc is not None:
            line["crc"] = self.crc
        if self.start is not None:
            line["start"] = list(self.start)
        return line

    @classmethod
    def from_json(cls, line: Line) -> Growth:
        segment = segment_from(line)
        if segment.index_crc is not None:
            return cls(segment)
        start = line.get("start")
        return cls(segment, line["crc"], None if start is None else (start[0], start[1]))

    def grown(self, before: Segment | None) -> Segment:
        """The segment; `before` is what was known of it."""
        s, crc = self.segment, self.crc
        if crc is None:
            return s
        if before is not None:
            marks = before.marks
        elif self.start is not None:
            marks = (Mark(self.start[0], s.base, self.start[1]),)
        else:
            raise ValueError(f"segment {s.name} begins without a start")
        marks = thin((*marks, Mark(s.size, s.next, crc)))
        return Segment(
            s.name,
            s.base,
            s.next,
            s.size,
            s.records,
            s.tombstones,
            s.max_timestamp,
            s.created_ms,
            None,
            marks,
        )
