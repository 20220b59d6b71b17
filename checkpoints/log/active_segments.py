"""The active segments, one per partition: created, appended to, sealed, abandoned.

A segment becomes part of the log only when a manifest line of the writer names it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final, Protocol, TypeVar

import pyarrow as pa

from keyfold.checkpoints.log.descriptors import limit_told
from keyfold.checkpoints.log.ownership import Ownership
from keyfold.checkpoints.manifest.config import LogConfig
from keyfold.checkpoints.manifest.identity import ChangelogMeta
from keyfold.checkpoints.manifest.segment_lines import Growth
from keyfold.checkpoints.manifest.state import State
from keyfold.statestore import filenames
from keyfold.statestore.files import Files
from keyfold.statestore.segment.writer import Block, Segment, SegmentWriter

T = TypeVar("T")

#: Takes the offset of the first record; returns the blocks that a batch adds to one partition, in order.
BlockFactory = Callable[[int], Iterable[Block]]

NOTHING_COMMITTED: Final = "nothing of this batch was committed"


class _Writer(Protocol):
    files: Files
    root: Path
    identity: ChangelogMeta
    state: State
    ownership: Ownership
    clock_ms: Callable[[], int]


class ActiveSegments:
    """The active segments of a writer. The writer calls all methods but `begin` one at a time."""

    def __init__(self, writer: _Writer, pool: ThreadPoolExecutor) -> None:
        self._writer = writer
        self._pool = pool
        self._active: dict[int, SegmentWriter] = {}
        self._segment_number = 0
        self._number_lock = threading.Lock()

    def __contains__(self, partition: int) -> bool:
        return partition in self._active

    def __getitem__(self, partition: int) -> SegmentWriter:
        return self._active[partition]

    @property
    def partitions(self) -> list[int]:
        """The partitions that have an active segment, ascending."""
        return sorted(self._active)

    def overdue(self) -> list[int]:
        """Partitions whose segment is older than `segment.ms` or `max.compaction.lag.ms`."""
        state = self._writer.state
        return [
            p for p, active in self._active.items()
            if active.segment.records and self._is_overdue(state.partitions[p].segments[-1])
        ]  # fmt: skip

    # -- appending ---------------------------------------------------------------------------------

    def begin(self, partition: int, base: int, schema: pa.Schema) -> SegmentWriter:
        """A new file in a partition's directory, for blocks of `schema`. It is not part of the log until a
        manifest line names it.
        """
        writer = self._writer
        with self._number_lock:
            self._segment_number += 1
            number = self._segment_number
        writer.ownership.check_place(NOTHING_COMMITTED)
        name = filenames.segment_name(base, writer.state.epoch, number)
        directory = filenames.partition(writer.root, partition)
        return SegmentWriter(writer.files, directory, name, base, writer.clock_ms(), schema)

    def append(self, parts: Mapping[int, BlockFactory]) -> dict[int, list[Growth]]:
        """Append blocks to the active segments and sync them. Returns what the commit line says of each
        partition.

        Raises:
            StorageFailed: see `Ownership.failures`. Also when too many files are open; then the writer is not
                fenced.

        Errors raised while blocks are produced pass through. After any error nothing of the batch is
        committed, and its partitions have no active segment any more.
        """
        try:
            with (
                self._writer.ownership.failures("a segment", NOTHING_COMMITTED),
                self.too_many_files(NOTHING_COMMITTED),
            ):
                self._make_directories(parts)
                lines = self._each(lambda p: self._append(p, parts[p]), list(parts))
                return dict(zip(parts, lines, strict=True))
        except BaseException:
            self._abandon(parts)
            raise

    def _make_directories(self, parts: Iterable[int]) -> None:
        """Create the directories of partitions without segments. They are durable before anything in them is
        committed, also if a writer made one and died before syncing it.
        """
        writer = self._writer
        first = [p for p in parts if p not in self._active and not writer.state.partitions[p].segments]
        if first:
            writer.ownership.check_place(NOTHING_COMMITTED)
            for directory in (filenames.partition(writer.root, p) for p in first):
                if not writer.files.is_directory(directory):
                    writer.files.make_directory(directory, below=writer.root)
            writer.files.sync_directory(writer.root)

    def _append(self, partition: int, blocks: BlockFactory) -> list[Growth]:
        p = self._writer.state.partitions[partition]
        # Only the last segment can be active.
        named = p.segments[-1].name if p.segments else ""
        active = self._active.get(partition)
        current = p.segments[-1] if active is not None else None
        pieces: list[Growth] = []
        next_offset = p.end
        grown = new_file = False
        schema = self._writer.identity.record_schema
        for block in blocks(next_offset):
            if (
                active is not None
                and current is not None
                and (self._is_full(current) or active.schema != schema)
            ):
                self._writer.ownership.check_place(NOTHING_COMMITTED)
                pieces.append(Growth.of(active.seal(current), begun=current.name != named))
                active = None
                new_file = True
            if active is None:
                active = self._active[partition] = self.begin(partition, next_offset, schema)
                new_file = True
            next_offset = block.last + 1
            current = active.append([block], next_offset)
            grown = True
        if grown and active is not None and current is not None:
            active.sync()
            pieces.append(Growth.of(current, begun=current.name != named))
        if new_file:
            self._writer.files.sync_directory(filenames.partition(self._writer.root, partition))
        return pieces

    def _is_full(self, segment: Segment) -> bool:
        return segment.size >= self._config.segment_bytes or self._is_overdue(segment)

    def _is_overdue(self, segment: Segment) -> bool:
        lag = min(self._config.segment_ms, self._config.max_compaction_lag_ms)
        return segment.records > 0 and self._writer.clock_ms() - segment.created_ms >= lag

    @property
    def _config(self) -> LogConfig:
        return self._writer.identity.config

    # -- sealing -----------------------------------------------------------------------------------

    def seal(self, partitions: Iterable[int]) -> dict[int, Growth]:
        """Seal the segments of these partitions. Returns what the manifest line says of each. After an error
        (as for `append`) they are not appended to any more; their bytes up to the last mark stay valid.
        """
        chosen = sorted(partitions)
        try:
            with (
                self._writer.ownership.failures("a segment"),
                self.too_many_files("some segments remain unsealed"),
            ):
                return dict(zip(chosen, self._each(self._seal, chosen), strict=True))
        finally:
            for partition in chosen:
                self._active.pop(partition).close()

    def _seal(self, partition: int) -> Growth:
        self._writer.ownership.check_place()
        sealed = self._active[partition].seal(self._writer.state.partitions[partition].segments[-1])
        self._writer.files.sync_directory(filenames.partition(self._writer.root, partition))
        return Growth.of(sealed, begun=False)

    def _abandon(self, parts: Iterable[int]) -> None:
        """Drop the uncommitted bytes of a batch. Its segments are not appended to any more."""
        abandoned = [(p, self._active.pop(p)) for p in parts if p in self._active]
        for partition, active in abandoned:
            segments = self._writer.state.partitions[partition].segments
            committed = next((s for s in segments if s.name == active.segment.name), None)
            # For plain Arrow tools only, which would read the uncommitted bytes. The manifest does not count
            # them.
            with contextlib.suppress(OSError):
                active.abandon(committed)

    def close(self) -> None:
        for active in self._active.values():
            active.close()

    # -- helpers -----------------------------------------------------------------------------------

    def _each(self, work: Callable[[int], T], partitions: list[int]) -> list[T]:
        """Run `work` for each partition in parallel, or in this thread if there is only one. No work is still
        running when this returns or raises.
        """
        if len(partitions) == 1:
            return [work(partitions[0])]
        futures = [self._pool.submit(work, p) for p in partitions]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def too_many_files(self, outcome: str) -> contextlib.AbstractContextManager[None]:
        """Raises `StorageFailed` with this outcome if too many files are open."""
        return limit_told(self._writer.root, outcome)
