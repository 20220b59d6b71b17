"""Parses `--at`: a point in the history of a changelog."""

from __future__ import annotations

import datetime
import re

from keyfold.checkpoints.cli.output import time_from
from keyfold.checkpoints.manifest.state import State

_BATCH = re.compile(r"^(.+):([0-9]+)$", re.DOTALL)

AT_HELP = "A commit number, APP:BATCH, an anchor's name, or a time (ISO 8601, UTC by default)."


def at_from(text: str, state: State) -> int | tuple[str, int] | str | datetime.datetime:
    """The meaning of `text`: an existing anchor, a commit number, a batch of a known app, or a time, in this
    order.

    Any other text is treated as the most similar form, so that the error can list the valid values.
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
