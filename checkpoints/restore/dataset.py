"""`dataset`: a changelog as a `pyarrow.dataset.Dataset`, for tools that choose columns and filter rows."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final, Literal, NoReturn

import pyarrow as pa
import pyarrow.dataset as pad

from keyfold.checkpoints.log.ahead import ahead
from keyfold.checkpoints.manifest.resolve import At
from keyfold.checkpoints.restore.restore import RestoredState, restore
from keyfold.statestore.closing import Closing
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.files import LOCAL, Files
from keyfold.statestore.paths import AnyPath
from keyfold.statestore.projection import empty_structs
from keyfold.statestore.segment.block import RECORD_SCHEMA

#: The columns that the mode "changes" adds, as in the data source for Spark.
_OWN: Final = pa.schema(
    [
        ("_deleted", pa.bool_()),
        ("_partition", pa.int32()),
        ("_offset", pa.int64()),
        ("_timestamp", pa.timestamp("us", "UTC")),
    ]
)
_RAW: Final = pa.schema([RECORD_SCHEMA.field("key"), RECORD_SCHEMA.field("value")])


def dataset(
    path: AnyPath,
    *,
    mode: Literal["state", "changes"] = "state",
    at: At = None,
    partitions: Sequence[int] | None = None,
    filesystem: Any = None,
    files: Files = LOCAL,
) -> ChangelogDataset:
    """The changelog at `path` as a `pyarrow.dataset.Dataset`, which DuckDB, polars and others query.

        clicks = keyfold.dataset("var/clicks")
        duckdb.sql("select page, sum(seconds) from clicks group by page")

    Nothing is read before a query. Each query reads the columns that it needs, in batches.

    Args:
        path, at, partitions, filesystem: as for `restore`.
        mode: "state": one row per key, with the columns of the changelog. "changes": every record of the log,
            also with `_deleted`, `_partition`, `_offset` and `_timestamp`. A deleted row has no values. Raw
            changelogs have `key` and `value` as binary.

    Raises:
        ConfigError: another mode, or with "changes" a column of the changelog has one of these names. See
            `restore` for the other errors.
    """
    if mode not in ("state", "changes"):
        raise ConfigError(
            f"Unknown mode: {mode!r}.", expected='"state" or "changes"', found=repr(mode),
            remedy="correct `mode=`; `Changelog.read` gives the records of the log as they are",
        )  # fmt: skip
    state = restore(path, at=at, partitions=partitions, filesystem=filesystem, files=files)
    try:
        return ChangelogDataset(state, every=mode == "changes")
    except BaseException:
        state.close()
        raise


class ChangelogDataset(pad.UnionDataset, Closing):  # type: ignore[misc]
    """A changelog as of one commit, as a `pyarrow.dataset.Dataset`. A context manager.

    It has `schema`, `scanner`, `to_table`, `to_batches`, `head`, `take`, `count_rows` and `filter`, with the
    arguments that they have in pyarrow. A scanner can be used once.

    The files are kept until it is closed or garbage collected, and until running scans end. Closing it makes
    running scans fail. It cannot be pickled.

    Columns that a query does not need are not decompressed. Checksums are those of whole blocks, so each
    block is read from disk, also with a filter: `restore` with `keys=` or `prefix=` does less work.

    Memory holds some blocks, and in the mode "state" 16 bytes for each key that was written since the last
    compaction. Rows are in the same order in each scan; the order has no other meaning.
    """

    def __init__(self, state: RestoredState, *, every: bool, filter: Any = None) -> None:
        own = _OWN if every else pa.schema([])
        user = _RAW if state.columns is None else state.columns.arrow_schema()
        taken = {name.lower() for name in own.names} & {name.lower() for name in user.names}
        if taken:
            raise ConfigError(
                "Columns of this changelog have names that the mode \"changes\" needs for itself.",
                path=state.path, expected=f"no column named {', '.join(own.names)}",
                found=", ".join(sorted(taken)), remedy="read the log with Changelog.read",
            )  # fmt: skip
        schema = pa.schema([*user, *own])
        # What pyarrow reads without this class, such as the right side of a join, is refused, not empty.
        unread = pad.IpcFileFormat().make_fragment(pa.PythonFile(_Unread(bytes(64)), mode="r"))
        super().__init__(schema, [pad.FileSystemDataset([unread], schema, pad.IpcFileFormat())])
        self._state = state
        self._every = every
        self._filter = filter

    def __repr__(self) -> str:
        mode = "changes" if self._every else "state"
        return f"<ChangelogDataset {str(self._state.path)!r}, mode={mode!r}, ends {list(self._state.ends)}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A dataset of a changelog cannot be pickled: open it in the other process.")

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        # Read in the thread that asks. It may hold the GIL (polars before 2.0), and the threads of the reader
        # that a scanner makes would wait for it.
        reader = pa.RecordBatchReader.from_batches(self.schema, self.to_batches())
        return reader.__arrow_c_stream__(requested_schema)

    def close(self) -> None:
        """Release the files. A second call does nothing."""
        self._state.close()

    def scanner(
        self, columns: Sequence[str] | Mapping[str, Any] | None = None, filter: Any = None, **options: Any
    ) -> pad.Scanner:
        """A `pyarrow.dataset.Scanner`, which can be used once.

        Args:
            columns, filter, options: as for `pyarrow.dataset.Dataset.scanner`.

        Raises:
            pa.ArrowInvalid: a column does not exist, or a type does not fit.
            ConfigError: the dataset was closed.
        """
        if self._filter is not None:
            filter = self._filter if filter is None else self._filter & filter
        schema = pa.schema([self.schema.field(name) for name in self._needed(columns, filter)])
        columns = self.schema.names if columns is None else columns
        batches = self._batches(schema)
        return pad.Scanner.from_batches(batches, schema=schema, columns=columns, filter=filter, **options)

    def count_rows(self, filter: Any = None, **options: Any) -> int:
        """The number of rows. Without a filter, the manifest may say it, and then no record is read."""
        if filter is None and self._filter is None:
            known = self._state.count(every=self._every)
            if known is not None:
                return known
        return int(self.scanner(columns=[], filter=filter, **options).count_rows())

    def filter(self, expression: Any) -> ChangelogDataset:
        """The rows for which a `pyarrow.compute.Expression` is true. The files are released with those of the
        dataset that this was called on.
        """
        both = expression if self._filter is None else self._filter & expression
        return ChangelogDataset(self._state, every=self._every, filter=both)

    def replace_schema(self, schema: pa.Schema) -> NoReturn:
        """Not supported."""
        raise _not_here("replace_schema")

    def sort_by(self, *args: Any, **options: Any) -> NoReturn:
        """Not supported: sort the result of `to_table`."""
        raise _not_here("sort_by")

    def join(self, *args: Any, **options: Any) -> NoReturn:
        """Not supported: join the result of `to_table`."""
        raise _not_here("join")

    def join_asof(self, *args: Any, **options: Any) -> NoReturn:
        """Not supported: join the result of `to_table`."""
        raise _not_here("join_asof")

    def _needed(self, columns: Any, filter: Any) -> list[str]:
        """The columns that have to be read, in their order."""
        names: list[str] = self.schema.names
        if columns is None:
            return names
        expressions = [filter, *(columns.values() if isinstance(columns, Mapping) else ())]
        # pyarrow does not say which columns an expression names. Without one that it names, it does not bind.
        # All are read for a column that is named by its number, and where even all of them do not bind.
        if not _binds(self.schema, columns, filter) or any("FieldPath(" in str(e) for e in expressions):
            return names
        plain: Collection[str] = () if isinstance(columns, Mapping) else {*columns} & {*names}
        others = None if len(plain) == len(columns) else columns
        if others is None and filter is None:
            return [name for name in names if name in plain]
        return [
            name
            for i, name in enumerate(names)
            if name in plain or not _binds(self.schema.remove(i), others or [], filter)
        ]

    def _batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        sources = [partial(self._rows, partition, schema) for partition in self._state.partitions]
        # With one thread the order is the same in each scan, so that `take` has a meaning.
        with closing(ahead(sources, threads=1)) as batches:
            yield from batches

    def _rows(self, partition: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of one partition with these columns."""
        columns = self._state.columns
        wanted = {*schema.names}
        if columns is None:
            keys, values, kind = {"key"}, {"value"}, pa.binary()
        else:
            keys = {*columns.keys}
            kind = pa.struct([field for field in columns.value_type if field.name in wanted])
            values = {field.name for field in kind}
        names = ["offset"]
        names += ["timestamp"] if "_timestamp" in wanted and self._every else []
        names += ["key"] if wanted & keys or not self._every else []
        names += ["value"] if wanted & {*values, "_deleted"} or not self._every else []
        for batch in self._state.records(partition, names, kind, every=self._every):
            found: dict[str, pa.Array] = {}
            if columns is None:
                found |= {name: batch.column(name) for name in wanted & {"key", "value"}}
            else:
                if wanted & keys:
                    found |= zip(columns.keys, columns.decode_keys(batch.column("key")), strict=True)
                if values:
                    found |= zip(kind.names, batch.column("value").flatten(), strict=True)
            if self._every:
                found |= _own(batch, partition, wanted)
            if wanted:
                yield pa.RecordBatch.from_arrays([found[name] for name in schema.names], schema=schema)
            else:
                yield pa.RecordBatch.from_struct_array(empty_structs(batch.num_rows))


