"""`aggregate`: a `groupBy().agg()` that can start from a restored state.

Each aggregate is rewritten to one or two columns whose parts can be combined per group: a part for every row
of the stream and, if the query is resumed, one row per group from the changelog.

    sum(x)      x                       combined by sum
    count(x)    1 where x is not null   by sum
    min(x)      x                       by min
    max(x)      x                       by max
    avg(x)      the first two, as `<name>_sum` and `<name>_count`; `<name>` is computed from them

Spark's analyser resolves the arguments of an aggregate, so users can write their columns in any form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DecimalType, DoubleType, LongType, StructType

from keyfold.checkpoints.resume.resume import Resumed
from keyfold.sink.batch_gate import CONTINUES, check_dataframe
from keyfold.sink.query_plan import elements, kind_of, stateful
from keyfold.statestore.errors import ConfigError, SchemaMismatch
from keyfold.statestore.schema import spark_types
from keyfold.streaming.seed import seed

_REMEDY: Final = "use transformWithState with keyfold.initial_state, which begins with any state"
_LONG: Final = LongType()
_COUNT_AS_DECIMAL: Final = "decimal(20,0)"
#: The sum of decimals has this many more digits than its input, at most 38; see Spark's `Sum`.
_SUM_DIGITS: Final = 10
#: With more digits Spark's division keeps fewer after the point than its average does.
_AVERAGE_DIGITS_MAX: Final = 24
_MISSING: Final = "no such column"
#: Whether a row of the stream has changed the group; beside the parts where the query is resumed.
_CHANGED: Final = "keyfold_changed"
_WATERMARK: Final = "spark.watermarkDelayMs"


def aggregate(
    live: DataFrame,
    keys: str | Sequence[str],
    *aggregates: Column,
    resumed: Resumed | None = None,
    computed: Sequence[str] = (),
    whole: bool = False,
) -> DataFrame:
    """The aggregates of a stream per group, begun with the state of `resumed` if that is given.

        again = resume_if_lost("var/counts", app_id="counts", checkpoint="var/checkpoint")
        counts = aggregate(live, "word", F.sum("n").alias("n"), F.avg("n").alias("mean"), resumed=again)

    It is `live.groupBy(keys).agg(*aggregates)`, with two more columns for each average, `<name>_sum` and
    `<name>_count`: they have to be in the changelog for the query to be resumed. Write it in update mode.
    With `resumed` the restored state goes into the first micro-batch, as the query's first source, left of
    all others. As in a query that never stopped, only groups come out that a row of the stream has changed;
    the others are in the changelog.

    Sums of floats may differ in the last bit from those of a query that was never interrupted, because
    floats are added in another order, as after any shuffle. All else is the same, types too.

    Args:
        live: going on from `resumed.options()`.
        keys: columns of `live`; compute others first, with `withColumn`.
        aggregates: `F.sum`, `F.count`, `F.min`, `F.max`, `F.avg` of anything, each with an alias; a FILTER is
            taken.
        resumed: of the changelog that this query writes.
        computed: columns of the changelog that the query computes from the result, for `resumed`.
        whole: with `resumed`, let all restored groups come out of the first micro-batch: for a query that
            goes on with another changelog, which a `ChangelogSink` refuses without; or where a column in
            `computed` is new, which otherwise stays null in groups that do not change.

    Raises:
        ConfigError: an aggregate that cannot be put together from parts, or groups with a watermark, which
            end; the message names the column. Or another stateful operator in front.
        SchemaMismatch: the changelog holds other columns than these.
    """
    check_dataframe(live)
    _check_stateless(live)
    names = (keys,) if isinstance(keys, str) else tuple(keys)
    _check_keys(live, names)
    found = list(_analysed(live, names, aggregates))
    parts = [part for aggregated in found for part in aggregated.parts]
    _check_names([*names, _CHANGED, *(a.name for a in found), *(p.name for a in found for p in a.hidden)])
    rows = live.select(*map(_column, names), *(p.of_row() for p in parts))
    result = _result(rows, names, found)
    if resumed is None:
        return result
    if not live.isStreaming:
        raise ConfigError(
            "Only a stream can be resumed.", path=resumed.path, expected="spark.readStream",
            found="a DataFrame that is read once", remedy="leave resumed= out",
        )  # fmt: skip
    _check_held(resumed, names, [p.name for p in parts], result.schema, computed)
    state = seed(live.sparkSession, resumed)
    flag = _Part(_CHANGED, None, F.lit(True), F.max)
    unchanged = F.lit(False).alias(_CHANGED)
    held = state.select(*map(_column, names), *(_column(p.name) for p in parts), unchanged)
    both = held.unionByName(rows.select("*", flag.of_row()))
    merged = _result(both, names, [*found, _Aggregate(_CHANGED, (flag,), _column(_CHANGED))])
    if not whole:
        merged = merged.where(_CHANGED)
        fields = {f.name: f.metadata for f in live.schema.fields}
        marked = {n: _column(n).alias(n, metadata={**fields[n], CONTINUES: resumed.uuid}) for n in names}
        merged = merged.withColumns(marked)
    return merged.drop(_CHANGED)


@dataclass(frozen=True)
class _Part:
    """A column whose values are put together: `row` is that of one row of the stream.

    Attributes:
        type: of a sum, which has more digits than what is added; None where it is that of the values.
    """

    name: str
    type: DataType | None
    row: Column
    together: Callable[[Column], Column]

    def of_row(self) -> Column:
        return self._typed(self.row)

    def merged(self) -> Column:
        return self._typed(self.together(_column(self.name)))

    def _typed(self, column: Column) -> Column:
        """Sums of sums would get more digits with every resume."""
        return (column if self.type is None else column.cast(self.type)).alias(self.name)


@dataclass(frozen=True)
class _Aggregate:
    """One aggregate as the user wrote it: its parts, and the column that comes out."""

    name: str
    parts: tuple[_Part, ...]
    out: Column

    @property
    def hidden(self) -> tuple[_Part, ...]:
        """Parts that the user has not named."""
        return tuple(p for p in self.parts if p.name != self.name)


def _result(rows: DataFrame, keys: Sequence[str], aggregates: Sequence[_Aggregate]) -> DataFrame:
    merged = rows.groupBy(*map(_column, keys)).agg(*(p.merged() for a in aggregates for p in a.parts))
    if not any(a.hidden for a in aggregates):
        return merged
    columns = [c for a in aggregates for c in (a.out, *(_column(p.name) for p in a.hidden))]
    return merged.select(*map(_column, keys), *columns)


def _column(name: str) -> Column:
    return F.col(spark_types.quoted(name))


# -- what the analyser says ----------------------------------------------------------------------------------


def _analysed(live: DataFrame, keys: Sequence[str], aggregates: Sequence[Column]) -> Iterator[_Aggregate]:
    """What Spark takes each of the columns for."""
    if not aggregates or not all(isinstance(a, Column) for a in aggregates):
        raise ConfigError(
            "Not aggregates.", expected='columns such as F.sum("n").alias("n")',
            found=", ".join(type(a).__name__ for a in aggregates) or "none", remedy="give one or more",
        )  # fmt: skip
    frame: Any = live.groupBy(*map(_column, keys)).agg(*aggregates)
    plan = frame._jdf.queryExecution().analyzed()
    if plan.getClass().getSimpleName() != "Aggregate":
        raise _refused("; ".join(frame.columns[len(keys) :]), "its plan is more than one aggregation")
    listed = elements(plan.aggregateExpressions())
    context: Any = live.sparkSession.sparkContext._jvm
    ansi = str(live.sparkSession.conf.get("spark.sql.ansi.enabled")).lower() == "true"
    for expression in listed[len(listed) - len(aggregates) :]:
        yield _one(expression, context, ansi=ansi)


def _one(expression: Any, jvm: Any, *, ansi: bool) -> _Aggregate:
    name = str(expression.name())
    if "(" in name:
        raise ConfigError(
            "An aggregate has no name of its own.", position=f"column {name!r}", expected='.alias("…")',
            found="the name that Spark made", remedy="give it an alias: it becomes a column of the changelog",
        )  # fmt: skip
    held = expression.child() if kind_of(expression) == "Alias" else expression
    if kind_of(held) != "AggregateExpression":
        raise _refused(
            name, "it is computed from aggregates",
            "aggregate what it is computed from, and compute it after aggregate(…)",
        )  # fmt: skip
    if held.isDistinct():
        raise _refused(name, "DISTINCT needs all values of a group, not their result")
    function = held.aggregateFunction()
    # `try_sum` is a `Sum` as well: what is null after an overflow looks like a group without values.
    kind = str(function.prettyName())
    children = [_as_column(jvm, child) for child in elements(function.children())]
    types = [_type(child) for child in elements(function.children())]
    chosen = None if held.filter().isEmpty() else _as_column(jvm, held.filter().get())
    if kind == "count":
        part = _count(name, children, chosen)
        return _Aggregate(name, (part,), _column(name))
    result = _type(function)
    if isinstance(result, DecimalType) and kind in ("sum", "avg") and not ansi:
        raise _refused(
            name, "without spark.sql.ansi.enabled a sum that overflows is null, as that of no values is",
            "set spark.sql.ansi.enabled=true, or add doubles",
        )  # fmt: skip
    if kind == "avg":
        return _average(name, types[0], result, children, chosen)
    together = {"sum": F.sum, "min": F.min, "max": F.max}.get(kind)
    if together is None:
        raise _refused(name, f"{kind} cannot be continued from its result")
    part = _Part(name, result if kind == "sum" else None, _where(chosen, children[0]), together)
    return _Aggregate(name, (part,), _column(name))


def _count(name: str, children: Sequence[Column], chosen: Column | None) -> _Part:
    """A row counts where none of the columns is null, and the filter is true."""
    counted = F.lit(True) if chosen is None else chosen
    for child in children:
        counted = counted & child.isNotNull()
    row = F.when(counted, F.lit(1)).otherwise(F.lit(0))
    return _Part(name, _LONG, row, lambda part: F.coalesce(F.sum(part), F.lit(0).cast(_LONG)))


def _average(
    name: str, kind: DataType, result: DataType, children: Sequence[Column], chosen: Column | None
) -> _Aggregate:
    """As Spark's `Average` does it: doubles are summed for everything but decimals."""
    count = _count(f"{name}_count", children, chosen)
    total: DataType = DoubleType()
    counted = _column(count.name)
    if isinstance(kind, DecimalType):
        if kind.precision > _AVERAGE_DIGITS_MAX:
            raise _refused(
                name, f"the average of a {kind.simpleString()} cannot be computed from its parts exactly",
                f"cast to a decimal of at most {_AVERAGE_DIGITS_MAX} digits, or keep sum and count",
            )  # fmt: skip
        total = DecimalType(min(kind.precision + _SUM_DIGITS, 38), kind.scale)
        counted = counted.cast(_COUNT_AS_DECIMAL)
    elif not isinstance(result, DoubleType):
        raise _refused(name, f"an average of type {result.simpleString()} is not kept")
    part = _Part(f"{name}_sum", total, _where(chosen, children[0]), F.sum)
    mean = F.when(_column(count.name) > 0, _column(part.name) / counted).cast(result).alias(name)
    return _Aggregate(name, (part, count), mean)


