"""The exit codes of the `keyfold` command: one for each kind of outcome, for scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from keyfold.statestore import errors


class OutputFailed(errors.KeyfoldError):
    """Standard output cannot be written."""


def output_failed(found: str) -> OutputFailed:
    return OutputFailed(
        "Cannot write to standard output.", expected="a writable standard output", found=found,
        remedy="free space on its disk, or redirect it to another file",
    )  # fmt: skip


@dataclass(frozen=True)
class Exit:
    """One outcome: its code, its meaning, and the errors that lead to it."""

    code: int
    meaning: str
    kinds: tuple[type[BaseException], ...] = ()


DONE: Final = Exit(0, "done; verify: sound")
NO_VALUE: Final = Exit(1, "get: the key has no value")
USAGE: Final = Exit(
    2,
    "an invalid argument, option or setting; the target already exists",
    (errors.ConfigError, errors.BadRecord, errors.SchemaMismatch),
)
NO_CHANGELOG: Final = Exit(3, "PATH is not a changelog", (errors.NotAChangelog,))
DAMAGED: Final = Exit(4, "a checksum does not match; verify: damage was found", (errors.Damaged,))
LOCKED: Final = Exit(5, "another process is writing", (errors.ChangelogLocked, errors.WriterFenced))
GONE: Final = Exit(
    6, "the requested data was compacted or deleted", (errors.CompactedAway, errors.ViewExpired)
)
STORAGE: Final = Exit(
    7, "a file or standard output cannot be read or written", (errors.StorageFailed, OutputFailed, OSError)
)
UNSUPPORTED: Final = Exit(8, "PATH has another version of the format", (errors.UnsupportedFormat,))
FAILED: Final = Exit(9, "any other failure", (errors.KeyfoldError, MemoryError))
INTERRUPTED: Final = Exit(130, "interrupted by Ctrl-C", (KeyboardInterrupt,))
PIPE_CLOSED: Final = Exit(141, "the reader of the output closed the pipe", (BrokenPipeError,))

#: In code order.
EXITS: Final = (
    DONE, NO_VALUE, USAGE, NO_CHANGELOG, DAMAGED, LOCKED, GONE, STORAGE, UNSUPPORTED, FAILED, INTERRUPTED,
    PIPE_CLOSED,
)  # fmt: skip


def exit_of(error: BaseException) -> Exit | None:
    """The outcome for an error, by its nearest class; None for an error that is a bug."""
    for kind in type(error).__mro__:
        for outcome in EXITS:
            if kind in outcome.kinds:
                return outcome
    # pyarrow's errors, recognized without loading pyarrow.
    return FAILED if type(error).__module__.partition(".")[0] == "pyarrow" else None


def table() -> str:
    """One line per code, for help and README."""
    return "\n".join(f"  {outcome.code:>3}  {outcome.meaning}" for outcome in EXITS)
