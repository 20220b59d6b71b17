"""A small history of a changelog, and what must be true of the directory that its sudden end left behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from keyfold import Changelog, restore
from keyfold.checkpoints import engine as engines
from keyfold.statestore.files import Files
from support.faults.inject import QUICK, Killed

PARTITIONS = 2
BATCHES = 6
#: The clock stands still, so that tombstones and segments age only where a history says so.
NOW_MS = 1_700_000_000_000
CONFIG = {
    "cleaner.threads": 0,
    "segment.bytes": 1024,
    "delete.retention.ms": 0,
    "anchors.auto": 0,
}
Told = Callable[[int], None]


def rows(batch: int) -> pa.Table:
    """Batch `batch`: rewrites most keys, deletes one, adds one."""
    keys = [f"k{i}" for i in range(4)] + [f"new{batch}", f"k{batch % 4}"]
    values = [f"{batch}-{i}" for i in range(5)] + [None]
    return pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


def expected(batches: int) -> dict[bytes, bytes]:
    """The fold of the first `batches` batches."""
    state: dict[bytes, bytes] = {}
    for batch in range(batches):
        for row in rows(batch).to_pylist():
            if row["value"] is None:
                state.pop(row["key"], None)
            else:
                state[row["key"]] = row["value"]
    return state


def live(files: Files, path: Path, told: Told) -> None:
    """Two lives: created, three batches, a compaction, a batch, closed; opened again, two batches, a
    compaction.
    """
    with Changelog.open(
        path, partitions=PARTITIONS, config=CONFIG, files=files, clock_ms=lambda: NOW_MS
    ) as log:
        for batch in range(3):
            log.append(rows(batch), app_id="life", batch_id=batch)
            told(batch)
        log.compact()
        log.append(rows(3), app_id="life", batch_id=3)
        told(3)
    with Changelog.open(path, files=files, clock_ms=lambda: NOW_MS) as log:
        for batch in range(4, BATCHES):
            log.append(rows(batch), app_id="life", batch_id=batch)
            told(batch)
        log.compact()


def forget(log: Changelog) -> None:
    """From now on the writer of `log` is as one of another process. `bury` ends it."""
    for path, (engine, _) in list(engines._engines.items()):
        if engine is log.engine:
            del engines._engines[path]


def bury(files: Files, forgotten: Changelog | None = None) -> None:
    """End what the process of a killed life would have taken with it: its threads and its shared writer."""
    if forgotten is not None:
        forgotten.engine.writer.fence("its process is dead")
        with suppress(Killed, Exception):
            forgotten.engine.close()
    for path, (engine, _) in list(engines._engines.items()):
        if engine.writer.files is files:
            del engines._engines[path]
            engine.writer.fence("its process is dead")
            with suppress(Killed, Exception):
                engine.close()
    release = getattr(files, "release", None)
    if release is not None:
        release()


def fault_in(path: Path, told: list[int], *, last_values: bool = True) -> str | None:
    """What is wrong with what is left at `path` for somebody who was told these batches; None if nothing.

    Every told batch is there, at most one more, each whole or not at all; the log can be opened, all batches
    delivered again add what is missing, and the end is the same as without the crash.

    Args:
        last_values: look at the stores too, which takes ten times as long as all the rest.
    """
    if not (path / "changelog.json").exists():
        if told:
            return f"{told[-1]} was acknowledged, and the changelog is gone"
    else:
        with Changelog.open(path, files=QUICK) as log:
            last = log.last_batch("life")
            found = 0 if last is None else last + 1
            at_least = told[-1] + 1 if told else 0
            if not at_least <= found <= at_least + 1:
                return f"{at_least} batches were acknowledged, {found} are there"
            if (restored := restore(path).to_dict()) != expected(found):
                return f"the state is not that of {found} batches: {restored}"
            if last_values and dict(log.store().all()) != expected(found):
                return "the last values differ from the log"
            for p in range(PARTITIONS):
                offsets = [o for b in log.read(p) for o in b.column("offset").to_pylist()]
                if offsets != sorted(set(offsets)):
                    return f"offsets {offsets}"
    live(QUICK, path, lambda batch: None)
    if restore(path).to_dict() != expected(BATCHES):
        return "the end differs"
    with Changelog.open(path, mode="r") as reader:
        named = {s.name for s in reader.state.partitions[0].segments}
    there = {f.name for f in (path / "0").glob("*.arrows")}
    if named != there:
        return f"files {there - named} are left, {named - there} are missing"
    return None
