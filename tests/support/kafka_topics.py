"""Topics of a real broker, what a test has produced to them, and what a changelog has to hold for that.

Tests that use them start Spark with its Kafka source, whose jars `make setup` puts into `.kafka-jars-spark/`.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from support import kafka_broker
from support.session import CONNECTOR_JARS, connector_jars
from support.waiting import eventually

#: Times of records: distinct, in order, and far from now.
FIRST_MS = 1_600_000_000_000
Headers = tuple[tuple[str, bytes], ...]


def unavailable() -> str | None:
    """Why Spark cannot read a topic here, None where it can."""
    if not connector_jars():
        return f"no jars in {CONNECTOR_JARS.name}/: `make setup` fetches them where Maven (mvn) is installed"
    return kafka_broker.unavailable()


@dataclass(frozen=True)
class Sent:
    """A record as it was produced; its offset is its place among those of its partition."""

    partition: int
    key: bytes
    value: bytes | None
    headers: Headers = ()
    timestamp_ms: int = 0


class Topics:
    """Makes topics, writes to them, cuts them; keeps what was written."""

    def __init__(self, address: str) -> None:
        # To mypy, `import kafka` is the folder tests/kafka.
        self._client: Any = importlib.import_module("kafka")
        self._admin = self._client.KafkaAdminClient(bootstrap_servers=address)
        self.address = address
        self.sent: dict[str, list[Sent]] = {}

    def __enter__(self) -> Topics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admin.close()

    def make(self, name: str, partitions: int = 3) -> str:
        new: Any = importlib.import_module("kafka.admin").NewTopic
        self._admin.create_topics([new(name, partitions, 1)])
        eventually(lambda: name in self._admin.list_topics())
        self.sent[name] = []
        return name

    def remove(self, name: str) -> None:
        self._admin.delete_topics([name])
        del self.sent[name]
        eventually(lambda: name not in self._admin.list_topics())

    def grow(self, name: str, partitions: int) -> None:
        """More partitions, as an administrator gives a topic that has become too slow."""
        self._admin.create_partitions({name: partitions})

    def send(self, name: str, *records: Sent) -> None:
        """Produce in order, each record with a time of its own where it has none.

        Each call has a producer of its own. One that lives on learns minutes later of new partitions, and
        asks for the leaders of a topic that was removed without a pause: that took a third of a core.
        """
        found = []
        producer = self._client.KafkaProducer(bootstrap_servers=self.address, acks="all", linger_ms=5)
        for record in records:
            timestamp = record.timestamp_ms or FIRST_MS + len(self.sent[name])
            future = producer.send(
                name, partition=record.partition, key=record.key, value=record.value,
                headers=list(record.headers), timestamp_ms=timestamp,
            )  # fmt: skip
            found.append(future)
            self.sent[name].append(
                Sent(record.partition, record.key, record.value, record.headers, timestamp)
            )
        producer.close()
        for future in found:
            future.get(timeout=60)

    def words(self, name: str, words: Iterable[str]) -> None:
        """Records without a value; a word is always in one partition of the first three."""
        self.send(name, *(Sent(len(word) % 3, word.encode(), None) for word in words))

    def expire(self, name: str, before: Mapping[int, int]) -> None:
        """What retention does: records of a partition below an offset are gone."""
        place = self._client.TopicPartition
        self._admin.delete_records({place(name, number): offset for number, offset in before.items()})

    def counted(self, *names: str) -> Counter[str]:
        """Key → how often it was produced."""
        return Counter(record.key.decode() for name in names for record in self.sent[name])

    def last(self, name: str) -> dict[bytes, Sent]:
        """Key → its last record, without the deleted."""
        folded = {record.key: record for record in self.sent[name]}
        return {key: record for key, record in folded.items() if record.value is not None}
