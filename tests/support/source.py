"""What tests of the data source share: small changelogs, and a stand-in for Spark that drives the readers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from keyfold import Changelog
from keyfold.statestore.schema.columns import Columns
from keyfold.streaming.source import KeyfoldSource

#: No pass by itself, and no anchors: tests say when records are folded.
QUIET = {"cleaner.threads": 0, "anchors.auto": 0}

#: word → n, with a decimal and a list beside it
TYPED = Columns(
    {
        "type": "struct",
        "fields": [
            {"name": "word", "type": "string", "nullable": False, "metadata": {}},
            {"name": "n", "type": "long", "nullable": False, "metadata": {}},
            {"name": "price", "type": "decimal(9,2)", "nullable": True, "metadata": {}},
            {
                "name": "tags",
                "type": {"type": "array", "elementType": "string", "containsNull": True},
                "nullable": True,
                "metadata": {},
            },
            {"name": "seen", "type": "timestamp", "nullable": True, "metadata": {}},
        ],
    },
    ("word",),
    "json",
)


def table(*rows: tuple[str, str | None], timestamp_ms: int | None = None) -> pa.Table:
    """Records for `Changelog.append`; None deletes."""
    columns = {
        "key": pa.array([k.encode() for k, _ in rows], pa.binary()),
        "value": pa.array([None if v is None else v.encode() for _, v in rows], pa.binary()),
    }
    if timestamp_ms is not None:
        columns["timestamp"] = pa.array([timestamp_ms] * len(rows), pa.timestamp("ms"))
    return pa.table(columns)


def numbered(numbers: Iterable[int]) -> pa.Table:
    """One record for each number: key `k<number>`, value the number."""
    return table(*((f"k{i}", str(i)) for i in numbers))


def log_rows(log: Changelog) -> list[tuple[int, int, bytes, bytes | None]]:
    """Partition, offset, key and value of every record, in order."""
    return [
        (p, row["offset"], row["key"], row["value"])
        for p in range(log.partitions)
        for batch in log.read(p)
        for row in batch.to_pylist()
    ]


@dataclass
class Driver:
    """Does what Spark does with a stream reader: offsets go as JSON, readers and pieces pickled."""

    path: Path
    options: Mapping[str, str]
    #: the offset log: (start, end) of every batch
    batches: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A new process of the query, which goes on where its offset log ends."""
        source = KeyfoldSource({**self.options, "path": str(self.path)})
        self.reader = source.streamReader(source.schema())
        self.task = pickled(self.reader)
        self.position = self.batches[-1][1] if self.batches else json.dumps(self.reader.initialOffset())

    def trigger(self, limit: ReadLimit | None = None) -> list[dict[str, Any]] | None:
        """The rows of one micro-batch, None where there is nothing new."""
        before = json.loads(self.position)
        after = json.dumps(self.reader.latestOffset(before, limit or self.reader.getDefaultReadLimit()))
        if after == self.position:
            return None
        self.batches.append((self.position, after))
        self.position = after
        return self.run(len(self.batches) - 1)

    def run(self, batch: int) -> list[dict[str, Any]]:
        """The rows of a batch of the offset log, which may be run again."""
        start, end = (json.loads(text) for text in self.batches[batch])
        return rows_of(self.task, self.reader.partitions(start, end))

    def triggers(self) -> Iterator[list[dict[str, Any]]]:
        """Micro-batches until there is nothing new."""
        while (rows := self.trigger()) is not None:
            yield rows

    def everything(self) -> list[dict[str, Any]]:
        return self.trigger(ReadAllAvailable()) or []


def rows_of(reader: Any, pieces: Iterable[Any]) -> list[dict[str, Any]]:
    """What tasks make of the pieces, each in order."""
    return [row for piece in pieces for batch in reader.read(pickled(piece)) for row in batch.to_pylist()]


def pickled(value: Any) -> Any:
    """What another process gets, by Spark's own serializer."""
    serializer: Any = CloudPickleSerializer
    return serializer().loads(serializer().dumps(value))


def read_batch(path: Path, **options: str) -> list[dict[str, Any]]:
    """What `spark.read` gives, without Spark."""
    source = KeyfoldSource({**options, "path": str(path)})
    reader = source.reader(source.schema())
    return rows_of(reader, reader.partitions())


def clean(log: Changelog) -> None:
    """One full pass, and what it replaced is deleted unless a reader needs it."""
    log.compact()
    log.engine.writer.garbage.collect()


def leases(path: Path) -> list[str]:
    return sorted(p.name for p in (path / "readers").glob("*.lease"))
