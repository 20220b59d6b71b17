"""With which code the `keyfold` command ends: one for each kind of outcome, for scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from keyfold.statestore import errors


class OutputFailed(errors.KeyfoldError):
    """Standard output does not take what is to be printed."""


def output_failed(found: str) -> OutputFailed:
    return OutputFailed(
        "Standard output cannot be written.", expected="a place that takes it", found=found,
        remedy="free the disk that it goes to, or send it to another place",
    )  # fmt: skip


@dataclass(frozen=True)
class Exit:
    """One outcome: its code, what it means, and the errors that end so."""

    code: int
    meaning: str
    kinds: tuple[type[BaseException], ...] = ()


DONE: Final = Exit(0, "done; verify: sound")
NO_VALUE: Final = Exit(1, "get: the key has no value")
USAGE: Final = Exit(
    2,
    "a wrong argument, option or setting; what is to be made is there already",
    (errors.ConfigError, errors.BadRecord, errors.SchemaMismatch),
)
NO_CHANGELOG: Final = Exit(3, "there is no changelog at PATH", (errors.NotAChangelog,))
DAMAGED: Final = Exit(4, "bytes are not as they were written; verify: damage was found", (errors.Damaged,))
LOCKED: Final = Exit(5, "another process writes it", (errors.ChangelogLocked, errors.WriterFenced))
GONE: Final = Exit(
    6, "what was asked for is compacted or deleted", (errors.CompactedAway, errors.ViewExpired)
)
STORAGE: Final = Exit(
    7, "a file or standard output cannot be read or written", (errors.StorageFailed, OutputFailed, OSError)
)
TOO_NEW: Final = Exit(8, "a later version of keyfold made it", (errors.FormatTooNew,))
FAILED: Final = Exit(9, "any other failure", (errors.KeyfoldError, MemoryError))
INTERRUPTED: Final = Exit(130, "ended by Ctrl-C", (KeyboardInterrupt,))
PIPE_CLOSED: Final = Exit(141, "whoever read the output has left", (BrokenPipeError,))

#: In the order of their codes.
EXITS: Final = (
    DONE, NO_VALUE, USAGE, NO_CHANGELOG, DAMAGED, LOCKED, GONE, STORAGE, TOO_NEW, FAILED, INTERRUPTED,
    PIPE_CLOSED,
)  # fmt: skip


def exit_of(error: BaseException) -> Exit | None:
    """The outcome that this error is, by the nearest of its classes; None for one that is a bug."""
    for kind in type(error).__mro__:
        for outcome in EXITS:
            if kind in outcome.kinds:
                return outcome
    # pyarrow's errors; it need not be loaded to tell.
    return FAILED if type(error).__module__.partition(".")[0] == "pyarrow" else None


def table() -> str:
    """For help and README: a line for each code."""
    return "\n".join(f"  {outcome.code:>3}  {outcome.meaning}" for outcome in EXITS)
