"""Typed columns: the meaning of the bytes of keys and values, stored in `changelog.json` under "schema".

A changelog of typed columns has a `Columns`; a changelog of raw bytes has none (`RAW`). The types are
Spark's, in the JSON form of its schemas; pyspark is not needed. `docs/encoding.md` defines the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa

from keyfold.statestore.errors import BadRecord, ConfigError, SchemaMismatch
from keyfold.statestore.schema import key_decoder, spark_types
from keyfold.statestore.schema.json_codec import decode_objects, first_bad, first_misfit
from keyfold.statestore.schema.key_values import encode_beginning, encode_values
from keyfold.statestore.schema.spark_types import FieldJson

Format = Literal["raw", "json"]

#: The encoding of keys that `key_codec` writes, by its name in `changelog.json`.
KEY_ENCODING: Final = "ordered"

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

    `schema_json` is Spark's `StructType` as JSON: the stored columns in the order of the DataFrame. A key has
    its columns in the order of `keys`; equal keys have equal bytes, and the order of the bytes is Spark's
    order of the columns. A value has one of two formats:

    - `raw`: the bytes of its only column, a string or binary.
    - `json`: an object of its columns in the order of the DataFrame, `{}` without columns.

    Raises:
        SchemaMismatch: A type cannot be stored exactly, or not in a key. The message names the path in the
            column.
        ConfigError: Two columns have the same name, a key column does not exist, or a format does not fit.
    """

    schema_json: dict[str, Any] = field(hash=False)
    keys: tuple[str, ...]
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
        _check_format(self.value_format, self._value_fields)

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
            "key_encoding": KEY_ENCODING,
            "value_format": self.value_format,
        }

    @classmethod
    def from_json(cls, kept: Mapping[str, Any], *, path: Path | None = None) -> Columns:
        """The inverse of `to_json`.

        Raises:
            SchemaMismatch: The keys have another encoding. `path` is the file for the message.
        """
        found = kept.get("key_encoding")
        if found != KEY_ENCODING:
            raise SchemaMismatch(
                "This version of keyfold cannot read the keys of this changelog.", path=path,
                position='"key_encoding" in "schema"', expected=repr(KEY_ENCODING),
                found="none" if found is None else repr(found),
                remedy="read it with the version of keyfold that wrote it, and write it to a new changelog",
            )  # fmt: skip
        return cls(kept["columns"], tuple(str(name) for name in kept["keys"]), kept["value_format"])

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
        columns = {**self._decode_keys(keys), **_decode_values(values, self.value_format, self._value_schema)}
        return pa.Table.from_arrays(
            [columns[name] for name in self._arrow_schema.names], schema=self._arrow_schema
        )

    def misfit(self, keys: pa.Array, values: pa.Array) -> Misfit | None:
        """The first record that `decode` refuses or that lacks a value for a key column; None if there is
        none.

        Args:
            keys, values: The same as for `decode`, but one array each.
        """
        found = [_value_misfit(values, self.value_format, self._value_schema)]
        bad_key = key_decoder.first_misfit(keys, self._key_schema)
        if bad_key is not None:
            found.insert(0, Misfit(bad_key.row, f"key, column {bad_key.column!r}", bad_key.expected))
        return min((m for m in found if m is not None), default=None, key=lambda m: m.row)

    # -- keys ------------------------------------------------------------------------------------------------

    def encode_key(self, *parts: object) -> bytes:
        """The bytes of one key, equal to what a sink writes for these values.

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
        return encode_values(self._key_schema, values)

    def key_prefix(self, *leading: object, begins: bytes | str | None = None) -> bytes:
        """The bytes with which exactly those keys begin that have these values in their first columns.

        Args:
            leading: The values of the first key columns, fewer than there are key columns.
            begins: The beginning of the next column, a string or binary.

        Raises:
            BadRecord: A value is None or does not have its column's type, or there is none, or too many.
        """
        self._check_leading(leading, len(self.keys) - 1, least=0 if begins is not None else 1)
        encoded = encode_values(self._key_schema, leading, whole=False)
        return (
            encoded if begins is None else encoded + encode_beginning(self._key_schema, len(leading), begins)
        )

    def key_bound(self, *leading: object) -> bytes:
        """A bound for the `range` of a store: the smallest bytes of a key with these values in its first
        columns. In a struct a field that is None or left out is smaller than every value.

            store.range(columns.key_bound(monday), columns.key_bound(tuesday))

        Args:
            leading: The values of the first key columns.

        Raises:
            BadRecord: A value is None or does not have its column's type, or there is none, or too many.
        """
        self._check_leading(leading, len(self.keys), least=1)
        return encode_values(self._key_schema, leading, whole=False)

    def _check_leading(self, leading: Sequence[object], most: int, *, least: int) -> None:
        if not least <= len(leading) <= most or any(value is None for value in leading):
            raise BadRecord(
                "A range of keys needs values, not null, of the first key columns.",
                expected=f"{least} to {most} of {', '.join(self.keys)}",
                found=f"{sum(value is not None for value in leading)} values",
                remedy="give values for the first key columns, in this order",
            )

    def _decode_keys(self, keys: pa.Array | pa.ChunkedArray) -> dict[str, pa.ChunkedArray]:
        chunks = keys.chunks if isinstance(keys, pa.ChunkedArray) else [keys]
        tables = [key_decoder.decode(chunk.cast(pa.binary()), self._key_schema) for chunk in chunks]
        table = pa.concat_tables([*tables, self._key_schema.empty_table()])
        return {name: table.column(i) for i, name in enumerate(self.keys)}

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
        return Columns({"type": "struct", "fields": merged}, self.keys, self.value_format)

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


def default_format(fields: Sequence[FieldJson]) -> Format:
    """The default format of a value with these columns."""
    return "raw" if len(fields) == 1 and fields[0]["type"] in ("string", "binary") else "json"


def _check_format(format_: str, fields: Sequence[FieldJson]) -> None:
    if format_ != "json" and (format_ != "raw" or default_format(fields) != "raw"):
        raise ConfigError(
            "Format does not fit the columns of the value.",
            expected="json, or raw for one column of type string or binary",
            found=f"{format_} for {len(fields)} columns",
            remedy='use "json"',
        )


def _decode_values(
    records: pa.Array | pa.ChunkedArray, format_: Format, schema: pa.Schema
) -> dict[str, pa.ChunkedArray]:
    chunks = records.chunks if isinstance(records, pa.ChunkedArray) else [records]
    if format_ == "json":
        tables = [decode_objects(chunk.cast(pa.binary()), schema) for chunk in chunks]
        table = pa.concat_tables([*tables, schema.empty_table()])
        return {name: table.column(i) for i, name in enumerate(schema.names)}
    only = schema.field(0)
    try:
        return {only.name: pa.chunked_array([chunk.cast(only.type) for chunk in chunks], only.type)}
    except pa.ArrowInvalid:
        pass
    raise SchemaMismatch(
        "The value of a record is not valid UTF-8, but its column is a string.",
        position=f"column {only.name!r}",
        remedy="`keyfold verify` lists partition and offset of every such record; append the key again",
    )


def _value_misfit(records: pa.Array, format_: Format, schema: pa.Schema) -> Misfit | None:
    if format_ == "raw":
        only = schema.field(0)
        row = first_bad(records, lambda part: part.cast(only.type))
        return None if row is None else Misfit(row, f"value, column {only.name!r}", "valid UTF-8")
    found = first_misfit(records, schema)
    if found is None:
        return None
    row, name = found
    if name is None:
        columns = ", ".join(f"{field.name}: {field.type}" for field in schema) or "no field"
        return Misfit(row, "value", f"one JSON object with {columns}")
    return Misfit(row, f"value, column {name!r}", str(schema.field(name).type))
