"""What a user of `Changelog` sees: offsets, idempotence, views, locks, and the messages for bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest

from keyfold import Changelog, restore, resume
from keyfold.checkpoints.manifest.identity_file import encode_fields, read_fields
from keyfold.statestore.errors import (
    BadRecord,
    BatchConflict,
    ChangelogLocked,
    ConfigError,
    Damaged,
    NotAChangelog,
    NotResumable,
    StorageFailed,
    UnsupportedFormat,
    WriterFenced,
)
from keyfold.statestore.files import LOCAL
from keyfold.statestore.keys.partitioner import partition_of
from support.faults.inject import FailAt, on

QUIET = {"cleaner.threads": 0}


class FailLater(FailAt):
    def fail_next(self) -> None:
        self._fail_n = self.count


def table(*rows: tuple[str, str | None]) -> pa.Table:
    keys = pa.array([k.encode() for k, _ in rows], pa.binary())
    values = pa.array([None if v is None else v.encode() for _, v in rows], pa.binary())
    return pa.table({"key": keys, "value": values})


def records(log: Changelog) -> list[tuple[int, int, bytes, bytes | None]]:
    return [
        (p, row["offset"], row["key"], row["value"])
        for p in range(log.partitions)
        for batch in log.read(p)
        for row in batch.to_pylist()
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_offsets_begin_at_0_and_are_dense_per_partition(path: Path) -> None:
    with Changelog.open(path, partitions=3, config=QUIET) as log:
        for i in range(5):
            log.append(table(*((f"k{i}-{j}", "v") for j in range(20))))
        for p, end in log.end_offsets().items():
            assert [o for q, o, _, _ in records(log) if q == p] == list(range(end))
        assert sum(log.end_offsets().values()) == 100


def test_a_record_is_in_the_partition_that_its_key_hashes_to(path: Path) -> None:
    with Changelog.open(path, partitions=7, config=QUIET) as log:
        log.append(table(*((f"key {j}", "v") for j in range(100))))
        assert all(p == partition_of(k, 7) == log.partition(k) for p, _, k, _ in records(log))


def test_the_order_of_rows_is_kept_within_a_partition(path: Path) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(table(*(("a", str(i)) for i in range(50))))
        assert [v for _, _, _, v in records(log)] == [str(i).encode() for i in range(50)]


def test_reading_from_any_offset_gives_the_rest(path: Path) -> None:
    with Changelog.open(path, config={**QUIET, "segment.bytes": 1024}) as log:
        for i in range(20):
            log.append(table((f"k{i}", "v" * 100), (f"l{i}", "w")))
        for offset in range(41):
            found = [o for b in log.read(0, offset) for o in b.column("offset").to_pylist()]
            assert found == list(range(offset, 40))
        assert [o for b in log.read(0, 5, 9) for o in b.column("offset").to_pylist()] == [5, 6, 7, 8]


def test_reading_outside_the_log_is_refused(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1")))
        with pytest.raises(ConfigError, match="an offset from 0 to 1"):
            log.read(0, 2)
        with pytest.raises(ConfigError, match=r"Partition -?[0-9]+ does not exist"):
            log.read(1)
        with pytest.raises(ConfigError, match="0 or more"):
            log.read(0, -1)


def test_a_batch_delivered_again_adds_nothing(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        first = log.append(table(("a", "1")), app_id="loader", batch_id=7)
        assert log.append(table(("a", "1")), app_id="loader", batch_id=7) == first
        assert (log.end_offsets(), log.last_batch("loader"), log.last_batch("other")) == ({0: 1}, 7, None)


def test_the_same_rows_in_other_chunks_are_the_same_batch(path: Path) -> None:
    whole = table(*((f"k{i}", None if i % 3 else "v" * i) for i in range(30)))
    with Changelog.open(path, config=QUIET) as log:
        log.append(whole, batch_id=1)
        log.append(pa.concat_tables([whole.slice(0, 11), whole.slice(11)]), batch_id=1)
        assert log.end_offsets() == {0: 30}
        with pytest.raises(BatchConflict, match="other rows"):
            log.append(whole.slice(0, 29), batch_id=1)
        other = whole.set_column(1, "value", pa.array([b"w"] * 30, pa.binary()))
        with pytest.raises(BatchConflict, match="other rows"):
            log.append(other, batch_id=1)


def test_an_empty_batch_is_a_commit(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(), batch_id=3)
        assert (log.last_batch("append"), log.end_offsets()) == (3, {0: 0})
    with Changelog.open(path) as log:
        assert log.last_batch("append") == 3


def test_timestamps_and_headers_are_kept(path: Path) -> None:
    headers = pa.array([[{"key": "h", "value": b"x"}], None])
    stamps = pa.array([1_000_001, 2], pa.timestamp("us"))
    rows = pa.table({"key": ["a", "b"], "value": ["1", "2"], "timestamp": stamps, "headers": headers})
    with Changelog.open(path, config=QUIET) as log:
        log.append(rows)
        batch = next(log.read(0))
        assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [1000, 0]
        assert batch.column("headers").to_pylist() == [[{"key": "h", "value": b"x"}], None]


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_every_compression_gives_the_records_back(path: Path, codec: str) -> None:
    with Changelog.open(path, partitions=2, config={**QUIET, "compression.type": codec}) as log:
        log.append(table(*((f"k{i}", "value" * 20) for i in range(500))))
        log.compact()
    assert restore(path).to_dict() == {f"k{i}".encode(): b"value" * 20 for i in range(500)}


def test_segments_can_be_opened_by_plain_arrow(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(("a", "1"), ("b", None)))
    (segment,) = (path / "0").glob("*.arrows")
    found = pa.ipc.open_stream(segment).read_all()
    assert found.select(["offset", "key", "value"]).to_pylist() == [
        {"offset": 0, "key": b"a", "value": b"1"},
        {"offset": 1, "key": b"b", "value": None},
    ]
    assert found.schema.metadata[b"keyfold.version"] == b"2"


# -- last values and transactions ------------------------------------------------------------------


def test_get_is_the_last_committed_value(path: Path) -> None:
    with Changelog.open(path, partitions=2, config=QUIET) as log:
        log.append(table(("a", "1"), ("b", "1"), ("a", "2")))
        assert (log.get(b"a"), log.get(b"b"), log.get(b"c")) == (b"2", b"1", None)
        log.append(table(("a", None)))
        assert log.get(b"a") is None
        with Changelog.open(path, mode="r") as reader:
            assert (reader.get(b"a"), reader.get(b"b")) == (None, b"1")


def test_a_transaction_reads_its_own_writes_and_commits_them_as_one_batch(path: Path) -> None:
    with Changelog.open(path, partitions=3, config=QUIET) as log:
        log.append(table(("a", "1"), ("b", "1")))
        with log.transaction(app_id="counter", batch_id=0) as store:
            store.put(b"a", str(int(store.get(b"a") or b"0") + 1).encode())
            store.delete(b"b")
            assert (store.get(b"a"), store.get(b"b")) == (b"2", None)
            assert log.get(b"a") == b"1"
        assert dict(log.store().all()) == {b"a": b"2"}
        assert log.last_batch("counter") == 0


def test_a_transaction_that_was_applied_drops_its_writes(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        for _ in range(2):
            with log.transaction(app_id="counter", batch_id=4) as store:
                store.put(b"n", str(int(store.get(b"n") or b"0") + 1).encode())
        assert (log.get(b"n"), store.applied) == (b"1", True)


def test_an_exception_in_a_transaction_commits_nothing(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as log:
        with suppress(ZeroDivisionError), log.transaction(app_id="c", batch_id=0) as store:
            store.put(b"a", b"1")
            _ = 1 / 0
        assert (log.get(b"a"), log.last_batch("c")) == (None, None)


@pytest.mark.parametrize("harm", ["missing", "damaged", "foreign"])
def test_last_values_that_cannot_be_used_are_rebuilt_unasked(path: Path, harm: str) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(*((f"k{i}", f"v{i}") for i in range(1000))))
        assert log.get(b"k7") == b"v7"
    (store,) = path.glob("store-*")
    for file in store.iterdir():
        if harm == "missing":
            file.unlink()
        elif harm == "damaged" and file.suffix in {".sst", ""}:
            file.write_bytes(b"\xff" * file.stat().st_size)
    if harm == "foreign":
        with Changelog.open(path.parent / "other", config=QUIET) as other:
            other.append(table(("x", "y")))
            other.get(b"x")
        (foreign,) = (path.parent / "other").glob("store-*")
        for file in store.iterdir():
            file.unlink()
        for file in foreign.iterdir():
            (store / file.name).write_bytes(file.read_bytes())
    with Changelog.open(path) as log:
        assert dict(log.store().all()) == {f"k{i}".encode(): f"v{i}".encode() for i in range(1000)}


# -- opening ---------------------------------------------------------------------------------------


def test_opens_of_one_process_share_the_writer(path: Path) -> None:
    with Changelog.open(path, config=QUIET) as one, Changelog.open(path.parent / "." / "log") as two:
        one.append(table(("a", "1")))
        two.append(table(("a", "2")))
        assert one.end_offsets() == two.end_offsets() == {0: 2}


def test_another_process_is_refused_and_told_the_pid(path: Path) -> None:
    code = (
        "import sys; from keyfold import Changelog\n"
        "log = Changelog.open(sys.argv[1]); print('open', flush=True); sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(ChangelogLocked, match=f"pid {other.pid}, epoch 1"):
            Changelog.open(path)
        with Changelog.open(path, steal=True) as log:
            log.append(table(("a", "1")))
        assert restore(path).to_dict() == {b"a": b"1"}
    finally:
        other.communicate(b"")


def test_a_writer_whose_changelog_was_stolen_is_fenced_and_acknowledges_nothing(path: Path) -> None:
    code = (
        "import sys, pyarrow as pa; from keyfold import Changelog\n"
        "log = Changelog.open(sys.argv[1]); print('open', flush=True); sys.stdin.readline()\n"
        "try: log.append(pa.table({'key': ['old'], 'value': ['x']}))\n"
        "except Exception as e: print(type(e).__name__, e, flush=True)\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    other.stdout.readline()
    with Changelog.open(path, steal=True) as log:
        log.append(table(("new", "1")))
        told, _ = other.communicate("\n")
        assert told.startswith("WriterFenced")
        assert "epoch 2 has taken over" in told
        log.append(table(("new", "2")))
        with Changelog.open(path, mode="r") as reader:
            assert [k for _, _, k, _ in records(reader)] == [b"new", b"new"]


def test_the_number_of_partitions_cannot_change(path: Path) -> None:
    Changelog.open(path, partitions=2).close()
    with pytest.raises(ConfigError, match=r"(?s)cannot change.*expected: 2.*found: 3"):
        Changelog.open(path, partitions=3)


@pytest.mark.parametrize("partitions", [0, -1, True, 2.5, 10_001])
def test_a_senseless_number_of_partitions_is_refused(path: Path, partitions: int) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        Changelog.open(path, partitions=partitions)
    assert not path.exists()


def test_a_path_that_is_not_a_changelog_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for mode in ("r", "w"):
        with pytest.raises(NotAChangelog):
            Changelog.open(tmp_path, mode=mode)
    with pytest.raises(NotAChangelog):
        Changelog.open(tmp_path / "notes.txt")
    with pytest.raises(NotAChangelog, match="no directory"):
        restore(tmp_path / "nothing")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_later_format_is_refused(path: Path) -> None:
    Changelog.open(path).close()
    identity = json.loads((path / "changelog.json").read_text())
    (path / "changelog.json").write_text(json.dumps({**identity, "version": 99}))
    with pytest.raises(UnsupportedFormat, match="upgrade keyfold"):
        Changelog.open(path)


@pytest.mark.parametrize("mode", ["r", "w"])
def test_an_earlier_format_is_refused_and_nothing_is_changed(path: Path, mode: Literal["r", "w"]) -> None:
    Changelog.open(path).close()
    earlier = read_fields(LOCAL, path) | {"version": 1}
    del earlier["crc32c"]
    (path / "changelog.json").write_bytes(encode_fields(earlier))
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(UnsupportedFormat) as refused:
        Changelog.open(path, mode=mode)
    assert refused.value.found == "format version 1, of an earlier version of keyfold"
    assert "append its state to a new changelog" in str(refused.value.remedy)
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_an_edited_identity_is_damage(path: Path) -> None:
    Changelog.open(path, partitions=4).close()
    text = (path / "changelog.json").read_text()
    (path / "changelog.json").write_text(text.replace('"partitions": 4', '"partitions": 5'))
    with pytest.raises(Damaged, match="crc32c"):
        Changelog.open(path)


def test_settings_are_kept_and_changed_by_opening_with_others(path: Path) -> None:
    Changelog.open(path, config={"segment.bytes": "1MiB"}).close()
    with Changelog.open(path, config={"compression.type": "lz4"}) as log:
        assert (log.config.segment_bytes, log.config.compression_type) == (1 << 20, "lz4")


def test_a_reader_sees_the_moment_of_its_opening_until_it_is_refreshed(path: Path) -> None:
    with Changelog.open(path, config={**QUIET, "anchors.auto": 0}) as log:
        log.append(table(("a", "1")))
        with Changelog.open(path, mode="r") as reader:
            log.append(table(("a", "2")))
            log.compact()
            assert [v for _, _, _, v in records(reader)] == [b"1"]
            reader.refresh()
            assert [v for _, _, _, v in records(reader)] == [b"2"]


def test_a_reader_cannot_write(path: Path) -> None:
    Changelog.open(path).close()
    with Changelog.open(path, mode="r") as reader, pytest.raises(ConfigError, match="read only"):
        reader.append(table(("a", "1")))


def test_a_closed_changelog_says_so(path: Path) -> None:
    log = Changelog.open(path)
    log.close()
    log.close()
    with pytest.raises(ConfigError, match="was closed"):
        log.append(table(("a", "1")))


# -- bad input and failures ------------------------------------------------------------------------


def test_a_null_key_is_refused_with_its_row_and_nothing_counts(path: Path) -> None:
    rows = pa.table({"key": pa.array([b"a", b"b", None], pa.binary()), "value": ["1", "2", "3"]})
    with Changelog.open(path, config=QUIET) as log:
        with pytest.raises(BadRecord, match="row 2"):
            log.append(rows)
        log.append(table(("a", "1")))
        assert log.end_offsets() == {0: 1}


def test_wrong_columns_are_named(path: Path) -> None:
    with Changelog.open(path) as log:
        with pytest.raises(BadRecord, match="found: key, val"):
            log.append(pa.table({"key": ["a"], "val": ["b"]}))
        with pytest.raises(BadRecord, match="The type of column 'value'"):
            log.append(pa.table({"key": ["a"], "value": [1]}))


@pytest.mark.parametrize("operation", ["append", "sync"])
@pytest.mark.parametrize("where", ["*.arrows", "*.journal"])
def test_a_failed_write_fences_the_writer_and_reopening_goes_on(
    path: Path, operation: str, where: str
) -> None:
    Changelog.open(path, partitions=2).close()
    files = FailLater(None, only=on(operation, path=where))
    log = Changelog.open(path, files=files, config=QUIET)
    log.append(table(("a", "1"), ("b", "1")))
    files.fail_next()
    said = (
        "nothing of this batch was committed"
        if where == "*.arrows"
        else "whether this batch was committed is unknown"
    )
    with pytest.raises(StorageFailed, match=said):
        log.append(table(("a", "2"), ("b", "2")))
    with pytest.raises(WriterFenced, match="open it again"):
        log.append(table(("a", "3")))
    log.close()
    with Changelog.open(path) as again:
        state = dict(again.store().all())
        assert state in ({b"a": b"1", b"b": b"1"}, {b"a": b"2", b"b": b"2"})
        again.append(table(("a", "4")))
        assert again.get(b"a") == b"4"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageFailed, match="cannot be opened to write"):
        Changelog.open(tmp_path / "log")


@pytest.mark.parametrize("sealed", [True, False], ids=["by its index", "by its marks"])
def test_flipping_any_byte_of_a_segment_is_noticed(path: Path, sealed: bool) -> None:
    with Changelog.open(path, config=QUIET) as log:
        log.append(table(*((f"k{i}", "v") for i in range(20))))
        if sealed:
            log.engine.writer.seal_active()
        (segment,) = (path / "0").glob("*.arrows")
        whole = segment.read_bytes()
        with Changelog.open(path, mode="r") as reader:
            assert reader.state.partitions[0].segments[0].sealed == sealed
            counted = reader.state.partitions[0].segments[0].size
            for i in range(576, counted, 5):
                segment.write_bytes(whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :])
                with pytest.raises(Damaged, match=segment.name):
                    list(reader.read(0))
        segment.write_bytes(whole)


def test_resume_of_an_unknown_app_is_refused(path: Path) -> None:
    Changelog.open(path).close()
    with pytest.raises(NotResumable, match="has not committed anything"):
        resume(path, app_id="counts")
