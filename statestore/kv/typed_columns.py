"""The last values of a changelog of typed columns, as keys and dicts of values instead of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, Protocol, TypeVar

import pyarrow as pa

from keyfold.statestore.errors import BadRecord, WrongType
from keyfold.statestore.kv.api import Entries, KeyValueStore, ReadOnlyStore
from keyfold.statestore.kv.serdes import TypedStore, TypedView
from keyfold.statestore.schema import casting
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.schema.python_values import to_python

#: The rows of a range that are converted at a time: at first, and at most.
_FIRST_ROWS: Final = 16
_ROWS_MAX: Final = 4096


L = TypeVar("L", bound="LastValuesView")


class LastValuesView(Protocol):
    """The last values of a changelog, read as what they are: bytes as in `ReadOnlyStore`, or keys and dicts
    of typed columns as in `ColumnsView`. A context manager.
    """

    def get(self, key: Any) -> Any: ...

    def get_all(self, keys: Any) -> Any: ...

    def range(self, from_: Any = None, to: Any = None) -> Entries[Any, Any]: ...

    def prefix(self, prefix: Any) -> Entries[Any, Any]: ...

    def all(self) -> Entries[Any, Any]: ...

    def snapshot(self) -> Any: ...

    def close(self) -> None: ...

    def __enter__(self: L) -> L: ...

    def __exit__(self, *error: object) -> None: ...


class KeySerde:
    """Keys: the value of the only key column, or a tuple of values in the order of the key columns. In Arrow
    the column, or a struct of the columns.

    Raises `BadRecord` for what is not a key of these columns.
    """

    keeps_prefix = False

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def serialize(self, value: object) -> bytes:
        return self._columns.encode_key(*_parts(value))

    def deserialize(self, data: bytes) -> Any:
        (row,) = self.to_python(self.from_binary(pa.array([data], pa.binary())))
        return tuple(row.values()) if len(self._columns.keys) > 1 else row

    def to_python(self, keys: pa.Array) -> list[Any]:
        """Keys in Arrow as Python values; several columns as a dict."""
        return to_python(keys, self._columns.keys[0] if len(self._columns.keys) == 1 else "")

    def to_binary(self, values: pa.Array) -> pa.Array:
        kinds = [self._columns.arrow_schema().field(name).type for name in self._columns.keys]
        return self._columns.encode_keys(
            casting.key_columns(casting.plain(values), self._columns.keys, kinds)
        )

    def from_binary(self, data: pa.Array) -> pa.Array:
        columns = self._columns.decode_keys(data)
        if len(columns) == 1:
            return columns[0]
        return pa.StructArray.from_arrays(columns, list(self._columns.keys))


class RowSerde:
    """Values: a dict of the value columns; in Arrow a struct. A column that is left out is null.

    Raises `WrongType` for what is not a dict, and `BadRecord` for a column that is not there or a value that
    does not fit its column.
    """

    keeps_prefix = False

    def __init__(self, columns: Callable[[], Columns]) -> None:
        self._columns = columns

    def serialize(self, value: Mapping[str, Any]) -> bytes:
        columns = self._columns()
        if not isinstance(value, Mapping):
            raise WrongType(
                "A value must be a dict of the value columns.", expected=", ".join(columns.value_type.names),
                found=type(value).__name__, remedy="give a dict; to remove a key, call delete(key)",
            )  # fmt: skip
        if unknown := sorted(str(name) for name in value if name not in columns.value_names):
            raise BadRecord(
                "A value has columns that the changelog does not have.",
                expected=", ".join(columns.value_type.names), found=", ".join(unknown),
                remedy="leave them out, or correct their names",
            )  # fmt: skip
        try:
            return columns.encode_row(value)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeError) as e:
            raise BadRecord(
                "A value does not have the type of its column.", expected=str(columns.value_type),
                found=f"another type, or a number that would change ({type(e).__name__})",
                remedy="convert it to the column's type",
            ) from None  # fmt: skip

    def deserialize(self, data: bytes) -> dict[str, Any]:
        return self._columns().decode_row(data)

    def to_binary(self, values: pa.Array) -> pa.Array:
        columns = self._columns()
        return columns.encode_rows(casting.values_in(casting.plain(values), columns.value_type))

    def from_binary(self, data: pa.Array) -> pa.Array:
        return self._columns().decode_rows(data)


class ColumnsView(TypedView[Any, dict[str, Any]]):
    """The last values of typed columns: `get("to")` gives a dict such as `{"count": 2}`. Keys of several
    columns are tuples. `range` takes bounds with the values of the first key columns, `prefix` the values of
    the first ones, or text or bytes that a key begins with. Arrow arrays in give Arrow arrays out. A date or
    time that Python cannot represent raises `BadRecord`, which names the column; Arrow holds it.

    Args:
        current: The columns of now, for a store that follows a changelog while columns are added. It is
            called after rows were read.
    """

    def __init__(
        self,
        store: ReadOnlyStore,
        columns: Columns,
        *,
        owns: bool = False,
        current: Callable[[], Columns] | None = None,
    ) -> None:
        self._keys_of = KeySerde(columns)
        self._current: Callable[[], Columns] = (lambda: columns) if current is None else current
        self._rows = RowSerde(self._current)
        super().__init__(store, self._keys_of, self._rows, owns=owns)
        self._columns = columns

    def get(self, key: Any) -> dict[str, Any] | None:
        # As the serdes do, with fewer calls.
        row = self._reads.get(self._columns.encode_key(*_parts(key)))
        return None if row is None else self._current().decode_row(row)

    def prefix(self, prefix: object) -> Entries[Any, dict[str, Any]]:
        return self._typed(self._reads.prefix(self._columns.prefix(prefix)))

    def snapshot(self) -> ColumnsView:
        below = self._reads.snapshot()
        return ColumnsView(below, self._current(), owns=True)

    def _typed(self, below: Entries[bytes, bytes]) -> Entries[Any, dict[str, Any]]:
        """Many are converted at a time, at first few: most ranges are short."""

        def rows() -> Iterator[tuple[Any, dict[str, Any]]]:
            count = _FIRST_ROWS
            while some := list(islice(below, count)):
                keys, values = (pa.array(column, pa.binary()) for column in zip(*some, strict=True))
                found = self._keys_of.to_python(self._keys_of.from_binary(keys))
                if len(self._columns.keys) > 1:
                    found = [tuple(key.values()) for key in found]
                yield from zip(found, to_python(self._rows.from_binary(values), ""), strict=True)
                count = min(2 * count, _ROWS_MAX)

        return Entries(rows(), below.close)

    def _bound(self, key: object) -> bytes | None:
        return None if key is None else self._columns.key_bound(*_parts(key))


class ColumnsStore(ColumnsView, TypedStore[Any, dict[str, Any]]):
    """The same, which is also written."""

    def __init__(self, store: KeyValueStore, columns: Columns, *, owns: bool = False) -> None:
        ColumnsView.__init__(self, store, columns, owns=owns)
        self._writes = store


def _parts(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)
