"""Promise 6 for snapshots: a reader keeps its view until it is closed, however often one is taken again.

On a local disk readers hold a lock in the snapshot, and exactly what they name stays. Elsewhere nobody can
know of readers: what the snapshot before held stays until the one after the next.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.fs
import pytest
from hypothesis import given

from keyfold import Changelog, RestoredState, restore
from keyfold.checkpoints.snapshot.repository import KEPT
from keyfold.checkpoints.verify.verify import verify
from support.changelogs import rows
from support.folds import IN_MEMORY

CONFIG = {"cleaner.threads": 0, "anchors.auto": 0, "segment.bytes": 2048}
STEPS = st.lists(
    st.sampled_from(
        [
            "append",
            "compact",
            "take",
            "take",
            "take an earlier one",
            "restore",
            "restore",
            "read",
            "close one",
        ]
    ),
    max_size=16,
)


def everything(reader: Changelog | RestoredState) -> list[dict[str, Any]]:
    if isinstance(reader, RestoredState):
        return [row for batch in reader.batches() for row in batch.to_pylist()]
    return [row for p in range(reader.partitions) for batch in reader.read(p) for row in batch.to_pylist()]


def held(snapshot: Path) -> set[str]:
    """The segments and indexes that are there."""
    return {str(f.relative_to(snapshot)) for p in "01" for f in (snapshot / p).iterdir()}


def listed(snapshot: Path) -> list[set[str]]:
    """What each of its lists names, the newest first."""
    lists = sorted((snapshot / "manifest").glob("*.files"), key=lambda path: -int(path.stem))
    return [set(json.loads(path.read_text())["files"]) for path in lists]


@given(STEPS)
def test_readers_of_any_generation_keep_their_view_and_nothing_else_stays(steps: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as directory:
        to = Path(directory) / "snapshot"
        with Changelog.open(Path(directory) / "log", partitions=2, config=CONFIG) as log:
            log.append(rows(*((f"k{n}", "0") for n in range(30))))
            log.anchor("first")
            log.snapshot(to)
            readers: list[tuple[Changelog | RestoredState, list[dict[str, Any]]]] = []
            for number, step in enumerate([*steps, "append", "take"]):
                if step == "append":
                    log.append(rows(*((f"k{n}", f"{number}") for n in range(number, number + 20))))
                elif step == "compact":
                    log.compact()
                elif step == "take":
                    log.snapshot(to)
                elif step == "take an earlier one":
                    log.snapshot(to, at="first")
                elif step in ("restore", "read"):
                    reader = restore(to) if step == "restore" else Changelog.open(to, mode="r")
                    readers.append((reader, everything(restore(to) if step == "restore" else reader)))
                elif readers:
                    readers.pop(number % len(readers))[0].close()
                for reader, expected in readers:
                    assert everything(reader) == expected
            for reader, _ in readers:
                reader.close()
            log.snapshot(to)
            (only,) = listed(to)
            assert held(to) == only
            assert verify(to).damages == []
            assert list((to / "readers").iterdir()) == []


def test_a_reader_that_died_keeps_nothing(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", partitions=2, config=CONFIG) as log:
        log.append(rows(("a", "1")))
        log.snapshot(tmp_path / "to")
        (tmp_path / "to" / "readers" / "dead.view").write_bytes(b"%020d\n" % 1)
        log.append(rows(("a", "2")))
        log.compact()
        log.snapshot(tmp_path / "to")
    assert [held(tmp_path / "to")] == listed(tmp_path / "to")


def test_elsewhere_a_reader_keeps_its_view_over_the_next_snapshot_and_two_generations_stay(
    tmp_path: Path,
) -> None:
    filesystem, to = pa.fs.LocalFileSystem(), str(tmp_path / "to")
    sizes = []
    with Changelog.open(tmp_path / "log", partitions=2, config=CONFIG) as log:
        for number in range(5):
            log.append(rows(*((f"k{n}", f"{number}" * 50) for n in range(50))))
            log.compact()
            if number:
                before = restore(to, filesystem=filesystem)
                expected = everything(restore(to, filesystem=filesystem))
            log.snapshot(to, filesystem=filesystem)
            if number:
                assert everything(before) == expected
            assert restore(to, filesystem=filesystem).to_dict() == restore(log.path).to_dict()
            assert restore(to).to_dict() == restore(log.path).to_dict()
            lists = listed(Path(to))
            assert len(lists) == min(number + 1, 2)
            assert held(Path(to)) == set().union(*lists)
            sizes.append(sum(f.stat().st_size for f in Path(to).glob("*/*.arrows")))
    assert max(sizes) <= 2 * sizes[0] + 1024


def test_a_snapshot_that_was_taken_before_is_not_written_again_while_its_files_are_kept(
    tmp_path: Path,
) -> None:
    to = tmp_path / "to"
    with Changelog.open(tmp_path / "log", config=CONFIG) as log:
        log.append(rows(("a", "1")))
        log.snapshot(to)
        with Changelog.open(log.path, mode="r") as earlier, restore(to) as reader:
            log.append(rows(("a", "2")))
            log.compact()
            log.snapshot(to)
            made = {f: f.stat().st_mtime_ns for f in to.glob("0/*")}
            assert earlier.snapshot(to).bytes_written == 0
            assert all(f.stat().st_mtime_ns == at for f, at in made.items() if f.exists())
            assert reader.to_dict() == restore(to).to_dict() == {b"a": b"1"}


@pytest.mark.parametrize("how", ["restore", "read"])
def test_the_policy_removes_no_snapshot_that_has_a_reader(tmp_path: Path, how: str) -> None:
    dest = tmp_path / "kept"
    config = {**CONFIG, "snapshot.dest": str(dest), "snapshot.commits": 1}
    with Changelog.open(tmp_path / "log", partitions=2, config=config) as log:

        def take(value: str) -> None:
            log.append(rows(("a", value)))
            log.engine.snapshots.run()

        take("0")
        (first,) = log.snapshots()
        reader = restore(dest) if how == "restore" else Changelog.open(first.path, mode="r")
        expected = everything(reader)
        for n in range(1, 2 * KEPT + 2):
            take(str(n))
            assert everything(reader) == expected
        assert len(log.snapshots()) == KEPT + 1
        reader.close()
        take("last")
        assert len(log.snapshots()) == KEPT
        assert len(list(dest.iterdir())) == KEPT
