"""Changelogs that are made once; each test has a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.changelogs import make_closed, make_crashed


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    make_closed(root / "closed")
    make_crashed(root / "crashed")
    return root


@pytest.fixture
def closed(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "closed", tmp_path / "closed"))


@pytest.fixture
def crashed(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "crashed", tmp_path / "crashed"))
