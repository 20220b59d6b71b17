"""A typed changelog is a dict: whatever is written, added, compacted or rolled back, all readers agree."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfold import Changelog, Standby, open_store, restore
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.kv.typed_columns import LastValuesView
from keyfold.statestore.schema.columns import Columns
from support.changelogs import BY_HAND
from support.key_kinds import ATOMIC, KINDS, Kind, field
from support.typed_golden import exact
from support.waiting import eventually

CONFIG = {**BY_HAND, "anchors.auto": 4, "segment.bytes": 1024, "delete.retention.ms": 0}

#: Keys as `get` takes them, and what is not null in the value columns of each.
Model = dict[Any, dict[str, Any]]

WIDER = {
    "byte": "short",
    "short": "integer",
    "integer": "long",
    "float": "double",
    "decimal(5,2)": "decimal(9,4)",
}


class Table:
    """A typed changelog and the dict that it is."""

    def __init__(self, root: Path, data: st.DataObject) -> None:
        self.root = root
        self.draw = data.draw
        self.numbers = itertools.count()
        kinds = self.draw(st.lists(st.sampled_from(ATOMIC), min_size=1, max_size=2))
        self.keys = {f"k{i}": [self.draw(kind.values) for _ in range(4)] for i, kind in enumerate(kinds)}
        fields = [field(f"k{i}", kind.json) for i, kind in enumerate(kinds)]
        self.columns = Columns({"type": "struct", "fields": fields}, tuple(self.keys))
        self.kinds: dict[str, Kind] = {}
        for _ in range(self.draw(st.integers(0, 4))):
            self.columns = self.with_column()
        self.columns = Columns(self.columns.schema_json, self.columns.keys)
        self.partitions = self.draw(st.integers(1, 3))
        self.log = Changelog.open(root, partitions=self.partitions, columns=self.columns, config=CONFIG)
        self.model: Model = {}
        #: of each commit
        self.states: dict[int, Model] = {}

    def with_column(self) -> Columns:
        """The columns with one more, or with one that has a wider type."""
        narrow = [
            name for name, kind in self.kinds.items() if isinstance(kind.json, str) and kind.json in WIDER
        ]
        name = self.draw(st.sampled_from([*narrow, ""]))
        if name:
            new = Kind(WIDER[self.kinds[name].json], self.kinds[name].values)
        else:
            name, new = f"v{len(self.kinds)}", self.draw(KINDS)
        self.kinds[name] = new
        added = {"type": "struct", "fields": [*self.key_fields, field(name, new.json)]}
        return self.columns.accepts(Columns(added, self.columns.keys))

    @property
    def key_fields(self) -> list[dict[str, Any]]:
        return [f for f in self.columns.schema_json["fields"] if f["name"] in self.columns.keys]

    def key(self, parts: tuple[Any, ...]) -> Any:
        """The key as the last of its equals is: NaN is NaN, and there is one zero."""
        encoded = pa.array([self.columns.encode_key(*parts)], pa.binary())
        found = tuple(column[0].as_py() for column in self.columns.decode_keys(encoded))
        return found if len(found) > 1 else found[0]

    def names(self) -> list[str]:
        """Some of the value columns."""
        return [name for name in self.kinds if self.draw(st.booleans())]

    # -- what happens --------------------------------------------------------------------------------------

    def append(self) -> None:
        names = self.names()
        rows = []
        model = dict(self.model)
        for _ in range(self.draw(st.integers(1, 6))):
            parts = tuple(self.draw(st.sampled_from(values)) for values in self.keys.values())
            values = {name: self.draw(st.none() | self.kinds[name].values) for name in names}
            gone = self.draw(st.integers(0, 4)) == 0
            rows.append({**dict(zip(self.keys, parts, strict=True)), **values, "_deleted": gone})
            model.pop(Hashed(self.key(parts)), None)
            if not gone:
                model[Hashed(self.key(parts))] = values
        schema = self.columns.arrow_schema()
        fields = [schema.field(name) for name in (*self.keys, *names)]
        table = pa.Table.from_pylist(rows, pa.schema([*fields, pa.field("_deleted", pa.bool_())]))
        self.log.append(table if self.draw(st.booleans()) else table.to_reader(max_chunksize=2))
        self.committed(model)

    def transact(self) -> None:
        model = dict(self.model)
        with self.log.transaction(app_id="t", batch_id=next(self.numbers)) as store:
            for _ in range(self.draw(st.integers(1, 3))):
                key = self.key(tuple(self.draw(st.sampled_from(values)) for values in self.keys.values()))
                names = self.names()
                values = {name: self.draw(st.none() | self.kinds[name].values) for name in names}
                model.pop(Hashed(key), None)
                if self.draw(st.integers(0, 4)) == 0:
                    store.delete(key)
                else:
                    store.put(key, values)
                    model[Hashed(key)] = values
                assert exact(as_dict(store.all())) == exact(self.expected(model))
        self.committed(model)

    def committed(self, model: Model) -> None:
        self.model = model
        self.states[self.log.state.commits[-1].number] = model

    def add_column(self) -> None:
        self.columns = self.with_column()
        self.log.engine.set_columns(self.columns)
        assert self.log.columns == self.columns

    def compact(self) -> None:
        self.log.compact(full=self.draw(st.booleans()))

    def seal(self) -> None:
        self.log.engine.seal_active()

    def reopen(self) -> None:
        self.log.close()
        self.log = Changelog.open(self.root)
        assert self.log.columns == self.columns

    def roll_back(self) -> None:
        state = self.log.state
        kept = [c.number for c in state.commits if state.restorable(c.ends)]
        if not kept or state.anchors:
            return
        to = self.draw(st.sampled_from(kept))
        self.log.rollback(to)
        self.model = self.states[to]

    def clone(self) -> None:
        number = next(self.numbers)
        snapshot = self.root.with_name(f"snapshot{number}")
        self.log.snapshot(snapshot)
        self.compare(restore(snapshot).to_dict())
        self.log.close()
        self.root = self.root.with_name(f"log{number}")
        self.log = Changelog.clone(snapshot, self.root)
        assert self.log.columns == self.columns

    # -- and what is read ----------------------------------------------------------------------------------

    def expected(self, model: Model) -> Model:
        """In the order of the keys' bytes, with every column."""
        names = self.columns.value_type.names
        rows = {key: {name: values.get(name) for name in names} for key, values in model.items()}
        return {
            key: self.as_kept(rows[key]) for key in sorted(rows, key=lambda key: self.bytes_of(key.value))
        }

    def as_kept(self, values: dict[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = pa.array([values], self.columns.value_type)[0].as_py()
        return kept

    def bytes_of(self, key: Any) -> bytes:
        return self.columns.encode_key(*(key if len(self.keys) > 1 else (key,)))

    def compare(self, found: Mapping[Any, Any]) -> None:
        ordered = {Hashed(key): found[key] for key in sorted(found, key=self.bytes_of)}
        assert exact(ordered) == exact(self.expected(self.model))

    def check_store(self, store: LastValuesView) -> None:
        expected = self.expected(self.model)
        assert exact(as_dict(store.all())) == exact(expected)
        assert exact(as_dict(store.range())) == exact(expected)
        every = [self.key(parts) for parts in itertools.product(*self.keys.values())]
        values = [expected.get(Hashed(key)) for key in every]
        assert exact(store.get_all(every)) == exact(values)
        assert exact([store.get(key) for key in every]) == exact(values)
        in_arrow = store.get_all(self.in_arrow(every))
        in_arrow.validate(full=True)
        assert in_arrow.type == self.columns.value_type
        assert exact(in_arrow.to_pylist()) == exact(values)
        low, high = (self.draw(st.none() | st.sampled_from(every)) for _ in range(2))
        bounds = [None if bound is None else self.bytes_of(bound) for bound in (low, high)]
        within = {
            key: value
            for key, value in expected.items()
            if (bounds[0] is None or bounds[0] <= self.bytes_of(key.value))
            and (bounds[1] is None or self.bytes_of(key.value) < bounds[1])
        }
        assert exact(as_dict(store.range(low, high))) == exact(within)
        if len(self.keys) > 1:
            first = every[0][0]
            begins = self.columns.key_prefix(first)
            with_prefix = {k: v for k, v in expected.items() if self.bytes_of(k.value).startswith(begins)}
            assert exact(as_dict(store.prefix((first,)))) == exact(with_prefix)

    def in_arrow(self, keys: list[Any]) -> pa.Array:
        schema = self.columns.arrow_schema()
        if len(self.keys) == 1:
            return pa.array(keys, schema.field("k0").type)
        parts = [pa.array([key[i] for key in keys], schema.field(f"k{i}").type) for i in range(2)]
        return pa.StructArray.from_arrays(parts, list(self.keys))

    def check_log(self, log: Changelog) -> None:
        found = {}
        for partition in range(log.partitions):
            for batch in log.read(partition):
                table = self.columns.decode(batch.column("key"), batch.column("value"))
                assert batch.column("value").type == self.columns.value_type
                for row, value in zip(table.to_pylist(), batch.column("value").to_pylist(), strict=True):
                    key = tuple(row.pop(name) for name in self.keys)
                    found[Hashed(key if len(key) > 1 else key[0])] = value and row
        found = {key: value for key, value in found.items() if value is not None}
        assert exact({k: found[k] for k in self.expected(self.model)}) == exact(self.expected(self.model))
        assert len(found) == len(self.model)

    def check(self) -> None:
        self.check_store(self.log.store())
        self.check_log(self.log)
        with Changelog.open(self.root, mode="r") as reader:
            self.check_log(reader)
            for key, value in self.expected(self.model).items():
                assert exact(reader.get(key.value)) == exact(value)
            self.check_store(reader.store())
        state = restore(self.root)
        self.compare(state.to_dict())
        table = state.to_arrow()
        table.validate(full=True)
        assert table.schema.equals(self.columns.arrow_schema())
        rows = table.to_pylist()
        of_table = {}
        for row in rows:
            key = tuple(row.pop(name) for name in self.keys)
            of_table[Hashed(key if len(key) > 1 else key[0])] = row
        expected = self.expected(self.model)
        assert exact({key: of_table[key] for key in expected}) == exact(expected)
        assert len(rows) == len(expected)
        assert verify(self.root).damages == []

    def check_copies(self) -> None:
        number = next(self.numbers)
        store, copy = (self.root.with_name(f"{name}{number}") for name in ("store", "copy"))
        state = restore(self.root)
        with closing(state.to_store(store)) as written:
            self.check_store(written)
        with closing(open_store(store)) as opened:
            self.check_store(opened)
        state.to_changelog(copy, partitions=self.draw(st.integers(1, 3)))
        with Changelog.open(copy) as other:
            assert other.columns == self.columns
            self.check_log(other)
            self.check_store(other.store())


class Hashed:
    """A key by its `exact` form: NaN equals NaN."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return exact(self.value)

    def __eq__(self, other: object) -> bool:
        return repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


def as_dict(entries: Any) -> Model:
    return {Hashed(key): value for key, value in entries}


STEPS = [
    "append",
    "append",
    "append",
    "transact",
    "add_column",
    "compact",
    "seal",
    "reopen",
    "roll_back",
    "clone",
]


@settings(deadline=None, max_examples=40)
@given(data=st.data(), steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=12))
def test_every_way_to_read_agrees_with_a_dict(
    data: st.DataObject, steps: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    table = Table(tmp_path_factory.mktemp("typed") / "log", data)
    try:
        for step in ["append", *steps]:
            getattr(table, step)()
            table.compare({k.value: v for k, v in as_dict(table.log.store().all()).items()})
        table.check()
        table.check_copies()
    finally:
        table.log.close()


@settings(deadline=None, max_examples=15)
@given(
    data=st.data(),
    steps=st.lists(st.sampled_from(["append", "append", "transact", "add_column", "compact"]), max_size=8),
)
def test_what_was_open_before_goes_on_and_has_every_column(
    data: st.DataObject, steps: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A reader, a view of the last values, and a standby, which takes over."""
    table = Table(tmp_path_factory.mktemp("typed") / "log", data)
    with Changelog.open(table.root, mode="r") as reader, Standby(table.root) as standby:
        view = table.log.store()
        for step in [*steps, "append"]:
            getattr(table, step)()
            table.check_store(view)
            reader.refresh()
            if step != "add_column":
                table.check_log(reader)
                table.check_store(reader.store())
            if data.draw(st.booleans()):
                eventually(lambda: not any(standby.lag().values()))
        table.log.close()
        with standby.take_over(timeout=60) as table.log:
            table.check_store(table.log.store())
            table.check()
