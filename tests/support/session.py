"""The one way in which tests start Spark, in pytest's own process and in the processes that tests start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

_LOG4J = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1}: %m%n%ex
"""


ROOT = Path(__file__).resolve().parents[2]
#: Of Spark's Kafka source. A session takes jars only when its JVM starts, so that every session has them.
CONNECTOR_JARS = ROOT / ".kafka-jars-spark"


def connector_jars() -> str:
    """For `spark.jars`; empty where they are not here."""
    complete = (CONNECTOR_JARS / "complete").exists()
    return ",".join(str(jar) for jar in sorted(CONNECTOR_JARS.glob("*.jar"))) if complete else ""


def spark_session(directory: Path) -> SparkSession:
    """A small local session whose files all live in `directory` (absolute, made if missing)."""
    if not directory.is_absolute():
        raise ValueError("Spark resolves a relative path by the JVM's own working directory.")
    directory.mkdir(parents=True, exist_ok=True)
    log4j = directory / "log4j2.properties"
    log4j.write_text(_LOG4J)
    # Workers run `PYSPARK_PYTHON`; without it they take whatever `python3` the path gives.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    options = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.driver.extraJavaOptions": (
            f"-Dlog4j2.configurationFile={log4j.as_uri()} -Dderby.system.home={directory}"
        ),
        "spark.local.dir": str(directory / "local"),
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if jars := connector_jars():
        options["spark.jars"] = jars
    builder = SparkSession.builder.master("local[2]").appName("keyfold-tests")
    for name, value in options.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def stateful_session(spark: SparkSession) -> SparkSession:
    """A session beside `spark` with the state store that `transformWithState` needs."""
    made = spark.newSession()
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    made.conf.set("spark.sql.streaming.stateStore.providerClass", provider)
    return made
