"""Every error that keyfold raises on purpose. All are `KeyfoldError`s."""

from __future__ import annotations

from keyfold.statestore.errors import (
    BadRecord,
    BatchConflict,
    ChangelogLocked,
    CompactedAway,
    ConfigError,
    Damaged,
    KeyfoldError,
    NotAChangelog,
    NotResumable,
    SchemaMismatch,
    StorageFailed,
    UnsupportedFormat,
    ViewExpired,
    WriterFenced,
    WrongType,
)

__all__ = [
    "BadRecord",
    "BatchConflict",
    "ChangelogLocked",
    "CompactedAway",
    "ConfigError",
    "Damaged",
    "KeyfoldError",
    "NotAChangelog",
    "NotResumable",
    "SchemaMismatch",
    "StorageFailed",
    "UnsupportedFormat",
    "ViewExpired",
    "WriterFenced",
    "WrongType",
]
