"""Totals per word as a `transformWithState`, with rows and with pandas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle


def processor(*, pandas: bool) -> StatefulProcessor:
    """Adds up `n` per word. Classes of a module of tests cannot be imported by Spark's workers."""

    class Totals(StatefulProcessor):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self.total = handle.getValueState("total", "n long")

        def add(self, n: int) -> int:
            before = self.total.get()
            total = n + (0 if before is None else int(before[0]))
            self.total.update((total,))
            return total

        def close(self) -> None:
            pass

    class RowTotals(Totals):
        def handleInputRows(self, key: Any, rows: Iterator[Row], timers: Any) -> Iterator[Row]:
            yield Row(word=key[0], n=self.add(sum(row.n for row in rows)))

        def handleInitialState(self, key: Any, initial: Row, timers: Any) -> None:
            self.add(initial.n)

    class PandasTotals(Totals):
        def handleInputRows(self, key: Any, rows: Any, timers: Any) -> Iterator[pd.DataFrame]:
            total = self.add(sum(int(frame["n"].sum()) for frame in rows))
            yield pd.DataFrame({"word": [key[0]], "n": [total]})

        def handleInitialState(self, key: Any, initial: pd.DataFrame, timers: Any) -> None:
            self.add(int(initial["n"].sum()))

    return PandasTotals() if pandas else RowTotals()


def by_rows(live: DataFrame, state: Any) -> DataFrame:
    grouped, totals = live.groupBy("word"), processor(pandas=False)
    return grouped.transformWithState(totals, "word string, n long", "Update", "none", state)


def by_pandas(live: DataFrame, state: Any) -> DataFrame:
    grouped, totals = live.groupBy("word"), processor(pandas=True)
    return grouped.transformWithStateInPandas(totals, "word string, n long", "Update", "none", state)
