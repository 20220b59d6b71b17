"""`resume`: the state of a job's last commit, and the position of its source at that commit, to start the job
again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.engine import Engine
from keyfold.checkpoints.log.recovery import View
from keyfold.checkpoints.manifest.idempotence import checked_app
from keyfold.checkpoints.manifest.identity import ChangelogMeta, read_identity
from keyfold.checkpoints.manifest.resolve import resolve_ends
from keyfold.checkpoints.manifest.source_offsets import source_options
from keyfold.checkpoints.manifest.state import Commit
from keyfold.checkpoints.restore.restore import RestoredState, restore
from keyfold.checkpoints.resume.resume_marker import QueryPin, checkpoint_path
from keyfold.statestore.closing import Closing
from keyfold.statestore.errors import NotAChangelog, NotResumable
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.paths import AnyPath
from keyfold.statestore.remote_files import writable
from keyfold.statestore.schema.columns import Columns


def resume(path: AnyPath, app_id: str, *, checkpoint: AnyPath | None = None, files: Files = LOCAL) -> Resumed:
    """The state and the source position of an app's last commit, for a job that lost its checkpoint.

    An anchor pins the commit until the new query's second batch is committed, so that the same state is found
    after a crash. The sink of the new query sets `on_reset="restore"`: it accepts the query only if each
    source begins where the commit ended, and if the state that the query keeps in Spark begins with the
    commit's state.

    With `checkpoint`, the choice is stored in that directory: each start of the query with it gets the same
    commit, whatever the query has committed by then. Without it, a second call returns the last commit, which
    may be the new query's own.

    Args:
        checkpoint: the new query's `checkpointLocation`, on a local disk. It need not exist.

    Raises:
        NotAChangelog: `path` is not a changelog.
        NotResumable: the app has not committed anything; or a query has begun with this checkpoint without
            being resumed, or the app has committed with another query since then.
        CompactedAway: other apps have committed since, and the exact state of the app's last commit is gone.
        ChangelogLocked: another process writes the changelog.
        ConfigError: an invalid app id, or the checkpoint is not a local path.
        Damaged: the choice stored in the checkpoint cannot be read.
    """
    root, app_id = writable(path, files), checked_app(app_id)
    identity = read_identity(files, root)
    pin = None if checkpoint is None else QueryPin(files, checkpoint_path(checkpoint), identity.uuid, app_id)
    if pin is not None:
        if pin.is_binding():
            return _resumed_again(files, root, identity, pin)
        pin.check_not_begun()
    with Changelog.open(root, files=files) as log:
        with log.engine.exclusive:
            last = _last_commit(log.engine, app_id)
            # Others may have committed since, and a pass may have folded across this commit.
            resolve_ends(log.state, log.path, (app_id, last.batch))
            anchor = log.engine.pin_for_resume(last)
    if pin is not None:
        pin.write(last)
    state = restore(root, at=anchor, files=files)
    kept = None if pin is None else pin.checkpoint
    return Resumed(last, root, identity.uuid, identity.columns, kept, False, files, state)


def resume_if_lost(
    path: AnyPath, app_id: str, *, checkpoint: AnyPath, files: Files = LOCAL
) -> Resumed | None:
    """`resume` for a job that calls it at every start. None if there is nothing to resume.

    This is so if the app has not committed anything yet, or if the query has its own checkpoint and was never
    resumed. A resumed query has an additional source, its seed, for the life of its checkpoint, so it gets
    the same answer at every start.

    Raises the errors of `resume`.
    """
    root, app_id = writable(path, files), checked_app(app_id)
    try:
        identity = read_identity(files, root)
    except NotAChangelog:
        return None
    pin = QueryPin(files, checkpoint_path(checkpoint), identity.uuid, app_id)
    if pin.has_begun() and not pin.is_binding():
        return None
    if not pin.has_begun() and app_id not in View(files, root).state.apps:
        return None
    return resume(root, app_id, checkpoint=checkpoint, files=files)


def _resumed_again(files: Files, root: Path, identity: ChangelogMeta, pin: QueryPin) -> Resumed:
    """The commit from which the query with this checkpoint was started."""
    commit = pin.read()
    if pin.is_seeded():
        return Resumed(commit, root, identity.uuid, identity.columns, pin.checkpoint, True, files, None)
    with Changelog.open(root, files=files) as log:
        with log.engine.exclusive:
            last = _last_commit(log.engine, commit.app)
            if last.number != commit.number and last.query != pin.query():
                raise NotResumable(
                    f"The app {commit.app!r} has committed with another query after this "
                    "checkpoint was resumed.",
                    path=pin.checkpoint, expected=f"commit {commit.number}, or one of query {pin.query()}",
                    found=f"commit {last.number} of query {last.query}",
                    remedy="delete the checkpoint, and resume again",
                )  # fmt: skip
            resolve_ends(log.state, log.path, commit.number)
            anchor = log.engine.pin_for_resume(commit)
    state = restore(root, at=anchor, files=files)
    return Resumed(commit, root, identity.uuid, identity.columns, pin.checkpoint, False, files, state)


def _last_commit(engine: Engine, app_id: str) -> Commit:
    last = engine.state.apps.get(app_id)
    if last is None:
        raise NotResumable(
            f"The app {app_id!r} has not committed anything here.", path=engine.root,
            expected=f"one of {', '.join(sorted(engine.state.apps)) or '(no app has)'}", found=repr(app_id),
            remedy="correct app_id, or start the query without resuming",
        )  # fmt: skip
    return last


@dataclass(frozen=True)
class Resumed(Closing):
    """State and source position of one commit.

    Attributes:
        commit: its number, batch, query and source offsets (one JSON text per source, as Spark wrote them).
        path: the changelog's path.
        uuid: the changelog's uuid.
        columns: the changelog's typed columns, None for raw bytes.
        checkpoint: the directory where the choice of this commit is stored, None if it is not stored.
        is_seeded: the query with that checkpoint has read the state and will not need it again.
    """

    commit: Commit
    path: Path
    uuid: str
    columns: Columns | None
    checkpoint: Path | None
    is_seeded: bool
    _files: Files = field(repr=False)
    _state: RestoredState | None = field(repr=False)

    @property
    def state(self) -> RestoredState:
        """The state as of the commit.

        Raises:
            CompactedAway: the query has read the state long ago, and it was compacted away since.
        """
        if self._state is None:
            object.__setattr__(self, "_state", restore(self.path, at=self.commit.number, files=self._files))
        assert self._state is not None
        return self._state

    def options(self, source: int | None = None) -> dict[str, str]:
        """The options that start a source again where the commit ended: `startingOffsets`.

        The position of a Kafka source does not contain its subscription: keep `subscribe`, `subscribePattern`
        or `assign` as they were. Spark accepts a position only if it names every partition of the topics. If
        topics may have got new partitions, use `keyfold.kafka_stream`, which asks Kafka.

        Args:
            source: the number of the streaming source, from 0, in the order of the query: the left side of a
                union or join comes before the right side. A static side has no position and does not count,
                nor does the seed of an earlier resume. None if only one source can be resumed.

        Raises:
            NotResumable: the source has no position that can be used as options, or there are several
                sources.
        """
        return source_options(self.commit, source, self.path)

    def close(self) -> None:
        """Release the view of the state."""
        if self._state is not None:
            self._state.close()
