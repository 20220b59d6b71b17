"""Settings: Kafka's names, checked when they are set."""

from __future__ import annotations

import pytest

from keyfold.checkpoints.config import UNLIMITED, LogConfig
from keyfold.statestore.errors import ConfigError


def test_sizes_and_times_may_be_given_as_text() -> None:
    config = LogConfig().with_changes(
        {"segment.bytes": "64MiB", "delete.retention.ms": "36h", "segment.ms": 5}
    )
    assert (config.segment_bytes, config.delete_retention_ms, config.segment_ms) == (64 << 20, 129_600_000, 5)


def test_decimal_prefixes_are_powers_of_ten() -> None:
    assert LogConfig().with_changes({"segment.bytes": "2MB"}).segment_bytes == 2_000_000


def test_an_unknown_name_is_refused_with_the_nearest_valid_one() -> None:
    with pytest.raises(ConfigError, match=r"expected: 'segment\.bytes'"):
        LogConfig().with_changes({"segment.byte": 1})


@pytest.mark.parametrize("name", ["file.delete.delay.ms", "min.insync.replicas"])
def test_a_name_that_resembles_none_is_refused_with_all_of_them(name: str) -> None:
    with pytest.raises(ConfigError, match=r"expected: one of anchors\.auto, .*store\.backlog\.bytes"):
        LogConfig().with_changes({name: 1})


@pytest.mark.parametrize("name", ["min.cleanable.dirty.ratio", "snapshot.dirty.ratio"])
def test_a_ratio_that_is_no_number_is_told_which_numbers_are_taken(name: str) -> None:
    with pytest.raises(ConfigError, match="expected: a number from 0 to 1"):
        LogConfig().with_changes({name: "50%"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("segment.bytes", "many"),
        ("segment.bytes", 10),
        ("segment.bytes", True),
        ("segment.ms", 0),
        ("min.cleanable.dirty.ratio", 1.5),
        ("min.cleanable.dirty.ratio", "half"),
        ("cleanup.policy", "shrink"),
        ("cleanup.policy", ""),
        ("compression.type", "snappy"),
        ("anchors.auto", -1),
        ("retention.ms", -2),
        ("cleaner.threads", None),
        ("snapshot.dest", "backups/counts"),
        ("snapshot.dest", 7),
        ("snapshot.commits", -1),
        ("snapshot.dirty.ratio", 2),
    ],
)
def test_a_bad_value_is_refused_and_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        LogConfig().with_changes({name: value})
    assert name in str(refused.value)
    assert repr(value) in str(refused.value)


def test_only_what_differs_from_the_defaults_is_kept() -> None:
    config = LogConfig().with_changes({"cleanup.policy": "delete, compact", "segment.bytes": 128 << 20})
    assert config.changed() == {"cleanup.policy": "compact,delete"}
    assert LogConfig().with_changes(config.changed()) == config


def test_every_setting_can_be_read_back_by_its_name() -> None:
    named = LogConfig().named()
    assert named["max.compaction.lag.ms"] == UNLIMITED
    assert LogConfig().with_changes(named) == LogConfig()
