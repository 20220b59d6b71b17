"""Positions of a query's sources, as Spark stores them: converted to the options that start the sources
there, and compared with each other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from keyfold.checkpoints.manifest.state import Commit
from keyfold.statestore.errors import NotResumable

#: A Kafka topic and a partition number.
Place: TypeAlias = tuple[str, int]

_SHOWN_CHARACTERS: Final = 200
_SHOWN_PARTS: Final = 3
_NOTHING_YET: Final = "-"
_APPEND: Final = 'choose where to start reading, and set on_reset="append"'


def source_options(commit: Commit, source: int | None, root: Path) -> dict[str, str]:
    """The options for source number `source`, not counting seeds. None: for the only source that can be
    resumed.

    Raises:
        NotResumable: the source cannot be resumed, or `source` is None and there are several.
    """
    found = [options_of(text) for text in without_seeds(commit.source)]
    if source is None:
        return _only(commit, found, root)
    options = found[source] if 0 <= source < len(found) else f"there are sources 0 to {len(found) - 1}"
    if isinstance(options, dict):
        return dict(options)
    raise NotResumable(
        f"Source {source} of commit {commit.number} cannot be resumed.", path=root,
        expected="a Kafka or keyfold source", found=options if found else "a commit without sources",
        remedy=_APPEND,
    )  # fmt: skip


def _only(commit: Commit, found: list[dict[str, str] | str], root: Path) -> dict[str, str]:
    able = [i for i, options in enumerate(found) if isinstance(options, dict)]
    if len(able) == 1 and len(found) == 1:
        return source_options(commit, 0, root)
    described = "; ".join(f"source {i}: {_described(options)}" for i, options in enumerate(found))
    if not able:
        raise NotResumable(
            f"No source of commit {commit.number} can be resumed.", path=root,
            expected="a Kafka or keyfold source", found=described or "a commit without sources",
            remedy=_APPEND,
        )  # fmt: skip
    raise NotResumable(
            f"Commit {commit.number} belongs to a query with several sources.", path=root,
        expected="the number of one of them", found=described,
            remedy="call options for each: options(source=0), options(source=1), … in the order of the query",
    )  # fmt: skip


def _described(options: dict[str, str] | str) -> str:
    if isinstance(options, str):
        return options
    position = kafka_position(options["startingOffsets"])
    if position is not None:
        return f"Kafka, topics {', '.join(sorted({topic for topic, _ in position}))}"
    return f"keyfold, changelog {json.loads(options['startingOffsets'])['keyfold']}"


def options_of(text: str) -> dict[str, str] | str:
    """The options for a source whose offset Spark wrote as `text`, or the reason why there are none."""
    if text.strip() == _NOTHING_YET:
        return "it had produced no data yet: start it as in the first run"
    offset = _parsed(text)
    if offset is None:
        return "its position is not JSON"
    if (isinstance(offset, dict) and "keyfold" in offset) or kafka_position(text) is not None:
        return {"startingOffsets": text}
    if isinstance(offset, dict) and "logOffset" in offset:
        return "a file source keeps only the number of its own log entry, which is in the lost checkpoint"
    return "keyfold cannot start this kind of source at its position: " + text[:_SHOWN_CHARACTERS]


def kafka_position(text: str) -> dict[Place, int] | None:
    """The next offset of each partition if `text` is the offset of a Kafka source; otherwise None.

    It names the partitions of the source. It does not say whether they were subscribed to by name, by
    pattern, or assigned.
    """
    offset = _parsed(text)
    if not (isinstance(offset, dict) and offset and all(_is_kafka(v) for v in offset.values())):
        return None
    return {
        (topic, int(partition)): next_offset
        for topic, partitions in offset.items()
        for partition, next_offset in partitions.items()
    }


def seed_of(text: str) -> tuple[str, int] | None:
    """The uuid and the commit of a seed that was read. None for the position of another source, and for a
    seed that was not read yet.
    """
    offset = _parsed(text)
    if isinstance(offset, dict) and type(offset.get("seed")) is int:
        return str(offset.get("keyfold")), offset["seed"]
    return None


def without_seeds(positions: Sequence[str]) -> tuple[str, ...]:
    """The positions of the sources of events, without seeds. The commit's own state contains a seed's
    state.
    """
    return tuple(text for text in positions if not is_seed(text))


def is_seed(text: str) -> bool:
    """Whether this is the position of a seed, read or not."""
    offset = _parsed(text)
    return isinstance(offset, dict) and "keyfold" in offset and "seed" in offset


# -- comparison ----------------------------------------------------------------------------------------------


def same_positions(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether all sources are at the same position, whichever way Spark or the source has written it."""
    return len(one) == len(other) and all(_place(a) == _place(b) for a, b in zip(one, other, strict=True))


