"""Entries of the manifest: what each kind writes is what it reads; the live state is what a reader gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from keyfold import Changelog
from keyfold.checkpoints.log.recovery import View
from keyfold.checkpoints.manifest import entries
from keyfold.checkpoints.manifest.entries import CheckpointEntry, UncleanableEntry, line_of
from keyfold.checkpoints.manifest.journal import decode_line, encode_line
from keyfold.checkpoints.manifest.segment_lines import Line
from keyfold.checkpoints.manifest.state import State, empty
from keyfold.statestore.files import LOCAL
from support.changelogs import BY_HAND, rows

CONFIG = {
    **BY_HAND,
    "cleanup.policy": "compact,delete",
    "commits.retained": 4,
    "segment.bytes": 2048,
    "delete.retention.ms": 0,
}


@pytest.fixture(scope="module")
def states_and_root(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[State], Path]:
    """A changelog whose journals have every kind of entry, and the state after each."""
    root = tmp_path_factory.mktemp("entries") / "log"
    states: list[State] = []
    with Changelog.open(root, partitions=3, config=CONFIG) as log:
        log.engine.writer.on_change(states.append)
        for i in range(40):
            log.append(rows((f"k{i % 7}", str(i)), (f"k{i % 5}", "v" * 200)), app_id=f"app{i % 3}")
        log.append(rows(("k1", None), ("k2", None)))
        log.anchor("kept")
        log.append(rows(("k3", "after")))
        log.compact()
        log.anchor("dropped")
        log.drop_anchor("dropped")
        log.append(rows(("k3", "taken back")))
        log.rollback("kept")
        log.engine.writer.write_line(UncleanableEntry(1, "why"))
        log.drop_anchor("kept")
        log.append(rows(("k4", "last")))
        log.engine.configure({"retention.bytes": 0})
        log.engine.do_chores()
    return states, root


def lines(root: Path) -> Iterator[Line]:
    for journal in sorted((root / "manifest").glob("*.journal")):
        for raw in journal.read_bytes().splitlines():
            line = decode_line(raw)
            assert line is not None
            yield line


def test_what_is_read_and_written_again_is_the_same_line(states_and_root: tuple[list[State], Path]) -> None:
    seen = set()
    for line in lines(states_and_root[1]):
        seen.add(line["t"])
        if line["t"] == "checkpoint":
            again = CheckpointEntry.from_line(line).to_line()
        else:
            again = line_of(line["seq"], entries.KINDS[line["t"]].from_json(line))
        assert encode_line(again) == encode_line(line)
    assert seen == {*entries.KINDS, "checkpoint"}


def test_the_writer_has_the_state_that_a_reader_makes_of_its_lines(
    states_and_root: tuple[list[State], Path],
) -> None:
    """The writer applies entries, a reader what was written of them."""
    states, root = states_and_root
    by_number = {state.seq: state for state in states}
    state, compared = None, 0
    for line in lines(root):
        if line["t"] == "checkpoint":
            state = CheckpointEntry.from_line(line).state
            continue
        assert state is not None
        state = entries.apply_line(state, line)
        if state.seq in by_number and state.epoch == by_number[state.seq].epoch:
            assert state == by_number[state.seq]
            compared += 1
    assert compared > 40
    assert View(LOCAL, root).state == state


def test_a_checkpoint_holds_the_whole_state(states_and_root: tuple[list[State], Path]) -> None:
    for state in states_and_root[0]:
        line = decode_line(encode_line(CheckpointEntry(state, "uuid").to_line())[:-1])
        assert line is not None
        assert CheckpointEntry.from_line(line) == CheckpointEntry(state, "uuid")


@pytest.mark.parametrize("kind", sorted(entries.KINDS))
def test_a_line_without_one_of_its_fields_makes_no_sense(
    states_and_root: tuple[list[State], Path], kind: str
) -> None:
    """Nothing is guessed; what may be missing is in the table of docs/format.md with a question mark."""
    line = next(line for line in lines(states_and_root[1]) if line["t"] == kind)
    for field in set(line) - {"seq", "t", "unanchor", "keep"}:
        with pytest.raises(KeyError):
            entries.KINDS[kind].from_json({k: v for k, v in line.items() if k != field})
    with pytest.raises(ValueError, match="was expected"):
        entries.apply_line(empty(3, 1, seq=line["seq"]), line)
