"""What a cleaner on its own thread may do with deletes between two looks at the log, and what it may not.

The thread's passes are called at chosen moments here, so that each order is certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import pytest

from keyfold.checkpoints.cleaner import clean_pass
from keyfold.checkpoints.cleaner.log_to_clean import find_log_to_clean
from support.machine_living import LivingMachine
from support.perfect import Filling

NEVER_MS = 10**12


class ByHand(LivingMachine):
    """The machine beside which passes come, which come when `clean` is called."""

    fixed: ClassVar[dict[str, object]] = {"cleaner.threads": 0, "anchors.auto": 0}

    def clean(self) -> None:
        assert self.log.engine.cleaning.clean_in_background(0) is not None

    def cleaned(self) -> None:
        self.clean()
        self.prove()

    def set_retention(self, ms: int) -> None:
        self.configure({"delete.retention.ms": ms})

    @property
    def deleted_is_there(self) -> bool:
        return 1 in {offset for batch in self.log.read(0) for offset in batch.column("offset").to_pylist()}


@pytest.fixture
def machine() -> Iterator[ByHand]:
    """Offset 1 is a delete; horizons are a second, and a pass may come."""
    made = ByHand()
    made.create(partitions=1, block_bytes=200, config={"delete.retention.ms": 1000})
    made.append_to(made.log, [(b"a", b"1"), (b"a", None), (b"b", b"1")], "m")
    made.log.engine.writer.seal_active()
    made.prove()
    yield made
    made.teardown()


def _a_pass_came_before_the_clock_jumped(machine: ByHand) -> None:
    machine.clean()
    machine.pass_time(100_000)
    machine.prove()
    machine.clean()


def _a_pass_came_before_the_setting_was_raised(machine: ByHand) -> None:
    machine.cleaned()
    machine.set_retention(0)
    machine.clean()
    machine.set_retention(NEVER_MS)


def _a_pass_came_while_the_setting_was_lowered(machine: ByHand) -> None:
    machine.cleaned()
    machine.set_retention(0)
    machine.clean()
    machine.set_retention(1000)


def _a_pass_came_before_the_clock_was_set_back(machine: ByHand) -> None:
    machine.cleaned()
    machine.pass_time(1000)
    machine.clean()
    machine.pass_time(-60_000)


def _a_pass_came_after_the_clock_was_set_back(machine: ByHand) -> None:
    """It has dated the delete again, by the clock of now."""
    machine.cleaned()
    machine.pass_time(-60_000)
    machine.append_to(machine.log, [(b"b", b"2")], "m")
    machine.log.engine.writer.seal_active()
    machine.cleaned()
    machine.pass_time(1000)
    machine.clean()


def _a_pass_was_under_way_at_a_look(machine: ByHand) -> None:
    """It goes by the setting of its begin."""
    machine.cleaned()
    machine.set_retention(0)

    def begun(*arguments: Any, **named: Any) -> Any:
        section = find_log_to_clean(*arguments, **named)
        machine.set_retention(NEVER_MS)
        machine.prove()
        machine.prove()
        return section

    with mock.patch.object(clean_pass, "find_log_to_clean", begun):
        machine.clean()


def _two_passes_came_and_the_clock_jumped_between_them(machine: ByHand) -> None:
    machine.clean()
    machine.pass_time(1000)
    machine.clean()


MAY: list[Callable[[ByHand], None]] = [
    _a_pass_came_before_the_clock_jumped,
    _a_pass_came_before_the_setting_was_raised,
    _a_pass_came_while_the_setting_was_lowered,
    _a_pass_came_before_the_clock_was_set_back,
    _a_pass_came_after_the_clock_was_set_back,
    _a_pass_was_under_way_at_a_look,
    _two_passes_came_and_the_clock_jumped_between_them,
]


@pytest.mark.parametrize("happen", MAY)
def test_a_delete_may_go(happen: Callable[[ByHand], None], machine: ByHand) -> None:
    happen(machine)
    assert not machine.deleted_is_there
    machine.prove()


def _no_pass_came_past_it(machine: ByHand) -> None:
    pass


def _a_pass_came_past_it_a_moment_ago(machine: ByHand) -> None:
    machine.cleaned()
    machine.pass_time(999)


def _the_setting_was_raised_before_it_went(machine: ByHand) -> None:
    machine.cleaned()
    machine.pass_time(1000)
    machine.set_retention(NEVER_MS)
    machine.prove()


def _the_clock_jumped_before_the_first_pass(machine: ByHand) -> None:
    machine.pass_time(100_000)
    machine.prove()
    machine.cleaned()


MAY_NOT: list[Callable[[ByHand], None]] = [
    _no_pass_came_past_it,
    _a_pass_came_past_it_a_moment_ago,
    _the_setting_was_raised_before_it_went,
    _the_clock_jumped_before_the_first_pass,
]


@pytest.mark.parametrize("happen", MAY_NOT)
def test_a_cleaner_that_forgets_the_horizon_is_found_out(
    happen: Callable[[ByHand], None], machine: ByHand
) -> None:
    happen(machine)
    machine.prove()
    assert machine.log.engine.cleaning.clean_in_background(0) is None or machine.deleted_is_there
    machine.prove()
    # Let go at once, as by a setting of 0 that nobody has made.
    writer = machine.log.engine.writer
    identity = writer.identity
    writer.identity = replace(identity, config=identity.config.with_changes({"delete.retention.ms": 0}))
    for _ in range(2):
        machine.log.engine.cleaning.clean_in_background(0)
    writer.identity = identity
    assert not machine.deleted_is_there
    with pytest.raises(AssertionError, match="delete 1 went too soon"):
        machine.prove()
    machine.horizons[0]._deletes.clear()


def test_a_delete_was_dated_before_a_pass_that_is_under_way_took_back_what_is_unique() -> None:
    """A pass that has lost an anchor says after its first group that keys are unique only up to there. What
    an earlier one has dated stays so.
    """
    machine = ByHand()
    config = {"delete.retention.ms": 1000, "segment.bytes": 1024, "compression.type": "none"}
    machine.create(partitions=1, block_bytes=200, config=config)
    machine.append_to(machine.log, [(b"a", b"1")], "m")
    machine.log.anchor("x")
    machine.append_to(machine.log, [(b"a", None), (b"b", Filling(900))], "m")
    machine.append_to(machine.log, [(b"c", Filling(900))], "m")
    machine.log.engine.writer.seal_active()
    machine.model = machine.model.named("x", 1)
    machine.prove()
    machine.clean()
    machine.pass_time(500)
    machine.log.drop_anchor("x")
    machine.model = machine.model.unnamed("x")
    move_view = clean_pass.CleanPass.move_view
    looks = 0

    def looked(running: clean_pass.CleanPass) -> None:
        nonlocal looks
        move_view(running)
        if machine.log.state.partitions[0].unique_end == 1:
            machine.prove()
            looks += 1

    with mock.patch.object(clean_pass.CleanPass, "move_view", looked):
        machine.clean()
    assert looks
    machine.prove()
    machine.pass_time(500)
    machine.clean()
    assert not machine.deleted_is_there
    machine.prove()
    machine.teardown()


@pytest.mark.parametrize(
    "transact",
    [
        lambda machine: machine.count_beside_an_append(b"a"),
        lambda machine: machine.transact_alone([(b"a", b"2")]),
        lambda machine: machine.nest(True),
    ],
    ids=["beside an append", "alone", "around an append"],
)
def test_a_transaction_may_see_that_retention_beside_has_come(transact: Callable[[ByHand], None]) -> None:
    machine = ByHand()
    config = {"cleanup.policy": "compact,delete", "retention.ms": 1000}
    machine.create(partitions=1, block_bytes=200, config=config)
    machine.append_to(machine.log, [(b"a", b"1")], "m")
    machine.log.engine.writer.seal_active()
    machine.prove()
    machine.pass_time(5000)
    machine.log.engine.do_chores()
    transact(machine)
    machine.prove()
    machine.teardown()
