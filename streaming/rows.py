"""Converts records to the rows of a mode: the columns that Spark sees, and Arrow batches of values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from keyfold.statestore.schema import spark_types

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

    @property
    def value_type(self) -> pa.DataType:
        """The type of the values in the records that `batches` takes."""
        return pa.binary() if self.columns is None else self.columns.value_type

    def batches(
        self, records: Iterator[pa.RecordBatch], partition: int, target: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        """Rows with the columns of `target`, for batches of records as they stand in the log."""
        for batch in records:
            if batch.num_rows:
                table = pa.Table.from_arrays(self._arrays(batch, partition), names=target.names)
                yield from table.cast(target).to_batches()

    def _arrays(self, batch: pa.RecordBatch, partition: int) -> list[pa.Array | pa.ChunkedArray]:
        key, value, offset = (batch.column(name) for name in ("key", "value", "offset"))
        timestamp = batch.column("timestamp").cast(pa.timestamp("us", "UTC"))
        number = pa.repeat(pa.scalar(partition, pa.int32()), batch.num_rows)
        if self.mode == "log":
            topic = pa.repeat(pa.scalar(self.topic), batch.num_rows)
            kind = pa.repeat(pa.scalar(_CREATE_TIME, pa.int32()), batch.num_rows)
            arrays = [key, value, topic, number, offset, timestamp, kind]
            return [*arrays, batch.column("headers")] if self.include_headers else arrays
        user = [key, value] if self.columns is None else self.columns.decode(key, value).columns
        if self.mode == "changes":
            return [*user, value.is_null(), number, offset, timestamp]
        return [*user, number, offset, timestamp] if self.columns is None else list(user)


def arrow_schema(schema: StructType) -> pa.Schema:
    """What Spark compares a source's batches with: the types of `toArrow()`, each column's nullability."""
    types = spark_types.arrow_schema([spark_types.cleaned(f) for f in schema.jsonValue()["fields"]])
    return pa.schema([f.with_nullable(s.nullable) for f, s in zip(types, schema.fields, strict=True)])


def check_schema(given: StructType, own: StructType, root: Path) -> None:
    """Raises `ConfigError` unless both are the same but for nullability and comments."""
    if _plain(given) != _plain(own):
        raise ConfigError(
            "The schema that was given is not the one this read has.", path=root,
            expected=own.simpleString(), found=given.simpleString(),
            remedy="leave schema(…) out: the changelog knows its columns; select or cast afterwards",
        )  # fmt: skip


def _plain(kind: DataType) -> object:
    """A type without nullability and metadata."""
    if isinstance(kind, StructType):
        return [(f.name, _plain(f.dataType)) for f in kind.fields]
    if isinstance(kind, ArrayType):
        return ("array", _plain(kind.elementType))
    if isinstance(kind, MapType):
        return ("map", _plain(kind.keyType), _plain(kind.valueType))
    return kind
