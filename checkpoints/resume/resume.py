"""`resume`: the state of a job's last commit, and the position of its source at that commit, to start it
again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.log.recovery import View
from keyfold.checkpoints.log.writer import Writer
from keyfold.checkpoints.manifest.idempotence import checked_app
from keyfold.checkpoints.manifest.identity import ChangelogMeta, read_identity
from keyfold.checkpoints.manifest.resolve import resolve_ends
from keyfold.checkpoints.manifest.source_offsets import source_options
from keyfold.checkpoints.manifest.state import Commit
from keyfold.checkpoints.restore.restore import RestoredState, restore
from keyfold.checkpoints.resume.resume_marker import QueryPin, checkpoint_path
from keyfold.statestore.errors import NotAChangelog, NotResumable
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.paths import AnyPath
from keyfold.statestore.remote_files import writable
from keyfold.statestore.schema.columns import Columns


def resume(path: AnyPath, app_id: str, *, checkpoint: AnyPath | None = None, files: Files = LOCAL) -> Resumed:
    """What a job with a lost checkpoint starts again from: state and source position of its last commit.

    The commit is pinned by an anchor until the new query's second batch is in, so that a crash meanwhile
    finds the same state. The sink of the new query says `on_reset="restore"`: it takes the query only if each
    source begins where the commit ended, and what the query keeps in Spark begins with the commit's state.

    With `checkpoint` the choice is kept in that directory: however often the query is started with it, and
    whatever it has committed by then, this gives the same commit. Without, a second call gives the last
    commit, which may be the new query's own.

    Args:
        checkpoint: the new query's `checkpointLocation`, on a local disk; it need not exist.

    Raises:
        NotAChangelog: there is none at `path`.
        NotResumable: the app has committed nothing; or a query has begun with this checkpoint that was not
            started from here, or behind which the app has gone on.
        CompactedAway: other apps have committed since, and the exact state of its last commit is gone.
        ChangelogLocked: another process writes the changelog.
        ConfigError: no app id, or the checkpoint is no local path.
        Damaged: what was kept in the checkpoint cannot be read.
    """
    root, app_id = writable(path, files), checked_app(app_id)
    identity = read_identity(files, root)
    pin = None if checkpoint is None else QueryPin(files, checkpoint_path(checkpoint), identity.uuid, app_id)
    if pin is not None:
        if pin.is_binding():
            return _resumed_again(files, root, identity, pin)
        pin.check_not_begun()
    with Changelog.open(root, files=files) as log:
        writer = log.engine.writer
        with writer.exclusive:
            last = _last_commit(writer, app_id)
            # Others may have committed since, and their commits be folded over this one.
            resolve_ends(writer.state, writer.root, (app_id, last.batch))
            anchor = _pinned(writer, app_id, last)
    if pin is not None:
        pin.write(last)
    state = restore(root, at=anchor, files=files)
    kept = None if pin is None else pin.checkpoint
    return Resumed(last, root, identity.uuid, identity.columns, kept, False, files, state)


def resume_if_lost(
    path: AnyPath, app_id: str, *, checkpoint: AnyPath, files: Files = LOCAL
) -> Resumed | None:
    """`resume` for a job that calls it at every start: None where there is nothing to resume.

    That is so where the app has committed nothing yet, and where the query has its own checkpoint and was
    never resumed. A query that was resumed once has a source more, its seed, for the life of its checkpoint:
    so it gets the same answer at every start.

    Raises:
        What `resume` raises.
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
    """The commit that the query with this checkpoint was started from."""
    commit = pin.read()
    if pin.is_seeded():
        return Resumed(commit, root, identity.uuid, identity.columns, pin.checkpoint, True, files, None)
    with Changelog.open(root, files=files) as log:
        writer = log.engine.writer
        with writer.exclusive:
            last = _last_commit(writer, commit.app)
            if last.number != commit.number and last.query != pin.query():
                raise NotResumable(
                    f"The app {commit.app!r} has gone on since this checkpoint was resumed.",
                    path=pin.checkpoint, expected=f"commit {commit.number}, or one of query {pin.query()}",
                    found=f"commit {last.number} of query {last.query}",
                    remedy="delete the checkpoint, and resume again",
                )  # fmt: skip
            resolve_ends(writer.state, writer.root, commit.number)
            anchor = _pinned(writer, commit.app, commit)
    state = restore(root, at=anchor, files=files)
    return Resumed(commit, root, identity.uuid, identity.columns, pin.checkpoint, False, files, state)