def _place(text: str) -> Any:
    """The part of a position that says where the source is. A keyfold source adds how it got there."""
    offset = _parsed(text)
    if offset is None:
        return text
    if isinstance(offset, dict) and "keyfold" in offset and "offsets" in offset:
        return offset["keyfold"], offset["offsets"], offset.get("generations", {})
    return offset


def beginning_of(end: str, begin: str | None) -> str | None:
    """Where a source begins a query's first batch, which ends at `end`, if Spark asked it for `begin`.

    Spark asks each time it runs the batch. A keyfold source uses the start of the first run, which is stored
    in the batch's end.
    """
    offset = _parsed(end)
    if isinstance(offset, dict) and "keyfold" in offset and offset.get("begun"):
        return json.dumps({**offset, "offsets": offset["begun"]})
    return begin


@dataclass(frozen=True)
class Begin:
    """Where a source begins.

    Attributes:
        position: as Spark writes it; None if Spark does not know it.
        with_loss: the source has failOnDataLoss=false.
    """

    position: str | None
    with_loss: bool = False


@dataclass(frozen=True)
class Difference:
    """A source that does not begin where a commit ended.

    Attributes:
        what: the consequence: which records are read again or skipped.
        is_known: whether both positions can be compared. If not, the source keeps no position to continue
            from.
    """

    what: str
    is_known: bool = True


def difference(ended: str, begin: Begin) -> Difference | None:
    """The difference if a source that had ended at `ended` begins at `begin`. None if there is none."""
    position = begin.position
    if ended.strip() == _NOTHING_YET or (position is not None and _place(ended) == _place(position)):
        return None
    options = options_of(ended)
    if isinstance(options, str):
        return Difference(
            "it keeps no position to continue from, so all records from its beginning are read again "
            f"({options})",
            is_known=False,
        )
    if position is None or _parsed(position) is None:
        return Difference("it is unknown where it begins: records may be read again or skipped")
    before = kafka_position(ended)
    if before is None:
        return _difference_of_changelog(_parsed(ended), _parsed(position))
    now = kafka_position(position)
    if now is None:
        topics = ", ".join(sorted({topic for topic, _ in before}))
        return Difference(f"it is not the Kafka source of the topics {topics}")
    parts = []
    for topic, partition in sorted({*before, *now}):
        place, name = (topic, partition), f"topic {topic}, partition {partition}"
        if place in before and place in now:
            parts += _apart(name, before[place], now[place])
        elif place in now and not begin.with_loss:
            # The commit does not know the partition: it is read from its beginning.
            parts += _apart(name, 0, now[place])
        elif not begin.with_loss:
            parts.append(f"{name} is no longer read")
    return Difference(_shown(parts)) if parts else None


def _difference_of_changelog(before: Any, now: Any) -> Difference:
    uuid = before["keyfold"]
    if (
        not isinstance(now, dict)
        or now.get("keyfold") != uuid
        or set(now["offsets"]) != set(before["offsets"])
    ):
        return Difference(f"it does not read the changelog {uuid}")
    parts = []
    for partition, end in sorted(before["offsets"].items(), key=lambda entry: int(entry[0])):
        parts += _apart(f"partition {partition}", end, now["offsets"].get(partition, 0))
    return Difference(_shown(parts) or "its changelog was rolled back meanwhile, and holds other records")


def _apart(name: str, end: int, begin: int) -> list[str]:
    if begin < end:
        return [f"offsets {begin} to {end - 1} of {name} are read again"]
    return [f"offsets {end} to {begin - 1} of {name} are skipped"] if begin > end else []


def _shown(parts: Sequence[str]) -> str:
    more = len(parts) - _SHOWN_PARTS
    return "; ".join([*parts[:_SHOWN_PARTS], *([f"and {more} more"] if more > 0 else [])])


def _parsed(text: str) -> Any:
    """The parsed JSON, None if it is not valid."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _is_kafka(value: object) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(k.isdigit() and isinstance(v, int) for k, v in value.items())
    )
