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


def make(
    root: Path, fields: list[dict[str, Any]], keys: tuple[str, ...], *pairs: tuple[bytes, bytes | None]
) -> Path:
    columns = Columns(struct(*fields), keys, "json")
    with Changelog.open(root, partitions=3, columns=columns, config=BY_HAND) as log:
        for key, value in pairs:
            log.append({"key": [key], "value": [value]})
    return root


ONE, TWO = (b"\x80" + b"\0" * 6 + bytes([n]) for n in (1, 2))
PAIR = struct(field("a", "long"), field("b", "string"))

#: Type of the key, its bytes, the key of `to_dict`, and other ways to name it in `keys=`.
NESTED: list[tuple[Any, bytes, Any, list[Any]]] = [
    (PAIR, b"\2" + ONE + b"\2x\0", (1, "x"), [{"a": 1, "b": "x"}, {"k": {"a": 1, "b": "x"}}]),
    (PAIR, b"\2" + ONE + b"\1", (1, None), [{"a": 1}]),
    (struct(field("k", "long")), b"\2" + ONE, (1,), [{"k": {"k": 1}}, {"k": (1,)}]),
    (array_of("long"), b"\2" + ONE + b"\2" + TWO + b"\0", (1, 2), [[1, 2]]),
    (array_of(PAIR), b"\2\2" + ONE + b"\2x\0\0", ((1, "x"),), [[{"a": 1, "b": "x"}]]),
    (struct(field("a", array_of("long"))), b"\2\2" + ONE + b"\2" + TWO + b"\0", ((1, 2),), [{"a": [1, 2]}]),
]


@pytest.mark.parametrize(("kind", "data", "key", "others"), NESTED)
def test_a_nested_key_can_be_looked_up_by_what_to_dict_calls_it(
    kind: Any, data: bytes, key: Any, others: list[Any], tmp_path: Path
) -> None:
    root = make(tmp_path / "log", [field("k", kind), field("v", "long")], ("k",), (data, b'{"v":1}'))
    assert restore(root).to_dict() == {key: {"v": 1}}
    for name in (key, *others):
        assert restore(root, keys=[name]).to_dict() == {key: {"v": 1}}


def test_nested_parts_of_a_key_of_several_columns(tmp_path: Path) -> None:
    fields = [field("k", PAIR), field("n", "long"), field("v", "long")]
    root = make(tmp_path / "log", fields, ("k", "n"), (b"\2" + ONE + b"\2x\0" + TWO, b'{"v":1}'))
    assert restore(root).to_dict() == {((1, "x"), 2): {"v": 1}}
    assert restore(root, keys=[((1, "x"), 2)]).to_dict() == restore(root).to_dict()


@pytest.mark.parametrize("kind", ["boolean", "long"])
def test_changes_of_a_column_named_as_the_mark_of_deletes_are_no_table(kind: str, tmp_path: Path) -> None:
    value = b'{"_deleted":true}' if kind == "boolean" else b'{"_deleted":1}'
    pairs = [(ONE, value), (TWO, value), (TWO, None)]
    root = make(tmp_path / "log", [field("k", "long"), field("_deleted", kind)], ("k",), *pairs)
    kept = {"_deleted": kind == "boolean" or 1}
    assert restore(root).to_dict() == {1: kept}
    assert restore(root, since={0: 0, 1: 0, 2: 0}).to_dict() == {1: kept, 2: None}
    changes = restore(root, since={0: 0, 1: 0, 2: 0})
    for give in (changes.to_arrow, changes.to_pandas, changes.to_polars):
        with pytest.raises(ConfigError) as refused:
            give()
        assert refused.value.found == "_deleted"
        assert "to_dict" in str(refused.value.remedy)
    assert pa.Table.from_batches(changes.batches())["value"].null_count == 1
