"""Keeps a SQLite table in step with a changelog: reload it in full, then follow. No Spark.

    python mirror.py CHANGELOG DATABASE

The table and the offsets it has reached change in one SQLite transaction, so it may be stopped at any time.
Should it have slept so long that deletes it has not seen were compacted away, it is told (`CompactedAway`),
and reloads.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from keyfold import Changelog, restore
from keyfold.statestore.errors import CompactedAway


def entries(batch: pa.RecordBatch) -> Iterator[tuple[bytes, str | bytes | None]]:
    """Key and value of each record. SQLite has no structs: typed columns become JSON."""
    for key, value in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True):
        yield key, _stored(value)


def _stored(value: Any) -> str | bytes | None:
    return json.dumps(value, default=str) if isinstance(value, dict) else value


class Mirror:
    """The rows of one changelog as `rows(key, value)`, and per partition the next offset as `offsets`."""

    def __init__(self, changelog: Path, database: Path) -> None:
        self._changelog = changelog
        self._db = sqlite3.connect(database)
        self._db.execute("CREATE TABLE IF NOT EXISTS rows (key BLOB PRIMARY KEY, value BLOB NOT NULL)")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS offsets (partition INTEGER PRIMARY KEY, offset INTEGER NOT NULL)"
        )

    def reload(self) -> int:
        """Load everything again, as of the last commit; returns the number of rows."""
        with restore(self._changelog) as state, self._db:
            self._db.execute("DELETE FROM rows")
            for batch in state.batches():
                self._db.executemany("INSERT INTO rows VALUES (?, ?)", entries(batch))
            self._db.executemany("INSERT OR REPLACE INTO offsets VALUES (?, ?)", enumerate(state.ends))
        return int(self._db.execute("SELECT count(*) FROM rows").fetchone()[0])

    def follow(self) -> int:
        """Apply what was committed since; returns the number of changes."""
        offsets = dict(self._db.execute("SELECT partition, offset FROM offsets"))
        if not offsets:
            return self.reload()
        changes = 0
        with Changelog.open(self._changelog, mode="r") as log, self._db:
            for partition, end in log.end_offsets().items():
                try:
                    batches = log.read(partition, offsets[partition], follow=True)
                except CompactedAway:
                    return self.reload()
                for batch in batches:
                    self._apply(batch)
                    changes += batch.num_rows
                self._db.execute("INSERT OR REPLACE INTO offsets VALUES (?, ?)", (partition, end))
        return changes

    def _apply(self, batch: pa.RecordBatch) -> None:
        for key, value in entries(batch):
            if value is None:
                self._db.execute("DELETE FROM rows WHERE key = ?", (key,))
            else:
                self._db.execute("INSERT OR REPLACE INTO rows VALUES (?, ?)", (key, value))

    def rows(self) -> dict[bytes, str | bytes]:
        return dict(self._db.execute("SELECT key, value FROM rows"))

    def close(self) -> None:
        self._db.close()


if __name__ == "__main__":
    mirror = Mirror(Path(sys.argv[1]), Path(sys.argv[2]))
    print(json.dumps({"changes": mirror.follow(), "rows": len(mirror.rows())}))
    mirror.close()
