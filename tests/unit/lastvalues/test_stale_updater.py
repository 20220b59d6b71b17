"""Last-value stores of a writer that was overtaken, beside those of the one that has taken over."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyfold import Changelog
from keyfold.checkpoints.engine import Engine
from keyfold.checkpoints.lastvalues.directories import WriterStoreDirs
from keyfold.checkpoints.log.recovery import open_writer
from keyfold.statestore.errors import WriterFenced
from support.changelogs import BY_HAND, Clock, rows
from support.faults.inject import Watched


def stores(path: Path) -> set[str]:
    return {f.name for f in path.glob("store-*")}


def engine(path: Path, *, steal: bool = False) -> Engine:
    return Engine(open_writer(Watched(), path, None, Clock(), steal=steal))


def test_a_writer_that_was_overtaken_touches_no_store_any_more(tmp_path: Path) -> None:
    """Its own store is opened, gone, or was never made: whatever its updater wants to do, it stops."""
    path = tmp_path / "log"
    with Changelog.open(path, config=BY_HAND) as log:
        log.append(rows(("a", "1")))
    stale = engine(path)
    assert stale.last_values().get(b"a") == b"1"
    mine = engine(path, steal=True)
    assert mine.last_values().get(b"a") == b"1"
    there = stores(path)
    for number in range(3):
        place = WriterStoreDirs(stale.writer)
        for act in (place.found, place.new):
            with pytest.raises(WriterFenced):
                act()
        stale.close()
        assert stores(path) == there, f"round {number}"
        assert mine.last_values().get(b"a") == b"1"
    mine.close()


def test_the_store_of_an_earlier_writer_gets_a_name_that_this_one_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Changelog.open(path, config=BY_HAND) as log:
        log.append(rows(("a", "1")))
        assert log.get(b"a") == b"1"
    assert stores(path) == {"store-1"}
    again = engine(path)
    assert again.last_values().get(b"a") == b"1"
    assert stores(path) == {f"store-{again.writer.opened_epoch}"}
    again.close()
