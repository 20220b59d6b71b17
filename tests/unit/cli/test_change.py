"""`compact`, `anchor` and `config`; and the anchors of `Changelog` that the command uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from keyfold import Changelog, restore
from keyfold.checkpoints.cli.group import cli
from keyfold.statestore.errors import CompactedAway, ConfigError
from support.changelogs import BY_HAND, START_MS, STATE_3, Living, make_hourly, rows


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def json_of(*arguments: object) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return make_hourly(tmp_path / "log")


# -- compact -------------------------------------------------------------------------------------------------


def test_compact_folds_and_says_what_each_pass_did(log_path: Path) -> None:
    before = restore(log_path).to_dict()
    found = json_of("compact", log_path)
    assert found["records_before"] == 18
    assert found["records_after"] == len(before) == 8
    assert found["bytes_after"] < found["bytes_before"]
    assert sum(p["records_read"] - p["records_kept"] for p in found["passes"]) == 10
    assert restore(log_path).to_dict() == before
    again = run("compact", log_path)
    assert again.output.startswith("nothing to compact\nbefore: 8 records")


def test_compact_prints_a_line_per_pass(log_path: Path) -> None:
    lines = run("compact", log_path).output.splitlines()
    assert lines[0].split()[:2] == ["partition", "records"]
    assert [line.split()[0] for line in lines[1:-1]] == ["0", "1"]
    assert lines[-1].startswith("before: 18 records, ")


def test_compact_of_a_log_that_keeps_every_event_is_refused(tmp_path: Path) -> None:
    Changelog.open(tmp_path / "log", config={**BY_HAND, "cleanup.policy": "delete"}).close()
    done = run("compact", tmp_path / "log")
    assert done.exit_code == 2
    assert "Compaction is disabled: the cleanup.policy keeps every change." in done.output


def test_what_writes_beside_a_living_writer_says_who_it_is_and_what_to_do(tmp_path: Path) -> None:
    with Living(tmp_path / "log") as living:
        living.append("k", "v")
        for verb, *options in (["compact"], ["config", "--set", "anchors.auto=9"], ["anchor", "--add", "x"]):
            done = run(verb, living.path, *options)
            assert done.exit_code == 5
            assert f"found: pid {living.pid}, epoch 1" in done.output
            assert "what to do:" in done.output
            assert "steal" not in done.output
        assert json_of("config", living.path)["settings"]["anchors.auto"]["value"] == 3
        assert json_of("anchor", living.path)["anchors"] == []
        living.append("k", "still writing")


# -- config --------------------------------------------------------------------------------------------------


def test_config_shows_every_setting_and_which_were_changed(log_path: Path) -> None:
    with Changelog.open(log_path, mode="r") as log:
        named, changed, shown = log.config.named(), log.config.changed(), log.config.shown()
    settings = json_of("config", log_path)["settings"]
    unset = {name for name, text in shown.items() if text == "none" != named[name]}
    assert len(unset) >= 4
    assert {name: s["value"] for name, s in settings.items()} == named | dict.fromkeys(unset)
    assert {name for name, s in settings.items() if s["changed"]} == set(changed)
    lines = {line.split()[0]: line for line in run("config", log_path).output.splitlines()}
    assert lines["segment.bytes"].split() == ["segment.bytes", "1024", "134217728", "changed"]
    assert lines["max.compaction.lag.ms"].split()[1:] == ["none", "none"]


def test_config_changes_durably_what_was_asked_and_nothing_else(log_path: Path) -> None:
    before = json_of("config", log_path)["settings"]
    done = run("config", log_path, "--set", "segment.bytes=64MiB", "--set", " retention.ms = 24h")
    assert done.exit_code == 0, done.output
    after = json_of("config", log_path)["settings"]
    assert after["segment.bytes"]["value"] == 64 << 20
    assert after["retention.ms"]["value"] == 86_400_000
    different = {name for name in after if after[name] != before[name]}
    assert different == {"segment.bytes", "retention.ms"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("segmnt.bytes=1", "expected: 'segment.bytes'"),
        ("segment.bytes=much", "bytes, such as"),
        ("segment.bytes", "expected: --set name=value"),
    ],
)
def test_config_refuses_what_is_no_setting(setting: str, message: str, log_path: Path) -> None:
    identity = (log_path / "changelog.json").read_bytes()
    journals = sorted((log_path / "manifest").iterdir())
    done = run("config", log_path, "--set", "anchors.auto=9", "--set", setting)
    assert done.exit_code == 2
    assert message in done.output
    assert (log_path / "changelog.json").read_bytes() == identity
    assert sorted((log_path / "manifest").iterdir()) == journals, "no writer was opened for it"


# -- anchors -------------------------------------------------------------------------------------------------


def test_the_state_at_an_anchor_outlives_compaction_and_goes_when_it_is_dropped(log_path: Path) -> None:
    with Changelog.open(log_path) as log:
        anchor = log.anchor("mine", at=3)
        assert (anchor.name, anchor.commit) == ("mine", 3)
        assert log.anchor("mine", at=("loader", 2)) == anchor, "the same commit again is nothing new"
        log.compact()
        assert restore(log_path, at="mine").to_dict() == restore(log_path, at=3).to_dict() == STATE_3
        with pytest.raises(CompactedAway):
            log.anchor("late", at=4)
        assert log.anchor("alias", at="mine").commit == 3
        assert set(log.anchors()) == {"mine", "alias"}
        assert log.drop_anchor("mine") == anchor
        log.drop_anchor("alias")
        log.append(rows(("a", "6")))
        log.compact()
        assert log.anchors() == {}
    with pytest.raises(CompactedAway):
        restore(log_path, at=3)


def test_anchors_survive_a_new_writer_and_are_seen_by_readers(log_path: Path) -> None:
    with Changelog.open(log_path) as log:
        log.anchor("last")
    with Changelog.open(log_path):
        pass
    with Changelog.open(log_path, mode="r") as log:
        assert log.anchors()["last"].commit == 6
        with pytest.raises(ConfigError, match="open to read only"):
            log.anchor("x")


@pytest.mark.parametrize("name", ["", "7", "resume:counts", "-x", " x", "a\nb", "\x1b[1m", "x" * 201])
def test_a_name_that_an_anchor_cannot_have_is_refused(name: str, log_path: Path) -> None:
    with Changelog.open(log_path) as log:
        with pytest.raises(ConfigError, match="name"):
            log.anchor(name)
        assert log.anchors() == {}


def test_an_anchor_names_one_commit_that_exists(log_path: Path, tmp_path: Path) -> None:
    with Changelog.open(log_path) as log:
        log.anchor("x", at=2)
        for at in (3, 99, "y", ("loader", 99)):
            with pytest.raises(ConfigError):
                log.anchor("x", at=at)
        with pytest.raises(ConfigError):
            log.drop_anchor("y")
        assert log.anchors()["x"].commit == 2
    with Changelog.open(tmp_path / "new", config=BY_HAND) as log, pytest.raises(ConfigError):
        log.anchor("x")


def test_anchor_lists_adds_and_drops(log_path: Path) -> None:
    assert run("anchor", log_path, "--add", "mine", "--at", "loader:2").output == "added mine: commit 3\n"
    (found,) = json_of("anchor", log_path)["anchors"]
    assert (found["name"], found["commit"], found["app"]) == ("mine", 3, None)
    assert found["time_ms"] == START_MS + 2 * 3_600_000
    assert "mine       3  2013-01-01T14:00:00.000Z" in run("anchor", log_path).output
    assert json_of("anchor", log_path, "--add", "last")["added"]["commit"] == 6
    assert run("anchor", log_path, "--drop", "mine").output == "dropped mine: commit 3\n"
    assert [a["name"] for a in json_of("anchor", log_path)["anchors"]] == ["last"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--add", "x", "--drop", "x"], 2),
        (["--at", "1"], 2),
        (["--drop", "x"], 2),
        (["--add", "7"], 2),
        (["--add", "x", "--at", "99"], 2),
        (["--add", "x", "--at", "2"], 6),
    ],
)
def test_anchor_refuses_what_cannot_be(words: list[str], code: int, log_path: Path) -> None:
    run("compact", log_path)
    done = run("anchor", log_path, *words)
    assert done.exit_code == code, done.output
    assert json_of("anchor", log_path)["anchors"] == []
