"""docs/format.md is enough to read a changelog: a reader made from it alone agrees with keyfold."""

from __future__ import annotations

import datetime as dt
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keyfold import Changelog, restore
from keyfold.checkpoints.cleaner.retention import apply_retention
from keyfold.checkpoints.log import writer
from keyfold.statestore.errors import CompactedAway
from keyfold.statestore.schema.columns import Columns
from support import golden
from support.changelogs import Clock, make_closed, make_crashed
from support.foreign_reader import ForeignReader, Refused

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
KEPT = sorted(p.parent.relative_to(GOLDEN) for p in GOLDEN.rglob("changelog.json"))
WHOLE = [name for name in KEPT if "damaged" not in str(name)]
DAMAGED = [name for name in KEPT if "damaged" in str(name)]


def check_same(path: Path) -> None:
    """Records, ends, apps, and the state at every commit and anchor."""
    foreign = ForeignReader(path)
    try:
        with Changelog.open(path, mode="r") as log:
            assert [p["end"] for p in foreign.partitions] == list(log.end_offsets().values())
            assert [p["start"] for p in foreign.partitions] == list(log.start_offsets().values())
            assert {a: c["batch"] for a, c in foreign.apps.items()} == {
                a: c.batch for a, c in log.state.apps.items()
            }
            for number in range(log.partitions):
                rows = [r for b in log.read(number) for r in b.to_pylist()]
                times = [t for b in log.read(number) for t in b.column("timestamp").cast("int64").to_pylist()]
                assert list(foreign.records(number)) == [
                    (r["offset"], t, r["key"], r["value"], r["headers"])
                    for r, t in zip(rows, times, strict=True)
                ]
            assert foreign.state() == of_keyfold(path, None)
            for commit in log.state.commits:
                ends = next(c["ends"] for c in foreign.commits if c["commit"] == commit.number)
                assert ends == list(commit.ends)
                try:
                    expected = of_keyfold(path, commit.number)
                except CompactedAway:
                    continue
                assert foreign.state(ends) == expected
            for name, anchor in log.state.anchors.items():
                assert foreign.state(foreign.anchors[name]["ends"]) == of_keyfold(path, name)
                assert foreign.anchors[name]["commit"] == anchor.commit
    finally:
        foreign.close()


def of_keyfold(path: Path, at: int | str | None) -> dict[bytes, Any]:
    return {r["key"]: r["value"] for b in restore(path, at=at).batches() for r in b.to_pylist()}


@pytest.mark.parametrize("name", WHOLE, ids=str)
def test_it_reads_every_directory_that_was_kept(tmp_path: Path, name: Path) -> None:
    check_same(Path(shutil.copytree(GOLDEN / name, tmp_path / "log")))


def test_it_reads_typed_columns_of_two_schemas(tmp_path: Path) -> None:
    foreign = ForeignReader(Path(shutil.copytree(GOLDEN / "v2-typed", tmp_path / "log")))
    values = {
        key: {**dict(zip(golden.KEYS, key, strict=True)), **value}
        for key, value in foreign.typed_state().items()
    }
    foreign.close()
    assert values == golden.TYPED_STATE
    assert len(foreign.value_columns()) == 2


def test_it_reads_a_typed_changelog_of_random_tables_and_schemas(tmp_path: Path) -> None:
    draw, (first, second) = random.Random(1), golden.columns()
    names = draw.choices(["", "a", "é", "a\0b"], k=60)
    with Changelog.open(tmp_path / "log", columns=first, partitions=2, config=golden.BY_HAND) as log:
        for n, name in enumerate(names):
            if n == 30:
                log.engine.set_columns(second)
            row = {
                **golden.A,
                "user": name,
                "day": dt.date(2013, 1, draw.randrange(1, 4)),
                "count": n,
            }
            for column in draw.sample(sorted(set(row) - set(golden.KEYS)), draw.randrange(10)):
                del row[column]
            table = pa.Table.from_pylist([row], schema=log.columns.arrow_schema() if log.columns else None)
            log.append(table.append_column("_deleted", pa.array([draw.random() < 0.2])))
            if n % 13 == 0:
                log.compact()
                check_same(log.path)
        check_same(log.path)
        log.snapshot(tmp_path / "snapshot")
    check_same(tmp_path / "log")
    check_same(tmp_path / "snapshot")


