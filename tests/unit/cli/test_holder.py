"""Which process writes, as `keyfold stats` shows it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from keyfold import Changelog
from keyfold.checkpoints.cli.inspect import lock_holder
from keyfold.statestore.files import LOCAL


def test_a_writer_that_closes_files_meanwhile_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    readlink = os.readlink

    def of_lock_only(link: Any, **options: Any) -> str:
        found = str(readlink(link, **options))
        if "/fd/" in str(link) and not found.startswith(str(path.resolve())):
            raise FileNotFoundError(2, "No such file or directory", link)
        return found

    with Changelog.open(path):
        monkeypatch.setattr(os, "readlink", of_lock_only)
        holder = lock_holder(LOCAL, path)
    assert holder is not None
    assert (holder.pid, holder.alive) == (os.getpid(), True)
    closed = lock_holder(LOCAL, path)
    assert closed is None or closed.alive is False
