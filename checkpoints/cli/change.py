"""The verbs that write: `compact`, `anchor`, `config`. Each takes the lock, or says who holds it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.cli.at import at_from
from keyfold.checkpoints.cli.output import LocalPath, Target, out, settings_from, time_of, verb
from keyfold.checkpoints.cli.tables import sentence, table
from keyfold.checkpoints.log.compact_requests import Request
from keyfold.checkpoints.manifest.config import LogConfig
from keyfold.checkpoints.manifest.identity import read_identity
from keyfold.checkpoints.manifest.state import Anchor, State
from keyfold.statestore.errors import ChangelogLocked, ConfigError, KeyfoldError

#: While it waits for another process, `compact` looks this often whether that one has ended.
_RETRY_SECONDS: Final = 2.0


@contextmanager
def _writer(place: Target, remedy: str) -> Iterator[Changelog]:
    """The changelog open to write; it must be there, and be no snapshot. Raises `ConfigError`, or
    `ChangelogLocked` with this `remedy`.
    """
    if read_identity(place.files, place.path).snapshot:
        raise ConfigError(
            "This is a snapshot, which is only read.", path=place.path, expected="a changelog",
            found="a snapshot", remedy="make a changelog of it with keyfold snapshot PATH --clone-to DIR",
        )  # fmt: skip
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
@click.option("--full", is_flag=True, help="Fold from the log's start, whatever the manifest says is folded.")
def compact(place: Target, full: bool) -> None:
    """Fold every partition now, whatever its dirty ratio; also one that the cleaner has given up.

    With --full it repairs what `keyfold verify` has found to be folded wrongly.

    Where another process is writing, that one is asked to do it. Readers may go on. Prints what each pass
    over a partition did, and records and bytes before and after.
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
    """What each pass did, whether this process made it or the one that writes."""
    request = Request(place.files, place.path, full=full)
    remedy = "set cleaner.threads to 1 there, or end that process and try again"
    with ExitStack() as stack:
        asked = False
        while True:
            try:
                with _writer(place, remedy) as log:
                    return [asdict(p) for p in log.compact(full=full)]
            except ChangelogLocked:
                # A writer without cleaner threads does not listen.
                if not read_identity(place.files, place.path).config.cleaner_threads:
                    raise
            if not asked:
                stack.enter_context(request)
                asked = True
                if not place.as_json:
                    click.echo("another process is writing: it is asked to compact", err=True)
            answer = request.answer(_RETRY_SECONDS)
            if answer is not None and "error" in answer:
                raise KeyfoldError(f"The writing process answers: {answer['error']}")
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
        out("there was nothing to fold")
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
@click.option("--add", metavar="NAME", help="Keep the exact state of a commit restorable under this name.")
@click.option(
    "--at", metavar="COMMIT", help="With --add: the commit, as in restore; the last one without it."
)
@click.option("--drop", metavar="NAME", help="Let the commit of this name go.")
def anchor(place: Target, add: str | None, at: str | None, drop: str | None) -> None:
    """List the anchors, or add or drop one.

    An anchor keeps the exact state of a commit restorable, whatever is folded later. A commit whose state was
    folded away already is refused.
    """
    if add is not None and drop is not None:
        raise click.UsageError("--add and --drop are two steps: give one of them.")
    if at is not None and add is None:
        raise click.UsageError("--at says which commit --add names.")
    if add is None and drop is None:
        with Changelog.open(place.path, mode="r", files=place.files) as log:
            anchors = [_anchor(a, log.state) for a in log.anchors().values()]
        headings = ("name", "commit", "time", "pinned for")
        rows = [(a["name"], a["commit"], _time(a["time_ms"]), a["app"]) for a in anchors]
        place.show(lambda: {"path": str(place.path), "anchors": anchors}, lambda: out(table(headings, rows)))
        return
    with _writer(place, "use Changelog.anchor in that process, or end it and try again") as log:
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
@click.option("--to", metavar="PLACE", help="Write a snapshot there: a directory, or a URL.")
@click.option("--at", metavar="COMMIT", help="With --to: the commit, as in restore; the last one without it.")
@click.option("--clone-to", metavar="DIR", type=LocalPath(), help="Make a changelog of a snapshot.")
def snapshot(place: Target, to: str | None, at: str | None, clone_to: Path | None) -> None:
    """Write a snapshot: a copy as of a commit, complete in itself and only to be read. Or make a changelog of
    one.

    The place is empty, or has an earlier snapshot of the same changelog: then files that are there are not
    written again, and the old one is gone when the new one is complete. A writer may go on meanwhile.
    `keyfold restore` and `keyfold verify` work on a snapshot as it is.
    """
    if to is None and clone_to is None:
        raise click.UsageError("Say where: --to PLACE, or --clone-to DIR.")
    if to is not None and clone_to is not None:
        raise click.UsageError(
            "--to takes a snapshot of PATH; --clone-to makes a changelog of that at PATH. Give one of them."
        )
    if at is not None and to is None:
        raise click.UsageError("--at says of which commit --to is a snapshot.")
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
                f"{done.bytes_written} of them written"
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
    help="Change a setting. Can be given several times.",
)
def config(place: Target, changes: tuple[str, ...]) -> None:
    """Show the settings of a changelog, or change some.

    The names are Kafka's. Sizes may be written as 64MiB, times as 24h. Each setting takes "default"; those
    that can be without a limit or a place take "none". A change is durable when the command ends, and needs
    the writer's lock.
    """
    settings = settings_from(changes)
    known = read_identity(place.files, place.path).config
    known.with_changes(settings)
    if settings:
        with _writer(place, "give config= where that process opens it, or end it and try again") as log:
            log.engine.configure(settings)
            known = log.config
    defaults = LogConfig().named()
    document = {
        name: {"value": value, "default": defaults[name], "changed": value != defaults[name]}
        for name, value in known.named().items()
    }
    shown, shown_defaults = known.shown(), LogConfig().shown()
    rows = [(n, shown[n], shown_defaults[n], "changed" if d["changed"] else "") for n, d in document.items()]
    place.show(
        lambda: {"path": str(place.path), "settings": document},
        lambda: out(table(("setting", "value", "default", ""), rows)),
    )
