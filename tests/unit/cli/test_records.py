"""`dump`, `get` and `tail`: records of raw and typed changelogs, for the eye and as JSON lines."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from keyfold import Changelog
from keyfold.checkpoints.cleaner.retention import apply_retention
from keyfold.checkpoints.cli import records
from keyfold.checkpoints.cli.group import cli
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.segment.block import HEADERS_TYPE
from support import key_kinds
from support.changelogs import BY_HAND, KEYFOLD, Living, rows

BYTES = b"\xff\x00"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def lines_of(*arguments: object) -> list[dict[str, Any]]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.output.splitlines()]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Two partitions; text, bytes, a tombstone, a header, tabs."""
    table = pa.table(
        {
            "key": pa.array([b"a", b"b", BYTES, b"a", b"tab\there"], pa.binary()),
            "value": pa.array([b"1", "zwölf".encode(), b"3", None, BYTES], pa.binary()),
            "timestamp": pa.array([0, 1, 2, 1_700_000_000_123, 3], pa.timestamp("ms")),
            "headers": pa.array([None, None, [{"key": "op", "value": BYTES}], [], None], HEADERS_TYPE),
        }
    )
    with Changelog.open(tmp_path / "raw", partitions=2, config=BY_HAND) as log:
        log.append(table)
    return tmp_path / "raw"


_FIELDS = {
    "carrier": "string",
    "day": "date",
    "seen": "timestamp",
    "price": "decimal(10,2)",
    "number": "long",
    "rate": "double",
    "flag": "boolean",
    "blob": "binary",
    "tags": {"type": "array", "elementType": "integer", "containsNull": True},
    "stops": {"type": "map", "keyType": "string", "valueType": "date", "valueContainsNull": True},
    "place": {
        "type": "struct",
        "fields": [{"name": "at", "type": "timestamp_ntz", "nullable": True, "metadata": {}}],
    },
}


def columns_of(fields: dict[str, Any], *keys: str) -> Columns:
    """Columns as a sink would make them, built by hand."""
    listed = [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in fields.items()]
    return Columns({"type": "struct", "fields": listed}, keys, "json")


COLUMNS = columns_of(_FIELDS, "carrier", "day")
DAY = datetime.date(2013, 1, 31)
VALUE = (
    b'{"seen":"2013-01-31T10:00:00.000000Z","price":1.50,"number":7,"rate":0.5,"flag":true,"blob":"FF00",'
    b'"tags":[1,null],"stops":[{"key":"JFK","value":"2013-02-01"}],"place":{"at":"2013-01-31T10:00:00.000000"}}'
)
SHOWN = {
    "seen": "2013-01-31T10:00:00Z",
    "price": "1.50",
    "number": 7,
    "rate": 0.5,
    "flag": True,
    "blob": base64.b64encode(BYTES).decode(),
    "tags": [1, None],
    "stops": [{"key": "JFK", "value": "2013-02-01"}],
    "place": {"at": "2013-01-31T10:00:00"},
}


@pytest.fixture
def typed(tmp_path: Path) -> Path:
    keys = [COLUMNS.encode_key("AA", DAY), COLUMNS.encode_key("UA", DAY), COLUMNS.encode_key("DL", DAY)]
    values = [VALUE, None, b' {"rate":"NaN"}']
    with Changelog.open(tmp_path / "typed", columns=COLUMNS, config=BY_HAND) as log:
        log.append(pa.table({"key": pa.array(keys), "value": pa.array(values, pa.binary())}))
    return tmp_path / "typed"


# -- dump ----------------------------------------------------------------------------------------------------


def test_dump_in_json_loses_nothing(raw: Path) -> None:
    def bytes_of(line: dict[str, Any], name: str) -> bytes | None:
        if f"{name}_base64" in line:
            return base64.b64decode(line[f"{name}_base64"])
        found: str | None = line[name]
        return None if found is None else found.encode()

    lines = lines_of("dump", raw)
    with Changelog.open(raw, mode="r") as log:
        for number in range(2):
            table = pa.Table.from_batches(log.read(number))
            mine = [line for line in lines if line["partition"] == number]
            assert [line["offset"] for line in mine] == table["offset"].to_pylist()
            assert [bytes_of(line, "key") for line in mine] == table["key"].to_pylist()
            assert [bytes_of(line, "value") for line in mine] == table["value"].to_pylist()
            assert [line["timestamp_ms"] for line in mine] == table["timestamp"].cast(pa.int64()).to_pylist()
    (headed,) = [line for line in lines if line.get("headers")]
    assert headed["headers"] == [{"key": "op", "value_base64": base64.b64encode(BYTES).decode()}]
    assert len(lines) == 5


