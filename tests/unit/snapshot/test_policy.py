"""Snapshots that are taken by themselves: when one is due, which stay, and what becomes of half ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.fs
import pytest

from keyfold import Changelog, restore
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import ConfigError, KeyfoldError, NotAChangelog, StorageFailed
from support.faults.inject import CHANGES, KillAt, Killed, PauseAt, on
from support.lifecycle import bury
from support.waiting import eventually

CONFIG = {"cleaner.threads": 0, "anchors.auto": 0, "snapshot.dirty.ratio": 1}


def append(log: Changelog, count: int = 1, keys: int = 20) -> None:
    for _ in range(count):
        number = log.state.next_commit
        log.append(pa.table({"key": [b"%d" % k for k in range(keys)], "value": [b"%030d" % number] * keys}))


def state(commit: int, keys: int = 20) -> dict[bytes, bytes]:
    return {b"%d" % k: b"%030d" % commit for k in range(keys)}


def there(dest: Path) -> list[int]:
    return sorted(int(p.name) for p in dest.iterdir())


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


@pytest.fixture
def log(tmp_path: Path, dest: Path) -> Iterator[Changelog]:
    config = CONFIG | {"snapshot.dest": str(dest), "snapshot.commits": 3}
    with Changelog.open(tmp_path / "log", partitions=2, config=config) as log:
        yield log


def run(log: Changelog) -> list[int]:
    """One look of the policy; which snapshots there are then."""
    log.engine.snapshots.run()
    assert log.snapshot_status()["failure"] == ""
    return [s.commit for s in log.snapshots()]


# -- when one is due -----------------------------------------------------------------------------------------


def test_one_is_taken_after_so_many_commits(log: Changelog, dest: Path) -> None:
    assert run(log) == []
    found = []
    for _ in range(8):
        append(log)
        found.append(run(log)[-1])
    assert found == [1, 1, 1, 4, 4, 4, 7, 7]
    assert restore(dest / "000000000007").to_dict() == state(7)
    assert log.snapshot_status() == {
        "dest": str(dest), "last_commit": 7, "commits_behind": 1, "taken": 3, "failed": 0, "failure": "",
    }  # fmt: skip


@pytest.mark.parametrize(("ratio", "commits"), [(0.5, 11), (0.8, 41), (0, 2)])
def test_one_is_taken_when_the_log_behind_the_last_is_so_large(
    log: Changelog, ratio: float, commits: int
) -> None:
    """Ten commits of the same size in the first one: it is due when u times what came since is larger."""
    log.engine.configure({"snapshot.commits": 0, "snapshot.dirty.ratio": ratio, "segment.bytes": 1 << 20})
    append(log, 10)
    assert run(log) == [10]
    more = 0
    while run(log) == [10]:
        append(log)
        more += 1
        assert more < 100
    # The index of a segment is part of a snapshot, and not of the log's bytes.
    assert commits - 2 <= more <= commits * 1.2


def test_nothing_is_taken_again_after_a_restart(log: Changelog, dest: Path) -> None:
    append(log, 2)
    run(log)
    log.close()
    made = {p: p.stat().st_mtime_ns for p in dest.rglob("*")}
    with Changelog.open(log.path) as again:
        assert run(again) == [2]
        assert again.snapshot_status()["last_commit"] == 2
        assert {p: p.stat().st_mtime_ns for p in dest.rglob("*")} == made
        append(again, 3)
        assert run(again) == [2, 5]


def test_one_is_taken_with_the_first_commit_after_a_rollback(log: Changelog, dest: Path) -> None:
    """Else what was taken back would be the newest for long."""
    append(log, 2)
    log.anchor("two")
    append(log, 1)
    run(log)
    log.rollback(to="two")
    assert run(log) == [3]
    append(log)
    assert run(log) == [3, 4]
    with Changelog.clone(dest, dest.with_name("clone")) as clone:
        assert restore(clone.path).to_dict() == state(4)


def test_another_folder_gets_its_own(log: Changelog, tmp_path: Path) -> None:
    append(log)
    run(log)
    log.engine.configure({"snapshot.dest": f"file://{tmp_path}/elsewhere"})
    assert run(log) == [1]
    assert there(tmp_path / "elsewhere") == [1]
    log.engine.configure({"snapshot.dest": ""})
    append(log, 10)
    log.engine.snapshots.look()
    assert log.engine.snapshots._thread is None
    assert log.snapshots() == []


# -- which stay ----------------------------------------------------------------------------------------------


def test_the_newest_two_stay_and_what_is_pinned(log: Changelog, dest: Path) -> None:
    append(log)
    run(log)
    assert log.pin_snapshot(1).pinned
    for _ in range(4):
        append(log, 3)
        run(log)
    assert [(s.commit, s.pinned) for s in log.snapshots()] == [(1, True), (10, False), (13, False)]
    assert there(dest) == [1, 10, 13]
    with Changelog.open(log.path, mode="r") as reader:
        assert [s.commit for s in reader.snapshots()] == [1, 10, 13]
        assert not reader.unpin_snapshot(1).pinned
    assert run(log) == [10, 13]
    assert there(dest) == [10, 13]
    assert restore(dest / "000000000010").to_dict() == state(10)
    with pytest.raises(ConfigError, match="one of 10, 13"):
        log.pin_snapshot(1)


def test_a_pin_needs_a_folder(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "plain", config=CONFIG) as plain:
        with pytest.raises(ConfigError, match=r"snapshot\.dest"):
            plain.pin_snapshot(1)


@pytest.mark.parametrize("halfway", [False, True], ids=["before", "halfway"])
def test_a_kill_at_any_operation_leaves_only_whole_ones_to_be_seen(
    tmp_path: Path, halfway: bool, soak: bool
) -> None:
    killed, n = True, 0
    while killed:
        dest, path = tmp_path / f"dest-{n}", tmp_path / f"log-{n}"
        config = CONFIG | {"snapshot.dest": str(dest), "snapshot.commits": 1}
        with Changelog.open(path, config=config) as log:
            for _ in range(2):
                append(log)
                run(log)
            append(log)
        files = KillAt(n, halfway=halfway, only=on(*CHANGES, path=f"{dest}*"))
        with suppress(Killed):
            Changelog.open(path, files=files).engine.snapshots.run()
        killed = files.dead
        bury(files)
        with Changelog.open(path) as log:
            seen = [s.commit for s in log.snapshots()]
            assert seen in ([1, 2], [1, 2, 3], [2, 3])
            for commit in seen:
                assert restore(dest / f"{commit:012d}").to_dict() == state(commit)
            with Changelog.clone(dest, tmp_path / f"clone-{n}") as clone:
                assert restore(clone.path).to_dict() == state(seen[-1])
            assert run(log) == [2, 3]
            assert there(dest) == [2, 3]
            assert verify(dest / "000000000003").damages == []
        n += 1 if soak else 3
    assert n > 15


def test_a_kill_while_one_is_removed_leaves_none_that_looks_whole(tmp_path: Path, dest: Path) -> None:
    config = CONFIG | {"snapshot.dest": str(dest), "snapshot.commits": 1}
    files = KillAt(0, halfway=True, only=on("remove_tree", path=f"{dest}*"))
    with suppress(Killed):
        # Two partitions, so that the half which goes are segments.
        log = Changelog.open(tmp_path / "log", partitions=2, config=config, files=files)
        for _ in range(3):
            append(log)
            log.engine.snapshots.run()
    assert files.dead
    bury(files)
    assert (dest / "000000000001").exists()
    with Changelog.open(tmp_path / "log", mode="r") as reader:
        assert [s.commit for s in reader.snapshots()] == [2, 3]
    with pytest.raises(NotAChangelog):
        restore(dest / "000000000001")


def test_what_is_not_its_own_is_left_alone(log: Changelog, dest: Path) -> None:
    (dest / "notes").mkdir(parents=True)
    (dest / "42").mkdir()
    for _ in range(3):
        append(log, 3)
        log.engine.snapshots.run()
    assert sorted(p.name for p in dest.iterdir()) == ["000000000006", "000000000009", "42", "notes"]


def test_two_changelogs_do_not_share_a_folder(log: Changelog, dest: Path, tmp_path: Path) -> None:
    append(log)
    run(log)
    with Changelog.open(tmp_path / "other", config=log.config.changed()) as other:
        append(other, 5)
        other.engine.snapshots.run()
        assert "snapshots of another changelog" in str(other.snapshot_status()["failure"])
        assert other.snapshot_status()["failed"] == 1
    assert there(dest) == [1]


# -- failures ------------------------------------------------------------------------------------------------


def test_a_place_that_fails_is_tried_again_later_and_shown(
    log: Changelog, dest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = log.engine.snapshots
    append(log)
    dest.write_text("a file is in the way")
    policy.run()
    rests = [policy._retry_at - time.monotonic()]
    status = log.snapshot_status()
    assert (status["failed"], status["taken"]) == (1, 0)
    assert "the snapshot failed" in caplog.text
    assert status["failure"]
    policy.look()
    assert policy._thread is None
    policy.run()
    rests.append(policy._retry_at - time.monotonic())
    assert 10 < rests[0] < 16 < 25 < rests[1] < 31
    dest.unlink()
    policy._retry_at = 0.0
    policy.look()
    eventually(lambda: log.snapshot_status()["taken"] == 1)
    eventually(lambda: log.snapshot_status()["failure"] == "")
    assert [s.commit for s in log.snapshots()] == [1]


def test_a_place_that_cannot_be_read_is_told(log: Changelog, dest: Path) -> None:
    dest.write_text("a file is in the way")
    with pytest.raises(StorageFailed):
        log.snapshots()


def test_a_writer_that_was_fenced_or_overtaken_takes_none(log: Changelog, dest: Path) -> None:
    append(log)
    (log.path / "manifest" / "99.journal").touch()
    log.engine.snapshots.run()
    assert not dest.exists()
    (log.path / "manifest" / "99.journal").unlink()
    log.engine.writer.fence("for this test")
    log.engine.snapshots.run()
    log.engine.snapshots.look()
    assert log.engine.snapshots._thread is None
    assert not dest.exists()


# -- in the background ---------------------------------------------------------------------------------------


def test_the_cleaners_thread_takes_them_beside_commits_and_passes(tmp_path: Path, dest: Path) -> None:
    config = {"cleaner.backoff.ms": 10, "snapshot.dest": str(dest), "snapshot.commits": 1}
    files = PauseAt(on("append", path=f"{dest}/*.arrows"))
    with Changelog.open(tmp_path / "log", config=config, files=files) as log:
        append(log)
        files.wait()
        append(log, 5)
        log.compact()
        assert log.snapshots() == []
        files.resume()
        eventually(lambda: [s.commit for s in log.snapshots()][-1:] == [6])
    assert restore(dest / "000000000006").to_dict() == state(6)


def test_closing_ends_one_that_is_under_way(tmp_path: Path, dest: Path) -> None:
    config = CONFIG | {"snapshot.dest": str(dest), "snapshot.commits": 1}
    files = PauseAt(on("create", path=f"{dest}/*.arrows"))
    log = Changelog.open(tmp_path / "log", config=config, files=files)
    append(log)
    log.engine.snapshots.look()
    files.wait()
    policy = log.engine.snapshots
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(log.close)
        eventually(policy._closing.is_set)
        files.resume()
        closing.result()
    assert policy._thread is not None
    assert not policy._thread.is_alive()
    assert policy.taken == 0
    assert there(dest) == [1]
    with pytest.raises(NotAChangelog):
        restore(dest / "000000000001")
    with Changelog.open(tmp_path / "log") as again:
        assert run(again) == [1]


# -- a folder of snapshots -----------------------------------------------------------------------------------


def test_a_clone_of_the_folder_is_one_of_the_newest_and_has_no_folder(
    log: Changelog, dest: Path, tmp_path: Path
) -> None:
    append(log)
    run(log)
    append(log, 3)
    run(log)
    (dest / "000000000009" / "manifest").mkdir(parents=True)
    with Changelog.clone(dest, tmp_path / "clone") as clone:
        assert restore(clone.path).to_dict() == state(4)
        assert clone.config.snapshot_dest == ""
        assert clone.config.snapshot_commits == 3
        append(clone, 10)
        clone.engine.snapshots.look()
        assert clone.engine.snapshots._thread is None
    assert [s.commit for s in log.snapshots()] == [1, 4]


def test_a_folder_of_half_ones_or_of_several_changelogs_is_refused(dest: Path, tmp_path: Path) -> None:
    (dest / "000000000009" / "manifest").mkdir(parents=True)
    with pytest.raises(NotAChangelog, match="no complete snapshot"):
        Changelog.clone(dest, tmp_path / "clone")
    for number in (1, 2):
        with Changelog.open(tmp_path / f"log-{number}", config=CONFIG) as log:
            append(log)
            log.snapshot(dest / f"{number:012d}")
    with pytest.raises(ConfigError, match="several changelogs"):
        Changelog.clone(dest, tmp_path / "clone")


def test_the_same_behind_s3(log: Changelog, s3: str, tmp_path: Path) -> None:
    dest = s3.format("kept")
    log.engine.configure({"snapshot.dest": dest, "snapshot.commits": 1})
    append(log)
    assert run(log) == [1]
    log.pin_snapshot(1)
    for _ in range(3):
        append(log)
        run(log)
    assert [(s.commit, s.pinned) for s in log.snapshots()] == [(1, True), (3, False), (4, False)]
    log.unpin_snapshot(1)
    assert run(log) == [3, 4]
    assert restore(s3.format("kept/000000000003")).to_dict() == state(3)
    with Changelog.clone(dest, tmp_path / "clone") as clone:
        assert restore(clone.path).to_dict() == state(4)
    with pytest.raises(KeyfoldError):
        restore(s3.format("kept/000000000002"))
