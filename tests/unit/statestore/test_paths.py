"""Whatever form a path has, and wherever it is given: the same local directory, or a refusal."""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import CliRunner

from keyfold import Changelog, Standby, open_store, restore, resume, resume_if_lost
from keyfold.checkpoints.cli.group import cli
from keyfold.checkpoints.manifest.config import LogConfig
from keyfold.checkpoints.resume.resume_marker import checkpoint_path
from keyfold.checkpoints.verify.verify import verify
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.paths import local_path, text_of
from support.changelogs import BY_HAND, rows

STATE = {b"k1": b"1", b"k2": b"2"}


@dataclass(frozen=True)
class Like(os.PathLike[str]):
    text: str

    def __fspath__(self) -> str:
        return self.text


#: name → a directory `name` of the working directory, which is the home, in some form
FORMS: dict[str, Callable[[str], Any]] = {
    "absolute": os.path.abspath,
    "Path": lambda name: Path(name).absolute(),
    "relative": lambda name: name,
    "relative Path": Path,
    "dots": lambda name: f"./x y/../{name}",
    "bytes": lambda name: os.fsencode(os.path.abspath(name)),
    "PathLike": Like,
    "home": lambda name: f"~/{name}",
    "home Path": lambda name: Path("~") / name,
    "URL": lambda name: Path(name).absolute().as_uri(),
    "short URL": lambda name: f"file:{quote(os.path.abspath(name))}",
    "URL of this host": lambda name: f"file://localhost{quote(os.path.abspath(name))}",
    "bytes of a URL": lambda name: Path(name).absolute().as_uri().encode(),
    "encoded URL": lambda name: Path(name).absolute().as_uri().replace("o", "%6F").replace("n", "%6e"),
}

ELSEWHERE = ["memory://there", "s3://bucket/there", "gs://bucket/there", "hdfs://host:1/there"]
BAD: list[Any] = [
    None, "", b"", 3, ["log"], "a\0b", Path("s3://bucket/log"), Like("s3:/bucket/log"), "s3:/bucket/log",
    "C:\\log",
    "C:/log", "\\\\host\\log", "file://host/log", "file:log", "file:", "file:///log?x=1", "~nobody-here/log",
]  # fmt: skip


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A changelog `log`, a snapshot `snap`, and a store."""
    home = tmp_path_factory.mktemp("paths") / "template"
    (home / "x y").mkdir(parents=True)
    with Changelog.open(home / "log", config=BY_HAND) as log:
        log.append(rows(("k1", "1"), ("k2", "2")), app_id="app", batch_id=4)
        log.snapshot(home / "snap")
    with restore(home / "log") as state:
        state.to_store(home / "store").close()
    return home


@pytest.fixture(autouse=True)
def home(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, which is the home too."""
    home = tmp_path / "h ö%41e"
    shutil.copytree(template, home)
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    before = set(os.listdir(home))
    yield home
    assert set(os.listdir(home)) - before <= {"new", "cp"}, "something was made under another name"


REFUSED, SKIPPED = "refused", "skipped"


def tried(function: Callable[[Any], Any], place: Any) -> Any:
    """What the function gives, or that it refuses to; `new` is removed then."""
    try:
        return function(place)
    except ConfigError as e:
        return REFUSED if "what to do:" in str(e) else e
    except pytest.skip.Exception:
        return SKIPPED
    except Exception as e:
        return e
    finally:
        shutil.rmtree("new", ignore_errors=True)


def opened(place: Any, **more: Any) -> Any:
    with Changelog.open(place, **more) as log:
        return dict(log.store().all()) if log.state.commits else {}


def cloned(snapshot: Any, place: Any) -> Any:
    with Changelog.clone(snapshot, place):
        return restore("new").to_dict()


def ended(store: Any) -> bool:
    store.close()
    return True


def resumed(result: Any) -> Any:
    with result:
        return result.state.to_dict()


def followed(place: Any) -> Any:
    with Standby(place) as standby:
        return restore(standby.path).to_dict()


def stored(place: Any) -> Any:
    with closing(open_store(place)) as store:
        return dict(store.all())


def told(place: Any) -> Any:
    options = pytest.importorskip("keyfold.streaming.options")
    if not isinstance(place, str):
        pytest.skip("Spark's options are text")
    return restore(options.parse({"path": place}).path).to_dict()


def command(*words: Any) -> Any:
    if not all(isinstance(word, str | os.PathLike) and "\0" not in str(word) for word in words):
        pytest.skip("a word of a command is text")
    done = CliRunner().invoke(cli, [os.fspath(word) for word in words])
    if done.exit_code == 2:
        assert isinstance(done.exception, SystemExit)
        raise ConfigError(done.output)
    assert done.exit_code == 0, done.output
    return done.output