def _own(batch: pa.RecordBatch, partition: int, wanted: Collection[str]) -> Iterator[tuple[str, pa.Array]]:
    """The columns of `_OWN` that are wanted."""
    if "_deleted" in wanted:
        yield "_deleted", batch.column("value").is_null()
    if "_partition" in wanted:
        yield "_partition", pa.repeat(pa.scalar(partition, pa.int32()), batch.num_rows)
    if "_offset" in wanted:
        yield "_offset", batch.column("offset")
    if "_timestamp" in wanted:
        yield "_timestamp", batch.column("timestamp").cast(_OWN.field("_timestamp").type)


def _binds(schema: pa.Schema, columns: Any, filter: Any) -> bool:
    """Whether a table with this schema has all that a query names."""
    try:
        pad.Scanner.from_batches(iter(()), schema=schema, columns=columns, filter=filter)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, KeyError):
        return False
    return True


def _not_here(what: str) -> ConfigError:
    return ConfigError(
        f"pyarrow cannot do this with a changelog: {what}.", expected="scanner, to_table or to_batches",
        found=what, remedy="read it with to_table, and go on with the table",
    )  # fmt: skip


class _Unread(io.BytesIO):
    """The file of a dataset that only `ChangelogDataset` can read. Its size can be asked for: an error there
    would stay in pyarrow, and keep the caller's variables alive.
    """

    def read(self, size: int | None = -1, /) -> NoReturn:
        raise _not_here("reading it without its own methods")

    def readinto(self, buffer: object, /) -> NoReturn:
        raise _not_here("reading it without its own methods")
