"""The machines of tests/model, in rounds with fresh seeds."""

from __future__ import annotations

import sys

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from keyfold.statestore.errors import KeyfoldError
from support.machine_living import LivingMachine
from support.machine_reading import ReadingMachine
from support.soaking import Soak

pytestmark = pytest.mark.soak

#: How a bug shows itself.
NOTICED = (AssertionError, KeyfoldError, OSError, EOFError, pa.ArrowException, pytest.fail.Exception)

_EXAMPLES = 10
_STEPS = 30


@pytest.mark.parametrize(
    ("machine", "share"),
    [pytest.param(ReadingMachine, 0.15, id="alone"), pytest.param(LivingMachine, 0.08, id="living")],
)
def test_random_histories_are_those_of_the_perfect_changelog(
    machine: type[ReadingMachine], share: float, request: pytest.FixtureRequest
) -> None:
    with Soak(f"histories-{request.node.callspec.id}", share) as soak:
        failures: list[BaseException] = []

        class Counted(machine):  # type: ignore[valid-type, misc]
            def __init__(self) -> None:
                super().__init__()
                soak.count("random histories")

            def prove(self) -> None:
                super().prove()
                soak.count("steps of random histories")

            def teardown(self) -> None:
                try:
                    super().teardown()
                finally:
                    failure = sys.exc_info()[1]
                    if isinstance(failure, NOTICED):
                        failures.append(failure)

        for number in soak.rounds():
            try:
                run_state_machine_as_test(seed(number)(Counted), settings=_settings(machine))
            except Flaky:
                # With a thread beside, the same steps can lead to other states, and Hypothesis ends there.
                if failures:
                    raise failures[0] from None
                if not machine.is_living:
                    raise


def _settings(machine: type[ReadingMachine]) -> settings:
    # What need not happen again cannot be shrunk.
    phases = (Phase.generate,) if machine.is_living else (Phase.generate, Phase.shrink)
    return settings(
        max_examples=_EXAMPLES, stateful_step_count=_STEPS, database=None, deadline=None,
        phases=phases, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
