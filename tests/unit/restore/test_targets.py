"""What a restored state becomes: a store, another changelog, a polars DataFrame."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keyfold import Changelog, RestoredState, open_store, restore, resume
from keyfold.checkpoints.restore import targets
from keyfold.checkpoints.restore.export import export
from keyfold.statestore import filenames
from keyfold.statestore.errors import (
    BatchConflict,
    ChangelogLocked,
    ConfigError,
    Damaged,
    KeyfoldError,
    NotResumable,
    StorageFailed,
)
from keyfold.statestore.files import LOCAL, Data, Files, OpenFile
from keyfold.statestore.kv.stores import ReadOnlyStore
from keyfold.statestore.rocksdb import store as lastvalues
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.segment.block import RECORD_SCHEMA
from support.changelogs import BY_HAND, rows
from support.faults.inject import FailAt, KillAt, Killed, on

SECOND = rows(*((f"k{n}", f"v{n}") for n in range(1, 500)), ("k0", None))
STATE = {b"k%d" % n: b"v%d" % n for n in range(1, 500)}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Changelog]:
    """499 keys in three partitions, one of them written twice, one deleted."""
    with Changelog.open(tmp_path / "log", partitions=3, config={**BY_HAND, "anchors.auto": 0}) as log:
        log.append(rows(("k0", "v0"), ("k7", "old")), app_id="first", batch_id=4)
        log.append(
            rows(*((f"k{n}", f"v{n}") for n in range(1, 500)), ("k0", None)), app_id="second", batch_id=9
        )
        yield log


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_STEP_ROWS", 50)


# -- a store -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_steps")
def test_a_store_has_the_state_and_opens_again(log: Changelog, tmp_path: Path) -> None:
    store = restore(log.path).to_store(tmp_path / "store")
    with store.all() as entries:
        assert dict(entries) == STATE
    store.close()
    again = open_store(tmp_path / "store")
    assert (again.get(b"k3"), again.get(b"k0")) == (b"v3", None)
    with again.prefix(b"k49") as entries:
        assert [key for key, _ in entries] == [b"k49", *(b"k49%d" % n for n in range(10))]
    again.close()


@pytest.mark.parametrize("batches", [(), (rows(("a", "1")), rows(("a", None)))], ids=["new", "deleted"])
def test_a_store_of_an_empty_state_opens_again(tmp_path: Path, batches: Sequence[pa.Table]) -> None:
    with Changelog.open(tmp_path / "log", config=BY_HAND) as log:
        for batch in batches:
            log.append(batch)
    store: ReadOnlyStore = restore(tmp_path / "log").to_store(tmp_path / "store")
    assert store.get(b"a") is None
    store.close()
    store = open_store(tmp_path / "store")
    with store.all() as entries:
        assert list(entries) == []
    store.close()


def test_a_store_of_some_keys(log: Changelog, tmp_path: Path) -> None:
    store = restore(log.path, prefix="k49").to_store(tmp_path / "store")
    with store.all() as entries:
        assert len(dict(entries)) == 11
    store.close()


@pytest.mark.parametrize("taken", ["a file", "a directory"])
def test_a_store_is_not_made_where_something_is(log: Changelog, tmp_path: Path, taken: str) -> None:
    target = tmp_path / "store"
    if taken == "a file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").touch()
    with pytest.raises(ConfigError, match="cannot be created here"):
        restore(log.path).to_store(target)
    assert (
        target.read_text() == "mine" if taken == "a file" else [p.name for p in target.iterdir()] == ["mine"]
    )


def test_a_log_that_is_damaged_leaves_no_store(log: Changelog, tmp_path: Path) -> None:
    state = restore(log.path)
    segment = next((log.path / "1").glob("*.arrows"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    with pytest.raises(Damaged):
        state.to_store(tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_store_that_cannot_be_written_says_so(log: Changelog) -> None:
    with pytest.raises(StorageFailed, match="/proc/nothing"):
        restore(log.path).to_store("/proc/nothing/store")


def test_a_store_whose_last_part_is_not_taken_over_is_none(
    log: Changelog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lastvalues, "INGEST_ROWS", 1)
    files = FailAt(0, only=on("create", path="*/load-*.tmp"))
    with pytest.raises(StorageFailed):
        restore(log.path, files=files).to_store(tmp_path / "store")
    assert files.failed == 1
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("what", ["nothing", "an empty directory", "a directory", "a file"])
def test_what_is_no_store_is_not_opened_nor_made_one(tmp_path: Path, what: str) -> None:
    target = tmp_path / "store"
    if what == "a file":
        target.touch()
    elif what != "nothing":
        target.mkdir()
        if what == "a directory":
            (target / "mine").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="Not a store that can be opened"):
        open_store(target)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_is_opened_once(log: Changelog, tmp_path: Path) -> None:
    store = restore(log.path).to_store(tmp_path / "store")
    with pytest.raises(ConfigError, match="open in this process"):
        open_store(tmp_path / "store")
    store.close()


# -- another changelog ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("partitions", [None, 1, 3, 8])
def test_a_changelog_of_another_number_of_partitions(
    log: Changelog, tmp_path: Path, partitions: int | None
) -> None:
    restore(log.path).to_changelog(tmp_path / "copy", partitions=partitions)
    assert restore(tmp_path / "copy").to_dict() == STATE
    with Changelog.open(tmp_path / "copy") as copy:
        assert copy.partitions == (partitions or 3)
        assert all(copy.get(key) == value for key, value in list(STATE.items())[::50])
        assert copy.identity.uuid != log.identity.uuid


def test_every_app_can_go_on_in_the_new_changelog(log: Changelog, tmp_path: Path) -> None:
    restore(log.path).to_changelog(tmp_path / "copy", partitions=2)
    with Changelog.open(tmp_path / "copy") as copy:
        assert (copy.last_batch("first"), copy.last_batch("second")) == (4, 9)
        ends = copy.end_offsets()
        copy.append(SECOND, app_id="second", batch_id=9)
        assert copy.end_offsets() == ends
        with pytest.raises(BatchConflict):
            copy.append(rows(("x", "y")), app_id="second", batch_id=9)
    with resume(tmp_path / "copy", "second") as found:
        assert found.commit.batch == 9
        assert found.state.to_dict() == STATE


def test_an_app_that_had_not_committed_yet_is_not_in_an_earlier_state(log: Changelog, tmp_path: Path) -> None:
    log.anchor("now")
    log.append(rows(("k1", "later")), app_id="third", batch_id=1)
    log.append(rows(("k2", "later")), app_id="second", batch_id=10)
    restore(log.path, at="now").to_changelog(tmp_path / "copy")
    assert restore(tmp_path / "copy").to_dict() == STATE
    with Changelog.open(tmp_path / "copy") as copy:
        assert copy.last_batch("third") is None
        assert copy.last_batch("second") == 9


@pytest.mark.parametrize("part", [{"keys": [b"k3"]}, {"keys": []}, {"prefix": "k4"}, {"partitions": [1]}])
def test_a_part_of_a_state_has_no_apps_so_that_no_job_takes_it_for_the_whole(
    log: Changelog, tmp_path: Path, part: dict[str, Any]
) -> None:
    expected = restore(log.path, **part).to_dict()
    restore(log.path, **part).to_changelog(tmp_path / "part")
    assert restore(tmp_path / "part").to_dict() == expected
    for app in ("first", "second"):
        with pytest.raises(NotResumable):
            resume(tmp_path / "part", app)


@pytest.mark.parametrize("whole", [{"prefix": ""}, {"partitions": [2, 0, 1]}])
def test_a_selection_of_everything_is_the_whole(
    log: Changelog, tmp_path: Path, whole: dict[str, Any]
) -> None:
    restore(log.path, **whole).to_changelog(tmp_path / "copy")
    with Changelog.open(tmp_path / "copy") as copy:
        assert (copy.last_batch("first"), copy.last_batch("second")) == (4, 9)


def test_the_folder_of_snapshots_stays_with_the_changelog_that_it_is_of(
    log: Changelog, tmp_path: Path
) -> None:
    log.engine.configure({"snapshot.dest": str(tmp_path / "kept")})
    restore(log.path).to_changelog(tmp_path / "copy")
    own = {"snapshot.dest": str(tmp_path / "own")}
    restore(log.path).to_changelog(tmp_path / "other", config=own)
    with Changelog.open(tmp_path / "copy") as copy, Changelog.open(tmp_path / "other") as other:
        assert copy.config.snapshot_dest == ""
        assert other.config.snapshot_dest == own["snapshot.dest"]


def test_settings_go_along_and_can_be_changed(log: Changelog, tmp_path: Path) -> None:
    restore(log.path).to_changelog(tmp_path / "copy", config={"segment.bytes": "1MiB"})
    with Changelog.open(tmp_path / "copy") as copy:
        assert copy.config.segment_bytes == 1 << 20
        assert copy.config.cleaner_threads == 0
    with pytest.raises(ConfigError, match=r"segment\.byte"):
        restore(log.path).to_changelog(tmp_path / "other", config={"segment.byte": 1})
    assert not (tmp_path / "other").exists()


def test_times_and_headers_go_along(tmp_path: Path) -> None:
    headers = pa.array([[{"key": "h", "value": b"1"}]], RECORD_SCHEMA.field("headers").type)
    times = pa.array([77], pa.int64())
    with Changelog.open(tmp_path / "log", config=BY_HAND) as log:
        log.append(pa.table({"key": ["a"], "value": ["1"], "timestamp": times, "headers": headers}))
    restore(tmp_path / "log").to_changelog(tmp_path / "copy", partitions=2)
    (record,) = pa.Table.from_batches(restore(tmp_path / "copy").batches()).to_pylist()
    assert record["headers"] == [{"key": "h", "value": b"1"}]
    assert record["timestamp"].microsecond == 77_000


class Full(Files):
    """A disk that is full after so many appends."""

    def __init__(self, appends: int) -> None:
        self.left = appends

    def append(self, file: OpenFile, chunks: Sequence[Data]) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device", str(file.path))
        super().append(file, chunks)


@pytest.mark.parametrize("appends", range(0, 12, 2))
def test_a_full_disk_leaves_nothing_that_could_be_taken_for_a_changelog(
    log: Changelog, tmp_path: Path, appends: int
) -> None:
    state = restore(log.path, files=Full(appends))
    with pytest.raises(StorageFailed):
        state.to_changelog(tmp_path / "deep" / "copy")
    assert not list((tmp_path / "deep").glob("*")) or not (tmp_path / "deep" / "copy").exists()
    restore(log.path).to_changelog(tmp_path / "deep" / "copy")
    assert restore(tmp_path / "deep" / "copy").to_dict() == STATE


def test_what_a_killed_restore_left_is_begun_anew(log: Changelog, tmp_path: Path) -> None:
    left = tmp_path / ".copy.restoring"
    with Changelog.open(left, partitions=3, config=BY_HAND) as unfinished:
        unfinished.append(rows(("of an earlier state", "1")))
    restore(log.path).to_changelog(tmp_path / "copy")
    assert not left.exists()
    assert restore(tmp_path / "copy").to_dict() == STATE


def test_two_restores_to_one_path(log: Changelog, tmp_path: Path) -> None:
    left = tmp_path / ".copy.restoring"
    left.mkdir()
    lock = LOCAL.lock(left / filenames.LOCK)
    assert lock is not None
    with pytest.raises(ChangelogLocked, match="Another process"):
        restore(log.path).to_changelog(tmp_path / "copy")
    LOCAL.close(lock)


def test_nothing_is_overwritten(log: Changelog, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="directory with entries"):
        restore(log.path).to_changelog(log.path)
    with pytest.raises(ConfigError, match="partitions"):
        restore(log.path).to_changelog(tmp_path / "copy", partitions=0)
    with pytest.raises(ConfigError, match="cannot be written from changes"):
        restore(log.path, since=1).to_changelog(tmp_path / "copy")


# -- from elsewhere, and in parallel ------------------------------------------------------------------------


@pytest.mark.parametrize("url", [True, False])
def test_targets_of_a_snapshot_elsewhere_are_made_here(log: Changelog, tmp_path: Path, url: bool) -> None:
    fsspec = pytest.importorskip("fsspec")
    place: dict[str, Any] = {} if url else {"filesystem": fsspec.filesystem("memory")}
    path = "memory://targets/snapshot" if url else "/targets/snapshot"
    log.snapshot(path, **place)
    before = fsspec.filesystem("memory").find("/")
    with restore(path, **place) as state:
        store = state.to_store(tmp_path / "store")
        with store.all() as entries:
            assert dict(entries) == STATE
        store.close()
        state.to_changelog(tmp_path / "copy", partitions=5)
        assert export(state, tmp_path / "out.arrow", LOCAL) == len(STATE)
    assert restore(tmp_path / "copy").to_dict() == STATE
    with resume(tmp_path / "copy", "second") as found:
        assert found.commit.batch == 9
    assert fsspec.filesystem("memory").find("/") == before
    fsspec.filesystem("memory").rm("/targets", recursive=True)


def to_file(state: RestoredState, target: Path) -> None:
    export(state, target.with_suffix(".parquet"), Full(0))


@pytest.mark.parametrize(
    "write",
    [lambda state, to: state.to_store(to), lambda state, to: state.to_changelog(to), to_file],
    ids=["store", "changelog", "file"],
)
def test_a_target_that_fails_leaves_no_thread_at_work(
    log: Changelog, tmp_path: Path, write: Callable[[RestoredState, Path], object]
) -> None:
    state = restore(log.path, files=Full(0))
    with pytest.raises((StorageFailed, OSError)):
        write(state, tmp_path / "target")
    assert [thread.name for thread in threading.enumerate() if thread.name == "keyfold-ahead"] == []


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".arrow"])
def test_a_file_has_its_name_only_when_it_is_whole(log: Changelog, tmp_path: Path, suffix: str) -> None:
    """Whichever operation fails, or is the last one of a process."""
    of_text: dict[str, Any] = {"type": "string", "nullable": True, "metadata": {}}
    fields = [{"name": "k", **of_text}, {"name": "v", **of_text}]
    columns = Columns({"type": "struct", "fields": fields}, ("k",), "json")
    with Changelog.open(tmp_path / "typed", columns=columns, config=BY_HAND) as typed:
        typed.append(rows(("a", '{"v":"1"}')))
    for n in range(30):
        for files in (FailAt(n, errno.ENOSPC), KillAt(n), KillAt(n, halfway=True)):
            to = tmp_path / f"{n}{type(files).__name__}{id(files)}" / f"x{suffix}"
            to.parent.mkdir()
            with restore(tmp_path / "typed") as state:
                refused: KeyfoldError | None = None
                try:
                    assert export(state, to, files) == 1
                except StorageFailed as e:
                    refused = e
                except Killed:
                    pass
                if refused is not None:
                    assert refused.path == str(to)
                    assert "what to do: free or repair the disk" in str(refused)
                    assert list(to.parent.glob(".*")) == []
                if to.exists():
                    again = tmp_path / f"again{n}{id(files)}{suffix}"
                    export(state, again, LOCAL)
                    assert to.read_bytes() == again.read_bytes()
                else:
                    assert export(state, to, LOCAL) == 1, "what a process has left is in nobody's way"


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".arrow"])
def test_a_file_in_a_directory_that_is_missing_says_so(log: Changelog, tmp_path: Path, suffix: str) -> None:
    with restore(log.path) as state, pytest.raises(StorageFailed, match="what to do: create the directory"):
        export(state, tmp_path / "missing" / f"x{suffix}", LOCAL)


# -- polars --------------------------------------------------------------------------------------------------


def test_polars_gets_the_same_rows(log: Changelog) -> None:
    frame = restore(log.path).to_polars()
    assert dict(frame.iter_rows()) == STATE


def test_polars_gets_typed_columns(tmp_path: Path) -> None:
    fields = [
        {"name": n, "type": t, "nullable": True, "metadata": {}}
        for n, t in (("word", "string"), ("n", "long"))
    ]
    columns = Columns({"type": "struct", "fields": fields}, ("word",), "json")
    with Changelog.open(tmp_path / "log", columns=columns, config=BY_HAND) as log:
        log.append(rows(("to", '{"n":2}')))
    frame = restore(tmp_path / "log").to_polars()
    assert frame.to_dicts() == [{"word": "to", "n": 2}]
