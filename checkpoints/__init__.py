"""Which bytes count: manifest, recovery, cleaner, snapshots, restore; the `keyfold` command. No Spark in
here.

`Changelog` is the door: append, read, transactions, compaction. `restore` and `resume` give a job its state
back; a `Standby` is ready to take over from a writer that dies.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from keyfold.checkpoints.changelog import Changelog as Changelog
    from keyfold.checkpoints.restore import RestoredState as RestoredState
    from keyfold.checkpoints.restore import restore as restore
    from keyfold.checkpoints.resume import Resumed as Resumed
    from keyfold.checkpoints.resume import resume as resume
    from keyfold.checkpoints.resume import resume_if_lost as resume_if_lost
    from keyfold.checkpoints.standby import Standby as Standby
    from keyfold.checkpoints.targets import open_store as open_store

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

_MODULES: Final = {
    "Changelog": "changelog",
    "RestoredState": "restore",
    "Resumed": "resume",
    "Standby": "standby",
    "open_store": "targets",
    "restore": "restore",
    "resume": "resume",
    "resume_if_lost": "resume",
}


def __getattr__(name: str) -> object:
    # Loaded when asked for: half a second that the help of the command and the tasks of Spark do without.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


class _Room(ModuleType):
    """`restore` and `resume` are functions here, though importing their modules would set these names too."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _MODULES or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Room