def test_dump_shows_text_where_it_is_text_and_else_hexadecimal_digits(raw: Path) -> None:
    lines = [line.split("\t")[2:] for line in run("dump", raw).output.splitlines()]
    assert sorted(lines) == sorted(
        [
            ["1970-01-01T00:00:00.000Z", "a", "1"],
            ["1970-01-01T00:00:00.001Z", "b", "zwölf"],
            ["1970-01-01T00:00:00.002Z", "0xff00", "3", "op=0xff00"],
            ["2023-11-14T22:13:20.123Z", "a", "(tombstone)"],
            ["1970-01-01T00:00:00.003Z", "tab\\there", "0xff00"],
        ]
    )


def test_dump_of_typed_columns_shows_their_values(typed: Path) -> None:
    first, second, third = lines_of("dump", typed)
    assert (first["key"], first["value"]) == ({"carrier": "AA", "day": "2013-01-31"}, SHOWN)
    assert (second["key"]["carrier"], second["value"]) == ("UA", None)
    assert (third["value"]["rate"], third["value"]["seen"]) == ("NaN", None)
    text = run("dump", typed).output.splitlines()
    assert text[0].split("\t")[3] == '{"carrier": "AA", "day": "2013-01-31"}'
    assert text[1].split("\t")[4] == "(tombstone)"


def test_dump_shows_records_that_are_not_of_the_columns_as_they_are(
    typed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Changelog.open(typed) as log, monkeypatch.context() as unchecked:
        unchecked.setattr(Columns, "misfit", lambda *_: None)
        log.append(rows(("not json", "neither")))
    last = lines_of("dump", typed)[-1]
    assert (last["key"], last["value"]) == ("not json", "neither")


def test_dump_takes_a_range_of_one_partition_and_a_limit(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config=BY_HAND) as log:
        for n in range(3):
            log.append(rows(*((f"{n}-{i}", "v") for i in range(2000))))

    def offsets(*options: object) -> list[int]:
        return [line["offset"] for line in lines_of("dump", tmp_path / "log", *options)]

    assert offsets() == list(range(6000))
    assert offsets("--from", 1990, "--to", 4010) == list(range(1990, 4010))
    assert offsets("--from", 1990, "-n", 1500) == list(range(1990, 3490))
    assert offsets("-p", 0, "--limit", 2000) == list(range(2000))
    assert offsets("--limit", 0) == []


def test_dump_takes_some_partitions(raw: Path) -> None:
    everything = lines_of("dump", raw)
    for number in range(2):
        mine = [line for line in everything if line["partition"] == number]
        assert lines_of("dump", raw, "-p", number) == mine != []
    assert lines_of("dump", raw, "-p", 1, "-p", 0, "-p", 1) == everything


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "1"], "--from and --to need one partition."),
        (["--to", "1"], "--from and --to need one partition."),
        (["--partition", "2"], "Partition 2 does not exist."),
        (["--partition", "-1"], "Partition -1 does not exist."),
        (["--partition", "0", "--from", "99"], "Offset 99 is beyond the log end offset"),
        (["--limit", "-1"], "Invalid value"),
    ],
)
def test_dump_refuses_what_is_not_there(raw: Path, options: list[str], message: str) -> None:
    done = run("dump", raw, *options)
    assert done.exit_code == 2
    assert message in done.output


