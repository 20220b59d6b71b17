"""What all tests share: one Spark session, Hypothesis profiles, marks by directory."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from support.groups import MARKERS, Groups
from support.places import in_memory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parent.parent

# `python -m pytest` puts the working directory on the path, and with it a second copy of every class.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

# `derandomize` is said each time: on CI Hypothesis's own default would try the same examples in every run.
_COMMON = {
    "deadline": None,
    "print_blob": True,
    "derandomize": False,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("dev", max_examples=50, **_COMMON)  # type: ignore[arg-type]
settings.register_profile("ci", max_examples=100, **_COMMON)  # type: ignore[arg-type]
settings.register_profile("soak", max_examples=400, **_COMMON)  # type: ignore[arg-type]
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev")
settings.load_profile(PROFILE)

# JVMs that live for seconds or minutes spend much of them in their second compiler, and in `jspawnhelper` for
# each `chmod` and `readlink` of Hadoop's local file system.
os.environ.setdefault(
    "SPARK_SUBMIT_OPTS", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Djdk.lang.Process.launchMechanism=VFORK"
)

# A changelog syncs every commit, and tests make and remove thousands of files: in memory that takes half
# the time. Tests of what a real disk does mount one of their own. pytest reads the variable.
if PROFILE != "soak" and (_memory := in_memory()) is not None:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_memory))

_RESUMING = (
    *("test_aggregate.py", "test_initial_state.py", "test_matrix.py", "test_resume.py"),
    "test_resume_mistakes.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Groups(), "groups")
    # Worker processes of pytest-xdist are given the options of the first process, and so the same seed.
    # A developer's own run is left alone: with a seed Hypothesis does not use the failures that it saved.
    if config.getoption("hypothesis_seed", None) is None and PROFILE != "dev":
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.getoption("hypothesis_seed", None)
    return f"hypothesis: profile {PROFILE}" + (f", --hypothesis-seed={seed}" if seed else "")


#: In `make soak` they begin first, so that no process is left alone with one of them at the end.
_LONGEST = ("test_real_kills.py", "test_power_losses.py", "test_histories.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        directory = item.path.relative_to(ROOT / "tests").parts[0]
        if directory in MARKERS:
            item.add_marker(directory)
        if "soak" in getattr(item, "fixturenames", ()):
            item.add_marker("longer")
        if directory == "kafka" and "topics" in getattr(item, "fixturenames", ()):
            # Spark and a broker at once, which a process should start once.
            item.add_marker("kafka_source")
            item.add_marker("spark")
            item.add_marker(pytest.mark.xdist_group("kafka-source"))
        elif "spark" in getattr(item, "fixturenames", ()):
            if directory != "spark":
                item.add_marker("spark")
            # One worker process of pytest-xdist runs all of a group, so that one session is started. There
            # are two groups, so that two processes have about equally much to do.
            group = "spark-resume" if item.path.name in _RESUMING else "spark-session"
            item.add_marker(pytest.mark.xdist_group(group))
        elif directory == "kafka":
            item.add_marker(pytest.mark.xdist_group("kafka-broker"))
    if PROFILE == "soak":
        # What works in rounds comes before what takes as long as it takes.
        items.sort(key=lambda item: (item.path.name not in _LONGEST, item.path.parent.name != "soak"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One local session for all tests. A test changes its configuration only through `spark.newSession()`."""
    from support.session import spark_session

    session = spark_session(tmp_path_factory.mktemp("spark"))
    yield session
    session.stop()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The URL of a bucket on a server of S3's protocol on loopback, with a place for a file name."""
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
    import pyarrow.fs

    patch = pytest.MonkeyPatch()
    for name, value in keys.items():
        patch.setenv(name, value)
    try:
        url = f"?endpoint_override={host}:{port}&scheme=http&region=us-east-1&allow_bucket_creation=true"
        filesystem, _ = pyarrow.fs.FileSystem.from_uri(f"s3://bucket/x{url}")
        filesystem.create_dir("bucket")
        yield "s3://bucket/{}" + url
    finally:
        server.stop()
        patch.undo()


@pytest.fixture(scope="session")
def soak() -> bool:
    """Whether this run may take its time (`make soak`): more rounds, more examples."""
    return PROFILE == "soak"
