"""Where tests have their files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import psutil

#: A run of all tests has less than half of it at one time; the rest is for what failed and stays.
ROOM_BYTES: Final = 4 << 30


def in_memory(place: Path = Path("/dev/shm"), room_bytes: int = ROOM_BYTES) -> Path | None:
    """`place` if it is a directory that may be written, with room, where programs may be run; else None.

    What is in it takes memory, so as much again must be left of that. A container has 64 MiB by default, and
    no program may be run there: tests make environments whose commands they run.
    """
    if not os.access(place, os.W_OK | os.X_OK):
        return None
    there = os.statvfs(place)
    has_room = there.f_bavail * there.f_frsize >= room_bytes
    has_memory = psutil.virtual_memory().available >= 2 * room_bytes
    return place if has_room and has_memory and not there.f_flag & os.ST_NOEXEC else None
