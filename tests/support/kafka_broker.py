"""A real Kafka broker for tests: one KRaft node on free loopback ports, its log in a temporary folder.

The jars come from Maven Central: `make setup` puts them into `.kafka-jars/` where Maven is at hand.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
JARS = ROOT / ".kafka-jars"
_START_SECONDS = 90.0


def java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=f"{home}/bin" if home else None)


def unavailable() -> str | None:
    """Why no broker can be started here, None where one can."""
    if java() is None:
        return "no Java"
    if not (JARS / "complete").exists():
        return f"no Kafka jars in {JARS.name}/: `make setup` fetches them where Maven (mvn) is installed"
    return None


class Broker:
    """A broker that runs until the context is left. Its log does not survive it.

    Args:
        folder: an empty folder, for its log and what it prints.
        settings: by Kafka's names, beside those that make it one node on loopback.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object] | None = None) -> None:
        self.folder = folder
        self.log_directory = folder / "log"
        self.address = ""
        self._settings = dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Broker:
        with contextlib.ExitStack() as stack:
            ports = [stack.enter_context(socket.socket()) for _ in range(2)]
            for port in ports:
                port.bind(("127.0.0.1", 0))
            self.address, controller = (f"127.0.0.1:{port.getsockname()[1]}" for port in ports)
        properties = self.folder / "server.properties"
        properties.write_text(
            "".join(f"{k}={v}\n" for k, v in {**self._node(controller), **self._settings}.items())
        )
        # Its first bits make the first character: a dash there would be taken for an option.
        cluster = base64.urlsafe_b64encode(b"k" + uuid.uuid4().bytes[1:]).decode().rstrip("=")
        with (self.folder / "broker.txt").open("wb") as output:
            format_log = ("kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(properties))
            if self._java(output, *format_log).wait() != 0:
                raise RuntimeError(f"formatting the broker's folder failed\n{self._printed()}")
            self._process = self._java(output, "kafka.Kafka", str(properties))
        try:
            self._await_start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Nothing of its log is wanted any more, so it is not asked to close it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def cleaned_up_to(self) -> dict[tuple[str, int], int]:
        """(topic, partition) → the first offset that the cleaner has not cleaned, as it noted it.

        It notes this when a pass is over and the cleaned segments are swapped in
        (`LogCleanerManager.doneCleaning`). Each line of its file is a topic, a partition and an offset.
        """
        with contextlib.suppress(FileNotFoundError):
            lines = (self.log_directory / "cleaner-offset-checkpoint").read_text().splitlines()[2:]
            entries = (line.rsplit(" ", 2) for line in lines)
            return {(topic, int(partition)): int(offset) for topic, partition, offset in entries}
        return {}

    def check_alive(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(f"the broker ended with {self._process.returncode}\n{self._printed()}")

    def _node(self, controller: str) -> dict[str, Any]:
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{controller}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": self.log_directory,
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
        }

    def _java(self, output: IO[bytes], *arguments: str) -> subprocess.Popen[bytes]:
        program = java()
        assert program is not None
        options = ("-Xmx768m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", f"{JARS}/*")
        return subprocess.Popen([program, *options, *arguments], stdout=output, stderr=subprocess.STDOUT)

    def _await_start(self) -> None:
        host, port = self.address.split(":")
        for _ in _until(_START_SECONDS, "the broker did not start"):
            self.check_alive()
            with contextlib.suppress(OSError):
                socket.create_connection((host, int(port)), timeout=1).close()
                return

    def _printed(self) -> str:
        return (self.folder / "broker.txt").read_text(errors="replace")[-2000:]


def _until(seconds: float, what: str) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.05)
    raise TimeoutError(f"{what} within {seconds:.0f} s")
