"""Rollback: removes everything after a commit. State, log and source position are those of that commit again.

Segments after the commit are removed. A segment that reaches beyond it is copied up to there. One manifest
line publishes the result and increments the generation of every partition: a cleaner pass that began before
is void, last-value stores are rebuilt, and a reader beyond the commit gets an error. The app's own checkpoint
is now ahead of the log, so its query is refused until it starts from `resume`.
"""

from __future__ import annotations

from dataclasses import replace

from keyfold.checkpoints.cleaner.manager import CleanerManager
from keyfold.checkpoints.log.rewrite import discard_segments, rewrite_segments
from keyfold.checkpoints.log.writer import Writer
from keyfold.checkpoints.manifest.entries import RollbackEntry
from keyfold.checkpoints.manifest.resolve import At, resolve_commit
from keyfold.checkpoints.manifest.state import Commit, State
from keyfold.statestore import filenames
from keyfold.statestore.errors import ConfigError, storage_errors
from keyfold.statestore.segment.reader import read_segments
from keyfold.statestore.segment.writer import Segment, SegmentWriter


def roll_back(writer: Writer, cleaning: CleanerManager, to: At) -> Commit:
    """Truncate to a commit, see `Changelog.rollback`."""
    with cleaning.paused(range(len(writer.state.partitions)), cut=True), writer.exclusive:
        if to is None:
            raise ConfigError(
                "A rollback needs a commit.", path=writer.root, expected="a commit", found="None",
                remedy="name the commit to roll back to",
            )  # fmt: skip
        commit = resolve_commit(writer.state, writer.root, to)
        _check_anchors(writer, commit)
        # Sealed, because only a sealed segment can be copied in part while it is removed.
        writer.seal_active()
        state = writer.state
        made: list[SegmentWriter] = []
        try:
            parts = {
                partition: _cut(writer, state, partition, end, made)
                for partition, end in enumerate(commit.ends)
            }
        except BaseException:
            discard_segments(made)
            with storage_errors(
                "The log could not be rolled back; it is unchanged.", writer.root,
                expected="a write that succeeds", remedy="free or repair the disk, then roll back again",
            ):  # fmt: skip
                raise
        swapped = {
            partition: (tuple(s.name for s in out), tuple(added))
            for partition, (out, added) in parts.items()
            if out
        }
        writer.write_line(RollbackEntry(commit.number, commit.ends, swapped))
        for partition, (out, _) in parts.items():
            writer.garbage.add_segments(writer.state.seq, partition, out)
    writer.garbage.collect()
    return commit


def _check_anchors(writer: Writer, commit: Commit) -> None:
    """A named anchor prevents the rollback: its state is wanted. Anchors of `resume` are temporary and do
    not.
    """
    behind = sorted(a.name for a in writer.state.anchors.values() if a.commit > commit.number and not a.app)
    if behind:
        raise ConfigError(
            "A commit after the rollback target has an anchor.", path=writer.root,
            expected=f"no anchor after commit {commit.number}", found=", ".join(behind),
            remedy="drop the anchor first, if its state is not needed any more",
        )  # fmt: skip


def _cut(
    writer: Writer, state: State, partition: int, end: int, made: list[SegmentWriter]
) -> tuple[list[Segment], list[Segment]]:
    """The segments of a partition that are removed, and what replaces them."""
    out = [s for s in state.partitions[partition].segments if s.next > end]
    if not out or out[0].base >= end:
        return out, []
    directory = filenames.partition(writer.root, partition)
    values = writer.identity.value_type
    kept = read_segments(writer.files, directory, (out[0],), out[0].base, end, values)
    cut = (replace(out[0], next=end),)
    return out, rewrite_segments(writer, partition, cut, kept, lambda size: None, made)
