"""The wheel that `pip` builds from this tree works elsewhere: in a clean environment, from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

from support.rules import FOLDERS

ROOT = Path(__file__).resolve().parent.parent.parent
AUTOLOAD = "streaming/autoload"

pytestmark = pytest.mark.xdist_group("wheel")


@dataclass(frozen=True)
class Clean:
    """An environment with the wheel installed, and the dependencies of the running one."""

    python: Path
    site_packages: Path
    folder: Path
    """An empty folder to run in."""

    def run(self, code: str, **variables: str) -> str:
        """The standard output of `code`, run without the variables by which this process finds modules."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYSPARK", "PYTEST"))}
        done = subprocess.run(
            [self.python, "-c", textwrap.dedent(code)],
            cwd=self.folder,
            env={**kept, **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tree: in place, a build finds files of earlier builds and leaves its own."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", *FOLDERS, "src"):
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, source / name)
    built = tmp_path_factory.mktemp("built")
    command = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built)]
    subprocess.run([sys.executable, "-m", *command, str(source)], check=True)
    (found,) = built.glob("keyfold-*.whl")
    return found


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    home = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "venv")], check=True)
    python = home / "venv" / "bin" / "python"
    install = ["pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site_packages = home / "venv" / "lib" / version / "site-packages"
    # A folder named in a .pth file is searched, but the .pth files in it are not read: the dependencies are
    # found, the editable install of this repository is not.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    (home / "elsewhere").mkdir()
    return Clean(python, site_packages, home / "elsewhere")


def _installed_name(source: str) -> str:
    """The name of a file in the wheel."""
    if source.startswith(AUTOLOAD):
        return source.replace(AUTOLOAD, "pyspark_keyfold", 1)
    return f"keyfold/{source}"


def test_the_wheel_has_every_file_of_the_folders_and_nothing_else(wheel: Path) -> None:
    wanted = {
        _installed_name(str(path.relative_to(ROOT)))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    wanted |= {"keyfold/__init__.py", "keyfold/errors.py", "keyfold/py.typed"}
    found = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert found == wanted


def test_the_wheel_carries_the_licence(wheel: Path) -> None:
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in zipfile.ZipFile(wheel).namelist())


def test_every_module_imports_from_the_clean_environment(wheel: Path, clean: Clean) -> None:
    names = [PurePosixPath(n) for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".py")]
    modules = [".".join(n.with_suffix("").parts).removesuffix(".__init__") for n in names]
    assert len(modules) >= len(FOLDERS)
    out = clean.run(
        f"""
        import importlib
        for name in {modules!r}:
            print(importlib.import_module(name).__file__)
        """
    )
    outside = [line for line in out.splitlines() if not Path(line).is_relative_to(clean.site_packages)]
    assert outside == []


def test_no_room_is_importable_by_its_bare_name(clean: Clean) -> None:
    out = clean.run(
        f"""
        from importlib.util import find_spec
        print([name for name in {FOLDERS!r} if find_spec(name)])
        """
    )
    assert out == "[]"


def test_the_command_tells_the_version_of_the_wheel(wheel: Path, clean: Clean) -> None:
    command = clean.python.parent / "keyfold"
    done = subprocess.run([command, "--version"], cwd=clean.folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert wheel.name.split("-")[1] in done.stdout


@pytest.mark.spark
def test_spark_finds_the_data_source_and_its_workers_import_keyfold(clean: Clean, tmp_path: Path) -> None:
    """Without `dataSource.register`, and from the clean environment only."""
    out = clean.run(
        """
        import os
        from pathlib import Path
        import pyarrow as pa
        from keyfold import Changelog
        from support.session import spark_session

        def where(batches):
            import keyfold.statestore

            for _ in batches:
                yield pa.RecordBatch.from_pydict({"file": [keyfold.statestore.__file__]})

        spark = spark_session(Path(os.environ["SPARK_DIRECTORY"]))
        with Changelog.open("log", partitions=1) as log:
            log.append(pa.table({"key": [b"a"], "value": [b"1"]}), app_id="wheel", batch_id=0)
        assert spark.read.format("keyfold").load(os.path.abspath("log")).count() == 1
        files = {row.file for row in spark.range(4).mapInArrow(where, "file string").collect()}
        spark.stop()
        print(*files)
        """,
        PYTHONPATH=str(ROOT / "tests"),
        SPARK_DIRECTORY=str(tmp_path / "spark"),
    )
    assert Path(out).is_relative_to(clean.site_packages)
