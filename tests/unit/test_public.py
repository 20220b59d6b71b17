"""What `import keyfold` offers: the whole list, and what it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import keyfold
from keyfold import Changelog, ChangelogSink, Standby, Store, TaskSink, errors, restore, resume

PUBLIC = frozenset(
    [
        "BytesSerde",
        "Changelog",
        "ChangelogDataset",
        "ChangelogSink",
        "Int64Serde",
        "JsonSerde",
        "RestoredState",
        "Resumed",
        "Standby",
        "Store",
        "StringSerde",
        "Task",
        "TaskSink",
        "__version__",
        "aggregate",
        "dataset",
        "errors",
        "initial_state",
        "kafka_stream",
        "open",
        "open_store",
        "register",
        "restore",
        "resume",
        "resume_if_lost",
    ]
)
ERRORS = frozenset(
    [
        "BadRecord",
        "BatchConflict",
        "ChangelogLocked",
        "CompactedAway",
        "ConfigError",
        "Damaged",
        "KeyfoldError",
        "NotAChangelog",
        "NotResumable",
        "SchemaMismatch",
        "StorageFailed",
        "UnsupportedFormat",
        "ViewExpired",
        "WriterFenced",
        "WrongType",
    ]
)
#: Methods of which the name says all.
PLAIN = {"close"}


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_public_names_are_these() -> None:
    assert sorted(keyfold.__all__) == sorted(PUBLIC)
    assert sorted(errors.__all__) == sorted(ERRORS)
    assert {name for name in dir(keyfold) if name in PUBLIC} == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(keyfold, name)
    assert name == "__version__" or inspect.getdoc(found)
    if inspect.isclass(found) and not name.endswith("Serde"):  # what a serde does, its protocol says
        for method, of_it in inspect.getmembers(found, inspect.isfunction):
            assert method.startswith("_") or inspect.getdoc(of_it) or method in PLAIN, f"{name}.{method}"


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_an_error_that_is_public_is_a_keyfold_error_and_says_when_it_is_raised(name: str) -> None:
    found = getattr(errors, name)
    assert issubclass(found, errors.KeyfoldError)
    assert inspect.getdoc(found)


def test_every_error_that_is_raised_on_purpose_is_public() -> None:
    from keyfold.statestore import errors as all_of_them

    made = [
        x for _, x in inspect.getmembers(all_of_them, inspect.isclass) if x.__module__ == all_of_them.__name__
    ]
    assert {x.__name__ for x in made if issubclass(x, errors.KeyfoldError)} == ERRORS


def test_to_import_keyfold_loads_nothing_else() -> None:
    done = python(
        "import sys; before = set(sys.modules); import keyfold; assert 'open' in dir(keyfold);"
        "print(*sorted(m for m in set(sys.modules) - before if '_' != m[0]))"
    )
    assert done.returncode == 0, done.stderr
    heavy = {"pyarrow", "numpy", "pyspark", "rocksdict", "crc32c", "xxhash", "click", "rich"}
    assert not heavy & set(done.stdout.split())
    assert {m for m in done.stdout.split() if m.startswith("keyfold")} == {"keyfold"}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'keyfold' has no attribute 'opne'"):
        keyfold.opne  # type: ignore[attr-defined]  # noqa: B018


def test_on_another_platform_the_import_says_that_linux_is_needed() -> None:
    done = python("import sys; sys.platform = 'darwin'; import keyfold")
    assert "ImportError: keyfold runs on Linux only, and this is darwin" in done.stderr


def test_reprs_say_where_and_how_far_and_nothing_of_the_contents(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Changelog.open(path) as log:
        commit = log.append(pa.table({"key": ["secret-key"], "value": ["secret-value"]}), app_id="words")
        assert repr(log) == f"<Changelog {str(path)!r}, mode='w', 1 partitions, 1 records, commit 1>"
        shown = [repr(log), repr(commit), repr(log.anchor("a"))]
        assert "number=1" in repr(commit)
        with restore(path) as state:
            assert repr(state) == f"<RestoredState of {str(path)!r}, ends [1]>"
            shown.append(repr(state))
        assert repr(state) == f"<RestoredState of {str(path)!r}, ends [1], closed>"
        again = resume(path, app_id="words")
        assert "number=1" in repr(again)
        again.state.close()
        with Standby(path) as standby:
            assert repr(standby).startswith(f"<Standby of {str(path)!r}, ")
            shown.append(repr(standby))
        assert repr(standby) == f"<Standby of {str(path)!r}, ended>"
        shown += [repr(again), repr(standby), repr(Store())]
    assert repr(log) == f"<Changelog {str(path)!r}, closed>"
    sinks = [ChangelogSink(tmp_path / "a", keys=["k"]), TaskSink(tmp_path / "b", lambda *_: None)]
    for sink, name in zip(sinks, ("a", "b"), strict=True):
        assert repr(sink) == f"<{type(sink).__name__} to {str(tmp_path / name)!r}>"
        sink.close()
        assert repr(sink) == f"<{type(sink).__name__} to {str(tmp_path / name)!r}, closed>"
    assert not [text for text in shown if "secret" in text or " object at 0x" in text]
