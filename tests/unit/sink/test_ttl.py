"""Entries that outlived their ttl: hidden at once, tombstones by and by, never too early."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keyfold import Changelog, restore
from keyfold.sink import ttl
from keyfold.sink.named_stores import Store
from support.tasks import Driver, records

SECOND = timedelta(seconds=1)
#: `short` lives for ten seconds, `long` for a hundred, `never` for ever.
STORES = {"short": Store(ttl=10 * SECOND), "long": Store(ttl=100 * SECOND), "never": Store()}


class Life:
    """A task on a changelog, both opened again at will, and the clock."""

    def __init__(self, path: Path, partitions: int = 2, config: dict[str, object] | None = None) -> None:
        self.path = path
        self.partitions = partitions
        self.config = {"cleaner.threads": 0, "delete.retention.ms": 0, "anchors.auto": 0, **(config or {})}
        self.now_ms = 1_000_000
        self.open()

    def open(self) -> None:
        self.log = Changelog.open(
            self.path, partitions=self.partitions, config=self.config, clock_ms=lambda: self.now_ms
        )
        self.driver = Driver(self.log, stores=STORES)
        self.run, self.ask = self.driver.run, self.driver.ask

    def put(self, name: str, *keys: bytes) -> None:
        self.run(lambda store: store[name].put_all(dict.fromkeys(keys, b"v")))

    def keys(self, name: str) -> list[bytes]:
        """What the task sees."""
        found: list[bytes] = self.ask(lambda store: [key for key, _ in store[name].all()])
        return found

    def logged(self) -> set[bytes]:
        """The keys that are not deleted in the log."""
        return set(restore(self.path).to_dict())

    def after(self, seconds: float) -> None:
        self.now_ms += int(seconds * 1000)


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    made = Life(tmp_path / "log")
    yield made
    made.log.close()


# -- what a task sees ----------------------------------------------------------------------------------------


BOTH = (b"new", b"old")


def _there(values: Any) -> list[bytes]:
    return [key for key, value in zip(BOTH, values, strict=True) if value is not None]


READS: dict[str, Callable[[Any], list[bytes]]] = {
    "get": lambda store: _there([store.get(key) for key in BOTH]),
    "get_all": lambda store: _there(store.get_all(BOTH)),
    "get_all of many": lambda store: _there(store.get_all(BOTH * 20)[-2:]),
    "get_all of arrays": lambda store: _there(store.get_all(pa.array(BOTH)).to_pylist()),
    "all": lambda store: [key for key, _ in store.all()],
    "range": lambda store: [key for key, _ in store.range(b"a", b"z")],
    "prefix": lambda store: [key for part in (b"n", b"o") for key, _ in store.prefix(part)],
    "snapshot": lambda store: [key for key, _ in store.snapshot().all()],
    "snapshot of a snapshot": lambda store: _there(store.snapshot().snapshot().get_all(BOTH)),
}


@pytest.mark.parametrize("read", READS)
def test_an_entry_is_gone_for_every_read_as_soon_as_it_was_not_written_for_its_ttl(
    life: Life, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no tombstone was made yet."""
    monkeypatch.setattr(ttl.Sweeper, "look", lambda *_: ttl.Sweep(pa.array([], pa.binary()), {}))
    life.put("short", b"old")
    life.after(4)
    life.put("short", b"new")
    life.after(5.999)
    assert life.ask(lambda store: READS[read](store["short"])) == [b"new", b"old"]
    life.after(0.001)
    assert life.ask(lambda store: READS[read](store["short"])) == [b"new"]
    assert life.logged() == {b"short\0new", b"short\0old"}


def test_a_write_renews_an_entry_and_a_read_does_not(life: Life) -> None:
    life.put("short", b"read", b"written")
    life.after(9)
    life.put("short", b"written")
    life.keys("short")
    life.after(2)
    assert life.keys("short") == [b"written"]


def test_every_store_has_a_ttl_of_its_own_or_none(life: Life) -> None:
    for name in STORES:
        life.put(name, b"a")
    life.after(10)
    assert [life.keys(name) for name in STORES] == [[], [b"a"], [b"a"]]
    life.after(90)
    assert [life.keys(name) for name in STORES] == [[], [], [b"a"]]
    assert life.logged() == {b"never\0a"}


# -- tombstones ----------------------------------------------------------------------------------------------


def test_an_expired_entry_becomes_a_tombstone_in_the_next_commit(life: Life) -> None:
    life.put("short", b"a", b"b", b"c")
    life.after(5)
    life.put("short", b"b")
    life.after(5)
    commit = life.run()
    assert commit is not None
    assert life.logged() == {b"short\0b"}
    assert {key for key, value in records(life.log) if value is None} == {b"short\0a", b"short\0c"}
    life.run()
    assert sum(value is None for _, value in records(life.log)) == 2


def test_an_entry_that_is_written_again_when_it_expires_is_no_tombstone(life: Life) -> None:
    life.put("short", b"a")
    life.after(10)

    def revive(store: Any) -> Any:
        seen = store["short"].get(b"a")
        store["short"].put(b"a", b"again")
        return seen, store["short"].get(b"a")

    assert life.ask(revive) == (None, b"again")
    assert [value for _, value in records(life.log)] == [b"v", b"again"]
    assert life.ask(lambda store: list(store["short"].all())) == [(b"a", b"again")]


def test_a_deleted_entry_gets_no_second_tombstone(life: Life) -> None:
    life.put("short", b"a")
    life.run(lambda store: store["short"].delete(b"a"))
    life.after(20)
    life.run()
    assert [value for _, value in records(life.log)] == [b"v", None]


