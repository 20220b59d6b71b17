"""`keyfold compact` beside a living writer: that one does it, and there is never a second cleaner."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from keyfold import Changelog
from keyfold.checkpoints.cleaner.pool import POOL
from keyfold.checkpoints.log import compact_requests
from keyfold.checkpoints.log.compact_requests import Request
from keyfold.statestore.files import LOCAL
from support.waiting import eventually

LISTENING = {"cleaner.threads": 1, "min.cleanable.dirty.ratio": 1, "anchors.auto": 0}
COMMAND = [sys.executable, "-c", "from keyfold.checkpoints.cli.main import main; main()", "compact"]


def start_compact(path: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, str(path), *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def filled(path: Path, **config: object) -> Changelog:
    log = Changelog.open(path, partitions=2, config={**LISTENING, **config})
    for value in (b"1", b"2"):
        log.append(pa.table({"key": [b"%d" % n for n in range(100)], "value": [value] * 100}))
    return log


def test_the_living_writer_compacts_and_the_command_tells_what_it_did(tmp_path: Path) -> None:
    with filled(tmp_path / "log") as log:
        out, err = start_compact(log.path, "--json").communicate(timeout=60)
        assert err == ""
        document = json.loads(out)
        assert (document["records_before"], document["records_after"]) == (200, 100)
        assert sorted(p["partition"] for p in document["passes"]) == [0, 1]
        assert sum(p.records for p in log.state.partitions) == 100
        log.append(pa.table({"key": [b"7"], "value": [b"3"]}))
        assert not list((log.path / "requests").iterdir())


def test_what_keeps_the_writer_from_compacting_is_what_the_command_says(tmp_path: Path) -> None:
    with filled(tmp_path / "log", **{"cleanup.policy": "delete"}) as log:
        command = start_compact(log.path)
        _, err = command.communicate(timeout=60)
        assert command.returncode == 9
        assert "another process is writing; waiting for it to compact" in err
        assert "The writing process failed to compact: Compaction is disabled" in err
        assert "Traceback" not in err


def test_a_writer_that_cleans_only_by_hand_is_not_asked(tmp_path: Path) -> None:
    with filled(tmp_path / "log", **{"cleaner.threads": 0}) as log:
        command = start_compact(log.path)
        _, err = command.communicate(timeout=60)
        assert command.returncode == 5
        assert "set cleaner.threads to 1 in that process" in err


def test_where_the_writer_ends_first_the_command_compacts_itself(tmp_path: Path) -> None:
    with filled(tmp_path / "log") as log:
        POOL.remove(log.engine)  # it does not listen
        command = start_compact(log.path, "--json")
        eventually(lambda: bool(compact_requests.open_requests(LOCAL, log.path)))
    out, _ = command.communicate(timeout=60)
    assert json.loads(out)["records_after"] == 100


def test_a_request_of_a_dead_process_is_forgotten(tmp_path: Path) -> None:
    with filled(tmp_path / "log") as log:
        POOL.remove(log.engine)
        command = start_compact(log.path)
        eventually(lambda: bool(compact_requests.open_requests(LOCAL, log.path)))
        command.send_signal(signal.SIGKILL)
        command.communicate(timeout=60)
        assert compact_requests.open_requests(LOCAL, log.path) == []
        assert not list((log.path / "requests").iterdir())


def test_an_answer_that_nobody_waits_for_any_more_is_removed(tmp_path: Path) -> None:
    with Request(LOCAL, tmp_path) as request:
        (asked,) = compact_requests.open_requests(LOCAL, tmp_path)
        compact_requests.serve(LOCAL, tmp_path, asked, lambda full: {"passes": []})
        assert compact_requests.open_requests(LOCAL, tmp_path) == []
        assert request.answer(0) == {"passes": []}
    compact_requests.serve(LOCAL, tmp_path, asked, lambda full: {"passes": []})
    assert compact_requests.open_requests(LOCAL, tmp_path) == []
    assert not list((tmp_path / "requests").iterdir())
