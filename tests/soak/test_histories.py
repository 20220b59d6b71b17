"""The machines of tests/model, in rounds with fresh seeds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from support.machine_living import LivingMachine
from support.machine_reading import ReadingMachine
from support.soaking import Soak

pytestmark = pytest.mark.soak

_EXAMPLES = 40
_STEPS = 30


@pytest.mark.parametrize(
    ("machine", "share"),
    [pytest.param(ReadingMachine, 0.25, id="alone"), pytest.param(LivingMachine, 0.1, id="living")],
)
def test_random_histories_are_those_of_the_perfect_changelog(
    machine: type[ReadingMachine], share: float, request: pytest.FixtureRequest
) -> None:
    with Soak(f"histories-{request.node.callspec.id}", share) as soak:

        class Counted(machine):  # type: ignore[valid-type, misc]
            def __init__(self) -> None:
                super().__init__()
                soak.count("random histories")

            def prove(self) -> None:
                super().prove()
                soak.count("steps of random histories")

        for number in soak.rounds():
            run_state_machine_as_test(seed(number)(Counted), settings=_settings(soak))


def _settings(soak: Any) -> settings:
    return settings(
        max_examples=_EXAMPLES, stateful_step_count=_STEPS, database=None, deadline=None,
        phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
