"""Which bytes count: manifest, recovery, cleaner, snapshots, restore; the `keyfold` command. No Spark in
here.

`Changelog` is the door: append, read, transactions, compaction. `restore` and `resume` give a job its state
back; a `Standby` is ready to take over from a writer that dies.
"""

from __future__ import annotations

from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.restore import RestoredState, restore
from keyfold.checkpoints.resume import Resumed, resume, resume_if_lost
from keyfold.checkpoints.standby import Standby
from keyfold.checkpoints.targets import open_store

__all__ = [
    "Changelog",
    "RestoredState",
    "Resumed",
    "Standby",
    "open_store",
    "restore",
    "resume",
    "resume_if_lost",
]
