"""What a Spark task imports: what it needs to read a piece, or to write blocks, and no more."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable

from keyfold import Changelog
from keyfold.sink.staging import Stage
from keyfold.streaming.source import KeyfoldSource

#: Runs what is pickled in the first file on what is pickled in the second, in a process that has imported
#: nothing of keyfold, and tells the rows and the modules.
_TASK = """
import pathlib, sys
from pyspark.serializers import CloudPickleSerializer
assert not [m for m in sys.modules if m.startswith("keyfold")]
run, parts = (CloudPickleSerializer().loads(pathlib.Path(p).read_bytes()) for p in sys.argv[1:])
print(sum(run(part) for part in parts))
print(*sorted(m for m in sys.modules if m.split(".")[0] in ("keyfold", "rocksdict", "click", "rich")))
"""


def in_a_task(folder: Path, run: object, parts: object) -> tuple[int, list[str]]:
    files = [folder / "run", folder / "parts"]
    for path, what in zip(files, (run, parts), strict=True):
        path.write_bytes(cloudpickle.dumps(what))  # type: ignore[no-untyped-call]
    done = subprocess.run([sys.executable, "-c", _TASK, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows, modules = done.stdout.splitlines()
    return int(rows), modules.split()


@pytest.mark.parametrize(
    ("options", "kind", "most"),
    [
        ({"mode": "state"}, "batch", 37),
        ({"mode": "log"}, "batch", 25),
        ({"mode": "changes"}, "batch", 25),
        ({"mode": "changes"}, "stream", 25),
        ({"mode": "state", "at": "1"}, "stream", 37),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else str(x),
)
def test_a_reader_task_imports_neither_the_writer_nor_planning_nor_rocksdb(
    options: dict[str, str], kind: str, most: int, tmp_path: Path
) -> None:
    with Changelog.open(tmp_path / "log", partitions=3) as log:
        log.append(pa.table({"key": [f"k{n}" for n in range(50)], "value": ["1"] * 50}))
    source = KeyfoldSource({"path": str(tmp_path / "log"), **options})
    reader: DataSourceReader | DataSourceStreamReader
    pieces: Sequence[InputPartition]
    if kind == "batch":
        reader = batch = source.reader(source.schema())
        pieces = batch.partitions()
    else:
        reader = stream = source.streamReader(source.schema())
        begin = stream.initialOffset()
        pieces = stream.partitions(begin, stream.latestOffset(begin, ReadAllAvailable()))

    def run(piece: InputPartition) -> int:
        """As Spark does it: its function refers to the reader, and is pickled with it."""
        found: int = sum(batch.num_rows for batch in reader.read(piece))
        assert gc.get_freeze_count() > 10_000, "after each task the worker collects all of them"
        return found

    rows, modules = in_a_task(tmp_path, run, pieces)
    assert rows == 50
    assert len(modules) <= most, modules
    banned = (
        *("rocksdict", "writer.", "recovery", "planner", "engine", "click", "rich"),
        *("manifest.state", "manifest.identity", "manifest.config"),
    )
    assert [m for m in modules if any(f".{m}.".endswith(f"{b.rstrip('.')}.") for b in banned)] == [
        "keyfold.statestore.segment.writer"
    ]


def test_a_writing_task_imports_blocks_and_files_alone(tmp_path: Path) -> None:
    (tmp_path / "staged").mkdir()
    stage = Stage(str(tmp_path / "staged"), batch=1, partitions=3, now_ms=0)
    batch = pa.RecordBatch.from_pydict({"key": [b"a", b"b"], "value": [b"1", b"2"]})

    def run(rows: pa.RecordBatch) -> int:
        from keyfold.statestore.files import LOCAL

        return sum(staged.records for staged in stage.run(LOCAL, [rows], 0, 0))

    rows, modules = in_a_task(tmp_path, run, [batch])
    assert rows == 2
    assert len(modules) <= 20, modules
    assert not [m for m in modules if m.startswith(("keyfold.checkpoints", "rocksdict"))]
