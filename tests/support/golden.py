"""Makes the directories of `tests/golden` again, after a change of the format:

    .venv-test/bin/python -m support.golden        (with PYTHONPATH=tests)

They say the same whenever they are made: clock, batches and the uuid of the changelog are given.
"""

from __future__ import annotations

import datetime as dt
import math
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pyarrow as pa

from keyfold import Changelog
from keyfold.checkpoints.cleaner import clean_pass
from keyfold.checkpoints.log import writer
from keyfold.statestore.schema.columns import Columns

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
NOW_MS = 1_700_000_000_000
BY_HAND = {"cleaner.threads": 0, "anchors.auto": 0}


class Killed(Exception):
    """Ends a pass where the directory was copied."""


#: Nothing runs by itself, and no bytes depend on the version of a codec.
PLAIN: Final = {**BY_HAND, "compression.type": "none"}


@contextmanager
def _made(work: Path, name: str, **options: Any) -> Iterator[Changelog]:
    """A new changelog whose uuid comes from its name."""
    with (
        mock.patch.object(writer, "_THREADS", 1),  # several would take the numbers of segments in any order
        mock.patch.object(uuid, "uuid4", return_value=uuid.uuid5(uuid.NAMESPACE_URL, name)),
        Changelog.open(work / name, clock_ms=lambda: NOW_MS, **options) as log,
    ):
        yield log


def _keep(log: Changelog) -> Path:
    """Copy a changelog as a writer leaves it that dies."""
    target = GOLDEN / log.path.name
    shutil.copytree(log.path, target, ignore=shutil.ignore_patterns("store-*", "lock", "readers", "work"))
    return target


def _rows(*rows: tuple[bytes, bytes | None, int]) -> pa.Table:
    """Key, value, and milliseconds after `NOW_MS`."""
    keys, values, times = zip(*rows, strict=True)
    table = {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}
    return pa.table({**table, "timestamp": pa.array([NOW_MS + ms for ms in times], pa.timestamp("ms"))})


# -- raw bytes -----------------------------------------------------------------------------------------------


def whole(work: Path) -> None:
    """Two partitions, each with a compacted and an active segment; and copies of it with damage."""
    with _made(work, "v2-whole", partitions=2, config=PLAIN) as log:
        first = _rows((b"a", b"1", 0), (b"b", b"1", 1), (b"c", b"1", 2), (b"", b"empty key", 3))
        headers = pa.array([None, None, [{"key": "h", "value": b"1"}, {"key": "n", "value": None}], []])
        log.append(first.append_column("headers", headers), app_id="loader", batch_id=7)
        log.append(
            _rows((b"a", b"2", 0), (b"b", None, 1), (b"d", b"\x00\xff", 2)), app_id="loader", batch_id=8
        )
        log.compact()
        log.anchor("kept")
        log.append(_rows((b"e", b"5", 0), (b"a", b"3", 1)), app_id="other", batch_id=1)
        kept = _keep(log)
    for name in ("v2-torn", "v2-damaged-line", "v2-damaged-block"):
        shutil.copytree(kept, GOLDEN / name)
    with (GOLDEN / "v2-torn/manifest/1.journal").open("ab") as file:
        file.write(b'0a1b2c3d {"seq":9,"t":"commit","commit":4,"time":17000')
    journal = GOLDEN / "v2-damaged-line/manifest/1.journal"
    _flip(journal, journal.read_bytes().index(b'"t":"commit"'))
    active = GOLDEN / "v2-damaged-block/0/00000000000000000005-1-5.arrows"
    _flip(active, active.stat().st_size - 100)


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def swapped(work: Path) -> None:
    """A pass that was killed between two groups: the first is swapped, the copy of the second is whole."""
    with _made(work, "v2-swapped", config={**PLAIN, "segment.bytes": 1500}) as log:
        for n in range(4):
            rows = (b"a", b"%d" % n, 0), (b"b", None if n == 3 else b"%d" % n, 0), (b"k%d" % n, b"x" * 300, 0)
            log.append(_rows(*rows), app_id="loader", batch_id=n)
        publish = clean_pass.CleanPass._publish
        calls: list[None] = []

        def killed(self: Any, *arguments: Any, **options: Any) -> Any:
            calls.append(None)
            if len(calls) < 2:
                return publish(self, *arguments, **options)
            _keep(log)
            raise Killed

        with mock.patch.object(clean_pass.CleanPass, "_publish", killed), suppress(Killed):
            log.compact()


