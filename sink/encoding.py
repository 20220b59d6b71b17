"""Converts a DataFrame's rows to records: which columns form key and value, and which rows are deletes.

Spark expressions encode values in the JVM; `json_columns` defines how a column is written. Key columns stay
as they are: the tasks encode them with `key_codec`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import get_args

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from keyfold.sink import json_columns
from keyfold.sink.json_columns import Part
from keyfold.statestore import arguments
from keyfold.statestore.errors import BadRecord, ConfigError, SchemaMismatch
from keyfold.statestore.schema.columns import Columns, Format, default_format
from keyfold.statestore.schema.spark_types import quoted

Names = str | Sequence[str] | None

_KAFKA_OPTIONAL = {"headers": "array<struct<key:string,value:binary>>", "timestamp": "timestamp"}
_KAFKA_IGNORED = ("topic", "partition", "offset", "timestampType")
_ORDERED = (T.NumericType, T.StringType, T.BinaryType, T.BooleanType, *json_columns.TIMES)


class RowEncoding:
    """How the rows of one DataFrame become records.

    Args:
        schema: The schema of the DataFrame.
        keys: The key columns. None for a DataFrame in Kafka's shape: `key` and `value` of type binary or
            string, and optionally `headers` and `timestamp`. Kafka's other columns are dropped.
        column_list: The columns of the value; all columns except the keys by default.
        except_column_list: Columns to leave out of the value.
        apply_as_deletes: A SQL condition on the DataFrame's columns. A row for which it is true becomes a
            tombstone.
        value_format: "raw" or "json". Defaults to raw for one value column of type string or binary,
            otherwise to JSON.
        sequence_by: Columns or SQL expressions to keep for ordering the changes of one key.

    `columns` are the columns of the changelog; None in Kafka's shape.

    Raises:
        ConfigError: A column does not exist, or arguments contradict each other.
        SchemaMismatch: A type cannot be stored exactly, or not in a key. The message names its path.
    """

    def __init__(
        self,
        schema: T.StructType,
        keys: Names = None,
        *,
        column_list: Names = None,
        except_column_list: Names = None,
        apply_as_deletes: str | None = None,
        value_format: Format | None = None,
        sequence_by: Names = None,
    ) -> None:
        check_arguments(keys, apply_as_deletes, sequence_by, column_list, except_column_list, value_format)
        self.columns: Columns | None = None
        self._schema = schema
        self._deletes = apply_as_deletes
        self._sequence = _names(sequence_by, "sequence_by")
        self._record: list[Column] | None = None
        lowered = [name.lower() for name in schema.names]
        self._by_name = len(set(lowered)) == len(lowered)
        key_names = _names(keys, "keys")
        if key_names:
            values = _value_names(schema, key_names, column_list, except_column_list)
            self.columns = _columns(schema, key_names, values, value_format)
        else:
            _check_kafka_shape(schema)

    def select(self, df: DataFrame) -> DataFrame:
        """The records of `df`, in its order.

        Columns: the key columns in their order as `key_0`, `key_1`, ..., in Kafka's shape `key`, binary
        (`Stage` refuses a row with a null in them, and names it); `value`, binary, null for a tombstone; in
        Kafka's shape `headers` and `timestamp` (bigint, milliseconds since 1970) if `df` has them;
        `sequence_0`, `sequence_1`, ... for `sequence_by`.

        If a row cannot be written exactly, Spark raises an error while it runs this: see `refusal`.

        Raises:
            SchemaMismatch: The columns of `df` are not those of the given schema.
            ConfigError: `apply_as_deletes` or `sequence_by` is not an expression of a valid type.
        """
        if [(f.name, f.dataType) for f in df.schema] != [(f.name, f.dataType) for f in self._schema]:
            raise SchemaMismatch(
                "The columns of the DataFrame changed between batches.",
                expected=self._schema.simpleString(),
                found=df.schema.simpleString(),
                remedy="use a sink for DataFrames of one query only, or create one sink per query",
            )
        if self._record is None:
            for argument, text in self._expressions():
                _check_expression(df, argument, text)
            # Kept for the next batch: each part of an expression is a call to the JVM.
            self._record = self._columns_of_a_record()
        # Each step analyses the plan again, which takes 10 ms of every batch.
        return (df if self._by_name else self._numbered(df)).select(*self._record)

    def _columns_of_a_record(self) -> list[Column]:
        if self.columns is None:
            key, value, *more = self._kafka_record()
            keys = [key.alias("key")]
        else:
            keys, value, more = self._keys(self.columns), self._value(self.columns), []
        if self._deletes is not None:
            deletes = F.expr(self._deletes) if self._by_name else F.col("deletes")
            value = F.when(deletes, F.lit(None).cast("binary")).otherwise(value)
        sequence = [
            F.expr(text).alias(f"sequence_{i}") if self._by_name else F.col(f"sequence_{i}")
            for i, text in enumerate(self._sequence)
        ]
        return [*keys, value.alias("value"), *more, *sequence]

    def _expressions(self) -> list[tuple[str, str]]:
        """The given SQL texts, each with the name of its argument."""
        deletes = [("apply_as_deletes", self._deletes)] if self._deletes is not None else []
        return [*deletes, *(("sequence_by", text) for text in self._sequence)]

    def _numbered(self, df: DataFrame) -> DataFrame:
        """`df` with the expressions, and with columns named by position if names are ambiguous."""
        names = [f"c{i}" for i in range(len(self._schema.fields))]
        names += ["deletes"] if self._deletes is not None else []
        names += [f"sequence_{i}" for i in range(len(self._sequence))]
        return df.select("*", *(F.expr(text) for _, text in self._expressions())).toDF(*names)

    def _part(self, name: str) -> Part:
        i = self._schema.names.index(name)
        return Part(name, F.col(quoted(name) if self._by_name else f"c{i}"), self._schema.fields[i].dataType)

    def _keys(self, columns: Columns) -> list[Column]:
        parts = [self._part(name) for name in columns.keys]
        return [json_columns.refusing_key(part).alias(f"key_{i}") for i, part in enumerate(parts)]

    def _value(self, columns: Columns) -> Column:
        names = [f["name"] for f in columns.schema_json["fields"] if f["name"] not in columns.keys]
        parts = [part for part in map(self._part, names) if not isinstance(part.kind, T.NullType)]
        if columns.value_format == "raw":
            name, col, _ = parts[0]
            missing = json_columns.raised(
                f"Column {name!r} is null, and a null value would delete the key.",
                'delete with apply_as_deletes=, or keep nulls with value_format="json"',
            )
            value = F.when(col.isNull(), missing).otherwise(col.cast("binary"))
        else:
            value = json_columns.value_object(parts).cast("binary")
        return json_columns.refusing(value, parts)

    def _kafka_record(self) -> list[Column]:
        record = [self._part(name).column.cast("binary") for name in ("key", "value")]
        if "headers" in self._schema.names:
            record.append(self._part("headers").column.alias("headers"))
        if "timestamp" in self._schema.names:
            record.append(F.unix_millis(self._part("timestamp").column).alias("timestamp"))
        return record


def refusal(error: BaseException) -> BadRecord | None:
    """The `BadRecord` in an error that Spark raised for a row of `RowEncoding.select`, or None."""
    if not isinstance(error, PySparkException) or error.getCondition() != "USER_RAISED_EXCEPTION":
        return None
    message = (error.getMessageParameters() or {}).get("errorMessage", "")
    if not message.startswith(json_columns.MARK):
        return None
    what, _, remedy = message.removeprefix(json_columns.MARK).partition(json_columns.REMEDY)
    return BadRecord(what, remedy=remedy)


# -- which columns -------------------------------------------------------------------------------------------


def check_arguments(
    keys: Names,
    apply_as_deletes: str | None,
    sequence_by: Names,
    column_list: Names,
    except_column_list: Names,
    value_format: Format | None,
) -> None:
    """Check what can be checked without a DataFrame. Raises `ConfigError`."""
    named = _names(keys, "keys")
    for argument, given in (
        ("sequence_by", sequence_by),
        ("column_list", column_list),
        ("except_column_list", except_column_list),
    ):
        _names(given, argument)
    if apply_as_deletes is not None:
        arguments.text("apply_as_deletes", apply_as_deletes)
    if value_format not in (None, *get_args(Format)):
        raise ConfigError(
            "Unknown value_format.", expected=", ".join(map(repr, get_args(Format))),
            found=repr(value_format), remedy="use one of these, or leave it out",
        )  # fmt: skip
    if column_list is not None and except_column_list is not None:
        raise ConfigError("column_list and except_column_list exclude each other.", remedy="use one of them")
    if not named and (column_list, except_column_list, value_format) != (None, None, None):
        raise ConfigError(
            "column_list, except_column_list and value_format need typed columns.",
            remedy="name the key columns: keys=",
        )


def _names(given: Names, argument: str) -> list[str]:
    """One name or several. Raises `ConfigError`."""
    if given is None:
        return []
    names = [given] if isinstance(given, str) else given
    if (
        not isinstance(names, list | tuple)
        or any(type(name) is not str or not name for name in names)
        or len(set(names)) < len(names)
    ):
        raise ConfigError(
            f"{argument} must be unique names.", expected="one name, or a list of names", found=repr(given),
            remedy=f"correct `{argument}=`",
        )  # fmt: skip
    return list(names)


def _value_names(schema: T.StructType, keys: list[str], include: Names, exclude: Names) -> list[str]:
    included, excluded = _names(include, "column_list"), _names(exclude, "except_column_list")
    for argument, named in (("keys", keys), ("column_list", included), ("except_column_list", excluded)):
        for name in named:
            if name not in schema.names:
                raise _no_such_column(schema, argument, name)
    left_out = [name for name in excluded if name in keys]
    if left_out:
        raise ConfigError(
            "except_column_list contains a key column.", expected="columns of the value",
            found=f"except_column_list: {', '.join(left_out)}", remedy="remove it from except_column_list",
        )  # fmt: skip
    wanted = schema.names if include is None else included
    return [name for name in schema.names if name in wanted and name not in excluded and name not in keys]


def _no_such_column(schema: T.StructType, argument: str, name: str) -> ConfigError:
    lowered = {other.lower(): other for other in schema.names}
    near = [lowered[low] for low in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)]
    return ConfigError(
        f"{argument} names a column that does not exist.",
        expected=f"one of {', '.join(near or schema.names)}",
        found=name,
        remedy=f"did you mean {near[0]!r}?" if near else None,
    )


def _columns(
    schema: T.StructType, keys: list[str], values: list[str], value_format: Format | None
) -> Columns:
    fields = schema.jsonValue()["fields"]
    value_fields = [f for f in fields if f["name"] in values]
    return Columns(
        {"type": "struct", "fields": [f for f in fields if f["name"] in keys or f["name"] in values]},
        tuple(keys),
        value_format or default_format(value_fields),
    )


def _check_kafka_shape(schema: T.StructType) -> None:
    types = {f.name: f.dataType.simpleString() for f in schema}
    for name in ("key", "value"):
        if types.get(name) not in ("binary", "string"):
            raise ConfigError(
                "Without keys the DataFrame needs Kafka's columns key and value.",
                expected=f"{name} of type binary or string",
                found=", ".join(f"{other} {kind}" for other, kind in types.items()),
                remedy="name the key columns: keys=",
            )
    for name, expected in _KAFKA_OPTIONAL.items():
        if types.get(name, expected) != expected:
            raise ConfigError(
                f"Kafka's column {name} has the wrong type.",
                expected=expected,
                found=types[name],
                remedy="cast it, drop it, or name the key columns: keys=",
            )
    unknown = [n for n in types if n not in ("key", "value", *_KAFKA_OPTIONAL, *_KAFKA_IGNORED)]
    if unknown or len(types) < len(schema.fields):
        raise ConfigError(
            "Without keys the DataFrame can have only Kafka's columns, each once.",
            found=", ".join(unknown or schema.names),
            remedy="drop the other columns, or name the key columns: keys=",
        )


def _check_expression(df: DataFrame, argument: str, text: str) -> None:
    try:
        kind = df.select(F.expr(text)).schema.fields[0].dataType
    except AnalysisException as error:
        raise ConfigError(
            f"{argument} is not a SQL expression on the DataFrame's columns.",
            expected=f"columns {', '.join(df.columns)}",
            found=f"{text} ({error.getCondition()})",
            remedy="correct the expression",
        ) from None
    if argument == "apply_as_deletes" and not isinstance(kind, T.BooleanType):
        raise ConfigError(
            f"{argument} is not a condition.", expected="boolean", found=kind.simpleString(),
            remedy="give an expression that is true if a row deletes its key",
        )  # fmt: skip
    if argument == "sequence_by" and not isinstance(kind, _ORDERED):
        raise ConfigError(
            f"{argument} has a type that cannot be ordered.",
            expected="a number, string, binary, boolean, date or timestamp",
            found=f"{text}: {kind.simpleString()}",
            remedy="list the fields of a struct one by one",
        )
