"""`keyfold.dataset`: the rows of a changelog for tools that choose columns and filter rows."""

from __future__ import annotations

import copy
import datetime as dt
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pad
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import keyfold
from keyfold import Changelog, ChangelogDataset, RestoredState, restore
from keyfold.statestore.errors import CompactedAway, ConfigError, Damaged, SchemaMismatch
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.segment.reader import SegmentReader
from support.changelogs import BY_HAND
from support.faults.inject import Watched
from support.folds import IN_MEMORY

CONFIG = BY_HAND | {"segment.bytes": 1400, "anchors.auto": 0}
UTC = dt.timezone.utc
KEYS = ("user", "day")


def batch(number: int) -> dict[str, list[Any]]:
    """Rows of one commit: later ones update and delete keys of earlier ones, and have a column more."""
    rows = range(number * 7, number * 7 + 20)
    table: dict[str, list[Any]] = {
        "user": [f"user {n % 13}" for n in rows],
        "day": [dt.date(2024, 1, 1 + n % 3) for n in rows],
        "page": [None if n % 5 == 0 else f"page {n % 4}" for n in rows],
        "clicks": [n % 9 for n in rows],
        "seconds": [n / 8 for n in rows],
        "tags": [[{"name": "a", "n": n}] * (n % 3) for n in rows],
        "_deleted": [n % 6 == 0 for n in rows],
    }
    return table | ({"bytes": [bytes([n % 256]) for n in rows]} if 3 <= number < 6 else {})


def add_column(log: Changelog, name: str, kind: str) -> None:
    assert log.columns is not None
    fields = [f for f in log.columns.schema_json["fields"] if f["name"] in log.columns.keys]
    fields.append({"name": name, "type": kind, "nullable": True, "metadata": {}})
    wider = Columns({"type": "struct", "fields": fields}, log.columns.keys)
    log.engine.set_columns(log.columns.accepts(wider))


