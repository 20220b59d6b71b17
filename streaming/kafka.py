"""Spark's Kafka source, started where a commit ended.

Spark takes `startingOffsets` only if they name every partition of the topics, no more and no fewer. It
notices only in the middle of the first batch that retention has deleted records. A commit knows only the
partitions that existed then. So keyfold asks Kafka before the query starts, with the
client of Spark's own source.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from py4j.java_gateway import JavaPackage
from py4j.protocol import Py4JJavaError

from keyfold.checkpoints.manifest.source_offsets import Place, kafka_position
from keyfold.sink.batch_gate import check_dataframe
from keyfold.statestore.errors import ConfigError, NotResumable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from keyfold.checkpoints.resume.resume import Resumed

log = logging.getLogger("keyfold")

#: Spark's word for the beginning of a partition, in `startingOffsets`.
EARLIEST: Final = -2
#: Options that say where a query begins. With them, Spark would leave `startingOffsets` aside.
_BEGINNINGS: Final = ("startingoffsets", "startingoffsetsbytimestamp", "startingtimestamp")
_SHOWN: Final = 5


def kafka_stream(
    spark: SparkSession,
    options: Mapping[str, object],
    *,
    resumed: Resumed | None = None,
    source: int | None = None,
) -> DataFrame:
    """A stream of Kafka's records; with `resumed` it goes on where that commit ended.

        options = {"kafka.bootstrap.servers": "…", "subscribe": "clicks", "startingOffsets": "earliest"}
        again = resume_if_lost("var/clicks", app_id="clicks", checkpoint="var/checkpoint")
        clicks = kafka_stream(spark, options, resumed=again)

    It is `spark.readStream.format("kafka").options(**options).load()`. With `resumed`, the position of the
    commit takes the place of the options that say where a query begins, and Kafka is asked what it has:

    - Partitions and topics that the commit does not know are read from their beginning, as in a query that
      never stopped. Kafka then has new records of a key in another partition than the old ones, and their
      order is in the timestamps only: a sink with `sequence_by="timestamp"` keeps it within a micro-batch.
    - Records that the query has not read and that Kafka has deleted are an error before the query starts; as
      in a query that never stopped, so are those of a partition that is new.

    Kafka is not asked once Spark has noted the first batch in the query's checkpoint: then the query goes on
    from there.

    Args:
        options: of Spark's Kafka source. `subscribe`, `subscribePattern` or `assign` are kept as they are.
        resumed: of the changelog that the query writes.
        source: which of the query's sources this is, where it has several; see `Resumed.options`.

    Raises:
        NotResumable: the commit's position cannot be read from any more, or Kafka does not answer, or the
            commit has no position in Kafka. With `failOnDataLoss=false` what is gone is left out, with a
            warning.
        ConfigError: a session of Spark Connect, or one in which Kafka's client has another name.
        Whatever Spark raises for the options.
    """
    if resumed is None:
        return _stream(spark, options)
    kept = {name: value for name, value in options.items() if name.lower() not in _BEGINNINGS}
    # Spark refuses wrong options here, and without asking Kafka.
    check_dataframe(_stream(spark, kept))
    begin = resumed.options(source)["startingOffsets"]
    position = kafka_position(begin)
    if position is None:
        raise NotResumable(
            "This source of the query was not Kafka.", path=resumed.path,
            expected="the position of a Kafka source", found=begin,
            remedy="give the number of the Kafka source: source=",
        )  # fmt: skip
    if not resumed.is_seeded:
        with_loss = str(_option(kept, "failOnDataLoss")).lower() == "false"
        begin = starting_offsets(position, _ranges(spark, kept, resumed.path), resumed.path, with_loss)
    return _stream(spark, {**kept, "startingOffsets": begin})


def _stream(spark: SparkSession, options: Mapping[str, object]) -> DataFrame:
    return spark.readStream.format("kafka").options(**options).load()  # type: ignore[arg-type]


def starting_offsets(
    position: Mapping[Place, int], log_ranges: Mapping[Place, tuple[int, int]], root: Path, with_loss: bool
) -> str:
    """`startingOffsets` that begin at `position` and name every partition of `log_ranges`.

    Args:
        position: the next offset to read.
        log_ranges: what Kafka has: the first offset, and one past the last.
        root: of the changelog, for messages.
        with_loss: go on without what is gone.

    Raises:
        NotResumable: `position` is not within `log_ranges`, and `with_loss` is False.
    """
    wrong = _unreadable(position, log_ranges, root)
    if wrong is not None:
        if not with_loss:
            raise wrong
        log.warning("changelog %s: %s Reading goes on: failOnDataLoss=false.", root, wrong.what)
    begin: dict[str, dict[str, int]] = {}
    for topic, partition in sorted(log_ranges):
        begin.setdefault(topic, {})[str(partition)] = position.get((topic, partition), EARLIEST)
    return json.dumps(begin)


def _unreadable(
    position: Mapping[Place, int], log_ranges: Mapping[Place, tuple[int, int]], root: Path
) -> NotResumable | None:
    missing = sorted(place for place in position if place not in log_ranges)
    if missing:
        return NotResumable(
            "The query has read partitions that are not among those it reads now.", path=root,
            position=_shown(missing), expected="the topics of the commit, with as many partitions or more",
            found="topics that were deleted or created again, or other options",
            remedy="correct subscribe, subscribePattern or assign; or failOnDataLoss=false goes on without "
            "these partitions",
        )  # fmt: skip
    deleted = sorted(place for place, offset in position.items() if offset < log_ranges[place][0])
    if deleted:
        first = deleted[0]
        return NotResumable(
            "Kafka has deleted records that the query has not read: retention was shorter than the outage.",
            path=root, position=_shown(deleted),
            expected=_range(first, log_ranges), found=f"the commit ended at offset {position[first]}",
            remedy="put the records back; or write a new changelog from all that Kafka has; or "
            "failOnDataLoss=false goes on without them",
        )  # fmt: skip
    late = sorted(place for place, (start, _) in log_ranges.items() if start and place not in position)
    if late:
        return NotResumable(
            "Kafka has deleted records of partitions that are new to the query, which has read none of them.",
            path=root, position=_shown(late), expected="partitions that begin at offset 0",
            found=f"{_shown(late[:1])} begins at offset {log_ranges[late[0]][0]}",
            remedy="failOnDataLoss=false goes on without the deleted records",
        )  # fmt: skip
    beyond = sorted(place for place, offset in position.items() if offset > log_ranges[place][1])
    if beyond:
        first = beyond[0]
        return NotResumable(
            "The query has read further than Kafka has records: the topic was deleted and created again, or "
            "belongs to another cluster.", path=root, position=_shown(beyond),
            expected=_range(first, log_ranges), found=f"the commit ended at offset {position[first]}",
            remedy="correct kafka.bootstrap.servers; or write a new changelog from the new topic",
        )  # fmt: skip
    return None


def _range(place: Place, log_ranges: Mapping[Place, tuple[int, int]]) -> str:
    start, end = log_ranges[place]
    return f"an offset from {start} to {end} in {_shown([place])}"


def _shown(places: list[Place]) -> str:
    named = ", ".join(f"{topic}-{partition}" for topic, partition in places[:_SHOWN])
    return named + (f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else "")


# -- Kafka, through its client in Spark's JVM ----------------------------------------------------------------


def _ranges(spark: SparkSession, options: Mapping[str, object], root: Path) -> dict[Place, tuple[int, int]]:
    """What Kafka has of the partitions that these options read. Raises `NotResumable`, `ConfigError`."""
    jvm: Any = spark.sparkContext._jvm
    kafka = jvm.org.apache.kafka
    if isinstance(kafka.clients.admin.Admin, JavaPackage):
        raise ConfigError(
            "Kafka's client is not where Spark's Kafka source has it.", path=root,
            expected="the class org.apache.kafka.clients.admin.Admin", found="no such class",
            remedy='use spark.readStream.format("kafka") with resumed.options(): Spark checks the position',
        )  # fmt: skip
    settings = jvm.java.util.HashMap()
    for name, value in options.items():
        if name.lower().startswith("kafka."):
            settings.put(name[len("kafka.") :], str(value))
    try:
        admin = kafka.clients.admin.Admin.create(settings)
        try:
            places = {(p.topic(), p.partition()): p for p in _partitions(jvm, admin, options)}
            starts = _offsets(jvm, admin, places, kafka.clients.admin.OffsetSpec.earliest())
            ends = _offsets(jvm, admin, places, kafka.clients.admin.OffsetSpec.latest())
        finally:
            admin.close()
    except Py4JJavaError as e:
        _refuse(e, root)
    return {place: (starts[place], ends[place]) for place in places}


def _partitions(jvm: Any, admin: Any, options: Mapping[str, object]) -> Iterator[Any]:
    """Kafka's objects for the partitions that Spark will read; topics that are not there have none."""
    place = jvm.org.apache.kafka.common.TopicPartition
    assigned = _option(options, "assign")
    if assigned is not None:
        for topic, partitions in json.loads(str(assigned)).items():
            yield from (place(topic, int(partition)) for partition in partitions)
        return
    known = set(admin.listTopics().names().get())
    subscribed = _option(options, "subscribe")
    if subscribed is not None:
        # Kafka's own topics are not listed.
        names = {name.strip() for name in str(subscribed).split(",")}
        names = {name for name in names if name in known or name.startswith("__")}
    else:
        pattern = jvm.java.util.regex.Pattern.compile(str(_option(options, "subscribePattern")).strip())
        names = {name for name in known if pattern.matcher(name).matches()}
    asked = jvm.java.util.ArrayList()
    for name in sorted(names):
        asked.add(name)
    described = admin.describeTopics(asked).allTopicNames().get()
    for name in names:
        yield from (place(name, int(found.partition())) for found in described[name].partitions())


def _offsets(jvm: Any, admin: Any, places: Mapping[Place, Any], spec: Any) -> dict[Place, int]:
    asked = jvm.java.util.HashMap()
    for partition in places.values():
        asked.put(partition, spec)
    answer = admin.listOffsets(asked)
    return {
        place: int(answer.partitionResult(partition).get().offset()) for place, partition in places.items()
    }


def _option(options: Mapping[str, object], name: str) -> object | None:
    """Spark's options have no case."""
    return next((value for given, value in options.items() if given.lower() == name.lower()), None)


def _refuse(error: Py4JJavaError, root: Path) -> NoReturn:
    thrown = error.java_exception
    cause = thrown.getCause() or thrown
    raise NotResumable(
        "Kafka did not say which records it has.", path=root, expected="an answer from the brokers",
        found=f"{cause.getClass().getSimpleName()}: {cause.getMessage()}",
        remedy="correct the options that begin with kafka., or wait until the brokers are reached",
    ) from error  # fmt: skip
