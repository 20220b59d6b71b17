"""Typed columns: the meaning of the bytes of keys and values, stored in `changelog.json` under "schema".

A changelog of typed columns has a `Columns`; a changelog of raw bytes has none (`RAW`). The types are
Spark's, in the JSON form of its schemas; pyspark is not needed. `json_codec` defines the JSON of a column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from keyfold.statestore.errors import BadRecord, ConfigError, SchemaMismatch
from keyfold.statestore.schema import spark_types
from keyfold.statestore.schema.json_codec import decode_objects, first_bad, first_misfit
from keyfold.statestore.schema.json_keys import encode_object, encode_raw, first_other_form
from keyfold.statestore.schema.spark_types import FieldJson

Format = Literal["raw", "json"]

#: A changelog of raw bytes has no columns.
RAW: None = None


class Misfit(NamedTuple):
    """A record whose bytes do not match the columns: its row, which part of it, and what was expected."""

    row: int
    part: str
    expected: str


@dataclass(frozen=True)
class Columns:
    """The columns of a changelog, and how its keys and values encode them.

    `schema_json` is Spark's `StructType` as JSON: the stored columns in the order of the DataFrame. A key or
    value has one of two formats:

    - `raw`: the bytes of its only column, a string or binary.
    - `json`: an object of its columns. A key has them in the order of `keys`, a value in the order of the
      DataFrame. A value without columns is `{}`.

    Raises:
        SchemaMismatch: A type cannot be stored exactly, or not in a key. The message names the path in the
            column.
        ConfigError: Two columns have the same name, a key column does not exist, or a format does not fit.
    """

    schema_json: dict[str, Any] = field(hash=False)
    keys: tuple[str, ...]
    key_format: Format
    value_format: Format

    def __post_init__(self) -> None:
        self._check_shape()
        fields = [spark_types.cleaned(f) for f in self.schema_json["fields"]]
        object.__setattr__(self, "schema_json", {"type": "struct", "fields": fields})
        names = [f["name"] for f in fields]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                "Two columns have the same name.", found=", ".join(twice), remedy="rename one of them"
            )
        if not self.keys or not set(self.keys) <= set(names) or len(set(self.keys)) < len(self.keys):
            raise ConfigError(
                "Each key must be a column, named once.",
                expected=", ".join(names),
                found=", ".join(self.keys) or "none",
                remedy="correct the keys",
            )
        for f in fields:
            spark_types.check_column(f, is_key=f["name"] in self.keys)
        _check_format("key", self.key_format, self._key_fields)
        _check_format("value", self.value_format, self._value_fields)

    def _check_shape(self) -> None:
        kept, keys = self.schema_json, self.keys
        fields = kept.get("fields") if isinstance(kept, Mapping) else None
        if not isinstance(fields, list | tuple) or not all(
            isinstance(f, Mapping) and isinstance(f.get("name"), str) and "type" in f for f in fields
        ):
            raise ConfigError(
                "Not a schema.", expected='{"type": "struct", "fields": [{"name": …, "type": …}, …]}',
                found=type(kept).__name__, remedy="give the result of Spark's `df.schema.jsonValue()`",
            )  # fmt: skip
        if not isinstance(keys, list | tuple) or not all(isinstance(name, str) for name in keys):
            raise ConfigError(
                "The keys must be a tuple of column names.", expected="a tuple of names",
                found=type(keys).__name__, remedy='write a single key as ("name",)',
            )  # fmt: skip
        object.__setattr__(self, "keys", tuple(keys))

    # -- as it is kept ---------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The form stored in `changelog.json`."""
        return {
            "columns": self.schema_json,
            "keys": list(self.keys),
            "key_format": self.key_format,
            "value_format": self.value_format,
        }

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Columns:
        return cls(
            kept["columns"],
            tuple(str(name) for name in kept["keys"]),
            kept["key_format"],
            kept["value_format"],
        )

    # -- decoding --------------------------------------------------------------------------------------------

    def arrow_schema(self) -> pa.Schema:
        """The schema of decoded tables: the types of Spark's `toArrow()`, in the DataFrame's order, with
        timestamps in UTC.

        Every column is nullable: a tombstone has no values, and a record written before a column was added
        has no value for it.
        """
        return self._arrow_schema

    def decode(self, keys: pa.Array, values: pa.Array) -> pa.Table:
        """Decode records to a table with one row each and the columns of `arrow_schema`.

        Args:
            keys: Binary, without nulls.
            values: Binary; a null value (a tombstone) becomes null in every value column.

        Raises:
            SchemaMismatch: The bytes do not match these columns; `position` names the record.
        """
        key_columns = _decode(keys, self.key_format, self._key_schema, keys=True)
        value_columns = _decode(values, self.value_format, self._value_schema, keys=False)
        columns = {**key_columns, **value_columns}
        return pa.Table.from_arrays(
            [columns[name] for name in self._arrow_schema.names], schema=self._arrow_schema
        )

    def misfit(self, keys: pa.Array, values: pa.Array) -> Misfit | None:
        """The first record that `decode` refuses or that lacks a value for a key column; None if there is
        none.

        Args:
            keys, values: The same as for `decode`, but one array each.
        """
        found = (
            _misfit(keys, self.key_format, self._key_schema, keys=True),
            _misfit(values, self.value_format, self._value_schema, keys=False),
        )
        return min((m for m in found if m is not None), default=None, key=lambda m: m.row)

    def encode_key(self, *parts: object) -> bytes:
        """The bytes of one key, equal to what Spark writes for these values.

        Args:
            parts: The values of the key columns in the order of `keys`, or one mapping of column to value.

        Raises:
            BadRecord: A value is None or does not have its column's type.
        """
        values: Sequence[object] = parts
        if len(parts) == 1 and isinstance(parts[0], Mapping) and set(parts[0]) == set(self.keys):
            values = [parts[0][name] for name in self.keys]
        if len(values) != len(self.keys) or any(value is None for value in values):
            raise BadRecord(
                "A key needs a value that is not null for every key column.",
                expected=", ".join(self.keys),
                found=f"{sum(value is not None for value in values)} values",
                remedy="give one value for each key column, in this order",
            )
        if self.key_format == "json":
            return encode_object(self._key_schema, values)
        only, value = self._key_schema.field(0), values[0]
        return encode_raw(only, value)

    # -- evolution -------------------------------------------------------------------------------------------

    def accepts(self, other: Columns) -> Columns:
        """These columns plus those that `other` adds: the changelog's columns after `other` writes to it.

        An added column must be nullable, and it comes last. The order of the value columns may differ. A
        column, element or field that is nullable in only one of the two becomes nullable.

        Raises:
            SchemaMismatch: The columns differ in any other way. The message lists each difference.
        """
        mine = {f["name"]: f for f in self.schema_json["fields"]}
        theirs = {f["name"]: f for f in other.schema_json["fields"]}
        merged: list[FieldJson] = []
        different: list[str] = []
        for name, old in mine.items():
            new = theirs.pop(name, None)
            if new is None or spark_types.sql_text(new["type"]) != spark_types.sql_text(old["type"]):
                different.append(name)
            else:
                merged.append(spark_types.wider(old, new))
        added = list(theirs.values())
        fits = not different and all(f["nullable"] for f in added)
        if not fits or self.keys != other.keys or self.value_format != other.value_format:
            raise self._difference(other, [*different, *theirs], fits)
        merged += added
        return Columns({"type": "struct", "fields": merged}, self.keys, self.key_format, self.value_format)

    def _difference(self, other: Columns, names: Sequence[str], fits: bool) -> SchemaMismatch:
        """The error that shows the differences: in the columns `names`, the keys or the format."""
        mine = {f["name"]: f for f in self.schema_json["fields"]}
        theirs = {f["name"]: f for f in other.schema_json["fields"]}
        expected = [f"{name} {spark_types.described(mine.get(name))}" for name in names]
        found = [f"{name} {spark_types.described(theirs.get(name))}" for name in names]
        remedy = "only nullable value columns can be added; create a new changelog for other columns"
        if self.keys != other.keys:
            expected.append(f"keys {', '.join(self.keys)}")
            found.append(f"keys {', '.join(other.keys)}")
        if self.value_format != other.value_format:
            expected.append(f"values as {self.value_format}")
            found.append(f"values as {other.value_format}")
            if fits and self.value_format == "json":
                remedy = 'give value_format="json"'
            elif fits:
                remedy = 'raw values hold one column; create a new changelog with value_format="json"'
        return SchemaMismatch(
            "The columns differ from those of the changelog.",
            expected="; ".join(expected),
            found="; ".join(found),
            remedy=remedy,
        )

    # -- its parts -------------------------------------------------------------------------------------------

    @property
    def _key_fields(self) -> list[FieldJson]:
        fields = {f["name"]: f for f in self.schema_json["fields"]}
        return [fields[name] for name in self.keys]

    @property
    def _value_fields(self) -> list[FieldJson]:
        return [f for f in self.schema_json["fields"] if f["name"] not in self.keys]

    @cached_property
    def _arrow_schema(self) -> pa.Schema:
        return spark_types.arrow_schema(self.schema_json["fields"])

    @cached_property
    def _key_schema(self) -> pa.Schema:
        return spark_types.arrow_schema(self._key_fields)

    @cached_property
    def _value_schema(self) -> pa.Schema:
        return spark_types.arrow_schema(self._value_fields)