@pytest.mark.parametrize("name", DAMAGED, ids=str)
def test_it_refuses_every_damaged_directory_that_was_kept(tmp_path: Path, name: Path) -> None:
    path = Path(shutil.copytree(GOLDEN / name, tmp_path / "log"))
    with pytest.raises(Refused):
        ForeignReader(path).state()


def test_it_reads_what_a_closed_and_a_killed_writer_leave(tmp_path: Path) -> None:
    check_same(make_closed(tmp_path / "closed"))
    check_same(make_crashed(tmp_path / "crashed"))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_it_reads_random_histories(
    tmp_path: Path, codec: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_JOURNAL_BYTES", 3000)
    monkeypatch.setattr(writer, "_JOURNAL_CHECKPOINTS", 1)
    draw, clock, path = random.Random(seed), Clock(), tmp_path / "log"
    config = {
        "cleaner.threads": 0,
        "segment.bytes": 1500,
        "delete.retention.ms": 500,
        "anchors.auto": 1,
        "compression.type": codec,
        "cleanup.policy": "compact,delete",
        "retention.ms": 100_000,
        "min.cleanable.dirty.ratio": 0.99999,
    }
    with Changelog.open(path, partitions=2, config=config, clock_ms=clock) as log:
        for step in range(30):
            clock.now_ms += draw.choice([1, 300, 20_000])
            what = draw.random()
            if what < 0.65 or step < 3:
                keys = [f"k{draw.randrange(12)}" for _ in range(draw.randrange(1, 8))]
                values = [draw.choice([None, "x", "y" * 200]) for _ in keys]
                headers = [draw.choice([None, [], [{"key": "h", "value": b"1"}]]) for _ in keys]
                kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
                table = {"key": keys, "value": values, "headers": pa.array(headers, kind)}
                log.append(pa.table(table), app_id=draw.choice(["é", "b"]))
            elif what < 0.8:
                log.compact()
            elif what < 0.88:
                log.anchor(f"a{step}")
            elif what < 0.94:
                for name in log.anchors():
                    log.drop_anchor(name)
                kept = [c for c in log.state.commits if log.state.restorable(c.ends)]
                log.rollback(kept[-2:][0].number)
            else:
                log.engine.writer.seal_active()
                apply_retention(log.engine.writer)
            check_same(path)
        snapshot = tmp_path / "snapshot"
        log.snapshot(snapshot)
        check_same(snapshot)
    check_same(path)


def test_the_checksum_of_an_identity_needs_no_way_to_write_json(tmp_path: Path) -> None:
    """Names beyond ASCII and numbers such as 1e-05 are written in many ways; bytes are what they are."""
    schema = {
        "type": "struct",
        "fields": [
            {"name": name, "type": "string", "nullable": True, "metadata": {"comment": "é"}} for name in "kü"
        ],
    }
    config = {"min.cleanable.dirty.ratio": 1e-05, "cleaner.threads": 0}
    Changelog.open(tmp_path / "log", columns=Columns(schema, ("k",)), config=config).close()
    foreign = ForeignReader(tmp_path / "log")
    foreign.close()
    assert foreign.identity["config"]["min.cleanable.dirty.ratio"] == 1e-05


def test_its_mark_keeps_the_files_of_its_view(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config={"cleaner.threads": 0, "anchors.auto": 0}) as log:
        for i in range(3):
            log.append(pa.table({"key": ["a", "b"], "value": [str(i), str(i)]}))
            log.engine.writer.seal_active()
        foreign = ForeignReader(log.path)
        log.compact()
        assert foreign.state() == {b"a": b"2", b"b": b"2"}
        assert len(list(foreign.records(0))) == 6
        foreign.close()
        log.append(pa.table({"key": ["a"], "value": ["9"]}))
        log.compact()
        with pytest.raises(FileNotFoundError):
            foreign.state()


@pytest.mark.parametrize("name", ["changelog.json", "manifest/1.journal", "0/*.arrows", "0/*.index"])
def test_it_refuses_a_flipped_byte(tmp_path: Path, name: str) -> None:
    path = Path(shutil.copytree(GOLDEN / "v2-whole", tmp_path / "log"))
    file = sorted(path.glob(name))[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    with pytest.raises((Refused, json.JSONDecodeError, ValueError)):
        state_of(path)


def state_of(path: Path) -> dict[bytes, bytes]:
    foreign = ForeignReader(path)
    try:
        return foreign.state()
    finally:
        foreign.close()
