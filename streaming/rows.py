"""Converts records to the rows of a mode: the columns that Spark sees, and Arrow batches of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from keyfold.statestore.errors import ConfigError
from keyfold.statestore.projection import as_type
from keyfold.statestore.schema import spark_types
from keyfold.statestore.segment.block import RECORD_SCHEMA

if TYPE_CHECKING:
    from keyfold.statestore.schema.columns import Columns
    from keyfold.streaming.options import Mode

#: Kafka's timestamp type 0 is CreateTime: the time that the producer gave the record.
_CREATE_TIME: Final = 0

_KAFKA: Final = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
    ]
)
_HEADERS: Final = StructField(
    "headers", ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
)
_RAW: Final = StructType([StructField("key", BinaryType()), StructField("value", BinaryType())])
_RAW_POSITION: Final = StructType(
    [
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
    ]
)
_CHANGE: Final = StructType(
    [
        StructField("_deleted", BooleanType()),
        StructField("_partition", IntegerType()),
        StructField("_offset", LongType()),
        StructField("_timestamp", TimestampType()),
    ]
)


@dataclass(frozen=True)
class Rows:
    """What the rows of one read are made of. It goes to the tasks."""

    mode: Mode
    columns: Columns | None
    topic: str
    include_headers: bool

    def schema(self, root: Path) -> StructType:
        """The columns that Spark is told of; all can be null. Raises `ConfigError` where names collide."""
        if self.mode == "log":
            kafka = StructType([self._log_field(f) for f in _KAFKA])
            return StructType([*kafka, _HEADERS]) if self.include_headers else kafka
        if self.columns is None:
            return StructType([*_RAW, *(_RAW_POSITION if self.mode == "state" else _CHANGE)])
        fields = StructType.fromJson(self.columns.schema_json).fields
        typed = [StructField(f.name, f.dataType, True, f.metadata) for f in fields]
        if self.mode == "state":
            return StructType(typed)
        own = {name.lower() for name in _CHANGE.names}
        taken = [f.name for f in typed if f.name.lower() in own]
        if taken:
            raise ConfigError(
                "Columns of this changelog have names that the mode 'changes' needs for itself.", path=root,
                expected="no column named " + ", ".join(_CHANGE.names), found=", ".join(taken),
                remedy='read it with mode "log", whose columns are as in Kafka, or rename them when writing',
            )  # fmt: skip
        return StructType([*typed, *_CHANGE])

    def _log_field(self, field: StructField) -> StructField:
        """A column of the mode "log": Kafka's, but a value of typed columns is a struct of them."""
        if field.name != "value" or self.columns is None:
            return field
        fields = StructType.fromJson(self.columns.schema_json).fields
        values = [
            StructField(f.name, f.dataType, True, f.metadata)
            for f in fields
            if f.name not in self.columns.keys
        ]
        return StructField("value", StructType(values))

    def value_type(self, target: pa.Schema) -> pa.DataType:
        """The type of the values in the records that `batches` takes: what the columns of `target` need."""
        if self.mode == "log" or self.columns is None:
            place = target.get_field_index("value")
            return pa.struct([]) if place < 0 else target.field(place).type
        return pa.struct([field for field in target if field.name in self.columns.value_names])

    def names(self, target: pa.Schema) -> list[str]:
        """The columns of the records that `batches` takes."""
        needed = {"offset", "value", *({"headers"} & {*target.names})}
        if self.mode == "state" or {"key", *(self.columns.keys if self.columns else ())} & {*target.names}:
            needed.add("key")
        if {"timestamp", "_timestamp"} & {*target.names}:
            needed.add("timestamp")
        return [name for name in RECORD_SCHEMA.names if name in needed]

    def batches(
        self, records: Iterator[pa.RecordBatch], partition: int, target: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        """Rows with the columns of `target`, for batches of records as they stand in the log."""
        for batch in records:
            if batch.num_rows:
                named = self._named(batch, partition, target)
                table = pa.Table.from_arrays([named[name]() for name in target.names], names=target.names)
                yield from table.cast(target).to_batches()

    def _named(
        self, batch: pa.RecordBatch, partition: int, target: pa.Schema
    ) -> dict[str, Callable[[], pa.Array]]:
        """How to make each column."""
        number = partial(pa.repeat, pa.scalar(partition, pa.int32()), batch.num_rows)

        def timestamp() -> pa.Array:
            return batch.column("timestamp").cast(pa.timestamp("us", "UTC"))

        key, value, offset = (partial(batch.column, name) for name in ("key", "value", "offset"))
        if self.mode == "log":
            return {
                "key": key, "value": value, "offset": offset, "partition": number, "timestamp": timestamp,
                "topic": partial(pa.repeat, pa.scalar(self.topic), batch.num_rows),
                "timestampType": partial(pa.repeat, pa.scalar(_CREATE_TIME, pa.int32()), batch.num_rows),
                "headers": partial(batch.column, "headers"),
            }  # fmt: skip
        if self.columns is None:
            named: dict[str, Callable[[], pa.Array]] = {"key": key, "value": value}
            if self.mode == "state":
                return {**named, "partition": number, "offset": offset, "timestamp": timestamp}
        else:
            named = self._typed(batch, target, self.columns)
        if self.mode == "state":
            return named
        own = {"_deleted": value().is_null, "_partition": number, "_offset": offset, "_timestamp": timestamp}
        return {**named, **own}

    def _typed(
        self, batch: pa.RecordBatch, target: pa.Schema, columns: Columns
    ) -> dict[str, Callable[[], pa.Array]]:
        value = batch.column("value")
        arrays = dict(zip((field.name for field in value.type), value.flatten(), strict=True))
        if not set(columns.keys).isdisjoint(target.names):
            keys = columns.decode_keys(batch.column("key"))
            arrays |= {
                name: as_type(keys[i], target.field(name).type)
                for i, name in enumerate(columns.keys)
                if name in target.names
            }
        return {name: partial(_given, array) for name, array in arrays.items()}


def _given(array: pa.Array) -> pa.Array:
    return array


def arrow_schema(schema: StructType) -> pa.Schema:
    """What Spark compares a source's batches with: the types of `toArrow()`, each column's nullability."""
    types = spark_types.arrow_schema([spark_types.cleaned(f) for f in schema.jsonValue()["fields"]])
    return pa.schema([f.with_nullable(s.nullable) for f, s in zip(types, schema.fields, strict=True)])


def selected(own: StructType, names: Sequence[str], root: Path) -> StructType:
    """Some of the columns, in the order of `names`.

    Raises:
        ConfigError: A column does not exist, or is named twice.
    """
    unknown = [name for name in names if name not in own.names]
    if unknown or len(set(names)) < len(names):
        raise ConfigError(
            "The option 'columns' is refused: a column does not exist in this read, or is named twice.",
            path=root, expected="some of " + ", ".join(own.names), found=", ".join(names),
            remedy="correct the names; write a name that has a comma in backquotes",
        )  # fmt: skip
    return StructType([own[name] for name in names])


def check_schema(given: StructType, own: StructType, root: Path) -> None:
    """Raises `ConfigError` unless each column of `given` is one of `own`, with the same type or with some
    fields of its structs. Nullability and comments do not count.
    """
    if not given.fields or not _is_part(given, own):
        raise ConfigError(
            "The schema that was given does not fit the columns of this read.", path=root,
            expected="some of " + own.simpleString(), found=given.simpleString(),
            remedy="give some of these columns, with these types, or leave schema(…) out; cast afterwards",
        )  # fmt: skip


def _is_part(part: DataType, whole: DataType) -> bool:
    """Whether a type is the same but for nullability and metadata, or has fewer fields in its structs."""
    if isinstance(part, StructType) and isinstance(whole, StructType):
        types = {f.name: f.dataType for f in whole.fields}
        names = part.names
        return len(set(names)) == len(names) and all(
            f.name in types and _is_part(f.dataType, types[f.name]) for f in part.fields
        )
    if isinstance(part, ArrayType) and isinstance(whole, ArrayType):
        return _is_part(part.elementType, whole.elementType)
    if isinstance(part, MapType) and isinstance(whole, MapType):
        return part.keyType == whole.keyType and _is_part(part.valueType, whole.valueType)
    return part == whole
