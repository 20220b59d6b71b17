"""soak_table.py FIGURES PAGE: put the figures of the last soak run into the page, between its two marks."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

BEGIN: Final = "<!-- soak: begin -->"
END: Final = "<!-- soak: end -->"

#: What an hour should count.
GOALS: Final = {
    "corruptions": 100_000,
    "kills, all together": 1_000,
    "kills of a PySpark query": 100,
    "planted bugs caught": 11,
    "power-loss states": 1_000_000,
}


def table(runs: list[dict[str, Any]]) -> str:
    """What was counted, by name, over all tests; then each test with its rounds and seeds."""
    totals: Counter[str] = Counter()
    for run in runs:
        totals.update(run["counts"])
    totals["kills, all together"] = sum(n for what, n in totals.items() if what.startswith("kills of"))
    lines = ["| counted | number | an hour's goal |", "|---|---:|---:|"]
    for what, number in sorted(totals.items()):
        goal = f"{GOALS[what]:,}" if what in GOALS else ""
        lines.append(f"| {what} | {number:,} | {goal} |")
    lines += ["", "| test | began | seconds | rounds | result | seeds, the first and the last |"]
    lines += ["|---|---|---:|---:|---|---|"]
    for run in runs:
        seeds = ", ".join(str(s) for s in run["seeds"])
        result = "passed" if run["passed"] else "FAILED"
        cells = [run["name"], run["began"], f"{run['seconds']:.0f}", str(run["rounds"]), result, seeds]
        lines.append(f"| {' | '.join(cells)} |")
    minutes = sorted({run["minutes_of_the_run"] for run in runs})
    machines = sorted({f"{run['machine']}, Python {run['python']}" for run in runs})
    text = f"`make soak MINUTES={minutes[0]:g}` on {'; '.join(machines)}."
    return "\n".join([text, "", *lines])


def main(figures: Path, page: Path) -> None:
    runs = [json.loads(path.read_text()) for path in sorted(figures.glob("*.json"))]
    if not runs:
        sys.exit(f"no figures in {figures}")
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{table(runs)}\n{END}{after}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
