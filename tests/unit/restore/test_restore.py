"""Which state `restore` gives, which part of it, what changed between two points, and who is told."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given

from keyfold import Changelog, restore, resume
from keyfold.statestore.errors import BadRecord, CompactedAway, ConfigError
from keyfold.statestore.schema.columns import Columns
from support.folds import IN_MEMORY

CONFIG = {"cleaner.threads": 0, "anchors.auto": 0, "segment.bytes": 2048, "delete.retention.ms": 10**12}
KEYS = st.sampled_from([b"", b"a", b"ab", b"b", b"b\0", b"key-5", b"key-6"])
VALUES = st.one_of(st.none(), st.binary(max_size=4))
BATCHES = st.lists(st.lists(st.tuples(KEYS, VALUES), max_size=8), min_size=1, max_size=8)

Rows = list[tuple[bytes, bytes | None]]


def table(rows: Rows) -> pa.Table:
    keys, values = [k for k, _ in rows], [v for _, v in rows]
    return pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


def fold(batches: list[Rows]) -> dict[bytes, bytes]:
    state = {key: value for rows in batches for key, value in rows}
    return {key: value for key, value in state.items() if value is not None}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Changelog]:
    with Changelog.open(tmp_path / "log", partitions=2, config=CONFIG) as log:
        yield log


@given(BATCHES, st.data())
def test_every_batch_parts_of_it_and_the_changes_between_any_two(
    batches: list[Rows], data: st.DataObject
) -> None:
    """Compaction anywhere, anchors that keep any batch: what is not refused is exact."""
    anchored = data.draw(st.sets(st.integers(1, len(batches))))
    compacted = data.draw(st.sets(st.integers(1, len(batches))))
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as directory:
        path = Path(directory) / "log"
        with Changelog.open(path, partitions=2, config=CONFIG) as log:
            ends = [dict.fromkeys(range(2), 0)]
            for number, rows in enumerate(batches, 1):
                log.append(table(rows))
                ends.append(log.end_offsets())
                if number in anchored:
                    log.anchor(f"at {number}")
                if number in compacted:
                    log.compact()
        wanted = data.draw(st.lists(KEYS, max_size=3))
        prefix = data.draw(st.sampled_from([b"", b"a", b"b", b"key"]))
        for b in range(1, len(batches) + 1):
            expected = fold(batches[:b])
            try:
                assert restore(path, at=b).to_dict() == expected
            except CompactedAway:
                assert b not in anchored
                assert b < len(batches)
                continue
            assert restore(path, at=ends[b]).to_dict() == expected
            some = {key: value for key, value in expected.items() if key in wanted}
            assert restore(path, at=b, keys=wanted).to_dict() == some
            some = {key: value for key, value in expected.items() if key.startswith(prefix)}
            assert restore(path, at=b, prefix=prefix).to_dict() == some
            for a in range(b):
                since = restore(path, at=b, since=ends[a])
                assert since.to_dict() == {key: value for rows in batches[a:b] for key, value in rows}


def test_offsets_that_are_none_of_the_log_are_refused(log: Changelog) -> None:
    log.append(table([(b"a", b"1"), (b"b", b"1")]))
    for bad in ({0: 1}, {0: 99, 1: 0}, {0: -1, 1: 0}, {0: 0, 1: 0, 2: 0}):
        with pytest.raises(ConfigError, match="Invalid end offsets"):
            restore(log.path, at=bad)
        with pytest.raises(ConfigError, match="Invalid end offsets"):
            restore(log.path, since=bad)


def test_offsets_between_folded_commits_are_refused_with_the_nearest_exact_points(log: Changelog) -> None:
    for value in (b"1", b"2", b"3"):
        log.append(table([(b"a", value)]))
    log.anchor("kept", at=1)
    log.compact()
    number = log.partition(b"a")
    with pytest.raises(CompactedAway, match=r"commits 1 to 1, 3 to 3, anchors kept"):
        restore(log.path, at={number: 2, 1 - number: 0})


def test_a_time_between_folded_commits_never_means_an_older_one(tmp_path: Path) -> None:
    """Commit 2 is folded away and forgotten; what was true then cannot be the state of commit 1."""
    now = [0]
    path = tmp_path / "log"
    with Changelog.open(path, config=CONFIG, clock_ms=lambda: now[0]) as log:
        for number in range(1, 5):
            now[0] = number * 1000
            log.append(table([(b"a", b"%d" % number)]))
            if number == 1:
                log.anchor("one")
        log.compact()
    with Changelog.open(path):  # a new journal begins with the commits that are kept
        pass

    def at(seconds: float) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)

    assert restore(path, at=at(1.5)).to_dict() == {b"a": b"1"}
    for seconds in (2.5, 3.5):
        with pytest.raises(CompactedAway):
            restore(path, at=at(seconds))
    assert restore(path, at=at(4.5)).to_dict() == {b"a": b"4"}
    with pytest.raises(ConfigError, match=r"no commit at that time(.|\n)*1970-01-01T00:00:01"):
        restore(path, at=at(0.5))


def test_changes_behind_a_delete_that_is_gone_are_refused(tmp_path: Path) -> None:
    with Changelog.open(tmp_path / "log", config={**CONFIG, "delete.retention.ms": 0}) as log:
        log.append(table([(b"a", b"1"), (b"b", b"1")]))
        log.append(table([(b"a", None)]))
        log.append(table([(b"c", b"1")]))
        log.compact()
        log.compact()
        with pytest.raises(CompactedAway, match="A delete after this position"):
            restore(log.path, since={0: 2})
        assert restore(log.path, since={0: 3}).to_dict() == {b"c": b"1"}


def test_an_app_whose_last_state_was_folded_away_by_others_is_not_resumed(tmp_path: Path) -> None:
    """Its key has another app's value since; what is left of its own commit is no state at all."""
    with Changelog.open(tmp_path / "log", config=CONFIG) as log:
        log.append(table([(b"a", b"1")]), app_id="first")
        log.append(table([(b"a", b"2")]), app_id="second")
        with resume(log.path, app_id="first") as again:
            assert again.state.to_dict() == {b"a": b"1"}
        log.compact()
        with resume(log.path, app_id="first") as again:  # pinned by the first time
            assert again.state.to_dict() == {b"a": b"1"}
        log.append(table([(b"a", b"3")]), app_id="third")
        log.append(table([(b"a", b"4")]), app_id="second")
        log.compact()
        with pytest.raises(CompactedAway):
            resume(log.path, app_id="third")
        assert not any(name.startswith("resume:third") for name in log.anchors())


