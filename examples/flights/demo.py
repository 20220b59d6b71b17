"""The demo: the job on real data, killed in the middle, its checkpoint deleted, resumed, and checked to the
last digit.

python demo.py [DIRECTORY]        (default: a new directory under var/)
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import data
import job
import oracle
import pandas as pd
from mirror import Mirror, entries
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from keyfold import Changelog, restore
from keyfold.sink.task_sink import Int64Serde
from keyfold.statestore.errors import KeyfoldError

HERE = Path(__file__).resolve().parent
#: The job is killed once its counters have taken in this share of the flights.
KILL_AT = 0.4
JOB_SECONDS_MAX = 600

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, nargs="?", default=HERE.parent.parent / "var" / "demo")
    root = parser.parse_args().directory.absolute()
    began = time.monotonic()
    if root.exists():
        shutil.rmtree(root)
    root.mkdir(parents=True)
    flights = data.flights()
    files = list(data.write_files(flights, root / "incoming", job.FILES))
    keyed = int(flights["tailnum"].notna().sum())
    console.print(f"{len(flights):,} flights of 2013 in {len(files)} files, {keyed:,} with an aircraft")

    console.rule("the job, until it is killed")
    run_until(root, keyed, KILL_AT)
    mirror = Mirror(root / "counters", root / "mirror.sqlite")
    console.print(f"a SQLite mirror of the counters reloads: {mirror.reload()} rows")
    shutil.rmtree(root / "spark" / "counters")
    console.print("[bold]killed with -9, Python and JVM; the counters' Spark checkpoint is deleted[/]")

    console.rule("the job again, the counters resumed from their changelog")
    run_until(root, keyed, None)
    console.print(f"the mirror follows: {mirror.follow()} changes")

    console.rule("compared with DuckDB over the raw table")
    check(root, flights, keyed, mirror)
    mirror.close()
    console.rule("compaction")
    compact(root)
    check_state(root, flights)
    console.print(f"files: {root}    whole demo: {time.monotonic() - began:.0f} s")


def run_until(root: Path, keyed: int, share: float | None) -> None:
    """Run the job to its end, or kill it, Python and JVM, once the counters have taken in `share` of the
    flights.
    """
    command = [sys.executable, str(HERE / "job.py"), str(root)]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    with (
        open(root / "job.log", "ab") as log,
        subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as process,
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=console,
        ) as bars,
    ):
        tasks = {name: bars.add_task(name, total=keyed) for name in ("events", "counters", "positions")}
        deadline = time.monotonic() + JOB_SECONDS_MAX
        try:
            while process.poll() is None and time.monotonic() < deadline:
                counted = show(root, bars, tasks)
                if share is not None and share * keyed <= counted < keyed:
                    return
                time.sleep(0.3)
            show(root, bars, tasks)
        finally:
            kill(process)
    if process.returncode != 0 or share is not None:
        fail(
            f"the job ended with {process.returncode}: see {root / 'job.log'}",
            (root / "job.log").read_text()[-3000:],
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Everything that the job has started, at once."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def show(root: Path, bars: Progress, tasks: dict[str, TaskID]) -> int:
    """Draw how far the changelogs are; returns how many flights the counters have taken in."""
    counted = 0
    for name, task in tasks.items():
        done = flights_in(root, name)
        bars.update(task, completed=done)
        counted = done if name == "counters" else counted
    return counted


def flights_in(root: Path, name: str) -> int:
    """How many flights a changelog reflects, by what it says itself."""
    try:
        with Changelog.open(root / name, mode="r") as log:
            if name == "events":
                return sum(log.end_offsets().values())
            last = log.last_commit(name)
            return 0 if last is None else job.position(last.source)
    except KeyfoldError:
        return 0


def check(root: Path, flights: pd.DataFrame, keyed: int, mirror: Mirror) -> None:
    """Every number, or the demo fails with the differences."""
    with Changelog.open(root / "events", mode="r") as log:
        events = sum(log.end_offsets().values())
    rejected = sum(map(Int64Serde().deserialize, restore(root / "rejected").to_dict().values()))
    report("flights in the event log", {"flights": events}, {"flights": keyed})
    report(
        "flights without an aircraft, counted apart", {"flights": rejected}, {"flights": len(flights) - keyed}
    )
    check_state(root, flights)
    table = restore(root / "counters").batches()
    report(
        "SQLite mirror",
        mirror.rows(),
        {key: value for batch in table for key, value in entries(batch)},
    )


def check_state(root: Path, flights: pd.DataFrame) -> None:
    report("carriers and destinations", restore(root / "counters").to_dict(), oracle.counters(flights))
    report(
        "aircraft seen in the last 30 days",
        job.positions(restore(root / "positions").to_dict()),
        oracle.positions(flights),
    )


def report(what: str, found: dict, expected: dict) -> None:  # type: ignore[type-arg]
    """One line if they are equal; else the differences, and the end."""
    lines = oracle.differences(found, expected)
    if lines:
        fail(f"{what}: not equal", "\n".join(lines))
    console.print(
        f"[green]equal[/]  {what}: {len(expected)} entries"
        if len(expected) > 1
        else f"[green]equal[/]  {what}: {next(iter(expected.values())):,}"
    )


def compact(root: Path) -> None:
    """Fold the compacted changelogs, and show what that does to their size and to the time of a restore."""
    table = Table("changelog", "records", "bytes", "restore", title="before → after compaction")
    for name in ("counters", "positions"):
        path = root / name
        with Changelog.open(path) as log:
            before = measured(log, path)
            log.compact()
            after = measured(log, path)
        table.add_row(name, *(f"{b} → {a}" for b, a in zip(before, after, strict=True)))
    console.print(table)


def measured(log: Changelog, path: Path) -> tuple[str, str, str]:
    """Records, bytes, and the median of five restores."""
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        restore(path).to_dict()
        seconds.append(time.perf_counter() - began)
    parts = log.state.partitions
    return (
        f"{sum(p.records for p in parts):,}",
        f"{sum(p.bytes for p in parts):,}",
        f"{statistics.median(seconds) * 1000:.0f} ms",
    )


def fail(what: str, detail: str) -> None:
    console.print(f"[bold red]{what}[/]\n{detail}", highlight=False, soft_wrap=True)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
