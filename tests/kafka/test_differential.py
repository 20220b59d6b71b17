"""Kafka's cleaner and keyfold's, given the same records, keep the same ones: a real broker is the judge.

Each random history (`support.histories`) is a partition of a compacted topic and a changelog of one
partition. Both roll where a record is more than `segment.ms` later than its segment's first (record times in
Kafka, an injected clock in keyfold), and both are held back by `min.cleanable.dirty.ratio` = 1 while segments
are written and let go by 0. So each pass is over the same segments on both sides, and what stays is compared
after every pass: offset, key, value, headers, timestamp and order, of all records below the active segment.

How it is known that Kafka is done: when its `cleaner-offset-checkpoint` names the active segment's first
offset. It writes that behind the swap, and takes no log up again whose cleanable bytes are 0
(`LogCleanerManager.grabFilthiestCompactedLog`: `cleanableRatio() > minCleanableRatio`).

Where the two could differ without being wrong, and why nothing is left out of the comparison:

- A tombstone needs two passes: the first that keeps it notes its horizon in the batch's header
  (`MemoryRecords.filterTo`), a later one drops it. keyfold notes passes per partition: the same, seen from
  outside. `delete.retention.ms` is 0 or 30 years, so no clock decides.
- The last batch of a producer, and of a pass, is kept for its header even when it is empty
  (`Cleaner.checkBatchRetention`, `RETAIN_EMPTY`). It is a batch without records: a reader sees none.
- `compact()` seals the active segment first, Kafka never cleans it. Histories that are cleaned by hand call
  it before the record is written that is alone in the active segment; the others leave the work to the pool,
  and their active segments hold what supersedes and deletes keys below it.
- With a full offset map keyfold makes several passes where Kafka (whose map is not full here) makes one. Only
  histories whose tombstones stay for ever have such a small map.
- Two keys are one for Kafka if their MD5 is equal; that does not happen here.

KEYFOLD_KAFKA_SEED=N repeats a run, KEYFOLD_KAFKA_ONLY=3,17 some of its histories, KEYFOLD_KAFKA_HISTORIES=N
says how many.
"""

from __future__ import annotations

import importlib
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keyfold import Changelog
from keyfold.checkpoints.cleaner import manager
from support.kafka_broker import Broker, unavailable
from support.log_generator import (
    SEGMENT_MS,
    START_MS,
    History,
    Record,
    by_the_rule,
    differences,
    random_history,
)

# kafka-python reads its schemas in a way that is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*_text is deprecated:DeprecationWarning")

HISTORIES = int(os.environ.get("KEYFOLD_KAFKA_HISTORIES", "200"))
_WAIT_SECONDS = 120.0

