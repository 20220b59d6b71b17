"""A task without Spark: what is called when, what is committed, which tasks are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keyfold import Changelog
from keyfold.sink.named_stores import Store
from keyfold.sink.task_runner import Task, TaskRunner, is_task
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.kv.serdes import Int64Serde, JsonSerde, StringSerde
from keyfold.statestore.kv.stores import StoreClosed
from support.changelogs import BY_HAND, Clock
from support.tasks import Driver, batch_of, deliver, records

TWO = {"words": Store(StringSerde(), Int64Serde()), "clock": Store()}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(tmp_path: Path, clock: Clock) -> Iterator[Changelog]:
    with Changelog.open(tmp_path / "log", partitions=3, config=BY_HAND, clock_ms=clock) as opened:
        yield opened


class Noting:
    """Notes its calls in their order."""

    def __init__(self, interval: timedelta | None = None) -> None:
        self.calls: list[Any] = []
        self.window_interval = interval
        self.fails = ""

    def process(self, records: pa.RecordBatch, store: Any) -> None:
        self.calls.append(records.num_rows)
        store.put(b"%d" % len(self.calls), b"process")
        if self.fails == "process":
            raise ValueError("the task's own")

    def window(self, store: Any) -> None:
        self.calls.append("window")
        store.put(b"%d" % len(self.calls), b"window")
        if self.fails == "window":
            raise ValueError("the task's own")


# -- what is called, and what is committed -------------------------------------------------------------------


def test_each_batch_that_has_rows_is_processed_and_then_the_window_all_in_one_commit(log: Changelog) -> None:
    task = Noting()
    deliver(log, TaskRunner(task), [batch_of(3), batch_of(0), batch_of(2)], 0)
    assert task.calls == [3, 2, "window"]
    assert dict(records(log)) == {b"1": b"process", b"2": b"process", b"3": b"window"}
    assert len(log.state.commits) == 1


def test_a_micro_batch_without_rows_has_a_window_and_commits(log: Changelog) -> None:
    task = Noting()
    assert deliver(log, TaskRunner(task), [], 0) is not None
    assert task.calls == ["window"]


def test_a_batch_that_was_committed_calls_nothing(log: Changelog) -> None:
    task = Noting()
    runner = TaskRunner(task)
    deliver(log, runner, [batch_of(1)], 0)
    before = log.end_offsets()
    assert deliver(log, runner, [batch_of(1)], 0) is None
    assert (task.calls, log.end_offsets()) == ([1, "window"], before)


@pytest.mark.parametrize("where", ["process", "window"])
def test_an_exception_commits_nothing_and_the_batch_can_come_again(log: Changelog, where: str) -> None:
    task = Noting(timedelta(hours=1))
    runner = TaskRunner(task)
    task.fails = where
    with pytest.raises(ValueError, match="the task's own"):
        deliver(log, runner, [batch_of(1)], 0)
    assert (records(log), log.state.commits) == ([], ())
    task.fails, task.calls = "", []
    deliver(log, runner, [batch_of(1)], 0)
    assert task.calls == [1, "window"]
    assert dict(records(log)) == {b"1": b"process", b"2": b"window"}


def test_windows_come_at_most_once_in_their_interval(log: Changelog, clock: Clock) -> None:
    task = Noting(timedelta(seconds=60))
    runner = TaskRunner(task)
    for number, step_ms in enumerate([0, 59_999, 1, 59_999, 1, 500_000, -1, 60_000]):
        clock.now_ms += step_ms
        deliver(log, runner, [batch_of(1)], number)
    with_window = [n for n, (a, b) in enumerate(_by_batch(task.calls)) if b]
    assert with_window == [0, 2, 4, 5, 6, 7]


def _by_batch(calls: list[Any]) -> list[tuple[int, bool]]:
    """For each batch, whether it had a window."""
    found: list[tuple[int, bool]] = []
    for call in calls:
        found = [*found[:-1], (1, True)] if call == "window" else [*found, (1, False)]
    return found


def test_a_task_without_a_window_has_none(log: Changelog) -> None:
    driver = Driver(log)
    driver.run(lambda store: store.put(b"a", b"1"))
    assert records(log) == [(b"a", b"1")]


def test_a_class_may_inherit_its_window_from_task(log: Changelog) -> None:
    class Least(Task):
        def process(self, records: pa.RecordBatch, store: Any) -> None:
            store.put(b"rows", b"%d" % records.num_rows)

    deliver(log, TaskRunner(Least()), [batch_of(4)], 0)
    assert log.get(b"rows") == b"4"


# -- named stores --------------------------------------------------------------------------------------------


def test_the_keys_of_a_store_begin_with_its_name_and_a_null_byte(log: Changelog) -> None:
    driver = Driver(log, stores=TWO)

    def write(store: Any) -> None:
        store["words"].put_all({"a": 1, "b": 2})
        store["clock"].put(b"a", b"tick")
        store["words"].delete("b")

    driver.run(write)
    assert sorted(records(log)) == [
        (b"clock\0a", b"tick"),
        (b"words\0a", Int64Serde().serialize(1)),
        (b"words\0b", None),
    ]
    assert len(log.state.commits) == 1


def test_a_store_reads_its_own_entries_only(log: Changelog) -> None:
    """Also where one name is the beginning of another."""
    driver = Driver(log, stores={"a": Store(), "a.": Store(), "aa": Store()})

    def write(store: Any) -> None:
        for name in store:
            store[name].put_all({b"": name.encode(), b"k": b"1", b"\xff": b"2"})

    def read(store: Any) -> Any:
        return {n: (list(store[n].all()), store[n].get(b""), list(store[n].prefix(b"\xff"))) for n in store}

    driver.run(write)
    assert driver.ask(read) == {
        n: ([(b"", n.encode()), (b"k", b"1"), (b"\xff", b"2")], n.encode(), [(b"\xff", b"2")])
        for n in ("a", "a.", "aa")
    }


def test_a_task_sees_what_it_wrote_in_this_batch_and_in_those_before(log: Changelog) -> None:
    driver = Driver(log, stores=TWO)
    seen: list[Any] = []

    def step(store: Any) -> None:
        words = store["words"]
        words.put("n", (words.get("n") or 0) + 1)
        seen.append((words.get("n"), list(words.all()), words.get_all(["n", "m"])))

    driver.run(step, step)
    driver.run(step)
    assert seen == [(n, [("n", n)], [n, None]) for n in (1, 2, 3)]


def test_a_store_takes_and_gives_arrow_arrays(log: Changelog) -> None:
    driver = Driver(log, stores=TWO)
    keys = pa.array([f"w{n}" for n in range(1000)])
    driver.run(lambda store: store["words"].put_all(keys, pa.array(range(1000), pa.int64())))

    def change(store: Any) -> Any:
        words = store["words"]
        words.put_all(pa.array(["w1", "w2", "new"]), pa.array([-1, None, 5]))
        return words.get_all(pa.chunked_array([["new", "w3"], ["w2", "w1", "none", "w3"]]))

    assert driver.ask(change).to_pylist() == [5, 3, None, -1, None, 3]
    expected = {f"w{n}": n for n in range(1000)} | {"w1": -1, "new": 5}
    del expected["w2"]
    assert driver.ask(lambda store: dict(store["words"].all())) == expected


def test_a_serde_that_cannot_convert_arrays_says_so(log: Changelog) -> None:
    driver = Driver(log, stores={"trees": Store(StringSerde(), JsonSerde())})
    for ask in (
        lambda store: store["trees"].get_all(pa.array(["a"])),
        lambda store: store["trees"].put_all(pa.array(["a"]), pa.array(["1"])),
    ):
        with pytest.raises(TypeError, match="JsonSerde cannot convert Arrow arrays"):
            driver.run(ask)


def test_a_snapshot_of_a_store_does_not_move(log: Changelog) -> None:
    driver = Driver(log, stores=TWO)
    driver.run(lambda store: store["clock"].put(b"a", b"1"))

    def read(store: Any) -> Any:
        clock = store["clock"]
        clock.put(b"b", b"2")
        with clock.snapshot() as snapshot:
            clock.put(b"b", b"3")
            return list(snapshot.all()), snapshot.get_all([b"a", b"b"])

    assert driver.ask(read) == ([(b"a", b"1"), (b"b", b"2")], [b"1", b"2"])


def test_a_store_that_is_kept_beyond_its_batch_is_closed(log: Changelog) -> None:
    kept: list[Any] = []
    for driver in (Driver(log), Driver(log, stores=TWO)):
        kept.clear()
        driver.run(kept.append)
        store = kept[0] if driver.runner._stores is None else kept[0]["clock"]
        for use in (lambda s: s.get(b"a"), lambda s: s.put(b"a", b"1"), lambda s: list(s.all())):
            with pytest.raises(StoreClosed):
                use(store)


def test_an_unknown_store_is_refused_and_the_nearest_is_named(log: Changelog) -> None:
    with pytest.raises(ConfigError, match="did you mean 'words'"):
        Driver(log, stores=TWO).run(lambda store: store["wrods"])


# -- a changelog that was written with other stores ----------------------------------------------------------


@pytest.mark.parametrize("renamed", ["aaa", "word", "words2", "zzz"])
def test_a_renamed_store_is_refused_and_nothing_is_committed(log: Changelog, renamed: str) -> None:
    Driver(log, stores=TWO).run(lambda store: store["words"].put("a", 1))
    commits = log.state.commits
    again = Driver(log, stores={renamed: TWO["words"], "clock": TWO["clock"]})
    with pytest.raises(ConfigError, match="belong to no store of this task"):
        again.run(lambda store: None)
    assert log.state.commits == commits


@pytest.mark.parametrize("key", [b"", b"clock", b"words", b"words\x01", b"x\0a", b"\xff"])
def test_keys_that_no_store_has_written_are_refused(log: Changelog, key: bytes) -> None:
    log.append(pa.table({"key": [b"words\0a", key], "value": [b"1", b"2"]}))
    with pytest.raises(ConfigError, match="belong to no store of this task"):
        Driver(log, stores=TWO).run(lambda store: None)


def test_a_store_can_be_added_and_one_that_was_emptied_can_be_left_out(log: Changelog) -> None:
    Driver(log, stores=TWO).run(lambda store: store["words"].put("a", 1))
    three = Driver(log, stores={**TWO, "more": Store()})
    three.run(lambda store: (store["more"].put(b"b", b"2"), store["words"].delete("a")))
    left = Driver(log, stores={"more": Store()})
    assert left.ask(lambda store: list(store["more"].all())) == [(b"b", b"2")]


# -- tasks that are refused ----------------------------------------------------------------------------------


class Plain:
    def process(self, records: Any, store: Any) -> None: ...


def _with(**attributes: Any) -> Plain:
    task = Plain()
    for name, value in attributes.items():
        setattr(task, name, value)
    return task


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: is_task(object()), r"Not a task.*\n.*process\(records, store\)"),
        (lambda: is_task(Plain), r"class instead(.*\n)*.*create an instance: Plain\(\)"),
        (lambda: TaskRunner(_with(process=3)), "process is not a method"),
        (lambda: TaskRunner(_with(process=lambda records: None)), "process has the wrong parameters"),
        (lambda: TaskRunner(_with(window=lambda: None)), "window has the wrong parameters"),
        (lambda: TaskRunner(_with(window_interval=timedelta(1))), "no method window"),
        (lambda: TaskRunner(_with(window=print, window_interval=60)), "window_interval is invalid"),
        (lambda: TaskRunner(_with(window=print, window_interval=timedelta(0))), "window_interval is invalid"),
        (lambda: TaskRunner(_with(stores={})), "`stores` of a task are invalid"),
        (lambda: TaskRunner(_with(stores=["a"])), "`stores` of a task are invalid"),
        (lambda: TaskRunner(_with(stores={"a": StringSerde()})), r"'a' is not a Store.*\n.*Store\("),
        (lambda: Store(ttl=timedelta(0)), "ttl of a store is invalid"),
        (lambda: Store(ttl=-timedelta(1)), "ttl of a store is invalid"),
        (lambda: Store(ttl=30), "ttl of a store is invalid"),  # type: ignore[arg-type]
        (lambda: Store(key=StringSerde), r"write StringSerde\(\)"),  # type: ignore[arg-type]
        (lambda: Store(value="utf-8"), "serde of a store is invalid"),  # type: ignore[arg-type]
        *[
            (lambda name=name: TaskRunner(_with(stores={name: Store()})), "name of a store is invalid")
            for name in ("", "a\0b", "A", "a b", "ä", "a/b", "x" * 65, 3, "a\n")
        ],
    ],
)
def test_a_task_that_is_not_as_it_should_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_tasks_that_are_as_they_should_be_are_taken() -> None:
    for name in ("a", "x" * 64, "0", "a.b-c_d", "."):
        TaskRunner(_with(stores={name: Store(ttl=timedelta(milliseconds=1))}))
    assert is_task(Plain())
    assert not is_task(lambda df, store: None)
