"""Positions of a query's sources, as Spark keeps them, as the options that start the sources there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, TypeAlias

from keyfold.checkpoints.state import Commit
from keyfold.statestore.errors import NotResumable

#: A topic of Kafka and the number of a partition.
Place: TypeAlias = tuple[str, int]

_SHOWN_CHARACTERS: Final = 200
_APPEND: Final = 'read again from where you choose, with on_reset="append"'


def source_options(commit: Commit, source: int | None, root: Path) -> dict[str, str]:
    """The options for source number `source`, seeds not counted; None: for the only one that has some.

    Raises:
        NotResumable: there are none for it, or several sources have some.
    """
    found = [options_of(text) for text in commit.source if not _is_seed(text)]
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
        f"Commit {commit.number} is of a query with several sources.", path=root,
        expected="the number of one of them", found=described,
        remedy="ask for each: options(source=0), options(source=1), … in the order of the query",
    )  # fmt: skip


def _described(options: dict[str, str] | str) -> str:
    if isinstance(options, str):
        return options
    position = kafka_position(options["startingOffsets"])
    if position is not None:
        return f"Kafka, topics {', '.join(sorted({topic for topic, _ in position}))}"
    return f"keyfold, changelog {json.loads(options['startingOffsets'])['keyfold']}"


def options_of(text: str) -> dict[str, str] | str:
    """The options for a source whose offset Spark wrote as `text`, or why there are none."""
    if text.strip() == "-":
        return "it had given nothing yet: start it as at the first time"
    offset = _parsed(text)
    if offset is None:
        return "its position is no JSON"
    if (isinstance(offset, dict) and "keyfold" in offset) or kafka_position(text) is not None:
        return {"startingOffsets": text}
    if isinstance(offset, dict) and "logOffset" in offset:
        return "a file source keeps only the number of its own log entry, which is in the lost checkpoint"
    return "its position is only shown: " + text[:_SHOWN_CHARACTERS]


def kafka_position(text: str) -> dict[Place, int] | None:
    """The next offset of each partition, where `text` is the offset of a Kafka source; else None.

    It names the partitions that the source had. Whether they were subscribed to by name, by pattern or
    assigned, it does not say.
    """
    offset = _parsed(text)
    if not (isinstance(offset, dict) and offset and all(_is_kafka(v) for v in offset.values())):
        return None
    return {
        (topic, int(number)): next_offset
        for topic, partitions in offset.items()
        for number, next_offset in partitions.items()
    }


def _is_seed(text: str) -> bool:
    """Whether this is the seed of an earlier resume: its state is in the commit's own."""
    offset = _parsed(text)
    return isinstance(offset, dict) and "keyfold" in offset and "seed" in offset


def _parsed(text: str) -> Any:
    """What the JSON says, None where it is none."""
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
