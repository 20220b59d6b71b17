"""`--at`: a point in a changelog's life, as it is typed in."""

from __future__ import annotations

import datetime
import re

from keyfold.checkpoints.cli.output import time_from
from keyfold.checkpoints.manifest.state import State

_BATCH = re.compile(r"^(.+):([0-9]+)$", re.DOTALL)

AT_HELP = (
    "A commit number, APP:BATCH, the name of an anchor, or a time (ISO 8601, UTC where it does not say)."
)


def at_from(text: str, state: State) -> int | tuple[str, int] | str | datetime.datetime:
    """What `text` means: an anchor that is there, a commit number, a batch of a known app, a time; in this
    order.

    What is nothing of these is taken for what its form is most like, so that the error names what there is.
    """
    if text in state.anchors:
        return text
    if text.isascii() and text.isdecimal():
        return int(text)
    batch = _BATCH.match(text)
    if batch and batch[1] in state.apps:
        return batch[1], int(batch[2])
    moment = time_from(text)
    if moment is not None:
        return moment
    return (batch[1], int(batch[2])) if batch else text
