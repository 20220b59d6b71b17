"""Tests have their files in memory where there is room, and elsewhere where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from support.faults.machines import tmpfs
from support.places import in_memory


def test_a_place_with_room_is_taken(tmp_path: Path) -> None:
    assert in_memory(tmp_path, room_bytes=1) == tmp_path


def test_a_place_that_is_small_or_missing_is_not_taken(tmp_path: Path) -> None:
    assert in_memory(tmp_path / "missing") is None
    with tmpfs(tmp_path, 64 << 10) as small:
        assert in_memory(small, room_bytes=64 << 10) == small
        assert in_memory(small, room_bytes=65 << 10) is None


def test_a_place_is_not_taken_that_memory_has_no_room_for(tmp_path: Path) -> None:
    assert in_memory(tmp_path, room_bytes=psutil.virtual_memory().total // 2 + 1) is None


def test_a_place_where_no_program_may_be_run_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    flags = (*real[:8], real.f_flag | os.ST_NOEXEC, *real[9:])
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(flags))
    assert in_memory(tmp_path, room_bytes=1) is None
