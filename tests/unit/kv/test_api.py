"""What every key-value store does, whichever it is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from zlib import crc32

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfold.statestore.kv.api import Entries, prefix_end
from keyfold.statestore.kv.arrow import ArrowStore
from keyfold.statestore.kv.serdes import BytesSerde
from keyfold.statestore.kv.stores import (
    KeyValueStore,
    MemoryStore,
    Overlay,
    PartitionedStore,
    ReadOnlyStore,
    StoreClosed,
    TypedStore,
    TypedView,
)
from keyfold.statestore.rocksdb.store import LastValues, StoreId

Table = dict[bytes, bytes]

#: Makes a store that holds a table; what it opens on the way is closed by the stack.
Build = Callable[[Table, ExitStack, Path], Any]

#: The empty key, a prefix of another, bytes above 127, and only 0xff: where orders and bounds go wrong.
SAMPLE: Table = {
    b"": b"empty",
    b"a": b"1",
    b"a\x00": b"2",
    b"ab": b"",
    b"b": b"4",
    b"\x7f": b"long" * 1000,
    b"\x80": b"6",
    b"\xff": b"7",
    b"\xff\xff": b"8",
}


#: Nothing here is about durability, so RocksDB's many syncs go to memory where they can.
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def partition_of(key: bytes) -> int:
    return crc32(key) % 3


def rows_of(table: dict[bytes, bytes | None], offset: int = 0) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "offset": pa.array(range(offset, offset + len(table)), pa.int64()),
            "timestamp": pa.array([1_000] * len(table), pa.timestamp("ms")),
            "key": pa.array(list(table.keys()), pa.binary()),
            "value": pa.array(list(table.values()), pa.binary()),
        }
    )


def last_values(table: Table, stack: ExitStack, directory: Path, partition: int = 0) -> LastValues:
    store = stack.enter_context(LastValues.open(directory / f"p{partition}", StoreId("uuid", partition, 1)))
    if table:
        store.apply(rows_of(dict(table)), len(table))
    return store


def partitioned(table: Table, stack: ExitStack, directory: Path) -> PartitionedStore:
    parts: list[Table] = [{}, {}, {}]
    for key, value in table.items():
        parts[partition_of(key)][key] = value
    return PartitionedStore(
        [last_values(part, stack, directory, number) for number, part in enumerate(parts)], partition_of
    )


def overlaid(below: Build) -> Build:
    """An overlay that has to hide, replace, delete and add to arrive at the table."""

    def build(table: Table, stack: ExitStack, directory: Path) -> Overlay:
        base: Table = {}
        changes: dict[bytes, bytes | None] = {}
        for number, (key, value) in enumerate(table.items()):
            if number % 3 == 0:
                base[key] = value
            elif number % 3 == 1:
                base[key] = b"stale"
                changes[key] = value
            else:
                changes[key] = value
        for gone in (b"a\x00gone", b"\x80gone", b"\xff\xff\xffgone"):
            base[gone] = b"stale"
            changes[gone] = None
        overlay = Overlay(below(base, stack, directory))
        for key, change in changes.items():
            if change is None:
                overlay.delete(key)
            else:
                overlay.put(key, change)
        return overlay

    return build


def memory(table: Table, stack: ExitStack, directory: Path) -> MemoryStore:
    return MemoryStore(table)


def arrow(table: Table, stack: ExitStack, directory: Path) -> ArrowStore:
    keys = sorted(table, reverse=True)
    columns = {"key": pa.array(keys, pa.binary()), "value": pa.array([table[k] for k in keys], pa.binary())}
    return ArrowStore(pa.table(columns))


def snapshot_of(below: Build) -> Build:
    return lambda table, stack, directory: stack.enter_context(
        closing(below(table, stack, directory).snapshot())
    )


def typed(below: Build) -> Build:
    return lambda table, stack, directory: TypedStore(
        below(table, stack, directory), BytesSerde(), BytesSerde()
    )


WRITABLE: dict[str, Build] = {
    "memory": memory,
    "overlay-memory": overlaid(memory),
    "overlay-lastvalues": overlaid(last_values),
    "overlay-partitions": overlaid(partitioned),
    "overlay-overlay": overlaid(overlaid(memory)),
    "typed-memory": typed(memory),
    "typed-overlay-lastvalues": typed(overlaid(last_values)),
}
READABLE: dict[str, Build] = {
    **WRITABLE,
    "lastvalues": last_values,
    "partitions": partitioned,
    "arrow": arrow,
    "typed-view": lambda table, stack, directory: TypedView(
        last_values(table, stack, directory), BytesSerde(), BytesSerde()
    ),
    **{
        f"snapshot-{name}": snapshot_of(build)
        for name, build in {
            **WRITABLE,
            "lastvalues": last_values,
            "partitions": partitioned,
            "arrow": arrow,
        }.items()
    },
}


@pytest.fixture(params=READABLE)
def build(request: pytest.FixtureRequest) -> Build:
    return READABLE[request.param]


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        yield Path(name)


@pytest.fixture
def stack(directory: Path) -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def store(build: Build, stack: ExitStack, directory: Path) -> ReadOnlyStore:
    return build(SAMPLE, stack, directory)  # type: ignore[no-any-return]


@pytest.fixture(params=WRITABLE)
def writable(request: pytest.FixtureRequest, stack: ExitStack, directory: Path) -> KeyValueStore:
    return WRITABLE[request.param](SAMPLE, stack, directory)  # type: ignore[no-any-return]


# -- reading ------------------------------------------------------------------------------------------------


def test_get_finds_every_key_and_no_other(store: ReadOnlyStore) -> None:
    assert {key: store.get(key) for key in SAMPLE} == SAMPLE
    assert [store.get(key) for key in (b"zz", b"\x00", b"\x01a", b"a\x00gone")] == [None] * 4


def test_get_all_answers_in_the_order_asked_with_none_for_what_is_missing(store: ReadOnlyStore) -> None:
    asked = [b"b", b"missing", b"", b"b", b"a\x00gone", b"ab"]
    assert store.get_all(asked) == [b"4", None, b"empty", b"4", None, b""]


def test_get_all_of_nothing_is_nothing(store: ReadOnlyStore) -> None:
    assert store.get_all([]) == []
    assert store.get_all(pa.array([], pa.binary())).equals(pa.array([], pa.binary()))


@pytest.mark.parametrize("count", [1, 7, 3000])
def test_get_all_of_an_arrow_array_gives_one_in_the_order_asked(store: ReadOnlyStore, count: int) -> None:
    asked = ([b"b", b"missing", b"", b"b", b"a\x00gone", b"ab", b"\xff\xff", b"\x7f"] * 500)[:count]
    expected = pa.array([SAMPLE.get(key) for key in asked], pa.binary())
    for keys in (
        pa.array(asked, pa.binary()),
        pa.array([b"x", *asked], pa.large_binary()).slice(1),
        pa.chunked_array([asked[:2], [], asked[2:]], pa.binary()),
    ):
        assert store.get_all(keys).equals(expected)
    assert store.get_all(asked) == expected.to_pylist()


def test_all_comes_in_the_order_of_unsigned_bytes(store: ReadOnlyStore) -> None:
    assert list(store.all()) == sorted(SAMPLE.items())


@pytest.mark.parametrize(
    ("from_", "to", "keys"),
    [
        (b"a", b"b", [b"a", b"a\x00", b"ab"]),
        (b"a\x00", b"ab", [b"a\x00"]),
        (None, b"a", [b""]),
        (b"\x80", None, [b"\x80", b"\xff", b"\xff\xff"]),
        (b"\xff\xff", b"\xff\xff\xff", [b"\xff\xff"]),
        (b"b", b"b", []),
        (b"b", b"a", []),
        (None, b"", []),
        (b"c", b"d", []),
    ],
)
def test_a_range_includes_its_begin_and_excludes_its_end(
    store: ReadOnlyStore, from_: bytes | None, to: bytes | None, keys: list[bytes]
) -> None:
    assert list(store.range(from_, to)) == [(key, SAMPLE[key]) for key in keys]


@pytest.mark.parametrize(
    ("prefix", "keys"),
    [
        (b"a", [b"a", b"a\x00", b"ab"]),
        (b"\xff", [b"\xff", b"\xff\xff"]),
        (b"\x7f", [b"\x7f"]),
        (b"abc", []),
        (b"", sorted(SAMPLE)),
    ],
)
def test_a_prefix_gives_the_keys_that_begin_with_it(
    store: ReadOnlyStore, prefix: bytes, keys: list[bytes]
) -> None:
    assert [key for key, _ in store.prefix(prefix)] == keys


def test_a_long_scan_comes_whole_and_in_order(build: Build, stack: ExitStack, directory: Path) -> None:
    table = {b"%d" % (n * 7919 % 5_000): b"v%d" % n for n in range(5_000)}
    store = build(table, stack, directory)
    assert list(store.all()) == sorted(table.items())
    asked = [*reversed(table), b"none"]
    assert store.get_all(pa.array(asked)).to_pylist() == [table.get(key) for key in asked]


def test_an_empty_store_gives_nothing(build: Build, stack: ExitStack, directory: Path) -> None:
    store = build({}, stack, directory)
    assert (list(store.all()), store.get(b""), store.get_all([b"a"])) == ([], None, [None])


#: Few bytes, those at which orders and bounds go wrong.
KEY = st.lists(st.sampled_from(b"\x00ab\xfe\xff"), max_size=3).map(bytes)
BOUND = st.none() | KEY


@settings(max_examples=8)
@given(
    table=st.dictionaries(KEY, st.binary(max_size=3), max_size=20),
    bounds=st.lists(st.tuples(BOUND, BOUND), max_size=5),
    prefixes=st.lists(KEY, max_size=5),
)
@pytest.mark.parametrize("name", READABLE)
def test_reads_agree_with_a_dict(
    name: str, table: Table, bounds: list[tuple[bytes | None, bytes | None]], prefixes: list[bytes]
) -> None:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(dir=IN_MEMORY))
        store = READABLE[name](table, stack, Path(directory))
        in_order = sorted(table.items())
        for from_, to in bounds:
            expected = [e for e in in_order if (from_ or b"") <= e[0] and (to is None or e[0] < to)]
            assert list(store.range(from_, to)) == expected
        for prefix in prefixes:
            assert list(store.prefix(prefix)) == [e for e in in_order if e[0].startswith(prefix)]
        asked = [*table, *prefixes]
        assert store.get_all(asked) == [table.get(key) for key in asked]
        found = store.get_all(pa.array(asked, pa.binary()))
        assert found.to_pylist() == [table.get(key) for key in asked]


@given(KEY, KEY)
def test_the_end_of_a_prefix_is_above_its_keys_and_not_above_others(prefix: bytes, key: bytes) -> None:
    end = prefix_end(prefix)
    inside = key >= prefix and (end is None or key < end)
    assert inside == key.startswith(prefix)


# -- iterators, snapshots, closing --------------------------------------------------------------------------


def test_an_iterator_stays_at_its_end(store: ReadOnlyStore) -> None:
    rows = store.all()
    assert len(list(rows)) == len(SAMPLE)
    assert list(rows) == []


def test_an_iterator_that_was_closed_raises(store: ReadOnlyStore) -> None:
    with store.all() as rows:
        assert next(rows) == (b"", b"empty")
    with pytest.raises(StoreClosed, match="closed"):
        next(rows)


def test_an_iterator_that_failed_does_not_look_ended_afterwards() -> None:
    def failing() -> Iterator[tuple[bytes, bytes]]:
        yield b"a", b"1"
        raise OSError("gone")

    rows = Entries(failing())
    next(rows)
    with pytest.raises(OSError, match="gone"):
        next(rows)
    with pytest.raises(StoreClosed):
        next(rows)


def test_two_iterators_do_not_disturb_each_other(build: Build, stack: ExitStack, directory: Path) -> None:
    table = {b"%05d" % n: b"%d" % n for n in range(100)}
    store = build(table, stack, directory)
    with store.all() as first, store.range(b"00050", None) as second:
        assert [(next(first)[0], next(second)[0]) for _ in range(50)] == [
            (b"%05d" % n, b"%05d" % (n + 50)) for n in range(50)
        ]


def test_a_snapshot_holds_the_same_and_closing_it_leaves_the_store_open(store: ReadOnlyStore) -> None:
    snapshot = store.snapshot()
    assert list(snapshot.all()) == sorted(SAMPLE.items())
    assert snapshot.get(b"b") == b"4"
    snapshot.close()
    with pytest.raises(StoreClosed):
        snapshot.get(b"b")
    assert store.get(b"b") == b"4"


READS: list[Callable[[Any], object]] = [
    lambda store: store.get(b"a"),
    lambda store: store.get_all([b"a"]),
    lambda store: store.get_all([]),
    lambda store: store.get_all(pa.array([b"a"])),
    lambda store: list(store.range(b"a", b"b")),
    lambda store: list(store.prefix(b"a")),
    lambda store: list(store.all()),
    lambda store: store.snapshot(),
]
WRITES: list[Callable[[Any], object]] = [
    lambda store: store.put(b"a", b"1"),
    lambda store: store.put_all([(b"a", b"1")]),
    lambda store: store.put_all([]),
    lambda store: store.put_all(pa.array([b"a"]), pa.array([b"1"])),
    lambda store: store.delete(b"a"),
    lambda store: store.delete_all([b"a"]),
    lambda store: store.delete_all([]),
    lambda store: store.flush(),
]


@pytest.mark.parametrize("name", [name for name in READABLE if "typed" not in name])
def test_a_closed_store_raises_whatever_is_asked(name: str, stack: ExitStack, directory: Path) -> None:
    store = READABLE[name](SAMPLE, stack, directory)
    store.close()
    store.close()
    for call in READS + (WRITES if name in WRITABLE else []):
        with pytest.raises(StoreClosed, match="closed"):
            call(store)


def test_an_iterator_of_a_store_that_was_closed_never_ends_early(
    build: Build, stack: ExitStack, directory: Path
) -> None:
    table = {b"%05d" % n: b"%d" % n for n in range(500)}
    store = build(table, stack, directory)
    seen = []
    with store.all() as rows:
        seen.append(next(rows))
        store.close()
        stack.close()
        try:
            seen.extend(rows)
        except StoreClosed:
            assert 0 < len(seen) < 500
        else:
            assert len(seen) == 500
    assert seen == sorted(table.items())[: len(seen)]


def test_a_wrapper_leaves_the_store_below_open(stack: ExitStack, directory: Path) -> None:
    base = last_values(SAMPLE, stack, directory)
    for wrapper in (Overlay(base), PartitionedStore([base], lambda _: 0)):
        wrapper.close()
    TypedView(base, BytesSerde(), BytesSerde()).close()
    assert base.get(b"b") == b"4"


# -- wrong types --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["a", 1, None, bytearray(b"a")])
def test_a_key_that_is_not_bytes_is_a_type_error_that_says_what_to_do(store: ReadOnlyStore, key: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.get(key),
        lambda: store.get_all([b"a", key]),
        lambda: store.prefix(key),
    ]
    if key is not None:
        calls += [lambda: store.range(key, b"z"), lambda: store.range(b"a", key)]
    for call in calls:
        with pytest.raises(TypeError, match=r"(?s)bytes.*(serde|encode it)"):
            call()


@pytest.mark.parametrize("value", ["a", 1, bytearray(b"a")])
def test_a_value_that_is_not_bytes_is_a_type_error_and_changes_nothing(
    writable: KeyValueStore, value: Any
) -> None:
    with pytest.raises(TypeError, match=r"(?s)bytes.*(serde|encode it)"):
        writable.put(b"b", value)
    assert writable.get(b"b") == b"4"


def test_none_as_a_value_is_an_error_that_names_delete(writable: Any) -> None:
    with pytest.raises(TypeError, match="delete"):
        writable.put(b"b", None)
    with pytest.raises(TypeError, match="delete"):
        writable.put_all({b"b": None})
    assert writable.get(b"b") == b"4"


# -- writing ------------------------------------------------------------------------------------------------


def test_reads_see_what_was_put_and_deleted(writable: KeyValueStore) -> None:
    writable.put(b"a", b"new")
    writable.put(b"aa", b"added")
    writable.delete(b"ab")
    writable.delete(b"never there")
    writable.flush()
    table = {**SAMPLE, b"a": b"new", b"aa": b"added"}
    del table[b"ab"]
    assert list(writable.all()) == sorted(table.items())
    assert list(writable.prefix(b"a")) == [(b"a", b"new"), (b"a\x00", b"2"), (b"aa", b"added")]
    assert writable.get_all([b"a", b"aa", b"ab"]) == [b"new", b"added", None]


def test_a_deleted_key_can_be_put_again(writable: KeyValueStore) -> None:
    writable.delete(b"a")
    assert writable.get(b"a") is None
    writable.put(b"a", b"back")
    assert list(writable.range(b"a", b"a\x00")) == [(b"a", b"back")]


def test_put_all_takes_a_mapping_or_pairs_and_the_last_pair_counts(writable: KeyValueStore) -> None:
    writable.put_all({b"m": b"1"})
    writable.put_all(iter([(b"n", b"1"), (b"n", b"2")]))
    assert writable.get_all([b"m", b"n"]) == [b"1", b"2"]


def test_put_all_takes_arrow_arrays_in_which_the_last_of_a_key_counts_and_null_deletes(
    writable: KeyValueStore,
) -> None:
    writable.put_all({b"m": b"1", b"n": b"2"})
    keys = pa.chunked_array([[b"n", b"o", b"a"], [b"o", b"p", b"p", b"none"]])
    writable.put_all(keys, pa.array([b"3", b"4", None, b"5", b"6", None, None], pa.large_binary()))
    assert writable.get_all([b"m", b"n", b"o", b"p", b"a"]) == [b"1", b"3", b"5", None, None]
    assert [key for key, _ in writable.range(b"a", b"q")] == [b"a\x00", b"ab", b"b", b"m", b"n", b"o"]
    writable.delete_all(pa.array([b"m", b"o", b"none"]))
    assert [key for key, _ in writable.range(b"m", b"q")] == [b"n"]
    assert writable.get_all(pa.array([b"n", b"m", b"b"])).to_pylist() == [b"3", None, b"4"]


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (pa.array(["a"]), pa.array([b"1"])),
        (pa.array([b"a"]), pa.array(["1"])),
        (pa.array([b"a", None]), pa.array([b"1", b"2"])),
        (pa.array([b"a"]), [b"1"]),
        (pa.array([b"a"]), None),
    ],
)
def test_arrow_arrays_of_other_types_are_type_errors_and_change_nothing(
    writable: KeyValueStore, keys: Any, values: Any
) -> None:
    with pytest.raises(TypeError, match=r"Arrow|Arrow array"):
        writable.put_all(keys, values)
    with pytest.raises(ValueError, match=r"(?s)expected: 2 values.*found: 1"):
        writable.put_all(pa.array([b"a", b"b"]), pa.array([b"x"]))
    assert writable.get_all([b"a", b"b"]) == [b"1", b"4"]
    for bad in (pa.array(["a"]), pa.array([b"a", None])):
        with pytest.raises(TypeError, match="Arrow"):
            writable.get_all(bad)


def test_put_all_with_one_bad_entry_puts_none(writable: Any) -> None:
    with pytest.raises(TypeError):
        writable.put_all([(b"m", b"1"), (b"n", "text")])
    assert writable.get(b"m") is None


def test_delete_all_deletes_all(writable: KeyValueStore) -> None:
    writable.delete_all(iter(list(SAMPLE)))
    assert list(writable.all()) == []


def test_an_iterator_does_not_see_later_writes(writable: KeyValueStore) -> None:
    with writable.all() as rows:
        next(rows)
        for key in SAMPLE:
            writable.put(key, b"later")
        writable.put(b"zzz", b"later")
        assert list(rows) == sorted(SAMPLE.items())[1:]


def test_a_snapshot_does_not_see_later_writes_and_cannot_be_written(writable: KeyValueStore) -> None:
    with closing(writable.snapshot()) as snapshot:
        writable.put(b"a", b"later")
        writable.delete(b"b")
        writable.put(b"zzz", b"later")
        assert list(snapshot.all()) == sorted(SAMPLE.items())
        assert (snapshot.get(b"a"), snapshot.get(b"b")) == (b"1", b"4")
        assert not hasattr(snapshot, "put")
        with closing(snapshot.snapshot()) as again:
            assert again.get(b"a") == b"1"
        assert snapshot.get(b"a") == b"1"


def test_writes_between_scans_keep_the_order(writable: KeyValueStore) -> None:
    """The order of the keys is kept up between scans: few new keys and many take different ways."""
    table = dict(SAMPLE)
    for step, many in enumerate((1, 3, 40, 2)):
        for n in range(many):
            key = b"%d-%d" % (n * 37 % 41, step)
            table[key] = b"x"
            writable.put(key, b"x")
        gone = b"%d-%d" % (0, step)
        del table[gone]
        writable.delete(gone)
        assert list(writable.all()) == sorted(table.items())
