"""The commands that print the contents of records and last values: `dump`, `get`, `tail`."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import click
import pyarrow as pa

from keyfold.checkpoints.changelog import Changelog
from keyfold.checkpoints.cli.exits import NO_VALUE
from keyfold.checkpoints.cli.output import Target, json_of, out, text_of, time_from, time_of, verb
from keyfold.checkpoints.log.reader import last_value
from keyfold.checkpoints.manifest.partition import PartitionState
from keyfold.checkpoints.manifest.resolve import partition_state
from keyfold.statestore import filenames
from keyfold.statestore.errors import BadRecord, CompactedAway, ConfigError, SchemaMismatch
from keyfold.statestore.schema.columns import Columns
from keyfold.statestore.schema.python_values import to_python

_FOLLOW_SECONDS: Final = 0.5
#: The number of lines to print at once, so that a long dump does not need one system call per record.
LINES_AT_ONCE: Final = 1000

# -- one record ----------------------------------------------------------------------------------------------


class _Records:
    """Prints up to `limit` records, each as a line of columns or of JSON."""

    def __init__(self, place: Target, columns: Columns | None, limit: int | None = None) -> None:
        self._as_json = place.as_json
        self._columns = columns
        self.left = limit

    def show(self, partition: int, batch: pa.RecordBatch) -> None:
        """Print the records of one batch, up to the limit."""
        if self.left is not None:
            batch = batch.slice(0, self.left)
            self.left -= batch.num_rows
        for start in range(0, batch.num_rows, LINES_AT_ONCE):
            piece = batch.slice(start, LINES_AT_ONCE)
            out("\n".join(self._lines(partition, piece)))

    def _lines(self, partition: int, batch: pa.RecordBatch) -> Iterator[str]:
        offsets = batch.column("offset").to_pylist()
        times = batch.column("timestamp").cast(pa.int64()).to_pylist()
        found = contents(batch, self._columns)
        headers = batch.column("headers").to_pylist()
        for offset, ms, content, head in zip(offsets, times, found, headers, strict=True):
            if self._as_json:
                document = {"partition": partition, "offset": offset, "timestamp_ms": ms, **content}
                if head is not None:
                    document["headers"] = [
                        {**json_of("key", h["key"].encode()), **json_of("value", h["value"])} for h in head
                    ]
                yield json.dumps(document)
            else:
                shown = [_shown(content, "key"), _shown(content, "value")]
                shown += [
                    f"{text_of(h['key'].encode())}={_shown(json_of('value', h['value']), 'value')}"
                    for h in head or ()
                ]
                yield "\t".join([str(partition), str(offset), time_of(ms), *shown])


def contents(batch: pa.RecordBatch, columns: Columns | None) -> list[dict[str, Any]]:
    """`key` and `value` of each record: text or base64, or an object of the typed columns. Typed values that
    cannot be shown are the bytes of their rows.
    """
    keys, values = batch.column("key"), batch.column("value")
    if columns is not None:
        try:
            return _typed_contents(columns, keys, values)
        except (SchemaMismatch, BadRecord):
            values = columns.encode_rows(values)  # a key of other columns, or a time that Python cannot hold
    return [
        {**json_of("key", key), **json_of("value", value)}
        for key, value in zip(keys.to_pylist(), values.to_pylist(), strict=True)
    ]


def _typed_contents(columns: Columns, keys: pa.Array, values: pa.Array) -> list[dict[str, Any]]:
    decoded = columns.decode(keys, values)
    value_names = [name for name in decoded.column_names if name not in columns.keys]
    plain = {
        name: [_plain(v, decoded.schema.field(name).type) for v in to_python(decoded.column(name), name)]
        for name in decoded.column_names
    }
    return [
        {
            "key": {name: plain[name][row] for name in columns.keys},
            "value": {name: plain[name][row] for name in value_names} if valid else None,
        }
        for row, valid in enumerate(values.is_valid().to_pylist())
    ]


def _plain(value: Any, kind: pa.DataType) -> Any:
    """A value of a typed column in JSON: decimals and times as text, intervals as seconds in text, binary as
    base64.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value).replace("inf", "Infinity").replace("nan", "NaN")
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, datetime.timedelta):
        return str(decimal.Decimal(value // datetime.timedelta(microseconds=1)).scaleb(-6))
    if pa.types.is_map(kind):
        return [{"key": _plain(k, kind.key_type), "value": _plain(v, kind.item_type)} for k, v in value]
    if pa.types.is_struct(kind):
        return {field.name: _plain(value[field.name], field.type) for field in kind}
    return [_plain(v, kind.value_type) for v in value]


def _shown(content: dict[str, Any], name: str) -> str:
    """A key or value of `contents` as text for people."""
    encoded = content.get(f"{name}_base64")
    if encoded is not None:
        return text_of(base64.b64decode(encoded))
    found = content[name]
    if found is None:
        return "(tombstone)"
    if isinstance(found, str):
        return text_of(found.encode())
    return json.dumps(found, ensure_ascii=False)


# -- dump ----------------------------------------------------------------------------------------------------


@verb(
    "keyfold dump var/counts --partition 0 --from 1200 --limit 20",
    "keyfold dump var/counts --json | jq -c 'select(.value == null)'",
)
@click.option(
    "--partition", "-p", "asked", type=int, multiple=True, help="Only this partition. Can be repeated."
)
@click.option("--from", "from_", type=int, help="First offset; needs one --partition.")
@click.option("--to", type=int, help="Offset to stop before; needs one --partition.")
@click.option("--limit", "-n", type=click.IntRange(min=0), help="Maximum number of records.")
def dump(place: Target, asked: tuple[int, ...], from_: int | None, to: int | None, limit: int | None) -> None:
    """Print records in log order, partition by partition.

    The columns are separated by tabs: partition, offset, time, key, value, headers. Keys and values are shown
    as text if they are UTF-8, otherwise in hexadecimal; typed columns as JSON. With --json each record is a
    line of JSON, with key_base64 and value_base64 for bytes that are not UTF-8, and null for the value of a
    tombstone.
    """
    with Changelog.open(place.path, mode="r", files=place.files) as log:
        partitions = _partitions(log, asked)
        if (from_ is not None or to is not None) and len(partitions) != 1:
            raise ConfigError(
                "--from and --to need one partition.", expected="one --partition with --from or --to",
                found=f"{len(partitions)} partitions", remedy="give one --partition",
            )  # fmt: skip
        records = _Records(place, log.columns, limit)
        for partition in partitions:
            if records.left == 0:
                break
            for batch in log.read(partition, from_, to):
                records.show(partition, batch)
                if records.left == 0:
                    break


def _partitions(log: Changelog, asked: Sequence[int]) -> list[int]:
    """The requested partitions, or all by default. Raises `ConfigError`."""
    for partition in asked:
        partition_state(log.state, log.path, partition)
    return sorted(set(asked)) or list(range(log.partitions))


# -- get -----------------------------------------------------------------------------------------------------


@verb(
    "keyfold get var/counts apple",
    "keyfold get var/delays AA JFK --json | jq .value.flights",
    "keyfold get var/clicks --hex 00ff17",
)
@click.argument("key", nargs=-1, required=True)
@click.option("--hex", "hexadecimal", is_flag=True, help="KEY is bytes in hexadecimal.")
def get(place: Target, key: tuple[str, ...], hexadecimal: bool) -> None:
    """Print the last value of a key. The exit code is 1 if the key has no value.

    KEY is text. For typed columns give one KEY per key column, in the order that stats shows. Write numbers,
    true, false, dates and times (ISO 8601) directly, intervals in seconds, and arrays and structs in JSON, as
    dump shows them.
    """
    with Changelog.open(place.path, mode="r", files=place.files) as log:
        parts = _key(log.columns, key, hexadecimal)
        data = parts[0] if log.columns is None else log.columns.encode_key(*parts)
        kind = log.identity.value_type
        value = last_value(log.files, log.path, log.state, log.partition(data), data, kind)
        one = [pa.array([data], pa.binary()), pa.nulls(1, kind) if value is None else value, pa.nulls(1)]
        content = contents(pa.record_batch(one, names=["key", "value", "headers"]), log.columns)[0]
    if place.as_json:
        out(json.dumps({"partition": log.partition(data), **content}))
    elif value is None:
        click.echo("the key has no value", err=True)
    else:
        out(_shown(content, "value"))
    if value is None:
        click.get_current_context().exit(NO_VALUE.code)


def _key(columns: Columns | None, texts: tuple[str, ...], hexadecimal: bool) -> tuple[Any, ...]:
    """The values of the columns of a key given as text. Raises `ConfigError`."""
    names_ = ("KEY",) if columns is None else columns.keys
    if len(texts) != len(names_):
        raise ConfigError(
            "The number of key parts is wrong.", expected=f"{len(names_)}: {', '.join(names_)}",
            found=len(texts), remedy="give one KEY per key column, in this order",
        )  # fmt: skip
    if columns is None:
        return (_part(texts[0], pa.binary(), "KEY", hexadecimal),)
    kinds = [columns.arrow_schema().field(name).type for name in names_]
    return tuple(_part(*x, hexadecimal) for x in zip(texts, kinds, names_, strict=True))


def _part(text: str, kind: pa.DataType, name: str, hexadecimal: bool) -> Any:
    """One part of a key as a value of its column's type."""
    try:
        if pa.types.is_string(kind):
            return text
        if pa.types.is_binary(kind):
            return (
                bytes.fromhex(text.removeprefix("0x"))
                if hexadecimal
                else text.encode(errors="surrogateescape")
            )
        if pa.types.is_boolean(kind) or pa.types.is_nested(kind):
            return _of_json(json.loads(text), kind)
        return _scalar(text, kind)
    except (ValueError, decimal.InvalidOperation):
        raise ConfigError(
            "A part of the key does not have its column's type.", position=f"column {name!r}",
            expected="hexadecimal digits" if pa.types.is_binary(kind) else kind,
            found=f"{len(text)} characters", remedy="see `keyfold get --help` for the form of a key",
        ) from None  # fmt: skip


def _scalar(text: str, kind: pa.DataType) -> Any:
    """Raises `ValueError` or `InvalidOperation`."""
    if pa.types.is_date(kind):
        return datetime.date.fromisoformat(text)
    if pa.types.is_timestamp(kind):
        moment = time_from(text)
        if moment is None:
            raise ValueError
        return moment if kind.tz else moment.replace(tzinfo=None)
    if pa.types.is_time(kind):
        return datetime.time.fromisoformat(text)
    if pa.types.is_duration(kind):
        return datetime.timedelta(microseconds=int(decimal.Decimal(text).scaleb(6)))
    if pa.types.is_decimal(kind):
        return decimal.Decimal(text)
    return int(text) if pa.types.is_integer(kind) else float(text)


def _of_json(value: Any, kind: pa.DataType) -> Any:
    """The inverse of `_plain`. What does not fit is left for `encode_key` to refuse."""
    if pa.types.is_list(kind) and isinstance(value, list):
        return [_of_json(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind) and isinstance(value, dict):
        kinds = {field.name: field.type for field in kind}
        return {name: _of_json(item, kinds.get(name, pa.null())) for name, item in value.items()}
    if not isinstance(value, str) or pa.types.is_string(kind) or pa.types.is_null(kind):
        return value
    return base64.b64decode(value, validate=True) if pa.types.is_binary(kind) else _scalar(value, kind)


# -- tail ----------------------------------------------------------------------------------------------------


@verb(
    "keyfold tail var/counts -n 3",
    "keyfold tail var/counts --partition 0 --follow --json",
)
@click.option(
    "--partition", "-p", "asked", type=int, multiple=True, help="Only this partition. Can be repeated."
)
@click.option(
    "--lines", "-n", type=click.IntRange(min=0), default=10, show_default=True, help="Records per partition."
)
@click.option("--follow", "-f", is_flag=True, help="Keep printing new commits until Ctrl-C.")
def tail(place: Target, asked: tuple[int, ...], lines: int, follow: bool) -> None:
    """Print the last records of each partition, in the format of dump.

    With --follow, every new commit is printed as soon as it is durable. If the cleaner has dropped a delete
    that was not yet printed, the command fails: it never skips a delete silently. A snapshot never grows, so
    it cannot be followed.
    """
    with Changelog.open(place.path, mode="r", files=place.files) as log:
        partitions = _partitions(log, asked)
        records = _Records(place, log.columns)
        ends = log.end_offsets()
        for partition in partitions:
            for batch in _last(log, partition, lines):
                records.show(partition, batch)
        if follow and log.identity.snapshot:
            click.echo("a snapshot never grows: nothing to follow", err=True)
            follow = False
        while follow:
            time.sleep(_FOLLOW_SECONDS)
            log.refresh()
            for partition in partitions:
                _check_no_gap(log.state.partitions[partition], ends[partition], place, partition)
                for batch in log.read(partition, ends[partition]):
                    records.show(partition, batch)
            ends = log.end_offsets()


def _last(log: Changelog, partition: int, count: int) -> list[pa.RecordBatch]:
    """The last `count` records. Searches a range at the end, and doubles it until it holds enough."""
    start, end = log.start_offsets()[partition], log.end_offsets()[partition]
    span = count
    while count:
        first = max(start, end - span)
        batches = list(log.read(partition, first))
        found = sum(batch.num_rows for batch in batches)
        if found >= count or first == start:
            return _without(batches, max(0, found - count))
        span *= 2
    return []


def _without(batches: list[pa.RecordBatch], first: int) -> list[pa.RecordBatch]:
    kept = []
    for batch in batches:
        if first < batch.num_rows:
            kept.append(batch.slice(first))
        first = max(0, first - batch.num_rows)
    return kept


def _check_no_gap(p: PartitionState, offset: int, place: Target, partition: int) -> None:
    if p.dropped_tombstone >= offset:
        raise CompactedAway(
            "The cleaner has dropped a delete that was not yet printed.",
            path=filenames.partition(place.path, partition),
            position=f"partition {partition}, offset {offset}",
            expected=f"no tombstone dropped at or above offset {offset}",
            found=f"a tombstone dropped at offset {p.dropped_tombstone}",
            remedy="run the command again; increase delete.retention.ms if this happens often",
        )  # fmt: skip
