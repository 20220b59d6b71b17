"""`spark.readStream.format("keyfold")`: follow a changelog, or emit its state once.

Spark keeps one of these readers in a Python process for the life of the query; each trigger asks it how far
to read (`latestOffset`) and for the pieces to read (`partitions`). Tasks get a `PieceReader`.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from keyfold.checkpoints.log.key_filter import Selection
from keyfold.checkpoints.manifest.resolve import resolve_ends
from keyfold.checkpoints.manifest.state import State
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.files import LOCAL
from keyfold.streaming import offsets
from keyfold.streaming.options import Offsets, Options
from keyfold.streaming.pieces import Piece, PieceReader
from keyfold.streaming.planner import Planner
from keyfold.streaming.rows import Rows


class _Reader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """What both kinds of stream share: plans that are made once, and reading in tasks."""

    def __init__(
        self, options: Options, rows: Rows, schema: StructType, selection: Selection | None = None
    ) -> None:
        options.check_kind("stream")
        self._options = options
        self._tasks = PieceReader(rows, schema)
        self._planner = Planner(LOCAL, options.path, options.view_timeout_ms, selection)
        self._planned: tuple[str, list[Piece]] | None = None
        self._ends_on_signal = False

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """The pieces between two offsets; where Spark asks again, the same, so that one lease holds them."""
        if start == end:
            return []
        asked = json.dumps([start, end])
        if self._planned is None or self._planned[0] != asked:
            self._end_on_signal()
            self._planned = asked, self._plan(start, end)
        return list(self._planned[1])

    def _end_on_signal(self) -> None:
        """Spark ends the process of a stopped query by SIGTERM, which as it is would skip `stop`."""
        if not self._ends_on_signal and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _end)
            self._ends_on_signal = True

    def _plan(self, start: dict[str, Any], end: dict[str, Any]) -> list[Piece]:
        raise NotImplementedError

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one piece."""
        return self._tasks.read(partition)

    def __reduce__(self) -> tuple[type[PieceReader], tuple[Rows, StructType]]:
        """Tasks get a `PieceReader`: they import nothing of planning."""
        return self._tasks.__reduce__()

    def stop(self) -> None:
        """Give the lease up."""
        self._planner.close()
        if self._ends_on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._ends_on_signal = False


def _end(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # Spark sends it twice
    sys.exit(0)


class FollowingReader(_Reader):
    """Follows the log: every record once, in the order of its partition, from `startingOffsets` on.

    Begun at "earliest" it gives what the cleaner has left of the past (at least the last value of every key)
    and then every change. A batch that Spark runs again after a crash has the same offsets, the first one
    too; records that the cleaner has folded away meanwhile do not come again, as with a compacted topic of
    Kafka.
    """

    def __init__(
        self, options: Options, rows: Rows, schema: StructType, selection: Selection | None = None
    ) -> None:
        super().__init__(options, rows, schema, selection)
        self._target: tuple[int, ...] | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins."""
        state, options = self._planner.state(), self._options
        position = offsets.resolved(options.starting, state, self._planner.identity.uuid, options.path)
        offsets.readable(position, state, options.path, fail_on_data_loss=options.fail_on_data_loss)
        return offsets.beginning(position).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        rows = self._options.max_rows
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:
        """Read up to what is committed now, not further."""
        self._target = self._planner.state().ends

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """How far this trigger goes: to the last commit, or to as many rows as the limit allows."""
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        state = self._planner.state() if rows is None else self._planner.leased()
        before = self._position(start, state)
        ends = state.ends if self._target is None else self._target
        begin = [max(before.offsets[n], p.start) for n, p in enumerate(state.partitions)]
        target = [max(b, end) for b, end in zip(begin, ends, strict=True)]
        if rows is not None:
            target = offsets.limited(self._planner.files, self._options.path, state, begin, target, rows)
        if all(before.offsets[partition] == end for partition, end in enumerate(target)):
            return start
        return offsets.marked(before.uuid, target, state, offsets.begun_by(before)).to_json()

    def reportLatestOffset(self) -> dict[str, Any]:
        """The last commit, for the progress that Spark reports."""
        state = self._planner.state()
        return offsets.marked(self._planner.identity.uuid, state.ends, state).to_json()

    def _plan(self, start: dict[str, Any], end: dict[str, Any]) -> list[Piece]:
        state, options = self._planner.leased(), self._options
        last = self._position(end, state)
        first = offsets.begin_of(self._position(start, state), last)
        offsets.check_reached(last, state, options.path)
        begin = offsets.readable(first, state, options.path, fail_on_data_loss=options.fail_on_data_loss)
        return self._planner.log_pieces(state, begin, [last.offsets[n] for n in range(len(begin))])

    def _position(self, offset: dict[str, Any], state: State) -> Offsets:
        """What Spark gives back, checked: its checkpoint may be another query's."""
        path = self._options.path
        try:
            position = Offsets.from_json(offset)
        except ValueError as e:
            raise ConfigError(
                "The checkpoint holds offsets of another source.", path=path,
                expected='{"keyfold": "<uuid>", "offsets": {…}}', found=str(e),
                remedy="use a checkpoint of its own",
            ) from e  # fmt: skip
        return offsets.resolved(position, state, self._planner.identity.uuid, path)


class SeedReader(_Reader):
    """Gives the state as of one commit as the first micro-batch, and never anything again.

    Its offset says which commit that was, so a restart that names another one changes nothing: what was given
    was given, and what was planned is given again as it was planned.
    """

    def initialOffset(self) -> dict[str, Any]:
        return self._offset(None)

    def prepareForTriggerAvailableNow(self) -> None:
        """The one batch is available as soon as it exists."""

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        if start is not None and self._seeded(start) is not None:
            return start
        return self._offset(self._options.at)

    def _plan(self, start: dict[str, Any], end: dict[str, Any]) -> list[Piece]:
        commit = self._seeded(end)
        if self._seeded(start) is not None or commit is None:
            return []
        state = self._planner.leased()
        ends = resolve_ends(state, self._options.path, commit)
        return self._planner.state_pieces(state, ends, range(len(ends)))

    def _offset(self, commit: int | str | None) -> dict[str, Any]:
        return {"keyfold": self._planner.identity.uuid, "seed": commit}

    def _seeded(self, offset: dict[str, Any]) -> int | None:
        path = self._options.path
        if set(offset) != {"keyfold", "seed"}:
            raise ConfigError(
                "The checkpoint holds offsets of another source.", path=path,
                expected='{"keyfold": "<uuid>", "seed": …}', found=", ".join(sorted(offset)),
                remedy="use a checkpoint of its own, and keep the order of the query's sources",
            )  # fmt: skip
        offsets.check_same(offset["keyfold"], self._planner.identity.uuid, path)
        seed = offset["seed"]
        return seed if isinstance(seed, int) else None