def _where(chosen: Column | None, value: Column) -> Column:
    return value if chosen is None else F.when(chosen, value)


def _as_column(jvm: Any, expression: Any) -> Column:
    return Column(jvm.org.apache.spark.sql.classic.ExpressionUtils.column(expression))


def _type(expression: Any) -> DataType:
    kind = json.loads(expression.dataType().json())
    field = {"name": "x", "type": kind, "nullable": True, "metadata": {}}
    return StructType.fromJson({"type": "struct", "fields": [field]}).fields[0].dataType


# -- what is refused -----------------------------------------------------------------------------------------


def _refused(name: str, why: str, remedy: str = _REMEDY) -> ConfigError:
    return ConfigError(
        "An aggregate cannot be put together from parts.", position=f"column {name!r}",
        expected="sum, count, min, max or avg", found=why, remedy=remedy,
    )  # fmt: skip


def _check_keys(live: DataFrame, keys: Sequence[str]) -> None:
    fields = {f.name: f for f in live.schema.fields}
    unknown = [name for name in keys if name not in fields]
    if unknown or not keys:
        raise ConfigError(
            "The keys have to be columns of the stream.", expected=", ".join(fields),
            found=", ".join(map(str, unknown)) or "no key",
            remedy="name columns; compute others first: live.withColumn(…)",
        )  # fmt: skip
    for name in keys:
        if _WATERMARK in (fields[name].metadata or {}):
            raise ConfigError(
                "Groups of a key with a watermark expire, and a restored state has no watermark.",
                position=f"column {name!r}", expected="a key without a watermark",
                found="event time with a watermark",
                remedy=f"leave withWatermark(…) out, and keep all groups; or {_REMEDY}",
            )  # fmt: skip


