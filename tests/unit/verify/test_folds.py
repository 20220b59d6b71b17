"""`verify` proves what the manifest says is folded, and `compact --full` repairs what is not."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keyfold import Changelog, restore
from keyfold.checkpoints.cleaner import log_to_clean, progress
from keyfold.checkpoints.cleaner.clean_pass import clean_partition
from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.checkpoints.verify import folds
from keyfold.checkpoints.verify.findings import Damages
from keyfold.checkpoints.verify.folds import check_folds
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.files import LOCAL
from keyfold.statestore.segment import block
from support.changelogs import BY_HAND, KEYFOLD, rewrite

CONFIG = {**BY_HAND, "anchors.auto": 0, "segment.bytes": 4096, "compression.type": "none"}
TWICE = "A key occurs twice"


def table(*rows: tuple[bytes, bytes | None]) -> pa.Table:
    keys = pa.array([k for k, _ in rows], pa.binary())
    return pa.table({"key": keys, "value": pa.array([v for _, v in rows], pa.binary())})


@contextmanager
def the_old_rule() -> Iterator[None]:
    """Every anchor cuts a pass, whatever its state is, and only exact ones become splits."""
    real = log_to_clean.cutting, progress.after_group

    def cutting(p: PartitionState, wanted: Any, end: int) -> set[int]:
        return {a for a in wanted if p.start < a < end}

    def after_group(
        before: PartitionState, part: log_to_clean.LogToClean, *args: Any, **more: Any
    ) -> PartitionState:
        exact = real[0](before, part.anchors, part.end)
        return real[1](before, replace(part, anchors=tuple(sorted(exact))), *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_to_clean, "cutting", cutting)
        patch.setattr("keyfold.checkpoints.cleaner.clean_pass.after_group", after_group)
        yield


def made_wrong(path: Path, monkeypatch: pytest.MonkeyPatch) -> Changelog:
    """A changelog in which a deleted key has come back, open."""
    log = Changelog.open(path, config=CONFIG)
    with monkeypatch.context() as patch, the_old_rule():
        patch.setattr(block, "BLOCK_RECORDS_MAX", 2)
        log.append(table((b"a", b"1")))
        log.append(table(*((b"f%d" % n, b"x" * 700) for n in range(7)), (b"a", None)))
        clean_partition(log.engine.writer, 0)
        log.engine.configure({"anchors.auto": 3})
        log.append(table((b"c", b"1")))
        log.compact()
    assert b"a" in restore(path).to_dict()
    return log


def check_twice(path: Path) -> None:
    (damage,) = verify(path).damages
    assert damage.what.startswith(TWICE)
    assert damage.position == "partition 0, offset 0"
    assert damage.found == "its key again at offset 8; 1 duplicate records"
    assert "keyfold compact --full" in damage.remedy


def test_a_deleted_key_that_came_back_is_found_and_a_full_compaction_repairs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made_wrong(tmp_path / "log", monkeypatch) as log:
        check_twice(log.path)
        assert log.compact() == []
        check_twice(log.path)
        (done,) = log.compact(full=True)
        assert done.records_kept == done.records_read - 1
        assert verify(log.path).damages == []
        assert sorted(restore(log.path).to_dict()) == [b"c", *(b"f%d" % n for n in range(7))]


def test_the_command_names_the_remedy_and_is_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_wrong(tmp_path / "log", monkeypatch).close()

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([KEYFOLD, *words, str(tmp_path / "log")], capture_output=True, text=True)

    found = run("verify")
    assert found.returncode == 4
    assert "what to do: `keyfold compact --full`" in found.stdout
    assert run("compact").returncode == 0
    assert run("verify").returncode == 4
    assert run("compact", "--full").returncode == 0
    assert run("verify").returncode == 0


def test_a_living_writer_is_asked_to_fold_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with made_wrong(tmp_path / "log", monkeypatch) as log:
        log.engine.configure({"cleaner.threads": 1, "cleaner.backoff.ms": 10})
        done = subprocess.run([KEYFOLD, "compact", "--full", str(log.path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "waiting for it to compact" in done.stderr
        assert verify(log.path).damages == []


def _first(line: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = line["partitions"][0]
    return first


def test_what_the_manifest_says_is_folded_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Changelog.open(path, config=CONFIG) as log:
        for value in (b"1", b"2", b"3"):
            log.append(table((b"a", value), (b"b%s" % value, value)))
            if value == b"2":
                log.anchor("x")
                log.compact()
        assert log.state.partitions[0].clean_end == 4
    assert verify(path).damages == []
    # Offsets 1 to 5 are there; the first record was folded into the one at 2.
    rewrite(path, lambda x: _first(x).update(clean_end=6, unique_end=6))
    (damage,) = (d for d in verify(path).damages if d.what.startswith(TWICE))
    assert (damage.position, damage.found) == (
        "partition 0, offset 2", "its key again at offset 4; 1 duplicate records",
    )  # fmt: skip
    rewrite(path, lambda x: _first(x).update(splits=[4]))
    assert verify(path).damages == []
    rewrite(path, lambda x: _first(x).update(splits=[2]))
    assert any(d.what.startswith(TWICE) for d in verify(path).damages)
    rewrite(path, lambda x: _first(x).update(splits=[], clean_end=0, unique_end=0, passes=[]))
    (damage,) = verify(path).damages
    assert damage.what == "A record is missing in a section that was never compacted."
    assert damage.position == "partition 0, offset 0"


@pytest.mark.parametrize(
    "change",
    [{"splits": [3, 2]}, {"splits": [4]}, {"splits": [0]}, {"unique_end": 5}, {"swept_end": 5}],
    ids=str,
)
def test_ends_of_passes_that_are_out_of_order_are_damage(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Changelog.open(path, config=CONFIG) as log:
        log.append(table((b"a", b"1"), (b"b", b"1"), (b"c", b"1"), (b"d", b"1")))
        log.compact()
    rewrite(path, lambda x: _first(x).update(change))
    assert any("out of order" in d.what for d in verify(path).damages)


KEYS = st.lists(st.integers(0, 40), min_size=1, max_size=60)


@example(keys=[1, *[0] * 20, 1], cuts=[], turns=True)
@given(keys=KEYS, cuts=st.lists(st.integers(1, 59), max_size=3), turns=st.booleans())
def test_every_key_that_is_twice_is_found_and_no_other(
    keys: list[int], cuts: list[int], turns: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With memory for all keys, and for few: then they are taken in turns."""
    path = tmp_path_factory.mktemp("log") / "log"
    with Changelog.open(path, config=CONFIG) as log:
        for start in range(0, len(keys), 7):
            log.append(table(*((b"key-%d" % k, b"v") for k in keys[start : start + 7])))
        p = log.state.partitions[0]
    splits = tuple(sorted({c for c in cuts if c < len(keys)}))
    p = replace(p, unique_end=len(keys), clean_end=len(keys), splits=splits)
    expected, every = [], []
    for start, end in zip((0, *splits), (*splits, len(keys)), strict=True):
        part = keys[start:end]
        again = [(start + i, start + part.index(k, i + 1)) for i, k in enumerate(part) if k in part[i + 1 :]]
        every += again
        if again:
            expected.append((again[0], len(again)))
    damages = Damages()
    with pytest.MonkeyPatch.context() as patch:
        if turns:
            patch.setattr(folds, "_BUDGET_BYTES", 3000)
        check_folds(LOCAL, path / "0", 0, p, damages)
    assert len(list(damages)) == len(expected)
    if turns:
        # Who has no room for more keys names the first of those that it has read.
        twice = {f"partition 0, offset {first}: its key again at offset {again}" for first, again in every}
        assert {f"{d.position}: {d.found.partition(';')[0]}" for d in damages} <= twice
    else:
        assert [d.position for d in damages] == [f"partition 0, offset {first}" for (first, _), _ in expected]
        assert [d.found for d in damages] == [
            f"its key again at offset {again}; {count} duplicate records" for (_, again), count in expected
        ]
