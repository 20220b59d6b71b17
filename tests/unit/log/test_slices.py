"""Tables of any size are written in slices, and a record that is too large is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyfold
from keyfold import Changelog
from keyfold.checkpoints.log import ingest, slices
from keyfold.statestore.errors import BadRecord
from support.changelogs import BY_HAND

TEXTS = [f"{n} " + "x" * (n * 37 % 200) for n in range(50)]
#: Layouts of the same texts.
LAYOUTS: dict[str, Callable[[pa.Array], pa.Array]] = {
    "string": lambda a: a,
    "large_string": lambda a: a.cast(pa.large_string()),
    "string_view": lambda a: a.cast(pa.string_view()),
    "binary": lambda a: a.cast(pa.binary()),
    "dictionary": lambda a: a.dictionary_encode(),
    "dictionary of views": lambda a: pa.DictionaryArray.from_arrays(
        a.dictionary_encode().indices, a.dictionary_encode().dictionary.cast(pa.string_view())
    ),
    "runs": pc.run_end_encode,
    "fixed": lambda a: pa.array([t.encode().ljust(210) for t in a.to_pylist()], pa.binary(210)),
    "fixed in a dictionary": lambda a: LAYOUTS["fixed"](a).dictionary_encode(),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """Slices of at most some bytes instead of megabytes."""
    monkeypatch.setattr(slices, "SLICE_BYTES", 1000)
    monkeypatch.setattr(ingest, "SLICE_BYTES", 1000)
    return 1000


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("repeated", [1, 7])
def test_slices_are_small_and_hold_every_row(layout: str, repeated: int, small: int) -> None:
    """Also where each value is in many rows, and there once."""
    column = LAYOUTS[layout](pa.array([text for text in TEXTS for _ in range(repeated)]))
    table = pa.table({"n": pa.array(range(len(column))), "text": column})
    found = list(slices.slices(table))
    assert len(found) > 3
    assert all(batch.nbytes <= small or batch.num_rows == 1 for batch in found)
    whole = pa.Table.from_batches(found)
    assert whole["n"].to_pylist() == [*range(len(column))]
    assert whole["text"].to_pylist() == column.to_pylist()


def test_a_dictionary_whose_rows_need_more_than_2_gib_is_cut_before_it_is_decoded() -> None:
    values = pa.array([b"a", bytes(24 << 20)])
    column = pa.DictionaryArray.from_arrays(pa.array([0, *[1] * 100], pa.int8()), values)
    sizes = [(batch.num_rows, batch.nbytes) for batch in slices.slices(pa.table({"key": column}))]
    assert sum(rows for rows, _ in sizes) == 101
    assert max(size for _, size in sizes) <= slices.SLICE_BYTES


@given(
    st.lists(st.tuples(st.integers(0, 9), st.none() | st.text(max_size=90)), max_size=40),
    st.integers(1, 3000),
)
def test_a_batch_is_the_same_in_slices_of_any_size(pairs: list[tuple[int, str | None]], limit: int) -> None:
    table = pa.table(
        {"key": [b"%d" % n for n, _ in pairs], "value": pa.array([t for _, t in pairs], pa.string())}
    )
    one = ingest.normalize(table, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "SLICE_BYTES", limit)
        patch.setattr(ingest, "SLICE_BYTES", limit)
        several = ingest.normalize(table, 0)
    assert [r for batch in several for r in batch.to_pylist()] == [
        r for batch in one for r in batch.to_pylist()
    ]
    stamps = np.full(len(pairs), -1, np.int64)
    assert ingest.digest(several, stamps) == ingest.digest(one, stamps)


def test_a_typed_table_is_written_in_slices(tmp_path: Path, small: int) -> None:
    rows = {"k": [*range(50)], "text": TEXTS, "flags": [[True] * n for n in range(50)]}
    with keyfold.open(tmp_path / "log", keys="k", partitions=2, config=BY_HAND) as log:
        log.append(rows)
        log.append(pa.table(rows).set_column(1, "text", pa.array(TEXTS).dictionary_encode()))
    found = keyfold.restore(tmp_path / "log").to_arrow().sort_by("k").to_pydict()
    assert found == rows


TOO_LARGE: dict[str, tuple[dict[str, Any], str | None]] = {
    "a value": ({"key": ["a", "b", "c"], "value": ["1", "2", "x" * 5000]}, None),
    "a key": ({"key": ["a", "b", "k" * 5000], "value": ["1", "2", "3"]}, None),
    "a string": ({"k": [1, 2, 3], "v": ["", None, "x" * 5000]}, "k"),
    "a key of typed columns": ({"k": ["a", "b", "x" * 5000], "v": [1, 2, 3]}, "k"),
    "an array": ({"k": [1, 2, 3], "v": [[1], None, [7] * 2000]}, "k"),
    "booleans": ({"k": [1, 2, 3], "v": [[True], None, [True] * 4500]}, "k"),
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_a_record_that_is_too_large_is_named(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", 500)
    monkeypatch.setattr(ingest, "SLICE_BYTES", 500)
    monkeypatch.setattr(ingest, "VALUE_BYTES_MAX", 4096)
    rows, keys = TOO_LARGE[what]
    with Changelog.open(tmp_path / "log", keys=keys, config=BY_HAND) as log:
        log.append({name: column[:2] for name, column in rows.items()})
        with pytest.raises(BadRecord, match="A record is too large") as refused:
            log.append(rows)
        assert refused.value.position == "row 2"
        assert "at most 4096 bytes" in str(refused.value.expected)
        assert "xxx" not in str(refused.value)
        assert log.end_offsets() == {0: 2}
        log.append({name: column[:2] for name, column in rows.items()})


@pytest.mark.parametrize(("keys", "nested"), [(None, False), ("key", False), ("key", True)])
def test_a_slice_from_the_end_of_a_large_array_is_written(
    tmp_path: Path, keys: str | None, nested: bool
) -> None:
    """As it comes from a table of many gigabytes, which takes no memory here."""
    size = 5 << 29
    data = np.zeros(size + 4, "u1")
    data[-4:] = list(b"abbb")
    ends = pa.py_buffer(np.array([0, size, size + 1, size + 4], np.int64))
    huge = pa.Array.from_buffers(pa.large_binary(), 3, [None, ends, pa.py_buffer(data)])
    if nested:
        huge = pa.LargeListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int64()), huge)
    with Changelog.open(tmp_path / "log", keys=keys, config=BY_HAND) as log:
        log.append(pa.table({"key": pa.array([b"one", b"two"]), "value": huge.slice(1)}))
        found = [log.get(b"one"), log.get(b"two")]
    values: list[Any] = [[b"a"], [b"bbb"]] if nested else [b"a", b"bbb"]
    assert found == [value if keys is None else {"value": value} for value in values]


def zeros(size: int) -> pa.Array:
    """Two values, the second of so many zero bytes, in memory that was never written to."""
    ends = np.array([0, 1, size + 1], np.int64)
    data = pa.py_buffer(np.zeros(size + 1, "u1"))
    return pa.Array.from_buffers(pa.large_binary(), 2, [None, pa.py_buffer(ends), data])


@pytest.mark.parametrize("keys", [None, "key"])
def test_a_value_beyond_2_gib_is_refused_as_it_is(tmp_path: Path, keys: str | None) -> None:
    with Changelog.open(tmp_path / "log", keys=keys, config=BY_HAND) as log:
        log.append({"key": [b"a"], "value": [b"b"]})
        with pytest.raises(BadRecord, match="A record is too large") as refused:
            log.append(pa.table({"key": pa.array([b"a", b"b"]), "value": zeros(5 << 29)}))
        assert refused.value.position == "row 1"
