"""The same numbers by two plain DuckDB queries over the raw table, to compare with."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import duckdb
import pandas as pd

COUNTERS = """
SELECT kind, name, count(*) AS flights, sum(coalesce(delay_minutes, 0)) AS delay_minutes, sum(miles) AS miles
FROM (
    SELECT 'carrier' AS kind, carrier AS name, delay_minutes, miles FROM flights WHERE tailnum IS NOT NULL
    UNION ALL
    SELECT 'destination' AS kind, dest AS name, delay_minutes, miles FROM flights WHERE tailnum IS NOT NULL
)
GROUP BY kind, name
"""

POSITIONS = """
WITH seen AS (
    SELECT tailnum, seq, scheduled, CASE WHEN landed THEN dest ELSE origin END AS airport
    FROM flights WHERE tailnum IS NOT NULL AND departed
)
SELECT tailnum, arg_max(airport, seq) AS airport, max(scheduled) AS seen
FROM seen GROUP BY tailnum
HAVING max(scheduled) >= (SELECT max(scheduled) FROM seen) - INTERVAL 30 DAY
"""


def counters(flights: pd.DataFrame) -> dict[tuple[str, str], dict[str, int]]:
    """(kind, name) → flights, delay_minutes, miles."""
    rows = duckdb.query_df(flights, "flights", COUNTERS).fetchall()
    return {
        (kind, name): {"flights": int(count), "delay_minutes": int(delay), "miles": int(miles)}
        for kind, name, count, delay, miles in rows
    }


def positions(flights: pd.DataFrame) -> dict[str, tuple[str, datetime]]:
    """tailnum → airport and when it was seen there, for aircraft seen in the last 30 days of the data."""
    rows = duckdb.query_df(flights, "flights", POSITIONS).fetchall()
    return {tailnum: (airport, seen) for tailnum, airport, seen in rows}


def differences(found: dict[Any, Any], expected: dict[Any, Any], limit: int = 10) -> list[str]:
    """A line for each key that differs, at most `limit`."""
    keys = sorted({*found, *expected}, key=str)
    lines = [
        f"{k}: found {found.get(k)}, expected {expected.get(k)}"
        for k in keys
        if found.get(k) != expected.get(k)
    ]
    return lines[:limit] + ([f"… and {len(lines) - limit} more"] if len(lines) > limit else [])