def raw_format(fields: Sequence[FieldJson]) -> Format:
    """The default format of a key or value with these columns."""
    return "raw" if len(fields) == 1 and fields[0]["type"] in ("string", "binary") else "json"


def _check_format(side: str, format_: str, fields: Sequence[FieldJson]) -> None:
    if format_ != "json" and (format_ != "raw" or raw_format(fields) != "raw"):
        raise ConfigError(
            f"Format does not fit the columns of the {side}.",
            expected="json, or raw for one column of type string or binary",
            found=f"{format_} for {len(fields)} columns",
            remedy='use "json"',
        )


def _decode(
    records: pa.Array, format_: Format, schema: pa.Schema, *, keys: bool
) -> dict[str, pa.ChunkedArray]:
    chunks = records.chunks if isinstance(records, pa.ChunkedArray) else [records]
    if format_ == "json":
        tables = [decode_objects(chunk.cast(pa.binary()), schema, keys=keys) for chunk in chunks]
        table = pa.concat_tables([*tables, schema.empty_table()])
        return {name: table.column(i) for i, name in enumerate(schema.names)}
    only = schema.field(0)
    try:
        return {only.name: pa.chunked_array([chunk.cast(only.type) for chunk in chunks], only.type)}
    except pa.ArrowInvalid:
        pass
    raise SchemaMismatch(
        f"The {'key' if keys else 'value'} of a record is not valid UTF-8, but its column is a string.",
        position=f"column {only.name!r}",
        remedy="`keyfold verify` lists partition and offset of every such record; append the key again",
    )


def _misfit(records: pa.Array, format_: Format, schema: pa.Schema, *, keys: bool) -> Misfit | None:
    side = "key" if keys else "value"
    if format_ == "raw":
        only = schema.field(0)
        row = first_bad(records, lambda part: part.cast(only.type))
        return None if row is None else Misfit(row, f"{side}, column {only.name!r}", "valid UTF-8")
    found = first_misfit(records, schema, keys=keys)
    if found is None:
        other = first_other_form(records, schema) if keys else None
        expected = "the bytes that columns.encode_key returns: other bytes are another key"
        return None if other is None else Misfit(other, side, expected)
    row, name = found
    if name is None:
        columns = ", ".join(f"{field.name}: {field.type}" for field in schema) or "no field"
        return Misfit(row, side, f"one JSON object with {columns}")
    null = " that is not null" if keys else ""
    return Misfit(row, f"{side}, column {name!r}", f"{schema.field(name).type}{null}")
