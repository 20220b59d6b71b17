"""Types that can be in a value, and values of them, as Hypothesis strategies."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

UTC = dt.timezone.utc

#: A type, and values of it.
Kind = tuple[pa.DataType, st.SearchStrategy[Any]]


def integers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)


ATOMIC: list[Kind] = [
    (pa.null(), st.none()),
    (pa.bool_(), st.booleans()),
    (pa.int8(), integers(8)),
    (pa.int16(), integers(16)),
    (pa.int32(), integers(32)),
    (pa.int64(), integers(64)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.decimal128(5, 2), st.decimals("-999.99", "999.99", places=2)),
    (pa.decimal128(38, 0), st.integers(-(10**38) + 1, 10**38 - 1).map(Decimal)),
    (pa.string(), st.text(max_size=5)),
    (pa.binary(), st.binary(max_size=5)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
    (pa.timestamp("us"), st.datetimes()),
    (pa.duration("us"), st.timedeltas(dt.timedelta(-99999), dt.timedelta(99999))),
    (pa.time64("ns"), st.times()),
]


def array_of(inner: Kind) -> Kind:
    kind, values = inner
    return pa.list_(pa.field("element", kind)), st.lists(st.none() | values, max_size=4)


def map_of(inner: Kind) -> Kind:
    kind, values = inner
    return pa.map_(pa.string(), kind), st.lists(
        st.tuples(st.text(max_size=2), st.none() | values), max_size=3
    )


def struct_of(inner: list[Kind]) -> Kind:
    names = [f"f{i}" for i in range(len(inner))]
    values = {name: st.none() | of for name, (_, of) in zip(names, inner, strict=True)}
    kind = pa.struct([pa.field(name, kind) for name, (kind, _) in zip(names, inner, strict=True)])
    return kind, st.fixed_dictionaries(values)


KINDS = st.recursive(
    st.sampled_from(ATOMIC),
    lambda inner: inner.map(array_of) | inner.map(map_of) | st.lists(inner, max_size=9).map(struct_of),
    max_leaves=9,
)


@st.composite
def columns(draw: st.DrawFn) -> pa.StructArray:
    """Typed values, some of them null; sometimes a slice of a larger array."""
    kind, values = struct_of(draw(st.lists(KINDS, max_size=10)))
    array = pa.array(draw(st.lists(st.none() | values, max_size=8)), kind)
    start = draw(st.integers(0, len(array)))
    return array.slice(start, draw(st.integers(0, len(array))))
