"""The commit from which a query was resumed, stored in the query's own checkpoint.

A file `keyfold-resume-<uuid of the changelog>` beside Spark's `offsets` and `commits` holds the commit. It
has the lifetime of the checkpoint. It is binding as soon as Spark has planned a batch: the offsets of that
batch, and its part of Spark's state, belong to this commit. Before that, the file may be replaced.

Spark reads an initial state in batch 0 only. It repeats that batch until it is recorded under `commits`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from keyfold.checkpoints.manifest.journal import decode_line, encode_line
from keyfold.checkpoints.manifest.state import Commit
from keyfold.statestore import filenames
from keyfold.statestore.errors import ConfigError, Damaged, NotResumable
from keyfold.statestore.files import Files
from keyfold.statestore.paths import AnyPath, local_path, remote_scheme, text_of


def checkpoint_path(checkpoint: AnyPath) -> Path:
    """The absolute path of a `checkpointLocation`, as Spark interprets it.

    Raises `ConfigError` if it is not on a local disk, or if it begins with `~`, which Spark takes for the
    name of a directory.
    """
    text = text_of(checkpoint)
    if remote_scheme(checkpoint) is not None:
        raise ConfigError(
            "A resumed query's checkpoint must be on a local disk.", expected="a path or a file: URI",
            found=text.partition(":")[0] + ":",
            remedy="leave checkpoint= out, and seed the query with keyfold.aggregate or seed",
        )  # fmt: skip
    if text.startswith("~"):
        raise ConfigError(
            "Spark does not expand ~ to the home directory.", path=text,
            expected="a path without ~", found="~",
            remedy="pass os.path.expanduser(path), here and as checkpointLocation",
        )  # fmt: skip
    return local_path(checkpoint, decode=False)


class QueryPin:
    """The marker file of one changelog in one checkpoint, and the state of Spark's files beside it."""

    def __init__(self, files: Files, checkpoint: Path, changelog: str, app_id: str) -> None:
        self.checkpoint = checkpoint
        self._files = files
        self._changelog = changelog
        self._app = app_id
        self._path = filenames.resume_pin(checkpoint, changelog)
        if files.exists(checkpoint) and not files.is_directory(checkpoint):
            raise ConfigError(
                "Not a checkpoint of a query.", path=checkpoint, expected="a directory, or no file yet",
                found="a file", remedy="correct `checkpoint=`",
            )  # fmt: skip

    def has_begun(self) -> bool:
        """Whether Spark has planned a batch with this checkpoint."""
        return bool(self._batches("offsets"))

    def is_binding(self) -> bool:
        """Whether the query was started from the commit in the file."""
        return self.has_begun() and self._files.exists(self._path)

    def is_seeded(self) -> bool:
        """Whether Spark has completed the first batch, and so has read the initial state."""
        return bool(self._batches("commits")) or max(self._batches("offsets"), default=0) > 0

    def query(self) -> str:
        """The query's id, empty if Spark has not written one."""
        try:
            found = json.loads(self._files.read(self.checkpoint / "metadata"))
        except (FileNotFoundError, ValueError):
            return ""
        return str(found.get("id", "")) if isinstance(found, dict) else ""

    def read(self) -> Commit:
        """The commit in the file. Raises `Damaged`, and `NotResumable` if it belongs to another app."""
        line = decode_line(self._files.read(self._path).rstrip(b"\n"))
        try:
            if line is None or line["t"] != "resumed":
                raise ValueError("other bytes")
            commit = Commit.from_json(line["commit"])
        except (KeyError, ValueError, TypeError) as e:
            raise Damaged(
                "The file with the resumed commit is damaged.", path=self._path,
                expected="a line that matches its checksum, with a commit", found=f"{type(e).__name__}: {e}",
                remedy="delete the checkpoint, and resume again",
            ) from e  # fmt: skip
        if commit.app != self._app:
            raise NotResumable(
                "This checkpoint was resumed for another app.", path=self.checkpoint, expected=commit.app,
                found=self._app, remedy="correct app_id, or give the query a checkpoint of its own",
            )  # fmt: skip
        return commit

    def check_not_begun(self) -> None:
        """Raises `NotResumable` if the query has already begun without being resumed."""
        if self.has_begun():
            raise NotResumable(
                "The query with this checkpoint began without being resumed.", path=self.checkpoint,
                expected="a new checkpoint, or one that was resumed before", found="batches of a query",
                remedy="start the query as it is; if its batches are refused, delete the checkpoint",
            )  # fmt: skip

    def write(self, commit: Commit) -> None:
        """Store `commit`, durably."""
        made = self._files.make_directory(self.checkpoint)
        line = {"t": "resumed", "seq": 0, "changelog": self._changelog, "commit": commit.to_json()}
        self._files.write_whole(self._path, encode_line(line))
        for directory in made:
            self._files.sync_directory(directory.parent)

    def _batches(self, log: str) -> Sequence[int]:
        listed = self._files.list_directory(self.checkpoint / log)
        return [int(name) for name in listed if name.isdigit()]
