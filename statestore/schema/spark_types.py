"""Spark's types in the JSON of its schemas: which are supported, their Arrow types, and how they compare.

An atomic type is its name, a nested type an object. keyfold writes a collation in the type's name (`string
collate UTF8_LCASE`). Spark reads this form as well as its own, which is in the metadata of the nearest field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from keyfold.statestore.errors import SchemaMismatch
from keyfold.statestore.projection import is_list

FieldJson = dict[str, Any]

_ATOMIC: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "void": pa.null(),
    "variant": pa.struct(
        [pa.field("value", pa.binary(), nullable=False), pa.field("metadata", pa.binary(), nullable=False)]
    ),
}
#: Types with parameters that do not change how their values are held.
_FAMILIES: tuple[tuple[re.Pattern[str], pa.DataType], ...] = (
    (re.compile(r"^interval (day|hour|minute|second)( to (hour|minute|second))?$"), pa.duration("us")),
    (re.compile(r"^time\([0-9]\)$"), pa.time64("ns")),
)
_DECIMAL = re.compile(r"^decimal\((\d+),\s*(\d+)\)$")
_SQL_NAMES = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint"}
#: The remedy for an unsupported type, by the beginning of its name.
_REMEDIES = {
    "geo": "use st_asbinary(column), a binary",
    "udt": "cast it to its storage type",
    "decimal": "cast it to a decimal with a scale from 0 to its precision",
}


def cleaned(column: FieldJson) -> FieldJson:
    """The field with its collations in its types and without a query's metadata (watermarks, aliases)."""
    metadata = column.get("metadata") or {}
    return {
        "name": column["name"],
        "type": _with_collations(column["type"], column["name"], metadata.get("__COLLATIONS") or {}),
        "nullable": bool(column.get("nullable", True)),
        "metadata": {"comment": metadata["comment"]} if "comment" in metadata else {},
    }


def _with_collations(kind: Any, path: str, collations: Mapping[str, str]) -> Any:
    if kind == "string" and path in collations:
        return f"string collate {collations[path].partition('.')[2]}"
    if isinstance(kind, dict) and kind["type"] == "struct":
        return {**kind, "fields": [cleaned(f) for f in kind["fields"]]}
    if isinstance(kind, dict):
        parts = (("elementType", "element"), ("keyType", "key"), ("valueType", "value"))
        inner = {p: _with_collations(kind[p], f"{path}.{end}", collations) for p, end in parts if p in kind}
        return {**kind, **inner}
    return kind


def arrow_schema(fields: Sequence[FieldJson]) -> pa.Schema:
    return pa.schema([pa.field(f["name"], _arrow_type(f["type"])) for f in fields])


def field_of(field: pa.Field) -> FieldJson:
    """The column of an Arrow field: the smallest of Spark's types that holds all values of its type.

    Raises:
        SchemaMismatch: There is none.
    """
    kind = _spark_type(field.name, field.type)
    return {"name": field.name, "type": kind, "nullable": field.nullable, "metadata": {}}


def _spark_type(path: str, kind: pa.DataType) -> Any:
    t = pa.types
    if t.is_dictionary(kind) or t.is_run_end_encoded(kind):
        return _spark_type(path, kind.value_type)
    if is_list(kind):
        inner = _spark_type(f"{path}[]", kind.value_type)
        return {"type": "array", "elementType": inner, "containsNull": True}
    if t.is_map(kind):
        return {
            "type": "map",
            "keyType": _spark_type(f"{path}[key]", kind.key_type),
            "valueType": _spark_type(f"{path}[value]", kind.item_type),
            "valueContainsNull": True,
        }
    if t.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return {"type": "struct", "fields": [{**field_of(f), "name": f.name} for f in fields]}
    if t.is_decimal(kind) and kind.precision <= 38:
        return f"decimal({kind.precision},{kind.scale})"
    if t.is_timestamp(kind):
        return "timestamp" if kind.tz is not None else "timestamp_ntz"
    if t.is_time(kind) and kind.unit in _TIMES:
        return _TIMES[kind.unit]
    for holds, name in _OF_ARROW:
        if holds(kind):
            return name
    raise SchemaMismatch(
        "The column's type cannot be stored.", position=f"column {path!r}", found=str(kind),
        remedy="cast it to one of Spark's types",
    )  # fmt: skip