def test_dump_below_the_start_of_the_log_says_where_it_begins(tmp_path: Path) -> None:
    config = {**BY_HAND, "cleanup.policy": "delete", "retention.bytes": 0}
    with Changelog.open(tmp_path / "log", config=config) as log:
        for n in range(2):
            log.append(rows((f"{n}", "v")))
            log.engine.writer.seal_active()
        apply_retention(log.engine.writer)
        log.append(rows(("2", "v")))
    done = run("dump", tmp_path / "log", "--from", "0")
    assert done.exit_code == 6
    assert "expected: an offset from 2 to 3" in done.output
    assert [line["offset"] for line in lines_of("dump", tmp_path / "log")] == [2]


# -- get -----------------------------------------------------------------------------------------------------


def test_get_prints_the_last_value(raw: Path) -> None:
    assert run("get", raw, "b").output == "zwölf\n"
    assert run("get", raw, "tab\there").output == "0xff00\n"
    assert run("get", raw, "ff00", "--hex").output == run("get", raw, "0xFF00", "--hex").output == "3\n"
    (found,) = lines_of("get", raw, "b")
    with Changelog.open(raw, mode="r") as log:
        assert found == {"partition": log.partition(b"b"), "key": "b", "value": "zwölf"}


@pytest.mark.parametrize("key", ["a", "never written"])
def test_get_of_a_deleted_or_unknown_key_exits_with_1(raw: Path, key: str) -> None:
    done = run("get", raw, key)
    assert (done.exit_code, done.output) == (1, "the key has no value\n")
    done = run("get", raw, key, "--json")
    assert done.exit_code == 1
    assert json.loads(done.output)["value"] is None


def test_get_takes_one_part_per_key_column(typed: Path) -> None:
    assert json.loads(run("get", typed, "AA", "2013-01-31").output) == SHOWN
    (found,) = lines_of("get", typed, "AA", "2013-01-31")
    assert (found["key"], found["value"]) == ({"carrier": "AA", "day": "2013-01-31"}, SHOWN)
    assert run("get", typed, "UA", "2013-01-31").exit_code == 1


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "zwölf", "zwölf"),
        ("long", "-7", -7),
        ("boolean", "true", True),
        ("double", "1.5", 1.5),
        ("double", "-Infinity", float("-inf")),
        ("decimal(10,2)", "1.50", decimal.Decimal("1.50")),
        ("date", "2013-01-31", DAY),
        (
            "timestamp",
            "2013-01-31T10:00:00Z",
            datetime.datetime(2013, 1, 31, 10, tzinfo=datetime.timezone.utc),
        ),
        (
            "timestamp",
            "2013-01-31T12:00+02:00",
            datetime.datetime(2013, 1, 31, 10, tzinfo=datetime.timezone.utc),
        ),
        ("timestamp", "2013-01-31", datetime.datetime(2013, 1, 31, tzinfo=datetime.timezone.utc)),
        ("timestamp_ntz", "2013-01-31T10:00", datetime.datetime(2013, 1, 31, 10)),  # noqa: DTZ001
        ("binary", "text", b"text"),
        ({"type": "array", "elementType": "long", "containsNull": True}, "[1,null]", [1, None]),
    ],
)
def test_a_part_of_a_key_is_read_as_its_columns_type(
    kind: Any, text: str, value: object, tmp_path: Path
) -> None:
    columns = columns_of({"k": kind, "v": "long"}, "k")
    with Changelog.open(tmp_path / "log", columns=columns, config=BY_HAND) as log:
        log.append(pa.table({"key": [columns.encode_key(value)], "value": [b'{"v":1}']}))
    done = run("get", tmp_path / "log", "--", text)
    assert json.loads(done.output) == {"v": 1}


@given(st.data())
def test_get_takes_every_key_as_dump_shows_it(data: st.DataObject) -> None:
    kind = data.draw(key_kinds.KINDS.filter(lambda kind: kind.json != "binary"))  # which is shown in base64
    columns = columns_of({"k": kind.json, "v": "long"}, "k")
    key = columns.encode_key({"k": data.draw(kind.values)})
    batch = pa.record_batch([pa.array([key]), pa.array([b"{}"])], names=["key", "value"])
    shown = records.contents(batch, columns)[0]["key"]["k"]
    text = shown if isinstance(shown, str) else json.dumps(shown)
    assert records._key(columns, (text,), False) == key


