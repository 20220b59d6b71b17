"""Where a Kafka source begins after a lost checkpoint: by the commit's position, and by what Kafka has."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspark")

from keyfold.checkpoints.manifest.source_offsets import Place, kafka_position
from keyfold.statestore.errors import NotResumable
from keyfold.streaming.kafka import EARLIEST, starting_offsets

ROOT = Path("var/counts")

places = st.tuples(st.sampled_from("abc"), st.integers(0, 11))
ranges = st.tuples(st.just(0) | st.integers(0, 20), st.integers(0, 20)).map(lambda r: (r[0], r[0] + r[1]))


@given(st.dictionaries(places, st.integers(0, 40), min_size=1), st.dictionaries(places, ranges))
def test_it_begins_at_the_position_in_all_partitions_that_there_are_or_says_which_cannot_be_read(
    position: dict[Place, int], found: dict[Place, tuple[int, int]]
) -> None:
    known = all(p in found and found[p][0] <= offset <= found[p][1] for p, offset in position.items())
    readable = known and all(start == 0 for place, (start, _) in found.items() if place not in position)
    if readable:
        begin = starting_offsets(position, found, ROOT, with_loss=False)
        assert kafka_position(begin) == {place: position.get(place, EARLIEST) for place in found}
    else:
        with pytest.raises(NotResumable) as caught:
            starting_offsets(position, found, ROOT, with_loss=False)
        assert caught.value.path == str(ROOT)
        assert caught.value.remedy


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({("t", 0): (0, 9)}, "partitions that are not among"),
        ({("t", 0): (5, 9), ("t", 1): (0, 9)}, "deleted records"),
        ({("t", 0): (0, 3), ("t", 1): (0, 9)}, "further than Kafka has"),
        ({("t", 0): (0, 9), ("t", 1): (0, 9), ("t", 2): (1, 9)}, "partitions that are new"),
    ],
)
def test_what_is_gone_is_left_out_only_if_that_is_wanted(
    found: dict[Place, tuple[int, int]], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    position = {("t", 0): 4, ("t", 1): 7}
    with pytest.raises(NotResumable, match=says):
        starting_offsets(position, found, ROOT, with_loss=False)
    with caplog.at_level(logging.WARNING, logger="keyfold"):
        begin = json.loads(starting_offsets(position, found, ROOT, with_loss=True))
    assert begin == {"t": {str(number): position.get(("t", number), EARLIEST) for _, number in found}}
    assert says in caplog.text


def test_many_partitions_are_not_all_named() -> None:
    with pytest.raises(NotResumable, match="t-0, t-1, t-2, t-3, t-4 and 95 more"):
        starting_offsets({("t", n): 1 for n in range(100)}, {}, ROOT, with_loss=False)