#: Spark's times have at most 6 digits after the second.
_TIMES: Final = {"s": "time(0)", "ms": "time(3)", "us": "time(6)"}
_OF_ARROW: Final = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_int8, "byte"),
    (pa.types.is_int16, "short"),
    (pa.types.is_uint8, "short"),
    (pa.types.is_int32, "integer"),
    (pa.types.is_uint16, "integer"),
    (pa.types.is_int64, "long"),
    (pa.types.is_uint32, "long"),
    (pa.types.is_uint64, "decimal(20,0)"),
    (pa.types.is_float16, "float"),
    (pa.types.is_float32, "float"),
    (pa.types.is_float64, "double"),
    (pa.types.is_string, "string"),
    (pa.types.is_large_string, "string"),
    (pa.types.is_string_view, "string"),
    (pa.types.is_binary, "binary"),
    (pa.types.is_large_binary, "binary"),
    (pa.types.is_fixed_size_binary, "binary"),
    (pa.types.is_binary_view, "binary"),
    (pa.types.is_date, "date"),
    (pa.types.is_duration, "interval day to second"),
    (pa.types.is_null, "void"),
)


def _arrow_type(kind: Any) -> pa.DataType:
    """The type in Spark's `toArrow()` of a type that `check_column` has accepted."""
    if isinstance(kind, str):
        if found := _DECIMAL.match(kind):
            return pa.decimal128(int(found[1]), int(found[2]))
        if (family := _family(kind)) is not None:
            return family
        return _ATOMIC[kind.partition(" ")[0]]
    if kind["type"] == "array":
        return pa.list_(_arrow_field("element", kind["elementType"], kind["containsNull"]))
    if kind["type"] == "map":
        return pa.map_(
            _arrow_field("key", kind["keyType"], nullable=False),
            _arrow_field("value", kind["valueType"], kind["valueContainsNull"]),
        )
    return pa.struct([_arrow_field(f["name"], f["type"], f["nullable"]) for f in kind["fields"]])


def _arrow_field(name: str, kind: Any, nullable: bool) -> pa.Field:
    return pa.field(name, _arrow_type(kind), nullable=nullable or kind == "void")


def check_column(column: FieldJson, *, is_key: bool) -> None:
    """Raises `SchemaMismatch` for a type that cannot be stored exactly, or not in a key."""
    for path, kind, in_map_key in _walk(column):
        problem = _problem(kind, is_key=is_key, in_map_key=in_map_key)
        if problem:
            what, remedy = problem
            raise SchemaMismatch(what, position=f"column {path!r}", found=sql_text(kind), remedy=remedy)


def _problem(kind: Any, *, is_key: bool, in_map_key: bool) -> tuple[str, str] | None:
    """The problem with a type, and the remedy."""
    name = kind if isinstance(kind, str) else kind["type"]
    if is_key and name == "map":
        return "A key cannot contain a map: equal maps can differ in order.", "use an array of structs"
    if is_key and name == "void":
        return "A key cannot contain a column that is always null.", "choose another key"
    if is_key and name == "variant":
        return (
            "A key cannot contain a variant: equal variants can differ in their bytes.",
            "use to_json(column)",
        )
    if name in ("array", "map") or name in _ATOMIC or _is_decimal(name) or _family(name) is not None:
        return None
    if name == "struct":
        names = [f["name"] for f in kind["fields"]]
        return (
            ("Two fields of a struct have the same name.", "rename one")
            if len(set(names)) < len(names)
            else None
        )
    if name.startswith("string collate "):
        what = "A key cannot contain a string with a collation: equal strings can differ in their bytes."
        return (what, "use collation_key(column), which is binary") if is_key or in_map_key else None
    remedy = next((r for prefix, r in _REMEDIES.items() if name.startswith(prefix)), "cast it to string")
    return "The column's type cannot be stored exactly.", remedy


def _family(name: str) -> pa.DataType | None:
    return next((kind for pattern, kind in _FAMILIES if pattern.match(name)), None)


def _is_decimal(name: str) -> bool:
    found = _DECIMAL.match(name)
    return found is not None and 1 <= int(found[1]) <= 38 and int(found[2]) <= int(found[1])