#: what is done with the path of a changelog or snapshot that is there, and gives its state
READ: dict[str, Callable[[Any], Any]] = {
    "Changelog.open to read": lambda place: opened(place, mode="r"),
    "restore": lambda place: restore(place).to_dict(),
    "verify": lambda place: STATE if verify(place).checked.records == 2 else None,
    "keyfold get": lambda place: STATE if command("get", place, "k1") == "1\n" else None,
    "keyfold dump": lambda place: STATE if len(command("dump", place).splitlines()) == 2 else None,
    "keyfold stats": lambda place: STATE if command("stats", place) else None,
    "keyfold ls": lambda place: STATE if command("ls", place) else None,
    "keyfold verify": lambda place: STATE if command("verify", place) else None,
    "keyfold restore": lambda place: command("restore", place, "--to", "new") and stored("new"),
}
CLONE: dict[str, Callable[[Any], Any]] = {
    "clone of": lambda place: cloned(place, "new"),
    "keyfold snapshot PATH": lambda place: command("snapshot", place, "--clone-to", "new") and opened("new"),
}
#: the same, of a changelog on this machine alone
WRITE: dict[str, Callable[[Any], Any]] = {
    "Changelog.open": opened,
    "resume": lambda place: resumed(resume(place, "app")),
    "resume_if_lost": lambda place: resumed(resume_if_lost(place, "app", checkpoint="cp")),
    "Standby": followed,
    "the data source": told,
    "keyfold compact": lambda place: STATE if command("compact", place) else None,
    "keyfold anchor": lambda place: STATE if command("anchor", place, "--add", "x") else None,
    "keyfold config": lambda place: STATE if command("config", place, "--set", "segment.ms=9") else None,
}


def appended(log: Changelog) -> Any:
    with log:
        log.append(rows(("k1", "1"), ("k2", "2")))
        return restore("new").to_dict()


def sunk(place: Any) -> Any:
    pytest.importorskip("pyspark")
    from keyfold import ChangelogSink

    with ChangelogSink(place, keys="k") as made:
        return appended(Changelog.open(made.path, config=BY_HAND))


#: what makes something at a path on this machine, and gives the state that is there then
MAKE: dict[str, Callable[[Any], Any]] = {
    "Changelog.open": lambda place: appended(Changelog.open(place, config=BY_HAND)),
    "clone to": lambda place: cloned("snap", place),
    "to_store": lambda place: ended(restore("log").to_store(place)) and stored("new"),
    "to_changelog": lambda place: restore("log").to_changelog(place) and restore("new").to_dict(),
    "ChangelogSink": sunk,
    "keyfold restore --to": lambda place: command("restore", "log", "--to", place) and stored("new"),
    "keyfold snapshot --clone-to": lambda place: (
        command("snapshot", "snap", "--clone-to", place) and restore("new").to_dict()
    ),
}
SNAPSHOT: dict[str, Callable[[Any], Any]] = {
    "snapshot": lambda place: Changelog.open("log", mode="r").snapshot(place) and restore("new").to_dict(),
    "keyfold snapshot --to": lambda place: (
        command("snapshot", "log", "--to", place) and restore("new").to_dict()
    ),
}


THERE = {
    **{use: ("log", function) for use, function in {**READ, **WRITE}.items()},
    **{use: ("snap", function) for use, function in CLONE.items()},
    "open_store": ("store", stored),
}
EVERY = {
    **{use: function for use, (_, function) in THERE.items()},
    **SNAPSHOT,
    **{f"made by {use}": function for use, function in MAKE.items()},
}


@pytest.mark.parametrize("use", THERE)
def test_every_form_of_a_path_is_what_is_there(use: str) -> None:
    name, function = THERE[use]
    found = {form: tried(function, make(name)) for form, make in FORMS.items()}
    assert {form: state for form, state in found.items() if state not in (STATE, SKIPPED)} == {}


@pytest.mark.parametrize("use", [*MAKE, *SNAPSHOT])
def test_what_is_made_is_made_where_the_path_says(use: str) -> None:
    found = {form: tried((MAKE | SNAPSHOT)[use], make("new")) for form, make in FORMS.items()}
    assert {form: state for form, state in found.items() if state not in (STATE, SKIPPED)} == {}


@pytest.mark.parametrize("use", EVERY)
def test_what_is_no_path_is_refused_with_what_to_do(use: str) -> None:
    found = [(bad, tried(EVERY[use], bad)) for bad in BAD]
    assert [(bad, state) for bad, state in found if state not in (REFUSED, SKIPPED)] == []


@pytest.mark.parametrize("use", [*WRITE, *MAKE, "open_store"])
def test_nothing_is_written_to_a_url_of_elsewhere(use: str) -> None:
    fsspec = pytest.importorskip("fsspec")
    with Changelog.open("log", mode="r") as log:
        log.snapshot(ELSEWHERE[0])
    function = {**WRITE, **MAKE, "open_store": stored}[use]
    # A verb looks at what is there first, and of these one answers.
    urls = ELSEWHERE[:1] if use.startswith("keyfold") else ELSEWHERE
    found = [(url, tried(function, url)) for url in urls]
    fsspec.filesystem("memory").rm("/there", recursive=True)
    assert [(url, state) for url, state in found if state != REFUSED] == []


