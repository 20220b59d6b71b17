"""Typed columns: what the keys and values of a changelog are, stored in `changelog.json` under "schema".

A changelog of typed columns has a `Columns`; a changelog of raw bytes has none (`RAW`). The types are
Spark's, in the JSON form of its schemas; pyspark is not needed. `docs/encoding.md` defines the bytes of keys,
and of values in a store; in the log a value is a struct of its columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from keyfold.statestore.errors import BadRecord, ConfigError, SchemaMismatch
from keyfold.statestore.projection import as_type
from keyfold.statestore.schema import key_codec, key_decoder, rows, spark_types
from keyfold.statestore.schema.key_values import KeyEncoder, encode_beginning, encode_values
from keyfold.statestore.schema.python_values import to_python
from keyfold.statestore.schema.row_values import RowValues
from keyfold.statestore.schema.spark_types import FieldJson

#: The encoding of keys that `key_codec` writes, by its name in `changelog.json`.
KEY_ENCODING: Final = "ordered"

#: The types of most keys, which are neither None nor a mapping.
_SCALARS: Final = frozenset((int, str, bytes))

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

    A key has its columns in the order of `keys`; equal keys have equal bytes, and the order of the bytes is
    Spark's order of the columns. A value is a struct of the other columns.

    Attributes:
        schema_json: Spark's `StructType` as JSON: the stored columns in the order of the DataFrame.
        earlier: The same as it was before each change, the oldest first. A row in a store has the number of
            the schema that it was written with, from 1.

    Raises:
        SchemaMismatch: A type cannot be stored exactly, or not in a key. The message names the path in the
            column.
        ConfigError: Two columns have the same name, or a key column does not exist.
    """

    schema_json: dict[str, Any] = field(hash=False)
    keys: tuple[str, ...]
    earlier: tuple[dict[str, Any], ...] = field(default=(), hash=False)

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
            "earlier": list(self.earlier),
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
        return cls(kept["columns"], tuple(str(name) for name in kept["keys"]), tuple(kept["earlier"]))

    # -- decoding --------------------------------------------------------------------------------------------

    def arrow_schema(self) -> pa.Schema:
        """The schema of decoded tables: the types of Spark's `toArrow()`, in the DataFrame's order, with
        timestamps in UTC.

        Every column is nullable: a tombstone has no values, and a record written before a column was added
        has no value for it.
        """
        return self._arrow_schema

    def decode(self, keys: pa.Array | pa.ChunkedArray, values: pa.Array | pa.ChunkedArray) -> pa.Table:
        """Decode records to a table with one row each and the columns of `arrow_schema`.

        Args:
            keys: Binary, without nulls.
            values: Structs of value columns; a null value (a tombstone) is null in every value column.

        Raises:
            SchemaMismatch: The bytes of a key do not match these columns; `position` names the record.
        """
        columns = self._decode_keys(keys)
        chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
        parts = [as_type(chunk, self.value_type).flatten() for chunk in chunks]
        for i, value in enumerate(self._value_schema):
            columns[value.name] = pa.chunked_array([part[i] for part in parts], value.type)
        return pa.Table.from_arrays(
            [columns[name] for name in self._arrow_schema.names], schema=self._arrow_schema
        )

    def misfit(self, keys: pa.Array) -> Misfit | None:
        """The first key that `decode` refuses; None if there is none. `keys` is binary."""
        found = key_decoder.first_misfit(keys, self._key_schema)
        return None if found is None else Misfit(found.row, f"key, column {found.column!r}", found.expected)

    # -- rows of a store -------------------------------------------------------------------------------------

    def encode_rows(self, values: pa.Array) -> pa.Array:
        """Values as the rows of a store, `binary`; null for a null value. The inverse of `decode_rows`."""
        return rows.encode(as_type(values, self.value_type), 1 + len(self.earlier))

    def decode_rows(self, packed: pa.Array) -> pa.StructArray:
        """The values of rows of a store, whichever of the schemas each was written with.

        Raises:
            ValueError: The bytes are not such rows.
        """
        if packed.null_count == len(packed):
            return pa.nulls(len(packed), self.value_type)
        ids = rows.schema_ids(packed.drop_null())
        numbers = np.unique(ids)
        if numbers[0] < 1 or numbers[-1] > 1 + len(self.earlier):
            raise ValueError("a row of a schema that this changelog does not have")
        if len(numbers) == 1:
            return as_type(rows.decode(packed, self._value_type_of(int(numbers[0]))), self.value_type)
        places = np.flatnonzero(packed.is_valid().to_numpy(zero_copy_only=False))
        parts, order = [], []
        for number in numbers.tolist():
            chosen = places[ids == number]
            decoded = rows.decode(packed.take(pa.array(chosen)), self._value_type_of(number))
            parts.append(as_type(decoded, self.value_type))
            order.append(chosen)
        where = np.full(len(packed), -1, np.int64)
        where[np.concatenate(order)] = np.arange(len(places))
        return pa.concat_arrays(parts).take(pa.array(where, mask=where < 0))

    def packed(self, records: pa.RecordBatch) -> pa.RecordBatch:
        """Records with their values as rows of a store."""
        place = records.schema.get_field_index("value")
        rows_ = pa.field("value", pa.binary())
        return records.set_column(place, rows_, self.encode_rows(records.column(place)))

    def encode_row(self, value: Mapping[str, Any]) -> bytes:
        """The row of one value; a column that is left out is null.

        Raises:
            pa.ArrowInvalid, pa.ArrowTypeError, OverflowError: A value does not have its column's type.
        """
        return self._row_values.encode(value, 1 + len(self.earlier))

    def decode_row(self, packed: bytes) -> dict[str, Any]:
        """The value of one row.

        Raises:
            ValueError: The bytes are not a row of this changelog.
            BadRecord: A date or a time has no equivalent in Python.
        """
        if int.from_bytes(packed[: rows.SCHEMA_ID_BYTES], "little") == 1 + len(self.earlier):
            return self._row_values.decode(packed)
        value: dict[str, Any] = to_python(self.decode_rows(pa.array([packed], pa.binary())), "")[0]
        return value

    def _value_type_of(self, number: int) -> pa.StructType:
        if number > len(self.earlier):
            return self.value_type
        return pa.struct(list(spark_types.arrow_schema(self._values_in(self.earlier[number - 1]))))

    # -- keys ------------------------------------------------------------------------------------------------

    def encode_key(self, *parts: object) -> bytes:
        """The bytes of one key, equal to what a sink writes for these values.

        Args:
            parts: The values of the key columns in the order of `keys`, or one mapping of column to value.

        Raises:
            BadRecord: A value is None or does not have its column's type.
        """
        if len(parts) == 1 and type(parts[0]) in _SCALARS and len(self.keys) == 1:
            return self._encode_key(parts)
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
        return self._encode_key(values)

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

    def prefix(self, prefix: object) -> bytes:
        """`key_prefix` of one argument: text or bytes that the first column begins with, a tuple of values of
        the first columns, or the value of the first one.
        """
        if isinstance(prefix, bytes | str):
            return self.key_prefix(begins=prefix)
        return self.key_prefix(*(prefix if isinstance(prefix, tuple) else (prefix,)))

    def encode_keys(self, columns: Sequence[pa.Array]) -> pa.Array:
        """The keys with these values of the key columns, which have no nulls. Other types are cast."""
        return key_codec.encode(
            [as_type(column, kind) for column, kind in zip(columns, self._key_schema.types, strict=True)]
        )

    def decode_keys(self, keys: pa.Array) -> list[pa.Array]:
        """The values of the key columns, an array each. The inverse of `encode_keys`."""
        return [column.combine_chunks() for column in self._decode_keys(keys).values()]

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
        """The changelog's columns after `other` writes to it, which hold the values of both.

        - A column that only one of the two has is null in the records of the other; an added one comes last.
          Fields of structs likewise.
        - The wider type counts: byte, short, integer, long; float, double; date, timestamp_ntz; the decimal
          with more digits.
        - What is nullable in one of the two is nullable. The order of the value columns may differ.
        - The key columns and their types stay: other types are other bytes.

        Raises:
            SchemaMismatch: The columns differ in any other way. The message lists each difference. Or they
                have changed too often.
        """
        mine = {f["name"]: f for f in self.schema_json["fields"]}
        different = []
        merged: list[FieldJson] = []
        theirs = {f["name"]: f for f in other.schema_json["fields"]}
        for name, old in mine.items():
            new = theirs.pop(name, None)
            try:
                if name in self.keys and (new is None or not _same_type(old, new)):
                    raise spark_types.Incompatible
                merged += spark_types.merged_fields([old], [] if new is None else [new])
            except spark_types.Incompatible:
                different.append(name)
        different += [name for name in theirs if name in other.keys]
        if different or self.keys != other.keys:
            raise self._difference(other, different)
        merged += [{**f, "nullable": True} for f in theirs.values()]
        if merged == self.schema_json["fields"]:
            return self
        self._check_room()
        return Columns({"type": "struct", "fields": merged}, self.keys, (*self.earlier, self.schema_json))

    def _check_room(self) -> None:
        """Raises `SchemaMismatch` if a further schema has no number that fits a row."""
        found = 1 + len(self.earlier)
        if found >= rows.SCHEMAS_MAX:
            raise SchemaMismatch(
                "The columns have changed too often.", expected=f"at most {rows.SCHEMAS_MAX} schemas",
                found=f"{found}, and another one",
                remedy="write the columns as they are, or append the state to a new changelog",
            )  # fmt: skip

    def _difference(self, other: Columns, names: Sequence[str]) -> SchemaMismatch:
        """The error that shows the differences: in the columns `names`, or the keys."""
        mine = {f["name"]: f for f in self.schema_json["fields"]}
        theirs = {f["name"]: f for f in other.schema_json["fields"]}
        expected = [f"{name} {spark_types.described(mine.get(name))}" for name in names]
        found = [f"{name} {spark_types.described(theirs.get(name))}" for name in names]
        if self.keys != other.keys:
            expected.append(f"keys {', '.join(self.keys)}")
            found.append(f"keys {', '.join(other.keys)}")
        return SchemaMismatch(
            "The columns differ from those of the changelog.",
            expected="; ".join(expected),
            found="; ".join(found),
            remedy="add or leave out value columns, or give them wider types; for other changes create a new "
            "changelog",
        )

    # -- its parts -------------------------------------------------------------------------------------------

    @property
    def _key_fields(self) -> list[FieldJson]:
        fields = {f["name"]: f for f in self.schema_json["fields"]}
        return [fields[name] for name in self.keys]

    @property
    def _value_fields(self) -> list[FieldJson]:
        return self._values_in(self.schema_json)

    def _values_in(self, schema_json: Mapping[str, Any]) -> list[FieldJson]:
        return [f for f in schema_json["fields"] if f["name"] not in self.keys]

    @cached_property
    def value_type(self) -> pa.StructType:
        """The type of values: a struct of the value columns, each of which may be null."""
        return pa.struct(list(self._value_schema))

    @cached_property
    def value_names(self) -> frozenset[str]:
        """The names of the value columns."""
        return frozenset(self._value_schema.names)

    @cached_property
    def _arrow_schema(self) -> pa.Schema:
        return spark_types.arrow_schema(self.schema_json["fields"])

    @cached_property
    def _key_schema(self) -> pa.Schema:
        return spark_types.arrow_schema(self._key_fields)

    @cached_property
    def _encode_key(self) -> KeyEncoder:
        return KeyEncoder(self._key_schema)

    @cached_property
    def _row_values(self) -> RowValues:
        return RowValues(self.value_type)

    @cached_property
    def _value_schema(self) -> pa.Schema:
        return spark_types.arrow_schema(self._value_fields)


def _same_type(one: FieldJson, other: FieldJson) -> bool:
    return spark_types.sql_text(one["type"]) == spark_types.sql_text(other["type"])