def _walk(column: FieldJson) -> Iterator[tuple[str, Any, bool]]:
    """Every type in a column with its path (`a.b`, `a[]`, `a[key]`) and whether it is part of a map's key."""
    todo: list[tuple[str, Any, bool]] = [(column["name"], column["type"], False)]
    while todo:
        path, kind, in_map_key = todo.pop()
        yield path, kind, in_map_key
        name = kind["type"] if isinstance(kind, dict) else None
        if name == "array":
            todo.append((f"{path}[]", kind["elementType"], in_map_key))
        elif name == "map":
            todo.append((f"{path}[value]", kind["valueType"], in_map_key))
            todo.append((f"{path}[key]", kind["keyType"], True))
        elif name == "struct":
            todo.extend((f"{path}.{f['name']}", f["type"], in_map_key) for f in reversed(kind["fields"]))


def quoted(name: str) -> str:
    """A column's name quoted for SQL, whatever characters it contains."""
    return "`" + name.replace("`", "``") + "`"


def sql_text(kind: Any) -> str:
    """The type in SQL, without nullability. Equal texts are the same type."""
    if isinstance(kind, str):
        return _SQL_NAMES.get(kind, kind)
    if kind["type"] == "array":
        return f"array<{sql_text(kind['elementType'])}>"
    if kind["type"] == "map":
        return f"map<{sql_text(kind['keyType'])},{sql_text(kind['valueType'])}>"
    if kind["type"] == "struct":
        members = (f"{quoted(f['name'])}:{sql_text(f['type'])}" for f in kind["fields"])
        return f"struct<{','.join(members)}>"
    return str(kind["type"])


def described(column: FieldJson | None) -> str:
    if column is None:
        return "missing"
    return sql_text(column["type"]) + ("" if column["nullable"] else " not null")


#: Each type holds all values of those before it.
_WIDENING: Final = (
    ("byte", "short", "integer", "long"),
    ("float", "double"),
    ("date", "timestamp_ntz"),
)


def merged_fields(old: Sequence[FieldJson], new: Sequence[FieldJson]) -> list[FieldJson]:
    """The columns that hold the values of both, the old ones first. What only one of them has is null in the
    other.

    Raises:
        Incompatible: No type holds the values of both columns of a name.
    """
    added = {f["name"]: f for f in new}
    found: list[FieldJson] = []
    for mine in old:
        theirs = added.pop(mine["name"], None)
        if theirs is None:
            found.append({**mine, "nullable": True})
            continue
        kind = merged_type(mine["type"], theirs["type"])
        nullable = mine["nullable"] or theirs["nullable"] or "void" in (mine["type"], theirs["type"])
        found.append({**mine, "type": kind, "nullable": nullable})
    return [*found, *({**f, "nullable": True} for f in added.values())]


def merged_type(old: Any, new: Any) -> Any:
    """The type that holds the values of both: the wider one, nullable where one is. Raises `Incompatible`."""
    if old == new or new == "void":
        return old
    if old == "void":
        return new
    if isinstance(old, dict) and isinstance(new, dict) and old["type"] == new["type"]:
        if old["type"] == "struct":
            return {**old, "fields": merged_fields(old["fields"], new["fields"])}
        parts = {part: merged_type(old[part], new[part]) for part in _INNER if part in old}
        flags = {
            flag: old[flag] or new[flag] or "void" in (old[part], new[part])
            for flag, part in _NULLABLE.items()
            if flag in old
        }
        return {**old, **parts, **flags}
    if isinstance(old, dict) or isinstance(new, dict):
        raise Incompatible
    for family in _WIDENING:
        if old in family and new in family:
            return max(old, new, key=family.index)
    decimals = [_DECIMAL.match(kind) for kind in (old, new)]
    if all(decimals):
        sizes = [(int(d[1]) - int(d[2]), int(d[2])) for d in decimals if d is not None]
        whole, scale = (max(part) for part in zip(*sizes, strict=True))
        if whole + scale <= _DIGITS_MAX:
            return f"decimal({whole + scale},{scale})"
    raise Incompatible


class Incompatible(Exception):
    """Two types of which no third one holds the values of both."""


_DIGITS_MAX: Final = 38
_INNER: Final = ("elementType", "keyType", "valueType")
#: What says whether a part may be null. A void is null, whatever that says.
_NULLABLE: Final = {"containsNull": "elementType", "valueContainsNull": "valueType"}
