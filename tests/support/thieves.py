"""Processes that take one changelog from each other, and tell what was acknowledged to them.

Run as `python -c "from support.thieves import main; main()" path report seed`. Each line of the report is one
JSON list: `["acknowledged", uuid, key]`, or `["fault", text]` for what must never happen.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TextIO

from keyfold import Changelog
from keyfold.statestore.errors import Damaged, KeyfoldError
from support.changelogs import rows

CONFIG = {"cleaner.threads": 1, "cleaner.backoff.ms": 50, "anchors.auto": 0, "segment.bytes": 4096}
#: Keys that all processes write again and again, so that there is something to fold.
SHARED = 20


class Thief:
    """One process. `moved`: directories are moved and removed as well, so what is there can be half gone."""

    def __init__(self, path: Path, report: TextIO, seed: str, *, moved: bool) -> None:
        self._path = path
        self._report = report
        self._draw = random.Random(seed)
        self._name = seed.replace("/", "-")
        self._moved = moved
        self._count = 0
        self._mine: dict[str, list[str]] = {}

    def work(self) -> None:
        """For ever: open, do a few things, close, or find that it was taken."""
        while True:
            try:
                with Changelog.open(self._path, steal=self._draw.random() < 0.7, config=CONFIG) as log:
                    for _ in range(self._draw.randrange(1, 12)):
                        self._act(log)
            except Damaged as e:
                if not self._moved:
                    self._tell("fault", f"{e}\n{traceback.format_exc()}")
            except KeyfoldError:
                pass

    def _act(self, log: Changelog) -> None:
        act = self._draw.choice(("append", "append", "append", "append", "compact", "get", "read"))
        if act == "append":
            self._append(log)
        elif act == "compact":
            log.compact()
        elif act == "get":
            log.get(b"shared1")
        elif not self._moved:
            self._read()

    def _append(self, log: Changelog) -> None:
        self._count += 1
        key, uuid = f"{self._name}-{self._count}", log.identity.uuid
        shared = ((f"shared{i}", key) for i in range(SHARED))
        log.append(rows((key, key), *shared), app_id=key, batch_id=0)
        self._tell("acknowledged", uuid, key)
        self._mine.setdefault(uuid, []).append(key)

    def _read(self) -> None:
        """What was acknowledged is there for every reader from then on."""
        with Changelog.open(self._path, mode="r") as reader:
            mine = self._mine.get(reader.identity.uuid, [])
            for key in self._draw.sample(mine, min(3, len(mine))):
                if reader.get(key.encode()) != key.encode():
                    self._tell("fault", f"{key} was acknowledged, and a reader does not see it")

    def _tell(self, *line: str) -> None:
        self._report.write(json.dumps(line) + "\n")
        self._report.flush()


def main() -> None:
    path, report, seed, moved = sys.argv[1:]
    with open(report, "a") as file:
        thief = Thief(Path(path), file, seed, moved=moved == "moved")
        try:
            thief.work()
        except BaseException:
            thief._tell("fault", traceback.format_exc())
            raise


def start(path: Path, report: Path, seed: str, *, moved: bool) -> subprocess.Popen[bytes]:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r}); "
    code += "from support.thieves import main; main()"
    kind = "moved" if moved else "in place"
    with open(report.with_suffix(".log"), "ab") as log:
        command = [sys.executable, "-c", code, str(path), str(report), seed, kind]
        return subprocess.Popen(command, stderr=log)


def told(reports: list[Path]) -> tuple[dict[str, set[str]], list[str]]:
    """uuid → keys that were acknowledged, and faults."""
    acknowledged: dict[str, set[str]] = {}
    faults = []
    for report in reports:
        for text in report.read_text().splitlines() if report.exists() else ():
            try:
                kind, *rest = json.loads(text)
            except ValueError:
                continue  # the process was killed while it wrote
            if kind == "fault":
                faults.append(rest[0])
            else:
                acknowledged.setdefault(rest[0], set()).add(rest[1])
    return acknowledged, faults
