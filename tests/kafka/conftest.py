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
    # The records' times are years ago: retention by time would delete them within 30 seconds. Clients that
    # still ask for a topic that was removed would make it anew.
    settings = {"log.retention.ms": -1, "auto.create.topics.enable": "false"}
    with Broker(tmp_path_factory.mktemp("topics"), settings) as broker, Topics(broker.address) as made:
        yield made
