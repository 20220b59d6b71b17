"""`restore`: the exact state at a point, as a file for other tools or as a store."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result

from keyfold import Changelog, open_store, restore
from keyfold.checkpoints.cli.at import at_from
from keyfold.checkpoints.cli.group import cli
from keyfold.statestore.files import Data, Files, OpenFile
from keyfold.statestore.schema.columns import Columns
from support.changelogs import BY_HAND, STATE_3, make_hourly, rows


def run(*arguments: object, files: Files | None = None) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], obj=files)


def json_of(*arguments: object) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return make_hourly(tmp_path / "log")


def read(path: Path) -> pa.Table:
    if path.suffix == ".parquet":
        return pyarrow.parquet.read_table(path)
    return pa.ipc.open_file(path).read_all()


def sorted_rows(table: pa.Table) -> list[dict[str, Any]]:
    return sorted(table.to_pylist(), key=repr)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_restore_writes_the_state_of_raw_bytes(suffix: str, log_path: Path, tmp_path: Path) -> None:
    with Changelog.open(log_path) as log:
        log.append(pa.table({"key": [b"\xff"], "value": [b""]}))
    to = tmp_path / f"out{suffix}"
    found = json_of("restore", log_path, "--to", to)
    table = read(to)
    assert table.schema.names == ["key", "value"]
    assert sorted_rows(table) == sorted_rows(restore(log_path).to_arrow())
    assert (found["rows"], found["to"]) == (table.num_rows, str(to)) == (9, str(to))


_POINTS: list[tuple[str, int]] = [
    ("3", 3),
    ("loader:2", 3),
    ("named", 3),
    ("2013-01-01T14:00:00Z", 3),
    ("2013-01-01T14:59:59.999", 3),
    ("2013-01-01T16:30:00+02:00", 3),
    ("2013-01-02", 6),
]


@pytest.mark.parametrize(("point", "commit"), _POINTS)
def test_restore_writes_exactly_the_state_at_a_point(
    point: str, commit: int, log_path: Path, tmp_path: Path
) -> None:
    with Changelog.open(log_path) as log:
        log.anchor("named", at=3)
    done = run("restore", log_path, "--to", tmp_path / "x.arrow", "--at", point)
    assert done.exit_code == 0, done.output
    found = read(tmp_path / "x.arrow")
    assert sorted_rows(found) == sorted_rows(restore(log_path, at=commit).to_arrow())
    assert dict(zip(*(found[name].to_pylist() for name in ("key", "value")), strict=True)) == (
        STATE_3 if commit == 3 else restore(log_path).to_dict()
    )


def test_a_point_is_taken_for_what_there_is(log_path: Path) -> None:
    """An anchor's name first, so that every anchor can be named; else what the form is most like."""
    with Changelog.open(log_path) as log:
        log.anchor("loader:2", at=1)
        log.anchor("2013-01-01", at=2)
        state = log.state
    assert at_from("loader:2", state) == "loader:2"
    assert at_from("2013-01-01", state) == "2013-01-01"
    assert at_from("loader:3", state) == ("loader", 3)
    assert at_from("12", state) == 12
    assert at_from("2013-01-03T10:30", state) == datetime.datetime(
        2013, 1, 3, 10, 30, tzinfo=datetime.timezone.utc
    )
    assert at_from("unknown:3", state) == ("unknown", 3)
    assert at_from("unknown", state) == "unknown"


@pytest.mark.parametrize(
    ("point", "code", "message"),
    [
        ("2", 6, "compacted away"),
        ("2013-01-01T13:00:00Z", 6, "compacted away"),
        ("99", 2, "Commit 99 does not exist."),
        ("unknown:3", 2, "Batch 3 of app 'unknown' does not exist."),
        ("unknown", 2, "The anchor 'unknown' does not exist."),
    ],
)
def test_a_point_that_cannot_be_restored_is_refused(
    point: str, code: int, message: str, log_path: Path, tmp_path: Path
) -> None:
    run("compact", log_path)
    done = run("restore", log_path, "--to", tmp_path / "x.arrow", "--at", point)
    assert (done.exit_code, message in done.output) == (code, True), done.output
    assert not (tmp_path / "x.arrow").exists()


