"""What an error says of the batch that was being committed, and what became of the batch."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keyfold import Changelog
from keyfold.checkpoints.log import writer as writing
from keyfold.statestore.errors import KeyfoldError, StorageFailed
from support.changelogs import BY_HAND, rows
from support.faults.inject import QUICK, Operation, Watched

NOTHING, UNKNOWN = "nothing of this batch was committed", "whether this batch was committed is unknown"


class FailOnce(Watched):
    """The n-th operation from when it is armed fails, before it happened or (`after`) once it has."""

    def __init__(self, after: bool) -> None:
        self.left: int | None = None
        self.failed: Operation | None = None
        self._after = after

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        fails = self.left == 0 and operation.name != "lock"
        if self.left is not None:
            self.left -= 1
        if fails:
            self.failed = operation
        if fails and not self._after:
            raise OSError(errno.EIO, "injected", str(operation.path))
        with super().around(operation):
            yield
        if fails and self._after:
            if operation.name == "create":
                os.unlink(operation.path)
            raise OSError(errno.EIO, "injected", str(operation.path))


def outcome_of(commit: Callable[[], object]) -> str:
    """What the caller of a commit is told."""
    said = ""
    try:
        commit()
    except StorageFailed as e:
        said = str(e)
    if not said:
        return "counts"
    assert (NOTHING in said) != (UNKNOWN in said)
    assert ("last_batch" in said) == (UNKNOWN in said)
    return UNKNOWN if UNKNOWN in said else NOTHING


@pytest.mark.parametrize("rolls", [False, True], ids=["", "and rolls"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_failed_commit_says_what_became_of_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool, rolls: bool
) -> None:
    """Every operation of a commit fails once; what the caller was told must be true of what is found."""
    template = tmp_path / "template"
    with Changelog.open(template, config=BY_HAND, files=QUICK) as log:
        log.append(rows(("a", "0")), batch_id=0)
    if rolls:
        monkeypatch.setattr(writing, "_JOURNAL_BYTES", 0)
    told = set()
    for n in range(200):
        path = tmp_path / f"{n}"
        files = FailOnce(after)
        with Changelog.open(path, config=BY_HAND, files=files) as log:
            log.append(rows(("a", "1")), batch_id=0)
            if rolls:
                log.engine.writer._checkpoint_bytes = 0
            files.left = n
            outcome = outcome_of(lambda log=log: log.append(rows(("a", "2")), batch_id=1))  # type: ignore[misc]
            files.left = None
            if files.failed is not None and outcome != "counts":
                with pytest.raises(KeyfoldError, match="open it again"):
                    log.append(rows(("a", "3")), batch_id=2)
        with Changelog.open(path, files=QUICK) as log:
            found = log.last_batch("append")
        expected = {"counts": (1,), NOTHING: (0,), UNKNOWN: (0, 1)}[outcome]
        assert found in expected, f"{files.failed} failed, the caller was told {outcome!r}"
        told.add(outcome)
        if files.failed is None:
            break
    else:
        raise AssertionError("a commit does not come to its end")
    assert told == {"counts", NOTHING, UNKNOWN}


def test_what_follows_the_log_and_fails_does_not_make_a_commit_fail(tmp_path: Path) -> None:
    """The batch counts: an error would have the caller commit it again under another number."""
    with Changelog.open(tmp_path / "log", config=BY_HAND) as log:

        def fail(state: object) -> None:
            raise RuntimeError("can't start new thread")

        log.engine.writer.on_change(fail)
        assert log.append(rows(("a", "1"))).number == 1
        assert log.append(rows(("a", "2"))).number == 2
        assert not log.engine.writer.fenced


class Scarce(Watched):
    """While it is armed, the first looks at the claims find that no file can be opened."""

    armed = 0

    @contextmanager
    def _operation(self, name: str, path: Path, **details: object) -> Iterator[None]:
        if self.armed and name == "list_directory" and path.name == "manifest":
            self.armed -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        yield


def test_a_look_at_the_claims_waits_for_a_file_that_it_can_open(tmp_path: Path) -> None:
    files = Scarce()
    with Changelog.open(tmp_path / "log", config=BY_HAND, files=files) as log:
        log.append(rows(("a", "1")))
        files.armed = 5
        assert log.append(rows(("a", "2"))).number == 2
        assert files.armed == 0
        assert not log.engine.writer.fenced
