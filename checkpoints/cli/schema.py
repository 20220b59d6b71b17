"""The command `schema`: the typed columns of a changelog, and how they came about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.cli.output import Target, out, verb
from keyfold.checkpoints.cli.tables import facts, table
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.schema.spark_types import FieldJson, described, sql_text


@verb(
    "keyfold schema var/counts",
    "keyfold schema var/counts --json | jq -r '.columns[].name'",
)
def schema(place: Target) -> None:
    """Show the columns of a changelog, and how they changed.

    Lists the key columns in the order of a key, every column with its type in SQL, and the schemas with what
    each changed. Schemas are numbered from 1. A segment or a stored row keeps the schema it was written with;
    columns that were added later are null in it.
    """
    with Changelog.open(place.path, mode="r", files=place.files) as log:
        document = {"path": str(place.path), **_document(log.columns)}
    place.show(lambda: document, lambda: _show(document))


def _document(columns: Columns | None) -> dict[str, Any]:
    if columns is None:
        return {"schema": None, "keys": [], "columns": [], "history": []}
    schemas: list[Sequence[FieldJson]] = [s["fields"] for s in (*columns.earlier, columns.schema_json)]
    history = [
        {"schema": number, "changes": _changes(_by_name(before), _by_name(after))}
        for number, (before, after) in enumerate(pairwise([[], *schemas]), 1)
    ]
    since: dict[str, int] = {}
    for number, fields in enumerate(schemas, 1):
        since = {**dict.fromkeys(_by_name(fields), number), **since}
    return {
        "schema": len(schemas),
        "keys": list(columns.keys),
        "columns": [
            {
                "name": f["name"],
                "type": sql_text(f["type"]),
                "nullable": f["nullable"],
                "key": f["name"] in columns.keys,
                "since": since[f["name"]],
            }
            for f in schemas[-1]
        ],
        "history": history,
    }


def _by_name(fields: Sequence[FieldJson]) -> dict[str, FieldJson]:
    return {f["name"]: f for f in fields}


def _changes(before: Mapping[str, FieldJson], after: Mapping[str, FieldJson]) -> list[dict[str, Any]]:
    """The columns that differ, each with its type before and after; None if it did not exist."""
    pairs = [(name, before.get(name), after.get(name)) for name in {**before, **after}]
    return [
        {"column": name, "before": old and described(old), "after": new and described(new)}
        for name, old, new in pairs
        if old != new
    ]


def _show(found: Mapping[str, Any]) -> None:
    if found["schema"] is None:
        out("raw bytes: this changelog has no typed columns")
        return
    out(facts([("keys", ", ".join(found["keys"])), ("schema", found["schema"])]))
    rows = [
        (c["name"], c["type"], c["nullable"], "key" if c["key"] else "value", c["since"])
        for c in found["columns"]
    ]
    out(table(("column", "type", "nullable", "part of", "since schema"), rows, "Columns"))
    changes = [
        (entry["schema"], c["column"], "added" if c["before"] is None else c["before"], c["after"])
        for entry in found["history"]
        for c in entry["changes"]
    ]
    out(table(("schema", "column", "before", "after"), changes, "History"))
