"""A changelog against a perfect one: every public operation, every setting changed while it runs.

The rules and what is proved after each step are in tests/support/machine*.py.
"""

from __future__ import annotations

from hypothesis import settings

from support.machine_reading import ReadingMachine

#: In `make soak` they have rounds of their own, in tests/soak.
EXAMPLES = min(settings().max_examples, 100)


class ChangelogMachine(ReadingMachine):
    """Nothing happens but what is called."""


TestChangelog = ChangelogMachine.TestCase
TestChangelog.settings = settings(max_examples=EXAMPLES, stateful_step_count=25)
