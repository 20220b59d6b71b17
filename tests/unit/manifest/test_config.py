"""Settings: Kafka's names, checked when they are set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from keyfold import Changelog, ChangelogSink, TaskSink, restore
from keyfold.checkpoints.cli.group import cli
from keyfold.checkpoints.manifest.config import UNLIMITED, LogConfig
from keyfold.statestore.errors import ConfigError
from support.changelogs import BY_HAND, rows


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


# -- text that is shown is text that is taken ----------------------------------------------------------------

#: For each kind of value what may be given; the names are looked up, so that a new setting is not left out.
_GIVEN = {
    int: st.one_of(st.integers(-1, 1 << 70), st.integers(0, 64), st.integers(UNLIMITED - 2, UNLIMITED)),
    float: st.floats(0, 1),
    str: st.sampled_from(
        ["compact", "delete", "delete,compact", "none", "lz4", "zstd", "/backup/x", "s3://b/x", ""]
    ),
}
NAMES = [f.metadata["name"] for f in fields(LogConfig())]
CAN_BE_NONE = [
    "max.compaction.lag.ms", "retention.ms", "retention.bytes", "cleaner.io.max.bytes.per.second",
    "snapshot.dest",
]  # fmt: skip


@st.composite
def _configs(draw: st.DrawFn) -> LogConfig:
    """Each setting as it is, or changed to something that it takes."""
    config = LogConfig()
    for f in fields(config):
        given_value = draw(st.one_of(st.none(), _GIVEN[type(f.default)]))
        try:
            config = config.with_changes({} if given_value is None else {f.metadata["name"]: given_value})
        except ConfigError:
            continue  # refused: the one before stays
    return config


@given(_configs())
def test_every_setting_is_taken_as_it_is_shown(config: LogConfig) -> None:
    assert LogConfig().with_changes(config.shown()) == config
    assert LogConfig().with_changes(config.named()) == config
    assert LogConfig().with_changes({name: str(value) for name, value in config.named().items()}) == config


@given(_configs())
def test_every_setting_can_be_set_back_to_its_default(config: LogConfig) -> None:
    assert config.with_changes(dict.fromkeys(NAMES, "default")) == LogConfig()


@pytest.mark.parametrize("name", CAN_BE_NONE)
def test_a_limit_or_a_place_is_taken_away_with_none_and_shown_so(name: str) -> None:
    some: dict[str, object] = {name: "/backup" if name == "snapshot.dest" else 5000}
    config = LogConfig().with_changes(some)
    assert config.with_changes({name: "none"}).shown()[name] == "none"
    assert config.shown()[name] == str(some[name])
    with pytest.raises(ConfigError, match=r"expected: .*, or none"):
        config.with_changes({name: "without"})


@pytest.mark.parametrize("name", sorted({*NAMES} - {*CAN_BE_NONE, "compression.type"}))
def test_a_setting_that_always_has_a_value_is_never_none(name: str) -> None:
    with pytest.raises(ConfigError):
        LogConfig().with_changes({name: "none"})


def test_what_the_command_shows_it_takes(tmp_path: Path) -> None:
    """Both forms: the words of a line, and what JSON has."""
    path = str(tmp_path / "log")
    changes = {
        "cleaner.io.max.bytes.per.second": "none",
        "min.cleanable.dirty.ratio": 1 / 3,
        "retention.ms": "7d",
    }
    Changelog.open(path, config={**BY_HAND, **changes}).close()

    def run(*words: str) -> str:
        done = CliRunner().invoke(cli, ["config", path, *words])
        assert done.exit_code == 0, done.output
        return done.output

    shown = run()
    for line in shown.splitlines()[1:]:
        name, value, default, *_ = line.split()
        run("--set", f"{name}={value}")
        assert run() == shown
        run("--set", f"{name}={default}")
        assert "changed" not in next(x for x in run().splitlines() if x.split()[0] == name)
        run("--set", f"{name}={value}")


# -- settings that exclude one another -----------------------------------------------------------------------

_LAGS: dict[str, object] = {"min.compaction.lag.ms": 2000, "max.compaction.lag.ms": 1999}


def _opened(path: Path, config: dict[str, object]) -> None:
    Changelog.open(path, config=config).close()


def _changed_later(path: Path, config: dict[str, object]) -> None:
    """One after the other, so that each is sound by itself."""
    for name, value in config.items():
        _opened(path, {name: value})


def _by_command(path: Path, config: dict[str, object]) -> None:
    _opened(path, {})
    words = [word for name, value in config.items() for word in ("--set", f"{name}={value}")]
    done = CliRunner().invoke(cli, ["config", str(path), *words])
    assert done.exit_code in (0, 2)
    if done.exit_code:
        raise ConfigError(done.output)


def _by_sink(path: Path, config: dict[str, object]) -> None:
    ChangelogSink(path, config=config).close()


def _by_task(path: Path, config: dict[str, object]) -> None:
    TaskSink(path, lambda df, store: None, config=config).close()


def _by_restore(path: Path, config: dict[str, object]) -> None:
    with Changelog.open(path, config=BY_HAND) as log:
        log.append(rows(("a", "1")))
    state: Any = restore(path)
    state.to_changelog(path.with_name("other"), config=config)


@pytest.mark.parametrize(
    "way",
    [_opened, _changed_later, _by_command, _by_sink, _by_task, _by_restore],
    ids=lambda way: way.__name__,
)
def test_a_time_to_be_cleaned_at_that_is_before_the_time_to_stay_is_refused(
    way: Callable[[Path, dict[str, object]], None], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"max\.compaction\.lag\.ms is smaller than min\.compaction"):
        way(tmp_path / "log", _LAGS)
    way(tmp_path / "same", {**_LAGS, "max.compaction.lag.ms": 2000})


#: Two settings that bound each other: what the changelog has, and what is then asked for.
MERGED = [
    ({"commits.retained": 5000}, {"anchors.auto": 2000}),
    ({"min.compaction.lag.ms": 0, "max.compaction.lag.ms": "3h"}, {"min.compaction.lag.ms": "2h"}),
]
CONFLICTS = [
    ({"commits.retained": 5}, {"anchors.auto": 6}),
    ({"anchors.auto": 500}, {"commits.retained": 100}),
    ({"max.compaction.lag.ms": "1h"}, {"min.compaction.lag.ms": "2h"}),
]
OPENINGS: list[Callable[..., Any]] = [
    Changelog.open,
    ChangelogSink,
    lambda path, config: ChangelogSink(path, keys="k", config=config),
]


@pytest.mark.parametrize("opened", OPENINGS[:2])
@pytest.mark.parametrize(("has", "asked"), [*MERGED, *CONFLICTS])
def test_settings_are_checked_together_with_those_that_the_changelog_has(
    tmp_path: Path, opened: Callable[..., Any], has: dict[str, Any], asked: dict[str, Any]
) -> None:
    path = tmp_path / "log"
    Changelog.open(path, config={**BY_HAND, **has}).close()
    before = sorted((file, file.stat().st_mtime_ns) for file in path.rglob("*"))
    if (has, asked) in MERGED:
        opened(path, config=asked).close()
        Changelog.open(path, config=asked).close()
    else:
        with pytest.raises(ConfigError, match="than"):
            opened(path, config=asked)
        assert sorted((file, file.stat().st_mtime_ns) for file in path.rglob("*")) == before


@pytest.mark.parametrize("opened", OPENINGS)
@pytest.mark.parametrize(
    "asked", [{"anchors.auto": 2000}, {"min.compaction.lag.ms": 2, "max.compaction.lag.ms": 1}]
)
def test_settings_of_a_new_changelog_are_checked_before_it_is_created(
    tmp_path: Path, opened: Callable[..., Any], asked: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="than"):
        opened(tmp_path / "log", config=asked)
    assert not (tmp_path / "log").exists()