# -- typed columns -------------------------------------------------------------------------------------------

KEYS = ("user", "day")
UTC = dt.timezone.utc


def _field(name: str, kind: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": name not in KEYS, "metadata": {}}


_PLACE = {"type": "struct", "fields": [_field("lat", "float"), _field("name", "string")]}
_TAGS = {"type": "array", "elementType": "string", "containsNull": True}
_SEEN = {"type": "map", "keyType": "string", "valueType": "long", "valueContainsNull": True}
COLUMNS = [
    *(_field("count", "long"), _field("user", "string"), _field("ok", "boolean"), _field("score", "double")),
    *(_field("price", "decimal(10,2)"), _field("day", "date"), _field("at", "timestamp")),
    *(_field("local", "timestamp_ntz"), _field("raw", "binary"), _field("place", _PLACE)),
    *(_field("tags", _TAGS), _field("seen", _SEEN)),
]
ADDED = _field("note", "string")

A = {
    "user": "a", "day": dt.date(2013, 1, 1), "count": -1, "ok": True, "score": -0.0,
    "price": Decimal("-1.50"), "at": dt.datetime(2013, 1, 31, 10, 0, 0, 1, UTC), "raw": b"\x00\xff",
    "local": dt.datetime(1, 1, 1),  # noqa: DTZ001
    "place": {"lat": 0.5, "name": None}, "tags": ["x", None, ""], "seen": [("k", 1), ("l", None)],
}  # fmt: skip
EMPTY = {**dict.fromkeys(A), "user": "", "day": dt.date(1969, 12, 31)}
GONE = {**A, "user": "gone\0", "count": 7}
#: What the changelog holds, by key.
TYPED_STATE = {
    ("a", dt.date(2013, 1, 1)): {**A, "score": math.inf, "place": None, "tags": [], "seen": [], "note": None},
    ("", dt.date(1969, 12, 31)): {**EMPTY, "note": None},
    ("é", dt.date(2013, 1, 1)): {**A, "user": "é", "count": 2**62, "note": "added"},
}


def columns() -> tuple[Columns, Columns]:
    """Before and after a column was added."""
    before, after = ({"type": "struct", "fields": f} for f in (COLUMNS, [*COLUMNS, ADDED]))
    first = Columns(before, KEYS)
    return first, first.accepts(Columns(after, KEYS))


def typed(work: Path) -> None:
    """Two partitions, each with a compacted segment of schema 1 and an active one of schema 2."""
    first, second = columns()
    with _made(work, "v2-typed", columns=first, partitions=2, config=PLAIN) as log:
        log.append(_table(first, A, EMPTY, GONE), app_id="loader", batch_id=0)
        again = {**A, "score": math.inf, "place": None, "tags": [], "seen": []}
        removed = _table(first, again, GONE).append_column("_deleted", pa.array([False, True]))
        log.append(removed, app_id="loader", batch_id=1)
        log.compact()
        log.anchor("before")
        log.engine.set_columns(second)
        added = [TYPED_STATE["é", dt.date(2013, 1, 1)], TYPED_STATE["", dt.date(1969, 12, 31)]]
        log.append(_table(second, *added), app_id="loader", batch_id=2)
        _keep(log)


def _table(kept: Columns, *rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=kept.arrow_schema())


def main() -> None:
    for old in GOLDEN.glob("v*-*"):
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory() as work:
        for make in (whole, swapped, typed):
            make(Path(work))


if __name__ == "__main__":
    main()
