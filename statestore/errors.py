"""Every error that keyfold raises, in one tree.

    KeyfoldError
    ├── ConfigError          a name or a value that is refused (also a ValueError)
    │   └── WrongType        an argument of another type (also a TypeError)
    ├── NotAChangelog        the path does not hold a changelog
    ├── FormatTooNew         written by a later version of keyfold
    ├── Damaged              bytes before the durable point do not match their checksum; never guessed
    ├── StorageFailed        a write or fsync failed; this writer is fenced, reopening recovers
    ├── ChangelogLocked      another living writer holds the changelog
    ├── WriterFenced         a writer with a higher epoch has taken over, or this writer failed before
    ├── BadRecord            a record that cannot be written: a null key, a column of the wrong type
    ├── SchemaMismatch       the columns differ from those the changelog was made with
    ├── BatchConflict        a batch id comes again, or from another place, and is not the same batch
    ├── CompactedAway        the exact state at that point no longer exists
    ├── ViewExpired          files of a lease were deleted after it ran out
    └── NotResumable         the source position of a query cannot be given back as options

Each carries the path, the position in it, what was expected, what was found, and what to do. Record contents
never go into a message.
"""

from __future__ import annotations

from pathlib import Path


class KeyfoldError(Exception):
    """Base of all errors of keyfold.

    Args:
        what: one sentence: what could not be done.
        path: the file or directory concerned.
        position: where in it: `"byte 4096"`, `"line 7"`, `"partition 3, offset 12"`.
        expected: what should have been there.
        found: what was there.
        remedy: what the user can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        path: str | Path | None = None,
        position: str | None = None,
        expected: object = None,
        found: object = None,
        remedy: str | None = None,
    ) -> None:
        self.what = what
        self.path = None if path is None else str(path)
        self.position = position
        self.expected = expected
        self.found = found
        self.remedy = remedy
        super().__init__(self._message())

    def _message(self) -> str:
        parts = [self.what]
        for label, part in (
            ("path", self.path),
            ("at", self.position),
            ("expected", self.expected),
            ("found", self.found),
            ("what to do", self.remedy),
        ):
            if part is not None:
                parts.append(f"  {label}: {part}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross process boundaries whole (Spark's Python workers)."""
        state = (self.what, self.path, self.position, self.expected, self.found, self.remedy)
        return _rebuild, (type(self), *state)


def _rebuild(
    kind: type[KeyfoldError],
    what: str,
    path: str | None,
    position: str | None,
    expected: object,
    found: object,
    remedy: str | None,
) -> KeyfoldError:
    return kind(what, path=path, position=position, expected=expected, found=found, remedy=remedy)


class ConfigError(KeyfoldError, ValueError):
    """A name or a value that is refused when something is opened or built."""


class WrongType(ConfigError, TypeError):
    """An argument of another type than the function takes."""


class NotAChangelog(KeyfoldError):
    """The path does not hold a changelog."""


class FormatTooNew(KeyfoldError):
    """The file was written by a later version of keyfold."""


class Damaged(KeyfoldError):
    """Bytes before the durable point do not match their checksum."""


class StorageFailed(KeyfoldError):
    """A write or an fsync failed. The writer is fenced; open the changelog again to go through recovery.

    Where too many files are open nothing was written, and the writer goes on; the message says so.
    """


class ChangelogLocked(KeyfoldError):
    """Another living writer holds the changelog."""


class WriterFenced(KeyfoldError):
    """This writer may not write any more: a higher epoch exists, or an earlier write of its own failed."""


class BadRecord(KeyfoldError):
    """A record that cannot be written."""


class SchemaMismatch(KeyfoldError):
    """The columns differ from those the changelog was made with."""


class BatchConflict(KeyfoldError):
    """A batch id comes again, or from another place, and is not the same batch."""


class CompactedAway(KeyfoldError):
    """The exact state at the asked point no longer exists."""


class ViewExpired(KeyfoldError):
    """Files that a lease protected were deleted after it ran out."""


class NotResumable(KeyfoldError):
    """The source position of a query cannot be given back as options of its source."""
