"""Anchors by hand: a commit gets a name, and its exact state stays restorable until the name is dropped.

The name is a line in the manifest. A cleaner pass that was begun before the line and would fold beyond the
commit aborts when it publishes, so an anchor that was made is kept.
"""

from __future__ import annotations

from typing import Final

from keyfold.checkpoints.log.writer import Writer
from keyfold.checkpoints.manifest.resolve import At, resolve_commit
from keyfold.checkpoints.manifest.state import Anchor
from keyfold.statestore import arguments
from keyfold.statestore.errors import ConfigError

_NAME_CHARACTERS_MAX: Final = 200
#: `resume` names its anchors so, and lets them go by itself.
_RESERVED: Final = "resume:"


def add_anchor(writer: Writer, name: str, at: At) -> Anchor:
    """Name a commit, see `Changelog.anchor`."""
    _check_name(name)
    with writer.exclusive:
        commit = resolve_commit(writer.state, writer.root, at)
        before = writer.state.anchors.get(name)
        if before is None:
            ends = list(commit.ends)
            writer.write_line({"t": "anchor", "name": name, "commit": commit.number, "ends": ends, "app": ""})
        elif before.commit != commit.number:
            raise ConfigError(
                f"The anchor {name!r} is there already.", path=writer.root, expected="a new name",
                found=f"an anchor of commit {before.commit}", remedy="drop it first, or choose another name",
            )  # fmt: skip
        return writer.state.anchors[name]


def drop_anchor(writer: Writer, name: str) -> Anchor:
    """Let a commit go, see `Changelog.drop_anchor`."""
    arguments.text("name", name)
    with writer.exclusive:
        anchor = writer.state.anchors.get(name)
        if anchor is None:
            raise ConfigError(
                "There is no such anchor.", path=writer.root,
                expected=", ".join(sorted(writer.state.anchors)) or "no anchor is set", found=repr(name),
                remedy="name one that exists",
            )  # fmt: skip
        writer.write_line({"t": "unanchor", "name": name})
        return anchor


def _check_name(name: str) -> None:
    """Digits alone would be a commit number to the command; escapes do not belong into a message."""
    arguments.text("name", name)
    if (
        not (0 < len(name) <= _NAME_CHARACTERS_MAX)
        or not name.isprintable()
        or name.isdecimal()
        or name[0] in " -"
    ):
        raise ConfigError(
            "An anchor cannot have this name.",
            expected=f"1 to {_NAME_CHARACTERS_MAX} printable characters, not only digits, no dash first",
            found=repr(name[:_NAME_CHARACTERS_MAX]), remedy="choose another name",
        )  # fmt: skip
    if name.startswith(_RESERVED):
        raise ConfigError(
            "Names that begin so belong to `resume`.", expected=f"a name without {_RESERVED!r} in front",
            found=repr(name), remedy="choose another name",
        )  # fmt: skip