@pytest.mark.parametrize("use", [*READ, *CLONE])
def test_a_snapshot_elsewhere_is_read_by_its_url(use: str) -> None:
    fsspec = pytest.importorskip("fsspec")
    with Changelog.open("log", mode="r") as log:
        log.snapshot("memory://paths/snap")
    try:
        assert (READ | CLONE)[use]("memory://paths/snap") == STATE
    finally:
        fsspec.filesystem("memory").rm("/paths", recursive=True)


@pytest.mark.parametrize("use", ["restore", "Changelog.open to read", "verify", "keyfold get"])
def test_a_url_that_nobody_knows_is_refused(use: str) -> None:
    for url in ("nothing://there", "notfs://x/y"):
        with pytest.raises(ConfigError, match=r"No file system(.|\n)*what to do:"):
            READ[use](url)


def test_a_relative_path_is_that_of_the_moment_when_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, store = restore("log"), open_store("store")
    reader, writer = Changelog.open("log", mode="r"), Changelog.open("log")
    standby = Standby("log")
    again = resume("log", "app")
    monkeypatch.chdir(tmp_path)
    assert (
        state.to_dict() == dict(reader.store().all()) == dict(store.all()) == again.state.to_dict() == STATE
    )
    writer.append(rows(("k3", "3")))
    reader.refresh()
    assert reader.get(b"k3") == b"3"
    for one in (standby, again, state, store, reader, writer):
        one.close()
    assert os.listdir(tmp_path) == ["h ö%41e"]


@pytest.mark.parametrize(
    ("given", "name"),
    [("cp", "cp"), ("file:///a%20b", "/a%20b"), ("file:/a b", "/a b"), (Path("/a"), "/a"), (b"/a", "/a")],
)
def test_a_checkpoint_is_where_spark_takes_it_to_be(given: Any, name: str) -> None:
    """Spark decodes nothing."""
    assert checkpoint_path(given) == Path(name).absolute()


@pytest.mark.parametrize("bad", [*BAD, *ELSEWHERE, "~/cp", "~"], ids=repr)
def test_a_checkpoint_that_is_elsewhere_for_spark_is_refused(bad: Any) -> None:
    if bad == "file:///log?x=1":
        pytest.skip("a name for Spark")
    with pytest.raises(ConfigError, match="what to do:"):
        checkpoint_path(bad)


def test_names_with_colons_and_tildes_inside_are_names() -> None:
    for name in ("counts:v2", "a:b/c", "./s3:/x", "./~", "a~", "x y", "a%20b", "s3:"):
        assert local_path(name) == Path(name).absolute()


SECRET = [
    "s3://key:hidden@bucket/log", "s3://key:hid/den@bucket/log", "s3:/key:hidden@bucket/log",
    "s3://hidden@bucket/log", "S3://key:hidden@bucket/log?region=x", "sftp://me:hidden@host:22/log",
    "hdfs://me:hidden@host:8020/log", "nothing://key:hidden@bucket/log", "file://me:hidden@host/log",
    "abfs://log:hidden@account.dfs.core.windows.net/log", "s3://bucket/log?secret_key=hidden",
    "https://host/log?a=1&sig=hidden", "gs://bucket/log?access_token=hidden",
]  # fmt: skip


@pytest.mark.parametrize("use", EVERY)
def test_a_url_with_a_secret_is_refused_and_never_shown(use: str) -> None:
    for given in SECRET:
        for place in (given, given.encode(), Path(given)):
            with pytest.raises((ConfigError, pytest.skip.Exception)) as refused:
                EVERY[use](place)
            if isinstance(refused.value, ConfigError):
                assert "environment" in str(refused.value)
                shown = "".join(traceback.format_exception(refused.value, limit=0))
                assert "hid" not in shown


@pytest.mark.parametrize("secret", SECRET)
def test_a_setting_with_a_secret_is_refused_and_neither_kept_nor_shown(secret: str) -> None:
    with pytest.raises(ConfigError, match=r"environment|absolute path") as refused:
        Changelog.open("new", config={"snapshot.dest": secret})
    assert "hid" not in str(refused.value)
    before = Path("log/changelog.json").read_bytes()
    with pytest.raises(ConfigError) as refused:
        command("config", "log", "--set", f"snapshot.dest={secret}")
    assert "hid" not in str(refused.value)
    assert Path("log/changelog.json").read_bytes() == before


@pytest.mark.parametrize(
    "url",
    [
        "abfs://container@account.dfs.core.windows.net/x", "hdfs://host:8020/x@y", "gs://anonymous@bucket/x",
        "s3://bucket/a@b", "s3://bucket/x?region=eu&endpoint_override=host:9000", "sftp://me@host/x",
        "s3://bucket/monkey=1?anonymous=true", "hdfs://me@host:8020/x",
    ],
)  # fmt: skip
def test_a_url_without_a_secret_is_taken(url: str) -> None:
    assert text_of(url) == url
    assert LogConfig().with_changes({"snapshot.dest": url}).snapshot_dest == url


def test_a_url_is_no_path_in_a_file_system_of_ones_own() -> None:
    import pyarrow.fs

    with pytest.raises(ConfigError, match=r"path inside that file system(.|\n)*what to do:"):
        restore("s3://bucket/log", filesystem=pyarrow.fs.LocalFileSystem())
