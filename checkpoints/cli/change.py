"""The commands that write: `compact`, `anchor`, `snapshot`, `config`.

What changes the changelog takes the lock, or names its holder. `snapshot` only reads the changelog.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.cleaner.pool import POOL
from keyfold.checkpoints.cli.at import at_from
from keyfold.checkpoints.cli.output import LocalPath, Target, out, settings_from, time_of, verb
from keyfold.checkpoints.cli.tables import sentence, table
from keyfold.checkpoints.log.compact_requests import Request
from keyfold.checkpoints.manifest.config import NONE, LogConfig
from keyfold.checkpoints.manifest.identity import read_identity
from keyfold.checkpoints.manifest.state import Anchor, State
from keyfold.statestore.errors import ChangelogLocked, ConfigError, KeyfoldError

#: While `compact` waits for another process, it checks this often whether that process has ended.
_RETRY_SECONDS: Final = 2.0


@contextmanager
def _writer(place: Target, remedy: str) -> Iterator[Changelog]:
    """Open an existing changelog for writing. Raises `ConfigError` for a snapshot, and `ChangelogLocked` with
    this `remedy`.
    """
    if read_identity(place.files, place.path).snapshot:
        raise ConfigError(
            "A snapshot is read-only.", path=place.path, expected="a changelog",
            found="a snapshot", remedy="clone it to a changelog with keyfold snapshot PATH --clone-to DIR",
        )  # fmt: skip
    with POOL.stilled():
        try:
            log = Changelog.open(place.path, files=place.files)
        except ChangelogLocked as e:
            raise ChangelogLocked(
                e.what, path=e.path, position=e.position, expected=e.expected, found=e.found, remedy=remedy
            ) from e
        with log:
            yield log


# -- compact -------------------------------------------------------------------------------------------------


@verb(
    "keyfold compact var/counts",
    writes=lambda options: True,
)
@click.option("--full", is_flag=True, help="Compact from the log start, even what is already compacted.")
def compact(place: Target, full: bool) -> None:
    """Compact every partition now, regardless of its dirty ratio. This includes partitions that the cleaner
    has marked as uncleanable.

    --full repairs partitions that were compacted wrongly according to `keyfold verify`.

    If another process is writing, that process does the work. Readers can continue. Prints the result of each
    pass over a partition, and the number of records and bytes before and after.
    """
    with Changelog.open(place.path, mode="r", files=place.files) as before:
        began, at_first = time.monotonic(), before.state
        passes = _compact(place, full)
        before.refresh()
        at_last = before.state
    seconds = time.monotonic() - began
    document = {
        "path": str(place.path),
        "passes": passes,
        "records_before": _records(at_first),
        "records_after": _records(at_last),
        "bytes_before": _bytes(at_first),
        "bytes_after": _bytes(at_last),
        "seconds": round(seconds, 3),
    }
    place.show(lambda: document, lambda: _show_passes(passes, document))


def _compact(place: Target, full: bool) -> list[dict[str, Any]]:
    """The result of each pass, whether this process or the writing process made it."""
    request = Request(place.files, place.path, full=full)
    remedy = "set cleaner.threads to 1 in that process, or stop it and try again"
    with ExitStack() as stack:
        asked = False
        while True:
            try:
                with _writer(place, remedy) as log:
                    return [asdict(p) for p in log.compact(full=full)]
            except ChangelogLocked:
                # A writer without cleaner threads does not process requests.
                if not read_identity(place.files, place.path).config.cleaner_threads:
                    raise
            if not asked:
                stack.enter_context(request)
                asked = True
                if not place.as_json:
                    click.echo("another process is writing; waiting for it to compact", err=True)
            answer = request.answer(_RETRY_SECONDS)
            if answer is not None and "error" in answer:
                raise KeyfoldError(f"The writing process failed to compact: {answer['error']}")
            if answer is not None:
                passes: list[dict[str, Any]] = answer["passes"]
                return passes


def _records(state: State) -> int:
    return sum(p.records for p in state.partitions)


def _bytes(state: State) -> int:
    return sum(p.bytes for p in state.partitions)


def _show_passes(passes: list[dict[str, Any]], document: dict[str, Any]) -> None:
    if passes:
        headings = (
            "partition",
            "records read",
            "kept",
            "bytes read",
            "kept",
            "tombstones dropped",
            "seconds",
        )
        rows = [
            (
                p["partition"],
                p["records_read"],
                p["records_kept"],
                p["bytes_read"],
                p["bytes_kept"],
                p["tombstones_dropped"],
                p["seconds"],
            )
            for p in passes
        ]
        out(table(headings, rows))
    else:
        out("nothing to compact")
    done = (
        "before: {records_before} records, {bytes_before} bytes; "
        "after: {records_after} records, {bytes_after} bytes; {seconds:.1f} s"
    )
    out(sentence(done.format(**document)))


# -- anchor --------------------------------------------------------------------------------------------------


@verb(
    "keyfold anchor var/counts",
    "keyfold anchor var/counts --add before-migration",
    "keyfold anchor var/counts --add month-end --at 2013-01-31T23:59:59Z",
    "keyfold anchor var/counts --drop before-migration",
    writes=lambda options: options["add"] is not None or options["drop"] is not None,
)
@click.option("--add", metavar="NAME", help="Keep the exact state of a commit restorable under NAME.")
@click.option("--at", metavar="POINT", help="With --add: which commit, as for restore (default: the last).")
@click.option("--drop", metavar="NAME", help="Remove the anchor NAME.")
def anchor(place: Target, add: str | None, at: str | None, drop: str | None) -> None:
    """List the anchors, or add or drop one.

    An anchor keeps the exact state of a commit restorable across compaction. A commit whose state is already
    compacted away is refused.
    """
    if add is not None and drop is not None:
        raise click.UsageError("--add and --drop cannot be combined.")
    if at is not None and add is None:
        raise click.UsageError("--at needs --add.")
    if add is None and drop is None:
        with Changelog.open(place.path, mode="r", files=place.files) as log:
            anchors = [_anchor(a, log.state) for a in log.anchors().values()]
        headings = ("name", "commit", "time", "pinned for")
        rows = [(a["name"], a["commit"], _time(a["time_ms"]), a["app"]) for a in anchors]
        place.show(lambda: {"path": str(place.path), "anchors": anchors}, lambda: out(table(headings, rows)))
        return
    with _writer(place, "call Changelog.anchor in that process, or stop it and try again") as log:
        if add is not None:
            done, found = "added", log.anchor(add, None if at is None else at_from(at, log.state))
        else:
            done, found = "dropped", log.drop_anchor(drop or "")
        shown = _anchor(found, log.state)
    place.show(
        lambda: {"path": str(place.path), done: shown},
        lambda: out(f"{done} {found.name}: commit {found.commit}"),
    )


def _anchor(found: Anchor, state: State) -> dict[str, Any]:
    time_ms = next((c.time_ms for c in state.commits if c.number == found.commit), None)
    ends = list(found.ends)
    return {
        "name": found.name,
        "commit": found.commit,
        "time_ms": time_ms,
        "end_offsets": ends,
        "app": found.app or None,
    }


def _time(ms: int | None) -> str | None:
    return None if ms is None else time_of(ms)


# -- snapshot ------------------------------------------------------------------------------------------------


@verb(
    "keyfold snapshot var/counts --to /backup/counts",
    "keyfold snapshot var/counts --to s3://bucket/counts --at before-migration",
    "keyfold snapshot s3://bucket/counts --clone-to var/counts",
)
@click.option("--to", metavar="TARGET", help="Write a snapshot to a directory or URL.")
@click.option("--at", metavar="POINT", help="With --to: which commit, as for restore (default: the last).")
@click.option("--clone-to", metavar="DIR", type=LocalPath(), help="Clone a snapshot to a new changelog.")
def snapshot(place: Target, to: str | None, at: str | None, clone_to: Path | None) -> None:
    """Write a snapshot: a complete, read-only copy of the changelog as of a commit. Or clone a snapshot to a
    new changelog.

    TARGET must be empty or hold an earlier snapshot of the same changelog. In that case existing files are
    not written again, and the old snapshot is removed when the new one is complete. A writer can continue
    during the snapshot. `keyfold restore` and `keyfold verify` read a snapshot directly.
    """
    if to is None and clone_to is None:
        raise click.UsageError("Give --to TARGET or --clone-to DIR.")
    if to is not None and clone_to is not None:
        raise click.UsageError(
            "--to writes a snapshot of PATH; --clone-to clones the snapshot at PATH. They cannot be combined."
        )
    if at is not None and to is None:
        raise click.UsageError("--at needs --to.")
    if clone_to is not None:
        with Changelog.clone(place.given, clone_to, files=place.local) as log:
            document: dict[str, Any] = {"path": str(clone_to), "uuid": log.identity.uuid}
        place.show(lambda: document, lambda: out("cloned to {path}".format(**document)))
        return
    with Changelog.open(place.path, mode="r", files=place.files) as log:
        done = log.snapshot(to or "", None if at is None else at_from(at, log.state))
    document = {
        "path": str(place.path), "to": to, "commit": done.commit, "files": len(done.files),
        "bytes": done.bytes, "bytes_written": done.bytes_written,
    }  # fmt: skip
    place.show(
        lambda: document,
        lambda: out(
            sentence(
                f"commit {done.commit} to {to}: {len(done.files)} files, {done.bytes} bytes, "
                f"{done.bytes_written} bytes written"
            )
        ),
    )


# -- config --------------------------------------------------------------------------------------------------


@verb(
    "keyfold config var/counts",
    "keyfold config var/counts --set segment.bytes=64MiB --set delete.retention.ms=1h",
    "keyfold config var/counts --set retention.ms=none --set segment.bytes=default",
    writes=lambda options: options["changes"],
)
@click.option(
    "--set",
    "changes",
    metavar="NAME=VALUE",
    multiple=True,
    help="Change a setting. Can be repeated.",
)
def config(place: Target, changes: tuple[str, ...]) -> None:
    """Show or change the settings of a changelog.

    The names are Kafka's. Sizes can be written as 64MiB, durations as 24h. Every setting accepts "default";
    limits and locations that are optional also accept "none". A change is durable when the command ends. It
    needs the writer's lock.
    """
    settings = settings_from(changes)
    known = read_identity(place.files, place.path).config
    known.with_changes(settings)
    if settings:
        with _writer(place, "pass config= when that process opens it, or stop it and try again") as log:
            log.engine.configure(settings)
            known = log.config
    values, defaults = known.named(), LogConfig().named()
    shown, shown_defaults = known.shown(), LogConfig().shown()
    document = {
        name: {
            "value": _or_null(value, shown[name]),
            "default": _or_null(defaults[name], shown_defaults[name]),
            "changed": value != defaults[name],
        }
        for name, value in values.items()
    }
    rows = [(n, shown[n], shown_defaults[n], "changed" if d["changed"] else "") for n, d in document.items()]
    place.show(
        lambda: {"path": str(place.path), "settings": document},
        lambda: out(table(("setting", "value", "default", ""), rows)),
    )


def _or_null(value: object, shown: str) -> object:
    """A setting in JSON: null where there is no limit or location; `compression.type` has a value "none"."""
    return None if shown == NONE != value else value
