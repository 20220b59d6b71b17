"""A reader in another process: opens a view, and tells what it sees, as long as the view is open.

    python -m support.other_process

Each line of its input is a command in JSON, each line of its output the answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from keyfold import Changelog
from support.perfect import Ends, Found, found_in

_TESTS: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Seen:
    """What a view shows: of every partition its offsets, how far keys are unique, and all records."""

    starts: Ends
    ends: Ends
    unique_below: Ends
    next_commit: int
    apps: dict[str, int | None]
    records: list[list[Found]]


def seen_through(view: Changelog) -> Seen:
    state = view.state
    return Seen(
        tuple(view.start_offsets().values()),
        tuple(view.end_offsets().values()),
        tuple(p.unique_below for p in state.partitions),
        state.next_commit,
        {name: commit.batch for name, commit in state.apps.items()},
        [found_in(view.read(p)) for p in range(len(state.partitions))],
    )


class OtherProcess:
    """One view at a time. It ends with this process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.other_process"], cwd=_TESTS, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def open(self, path: Path) -> Ends:
        """Open a view; returns the start offsets that it shows."""
        return tuple(self._ask("open", str(path)))

    def refresh(self) -> Ends:
        return tuple(self._ask("refresh"))

    def close(self) -> None:
        self._ask("close")

    def seen(self) -> Seen:
        found = self._ask("seen")
        return Seen(
            tuple(found["starts"]), tuple(found["ends"]), tuple(found["unique_below"]),
            found["next_commit"], found["apps"],
            [[_record(*row) for row in rows] for rows in found["records"]],
        )  # fmt: skip

    def _ask(self, *command: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the other process has ended; its error is on standard error"
        return json.loads(line)


def _record(offset: int, key: str, value: str | None, time_ms: int) -> Found:
    return offset, bytes.fromhex(key), None if value is None else bytes.fromhex(value), time_ms


def main() -> None:
    view: Changelog | None = None
    for line in sys.stdin:
        answer: object = None
        command, *arguments = json.loads(line)
        if command == "open":
            view = Changelog.open(arguments[0], mode="r")
        assert view is not None
        if command == "refresh":
            view.refresh()
        if command == "close":
            view.close()
        elif command == "seen":
            answer = asdict(seen_through(view))
        else:
            answer = list(view.start_offsets().values())
        print(json.dumps(answer, default=bytes.hex), flush=True)


if __name__ == "__main__":
    main()
