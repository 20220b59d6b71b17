"""A sink whose changelog is moved, removed or replaced goes on with no other one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from keyfold import Changelog, ChangelogSink
from keyfold.statestore.errors import ConfigError, NotAChangelog, WriterFenced
from support.changelogs import rows


@pytest.mark.parametrize("happened", ["moved", "removed", "replaced"])
def test_a_sink_neither_makes_its_changelog_again_nor_writes_another_one(
    tmp_path: Path, happened: str
) -> None:
    """Else its next batch would be the first of an empty changelog, without all that was before."""
    path = tmp_path / "log"
    with ChangelogSink(path) as sink:
        sink.log.append(rows(("a", "1")))
        if happened == "removed":
            shutil.rmtree(path)
        else:
            path.rename(tmp_path / "elsewhere")
        if happened == "replaced":
            Changelog.open(path).close()
        with pytest.raises((WriterFenced, ConfigError)):
            sink.log.append(rows(("a", "2")))
        sink.log.engine.writer.fence("seen")
        with pytest.raises(ConfigError if happened == "replaced" else NotAChangelog):
            sink._opened(None)
        assert path.exists() == (happened == "replaced")


def test_a_sink_whose_changelog_was_put_back_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with ChangelogSink(path) as sink:
        sink.log.append(rows(("a", "1")))
        sink.log.engine.writer.fence("a disk that failed once")
        sink._opened(None).append(rows(("a", "2")))
        assert sink.log.get(b"a") == b"2"
