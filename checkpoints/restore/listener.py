"""Progress listeners of a restore."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import TaskID


class RestoreListener(Protocol):
    """Kafka Streams' `StateRestoreListener`. Partitions are restored in parallel, so several threads call it.
    An error raised by a listener ends the restore.
    """

    def on_restore_start(self, path: Path, partition: int, starting_offset: int, ending_offset: int) -> None:
        """The restore of a partition begins: its log from `start_offset` up to, not including, the end."""

    def on_batch_restored(
        self, path: Path, partition: int, batch_end_offset: int, records: int, size: int
    ) -> None:
        """A batch of records was restored; the last one is below `batch_end_offset`."""

    def on_restore_end(self, path: Path, partition: int, total_restored: int) -> None:
        """The restore of a partition has ended."""


class Bar:
    """A listener that shows a progress bar with records, bytes per second and time left."""

    def __init__(self) -> None:
        # Every process of a Spark job imports this module, but few show a progress bar.
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("restoring"),
            BarColumn(),
            TextColumn("{task.fields[records]:,} records, {task.fields[rate]:.0f} MB/s"),
            TimeRemainingColumn(),
        )
        self._task: TaskID = self._progress.add_task("restoring", total=0, records=0, rate=0.0)
        self._positions: dict[int, int] = {}
        self._total = self._records = self._bytes = 0

    def on_restore_start(self, path: Path, partition: int, starting_offset: int, ending_offset: int) -> None:
        self._positions[partition] = starting_offset
        self._total += ending_offset - starting_offset
        self._progress.update(self._task, total=self._total)

    def on_batch_restored(
        self, path: Path, partition: int, batch_end_offset: int, records: int, size: int
    ) -> None:
        advance = batch_end_offset - self._positions[partition]
        self._positions[partition] = batch_end_offset
        self._records += records
        self._bytes += size
        seconds = self._progress.tasks[self._task].elapsed or 1e-9
        self._progress.update(
            self._task, advance=advance, records=self._records, rate=self._bytes / seconds / 1e6
        )

    def on_restore_end(self, path: Path, partition: int, total_restored: int) -> None:
        """Close the progress bar."""

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