def _last_commit(writer: Writer, app_id: str) -> Commit:
    last = writer.state.apps.get(app_id)
    if last is None:
        raise NotResumable(
            f"The app {app_id!r} has committed nothing here.", path=writer.root,
            expected=f"one of {', '.join(sorted(writer.state.apps)) or '(no app has)'}", found=repr(app_id),
            remedy="correct app_id, or start the query without resuming",
        )  # fmt: skip
    return last


def _pinned(writer: Writer, app_id: str, commit: Commit) -> str:
    """The name of the anchor that pins `commit` for its app; it is made where there is none.

    The one pinned before stays: the query that was started from it may not have come beyond its first batch.
    Still older ones go.
    """
    name = anchor_name(app_id, commit.number)
    own = sorted((a for a in writer.state.anchors.values() if a.app == app_id), key=lambda a: a.commit)
    if not any(a.name == name for a in own):
        ends = list(commit.ends)
        line = {"t": "anchor", "name": name, "commit": commit.number, "ends": ends, "app": app_id}
        writer.write_line(line)
        for anchor in [a for a in own if a.commit < commit.number][:-1]:
            writer.write_line({"t": "unanchor", "name": anchor.name})
    return name


def anchor_name(app_id: str, commit: int) -> str:
    """The anchor that pins an app's commit while it is being resumed."""
    return f"resume:{app_id}:{commit}"


@dataclass(frozen=True)
class Resumed:
    """State and source position of one commit.

    Attributes:
        commit: its number, batch, query and source offsets (one JSON text per source, as Spark wrote them).
        path: of the changelog.
        uuid: of the changelog.
        columns: of the changelog, None where it is raw.
        checkpoint: where the choice of this commit is kept, None where it is not.
        is_seeded: the query with that checkpoint has taken the state in; it will not ask for it again.
    """

    commit: Commit
    path: Path
    uuid: str
    columns: Columns | None
    checkpoint: Path | None
    is_seeded: bool
    _files: Files
    _state: RestoredState | None = field(repr=False)

    @property
    def state(self) -> RestoredState:
        """The state as of the commit.

        Raises:
            CompactedAway: the query has taken it in long ago, and it was folded away since.
        """
        if self._state is None:
            object.__setattr__(self, "_state", restore(self.path, at=self.commit.number, files=self._files))
        assert self._state is not None
        return self._state

    def options(self, source: int | None = None) -> dict[str, str]:
        """The options that start a source again where the commit ended: `startingOffsets`.

        What a Kafka source subscribes to, its position does not say: keep `subscribe`, `subscribePattern` or
        `assign` as they were. Spark takes a position only if it names every partition of the topics. For
        topics that may have got more since, `keyfold.kafka_stream` asks Kafka.

        Args:
            source: which of the query's streaming sources, from 0, in the order in which they stand in the
                query: the left side of a union or join before the right one. What is read once (a static
                side) has no position and does not count, nor does the seed of an earlier resume. None where
                only one can be resumed.

        Raises:
            NotResumable: the source keeps no position that can be given back, or there are several.
        """
        return source_options(self.commit, source, self.path)

    def close(self) -> None:
        """Let go of the view of the state."""
        if self._state is not None:
            self._state.close()

    def __enter__(self) -> Resumed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
