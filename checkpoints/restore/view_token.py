"""A view, handed as a text to readers in other processes: which segments hold the state, under which lease.

Spark plans in another process than the one that has restored a state, and looks at the newest manifest there,
where that state may be folded away already. The text lets it read the files of the older view.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from keyfold.checkpoints.log.reader_marks import now_ms, write_lease
from keyfold.checkpoints.manifest.segment_lines import segment_from, segment_line
from keyfold.checkpoints.manifest.state import State
from keyfold.statestore.files import Files
from keyfold.statestore.segment.writer import Segment

_TIMEOUT_MS: Final = 600_000
_OF_PARTITIONS: Final = ("generations", "starts", "unique_below")


@dataclass(frozen=True)
class ViewToken:
    """What of the view of line `n` a reader of its state needs.

    Attributes:
        lease: keeps the files until `expires_ms`, and longer where it is renewed; None where none could be
            written.
        generations, starts, unique_below: of every partition; see `PartitionState.unique_below`.
        segments: partition → what holds its state, for those that are read.
    """

    changelog: str
    n: int
    lease: str | None
    expires_ms: int
    timeout_ms: int
    generations: tuple[int, ...]
    starts: tuple[int, ...]
    unique_below: tuple[int, ...]
    segments: dict[int, tuple[Segment, ...]]

    def to_text(self) -> str:
        """Printable and without spaces; `from_text` reads it."""
        kept = {
            "changelog": self.changelog,
            "n": self.n,
            "lease": self.lease,
            "expires_ms": self.expires_ms,
            "timeout_ms": self.timeout_ms,
            "generations": self.generations,
            "starts": self.starts,
            "unique_below": self.unique_below,
            "segments": {str(p): [segment_line(s) for s in held] for p, held in self.segments.items()},
        }
        packed = zlib.compress(json.dumps(kept, separators=(",", ":")).encode())
        return base64.urlsafe_b64encode(packed).decode()

    @classmethod
    def from_text(cls, text: str) -> ViewToken:
        """Raises `ValueError` where it is no text of `to_text`."""
        try:
            kept = json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
            if set(kept) != {field.name for field in fields(cls)}:
                raise ValueError("other fields")
            kept["segments"] = {
                int(p): tuple(segment_from(line) for line in held) for p, held in kept["segments"].items()
            }
            return cls(**kept | {name: tuple(kept[name]) for name in _OF_PARTITIONS})
        except (zlib.error, KeyError, TypeError, AttributeError) as e:
            raise ValueError("no view") from e


def hand_over(
    files: Files,
    root: Path,
    changelog: str,
    state: State,
    ends: Sequence[int],
    partitions: Sequence[int],
) -> ViewToken:
    """The view `state`, whose files somebody holds now, for a reader of its fold up to `ends`.

    A lease goes with it, so that whoever holds the files may let go of them.
    """
    expires = now_ms() + _TIMEOUT_MS
    try:
        lease: str | None = write_lease(files, root, state.n, expires)
    except OSError:  # a read-only medium, a full disk: the reader may find the files gone, and says so
        lease = None
    return ViewToken(
        changelog, state.n, lease, expires, _TIMEOUT_MS,
        tuple(p.generation for p in state.partitions),
        tuple(p.start for p in state.partitions),
        tuple(p.unique_below for p in state.partitions),
        {
            number: tuple(s for s in state.partitions[number].segments if s.base < ends[number])
            for number in partitions
        },
    )  # fmt: skip
