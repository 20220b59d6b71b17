"""What is refused has done nothing before, and the command says what to do in its own words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from keyfold import Changelog, restore
from keyfold.checkpoints.cli import output
from keyfold.checkpoints.cli.group import cli
from keyfold.statestore.errors import ConfigError, Damaged, KeyfoldError, StorageFailed
from support.changelogs import BY_HAND, flip, make_closed, rows

WRITING = [
    ["compact"], ["compact", "--full"], ["anchor", "--add", "x"], ["anchor", "--drop", "x"],
    ["config", "--set", "segment.ms=9"], ["config", "--set", "segment.ms=default"],
]  # fmt: skip


def run(verb: str, path: object, *options: object) -> Result:
    return CliRunner().invoke(cli, [verb, str(path), *map(str, options)])


def content(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Changelog]:
    with Changelog.open(tmp_path / "log", partitions=2, config=BY_HAND) as log:
        log.append(rows(("a", "1"), ("b", "2")))
        yield log


@pytest.mark.parametrize("words", WRITING, ids=" ".join)
def test_no_store_is_asked_for_what_only_a_local_changelog_can_do(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any) -> Any:
        pytest.fail("the store was asked")

    monkeypatch.setattr(output, "located", asked)
    for url in ("s3://bucket/log", "gs://bucket/log", "nothing://there/log"):
        done = run(words[0], url, *words[1:])
        assert done.exit_code == 2, done.output
        assert f"found: a URL with {url.partition(':')[0]}:" in done.output
        assert "keyfold snapshot URL --clone-to DIR" in done.output


@pytest.mark.parametrize("words", WRITING, ids=" ".join)
def test_of_a_snapshot_the_command_names_its_own_way_to_a_changelog(
    words: list[str], log: Changelog, tmp_path: Path
) -> None:
    log.snapshot(tmp_path / "snapshot")
    before = content(tmp_path / "snapshot")
    done = run(words[0], tmp_path / "snapshot", *words[1:])
    assert done.exit_code == 2, done.output
    assert "keyfold snapshot PATH --clone-to DIR" in done.output
    assert "Changelog." not in done.output
    assert content(tmp_path / "snapshot") == before


def _foreign(place: Path) -> type[KeyfoldError]:
    place.mkdir()
    (place / "photo.jpg").write_bytes(b"x")
    return ConfigError


def _other(place: Path) -> type[KeyfoldError]:
    make_closed(place)
    return ConfigError


def _file(place: Path) -> type[KeyfoldError]:
    place.write_bytes(b"x")
    return StorageFailed


def _damaged(place: Path) -> type[KeyfoldError]:
    with Changelog.open(place.with_name("log")) as log:
        log.snapshot(place)
    flip(next(place.glob("manifest/*.files")), 20)
    return Damaged


@pytest.mark.parametrize("make", [_foreign, _other, _file, _damaged])
def test_a_snapshot_that_is_refused_has_sealed_nothing(make: Any, log: Changelog, tmp_path: Path) -> None:
    place = tmp_path / "place"
    expected = make(place)
    log.append(rows(("c", "3")))
    before, line = content(tmp_path), log.state.seq
    with pytest.raises(expected, match="what to do:"):
        log.snapshot(place)
    assert log.state.seq == line
    assert content(tmp_path) == before


def test_what_is_to_be_made_and_is_there_already_ends_as_a_wrong_argument(
    log: Changelog, tmp_path: Path
) -> None:
    """Whoever makes it; 3 says that PATH is not a changelog."""
    log.snapshot(tmp_path / "snapshot")
    taken, file = tmp_path / "taken", tmp_path / "taken.parquet"
    taken.mkdir()
    (taken / "x").write_bytes(b"x")
    file.write_bytes(b"x")
    for verb, path, option, target in (
        ("snapshot", tmp_path / "snapshot", "--clone-to", taken),
        ("snapshot", tmp_path / "snapshot", "--clone-to", file),
        ("snapshot", tmp_path / "snapshot", "--clone-to", log.path),
        ("snapshot", log.path, "--to", taken),
        ("restore", log.path, "--to", taken),
        ("restore", log.path, "--to", file),
    ):
        done = run(verb, path, option, target)
        assert (done.exit_code, "what to do:" in done.output) == (2, True), done.output
    with restore(log.path) as state, pytest.raises(ConfigError):
        state.to_changelog(taken)
    done = run("snapshot", log.path, "--to", tmp_path / "x", "--clone-to", tmp_path / "y")
    assert done.exit_code == 2
    assert "--clone-to clones the snapshot" in " ".join(done.output.split())
