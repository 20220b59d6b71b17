"""The rows of a small batch come to the driver, which encodes them: without a Python worker, which would take
longer than everything else.

How large a batch is shows only afterwards. So a batch is collected if the one before it was small, and then
at most `COLLECTED_ROWS` rows of each Spark partition. If that many arrive, others may be missing: then the
tasks stage the batch as if nothing had been collected. Such a batch is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException
from pyspark.sql import functions as F

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

    from keyfold.sink.staging import Stage, Staged
    from keyfold.statestore.files import Files

#: A batch up to this size is small: number of rows, and bytes of its blocks.
SMALL_ROWS: Final = 4096
SMALL_BYTES: Final = 1 << 20
#: Maximum number of collected rows of a Spark partition. A constant, so Spark compiles its code once.
COLLECTED_ROWS: Final = 8192
#: After a batch that was computed twice, this many are not collected.
_PAUSE: Final = 16

#: `monotonically_increasing_id`: the Spark partition, then 33 bits with the number of the row in it.
_ROW_OF_ID: Final = (1 << 33) - 1
#: Names the file of the driver. Attempts of tasks count from 0.
_ATTEMPT: Final = -1


class SmallBatches:
    """Stages the batches of one sink that follow a small one."""

    def __init__(self) -> None:
        self._follows_small = False
        self._paused = 0
        self._condition: Column | None = None

    def staged(self, files: Files, records: DataFrame, stage: Stage) -> list[Staged] | None:
        """The blocks of a batch. None if tasks have to stage it: it may be large, or has a row that cannot be
        written, whose partition only they know.

        Raises what Spark raises while it computes the rows.
        """
        if self._paused or not self._follows_small:
            self._paused = max(0, self._paused - 1)
            return None
        rows = self._collected(records)
        staged = None if rows is None else stage.run(files, rows.to_batches(), 0, _ATTEMPT)
        if staged is None or any(s.problem for s in staged):
            self._paused = _PAUSE
            return None
        return staged

    def note(self, staged: Sequence[Staged]) -> None:
        """Remember the size of the batch that was staged last."""
        rows, size = sum(s.records for s in staged), sum(s.length for s in staged)
        self._follows_small = rows <= SMALL_ROWS and size <= SMALL_BYTES

    def _collected(self, records: DataFrame) -> pa.Table | None:
        """All rows in order; None if there may be more than those that were collected."""
        if self._condition is None:
            # Kept for the next batch: each part of an expression is a call to the JVM.
            row = F.monotonically_increasing_id().bitwiseAND(F.lit(_ROW_OF_ID))
            self._condition = row < F.lit(COLLECTED_ROWS)
        try:
            rows = records.where(self._condition).toArrow()
        except PySparkException as error:
            if "spark.driver.maxResultSize" in str(error):
                return None
            raise
        return None if rows.num_rows >= COLLECTED_ROWS else rows