def test_restore_into_a_directory_makes_a_store(log_path: Path, tmp_path: Path) -> None:
    found = json_of("restore", log_path, "--to", tmp_path / "store", "--at", "3")
    store = open_store(tmp_path / "store")
    with store.all() as entries:
        values = dict(entries)
    store.close()
    assert values == STATE_3
    assert found["rows"] == len(STATE_3)


TYPED = Columns(
    {
        "type": "struct",
        "fields": [
            {"name": "k", "type": "string", "nullable": False, "metadata": {}},
            {"name": "price", "type": "decimal(10,2)", "nullable": True, "metadata": {}},
            {"name": "seen", "type": "timestamp", "nullable": True, "metadata": {}},
            {
                "name": "tags",
                "type": {"type": "array", "elementType": "long", "containsNull": True},
                "nullable": True,
            },
        ],
    },
    ("k",),
    "json",
)


@pytest.fixture
def typed(tmp_path: Path) -> Path:
    values = [b'{"price":1.50,"seen":"2013-01-31T10:00:00.000000Z","tags":[1,null]}', b"{}", None]
    with Changelog.open(tmp_path / "typed", columns=TYPED, config=BY_HAND) as log:
        log.append(pa.table({"key": ["a", "b", "c"], "value": pa.array(values, pa.binary())}))
    return tmp_path / "typed"


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_restore_writes_typed_columns(suffix: str, typed: Path, tmp_path: Path) -> None:
    run("restore", typed, "--to", tmp_path / f"x{suffix}")
    found = read(tmp_path / f"x{suffix}")
    assert found.schema.types == TYPED.arrow_schema().types
    assert sorted_rows(found) == sorted_rows(restore(typed).to_arrow())
    assert found.num_rows == 2


def test_restore_writes_csv(log_path: Path, tmp_path: Path) -> None:
    with Changelog.open(log_path) as log:
        log.append(rows(("quoted", 'a "b", c\nd'), ("empty", "")))
    run("restore", log_path, "--to", tmp_path / "x.csv")
    options = pyarrow.csv.ConvertOptions(column_types={"key": pa.binary(), "value": pa.binary()})
    parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
    found = pyarrow.csv.read_csv(tmp_path / "x.csv", convert_options=options, parse_options=parsing)
    assert sorted_rows(found) == sorted_rows(restore(log_path).to_arrow())


def test_csv_refuses_what_it_cannot_hold_and_leaves_no_file(typed: Path, tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "raw", config=BY_HAND) as log:
        log.append(pa.table({"key": [b"\xff"], "value": [b""]}))
    for path in (typed, tmp_path / "raw"):
        done = run("restore", path, "--to", tmp_path / "x.csv")
        assert done.exit_code == 2
        assert "A .csv file cannot hold this state." in done.output
        assert not (tmp_path / "x.csv").exists()


@pytest.mark.parametrize("to", ["there.parquet", "there", "state.json", "file"])
def test_restore_overwrites_nothing_and_knows_its_formats(to: str, log_path: Path, tmp_path: Path) -> None:
    (tmp_path / "there.parquet").write_bytes(b"mine")
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_bytes(b"mine")
    before = sorted(tmp_path.rglob("*"))
    done = run("restore", log_path, "--to", tmp_path / to)
    assert done.exit_code == 2
    assert "error: " in done.output
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there.parquet").read_bytes() == b"mine"


class _Full(Files):
    """A disk that is full when `path` is written."""

    def __init__(self, full: Callable[[Path], bool]) -> None:
        self._full = full

    def append(self, file: OpenFile, chunks: Any) -> None:
        if self._full(file.path):
            data: list[Data] = [memoryview(chunk).cast("B")[:1] for chunk in chunks]
            super().append(file, data)
            raise OSError(28, "No space left on device", str(file.path))
        super().append(file, chunks)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".csv"])
def test_a_file_that_could_not_be_written_whole_is_removed(
    suffix: str, log_path: Path, tmp_path: Path
) -> None:
    to = tmp_path / f"x{suffix}"
    done = run("restore", log_path, "--to", to, files=_Full(lambda path: path.parent == tmp_path))
    assert done.exit_code == 7
    assert "No space left on device" in done.output
    assert list(tmp_path.glob("*x*")) == []
