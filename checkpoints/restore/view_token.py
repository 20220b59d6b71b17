"""A view as text, for readers in other processes: the segments of a state, and the lease that protects them.

Spark plans in another process than the one that restored a state, and sees the newest manifest, in which that
state may be compacted away already. The token allows it to read the files of the older view.
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
    """What a reader of the state needs of the view of line `seq`.

    Attributes:
        lease: protects the files until `expires_ms`, or longer if it is renewed. None if no lease could be
            written.
        generations, starts, unique_below: one per partition; see `PartitionState.unique_below`.
        segments: partition → the segments of its state, for the partitions that are read.
    """

    changelog: str
    seq: int
    lease: str | None
    expires_ms: int
    timeout_ms: int
    generations: tuple[int, ...]
    starts: tuple[int, ...]
    unique_below: tuple[int, ...]
    segments: dict[int, tuple[Segment, ...]]

    def to_text(self) -> str:
        """Printable text without spaces. `from_text` parses it."""
        kept = {
            "changelog": self.changelog,
            "seq": self.seq,
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
        """Raises `ValueError` if it is not the result of `to_text`."""
        try:
            kept = json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
            if set(kept) != {field.name for field in fields(cls)}:
                raise ValueError("wrong fields")
            kept["segments"] = {
                int(p): tuple(segment_from(line) for line in held) for p, held in kept["segments"].items()
            }
            return cls(**kept | {name: tuple(kept[name]) for name in _OF_PARTITIONS})
        except (zlib.error, KeyError, TypeError, AttributeError) as e:
            raise ValueError("not a view token") from e


def hand_over(
    files: Files,
    root: Path,
    changelog: str,
    state: State,
    ends: Sequence[int],
    partitions: Sequence[int],
) -> ViewToken:
    """A token of the view `state`, for a reader of its fold up to `ends`. The caller holds the files.

    The token includes a lease, so that the caller may release the files.
    """
    expires = now_ms() + _TIMEOUT_MS
    try:
        lease: str | None = write_lease(files, root, state.seq, expires)
    except OSError:  # a read-only medium or a full disk: if the files are gone, the reader raises an error
        lease = None
    return ViewToken(
        changelog, state.seq, lease, expires, _TIMEOUT_MS,
        tuple(p.generation for p in state.partitions),
        tuple(p.start for p in state.partitions),
        tuple(p.unique_below for p in state.partitions),
        {
            partition: tuple(s for s in state.partitions[partition].segments if s.base < ends[partition])
            for partition in partitions
        },
    )  # fmt: skip
