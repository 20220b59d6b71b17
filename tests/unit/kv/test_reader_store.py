"""Looking keys up from another process, while the writer goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from keyfold import Changelog
from keyfold.statestore.errors import ConfigError

READER = """
import sys
from keyfold import Changelog
with Changelog.open(sys.argv[1], mode="r") as log:
    store = log.store()
    print(store.get(b"a1"), store.get(b"gone"), [k for k, _ in store.prefix(b"a")],
          [k for k, _ in store.range(b"a2", b"b2")], len(list(store.all())))
"""


def table(rows: dict[str, str | None]) -> pa.Table:
    return pa.table({"key": list(rows), "value": pa.array(list(rows.values()), pa.string())})


def test_get_range_prefix_and_all_on_a_view_that_does_not_move(tmp_path: Path) -> None:
    rows: dict[str, str | None] = {f"{letter}{n}": f"{letter}-{n}" for letter in "abc" for n in range(4)}
    with Changelog.open(tmp_path / "log", partitions=3, config={"cleaner.threads": 0}) as log:
        log.append(table({**rows, "gone": "x"}))
        log.append(table({"gone": None}))
        with Changelog.open(log.path, mode="r") as reader:
            store = reader.store()
            assert store is reader.store()
            log.append(table({"a1": "later"}))
            log.compact()
            assert dict(store.all()) == {k.encode(): v.encode() for k, v in rows.items() if v}
            assert reader.get(b"a1") == store.get(b"a1") == b"a-1"
            assert store.get_all([b"gone", b"b2"]) == [None, b"b-2"]
            reader.refresh()
            assert reader.get(b"a1") == reader.store().get(b"a1") == b"later"
        with pytest.raises(ConfigError, match="was closed"):
            reader.store()
        done = subprocess.run(
            [sys.executable, "-c", READER, str(log.path)], capture_output=True, text=True, check=True
        )
        expected = (b"later", None, [b"a0", b"a1", b"a2", b"a3"], [b"a2", b"a3", b"b0", b"b1"], 12)
        assert done.stdout == " ".join(map(repr, expected)) + "\n"
