"""The classes for limits and triggers that Spark has from 4.2 on, and what stands for them with 4.1.

With 4.1 a source is not asked how far a trigger should go: it always goes to the last commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )

    HAS_LIMITS: bool
else:
    try:
        from pyspark.sql.streaming.datasource import (
            ReadAllAvailable,
            ReadLimit,
            ReadMaxRows,
            SupportsTriggerAvailableNow,
        )

        HAS_LIMITS = True
    except ImportError:
        HAS_LIMITS = False

        class ReadLimit:
            """Spark 4.2: how much a trigger may read."""

        class ReadAllAvailable(ReadLimit):
            """Spark 4.2: all there is."""

        @dataclass
        class ReadMaxRows(ReadLimit):
            """Spark 4.2: so many rows."""

            max_rows: int

        class SupportsTriggerAvailableNow:
            """Spark 4.2: the source itself stops at what is there when the query starts."""


__all__ = ["HAS_LIMITS", "ReadAllAvailable", "ReadLimit", "ReadMaxRows", "SupportsTriggerAvailableNow"]