def test_a_binary_key_column_can_be_written_in_hexadecimal_digits(tmp_path: Path) -> None:
    columns = columns_of({"k": "binary", "v": "long"}, "k")
    with Changelog.open(tmp_path / "log", columns=columns, config=BY_HAND) as log:
        log.append(pa.table({"key": [BYTES], "value": [b'{"v":1}']}))
    (found,) = lines_of("get", tmp_path / "log", "ff00", "--hex")
    assert found == {"partition": 0, "key": {"k": base64.b64encode(BYTES).decode()}, "value": {"v": 1}}


@pytest.mark.parametrize(
    "parts", [["AA"], ["AA", "2013-01-31", "x"], ["AA", "yesterday"], ["AA", "31.1.2013"]]
)
def test_get_refuses_a_key_of_another_form(typed: Path, parts: list[str]) -> None:
    done = run("get", typed, *parts)
    assert done.exit_code == 2
    assert "error: " in done.output
    assert "yesterday" not in done.output


def test_get_refuses_digits_that_are_none(raw: Path) -> None:
    done = run("get", raw, "xyz", "--hex")
    assert done.exit_code == 2
    assert "hexadecimal digits" in done.output


# -- tail ----------------------------------------------------------------------------------------------------


def test_tail_prints_the_last_records_of_each_partition(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", partitions=2, config=BY_HAND) as log:
        for n in range(5):
            log.append(rows(*((f"{n}-{i}", "v") for i in range(20))))
    everything = lines_of("dump", tmp_path / "log")
    parts = [[line for line in everything if line["partition"] == number] for number in range(2)]
    assert lines_of("tail", tmp_path / "log") == parts[0][-10:] + parts[1][-10:]
    assert lines_of("tail", tmp_path / "log", "-n", 3, "-p", 1) == parts[1][-3:]
    assert lines_of("tail", tmp_path / "log", "-n", 1000) == everything
    assert lines_of("tail", tmp_path / "log", "-n", 0) == []


def test_tail_finds_its_records_behind_gaps_of_the_cleaner(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config={**BY_HAND, "anchors.auto": 0}) as log:
        log.append(rows(*((f"{i}", "v") for i in range(50))))
        for n in range(50):
            log.append(rows(("same", f"{n}")))
        log.compact()
    assert [line["key"] for line in lines_of("tail", tmp_path / "log", "-n", 3)] == ["48", "49", "same"]


class Following:
    """`keyfold tail --follow --json` in another process."""

    def __init__(self, path: Path, *options: str) -> None:
        words = [KEYFOLD, "tail", str(path), "--follow", "--json", *options]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def stop(self) -> None:
        """It does nothing more until `go_on`."""
        self._process.send_signal(signal.SIGSTOP)
        while psutil.Process(self._process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> tuple[int, str]:
        """The exit code and what was said, of a command that ends by itself."""
        _, said = self._process.communicate(timeout=60)
        return self._process.returncode, said

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def test_tail_follows_a_living_writer_without_a_gap(tmp_path: Path) -> None:
    with Living(tmp_path / "log") as living:
        living.append("k", "before")
        with Following(living.path) as following:
            assert following.line()["value"] == "before"
            for n in range(20):
                living.append("k", f"{n}")
            assert [following.line()["value"] for _ in range(20)] == [f"{n}" for n in range(20)]
            living.append("other", "last")
            assert following.line()["key"] == "other"


def test_tail_never_skips_a_delete_in_silence(tmp_path: Path) -> None:
    """The tombstone is written and dropped between two looks: the follower is stopped meanwhile."""
    config = {**BY_HAND, "delete.retention.ms": 0, "anchors.auto": 0}
    with Changelog.open(tmp_path / "log", config=config) as log:
        log.append(rows(("a", "1")))
        with Following(tmp_path / "log") as following:
            assert following.line()["value"] == "1"
            following.stop()
            log.append(rows(("a", None), ("b", "1")))
            log.compact()
            log.append(rows(("c", "1")))
            log.compact()
            assert log.state.partitions[0].dropped_tombstone == 1
            following.go_on()
            code, said = following.end()
    assert code == 6
    assert "The cleaner has dropped a delete that was not yet printed." in said
