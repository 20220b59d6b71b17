"""Snapshots: self-contained, exact, never half, in a folder or behind S3's protocol; and clones of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.fs
import pytest
from click.testing import CliRunner, Result

from keyfold import Changelog, restore, resume
from keyfold.checkpoints.cli.group import cli
from keyfold.checkpoints.log.writer import Batch
from keyfold.checkpoints.snapshot.file_list import read_list, write_list
from keyfold.checkpoints.snapshot.snapshot import Location, take
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import CompactedAway, ConfigError, Damaged, KeyfoldError, NotAChangelog
from keyfold.statestore.files import LOCAL
from support.changelogs import flip
from support.faults.inject import FailAt, KillAt, Killed, changes
from support.lifecycle import bury

CONFIG = {"cleaner.threads": 0, "anchors.auto": 0, "segment.bytes": 4096}


def append(log: Changelog, keys: range, value: bytes) -> None:
    log.append(pa.table({"key": [b"%d" % k for k in keys], "value": [value] * len(keys)}))


def state(keys: range, value: bytes) -> dict[bytes, bytes]:
    return {b"%d" % k: value for k in keys}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Changelog]:
    with Changelog.open(tmp_path / "log", partitions=2, config=CONFIG) as log:
        append(log, range(50), b"1" * 50)
        append(log, range(20), b"2" * 50)
        yield log


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "snapshot"


def test_it_holds_the_state_of_the_last_commit_without_the_changelog(log: Changelog, to: Path) -> None:
    expected = state(range(50), b"1" * 50) | state(range(20), b"2" * 50)
    done = log.snapshot(to)
    assert done.commit == 2
    log.close()
    shutil.rmtree(log.path)
    assert restore(to).to_dict() == expected
    assert verify(to).damages == []
    with Changelog.open(to, mode="r") as reader:
        assert sum(b.num_rows for p in range(2) for b in reader.read(p)) == 70


def test_an_earlier_commit_even_in_the_middle_of_a_segment(log: Changelog, to: Path) -> None:
    log.anchor("keep", at=1)
    append(log, range(50), b"3")
    log.compact()
    done = log.snapshot(to, at="keep")
    assert done.commit == 1
    assert restore(to).to_dict() == state(range(50), b"1" * 50)
    assert verify(to).damages == []
    with pytest.raises(CompactedAway):
        log.snapshot(to, at=2)
    assert restore(to).to_dict() == state(range(50), b"1" * 50)


def test_what_is_there_is_not_written_again_and_what_is_not_needed_goes(log: Changelog, to: Path) -> None:
    first = log.snapshot(to)
    append(log, range(50, 60), b"3")
    made = {f: f.stat().st_mtime_ns for f in to.glob("*/*.arrows")}
    second = log.snapshot(to)
    assert second.bytes_written < second.bytes / 2
    assert all(f.stat().st_mtime_ns == at for f, at in made.items())
    assert set(first.files) < set(second.files)
    again = log.snapshot(to)
    assert again.bytes_written == 0
    log.compact()
    third = log.snapshot(to)
    on_disk = {str(f.relative_to(to)) for p in "01" for f in (to / p).iterdir()}
    assert on_disk == set(third.files)
    assert len(list((to / "manifest").glob("*.head"))) == 1
    assert restore(to).to_dict() == restore(log.path).to_dict()


@pytest.mark.parametrize("cut", [False, True], ids=["missing", "cut"])
def test_what_an_earlier_snapshot_has_lost_is_written_again(log: Changelog, to: Path, cut: bool) -> None:
    log.snapshot(to)
    path = next(to.glob("0/*.arrows"))
    if cut:
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    assert log.snapshot(to).bytes_written > 0
    assert verify(to).damages == []
    assert restore(to).to_dict() == restore(log.path).to_dict()


def test_its_list_has_size_rows_and_sha256_of_every_file(log: Changelog, to: Path) -> None:

    done = log.snapshot(to)
    (listed,) = (to / "manifest").glob("*.files")
    document = json.loads(listed.read_text())
    assert document["commit"] == 2
    assert set(document["files"]) == set(done.files)
    for path, file in document["files"].items():
        data = (to / path).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert sum(f["records"] for p, f in document["files"].items() if p.endswith(".arrows")) == 70


def _list_of(snapshot: Path) -> Path:
    (listed,) = (snapshot / "manifest").glob("*.files")
    return listed


def test_each_byte_of_its_list_is_checked_by_verify_and_by_a_clone(
    log: Changelog, to: Path, tmp_path: Path
) -> None:
    log.snapshot(to)
    state, listed = restore(to).to_dict(), _list_of(to)
    whole = listed.read_bytes()
    for position in range(len(whole)):
        flip(listed, position)
        (damage,) = verify(to).damages
        assert (damage.path, damage.position) == (listed, f"bytes 0 to {len(whole)}"), position
        if position % 97 == 0 or position >= len(whole) - 24:
            with pytest.raises(Damaged, match="file list"):
                Changelog.clone(to, tmp_path / "clone")
            with pytest.raises(Damaged, match="to another place"):
                log.snapshot(to)
            assert not (tmp_path / "clone").exists()
            assert restore(to).to_dict() == state, "its records have checksums of their own"
        listed.write_bytes(whole)
    for size in range(0, len(whole), 50):
        listed.write_bytes(whole[:size])
        assert {damage.path for damage in verify(to).damages} == {listed}
    listed.unlink()
    assert [(d.path, d.found) for d in verify(to).damages] == [(listed, "no such file")]


def test_a_list_of_other_files_is_damage_though_its_checksum_is_right(log: Changelog, to: Path) -> None:
    log.snapshot(to)
    listed = _list_of(to)
    epoch = int(listed.stem)
    files = read_list(LOCAL, to, epoch)
    assert files is not None
    left_out = files.popitem()[0]
    write_list(LOCAL, to, epoch, log.state.commits[-1], files)
    (damage,) = verify(to).damages
    assert damage.path == listed
    assert left_out in damage.found


def test_nobody_writes_to_it(log: Changelog, to: Path) -> None:
    log.snapshot(to)
    with pytest.raises(ConfigError, match=r"snapshot(.|\n)*Changelog\.clone"):
        Changelog.open(to)


def test_it_is_taken_of_what_a_reader_sees_too(log: Changelog, to: Path) -> None:
    with Changelog.open(log.path, mode="r") as reader:
        expected = restore(log.path).to_dict()
        append(log, range(50), b"later")
        reader.snapshot(to)
        assert restore(to).to_dict() == expected
        reader.refresh()
        reader.snapshot(to)
    assert restore(to).to_dict() == state(range(50), b"later")


def test_something_else_is_not_overwritten(log: Changelog, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with Changelog.open(tmp_path / "other", config=CONFIG) as other:
        append(other, range(3), b"1")
        other.snapshot(tmp_path / "of-other")
    for place in ("full", "other", "of-other"):
        with pytest.raises(ConfigError, match="Cannot take a snapshot here"):
            log.snapshot(tmp_path / place)
    with pytest.raises(ConfigError, match="No file system"):
        log.snapshot("nothing://there")


def test_a_damaged_segment_is_not_copied(log: Changelog, to: Path) -> None:
    log.snapshot(to)
    before = restore(to).to_dict()
    append(log, range(50), b"new")
    log.engine.writer.seal_active()
    path = log.path / "0" / log.state.partitions[0].segments[-1].name
    data = path.read_bytes()
    path.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    with pytest.raises(Damaged):
        log.snapshot(to)
    assert restore(to).to_dict() == before


# -- never half ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [False, True], ids=["growing", "sealed"])
@pytest.mark.parametrize("halfway", [False, True], ids=["before", "halfway"])
def test_a_kill_at_any_operation_leaves_none_or_the_one_before_or_the_new_one(
    tmp_path: Path, halfway: bool, sealed: bool
) -> None:
    with Changelog.open(tmp_path / "log", config=CONFIG) as log:
        for value in (b"1", b"2"):
            append(log, range(10), value)
            if sealed:
                log.engine.writer.seal_active()
            source, last = Location(LOCAL, log.path), log.state.commits[-1]
            if value == b"1":
                take(source, log.identity, log.state, last, Location(LOCAL, tmp_path / "before"))
        for earlier in (False, True):
            n = 0
            while True:
                to = tmp_path / f"{earlier}-{n}"
                if earlier:
                    shutil.copytree(tmp_path / "before", to)
                files = KillAt(n, halfway=halfway, only=changes)
                killed = True
                with suppress(Killed):
                    take(source, log.identity, log.state, last, Location(files, to))
                    killed = False
                bury(files)
                try:
                    found = restore(to).to_dict()
                except KeyfoldError:
                    assert killed
                    assert not earlier
                    assert not (to / "changelog.json").exists()
                else:
                    choices = [state(range(10), b"2")] + ([state(range(10), b"1")] if earlier else [])
                    assert found in choices[: 1 if not killed else 2]
                    assert verify(to).damages == []
                # and it can be taken again
                take(source, log.identity, log.state, last, Location(LOCAL, to))
                assert restore(to).to_dict() == state(range(10), b"2")
                shutil.rmtree(to)
                n += 1
                if not killed:
                    break
            assert n > 10


def test_a_full_disk_leaves_the_one_before(log: Changelog, to: Path) -> None:
    log.snapshot(to)
    before = restore(to).to_dict()
    append(log, range(50), b"new")
    log.engine.writer.seal_active()
    for n in range(0, 12, 2):
        files = FailAt(n, 28, forever=True, halfway=True, only=changes)
        with pytest.raises(KeyfoldError, match="snapshot could not be written"):
            take(
                Location(LOCAL, log.path), log.identity, log.state, log.state.commits[-1], Location(files, to)
            )
        bury(files)
        assert restore(to).to_dict() == before
    log.snapshot(to)
    assert restore(to).to_dict() == state(range(50), b"new")


# -- clones --------------------------------------------------------------------------------------------------


def test_a_clone_goes_on_by_itself(log: Changelog, to: Path, tmp_path: Path) -> None:
    log.anchor("one", at=1)
    log.snapshot(to)
    with Changelog.clone(to, tmp_path / "clone") as clone:
        assert clone.identity.uuid != log.identity.uuid
        assert restore(clone.path).to_dict() == restore(log.path).to_dict()
        assert dict(clone.store().all()) == dict(log.store().all())
        assert restore(clone.path, at="one").to_dict() == restore(log.path, at="one").to_dict()
        assert clone.end_offsets() == log.end_offsets()
        assert clone.last_batch("append") == 1
        append(clone, range(50), b"clone")
        clone.compact()
        assert restore(clone.path).to_dict() == state(range(50), b"clone")
        assert verify(clone.path).damages == []
    with Changelog.open(tmp_path / "clone") as again:
        assert restore(again.path).to_dict() == state(range(50), b"clone")
    assert restore(log.path).to_dict() != state(range(50), b"clone")


def test_a_clone_of_an_earlier_commit_is_sound(log: Changelog, to: Path, tmp_path: Path) -> None:
    """Its first epoch is above those in the names of its files, so that no name can come again."""
    log.snapshot(to, at=1)
    with Changelog.clone(to, tmp_path / "clone") as clone:
        assert verify(clone.path).damages == []
        append(clone, range(5), b"x")
        assert verify(clone.path).damages == []


def test_a_job_whose_machine_is_lost_resumes_from_a_clone(log: Changelog, to: Path, tmp_path: Path) -> None:
    position = '{"topic":{"0":17}}'
    log.engine.writer.commit({}, Batch("job", 4, query="q", source=(position,)))
    log.snapshot(to)
    log.close()
    shutil.rmtree(log.path)
    with Changelog.clone(to, tmp_path / "clone") as clone, resume(clone.path, app_id="job") as again:
        assert again.commit.batch == 4
        assert again.options()["startingOffsets"] == position
        assert len(again.state.to_dict()) == 50


def test_a_clone_is_made_of_a_whole_snapshot_in_an_empty_place(
    log: Changelog, to: Path, tmp_path: Path
) -> None:
    with pytest.raises(NotAChangelog):
        Changelog.clone(to, tmp_path / "clone")
    with pytest.raises(NotAChangelog, match="Not a snapshot"):
        Changelog.clone(log.path, tmp_path / "clone")
    log.snapshot(to)
    with pytest.raises(ConfigError, match="Cannot create a changelog here"):
        Changelog.clone(to, log.path)
    path = next(to.glob("0/*.arrows"))
    data = path.read_bytes()
    path.write_bytes(data[:300] + bytes([data[300] ^ 1]) + data[301:])
    with pytest.raises(Damaged, match="sha256"):
        Changelog.clone(to, tmp_path / "clone")
    with pytest.raises(NotAChangelog):
        Changelog.open(tmp_path / "clone", mode="r")


# -- elsewhere -----------------------------------------------------------------------------------------------


def test_a_snapshot_behind_s3(log: Changelog, s3: str, tmp_path: Path) -> None:
    url = s3.format("snapshots/counts")
    with pytest.raises(NotAChangelog):
        restore(url)
    assert log.snapshot(url).commit == 2
    assert restore(url).to_dict() == restore(log.path).to_dict()
    append(log, range(5), b"3")
    done = log.snapshot(url)
    assert done.bytes_written < done.bytes
    expected = restore(log.path).to_dict()
    assert restore(url).to_dict() == expected
    assert restore(url, keys=[b"3"]).to_dict() == {b"3": b"3"}
    with Changelog.clone(url, tmp_path / "clone") as clone:
        assert restore(clone.path).to_dict() == expected
        append(clone, range(5), b"4")
    log.compact()
    log.snapshot(url)
    assert restore(url).to_dict() == expected


def test_a_file_system_of_ones_own(log: Changelog, tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    filesystem = pa.fs.SubTreeFileSystem(str(tmp_path / "remote"), pa.fs.LocalFileSystem())
    log.snapshot("counts", filesystem=filesystem)
    assert restore("counts", filesystem=filesystem).to_dict() == restore(log.path).to_dict()
    assert restore(tmp_path / "remote" / "counts").to_dict() == restore(log.path).to_dict()


def test_a_file_system_of_fsspec(log: Changelog) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    log.snapshot("/counts", filesystem=memory)
    assert restore("/counts", filesystem=memory).to_dict() == restore(log.path).to_dict()
    assert restore("memory:///counts").to_dict() == restore(log.path).to_dict()


# -- by command ----------------------------------------------------------------------------------------------


def command(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def test_the_command_takes_and_clones(log: Changelog, to: Path, s3: str, tmp_path: Path) -> None:
    url = s3.format("by-command")
    for number, place in enumerate((to, url)):
        done = command("snapshot", log.path, "--to", place)
        assert done.exit_code == 0, done.output
        assert done.output.startswith("commit 2 to ")
        clone = tmp_path / f"clone-{number}"
        assert command("snapshot", place, "--clone-to", clone).output == f"cloned to {clone}\n"
        assert restore(clone).to_dict() == restore(log.path).to_dict()
    assert command("verify", to).exit_code == 0
    done = command("snapshot", log.path)
    assert done.exit_code == 2
    assert "--to TARGET or --clone-to DIR" in done.output
    done = command("snapshot", log.path, "--clone-to", tmp_path / "more")
    assert done.exit_code != 0
    assert "error: Not a snapshot." in done.output
