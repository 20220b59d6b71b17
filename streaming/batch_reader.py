"""`spark.read.format("keyfold")`: one view of a changelog as a DataFrame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from keyfold.checkpoints.log.key_filter import Selection
from keyfold.checkpoints.manifest.resolve import partition_state, resolve_ends
from keyfold.checkpoints.manifest.state import State
from keyfold.checkpoints.restore.view_token import ViewToken
from keyfold.statestore.errors import CompactedAway, ConfigError
from keyfold.statestore.files import LOCAL
from keyfold.streaming import offsets
from keyfold.streaming.options import LATEST, Options
from keyfold.streaming.pieces import Piece, PieceReader
from keyfold.streaming.planner import Planner
from keyfold.streaming.rows import Rows


class KeyfoldReader(DataSourceReader):
    """Plans when a DataFrame is first needed, and from then on that DataFrame is of that view.

    Nothing tells a batch planner that its tasks are done, so its lease stays until its time is over.
    """

    def __init__(
        self, options: Options, rows: Rows, schema: StructType, selection: Selection | None = None
    ) -> None:
        options.check_kind("batch")
        self._options = options
        self._selection = selection
        self._tasks = PieceReader(rows, schema)

    def partitions(self) -> Sequence[InputPartition]:
        """The pieces of the newest durable view.

        Raises:
            CompactedAway: the state at `at`, or a delete after `startingOffsets`, was compacted away.
            ConfigError: the commit, anchor, partition or offset does not exist.
        """
        options = self._options
        planner = Planner(LOCAL, options.path, options.view_timeout_ms, self._selection)
        state = planner.leased()
        try:
            pieces = (
                self._state_pieces(planner, state)
                if options.mode == "state"
                else self._log_pieces(planner, state)
            )
        except BaseException:
            planner.close()
            raise
        if not pieces:
            planner.close()
            return [InputPartition(None)]
        return list(pieces)

    def _state_pieces(self, planner: Planner, state: State) -> list[Piece]:
        options = self._options
        if options.end_offsets is None:
            ends = resolve_ends(state, options.path, options.at)
        elif options.view is not None and not _still_exact(options.view, options.end_offsets, state):
            chosen = _chosen(options, state)
            return planner.handed_pieces(options.view, _counted(options.end_offsets, state, options), chosen)
        else:
            ends = _exact(_counted(options.end_offsets, state, options), state, options.path)
        return planner.state_pieces(state, ends, _chosen(options, state))

    def _log_pieces(self, planner: Planner, state: State) -> list[Piece]:
        options, uuid = self._options, planner.identity.uuid
        starting = offsets.resolved(options.starting, state, uuid, options.path)
        begin = offsets.readable(starting, state, options.path, fail_on_data_loss=options.fail_on_data_loss)
        end = state.ends
        if options.ending != LATEST:
            ending = offsets.resolved(options.ending, state, uuid, options.path)
            offsets.check_reached(ending, state, options.path)
            end = tuple(ending.offsets[partition] for partition in range(len(end)))
        chosen = _chosen(options, state)
        return [piece for piece in planner.log_pieces(state, begin, end) if piece.partition in chosen]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one piece."""
        return self._tasks.read(partition)

    def __reduce__(self) -> tuple[type[PieceReader], tuple[Rows, StructType]]:
        """Tasks get a `PieceReader`: they import nothing of planning."""
        return self._tasks.__reduce__()


def _chosen(options: Options, state: State) -> frozenset[int]:
    for partition in options.partitions or ():
        partition_state(state, options.path, partition)
    return frozenset(range(len(state.partitions)) if options.partitions is None else options.partitions)


def _counted(ends: tuple[int, ...], state: State, options: Options) -> tuple[int, ...]:
    """One end for each partition, checked."""
    if len(ends) != len(state.partitions):
        raise _not_of_this(ends, state, options.path)
    return ends


def _still_exact(view: ViewToken, ends: tuple[int, ...], state: State) -> bool:
    """Whether the newest state still has the fold up to `ends`, and it is that of the view: since then
    the log may have been rolled back and written again, or retention may have moved its start.
    """
    return (
        tuple(p.generation for p in state.partitions) == view.generations
        and tuple(p.start for p in state.partitions) == view.starts
        and len(ends) == len(state.partitions)
        and state.restorable(ends)
    )


def _exact(ends: tuple[int, ...], state: State, root: Path) -> tuple[int, ...]:
    """Offsets that a commit had, checked: the fold up to them has to be exact."""
    if any(e > p.end for e, p in zip(ends, state.partitions, strict=True)):
        raise _not_of_this(ends, state, root)
    if state.restorable(ends):
        return ends
    raise CompactedAway(
        "The exact state at these offsets no longer exists: compaction or retention removed it.", path=root,
        position="offsets " + ",".join(str(e) for e in ends),
        expected="offsets above " + ",".join(str(p.clean_end) for p in state.partitions),
        found=",".join(str(e) for e in ends),
        remedy="restore again; set an anchor before compaction to keep a point",
    )  # fmt: skip


def _not_of_this(ends: tuple[int, ...], state: State, root: Path) -> ConfigError:
    return ConfigError(
        "Invalid end offsets for this changelog.", path=root,
        expected="up to " + ",".join(str(e) for e in state.ends), found=",".join(str(e) for e in ends),
        remedy="correct `endOffsets`",
    )  # fmt: skip