FROZEN, LET_GO = 1, 0
SETTINGS = {
    "log.cleaner.threads": 2,
    "log.cleaner.backoff.ms": 20,
    "log.cleaner.dedupe.buffer.size": 4 << 20,
    "log.cleaner.min.cleanable.ratio": FROZEN,
    "log.index.size.max.bytes": 1 << 16,
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with Broker(tmp_path_factory.mktemp("broker"), SETTINGS) as found:
        yield found


def test_kafka_and_keyfold_keep_the_same_records(broker: Broker, tmp_path: Path) -> None:
    """After every pass over every history, the records below the active segment are equal, in order."""
    seed = int(os.environ.get("KEYFOLD_KAFKA_SEED") or random.SystemRandom().randrange(2**32))
    only = [int(n) for n in os.environ.get("KEYFOLD_KAFKA_ONLY", "").split(",") if n]
    histories = [random_history(seed, n) for n in only or range(HISTORIES)]
    passes = sum(len(h.passes) for h in histories)
    print(f"seed {seed}: {len(histories)} histories, {passes} passes")
    with ThreadPoolExecutor(1) as pool:
        ours = pool.submit(lambda: [_by_keyfold(h, tmp_path / str(i)) for i, h in enumerate(histories)])
        theirs = _by_kafka(broker, histories)
        wrong = [_compared(*each) for each in zip(histories, ours.result(), theirs, strict=True)]
    failures = sorted((text for text in wrong if text), key=len)
    assert not failures, (
        f"{len(failures)} of {len(histories)} histories differ; KEYFOLD_KAFKA_SEED={seed} repeats them.\n\n"
        + "\n\n".join(failures[:3])
    )
    assert sum(len(after[-1]) for after in theirs) > len(histories), "next to nothing was left to compare"


def _compared(history: History, ours: list[list[Record]], theirs: list[list[Record]]) -> str:
    """What the first pass is that differs, and which of the two is by the rule; empty if none does."""
    for number, rule in enumerate(by_the_rule(history)):
        if ours[number] != theirs[number]:
            judged = "keyfold" if theirs[number] == rule else "Kafka" if ours[number] == rule else "each"
            found = list(differences(ours[number], theirs[number]))
            return "\n  ".join(
                [
                    f"History {history.name}, pass {number} of {len(history.passes)}, below offset"
                    f" {history.cleanable_end(number)}, delete.retention.ms={history.delete_retention_ms},"
                    f" {'by hand' if history.by_hand else 'by the pool'}:"
                    f" {judged} is not by the rule; keyfold has, instead of Kafka's:",
                    *found[:8],
                ]
            )
        if ours[number] != rule:
            return f"History {history.name}, pass {number}: both differ from the rule in the test itself"
    return ""


# -- keyfold -------------------------------------------------------------------------------------------------


def _by_keyfold(history: History, path: Path) -> list[list[Record]]:
    """What is below the cleanable end after each pass."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Kafka does not come by for old deletes alone, keyfold's pool does where a log is at rest.
            patch.setattr(manager, "_REST", 10**9)
            return _cleaned(history, path)
    except Exception as e:
        raise AssertionError(f"keyfold failed in history {history.name}") from e


def _cleaned(history: History, path: Path) -> list[list[Record]]:
    found = []
    now_ms = [START_MS]
    config = {
        "anchors.auto": 0,
        "cleaner.threads": 0 if history.by_hand else 1,
        "cleaner.backoff.ms": 2,
        "cleaner.dedupe.buffer.size": history.dedupe_buffer_bytes,
        "compression.type": history.compression,
        "delete.retention.ms": history.delete_retention_ms,
        "min.cleanable.dirty.ratio": FROZEN,
        "segment.bytes": history.segment_bytes,
        "segment.ms": SEGMENT_MS,
    }
    with Changelog.open(path, config=config, clock_ms=lambda: now_ms[0]) as log:
        for number, segments in enumerate(history.passes):
            for segment in segments:
                now_ms[0] = segment[0][0].timestamp
                if history.by_hand and segment is segments[-1]:
                    log.compact()
                for append in segment:
                    log.append(_table(append))
            end = history.cleanable_end(number)
            if not history.by_hand:
                _let_the_pool_clean(log, end)
            found.append([r for batch in log.read(0) for r in _records(batch) if r.offset < end])
    return found


def _let_the_pool_clean(log: Changelog, end: int) -> None:
    with Changelog.open(log.path, config={"min.cleanable.dirty.ratio": LET_GO}):
        for _ in _until("keyfold's pool did not clean"):
            if log.state.partitions[0].clean_end >= end:
                break
    with Changelog.open(log.path, config={"min.cleanable.dirty.ratio": FROZEN}):
        assert log.state.partitions[0].clean_end == end


def _table(records: tuple[Record, ...]) -> pa.Table:
    header = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    return pa.table(
        {
            "key": pa.array([r.key for r in records], pa.binary()),
            "value": pa.array([r.value for r in records], pa.binary()),
            "timestamp": pa.array([r.timestamp for r in records], pa.timestamp("ms")),
            "headers": pa.array([[{"key": k, "value": v} for k, v in r.headers] for r in records], header),
        }
    )


def _records(batch: pa.RecordBatch) -> Iterator[Record]:
    times = batch.column("timestamp").cast(pa.int64()).to_pylist()
    names = ("offset", "key", "value", "headers")
    columns = [batch.column(name).to_pylist() for name in names]
    for offset, key, value, headers, timestamp in zip(*columns, times, strict=True):
        yield Record(offset, key, value, tuple((h["key"], h["value"]) for h in headers or ()), timestamp)


# -- Kafka ---------------------------------------------------------------------------------------------------


def _by_kafka(broker: Broker, histories: list[History]) -> list[list[list[Record]]]:
    """For each history, what is below the cleanable end after each pass. All are written and cleaned at once,
    pass by pass.
    """
    # To mypy, `import kafka` is the folder of this file.
    client: Any = importlib.import_module("kafka")
    client_admin: Any = importlib.import_module("kafka.admin")
    admin = client.KafkaAdminClient(bootstrap_servers=broker.address)
    # A partition each, of a topic for each choice of settings: every new topic costs a producer 0.1 s.
    places: list[Any] = []
    topics: dict[str, list[History]] = {}
    for i, history in enumerate(histories):
        topic = f"{'gzip' if i % 2 else 'uncompressed'}-{history.delete_retention_ms}"
        places.append(client.TopicPartition(topic, len(topics.setdefault(topic, []))))
        topics[topic].append(history)
    admin.create_topics(
        [
            client_admin.NewTopic(name, len(some), 1, topic_configs=_topic(name))
            for name, some in topics.items()
        ]
    )

    def set_ratio(ratio: int) -> None:
        resource = client_admin.ConfigResource(
            client_admin.ConfigResourceType.BROKER,
            "1",
            configs={"log.cleaner.min.cleanable.ratio": str(ratio)},
        )
        admin.alter_configs([resource])

    found: list[list[list[Record]]] = [[] for _ in histories]
    producer = client.KafkaProducer(
        bootstrap_servers=broker.address, acks="all", linger_ms=20, batch_size=1 << 16
    )
    consumer = client.KafkaConsumer(bootstrap_servers=broker.address, group_id=None, enable_auto_commit=False)
    try:
        # Answered by the partitions' leaders: from then on, all of them can be written.
        consumer.end_offsets(places)
        for number in range(max(len(h.passes) for h in histories)):
            taking_part = [i for i, h in enumerate(histories) if number < len(h.passes)]
            _write(producer, {places[i]: histories[i].passes[number] for i in taking_part})
            set_ratio(LET_GO)
            _await_cleaned(broker, {places[i]: histories[i].cleanable_end(number) for i in taking_part})
            set_ratio(FROZEN)
            last = {places[i]: histories[i].passes[number][-1][-1][-1].offset for i in taking_part}
            read = _read(consumer, last)
            for i in taking_part:
                end = histories[i].cleanable_end(number)
                found[i].append([r for r in read[places[i]] if r.offset < end])
    finally:
        consumer.close()
        producer.close()
        admin.close()
    return found


def _topic(name: str) -> dict[str, str]:
    compression, delete_retention_ms = name.split("-")
    return {
        "cleanup.policy": "compact",
        "compression.type": compression,
        "delete.retention.ms": delete_retention_ms,
        "segment.ms": str(SEGMENT_MS),
    }


def _write(producer: Any, passes: dict[Any, tuple[tuple[tuple[Record, ...], ...], ...]]) -> None:
    """Segment by segment, so that no batch of the producer holds records of two."""
    for number in range(max(len(segments) for segments in passes.values())):
        sent = []
        for place, segments in passes.items():
            for record in (r for append in segments[number : number + 1] for one in append for r in one):
                future = producer.send(
                    place.topic,
                    partition=place.partition,
                    key=record.key,
                    value=record.value,
                    headers=list(record.headers),
                    timestamp_ms=record.timestamp,
                )
                sent.append((future, record.offset))
        producer.flush()
        for future, offset in sent:
            assert future.get(timeout=60).offset == offset


def _await_cleaned(broker: Broker, ends: dict[Any, int]) -> None:
    for _ in _until("Kafka did not clean"):
        broker.check_alive()
        noted = broker.cleaned_up_to()
        beyond = [p for p, end in ends.items() if noted.get((p.topic, p.partition), 0) > end]
        assert not beyond, f"Kafka cleaned further than the active segment's beginning: {beyond}"
        if all(noted.get((p.topic, p.partition)) == end for p, end in ends.items()):
            return


def _read(consumer: Any, last: dict[Any, int]) -> dict[Any, list[Record]]:
    """All records of some partitions, up to a last one of each."""
    found: dict[Any, list[Record]] = {place: [] for place in last}
    consumer.assign(list(last))
    for place in last:
        consumer.seek(place, 0)
    waiting = set(last)
    for _ in _until("Kafka did not answer"):
        for place, records in consumer.poll(timeout_ms=500, max_records=5000).items():
            found[place] += [
                Record(r.offset, r.key, r.value, tuple(map(tuple, r.headers)), r.timestamp) for r in records
            ]
            if found[place][-1].offset >= last[place]:
                waiting.discard(place)
        if not waiting:
            return found
    raise AssertionError


def _until(what: str) -> Iterator[None]:
    """Ever again, a moment between; raises `TimeoutError` when it takes too long."""
    end = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < end:
        yield
        time.sleep(0.005)
    raise TimeoutError(f"{what} within {_WAIT_SECONDS:.0f} s")
