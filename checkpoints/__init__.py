"""Which bytes count: manifest, recovery, cleaner, snapshots, restore; the `keyfold` command. No Spark in
here.

`Changelog` is the door: append, read, transactions, compaction. `restore` and `resume` give a job its state
back.
"""

from __future__ import annotations

from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.restore import RestoredState, restore
from keyfold.checkpoints.resume import Resumed, resume

__all__ = ["Changelog", "RestoredState", "Resumed", "restore", "resume"]
