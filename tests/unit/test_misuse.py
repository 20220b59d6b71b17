"""What a user gets wrong is refused in words: what, expected, found, remedy; nothing raw, nothing changed."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pytest

from keyfold import (
    Changelog,
    ChangelogSink,
    RestoredState,
    Standby,
    TaskSink,
    open_store,
    restore,
    resume,
    resume_if_lost,
)
from keyfold.checkpoints.manifest.config import LogConfig
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import KeyfoldError
from keyfold.statestore.schema.columns import Columns
from support.changelogs import BY_HAND, rows


def field(name: str, kind: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": True, "metadata": {}}


TYPED = Columns({"type": "struct", "fields": [field("k", "long"), field("v", "long")]}, ("k",))


@dataclass
class World:
    """What misuses work on. Only misuses that must change nothing get it, so one is enough for all."""

    log: Any
    typed: Any
    reader: Any
    closed: Any
    state: Any
    root: Path
    file: Path
    foreign: Path
    snapshot: Path
    new: Path


Misuse: TypeAlias = Callable[[World], Any]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("world")
    (root / "file").write_bytes(b"text")
    (root / "foreign").mkdir()
    (root / "foreign" / "other").write_bytes(b"text")
    closed = Changelog.open(root / "closed", config=BY_HAND)
    closed.close()
    with (
        Changelog.open(root / "log", partitions=2, config=BY_HAND) as log,
        Changelog.open(root / "typed", columns=TYPED, config=BY_HAND) as typed,
    ):
        log.append(rows(("a", "1"), ("b", "2"), ("c", "3")), app_id="loader", batch_id=3)
        log.anchor("first")
        log.append(rows(("a", "4")), app_id="loader", batch_id=4)
        typed.append({"k": [1], "v": [1]})
        log.snapshot(root / "snapshot")
        with Changelog.open(root / "log", mode="r") as reader, restore(root / "log") as state:
            yield World(
                log,
                typed,
                reader,
                closed,
                state,
                root / "log",
                root / "file",
                root / "foreign",
                root / "snapshot",
                root / "new",
            )


NAN, INF = float("nan"), float("inf")
NO_TEXT: dict[str, Any] = {"None": None, "number": 7, "bytes": b"x", "list": ["x"], "dict": {}}
NO_PATH: dict[str, Any] = {"None": None, "number": 7, "list": ["x"], "dict": {}, "empty": "", "NUL": "a\0b"}
NO_INT: dict[str, Any] = {"text": "0", "float": 0.0, "NaN": NAN, "bool": True, "list": [0], "bytes": b"0"}


def each(what: str, values: dict[str, Any], use: Callable[..., Any]) -> dict[str, Misuse]:
    """One misuse for every value."""
    return {f"{what} {name}": partial(_used, use, value) for name, value in values.items()}


def _used(use: Callable[..., Any], value: Any, w: World) -> Any:
    return use(w, value)


OPEN: dict[str, Misuse] = {
    **each("open path", NO_PATH, lambda w, x: Changelog.open(x)),
    "open a file": lambda w: Changelog.open(w.file),
    "open in a file": lambda w: Changelog.open(w.file / "log"),
    "open a foreign directory": lambda w: Changelog.open(w.foreign),
    "open a snapshot to write": lambda w: Changelog.open(w.snapshot),
    "open with a name too long": lambda w: Changelog.open(w.new.with_name("x" * 300)),
    "read a file": lambda w: Changelog.open(w.file, mode="r"),
    "read a foreign directory": lambda w: Changelog.open(w.foreign, mode="r"),
    "read nothing": lambda w: Changelog.open(w.new, mode="r"),
    **each(
        "open mode",
        {"rw": "rw", "W": "W", "None": None, "rb": "rb", "number": 1, "list": ["w"], "empty": ""},
        lambda w, x: Changelog.open(w.new, mode=x),
    ),
    **each(
        "open partitions",
        {"0": 0, "-1": -1, "many": 10_001, **NO_INT, "array": np.array([1, 2])},
        lambda w, x: Changelog.open(w.new, partitions=x),
    ),
    "open other partitions": lambda w: Changelog.open(w.root, partitions=3),
    "reader with partitions": lambda w: Changelog.open(w.root, mode="r", partitions=2),
    "reader with config": lambda w: Changelog.open(w.root, mode="r", config={"segment.bytes": 1 << 20}),
    "reader that steals": lambda w: Changelog.open(w.root, mode="r", steal=True),
    **each(
        "open columns",
        {"list": ["k"], "dict": {"k": "long"}, "text": "k long", "schema": pa.schema([("k", pa.int64())])},
        lambda w, x: Changelog.open(w.new, columns=x),
    ),
    **each(
        "open config",
        {
            "list": ["a"],
            "text": "segment.bytes=1",
            "pairs": [("segment.bytes", 1)],
            "number": 1,
            "true": True,
            "LogConfig": LogConfig(),
        },
        lambda w, x: Changelog.open(w.new, config=x),
    ),
    **each(
        "open steal", {"text": "yes", "number": 2, "list": []}, lambda w, x: Changelog.open(w.new, steal=x)
    ),
}

_BAD_NUMBER: dict[str, Any] = {
    "NaN": NAN,
    "infinite": INF,
    "text": "many",
    "None": None,
    "list": [1],
    "dict": {},
    "bytes": b"1",
    "true": True,
    "negative": -7,
    "empty": "",
    "array": np.array([1, 2]),
}
_NUMBERS = (
    "segment.bytes",
    "segment.ms",
    "min.compaction.lag.ms",
    "max.compaction.lag.ms",
    "delete.retention.ms",
    "retention.ms",
    "retention.bytes",
    "cleaner.backoff.ms",
    "cleaner.threads",
    "cleaner.io.max.bytes.per.second",
    "cleaner.dedupe.buffer.size",
    "store.backlog.bytes",
    "anchors.auto",
    "snapshot.commits",
    "min.cleanable.dirty.ratio",
    "snapshot.dirty.ratio",
)


def set_to(name: Any, value: Any) -> Misuse:
    return lambda w: Changelog.open(w.new, config={name: value})


_FIELDS = [field("k", "long"), field("v", "long")]


def columns(*arguments: Any) -> Misuse:
    return lambda w: Columns(*arguments)


COLUMNS: dict[str, Misuse] = {
    **{
        f"columns of {what}": columns(schema, ("k",))
        for what, schema in {
            "None": None,
            "nothing": {},
            "names": {"k": "long"},
            "a list": _FIELDS,
            "an Arrow schema": pa.schema([("k", pa.int64())]),
            "fields without a type": {"type": "struct", "fields": [{"name": "k"}]},
            "two of one name": {"type": "struct", "fields": [*_FIELDS, *_FIELDS]},
            "an unknown type": {"type": "struct", "fields": [field("k", "int128")]},
        }.items()
    },
    **{
        f"columns with keys {keys!r}": columns({"type": "struct", "fields": _FIELDS}, keys)
        for keys in ("k", (), ("x",), ("k", "k"), (1,), None, {"k"})
    },
}

CONFIG: dict[str, Misuse] = {
    **{f"{n}={v}": set_to(n, value) for n in _NUMBERS for v, value in _BAD_NUMBER.items()},
    **{f"{n}=1.5": set_to(n, 1.5) for n in _NUMBERS if "ratio" not in n},
    **{f"{n}=2": set_to(n, 2) for n in _NUMBERS if "ratio" in n},
    **{
        f"cleanup.policy={value!r}": set_to("cleanup.policy", value)
        for value in ("", "none", None, 1, ["compact"], b"compact", True, "compact delete")
    },
    **each(
        "compression.type",
        {"gzip": "gzip", "empty": "", "None": None, "list": ["lz4"], "true": True},
        lambda w, x: Changelog.open(w.new, config={"compression.type": x}),
    ),
    **{f"snapshot.dest={v!r}": set_to("snapshot.dest", v) for v in ("a/b", None, 1, ["/x"], True)},
    **{
        f"setting {name!r}": set_to(name, 1)
        for name in ("segment.byte", "", "SEGMENT.BYTES", 1, None, ("a",), b"x")
    },
    "configure an open one": lambda w: w.log.engine.configure({"segment.bytes": NAN}),
}

APPEND: dict[str, Misuse] = {
    "append to a reader": lambda w: w.reader.append(rows(("a", "1"))),
    "append to a closed one": lambda w: w.closed.append(rows(("a", "1"))),
    "append None": lambda w: w.log.append(None),
    "append bytes to typed columns": lambda w: w.typed.append(rows(("a", "1"))),
    "append other columns": lambda w: w.typed.append({"k": [1], "other": [1]}),
    **each(
        "append app_id",
        NO_TEXT | {"empty": "", "surrogate": "\udc80"},
        lambda w, x: w.log.append(rows(("z", "1")), app_id=x),
    ),
    **each(
        "append batch_id",
        {**NO_INT, "float": 1.5, "negative": -1, "large": 2**70},
        lambda w, x: w.log.append(rows(("z", "1")), app_id="other", batch_id=x),
    ),
    "the same batch with other rows": lambda w: w.log.append(rows(("z", "1")), app_id="loader", batch_id=4),
    "a transaction of a reader": lambda w: _in(w.reader.transaction(app_id="t", batch_id=0)),
    **each("transaction app_id", NO_TEXT, lambda w, x: _in(w.log.transaction(app_id=x, batch_id=0))),
    **each(
        "transaction batch_id",
        {**NO_INT, "None": None, "float": 1.5, "negative": -1},
        lambda w, x: _in(w.log.transaction(app_id="t", batch_id=x)),
    ),
    **each(
        "transaction put key",
        {"text": "a", "None": None, "number": 1, "list": [b"a"]},
        lambda w, x: _put(w, x, b"v"),
    ),
    **each(
        "transaction put value", {"text": "a", "number": 1, "list": [b"a"]}, lambda w, x: _put(w, b"a", x)
    ),
}


def _in(context: Any) -> None:
    with context:
        pass


def _put(w: World, key: Any, value: Any) -> None:
    with w.log.transaction(app_id="t", batch_id=0) as store:
        store.put(key, value)


NO_KEY: dict[str, Any] = {
    "text": "a",
    "None": None,
    "number": 1,
    "list": [b"a"],
    "dict": {},
    "array": pa.array([b"a"]),
}

READ: dict[str, Misuse] = {
    **each("read partition", {**NO_INT, "None": None, "-1": -1, "2": 2}, lambda w, x: list(w.log.read(x))),
    **each(
        "read offset",
        {**NO_INT, "-1": -1, "beyond": 99, "large": 2**70},
        lambda w, x: list(w.log.read(0, x)),
    ),
    **each("read to", {**NO_INT, "-1": -1}, lambda w, x: list(w.log.read(0, 0, x))),
    "read to before offset": lambda w: list(w.log.read(0, 1, 0)),
    "read the closed": lambda w: list(w.closed.read(0)),
    **each("follow offset", {**NO_INT, "-1": -1}, lambda w, x: list(w.log.read(0, x, follow=True))),
    **{
        f"{name} of the {on}": misuse
        for on in ("log", "reader")
        for name, misuse in {
            **each("get", NO_KEY, lambda w, x, on=on: getattr(w, on).get(x)),
            **each("partition", NO_KEY, lambda w, x, on=on: getattr(w, on).partition(x)),
            **each("store get", NO_KEY, lambda w, x, on=on: getattr(w, on).store().get(x)),
        }.items()
    },
    "get of the closed": lambda w: w.closed.get(b"a"),
    "store of the closed": lambda w: w.closed.store(),
    **each(
        "get_all",
        {"None": None, "text": "ab", "texts": ["a"], "number": 1, "bytes": b"ab"},
        lambda w, x: w.log.store().get_all(x),
    ),
    **each(
        "reader get_all",
        {"None": None, "text": "ab", "texts": ["a"], "number": 1, "bytes": b"ab"},
        lambda w, x: w.reader.store().get_all(x),
    ),
    **each("prefix", {"text": "a", "number": 1}, lambda w, x: list(w.log.store().prefix(x))),
    **each("range", {"text": "a", "number": 1}, lambda w, x: list(w.log.store().range(x, b"z"))),
    "range to text": lambda w: list(w.log.store().range(b"a", "z")),
    "refresh the closed": lambda w: w.closed.refresh(),
    "state of the closed": lambda w: w.closed.state,
    **each("last_batch", {"None": None, "list": ["x"], "bytes": b"x"}, lambda w, x: w.log.last_batch(x)),
}

POINTS: dict[str, Any] = {
    "0": 0,
    "-1": -1,
    "99": 99,
    "float": 1.0,
    "NaN": NAN,
    "true": True,
    "bytes": b"first",
    "no anchor": "nope",
    "empty": "",
    "list": [1],
    "pair of text": ("loader", "3"),
    "pair of float": ("loader", 3.0),
    "one": ("loader",),
    "three": ("loader", 3, 4),
    "other app": ("nobody", 3),
    "later batch": ("loader", 99),
    "empty map": {},
    "one end": {0: 1},
    "text ends": {"0": 1, "1": 1},
    "float ends": {0: 1.0, 1: 1.0},
    "None ends": {0: None, 1: None},
    "ends beyond": {0: 99, 1: 99},
    "negative ends": {0: -1, 1: 0},
    "bool ends": {0: True, 1: False},
    "date": datetime.date(2013, 1, 1),
    "before all": datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc),
    "numpy ends": {0: np.float64(1), 1: 1},
    "unhashable app": (["loader"], 3),
    "mixed ends": {0: 1, "x": 1},
}

CHANGE: dict[str, Misuse] = {
    **each(
        "anchor name",
        {
            **NO_TEXT,
            "empty": "",
            "digits": "12",
            "dash": "-x",
            "line": "a\nb",
            "long": "x" * 201,
            "of resume": "resume:x",
            "surrogate": "\udc80",
        },
        lambda w, x: w.log.anchor(x),
    ),
    **each("anchor at", POINTS, lambda w, x: w.log.anchor("new", x)),
    "anchor twice": lambda w: w.log.anchor("first", 2),
    "anchor of a reader": lambda w: w.reader.anchor("new"),
    **each("drop anchor", {**NO_TEXT, "missing": "nope"}, lambda w, x: w.log.drop_anchor(x)),
    **each("rollback", {**POINTS, "None": None}, lambda w, x: w.log.rollback(x)),
    "rollback of a reader": lambda w: w.reader.rollback("first"),
    "rollback of the closed": lambda w: w.closed.rollback("first"),
    "rollback beyond an anchor": lambda w: w.typed.rollback(0),
    **each("snapshot at", POINTS, lambda w, x: w.log.snapshot(w.new, x)),
    **each(
        "snapshot to",
        NO_PATH,
        lambda w, x: w.log.snapshot(x),
    ),
    "snapshot to a file": lambda w: w.log.snapshot(w.file),
    "snapshot to a foreign directory": lambda w: w.log.snapshot(w.foreign),
    "snapshot to itself": lambda w: w.log.snapshot(w.root),
    "snapshot to a place of another": lambda w: w.typed.snapshot(w.snapshot),
    "snapshot to no file system": lambda w: w.log.snapshot("x", filesystem="s3"),
    **each("clone of", NO_PATH, lambda w, x: Changelog.clone(x, w.new)),
    "clone of a file": lambda w: Changelog.clone(w.file, w.new),
    "clone of a changelog": lambda w: Changelog.clone(w.root, w.new),
    "clone of a foreign directory": lambda w: Changelog.clone(w.foreign, w.new),
    **each("clone to", NO_PATH, lambda w, x: Changelog.clone(w.snapshot, x)),
    "clone to a file": lambda w: Changelog.clone(w.snapshot, w.file),
    "clone to a changelog": lambda w: Changelog.clone(w.snapshot, w.root),
    "clone to a foreign directory": lambda w: Changelog.clone(w.snapshot, w.foreign),
    "compact of a reader": lambda w: w.reader.compact(),
    "compact of the closed": lambda w: w.closed.compact(),
    **each(
        "pause",
        {"text": ["0"], "number": 0, "unknown": [7], "float": [0.0]},
        lambda w, x: _in(w.log.cleaning_paused(x)),
    ),
    "pin without a policy": lambda w: w.log.pin_snapshot(1),
}

STATE: dict[str, Misuse] = {
    **each("restore of", NO_PATH, lambda w, x: restore(x)),
    "restore of a file": lambda w: restore(w.file),
    "restore of nothing": lambda w: restore(w.new),
    "restore of a foreign directory": lambda w: restore(w.foreign),
    "restore of an unknown URL": lambda w: restore("nowhere://x/y"),
    **each("restore at", POINTS, lambda w, x: restore(w.root, at=x)),
    **each("restore since", POINTS, lambda w, x: restore(w.root, since=x)),
    **each(
        "restore partitions",
        {
            "empty": [],
            "unknown": [2],
            "negative": [-1],
            "text": ["0"],
            "float": [0.0],
            "number": 0,
            "word": "0",
            "none": [None],
            "true": [True],
        },
        lambda w, x: restore(w.root, partitions=x),
    ),
    **each(
        "restore keys",
        {
            "text": "a",
            "bytes": b"a",
            "texts": ["a"],
            "number": 1,
            "numbers": [1],
            "None": [None],
            "lists": [[b"a"]],
        },
        lambda w, x: restore(w.root, keys=x),
    ),
    **each(
        "restore typed keys",
        {
            "text": ["a"],
            "bytes": [b"1"],
            "None": [None],
            "two": [(1, 2)],
            "float": [1.5],
            "true": [True],
            "large": [2**70],
            "list": [[1]],
            "dict": [{"x": 1}],
        },
        lambda w, x: restore(w.root.with_name("typed"), keys=x),
    ),
    **each(
        "restore prefix",
        {"number": 1, "list": [b"a"], "surrogate": "\udc80"},
        lambda w, x: restore(w.root, prefix=x),
    ),
    "restore keys and prefix": lambda w: restore(w.root, keys=[b"a"], prefix=b"a"),
    "restore typed prefix": lambda w: restore(w.root.with_name("typed"), prefix=b"a"),
    "restore filesystem": lambda w: restore("x", filesystem="s3"),
    **each("to_changelog", NO_PATH, lambda w, x: w.state.to_changelog(x)),
    "to_changelog over a file": lambda w: w.state.to_changelog(w.file),
    "to_changelog over a changelog": lambda w: w.state.to_changelog(w.root),
    **each(
        "to_changelog partitions", {"0": 0, **NO_INT}, lambda w, x: w.state.to_changelog(w.new, partitions=x)
    ),
    **each(
        "to_changelog config",
        {"list": ["a"], "text": "x", "unknown": {"x": 1}},
        lambda w, x: w.state.to_changelog(w.new, config=x),
    ),
    **each("to_store", NO_PATH, lambda w, x: w.state.to_store(x)),
    "to_store over a file": lambda w: w.state.to_store(w.file),
    "to_store over a changelog": lambda w: w.state.to_store(w.root),
    **each("open_store", NO_PATH, lambda w, x: open_store(x)),
    "open_store of a file": lambda w: open_store(w.file),
    "open_store of a changelog": lambda w: open_store(w.root),
    **each("resume path", NO_PATH, lambda w, x: resume(x, "loader")),
    "resume of a file": lambda w: resume(w.file, "loader"),
    "resume of nothing": lambda w: resume(w.new, "loader"),
    **each("resume app", {**NO_TEXT, "unknown": "nobody", "empty": ""}, lambda w, x: resume(w.root, x)),
    **each(
        "resume checkpoint",
        {"number": 7, "empty": "", "list": [], "URL": "s3://b/x"},
        lambda w, x: resume(w.root, "loader", checkpoint=x),
    ),
    "resume checkpoint of a file": lambda w: resume(w.root, "loader", checkpoint=w.file),
    "resume_if_lost checkpoint": lambda w: resume_if_lost(w.root, "loader", checkpoint=None),  # type: ignore[arg-type]
    **each("standby", NO_PATH, lambda w, x: Standby(x)),
    "standby of a file": lambda w: Standby(w.file),
    "standby of nothing": lambda w: Standby(w.new),
    "standby of a snapshot": lambda w: Standby(w.snapshot),
    **each(
        "take over timeout",
        {"text": "1", "negative": -1, "NaN": NAN, "list": []},
        lambda w, x: _take_over(w, x),
    ),
    **each("verify", NO_PATH, lambda w, x: verify(x)),
    "verify a file": lambda w: verify(w.file),
    "verify nothing": lambda w: verify(w.new),
    "verify a foreign directory": lambda w: verify(w.foreign),
}


def _take_over(w: World, timeout: Any) -> None:
    with Standby(w.root) as standby:
        standby.take_over(timeout=timeout)


def sink(**arguments: Any) -> Misuse:
    """The sink must refuse when it is made, or it would be Spark that fails, with the first batch."""
    return lambda w: ChangelogSink(arguments.pop("path", w.new), **arguments)


def task(process: Any, **arguments: Any) -> Misuse:
    return lambda w: TaskSink(w.new, process, **arguments)


_ARGUMENTS: dict[str, list[Any]] = {
    "keys": [7, b"k", [7], [None], {"k": 1}, ["k", "k"], [""]],
    "partitions": [0, "4", 1.5, True],
    "app_id": ["", 7, b"x", ["x"], "\udc80"],
    "apply_as_deletes": [7, True, b"x", ["a"]],
    "sequence_by": [7, b"x", [7], [None]],
    "column_list": [7, b"x", [7], [None]],
    "except_column_list": [7, b"x", [7]],
    "config": [["a"], "x", 7, {"x": 1}],
    "on_reset": ["ignore", None, 7, ["append"], True],
    "placement": ["worker", None, 7, ["auto"]],
}

SINKS: dict[str, Misuse] = {
    **each("sink path", NO_PATH, lambda w, x: ChangelogSink(x)),
    **{
        f"sink {name}={value!r}": sink(**{"keys": "k", name: value})
        for name, values in _ARGUMENTS.items()
        for value in values
    },
    "sink to a file": lambda w: ChangelogSink(w.file, keys="k"),
    "sink to a foreign directory": lambda w: ChangelogSink(w.foreign, keys="k"),
    "sink with both lists": sink(keys="k", column_list="a", except_column_list="b"),
    "sink with a list without keys": sink(column_list="a"),
    "task None": task(None),
    "task text": task("process"),
    "task class": task(object),
    "task number": task(7),
    "task on_reset": task(lambda df, store: None, on_reset="x"),
    "task config": task(lambda df, store: None, config="x"),
}


def _what_counts(w: World) -> tuple[Any, ...]:
    states = [log.state for log in (w.log, w.typed)]
    return (*((s.ends, s.commits, s.apps, s.anchors) for s in states), w.log.config)


MISUSES = {**OPEN, **COLUMNS, **CONFIG, **APPEND, **READ, **CHANGE, **STATE, **SINKS}


def _closing(found: Any) -> None:
    """What was not refused must not disturb the next misuse."""
    if isinstance(found, Changelog | RestoredState | Standby | ChangelogSink | TaskSink):
        found.close()


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_is_refused_in_words_and_changes_nothing(
    name: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world.new = tmp_path / "new"
    before = _what_counts(world)
    with pytest.raises(KeyfoldError) as refused:
        _closing(MISUSES[name](world))
    error = refused.value
    assert error.what.endswith(".")
    assert error.remedy
    assert _what_counts(world) == before
    assert list(tmp_path.iterdir()) == []
    assert world.file.read_bytes() == b"text"
    assert [path.name for path in world.foreign.iterdir()] == ["other"]
