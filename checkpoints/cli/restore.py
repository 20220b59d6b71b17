"""The command `restore`: writes the state of a changelog to a store or a file for other tools."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.cli.at import AT_HELP, at_from
from keyfold.checkpoints.cli.output import LocalPath, Target, out, verb
from keyfold.checkpoints.cli.records import LINES_AT_ONCE, contents
from keyfold.checkpoints.cli.tables import on_terminal, sentence
from keyfold.checkpoints.restore.export import FORMATS, export
from keyfold.checkpoints.restore.restore import RestoredState
from keyfold.checkpoints.restore.restore import restore as restored
from keyfold.statestore.errors import ConfigError


@verb(
    "keyfold restore var/counts --to counts.parquet",
    "keyfold restore var/counts --to monday.csv --at 2013-01-07T23:59:59Z",
    "keyfold restore var/counts --to var/store --at loader:17",
    "keyfold restore var/counts --to - | jq -c .value",
)
@click.option(
    "--to",
    required=True,
    type=LocalPath(dash=True),
    help="DIR, FILE.parquet, FILE.arrow, FILE.csv, or -.",
)
@click.option("--at", metavar="POINT", help=AT_HELP)
def restore(place: Target, to: Path, at: str | None) -> None:
    """Write the state to a store or a file, one row per key.

    DIR becomes a new RocksDB store, which `open_store` reads. FILE.parquet, FILE.arrow (Arrow IPC) and
    FILE.csv contain the typed columns, or key and value bytes. - is standard output: a line of JSON per key,
    in the format of dump. Nothing is overwritten. The state is that of the last commit, or the exact state
    at --at.
    """
    to_lines = str(to) == "-"
    is_file = not to_lines and _check_target(place, to)
    began = time.monotonic()
    with Changelog.open(place.path, mode="r", files=place.files) as log:
        point = None if at is None else at_from(at, log.state)
        shown = on_terminal() and not place.as_json and not to_lines
        with restored(place.path, at=point, progress=shown, files=place.files) as state:
            if to_lines:
                _print(state)
                return
            if is_file:
                rows = _exported(place, state, to)
            else:
                rows = _to_store(place, state, to)
            document: dict[str, Any] = {
                "path": str(place.path),
                "to": str(to),
                "rows": rows,
                "end_offsets": list(state.ends),
                "seconds": round(time.monotonic() - began, 3),
            }
    done = "{rows} rows to {to} in {seconds:.1f} s".format(**document)
    place.show(lambda: document, lambda: out(sentence(done)))


def _print(state: RestoredState) -> None:
    for batch in state.batches():
        for start in range(0, batch.num_rows, LINES_AT_ONCE):
            out("\n".join(map(json.dumps, contents(batch.slice(start, LINES_AT_ONCE), state.columns))))


def _exported(place: Target, state: RestoredState, to: Path) -> int:
    try:
        return export(state, to, place.local)
    except OSError as e:
        if e.filename is None:
            e.filename = str(to)  # an error of a write to an open file has no file name
        raise


def _check_target(place: Target, to: Path) -> bool:
    """Whether the target is a file. Raises `ConfigError` for an unknown format or an existing path."""
    files, is_file = place.local, to.suffix in FORMATS
    if not is_file and to.suffix:
        raise ConfigError(
            "Unknown file format.", path=to,
            expected=", ".join(FORMATS) + ", or a directory without suffix", found=to.suffix,
            remedy="use one of these",
        )  # fmt: skip
    taken = files.exists(to) and (is_file or not files.is_directory(to) or files.list_directory(to))
    if taken:
        raise ConfigError(
            "The target already exists.", path=to, expected="a path that does not exist",
            found="a directory" if files.is_directory(to) else "a file",
            remedy="choose another path, or remove it",
        )  # fmt: skip
    return is_file


def _to_store(place: Target, state: RestoredState, to: Path) -> int:
    existed = place.local.is_directory(to)
    try:
        store = state.to_store(to)
        try:
            return sum(1 for _ in store.all())
        finally:
            store.close()
    except BaseException:
        if not existed:
            place.local.remove_tree(to)
        raise
