"""`resume`: the state of a job's last commit, and the position of its source at that commit, to start it
again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.identity import read_identity
from keyfold.checkpoints.points import ends_at
from keyfold.checkpoints.restore import RestoredState, restore
from keyfold.checkpoints.state import Commit
from keyfold.statestore.errors import NotResumable
from keyfold.statestore.files import LOCAL, Files


def resume(path: str | Path, app_id: str, *, files: Files = LOCAL) -> Resumed:
    """What a job with a lost checkpoint starts again from: state and source position of its last commit.

    The commit is pinned by an anchor until the new query's first batch is safely in, so that a second crash
    meanwhile finds the same state. The sink of the new query says `on_reset="restore"`.

    Raises:
        NotAChangelog: there is none at `path`.
        NotResumable: the app has committed nothing.
        CompactedAway: other apps have committed since, and the exact state of its last commit is gone.
        ChangelogLocked: another process writes the changelog.
    """
    name = anchor_name(app_id)
    read_identity(files, Path(path))
    with Changelog.open(path, files=files) as log:
        writer = log.host.writer
        with writer.exclusive:
            last = writer.state.apps.get(app_id)
            if last is None:
                raise NotResumable(
                    f"The app {app_id!r} has committed nothing here.",
                    path=path,
                    expected=f"one of {', '.join(sorted(writer.state.apps)) or '(no app has)'}",
                    found=repr(app_id),
                    remedy="correct app_id, or start the query without resuming",
                )
            # Others may have committed since, and their commits be folded over this one.
            ends_at(writer.state, writer.root, (app_id, last.batch))
            anchor = writer.state.anchors.get(name)
            if anchor is None or anchor.commit != last.number:
                writer.write_line(
                    {
                        "t": "anchor",
                        "name": name,
                        "commit": last.number,
                        "ends": list(last.ends),
                        "app": app_id,
                    }
                )
    return Resumed(restore(path, at=name, files=files), last, Path(path))


def anchor_name(app_id: str) -> str:
    """The anchor that pins an app's commit while it is being resumed."""
    return f"resume:{app_id}"


@dataclass(frozen=True)
class Resumed:
    """State and source position of one commit.

    Attributes:
        state: the state as of the commit.
        commit: its number, batch, query and source offsets (one JSON text per source, as Spark wrote them).
    """

    state: RestoredState
    commit: Commit
    path: Path

    def options(self, source: int | None = None) -> dict[str, str]:
        """The options that start the source again where the commit ended.

        For Kafka `subscribe` and `startingOffsets`, for a keyfold source `startingOffsets`.

        Args:
            source: which source of the query, in the order of its plan; None where only one can be resumed.

        Raises:
            NotResumable: the source keeps no position that can be given back, or there are several.
        """
        positions = [_options(text) for text in self.commit.source]
        if source is None:
            found = [i for i, options in enumerate(positions) if isinstance(options, dict)]
            if len(found) != 1:
                reasons = [str(p) for p in positions if not isinstance(p, dict)]
                raise NotResumable(
                    f"Commit {self.commit.number} does not have exactly one source that can be resumed.",
                    path=self.path,
                    expected="one Kafka or keyfold source",
                    found="; ".join(reasons) if not found else f"{len(found)}: sources {found}",
                    remedy='read again from where you choose with on_reset="append"'
                    if not found
                    else "say which: options(source=…)",
                )
            source = found[0]
        options = positions[source] if 0 <= source < len(positions) else "there is no such source"
        if isinstance(options, dict):
            return dict(options)
        raise NotResumable(
            f"Source {source} of commit {self.commit.number} cannot be resumed.", path=self.path,
            expected="a Kafka or keyfold source", found=options,
            remedy='read again from where you choose, with on_reset="append"',
        )  # fmt: skip

    def close(self) -> None:
        """Let go of the view of the state."""
        self.state.close()

    def __enter__(self) -> Resumed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _options(text: str) -> dict[str, str] | str:
    """The options for a source whose offset Spark wrote as `text`, or why there are none."""
    try:
        offset: Any = json.loads(text)
    except ValueError:
        return "its position is no JSON"
    if isinstance(offset, dict) and "keyfold" in offset:
        if "seed" in offset:
            return "it is the seed of an earlier resume"
        return {"startingOffsets": text}
    if isinstance(offset, dict) and offset and all(_is_kafka(v) for v in offset.values()):
        return {"subscribe": ",".join(sorted(offset)), "startingOffsets": text}
    if isinstance(offset, dict) and "logOffset" in offset:
        return "a file source keeps only the number of its own log entry, which is in the lost checkpoint"
    return "its position is only shown: " + text[:200]


def _is_kafka(value: object) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(k.isdigit() and isinstance(v, int) for k, v in value.items())
    )
