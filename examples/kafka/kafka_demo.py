"""The demo: flights go through Kafka; the job that counts them is killed and loses its checkpoints, and its
topic gets more partitions; it is resumed, and every number is compared with DuckDB over the raw table.

python kafka_demo.py [DIRECTORY] [--broker HOST:PORT] [--flights N]

Without --broker it starts one from `.kafka-jars/`, where `make demo-kafka` puts it. With it, the topics
`flights` and `aircraft` must not be there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE.parent / "flights"), str(ROOT / "tests")]

import data  # noqa: E402
import duckdb  # noqa: E402
import oracle  # noqa: E402

from keyfold import Changelog, restore  # noqa: E402
from keyfold.statestore.errors import KeyfoldError  # noqa: E402
from support.kafka_broker import Broker, unavailable  # noqa: E402

JARS = ROOT / ".kafka-jars-spark"
#: The job is killed once its counters have taken in this share of what the topic has.
KILL_AT = 0.3
JOB_SECONDS_MAX = 600
PARTITIONS = 3

CARRIERS = """
SELECT carrier, count(*) AS flights, sum(delay_minutes) AS delay_minutes, max(miles) AS longest
FROM flights GROUP BY carrier
"""
#: A cancelled flight deletes its aircraft.
AIRCRAFT = """
SELECT tailnum, arg_max(CASE WHEN landed THEN dest ELSE origin END, seq) AS airport
FROM flights WHERE tailnum IS NOT NULL
GROUP BY tailnum HAVING arg_max(departed, seq)
"""

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, nargs="?", default=ROOT / "var" / "demo-kafka")
    parser.add_argument("--broker")
    parser.add_argument("--flights", type=int, default=60_000)
    arguments = parser.parse_args()
    reason = None if arguments.broker else unavailable()
    if reason or not (JARS / "complete").exists():
        fail(reason or f"no jars of Spark's Kafka source in {JARS}", "`make demo-kafka` fetches them")
    root = arguments.directory.absolute()
    if root.exists():
        shutil.rmtree(root)
    (root / "broker").mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        broker = arguments.broker or stack.enter_context(Broker(root / "broker")).address
        run(root, broker, data.flights().head(arguments.flights))


def run(root: Path, broker: str, flights: pd.DataFrame) -> None:
    began = time.monotonic()
    # To mypy, `import kafka` is the folder of this file.
    kafka: Any = importlib.import_module("kafka")
    admin = kafka.KafkaAdminClient(bootstrap_servers=broker)
    new_topic: Any = importlib.import_module("kafka.admin").NewTopic
    admin.create_topics([new_topic(name, PARTITIONS, 1) for name in ("flights", "aircraft")])
    half = len(flights) // 2
    console.print(f"{len(flights):,} flights of 2013, half of them in the topics to begin with")
    produce(kafka, broker, flights.iloc[:half])

    console.rule("the job, until it is killed")
    run_job(root, broker, half, KILL_AT)
    for name in ("carriers", "aircraft"):
        shutil.rmtree(root / "spark" / name, ignore_errors=True)
    admin.create_partitions({"flights": PARTITIONS + 2})
    admin.close()
    produce(kafka, broker, flights.iloc[half:])
    console.print(
        "[bold]killed with -9, Python and JVM; both Spark checkpoints are deleted;\n"
        f"the topic flights has {PARTITIONS + 2} partitions now, not {PARTITIONS}, and the other half[/]"
    )

    console.rule("the job again, resumed from its changelogs")
    run_job(root, broker, len(flights), None)

    console.rule("compared with DuckDB over the raw table")
    check(root, flights)
    console.print(f"files: {root}    whole demo: {time.monotonic() - began:.0f} s")


def produce(kafka: Any, broker: str, flights: pd.DataFrame) -> None:
    """Each flight to the topic `flights`, as JSON; and where its aircraft is now to the topic `aircraft`."""
    producer = kafka.KafkaProducer(bootstrap_servers=broker, acks="all", linger_ms=20, batch_size=1 << 16)
    columns = ["carrier", "tailnum", "origin", "dest", "departed", "landed", "delay_minutes", "miles"]
    for row in flights[columns].astype(object).itertuples(index=False):
        delay = None if pd.isna(row.delay_minutes) else int(row.delay_minutes)
        flight = {"carrier": row.carrier, "delay_minutes": delay, "miles": int(row.miles)}
        tailnum = row.tailnum.encode() if isinstance(row.tailnum, str) else None
        producer.send("flights", key=tailnum, value=json.dumps(flight).encode())
        if tailnum is not None:
            airport = (row.dest if row.landed else row.origin).encode() if row.departed else None
            producer.send("aircraft", key=tailnum, value=airport, headers=[("carrier", row.carrier.encode())])
    producer.flush()
    producer.close()


def run_job(root: Path, broker: str, produced: int, share: float | None) -> None:
    """Run the job to its end, or kill it, Python and JVM, once the counters have taken in `share` of what was
    produced.
    """
    trigger = ["--per-trigger", str(max(1, produced // 12))]
    command = [sys.executable, str(HERE / "kafka_job.py"), str(root), "--broker", broker, "--jars", str(JARS)]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    with (
        open(root / "job.log", "ab") as log,
        subprocess.Popen(
            command + trigger, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        ) as process,
        console.status("counted") as status,
    ):  # fmt: skip
        deadline = time.monotonic() + JOB_SECONDS_MAX
        try:
            while process.poll() is None and time.monotonic() < deadline:
                counted = flights_in(root)
                status.update(f"{counted:,} flights counted")
                if share is not None and share * produced <= counted < produced:
                    console.print(f"{counted:,} of {produced:,} flights are counted")
                    return
                time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0 or share is not None:
        fail(f"the job ended with {process.returncode}", (root / "job.log").read_text()[-3000:])


def flights_in(root: Path) -> int:
    """How many flights the counters reflect, by the position in Kafka that their last commit keeps."""
    try:
        with Changelog.open(root / "carriers", mode="r") as log:
            last = log.last_commit("carriers")
    except KeyfoldError:
        return 0
    positions = [json.loads(text) for text in last.source if "flights" in text] if last else []
    return sum(sum(position["flights"].values()) for position in positions)


def check(root: Path, flights: pd.DataFrame) -> None:
    """Every number, or the demo fails with the differences."""
    carriers = {
        carrier: {"flights": int(count), "delay_minutes": None if delay is None else int(delay), "longest": m}
        for carrier, count, delay, m in duckdb.query_df(flights, "flights", CARRIERS).fetchall()
    }
    aircraft = {
        tailnum.encode(): airport.encode()
        for tailnum, airport in duckdb.query_df(flights, "flights", AIRCRAFT).fetchall()
    }
    for what, name, expected in (
        ("totals of the carriers", "carriers", carriers),
        ("where each aircraft is", "aircraft", aircraft),
    ):
        lines = oracle.differences(restore(root / name).to_dict(), expected)
        if lines:
            fail(f"{what}: not equal", "\n".join(lines))
        console.print(f"[green]equal[/]  {what}: {len(expected)} entries")


def fail(what: str, detail: str) -> None:
    console.print(f"[bold red]{what}[/]\n{detail}", highlight=False, soft_wrap=True)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