def _check_stateless(live: DataFrame) -> None:
    """What other operators remember is in Spark's state only, and lost with the checkpoint."""
    for node in stateful(live._jdf.queryExecution().analyzed()):
        raise ConfigError(
            "The stream keeps state in addition to the aggregates, which a resumed query would lose.",
            expected="no stateful operator in front of aggregate(…)", found=kind_of(node),
            remedy="write what comes out of it to a changelog of its own, and aggregate that",
        )  # fmt: skip


def _check_names(names: Sequence[str]) -> None:
    lower = [name.lower() for name in names]
    twice = sorted({name for name in names if lower.count(name.lower()) > 1})
    if twice:
        raise ConfigError(
            "Two columns would have one name.", expected="names that differ in more than case",
            found=", ".join(twice),
            remedy="choose other aliases; an average named x also makes x_sum and x_count",
        )  # fmt: skip


def _check_held(
    resumed: Resumed, keys: Sequence[str], parts: Sequence[str], schema: StructType, computed: Sequence[str]
) -> None:
    """The changelog is where the totals so far are: it has to hold the parts, and nothing else that would not
    be written any more.
    """
    columns = resumed.columns
    if columns is None:
        raise SchemaMismatch(
            "The changelog holds bytes, not the columns of an aggregation.", path=resumed.path,
            expected=", ".join(schema.names), found="key and value",
            remedy="resume the changelog that this query's ChangelogSink writes, with keys=",
        )  # fmt: skip
    own = {f["name"]: _text(spark_types.cleaned(f)) for f in schema.jsonValue()["fields"]}
    held = {f["name"]: _text(f) for f in columns.schema_json["fields"]}
    needed = {*keys, *parts}
    different = [
        *(n for n in held if n not in computed and held[n] != own.get(n)),
        *(n for n in own if n in needed and n not in held),
    ]
    keys_differ = set(keys) != set(columns.keys)
    if not different and not keys_differ:
        return
    expected = [f"{n}: {held.get(n, _MISSING)}" for n in different]
    found = [f"{n}: {own.get(n, _MISSING)}" for n in different]
    if keys_differ:
        expected.append(f"keys {', '.join(columns.keys)}")
        found.append(f"keys {', '.join(keys)}")
    raise SchemaMismatch(
        "This aggregation is not the one that wrote the changelog.", path=resumed.path,
        expected="; ".join(expected), found="; ".join(found),
        remedy="aggregate what the changelog holds, and name in computed= what is computed after "
        "aggregate(…); the past of a new aggregate is not in it: for that, read all events again into a new "
        "changelog",
    )  # fmt: skip


def _text(column: spark_types.FieldJson) -> str:
    return spark_types.sql_text(column["type"])
