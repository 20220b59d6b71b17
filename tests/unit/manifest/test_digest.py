"""The digest of an appended batch, against what docs/format.md says, row by row in plain Python."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from keyfold.checkpoints.log import ingest

Row = tuple[bytes, bytes | None, int | None, list[tuple[str, bytes | None]] | None]

_BYTES = st.binary(max_size=3)
_HEADERS = st.lists(st.tuples(st.text("ab", max_size=2), st.none() | _BYTES), max_size=2)
_ROWS = st.lists(
    st.tuples(_BYTES, st.none() | _BYTES, st.none() | st.integers(0, 2), st.none() | _HEADERS), max_size=6
)


def of_the_page(rows: list[Row]) -> str:
    headers = [header for *_, own in rows for header in own or ()]
    columns: list[list[bytes | None]] = [
        [key for key, *_ in rows],
        [value for _, value, *_ in rows],
        [name.encode() for name, _ in headers],
        [value for _, value in headers],
    ]
    streams: list[bytes] = []
    for column in columns:
        streams.append(b"".join(struct.pack("<i", -1 if x is None else len(x)) for x in column))
        streams.append(b"".join(x or b"" for x in column))
    streams.append(b"".join(struct.pack("<i", -1 if own is None else len(own)) for *_, own in rows))
    streams.append(b"".join(struct.pack("<q", -1 if time is None else time) for _, _, time, _ in rows))
    assert len(streams) == 10
    return xxhash.xxh3_128(b"".join(xxhash.xxh3_128(s).digest() for s in streams)).hexdigest()


def table_of(rows: list[Row]) -> pa.Table:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    headers: list[Any] = [
        None if own is None else [{"key": k, "value": v} for k, v in own] for *_, own in rows
    ]
    return pa.table(
        {
            "key": pa.array([key for key, *_ in rows], pa.binary()),
            "value": pa.array([value for _, value, *_ in rows], pa.binary()),
            "timestamp": pa.array([time for _, _, time, _ in rows], pa.int64()),
            "headers": pa.array(headers, kind),
        }
    )


def digest(table: pa.Table, now_ms: int) -> str:
    return ingest.digest(ingest.normalize(table, now_ms), ingest.given_timestamps(table))


@given(_ROWS, st.integers(0, 6), st.integers(0, 6))
def test_a_digest_is_what_the_page_says_however_the_rows_are_chunked(
    rows: list[Row], cut: int, left_out: int
) -> None:
    """And whatever the writer's clock says; slices have their columns in the middle of buffers."""
    table = table_of(rows)
    chunked = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    assert digest(chunked, 1) == digest(table, 2) == of_the_page(rows)
    assert digest(table.slice(left_out), 3) == of_the_page(rows[left_out:])


@given(_ROWS, _ROWS)
def test_other_rows_have_another_digest(one: list[Row], other: list[Row]) -> None:
    assert (digest(table_of(one), 1) == digest(table_of(other), 1)) == (one == other)
