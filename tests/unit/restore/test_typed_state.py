"""Restoring typed columns: nested keys, there and back, and names that changes need for themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from keyfold import Changelog, restore
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.schema.columns import Columns
from support.changelogs import BY_HAND


def field(name: str, kind: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": True, "metadata": {}}


def struct(*fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "struct", "fields": list(fields)}


def array_of(kind: Any) -> dict[str, Any]:
    return {"type": "array", "elementType": kind, "containsNull": True}


def make(root: Path, fields: list[dict[str, Any]], keys: tuple[str, ...], *rows: dict[str, Any]) -> Path:
    columns = Columns(struct(*fields), keys)
    with Changelog.open(root, partitions=3, columns=columns, config=BY_HAND) as log:
        for row in rows:
            log.append(pa.Table.from_pylist([row], columns.arrow_schema()))
    return root


PAIR = struct(field("a", "long"), field("b", "string"))

#: Type of the key, a value, the key of `to_dict`, and other ways to name it in `keys=`.
NESTED: list[tuple[Any, Any, Any, list[Any]]] = [
    (PAIR, {"a": 1, "b": "x"}, (1, "x"), [{"a": 1, "b": "x"}, {"k": {"a": 1, "b": "x"}}]),
    (PAIR, {"a": 1}, (1, None), [{"a": 1}]),
    (struct(field("k", "long")), {"k": 1}, (1,), [{"k": {"k": 1}}, {"k": (1,)}]),
    (array_of("long"), [1, 2], (1, 2), [[1, 2]]),
    (array_of(PAIR), [{"a": 1, "b": "x"}], ((1, "x"),), [[{"a": 1, "b": "x"}]]),
    (struct(field("a", array_of("long"))), {"a": [1, 2]}, ((1, 2),), [{"a": [1, 2]}]),
]


@pytest.mark.parametrize(("kind", "value", "key", "others"), NESTED)
def test_a_nested_key_can_be_looked_up_by_what_to_dict_calls_it(
    kind: Any, value: Any, key: Any, others: list[Any], tmp_path: Path
) -> None:
    root = make(tmp_path / "log", [field("k", kind), field("v", "long")], ("k",), {"k": value, "v": 1})
    assert restore(root).to_dict() == {key: {"v": 1}}
    for name in (key, *others):
        assert restore(root, keys=[name]).to_dict() == {key: {"v": 1}}


def test_nested_parts_of_a_key_of_several_columns(tmp_path: Path) -> None:
    fields = [field("k", PAIR), field("n", "long"), field("v", "long")]
    root = make(tmp_path / "log", fields, ("k", "n"), {"k": {"a": 1, "b": "x"}, "n": 2, "v": 1})
    assert restore(root).to_dict() == {((1, "x"), 2): {"v": 1}}
    assert restore(root, keys=[((1, "x"), 2)]).to_dict() == restore(root).to_dict()


@pytest.mark.parametrize("kind", ["boolean", "long"])
def test_changes_of_a_column_named_as_the_mark_of_deletes_are_no_table(kind: str, tmp_path: Path) -> None:
    """To `append` a column of the changelog is a column; keys are deleted by a transaction."""
    kept = {"_deleted": kind == "boolean" or 1}
    rows = [{"k": 1, **kept}, {"k": 2, **kept}]
    root = make(tmp_path / "log", [field("k", "long"), field("_deleted", kind)], ("k",), *rows)
    with Changelog.open(root) as log, log.transaction(app_id="a", batch_id=0) as store:
        store.delete(2)
    assert restore(root).to_dict() == {1: kept}
    assert restore(root, since={0: 0, 1: 0, 2: 0}).to_dict() == {1: kept, 2: None}
    changes = restore(root, since={0: 0, 1: 0, 2: 0})
    for give in (changes.to_arrow, changes.to_pandas, changes.to_polars):
        with pytest.raises(ConfigError) as refused:
            give()
        assert refused.value.found == "_deleted"
        assert "to_dict" in str(refused.value.remedy)
    assert pa.Table.from_batches(changes.batches())["value"].null_count == 1
