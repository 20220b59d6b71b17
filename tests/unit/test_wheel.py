"""A wheel, an sdist and an editable install of this tree are the same package, and work elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

from support.rules import FOLDERS

ROOT = Path(__file__).resolve().parent.parent.parent
#: What a build needs, and `tests`, of which it must take nothing.
TREE = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", *FOLDERS, "src", "tests")

pytestmark = pytest.mark.xdist_group("wheel")


@dataclass(frozen=True)
class Clean:
    """An environment with only keyfold installed, and the dependencies of the running one."""

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


def copy_of_the_tree(folder: Path) -> Path:
    """In place, a build finds files of earlier builds and leaves its own."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "golden")
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def build_wheel(source: Path, built: Path) -> Path:
    command = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built)]
    subprocess.run([sys.executable, "-m", *command, str(source)], check=True)
    (found,) = built.glob("keyfold-*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(copy_of_the_tree(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the hook that `python -m build --sdist` calls."""
    built = tmp_path_factory.mktemp("sdist")
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    source = copy_of_the_tree(tmp_path_factory.mktemp("source"))
    subprocess.run(
        [sys.executable, "-c", build, str(built)], cwd=source, check=True, stdout=subprocess.DEVNULL
    )
    (found,) = built.glob("keyfold-*.tar.gz")
    return found


def install(home: Path, *what: str) -> Clean:
    """Into a new environment in `home`, without a network."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "venv")], check=True)
    python = home / "venv" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site_packages = home / "venv" / "lib" / version / "site-packages"
    # A folder named in a .pth file is searched, but the .pth files in it are not read: the dependencies are
    # found, the editable install of this repository is not.
    paths = {p for p in sys.path if p.endswith(("site-packages", "dist-packages"))}
    (site_packages / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    if what:
        options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        subprocess.run([*pip, "install", *options, *what], check=True)
    (home / "elsewhere").mkdir()
    return Clean(python, site_packages, home / "elsewhere")


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    return install(tmp_path_factory.mktemp("clean"), str(wheel))


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """With the dependencies only."""
    return install(tmp_path_factory.mktemp("without"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_the_tree(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    return install(tmp_path_factory.mktemp("editable"), "-e", str(checkout))


def files_in(wheel: Path) -> dict[str, int]:
    """The name of each file, and the CRC of its bytes."""
    with zipfile.ZipFile(wheel) as archive:
        return {file.filename: file.CRC for file in archive.infolist()}


def modules_in(wheel: Path) -> list[str]:
    names = [PurePosixPath(n) for n in files_in(wheel) if n.endswith(".py")]
    return sorted(".".join(n.with_suffix("").parts).removesuffix(".__init__") for n in names)


def test_the_wheel_has_every_file_of_the_folders_and_nothing_else(wheel: Path) -> None:
    wanted = {
        f"keyfold/{path.relative_to(ROOT)}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    wanted |= {
        "keyfold/__init__.py",
        "keyfold/__main__.py",
        "keyfold/errors.py",
        "keyfold/py.typed",
        "pyspark_keyfold/__init__.py",
    }
    assert {n for n in files_in(wheel) if ".dist-info/" not in n} == wanted


def test_a_wheel_built_from_the_sdist_is_the_same_byte_for_byte(
    wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    again = build_wheel(sdist, tmp_path)
    assert again.name == wheel.name
    assert files_in(again) == files_in(wheel)


def test_the_sdist_has_only_what_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = [PurePosixPath(file.name) for file in archive if not file.isdir()]
    tops = {name.parts[1] for name in names}
    assert tops == {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "src"}


def test_the_modules_of_an_editable_install_are_those_of_the_wheel(
    wheel: Path, checkout: Path, editable: Clean
) -> None:
    """Each is found where the tree has it, and tools find the mark that says that the package has types."""
    out = editable.run(
        """
        import pkgutil
        from importlib.util import find_spec
        for top in ("keyfold", "pyspark_keyfold"):
            spec = find_spec(top)
            print(top, spec.origin)
            for module in pkgutil.walk_packages(spec.submodule_search_locations, f"{top}."):
                print(module.name, find_spec(module.name).origin)
        """
    )
    found = dict(line.split() for line in out.splitlines())
    assert sorted(found) == modules_in(wheel)
    assert [origin for origin in found.values() if not Path(origin).is_relative_to(checkout / "src")] == []
    assert Path(found["keyfold"]).with_name("py.typed").is_file()


def test_the_wheel_carries_the_licence(wheel: Path) -> None:
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in files_in(wheel))


def test_every_module_imports_from_the_clean_environment(wheel: Path, clean: Clean) -> None:
    modules = modules_in(wheel)
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


@pytest.mark.parametrize("kind", ["clean", "editable"])
def test_no_room_is_importable_by_its_bare_name(kind: str, request: pytest.FixtureRequest) -> None:
    out = request.getfixturevalue(kind).run(
        f"""
        from importlib.util import find_spec
        print([name for name in {FOLDERS!r} if find_spec(name)])
        """
    )
    assert out == "[]"


@pytest.mark.parametrize("kind", ["clean", "editable"])
def test_the_command_tells_the_version_of_the_wheel(
    wheel: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    installed: Clean = request.getfixturevalue(kind)
    command = installed.python.parent / "keyfold"
    done = subprocess.run([command, "--version"], cwd=installed.folder, capture_output=True, text=True)
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


@pytest.mark.spark
def test_a_job_that_brings_keyfold_with_it_registers_the_data_source(
    wheel: Path, without: Clean, tmp_path: Path
) -> None:
    """The driver and the tasks get it by `addPyFile`; the process that looks for data sources does not."""
    brought = shutil.copy(wheel, tmp_path / "keyfold.zip")
    out = without.run(
        f"""
        import os
        from importlib.util import find_spec
        from pathlib import Path
        import pyarrow as pa
        from support.session import spark_session

        assert find_spec("keyfold") is None
        spark = spark_session(Path(os.environ["SPARK_DIRECTORY"]))
        spark.sparkContext.addPyFile({str(brought)!r})
        import keyfold

        with keyfold.open("brought", partitions=1) as log:
            log.append(pa.table({{"key": [b"a"], "value": [b"1"]}}))
        keyfold.register(spark)
        assert spark.read.format("keyfold").load(os.path.abspath("brought")).count() == 1
        spark.stop()
        print(keyfold.__file__)
        """,
        PYTHONPATH=str(ROOT / "tests"),
        SPARK_DIRECTORY=str(tmp_path / "spark"),
    )
    assert "keyfold.zip" in Path(out).parts