HISTORIES: dict[str, list[int]] = {
    "appended": [],
    "compacted": [5],
    "compacted, then appended": [3],
    "compacted twice": [2, 4],
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Changelogs with several segments, several schemas, each codec, an anchor, and a commit as a seed."""
    found = {}
    for name, compactions in HISTORIES.items():
        found[name] = root = tmp_path_factory.mktemp("log") / "log"
        with keyfold.open(root, keys=KEYS, partitions=3, config=CONFIG) as log:
            for number in range(6):
                log.engine.configure({"compression.type": ("zstd", "none", "lz4")[number % 3]})
                if number == 3:
                    add_column(log, "bytes", "binary")
                log.append(batch(number))
                if number == 1:
                    log.anchor("second")
                if number in compactions:
                    log.compact()
        with keyfold.open(root, mode="r") as log:
            assert all(len(p.segments) > 1 for p in log.state.partitions) or compactions == [5]
    return found


def state(root: Path) -> pa.Table:
    """What the dataset has to give, from elsewhere."""
    return restore(root).to_arrow()


def changes(root: Path, ends: tuple[int, ...] | None = None) -> pa.Table:
    """Every record of the log, up to the end offsets `ends`."""
    tables = []
    with Changelog.open(root, mode="r") as log:
        assert log.columns is not None
        for partition in range(log.partitions):
            for records in log.read(partition, to=None if ends is None else ends[partition]):
                table = log.columns.decode(records["key"], records["value"])
                own = {
                    "_deleted": records["value"].is_null(),
                    "_partition": pa.array([partition] * len(records), pa.int32()),
                    "_offset": records["offset"],
                    "_timestamp": records["timestamp"].cast(pa.timestamp("us", "UTC")),
                }
                for name, column in own.items():
                    table = table.append_column(name, column)
                tables.append(table)
        return pa.concat_tables(
            [*tables, log.columns.arrow_schema().empty_table()], promote_options="default"
        )


WHOLE = {"state": state, "changes": changes}


def same_rows(one: pa.Table, other: pa.Table) -> bool:
    assert one.schema == other.schema
    return sorted(map(repr, one.to_pylist())) == sorted(map(repr, other.to_pylist()))


FILTERS: dict[str, Any] = {
    "a key": pc.field("user") == "user 3",
    "a value": pc.field("seconds") > 4,
    "a null": pc.field("page").is_null(),
    "two columns": (pc.field("day") == dt.date(2024, 1, 2)) | (pc.field("page") == "page 1"),
    "an added column": pc.field("bytes").is_valid(),
    "a number": pc.field(3) > 5,
    "nothing": pc.field("seconds") < 0,
}
PROJECTIONS: dict[str, Any] = {
    "one": ["page"],
    "a key": ["day"],
    "in another order": ["bytes", "user", "seconds"],
    "twice": ["page", "page"],
    "none": [],
    "expressions": {"x": pc.field("seconds") * 2, "user": pc.field("user")},
    "nested": ["tags"],
}


#: Each filter with some columns, each choice of columns with some filter, and all columns of all rows.
QUERIES = [
    *zip(itertools.cycle(PROJECTIONS.values()), FILTERS.values()),
    *((columns, None) for columns in PROJECTIONS.values()),
    *((None, rows) for rows in (None, *FILTERS.values())),
]


@pytest.mark.parametrize("mode", WHOLE)
@pytest.mark.parametrize("name", HISTORIES)
def test_a_query_gives_what_it_gives_on_the_whole_table(name: str, mode: Any, logs: dict[str, Path]) -> None:
    whole = WHOLE[mode](logs[name])
    with keyfold.dataset(logs[name], mode=mode) as found:
        assert found.schema == whole.schema
        for columns, rows in QUERIES:
            of_it = pad.dataset(whole)
            expected = of_it.to_table(columns=columns, filter=rows)
            assert same_rows(found.to_table(columns=columns, filter=rows), expected)
            batches = list(found.to_batches(columns=columns, filter=rows))
            assert sum(b.num_rows for b in batches) == expected.num_rows
            assert found.count_rows(filter=rows) == of_it.count_rows(filter=rows)
            if rows is not None:
                assert same_rows(found.filter(rows).to_table(columns=columns), expected)
                assert found.filter(rows).count_rows() == of_it.count_rows(filter=rows)
                short = pc.field("seconds") < 9
                both = of_it.to_table(filter=rows & short)
                assert same_rows(found.filter(rows).filter(short).to_table(), both)
                assert same_rows(found.filter(rows).to_table(filter=short), both)


def test_the_columns_of_changes_are_those_of_the_data_source(logs: dict[str, Path]) -> None:
    own = pad.dataset(changes(logs["appended"]))
    with keyfold.dataset(logs["appended"], mode="changes") as found:
        for columns in (
            ["_offset"],
            ["_partition"],
            ["_deleted"],
            ["_timestamp"],
            ["_offset", "page", "_deleted"],
        ):
            assert same_rows(found.to_table(columns=columns), own.to_table(columns=columns))
        gone = found.to_table(filter=pc.field("_deleted"))
        assert gone.num_rows > 0
        assert gone["seconds"].null_count == gone.num_rows


@pytest.mark.parametrize("at", ["second", 4, {0: 6, 1: 6, 2: 0}, None])
def test_a_dataset_is_of_one_commit(at: Any, logs: dict[str, Path]) -> None:
    root = logs["appended"]
    as_of = restore(root, at=at)
    with keyfold.dataset(root, at=at) as found:
        assert same_rows(found.to_table(), as_of.to_arrow())
        assert found.count_rows() == as_of.to_arrow().num_rows
    with keyfold.dataset(root, at=at, mode="changes") as found:
        assert same_rows(found.to_table(), changes(root, as_of.ends))
        assert found.count_rows() == sum(as_of.ends)
    with keyfold.dataset(root, at=at, partitions=[1]) as found:
        assert same_rows(found.to_table(), restore(root, at=at, partitions=[1]).to_arrow())
    with pytest.raises(CompactedAway):
        keyfold.dataset(logs["compacted"], at=4)


def test_raw_changelogs_have_key_and_value(tmp_path: Path) -> None:
    rows = {"key": [b"a", b"b", b"a", b"c"], "value": [b"1", b"2", b"3", None]}
    with Changelog.open(tmp_path / "log", config=CONFIG) as log:
        log.append(pa.table(rows))
    with keyfold.dataset(tmp_path / "log") as found:
        assert found.schema.names == ["key", "value"]
        assert same_rows(found.to_table(), restore(tmp_path / "log").to_arrow())
        assert found.to_table(columns=["value"], filter=pc.field("key") == b"a").to_pylist() == [
            {"value": b"3"}
        ]
        assert (found.count_rows(), found.count_rows(filter=pc.field("value") == b"2")) == (2, 1)
    with keyfold.dataset(tmp_path / "log", mode="changes") as found:
        assert found.to_table(columns=["key", "_deleted", "_offset"]).to_pylist() == [
            {"key": key, "_deleted": value is None, "_offset": n}
            for n, (key, value) in enumerate(zip(*rows.values(), strict=True))
        ]


@given(st.data())
@settings(max_examples=25)
def test_any_types_and_any_columns(data: st.DataObject) -> None:
    """Of values that Hypothesis chooses: every type in a value, a few in a key."""
    import tempfile

    from support.value_kinds import columns

    values = data.draw(columns().filter(len))
    keys = data.draw(st.lists(st.integers(0, 3), min_size=len(values), max_size=len(values)))
    fields = [pa.field("k", pa.int64()), *values.type]
    table = pa.Table.from_arrays([pa.array(keys), *values.flatten()], schema=pa.schema(fields))
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as scratch:
        with keyfold.open(f"{scratch}/log", keys="k", partitions=2, config=CONFIG) as log:
            try:
                log.append(table.slice(0, 0))
            except SchemaMismatch:
                reject()
            for start in range(0, len(table), 3):
                log.append(table.slice(start, 3))
        wanted = data.draw(st.lists(st.sampled_from(table.column_names), unique=True))
        for mode, whole in WHOLE.items():
            with keyfold.dataset(f"{scratch}/log", mode=mode) as found:  # type: ignore[arg-type]
                expected = pad.dataset(whole(Path(scratch) / "log"))
                assert same_rows(found.to_table(columns=wanted), expected.to_table(columns=wanted))
                rows = pc.field("k") == 1
                assert same_rows(found.to_table(wanted, filter=rows), expected.to_table(wanted, filter=rows))


# -- other tools ---------------------------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The columns that were read of segments, values without `value.`: one entry for each scan."""
    found: list[tuple[str, ...]] = []
    made = RestoredState.records

    def records(self: RestoredState, partition: int, names: Any, values: Any, **kw: Any) -> Any:
        fields = values.names if pa.types.is_struct(values) else []
        found.append((*(n for n in names if n not in ("offset", "value")), *fields))
        return made(self, partition, names, values, **kw)

    monkeypatch.setattr(RestoredState, "records", records)
    return found


def asked(query: str, rows: Any) -> list[Any]:
    """What DuckDB answers."""
    with duckdb.connect() as connection:
        return connection.register("clicks", rows).sql(query).fetchall()


def test_duckdb_reads_what_its_query_needs(logs: dict[str, Path], read: list[tuple[str, ...]]) -> None:
    whole = state(logs["appended"])
    read.clear()
    with keyfold.dataset(logs["appended"]) as clicks:
        query = "select sum(seconds), count(*) from clicks where page = 'page 1'"
        assert asked(query, clicks) == asked(query, whole)
        assert set(read) == {("key", "page", "seconds")}
        read.clear()
        query = "select user, day, max(seconds) from clicks group by all order by all"
        assert asked(query, clicks) == asked(query, whole)
        assert set(read) == {("key", "seconds")}
    with keyfold.dataset(logs["appended"], mode="changes") as clicks:
        read.clear()
        last = max(restore(logs["appended"]).ends) - 1
        assert asked("select max(_offset) from clicks", clicks) == [(last,)]
        assert set(read) == {()}


def test_polars_reads_what_its_query_needs(logs: dict[str, Path], read: list[tuple[str, ...]]) -> None:
    whole = pl.from_arrow(state(logs["appended"]))
    assert isinstance(whole, pl.DataFrame)
    read.clear()
    with keyfold.dataset(logs["appended"]) as clicks:
        for rows in (pl.lit(value=True), pl.col("seconds") > 4):
            frame = pl.scan_pyarrow_dataset(clicks).filter(rows).select(pl.col("seconds").sum())
            assert frame.collect().equals(whole.filter(rows).select(pl.col("seconds").sum()))
        assert set(read) == {("key", "seconds")}
        frames = pl.DataFrame(clicks).sort("user", "day")
        assert frames.equals(whole.sort("user", "day"))


def test_whatever_takes_an_arrow_stream_takes_a_dataset(logs: dict[str, Path]) -> None:
    with keyfold.dataset(logs["appended"]) as clicks:
        assert same_rows(pa.table(clicks), state(logs["appended"]))
        assert len(clicks.to_table(columns=["page"]).to_pandas()) == clicks.count_rows()
        assert clicks.head(3).num_rows == 3
        assert clicks.take([4, 0]).equals(clicks.to_table().take([4, 0]))


def test_a_dataset_can_be_written_by_pyarrow(logs: dict[str, Path], tmp_path: Path) -> None:
    with keyfold.dataset(logs["appended"]) as clicks:
        pad.write_dataset(clicks, tmp_path / "parquet", format="parquet")
        assert same_rows(pad.dataset(tmp_path / "parquet").to_table(), clicks.to_table())


#: What a dataset of pyarrow has, and a changelog does not.
REFUSED: dict[str, Callable[[Any], Any]] = {
    "join": lambda d: d.join(d, ["k"]),
    "join_asof": lambda d: d.join_asof(d, "k", "v", 0),
    "replace_schema": lambda d: d.replace_schema(d.schema),
    "sort_by": lambda d: d.sort_by("k"),
    "get_fragments": lambda d: [f.to_table() for f in d.get_fragments()],
    "children": lambda d: [f.to_table() for f in d.children],
    "from_dataset": lambda d: pad.Scanner.from_dataset(d).to_table(),
    "the right side of a join": lambda d: pad.dataset(pa.table({"k": [1]})).join(d, ["k"]),
    "a union": lambda d: pad.UnionDataset(d.schema, [d, d]).to_table(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_pyarrow_would_do_without_the_log_is_refused(name: str, tmp_path: Path) -> None:
    """pyarrow calls no method of a dataset there. The result would be empty, or the process would crash."""
    with keyfold.open(tmp_path / "log", keys="k", config=CONFIG) as log:
        log.append({"k": [1], "v": [1]})
    with keyfold.dataset(tmp_path / "log") as found, pytest.raises(ConfigError, match="to_table"):
        REFUSED[name](found)


def test_no_method_of_pyarrow_is_forgotten() -> None:
    """A method that a new version of pyarrow adds is looked at first."""
    known = {"partition_expression", "schema", "to_batches", "to_table", "take", "head", *REFUSED}
    known |= {"scanner", "count_rows", "filter"}
    assert {name for name in dir(pad.UnionDataset) if not name.startswith("_")} <= known


def test_a_dataset_cannot_be_copied(logs: dict[str, Path]) -> None:
    with keyfold.dataset(logs["appended"]) as found, pytest.raises(TypeError, match="other process"):
        copy.copy(found)


# -- what is read --------------------------------------------------------------------------------------------


class Maps(Watched):
    """Counts the segments that are mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.mapped: list[Path] = []

    def map(self, path: Path) -> pa.Buffer:
        self.mapped.append(path)
        return super().map(path)


def test_counting_reads_no_segment_where_the_manifest_knows(logs: dict[str, Path]) -> None:
    for name, mode in (("compacted", "state"), *((name, "changes") for name in HISTORIES)):
        files = Maps()
        with keyfold.dataset(logs[name], mode=mode, files=files) as found:  # type: ignore[arg-type]
            expected = WHOLE[mode](logs[name]).num_rows
            known = found.count_rows()
            assert known == expected
            if mode == "changes":
                assert files.mapped == []
        assert found is not None


def test_rows_come_in_the_same_order_in_each_scan(
    logs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a partition takes."""
    made = RestoredState.records
    slow: list[int] = []

    def records(self: RestoredState, partition: int, *args: Any, **kw: Any) -> Any:
        if [partition] == slow:
            time.sleep(0.1)
        return made(self, partition, *args, **kw)

    monkeypatch.setattr(RestoredState, "records", records)
    with keyfold.dataset(logs["appended"]) as found:
        first = found.to_table()
        for partition in range(3):
            slow[:] = [partition]
            assert found.to_table().equals(first)


def test_a_scan_that_stops_early_reads_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it has begun ends with it."""
    from keyfold.checkpoints.log import ahead

    monkeypatch.setattr(ahead, "AHEAD_BYTES", 1)
    with keyfold.open(tmp_path / "log", keys="k", config=BY_HAND | {"segment.bytes": 1200}) as log:
        for n in range(200):
            log.append({"k": [n], "v": ["x" * 500]})
    blocks: list[int] = []
    given_ = SegmentReader.batches

    def batches(self: SegmentReader, *args: Any, **kw: Any) -> Iterator[pa.RecordBatch]:
        for one in given_(self, *args, **kw):
            blocks.append(1)
            yield one

    monkeypatch.setattr(SegmentReader, "batches", batches)
    with keyfold.dataset(tmp_path / "log", mode="changes") as found:
        reader = found.scanner(batch_readahead=1, fragment_readahead=1, use_threads=False).to_reader()
        assert reader.read_next_batch().num_rows == 1
        assert len(blocks) < 100
        del reader
        gc.collect()


# -- the view ------------------------------------------------------------------------------------------------


def test_a_dataset_keeps_its_view_while_the_cleaner_runs(tmp_path: Path) -> None:
    root = tmp_path / "log"
    with keyfold.open(root, keys=KEYS, partitions=2, config=CONFIG) as log:
        log.append(batch(0))
        before = state(root), changes(root)
        of_state, of_log = keyfold.dataset(root), keyfold.dataset(root, mode="changes")
        scan = of_log.scanner().to_reader()
        files = set(root.glob("[01]/*.arrows"))
        for number in (1, 2, 6, 7):
            log.append(batch(number))
            log.compact()
        assert files <= set(root.glob("[01]/*.arrows"))
        assert same_rows(of_state.to_table(), before[0])
        assert same_rows(of_log.to_table(), before[1])
        assert same_rows(scan.read_all(), before[1])
        of_state.close()
        of_state.close()
        of_log.close()
        log.append(batch(8))
        log.compact()
        assert not files & set(root.glob("[01]/*.arrows"))
    for closed in (of_state, of_log):
        for use in (closed.to_table, closed.count_rows, closed.filter(pc.field("seconds") > 1).to_table):
            with pytest.raises(ConfigError, match="closed"):
                use()


def test_a_dataset_that_is_collected_releases_its_files(tmp_path: Path) -> None:
    root = tmp_path / "log"
    with keyfold.open(root, keys=KEYS, config=CONFIG) as log:
        log.append(batch(0))
    found = keyfold.dataset(root)
    assert found.to_table().num_rows > 0
    assert list((root / "readers").iterdir()) != []
    del found
    gc.collect()
    assert list((root / "readers").iterdir()) == []


def test_damage_is_told_whoever_reads(tmp_path: Path) -> None:
    root = tmp_path / "log"
    with keyfold.open(root, keys=KEYS, config=BY_HAND) as log:
        log.append(batch(0))
    (segment,) = root.glob("0/*.arrows")
    content = bytearray(segment.read_bytes())
    content[-100] ^= 1
    segment.chmod(0o644)
    segment.write_bytes(content)
    with keyfold.dataset(root) as clicks:
        with pytest.raises(Damaged, match="Committed bytes of a segment are damaged"):
            clicks.to_table(columns=["page"])
        with pytest.raises(Exception, match="Committed bytes of a segment are damaged"):
            asked("select page from clicks", clicks)
        with pytest.raises(Exception, match="Committed bytes of a segment are damaged"):
            pl.scan_pyarrow_dataset(clicks).collect()


# -- refused -------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_refused_at_once(logs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Unknown mode: 'log'"):
        keyfold.dataset(logs["appended"], mode="log")  # type: ignore[arg-type]
    with keyfold.dataset(logs["appended"]) as found:
        for names in (["nothing"], ["page", "nothing"]):
            with pytest.raises(pa.ArrowInvalid, match="nothing"):
                found.to_table(columns=names)
        with pytest.raises(pa.ArrowInvalid, match="nothing"):
            found.to_table(columns=["page"], filter=pc.field("nothing") == 1)
    with keyfold.open(tmp_path / "log", keys="k", config=CONFIG) as log:
        log.append({"k": [1], "_Offset": [1]})
    with keyfold.dataset(tmp_path / "log") as found:
        assert found.to_table().to_pylist() == [{"k": 1, "_Offset": 1}]
    with pytest.raises(ConfigError) as refused:
        keyfold.dataset(tmp_path / "log", mode="changes")
    assert refused.value.found == "_offset"
    assert list((tmp_path / "log" / "readers").iterdir()) == []


def test_a_dataset_says_what_it_is(logs: dict[str, Path]) -> None:
    with keyfold.dataset(logs["appended"], mode="changes") as found:
        assert isinstance(found, ChangelogDataset)
        assert isinstance(found, pad.Dataset)
        ends = list(restore(logs["appended"]).ends)
        assert repr(found) == f"<ChangelogDataset {str(logs['appended'])!r}, mode='changes', ends {ends}>"
