"""Findings of a verification: one `Damage` for each place that differs from what was written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from keyfold.statestore.errors import KeyfoldError, reason

MISSING: Final = "no such file"


@dataclass(frozen=True)
class Damage:
    """One place that differs from what was written. `position` is the place in the file, in bytes or offsets.
    `remedy` is set if there is another remedy than putting back a copy.
    """

    path: Path
    position: str
    what: str
    expected: str
    found: str
    remedy: str = ""

    @property
    def missing(self) -> bool:
        """Whether the whole file is missing."""
        return self.found == MISSING


class Damages(list[Damage]):
    """The damages found so far."""

    def add(
        self, path: Path, position: str, what: str, expected: object, found: object, remedy: str = ""
    ) -> None:
        self.append(Damage(path, position, what, str(expected), str(found), remedy))

    def add_error(self, error: KeyfoldError, path: Path) -> None:
        """Add an error that was raised. `path` is used if the error has none."""
        where = path if error.path is None else Path(error.path)
        self.add(where, error.position or "byte 0", error.what, error.expected, error.found)

    def add_unreadable(self, path: Path, error: OSError) -> None:
        """Add a file that the operating system cannot read."""
        if isinstance(error, FileNotFoundError):
            self.add(path, "byte 0", "A file that the manifest names is missing.", "the file", MISSING)
        else:
            self.add(path, "byte 0", "A file cannot be read.", "its bytes", reason(error))
