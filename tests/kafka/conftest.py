"""One broker for all tests that read it with Spark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.kafka_broker import Broker
from support.kafka_topics import Topics, unavailable


@pytest.fixture(scope="session")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topics]:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with Broker(tmp_path_factory.mktemp("topics")) as broker, Topics(broker.address) as made:
        yield made
