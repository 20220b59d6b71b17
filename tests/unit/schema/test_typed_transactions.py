"""Transactions on typed columns: what they take and give, and that each is committed once."""

from __future__ import annotations

import datetime as dt
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keyfold import Changelog, restore
from keyfold.statestore.errors import BadRecord, WrongType
from keyfold.statestore.schema.columns import Columns
from support.changelogs import BY_HAND
from support.key_kinds import field

COLUMNS = Columns(
    {"type": "struct", "fields": [field("u", "string"), field("n", "integer"), field("s", "string")]}, ("u",)
)


TIMES = Columns(
    {
        "type": "struct",
        "fields": [
            *COLUMNS.schema_json["fields"],
            *(field("day", "date"), field("t", "timestamp"), field("f", "float")),
            field("l", {"type": "array", "elementType": "string", "containsNull": True}),
            field("b", {"type": "array", "elementType": "integer", "containsNull": True}),
            field("d", {"type": "struct", "fields": [field("x", "string")]}),
        ],
    },
    ("u",),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Changelog.open(tmp_path / "log", columns=COLUMNS, config=BY_HAND) as log:
        log.append({"u": ["a", "b", "c"], "n": [1, 2, 3]})
    return tmp_path / "log"


def test_reads_see_the_writes_of_the_transaction_and_nobody_else_does(path: Path) -> None:
    with Changelog.open(path) as log:
        with log.transaction(app_id="t", batch_id=0) as store:
            store.put("b", {"n": 20, "s": "x"})
            store.put_all({"bb": {"n": 22}, "d": {}})
            store.delete("a")
            expected = {
                "b": {"n": 20, "s": "x"},
                "bb": {"n": 22, "s": None},
                "c": {"n": 3, "s": None},
                "d": {"n": None, "s": None},
            }
            assert store.get("a") is None
            assert list(store.all()) == list(expected.items())
            assert dict(store.range("b", "c")) == {key: expected[key] for key in ("b", "bb")}
            assert dict(store.prefix("b")) == {key: expected[key] for key in ("b", "bb")}
            assert store.get_all(["d", "a", "c"]) == [expected["d"], None, expected["c"]]
            in_arrow = store.get_all(pa.array(["b", "a"]))
            assert (in_arrow.type, in_arrow.to_pylist()) == (COLUMNS.value_type, [expected["b"], None])
            store.put_all(pa.array(["e"]), pa.array([{"n": 5}], COLUMNS.value_type))
            expected["e"] = {"n": 5, "s": None}
            assert log.get("a") == {"n": 1, "s": None}
            assert log.get("d") is None
        assert dict(log.store().all()) == expected
    assert restore(path).to_dict() == expected


#: What is put, and what it raises.
WRONG: dict[str, tuple[Any, Any, type[Exception]]] = {
    "a column that is not there": ("a", {"other": 1}, BadRecord),
    "the key column as a value": ("a", {"u": "a"}, BadRecord),
    "text for a number": ("a", {"n": "1"}, BadRecord),
    "a number for text": ("a", {"s": 1}, BadRecord),
    "a number that is too large": ("a", {"n": 1 << 31}, BadRecord),
    "a fraction": ("a", {"n": 1.5}, BadRecord),
    "a boolean for a number": ("a", {"n": True}, BadRecord),
    "bytes for text": ("a", {"s": b"x"}, BadRecord),
    "a time for a date": ("a", {"day": dt.datetime(2020, 1, 1, 1)}, BadRecord),  # noqa: DTZ001
    "a time without a zone": ("a", {"t": dt.datetime(2020, 1, 1)}, BadRecord),  # noqa: DTZ001
    "too large for a float": ("a", {"f": 1e39}, BadRecord),
    "no dict": ("a", 1, WrongType),
    "None": ("a", None, WrongType),
    "bytes": ("a", b"x", WrongType),
    "text that is no text": ("a", {"s": "\ud800"}, BadRecord),
    "a field that is not there": ("a", {"d": {"x": "1", "other": 2}}, BadRecord),
    "text for an array": ("a", {"l": "abc"}, BadRecord),
    "bytes for an array of numbers": ("a", {"b": b"abc"}, BadRecord),
    "a key of another type": (1, {"n": 1}, BadRecord),
    "a null key": (None, {"n": 1}, BadRecord),
    "a key with too many parts": (("a", "b"), {"n": 1}, BadRecord),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_at_once_and_the_rest_is_committed(what: str, path: Path) -> None:
    key, value, error = WRONG[what]
    with Changelog.open(path) as log:
        log.engine.set_columns(COLUMNS.accepts(TIMES))
        with log.transaction(app_id="t", batch_id=0) as store:
            store.put("good", {"n": 1, "f": 0.1})
            with pytest.raises(error):
                store.put(key, value)
            with pytest.raises(error):
                store.put_all([("also", {"n": 1}), (key, value)])
            assert store.get("also") is None
        assert log.get("good")["n"] == 1
        assert log.get("also") is None
        assert log.get("a")["n"] == 1


def test_a_transaction_is_committed_once_and_not_at_all_if_its_block_raises(path: Path) -> None:
    with Changelog.open(path) as log:
        for _ in range(3):
            with log.transaction(app_id="t", batch_id=7) as store:
                found = store.get("a")
                store.put("a", {"n": found["n"] + 1})
        assert log.get("a") == {"n": 2, "s": None}
        end = log.end_offsets()
        with pytest.raises(ZeroDivisionError), log.transaction(app_id="t", batch_id=8) as store:
            store.put("a", {"n": 1 // 0})
        assert log.end_offsets() == end
        with log.transaction(app_id="t", batch_id=8) as store:
            assert not store.applied
            store.delete("a")
        assert log.get("a") is None
    with Changelog.open(path) as log, log.transaction(app_id="t", batch_id=8) as store:
        assert store.applied


def test_a_column_that_is_added_during_a_transaction_does_not_harm_it(path: Path) -> None:
    with Changelog.open(path) as log:
        with log.transaction(app_id="t", batch_id=0) as store:
            store.put("a", {"n": 5})
            wider = {
                "type": "struct",
                "fields": [field("u", "string"), field("n", "long"), field("x", "date")],
            }
            log.engine.set_columns(COLUMNS.accepts(Columns(wider, ("u",))))
            store.put("b", {"n": 6})
            assert store.get("c") == {"n": 3, "s": None}
        assert log.get("a") == {"n": 5, "s": None, "x": None}
        assert log.get("b") == {"n": 6, "s": None, "x": None}
    assert restore(path).to_dict()["a"] == {"n": 5, "s": None, "x": None}


def test_a_transaction_knows_the_columns_that_were_added_while_it_waited(path: Path) -> None:
    found: list[Any] = []

    def wait_and_read() -> None:
        with Changelog.open(path) as log, log.transaction(app_id="t", batch_id=0) as store:
            found.append(store.get("a"))
            store.put("b", {"n": 6, "f": 0.5})

    with Changelog.open(path) as log:
        with log.engine.transactions:
            waiting = threading.Thread(target=wait_and_read)
            waiting.start()
            waiting.join(0.3)
            log.engine.set_columns(COLUMNS.accepts(TIMES))
            log.engine.append({"u": ["a"], "f": [1.5]}, "other", None, takes_turn=False)
        waiting.join()
        assert [one["f"] for one in found] == [1.5]
        assert log.get("b")["f"] == 0.5


def test_a_column_that_is_added_while_a_transaction_begins_does_not_harm_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Changelog.open(path) as log:
        last_values = log.engine.last_values

        def after_a_column_was_added() -> Any:
            # The store makes its rows now, with the number of the newest schema.
            log.engine.set_columns(COLUMNS.accepts(TIMES))
            return last_values()

        monkeypatch.setattr(log.engine, "last_values", after_a_column_was_added)
        with log.transaction(app_id="t", batch_id=0) as store:
            found = store.get("a")
            assert (found["n"], found["f"]) == (1, None)
            store.put("a", {"n": 2, "f": 0.5})
            assert [value["n"] for _, value in store.range("a", "c")] == [2, 2]
            assert store.get_all(pa.array(["b"])).to_pylist() == [log.get("b")]
        assert log.get("a")["f"] == 0.5