def typed(path: Path) -> Changelog:
    fields = [
        {"name": "user", "type": "string", "nullable": False, "metadata": {}},
        {"name": "day", "type": "integer", "nullable": False, "metadata": {}},
        {"name": "clicks", "type": "long", "nullable": True, "metadata": {}},
    ]
    columns = Columns({"type": "struct", "fields": fields}, ("user", "day"))
    log = Changelog.open(path, columns=columns, config=CONFIG)
    log.append(pa.table({"user": list("aabb"), "day": [1, 2, 1, 2], "clicks": [10, 20, 10, 20]}))
    log.append(pa.table({"user": ["a", "b"], "day": [1, 1], "clicks": [None, 5], "_deleted": [True, False]}))
    return log


def test_typed_keys_and_changes(tmp_path: Path) -> None:
    with typed(tmp_path / "log") as log:
        found = restore(log.path, keys=[("a", 2), ("b", 1), ("c", 1)]).to_dict()
        assert found == {("a", 2): {"clicks": 20}, ("b", 1): {"clicks": 5}}
        changed = restore(log.path, since=1)
        assert changed.to_dict() == {("a", 1): None, ("b", 1): {"clicks": 5}}
        assert sorted(changed.to_arrow().to_pylist(), key=lambda row: row["user"]) == [
            {"user": "a", "day": 1, "clicks": None, "_deleted": True},
            {"user": "b", "day": 1, "clicks": 5, "_deleted": False},
        ]


def test_a_prefix_selects_typed_keys_by_their_first_columns(tmp_path: Path) -> None:
    with typed(tmp_path / "log") as log:
        of_b = {("b", 1): {"clicks": 5}, ("b", 2): {"clicks": 20}}
        assert restore(log.path, prefix="b").to_dict() == of_b
        assert restore(log.path, prefix=("b",)).to_dict() == of_b
        assert restore(log.path, prefix="ab").to_dict() == {}
        assert len(restore(log.path, prefix="").to_dict()) == 3
        for wrong in (("a", 1), (), ("a", 1, 2), 7, (None,)):
            with pytest.raises(BadRecord):
                restore(log.path, prefix=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": [b"a"], "prefix": b"a"}, "exclude each other"),
        ({"keys": b"a"}, "a list of keys"),
        ({"keys": ["a"]}, "are bytes"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    log: Changelog, arguments: dict[str, object], message: str
) -> None:
    log.append(table([(b"a", b"1")]))
    with pytest.raises(ConfigError, match=message):
        restore(log.path, **arguments)  # type: ignore[arg-type]


def test_changes_make_no_store(log: Changelog, tmp_path: Path) -> None:
    log.append(table([(b"a", b"1")]))
    with pytest.raises(ConfigError, match="cannot be written from changes"):
        restore(log.path, since={0: 0, 1: 0}).to_store(tmp_path / "store")


class Notes:
    def __init__(self) -> None:
        self.started: dict[int, tuple[int, int]] = {}
        self.ends: dict[int, list[int]] = {}
        self.records: dict[int, int] = {}
        self.restored: dict[int, int] = {}

    def on_restore_start(self, path: Path, partition: int, starting_offset: int, ending_offset: int) -> None:
        self.started[partition] = (starting_offset, ending_offset)

    def on_batch_restored(
        self, path: Path, partition: int, batch_end_offset: int, records: int, size: int
    ) -> None:
        assert size > 0
        self.ends.setdefault(partition, []).append(batch_end_offset)
        self.records[partition] = self.records.get(partition, 0) + records

    def on_restore_end(self, path: Path, partition: int, total_restored: int) -> None:
        self.restored[partition] = total_restored


@pytest.mark.parametrize("how", ["to_arrow", "batches", "to_store"])
def test_a_listener_is_told_how_far_it_has_come(log: Changelog, tmp_path: Path, how: str) -> None:
    for value in range(4):
        log.append(table([(b"%d" % n, b"v" * 100 + b"%d" % value) for n in range(100)]))
    notes = Notes()
    with restore(log.path, listener=notes, progress=True) as state:
        if how == "to_store":
            state.to_store(tmp_path / "store").close()
        else:
            list(getattr(state, how)())
        assert sum(notes.restored.values()) == 100
    assert notes.records == notes.restored
    assert notes.started == {n: (0, end) for n, end in log.end_offsets().items()}
    for partition, ends in notes.ends.items():
        assert ends == sorted(ends)
        assert ends[-1] <= notes.started[partition][1]
