"""Every error that keyfold raises, in one tree.

    KeyfoldError
    ├── ConfigError          an invalid name or value (also a ValueError)
    │   └── WrongType        an argument of the wrong type (also a TypeError)
    ├── NotAChangelog        the path does not hold a changelog
    ├── UnsupportedFormat    the file has a version of the format that this keyfold does not read
    ├── Damaged              bytes before the durable point do not match their checksum
    ├── StorageFailed        a write or fsync failed; this writer is fenced, reopening recovers
    ├── ChangelogLocked      another running writer holds the changelog
    ├── WriterFenced         a writer with a higher epoch has taken over, or this writer failed before
    ├── BadRecord            a record cannot be written (a null key, a column of the wrong type), or Python
    │                        cannot represent a value
    ├── SchemaMismatch       the columns differ from those of the changelog
    ├── BatchConflict        a batch id was used before, or by another query, for a different batch
    ├── CompactedAway        the exact state at that point no longer exists
    ├── ViewExpired          files that a lease protected were deleted after it expired
    └── NotResumable         the source position of a query cannot be returned as source options

Each error carries the path, the position in the file, what was expected, what was found, and a remedy.
Messages never contain record contents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


class KeyfoldError(Exception):
    """Base of all errors of keyfold.

    Args:
        what: One sentence that says what failed.
        path: The file or directory concerned.
        position: Where in it: `"byte 4096"`, `"line 7"`, `"partition 3, offset 12"`.
        expected: What should have been there.
        found: What was there.
        remedy: What the user can do about it.
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
        """Errors keep all their fields across process boundaries (Spark's Python workers)."""
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
    """A name or value is invalid."""


class WrongType(ConfigError, TypeError):
    """An argument has the wrong type."""


class NotAChangelog(KeyfoldError):
    """The path does not hold a changelog."""


class UnsupportedFormat(KeyfoldError):
    """The file has a version of the format that this version of keyfold does not read."""


class Damaged(KeyfoldError):
    """Bytes before the durable point do not match their checksum."""


class StorageFailed(KeyfoldError):
    """A write or an fsync failed. The writer is fenced; reopen the changelog to run recovery.

    Exception: when too many files are open, nothing was written and the writer continues. The message says
    so.
    """


class ChangelogLocked(KeyfoldError):
    """Another running writer holds the changelog."""


class WriterFenced(KeyfoldError):
    """This writer can no longer write: a higher epoch exists, or one of its own writes failed."""


class BadRecord(KeyfoldError):
    """A record cannot be written, or its values cannot be given as Python objects."""


class SchemaMismatch(KeyfoldError):
    """The columns differ from those of the changelog."""


class BatchConflict(KeyfoldError):
    """A batch id was used before, or by another query, for a different batch."""


class CompactedAway(KeyfoldError):
    """The exact state at the requested point no longer exists."""


class ViewExpired(KeyfoldError):
    """A file of a reader's view no longer exists: its lease expired, or the file is lost."""


class NotResumable(KeyfoldError):
    """There is no commit of the app, or its source position cannot be returned as source options."""


def reason(error: OSError) -> str:
    """What the operating system says: the `found` of an error."""
    return f"{type(error).__name__}: {error.strerror or error}"


@contextlib.contextmanager
def storage_errors(what: str, path: str | Path, *, expected: str, remedy: str) -> Iterator[None]:
    """Raises `StorageFailed` for an `OSError`. The error names the file, or `path` if no file is known."""
    try:
        yield
    except OSError as e:
        raise StorageFailed(
            what, path=e.filename or path, expected=expected, found=reason(e), remedy=remedy
        ) from e
