"""What becomes of an error of the system, and of every other one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from keyfold.statestore.errors import Damaged, StorageFailed, storage_errors


def raised_for(error: BaseException) -> BaseException:
    with (
        pytest.raises(BaseException) as raised,
        storage_errors("It failed.", Path("/a"), expected="a disk", remedy="repair it"),
    ):
        raise error
    return raised.value


@pytest.mark.parametrize("named", [None, "/a/b"])
def test_an_error_of_the_system_names_its_file_its_kind_and_its_reason(named: str | None) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), named)
    told = raised_for(error)
    assert isinstance(told, StorageFailed)
    assert (str(told.path), told.found) == (named or "/a", "OSError: No space left on device")
    assert told.__cause__ is error


def test_an_error_of_the_system_without_a_number_keeps_its_text() -> None:
    told = raised_for(PermissionError("not here"))
    assert isinstance(told, StorageFailed)
    assert told.found == "PermissionError: not here"


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), GeneratorExit(), StopIteration(), ValueError("x"), Damaged("x")], ids=repr
)
def test_every_other_error_passes_as_it_is(error: BaseException) -> None:
    assert raised_for(error) is error
