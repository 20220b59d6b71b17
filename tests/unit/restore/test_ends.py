"""A restored state that is closed, also while others read it, and paths that hold no changelog."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keyfold import Changelog, RestoredState, restore
from keyfold.statestore.errors import ConfigError, NotAChangelog
from support.changelogs import BY_HAND, rows

CONFIG = {**BY_HAND, "anchors.auto": 0}

USES: dict[str, Callable[[RestoredState, Path], Any]] = {
    "batches": lambda state, to: list(state.batches()),
    "to_arrow": lambda state, to: state.to_arrow(),
    "to_dict": lambda state, to: state.to_dict(),
    "to_pandas": lambda state, to: state.to_pandas(),
    "to_polars": lambda state, to: state.to_polars(),
    "to_store": lambda state, to: state.to_store(to),
    "to_changelog": lambda state, to: state.to_changelog(to),
    "to_spark": lambda state, to: state.to_spark(None),  # type: ignore[arg-type]
}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Changelog]:
    with Changelog.open(tmp_path / "log", partitions=2, config=CONFIG) as log:
        log.append(rows(*((f"k{n}", "1") for n in range(100))))
        yield log


@pytest.mark.parametrize("use", USES)
def test_a_state_that_was_closed_gives_nothing_any_more(log: Changelog, tmp_path: Path, use: str) -> None:
    state = restore(log.path)
    state.close()
    with pytest.raises(ConfigError, match=r"was closed(.|\n)*restore it again"):
        USES[use](state, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_batches_end_with_an_error_when_the_state_is_closed_between_two(log: Changelog) -> None:
    state = restore(log.path)
    batches = state.batches()
    next(batches)
    state.close()
    with pytest.raises(ConfigError, match="was closed"):
        next(batches)


def test_a_state_can_be_closed_by_several_threads_at_once(log: Changelog) -> None:
    state = restore(log.path)
    failures: list[BaseException] = []
    together = threading.Barrier(8)

    def close() -> None:
        together.wait()
        try:
            state.close()
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list((log.path / "readers").iterdir()) == []


def test_a_store_stays_open_when_the_state_is_closed(log: Changelog, tmp_path: Path) -> None:
    with restore(log.path) as state:
        store = state.to_store(tmp_path / "store")
    assert store.get(b"k3") == b"1"
    store.close()


@pytest.mark.parametrize("name", ["file", "changelog.json", "log/changelog.json"])
def test_a_file_is_no_changelog(log: Changelog, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if not path.exists():
        path.write_text("mine")
    with pytest.raises(NotAChangelog, match="found: a file"):
        restore(path)
    with pytest.raises(NotAChangelog, match="found: a file"):
        Changelog.open(path, mode="r")
    with pytest.raises(NotAChangelog, match="found: a file"):
        Changelog.clone(path, tmp_path / "clone")


def test_what_is_below_a_file_is_no_changelog(log: Changelog) -> None:
    with pytest.raises(NotAChangelog, match="found: no directory"):
        restore(log.path / "changelog.json" / "x")
