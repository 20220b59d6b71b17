"""Named anchors: a commit gets a name, and its exact state remains restorable until the name is dropped.

The name is a line in the manifest. A cleaner pass that began before the line and would fold across the commit
aborts when it publishes. So an anchor that was set is always valid.
"""

from __future__ import annotations

from typing import Final

from keyfold.checkpoints.log.writer import Writer
from keyfold.checkpoints.manifest.entries import AnchorEntry, UnanchorEntry
from keyfold.checkpoints.manifest.resolve import At, anchor_names, resolve_commit
from keyfold.checkpoints.manifest.state import Anchor, Commit
from keyfold.statestore import arguments
from keyfold.statestore.errors import ConfigError

_NAME_CHARACTERS_MAX: Final = 200
#: Prefix of the anchors that `resume` creates and drops by itself.
_RESERVED: Final = "resume:"


def add_anchor(writer: Writer, name: str, at: At) -> Anchor:
    """Name a commit, see `Changelog.anchor`."""
    _check_name(name)
    with writer.exclusive:
        commit = resolve_commit(writer.state, writer.root, at)
        before = writer.state.anchors.get(name)
        if before is None:
            _write(writer, name, commit, "")
        elif before.commit != commit.number:
            raise ConfigError(
                f"The anchor {name!r} already exists.", path=writer.root, expected="a new name",
                found=f"an anchor of commit {before.commit}", remedy="drop it first, or choose another name",
            )  # fmt: skip
        return writer.state.anchors[name]


def drop_anchor(writer: Writer, name: str) -> Anchor:
    """Drop an anchor, see `Changelog.drop_anchor`."""
    arguments.text("name", name)
    with writer.exclusive:
        anchor = writer.state.anchors.get(name)
        if anchor is None:
            raise ConfigError(
                f"The anchor {name!r} does not exist.", path=writer.root,
                expected=anchor_names(writer.state),
                found=repr(name), remedy="name an anchor that exists",
            )  # fmt: skip
        writer.write_line(UnanchorEntry(name))
        return anchor


def pin_for_resume(writer: Writer, commit: Commit) -> str:
    """The name of the anchor that pins a commit for its app. It is created if it does not exist.

    The anchor before it is kept: the query that was started from it may still be at its first batch. Older
    ones are dropped.
    """
    name = resume_anchor(commit.app, commit.number)
    with writer.exclusive:
        own = sorted(
            (a for a in writer.state.anchors.values() if a.app == commit.app), key=lambda a: a.commit
        )
        if not any(a.name == name for a in own):
            _write(writer, name, commit, commit.app)
            for anchor in [a for a in own if a.commit < commit.number][:-1]:
                writer.write_line(UnanchorEntry(anchor.name))
    return name


def resume_anchor(app_id: str, commit: int) -> str:
    """The anchor that pins an app's commit while the app is being resumed."""
    return f"{_RESERVED}{app_id}:{commit}"


def _write(writer: Writer, name: str, commit: Commit, app: str) -> None:
    writer.write_line(AnchorEntry(Anchor(name, commit.number, commit.ends, app)))


def _check_name(name: str) -> None:
    """The command would take digits alone for a commit number. Control characters would garble messages."""
    arguments.text("name", name)
    if (
        not (0 < len(name) <= _NAME_CHARACTERS_MAX)
        or not name.isprintable()
        or name.isdecimal()
        or name[0] in " -"
    ):
        raise ConfigError(
            "Invalid anchor name.",
            expected=f"1 to {_NAME_CHARACTERS_MAX} printable characters, not only digits, no dash first",
            found=repr(name[:_NAME_CHARACTERS_MAX]), remedy="choose another name",
        )  # fmt: skip
    if name.startswith(_RESERVED):
        raise ConfigError(
            f"Names that begin with {_RESERVED!r} are reserved for `resume`.", expected="another prefix",
            found=repr(name), remedy="choose another name",
        )  # fmt: skip
