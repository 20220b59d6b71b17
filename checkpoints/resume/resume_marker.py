"""Which commit a query was resumed from, kept in the query's own checkpoint.

A file `keyfold-resume-<uuid of the changelog>` beside Spark's `offsets` and `commits` holds the commit.
It lives and dies with the checkpoint. It binds as soon as Spark has planned a batch: the offsets of that
batch, and what of it is in Spark's state, belong to this commit. Before that nothing does, and the file may
be replaced.

Spark takes an initial state in with batch 0 only. It runs that batch again as long as it has not noted it
under `commits`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from keyfold.checkpoints.manifest.journal import decode_line, encode_line
from keyfold.checkpoints.manifest.state import Commit
from keyfold.statestore import filenames
from keyfold.statestore.errors import ConfigError, Damaged, NotResumable
from keyfold.statestore.files import Files
from keyfold.statestore.paths import AnyPath, local_path, remote_scheme, text_of


def checkpoint_path(checkpoint: AnyPath) -> Path:
    """The absolute path of a `checkpointLocation`, as Spark takes it.

    Raises `ConfigError` where it is on no local disk, and where it begins with `~`, a directory of that name
    for Spark.
    """
    text = text_of(checkpoint)
    if remote_scheme(checkpoint) is not None:
        raise ConfigError(
            "A resumed query's checkpoint has to be on a local disk.", expected="a path or a file: URI",
            found=text.partition(":")[0] + ":",
            remedy="leave checkpoint= out, and seed the query with keyfold.aggregate or seed",
        )  # fmt: skip
    if text.startswith("~"):
        raise ConfigError(
            "Spark does not take ~ for a home.", path=text, expected="the path without ~", found="~",
            remedy="give os.path.expanduser(path), here and as checkpointLocation",
        )  # fmt: skip
    return local_path(checkpoint, decode=False)


class QueryPin:
    """The file for one changelog in one checkpoint, and what Spark's files beside it say."""

    def __init__(self, files: Files, checkpoint: Path, changelog: str, app_id: str) -> None:
        self.checkpoint = checkpoint
        self._files = files
        self._changelog = changelog
        self._app = app_id
        self._path = filenames.resume_pin(checkpoint, changelog)
        if files.exists(checkpoint) and not files.is_directory(checkpoint):
            raise ConfigError(
                "This is no checkpoint of a query.", path=checkpoint, expected="a directory, or nothing yet",
                found="a file", remedy="correct checkpoint=",
            )  # fmt: skip

    def has_begun(self) -> bool:
        """Whether Spark has planned a batch with this checkpoint."""
        return bool(self._batches("offsets"))

    def is_binding(self) -> bool:
        """Whether the query was started from the commit in the file."""
        return self.has_begun() and self._files.exists(self._path)

    def is_seeded(self) -> bool:
        """Whether Spark is done with the first batch, and with it with the initial state."""
        return bool(self._batches("commits")) or max(self._batches("offsets"), default=0) > 0

    def query(self) -> str:
        """The query's id, empty where Spark has written none."""
        try:
            found = json.loads(self._files.read(self.checkpoint / "metadata"))
        except (FileNotFoundError, ValueError):
            return ""
        return str(found.get("id", "")) if isinstance(found, dict) else ""

    def read(self) -> Commit:
        """The commit in the file. Raises `Damaged`, and `NotResumable` where it is another app's."""
        line = decode_line(self._files.read(self._path).rstrip(b"\n"))
        if line is None or line.get("t") != "resumed":
            raise Damaged(
                "What this checkpoint was resumed from cannot be read.", path=self._path,
                expected="a line with its checksum", found="other bytes",
                remedy="delete the checkpoint, and resume again",
            )  # fmt: skip
        kept = line["commit"]
        commit = Commit(**{**kept, "source": tuple(kept["source"]), "ends": tuple(kept["ends"])})
        if commit.app != self._app:
            raise NotResumable(
                "This checkpoint was resumed for another app.", path=self.checkpoint, expected=commit.app,
                found=self._app, remedy="correct app_id, or give the query a checkpoint of its own",
            )  # fmt: skip
        return commit

    def check_not_begun(self) -> None:
        """Raises `NotResumable` where the query has begun, not from a commit that is chosen now."""
        if self.has_begun():
            raise NotResumable(
                "The query with this checkpoint has begun without being resumed.", path=self.checkpoint,
                expected="a new checkpoint, or one that was resumed before", found="batches of a query",
                remedy="start the query as it is; or, where its batches are refused, delete the checkpoint",
            )  # fmt: skip

    def write(self, commit: Commit) -> None:
        """Keep `commit`, durably."""
        made = self._files.make_directory(self.checkpoint)
        line = {"t": "resumed", "n": 0, "changelog": self._changelog, "commit": asdict(commit)}
        self._files.write_whole(self._path, encode_line(line))
        for directory in made:
            self._files.sync_directory(directory.parent)

    def _batches(self, log: str) -> Sequence[int]:
        listed = self._files.list_directory(self.checkpoint / log)
        return [int(name) for name in listed if name.isdigit()]
