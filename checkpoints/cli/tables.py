"""Tables and facts, fitted to the width of a terminal; elsewhere plain columns. Numbers are never broken."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import Final, TypeAlias

import click

Cell: TypeAlias = "str | int | float | bool | None"

_GAP: Final = 2
#: Digits are kept together with their separators and unit. Other text may be broken anywhere if necessary.
_TOKEN: Final = re.compile(r"\d[\d.,:-]*|[^\d]")


def on_terminal() -> bool:
    """Whether standard output is a terminal, or is formatted as if it were."""
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout is not None and sys.stdout.isatty())


def width_of_terminal() -> int:
    """In cells. `COLUMNS` overrides it; 80 if it is unknown."""
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and int(said):
        return int(said)
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:
        return 80


def table(headings: Sequence[str], rows: Sequence[Sequence[Cell]], title: str = "") -> str:
    """A table with headings and right-aligned numbers. On a narrow terminal each row is printed alone."""
    drawn = on_terminal()
    right = [_is_numeric([row[i] for row in rows]) for i in range(len(headings))]
    cells = [[_cell(cell, grouped=drawn) for cell in row] for row in rows]
    if not drawn:
        widths = [max(len(row[i]) for row in [list(headings), *cells]) for i in range(len(headings))]
        lines = [_line([list(headings)], widths, right), *(_line([row], widths, right) for row in cells)]
        return (f"\n{title}\n" if title else "") + "\n".join(lines)
    widths_ = _fitting(headings, cells, width_of_terminal())
    body = _upright(headings, cells) if widths_ is None else _drawn(headings, cells, widths_, right)
    return "\n".join([*(["", click.style(title, italic=True)] if title else []), *body])


def facts(pairs: Sequence[tuple[str, Cell]]) -> str:
    """Lines of `name: value`."""
    drawn = on_terminal()
    return "\n".join(_named([(name, _cell(value, grouped=drawn)) for name, value in pairs], drawn))


def sentence(text: str) -> str:
    """A line of text. For a terminal it is wrapped between words, so that no number is broken."""
    return "\n".join(folded(text, width_of_terminal())) if on_terminal() else text


def _named(pairs: Sequence[tuple[str, str]], drawn: bool) -> list[str]:
    indent = max(len(name) for name, _ in pairs) + 2
    lines = []
    for name, value in pairs:
        parts = folded(value, max(1, width_of_terminal() - indent)) if drawn else [value]
        lines.append(f"{name + ':':{indent}}{parts[0]}")
        lines += [" " * indent + part for part in parts[1:]]
    return lines


def _upright(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    lines: list[str] = []
    for row in cells:
        lines.append("─" * min(width_of_terminal(), 20))
        lines += _named([(h, c) for h, c in zip(headings, row, strict=True) if c not in ("", "-")], True)
    return lines


def _drawn(
    headings: Sequence[str], cells: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[bool]
) -> list[str]:
    def row_of(cells: Sequence[str]) -> str:
        parts = [folded(cell, width) for cell, width in zip(cells, widths, strict=True)]
        deep = max(map(len, parts))
        return _line([[p[i] if i < len(p) else "" for p in parts] for i in range(deep)], widths, right)

    rule = "─" * (sum(widths) + _GAP * (len(widths) - 1))
    return [click.style(row_of(headings), bold=True), rule, *map(row_of, cells)]


def _line(parts: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[bool]) -> str:
    lines = []
    for row in parts:
        padded = (
            " " * (w - cells_of(c)) + c if r else c + " " * (w - cells_of(c))
            for c, w, r in zip(row, widths, right, strict=True)
        )
        lines.append((" " * _GAP).join(padded).rstrip())
    return "\n".join(lines)


def _fitting(headings: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """The column widths with which all words fit unbroken; None if they cannot fit."""
    columns = [[heading, *(row[i] for row in cells)] for i, heading in enumerate(headings)]
    wanted = [max(map(cells_of, column)) for column in columns]
    least = [max(cells_of(word) for cell in column for word in cell.split(" ")) for column in columns]
    spare = width - _GAP * (len(columns) - 1)
    while sum(wanted) > spare:
        widest = max((w, i) for i, w in enumerate(wanted) if w > least[i]) if wanted != least else None
        if widest is None:
            return None
        wanted[widest[1]] -= 1
    return wanted


def folded(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, wrapped between words if possible, and never within a number."""
    lines, line = [], ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if cells_of(longer) <= width:
            line = longer
            continue
        if line:
            lines.append(line)
        line = ""
        for token in _TOKEN.findall(word):
            if line and cells_of(line + token) > width:
                lines.append(line)
                line = ""
            line += token
    return [*lines, line]


def cells_of(text: str) -> int:
    """The width of a text in terminal cells."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def _is_numeric(cells: Sequence[Cell]) -> bool:
    found = [cell for cell in cells if cell is not None]
    return bool(found) and all(isinstance(cell, int | float) for cell in found)


def _cell(value: Cell, *, grouped: bool) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if grouped else str(value)
    if isinstance(value, float):
        return f"{value:.2f}"
    return printable(value)


def printable(text: str) -> str:
    """The text with control characters, which could move a terminal's cursor, written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