def test_a_batch_that_failed_leaves_its_tombstones_to_the_next(life: Life) -> None:
    life.put("short", b"a")
    life.after(10)
    with pytest.raises(ZeroDivisionError):
        life.run(lambda store: 1 // 0)
    assert life.logged() == {b"short\0a"}
    life.run()
    assert life.logged() == set()


def test_work_is_bounded_and_what_is_left_is_hidden(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttl, "_RECORDS_MIN", 20)
    monkeypatch.setattr(ttl, "_PARTITION_RECORDS_MIN", 10)
    life.put("short", *(b"%03d" % n for n in range(100)))
    life.run()
    life.after(10)
    left = []
    for _ in range(7):
        assert life.keys("short") == []
        left.append(len(life.logged()))
    assert left[0] == 80
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0


def test_the_search_keeps_up_with_batches_larger_than_its_least(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttl, "_RECORDS_MIN", 4)
    monkeypatch.setattr(ttl, "_PARTITION_RECORDS_MIN", 2)
    for batch in range(12):
        life.put("short", *(b"%d-%d" % (batch, n) for n in range(50)))
        life.after(3)
    assert len(life.logged()) <= 4 * 50


# -- what happens to the log meanwhile -----------------------------------------------------------------------


def test_the_search_begins_anew_when_the_changelog_was_opened_again(life: Life) -> None:
    life.put("short", b"a")
    life.put("long", b"a")
    life.after(10)
    life.run()
    life.log.close()
    life.open()
    life.after(90)
    life.run()
    assert life.logged() == set()
    life.log.close()
    life.open()
    life.run()
    assert sum(value is None for _, value in records(life.log)) == 2


def test_a_task_goes_on_with_another_changelog_in_the_place_of_the_first(life: Life) -> None:
    """As a sink does whose changelog had to be opened again."""
    life.put("short", *(b"%d" % n for n in range(50)))
    life.after(10)
    life.run()
    life.log.close()
    shutil.rmtree(life.path)
    runner = life.driver.runner
    life.open()
    runner._process, life.driver.runner = life.driver.runner._process, runner
    life.put("short", b"a")
    life.after(10)
    life.run()
    assert life.logged() == set()


def test_the_search_goes_on_where_offsets_were_compacted_away(life: Life) -> None:
    life.put("long", *(b"%d" % n for n in range(50)))
    life.after(50)
    life.run()
    life.put("long", *(b"%d" % n for n in range(40)))
    life.log.compact()
    life.after(50)
    assert len(life.keys("long")) == 40
    assert len(life.logged()) == 40
    life.after(50)
    life.run()
    life.log.compact()
    assert life.logged() == set()


def test_a_rollback_that_takes_a_tombstone_back_has_it_made_again(life: Life) -> None:
    life.put("short", b"a")
    commit = life.log.state.commits[-1].number
    life.log.anchor("here")
    life.after(10)
    life.run()
    assert life.logged() == set()
    life.log.rollback(commit)
    assert life.logged() == {b"short\0a"}
    life.run()
    assert life.logged() == set()


def test_a_rollback_that_takes_a_later_write_back_lets_the_earlier_one_expire(life: Life) -> None:
    life.put("short", b"a")
    commit = life.log.state.commits[-1].number
    life.log.anchor("here")
    life.after(6)
    life.put("short", b"a")
    life.after(6)
    assert life.keys("short") == [b"a"]
    life.log.rollback(commit)
    assert life.keys("short") == []
    assert life.logged() == set()


def test_the_search_goes_on_where_the_log_begins_later(tmp_path: Path) -> None:
    config: dict[str, object] = {
        "cleanup.policy": "compact,delete", "segment.bytes": 1024, "retention.ms": 50_000,
    }  # fmt: skip
    life = Life(tmp_path / "log", 1, config)
    with life.log:
        life.put("long", b"dropped")
        life.put("never", b"dropped")
        life.after(40)
        life.put("long", b"kept")
        life.after(40)
        life.log.engine.do_chores()
        assert life.log.start_offsets()[0] > 0
        assert life.keys("long") == [b"kept"]
        life.after(60)
        assert life.keys("long") == []


# -- clocks --------------------------------------------------------------------------------------------------


def test_a_clock_that_goes_backwards_deletes_nothing_that_is_younger_than_its_ttl(life: Life) -> None:
    life.put("short", b"a")
    life.after(-5)
    life.put("short", b"b")
    life.after(7)
    life.run()
    assert life.keys("short") == [b"a", b"b"]
    life.after(3)  # b is ten seconds old, a five
    assert life.keys("short") == [b"a"]
    assert b"short\0a" in life.logged()
    life.after(5)
    assert life.keys("short") == []
    assert life.logged() == set()


def test_after_a_clock_that_was_far_ahead_entries_still_expire(life: Life) -> None:
    life.put("never", b"x")
    life.after(10_000)
    life.run()
    life.after(-10_000)
    life.put("short", b"a")
    life.after(10)
    assert life.keys("short") == []
    assert life.logged() == {b"never\0x"}


def test_other_stores_do_not_hold_the_search_up(life: Life) -> None:
    """Their records can have any time."""
    future = pa.array([10**15], pa.timestamp("ms"))
    life.log.append(pa.table({"key": [b"never\0x"], "value": [b"1"], "timestamp": future}))
    life.put("short", b"a")
    life.after(10)
    life.run()
    assert life.logged() == {b"never\0x"}
