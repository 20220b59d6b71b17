"""Retention by time and size (`cleanup.policy=delete`): whole segments are removed from the start of the log,
oldest first.
"""

from __future__ import annotations

from collections.abc import Callable

from keyfold.checkpoints.log.writer import Writer
from keyfold.checkpoints.manifest.entries import DeleteEntry
from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.statestore.segment.writer import Segment


def apply_retention(writer: Writer, is_paused: Callable[[int], bool] = lambda partition: False) -> int:
    """Remove the segments that `retention.ms` and `retention.bytes` no longer keep. Returns their number.

    As in Kafka: a segment is removed if its newest record is older than `retention.ms`, or if the log without
    it is still at least `retention.bytes` long. The active segment is kept, and so is all of a partition
    whose cleaning is paused.
    """
    config = writer.identity.config
    if "delete" not in config.cleanup_policy or (config.retention_ms < 0 and config.retention_bytes < 0):
        return 0
    dropped = 0
    with writer.exclusive:
        for partition in range(len(writer.state.partitions)):
            out = _expired(writer, partition, writer.state.partitions[partition])
            if not out or is_paused(partition):
                continue
            writer.write_line(DeleteEntry(partition, tuple(s.name for s in out), out[-1].next))
            writer.garbage.add_segments(writer.state.seq, partition, out)
            dropped += len(out)
    writer.garbage.collect()
    return dropped


def _expired(writer: Writer, partition: int, p: PartitionState) -> list[Segment]:
    config = writer.identity.config
    oldest = writer.clock_ms() - config.retention_ms
    left = p.bytes
    out: list[Segment] = []
    for segment in p.segments:
        by_time = config.retention_ms >= 0 and segment.max_timestamp < oldest
        by_size = config.retention_bytes >= 0 and left - segment.size >= config.retention_bytes
        if writer.is_active(partition, segment.name) or not (by_time or by_size):
            break
        out.append(segment)
        left -= segment.size
    return out
