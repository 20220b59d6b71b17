"""The commands that inspect a changelog: `stats`, `ls`, `verify`."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.cli.exits import DAMAGED
from keyfold.checkpoints.cli.output import Target, out, progress, time_of, verb
from keyfold.checkpoints.cli.tables import facts, printable, sentence, table
from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.checkpoints.manifest.state import Commit, State
from keyfold.checkpoints.verify.verify import Verification
from keyfold.checkpoints.verify.verify import verify as check
from keyfold.statestore import filenames
from keyfold.statestore.errors import KeyfoldError
from keyfold.statestore.files import Files
from keyfold.statestore.segment.block import FORMAT_VERSION

# -- the writer ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holder:
    """The last process that signed the lock. `alive`: whether it holds the lock now; None if unknown."""

    pid: int
    epoch: int
    alive: bool | None

    def __str__(self) -> str:
        """The text for people."""
        if self.alive:
            return f"pid {self.pid} is writing (epoch {self.epoch})"
        if self.alive is None:
            return f"pid {self.pid} (epoch {self.epoch}) is running; this user cannot see whether it writes"
        return f"none (last: pid {self.pid}, epoch {self.epoch})"


def lock_holder(files: Files, root: Path) -> Holder | None:
    """The writer on this machine. This does not try its lock, which could block a writer that is opening."""
    path = root / filenames.LOCK
    try:
        signed = json.loads(files.read(path))
        pid, epoch = int(signed["pid"]), int(signed["epoch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Holder(pid, epoch, _has_open(files, pid, path))


def _has_open(files: Files, pid: int, path: Path) -> bool | None:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
    try:
        descriptors = files.list_directory(Path(f"/proc/{pid}/fd"))
    except OSError:
        return None
    real = os.path.realpath(path)
    for number in descriptors:
        # The process may have closed it.
        with suppress(OSError):
            if os.path.realpath(f"/proc/{pid}/fd/{number}") == real:
                return True
    return False if descriptors else None


# -- stats ---------------------------------------------------------------------------------------------------


@verb(
    "keyfold stats var/counts",
    "keyfold stats var/counts --json | jq '.totals.bytes'",
)
def stats(place: Target) -> None:
    """Show the identity, contents and size of a changelog.

    Shows identity, writer, commits, and the last batch and source position of each app. For each partition
    it shows offsets, records, bytes, and the cleaner's backlog. The dirty ratio covers everything that can be
    cleaned now: all segments except the active one.
    """
    with Changelog.open(place.path, mode="r", files=place.files) as log:
        document = _stats(place, log)
        place.show(
            lambda: document, lambda: _show_stats(document, log.state, lock_holder(place.files, place.path))
        )


def _stats(place: Target, log: Changelog) -> dict[str, Any]:
    state = log.state
    holder = lock_holder(place.files, place.path)
    partitions = [_partition(i, p) for i, p in enumerate(state.partitions)]
    summed = ("records", "tombstones", "bytes", "segments")
    return {
        "path": str(place.path),
        "uuid": log.identity.uuid,
        "format_version": FORMAT_VERSION,
        "schema": None if log.columns is None else log.columns.to_json(),
        "epoch": state.epoch,
        "line": state.seq,
        "writer": None if holder is None else asdict(holder),
        "commits": state.next_commit - 1,
        "restorable_commits": _restorable(state),
        "apps": [_app(commit) for commit in state.apps.values()],
        "anchors": [{"name": a.name, "commit": a.commit} for a in state.anchors.values()],
        "partitions": partitions,
        "snapshots": _snapshots(log),
        "totals": {
            **{name: sum(p[name] for p in partitions) for name in summed},
            "store_bytes": _store_bytes(place),
        },
    }


def _snapshots(log: Changelog) -> list[dict[str, Any]] | str:
    """The snapshots taken by the policy, or the reason why they cannot be listed."""
    try:
        return [
            {"path": s.path, "commit": s.commit, "time_ms": s.time_ms, "bytes": s.bytes, "pinned": s.pinned}
            for s in log.snapshots()
        ]
    except KeyfoldError as e:
        return str(e)


def _app(commit: Commit) -> dict[str, Any]:
    return {
        "app": commit.app,
        "query": commit.query or None,
        "last_batch": commit.batch,
        "last_commit": commit.number,
        "time_ms": commit.time_ms,
        "source": list(commit.source),
    }


def _partition(partition: int, p: PartitionState) -> dict[str, Any]:
    cleanable = p.segments[:-1] if p.segments and not p.segments[-1].sealed else p.segments
    whole = sum(s.size for s in cleanable)
    dirty = sum(s.size for s in cleanable if s.next > p.unique_end)
    return {
        "partition": partition,
        "start_offset": p.start,
        "end_offset": p.end,
        "clean_end_offset": p.clean_end,
        "dirty_ratio": round(dirty / whole, 4) if whole else 0.0,
        "last_clean_ms": p.passes[-1].time_ms if p.passes else None,
        "uncleanable": p.uncleanable or None,
        "records": p.records,
        "tombstones": sum(s.tombstones for s in p.segments),
        "bytes": p.bytes,
        "segments": len(p.segments),
    }


def _store_bytes(place: Target) -> int:
    """The size of the last-value stores on disk."""
    total = 0
    for name in place.files.list_directory(place.path):
        if filenames.store_epoch(name) is not None:
            for file in place.files.list_directory(place.path / name):
                with suppress(OSError):
                    total += place.files.size(place.path / name / file)
    return total


def _show_stats(found: dict[str, Any], state: State, holder: Holder | None) -> None:
    schema = found["schema"]
    out(
        facts(
            [
                ("changelog", found["path"]),
                ("uuid", found["uuid"]),
                (
                    "columns",
                    "raw bytes"
                    if schema is None
                    else ", ".join(f["name"] for f in schema["columns"]["fields"]),
                ),
                ("keys", None if schema is None else ", ".join(schema["keys"])),
                ("partitions", len(state.partitions)),
                ("epoch", state.epoch),
                ("writer", "none" if holder is None else str(holder)),
                ("commits", found["commits"]),
                ("restorable", _shown_restorable(found)),
                ("last values", f"{found['totals']['store_bytes']} bytes in RocksDB"),
                ("snapshots", _shown_snapshots(found["snapshots"])),
            ]
        )
    )
    if state.apps:
        rows = [
            (c.app, c.batch, c.number, time_of(c.time_ms), " ".join(c.source) or None)
            for c in state.apps.values()
        ]
        out(table(("app", "last batch", "commit", "time", "source position"), rows, "Apps"))
    offsets = ("partition", "start_offset", "end_offset", "clean_end_offset", "dirty_ratio")
    amounts = ("records", "tombstones", "bytes", "segments")
    lines = [[p[name] for name in (*offsets, *amounts)] for p in found["partitions"]]
    lines.append([None] * len(offsets) + [found["totals"][name] for name in amounts])
    headings = ("partition", "start", "end", "clean to", "dirty", *amounts)
    out(table(headings, lines, "Partitions (last line: total)"))
    for p in found["partitions"]:
        if p["uncleanable"]:
            until = f"partition {p['partition']} is not cleaned until `keyfold compact` succeeds"
            out(sentence(printable(f"{until}: {p['uncleanable']}")))


def _shown_snapshots(found: list[dict[str, Any]] | str) -> str | None:
    if isinstance(found, str):
        return found
    shown = (f"of commit {s['commit']} in {s['path']}{' (pinned)' if s['pinned'] else ''}" for s in found)
    return "; ".join(shown) or None


def _restorable(state: State) -> dict[str, int | None]:
    """The commits with a restorable exact state. Some between the first and the last may be missing."""
    anchored = {a.commit for a in state.anchors.values()}
    numbers = [c.number for c in state.commits if c.number in anchored or state.restorable(c.ends)]
    return {"count": len(numbers), "first": min(numbers, default=None), "last": max(numbers, default=None)}


def _shown_restorable(found: dict[str, Any]) -> str:
    commits = found["restorable_commits"]
    anchors = "".join(f", anchor {a['name']} (commit {a['commit']})" for a in found["anchors"])
    if not commits["count"]:
        return "no commits"
    return f"{commits['count']} commits from {commits['first']} to {commits['last']}{anchors}"


# -- ls ------------------------------------------------------------------------------------------------------


@verb(
    "keyfold ls var/counts",
    "keyfold ls var/counts --json | jq -r '.files[].path'",
    "keyfold ls var/counts --paths --sealed | xargs -d '\\n' cp -t backup",
)
@click.option("--paths", is_flag=True, help="Print only the absolute path of each file, one per line.")
@click.option("--sealed", is_flag=True, help="Leave out active segments, which a writer appends to.")
def ls(place: Target, *, paths: bool, sealed: bool) -> None:
    """List the committed segment files.

    Each file is an Arrow IPC stream. Together they are the log: a file that is not listed is not part of it,
    even if it exists. In the active segment only the listed bytes are committed. While another process
    writes, the cleaner may delete a listed file; a snapshot keeps its files.
    """
    with Changelog.open(place.path, mode="r", files=place.files) as log:
        found: list[dict[str, Any]] = [
            {
                "path": str(filenames.partition(place.path, partition) / s.name),
                "partition": partition,
                "name": s.name,
                "base_offset": s.base,
                "next_offset": s.next,
                "bytes": s.size,
                "records": s.records,
                "tombstones": s.tombstones,
                "sealed": s.sealed,
            }
            for partition, p in enumerate(log.state.partitions)
            for s in p.segments
            if s.sealed or not sealed
        ]
    if paths and not place.as_json:
        for file in found:
            out(file["path"])
        return
    shown = ("partition", "name", "base_offset", "next_offset", "bytes", "records", "tombstones")
    headings = ("partition", "name", "base", "next", "bytes", "records", "tombstones", "state")
    rows = [[*(f[name] for name in shown), "sealed" if f["sealed"] else "active"] for f in found]
    place.show(lambda: {"path": str(place.path), "files": found}, lambda: out(table(headings, rows)))


# -- verify --------------------------------------------------------------------------------------------------


@verb(
    "keyfold verify var/counts",
    "keyfold verify var/counts --json | jq '.damages[].path'",
)
def verify(place: Target) -> None:
    """Verify all checksums.

    Verifies identity, manifest, indexes and segments, their consistency, and the result of compaction. The
    command does not stop at the first damage. It lists every damage with file, position, and what was
    expected and found; then the exit code is 4. It also lists files that the manifest does not name. They are
    not damage.
    """
    with progress("verifying") as advance:
        found = check(place.path, files=place.files, progress=advance)
    place.show(lambda: _verification(found), lambda: _show_verification(found))
    if not found.sound:
        click.get_current_context().exit(DAMAGED.code)


def _verification(found: Verification) -> dict[str, Any]:
    return {
        "path": str(found.path),
        "sound": found.sound,
        "checked": asdict(found.checked),
        "line": found.line,
        "damages": [{**asdict(d), "path": str(d.path)} for d in found.damages],
        "unnamed": [{"path": str(u.path), "what": u.what} for u in found.unnamed],
        "notes": found.notes,
    }


def _show_verification(found: Verification) -> None:
    red = click.style("damaged:", fg="red", bold=True)
    for damage in found.damages:
        where = printable(f"{damage.path}, {damage.position}")
        out(sentence(f"damaged: {where}").replace("damaged:", red, 1))
        out(sentence(f"  {damage.what}"))
        out(sentence(f"  expected: {printable(damage.expected)}"))
        out(sentence(f"  found:    {printable(damage.found)}"))
        if damage.remedy:
            out(sentence(f"  what to do: {damage.remedy}"))
    for unnamed in found.unnamed:
        out(sentence(f"not named: {printable(str(unnamed.path))} ({unnamed.what})"))
    for note in found.notes:
        out(sentence(f"note: {note}"))
    checked = found.checked
    out(
        sentence(
            f"checked {checked.files} files, {checked.bytes} bytes, {checked.blocks} blocks, "
            f"{checked.records} records, up to manifest line {found.line}"
        )
    )
    if found.sound:
        out(click.style("sound", fg="green"))
    else:
        word = "place" if len(found.damages) == 1 else "places"
        out(click.style(f"damaged in {len(found.damages)} {word}", fg="red"))
