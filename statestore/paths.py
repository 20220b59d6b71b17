"""What a path of a user means: a local directory, made absolute at that moment, or a URL of elsewhere."""

from __future__ import annotations

import os
import os.path
import re
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import unquote

from keyfold.statestore.errors import ConfigError

AnyPath: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"

#: One slash is enough, because a `Path` that was made of a URL has one left.
_SCHEME: Final = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):/")
_WINDOWS: Final = re.compile(r"^[A-Za-z]:[\\/]|^\\\\")
_FILE_URL: Final = re.compile(r"^file:(?://(?:localhost)?)?(/(?!/).*)$", re.IGNORECASE | re.DOTALL)
#: A key of a store may have slashes. A colon before a number and a slash is that of a port.
_USER: Final = re.compile(
    r"^(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?:[^/@:]*:(?!\d+/)[^@]*|(?P<name>[^/@:]*))@"
)
#: Schemes in which a name before @ is not one of a user or a key.
_NAMED: Final = re.compile(r"abfss?|adl|wasbs?|hdfs|viewfs|sftp|ssh|ftp|smb|gs|gcs", re.IGNORECASE)
_SECRET_NAME: Final = re.compile(
    r"[?&][^=&]*(?:key|secret|token|passw|pwd|signature|sig|credentials?)=", re.IGNORECASE
)


def has_secret(text: str) -> bool:
    """Whether a URL names a password or a key, or a user where that is half of a key. No path does."""
    found = _USER.match(text)
    if found is not None and not (found["name"] is not None and _NAMED.fullmatch(found["scheme"])):
        return True
    return _SCHEME.match(text) is not None and _SECRET_NAME.search(text) is not None


def without_secrets(text: str) -> str:
    """A text for messages: of a URL without what is before @, and without its options."""
    if _SCHEME.match(text) is None:
        return text
    if has_secret(text):
        text = re.sub(r"(?<=:/).*@", "/", text, flags=re.DOTALL)
    return re.sub(r"[?#].*$", "", text, flags=re.DOTALL)


def text_of(place: object) -> str:
    """A path or URL as text.

    Raises:
        ConfigError: it is none, or empty, or a URL that has a secret in it.
    """
    if isinstance(place, str | bytes | os.PathLike):
        text = os.fsdecode(place)
        if has_secret(text):
            raise ConfigError(
                "A URL with a user, a password or a key in it is not taken: it would be kept, and shown.",
                path=without_secrets(text), expected="a URL without credentials", found="one with some",
                remedy="give them by the environment, as pyarrow.fs and fsspec read it "
                "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3), or by filesystem= with a file system "
                "that has them",
            )  # fmt: skip
        if text and "\0" not in text:
            return text
        found = repr(text)
    else:
        found = "None" if place is None else f"a {type(place).__name__}"
    raise ConfigError(
        "This is not a path.", expected="a path as str, bytes or os.PathLike, not empty and without NUL",
        found=found, remedy="give the path of a directory",
    )  # fmt: skip


def remote_scheme(place: object) -> str | None:
    """The scheme of a URL that is not of this machine's files; None for a path, and for any `Path`."""
    text = text_of(place)
    found = _SCHEME.match(text)
    if found is None or found[1].lower() == "file" or isinstance(place, os.PathLike):
        return None
    return found[1].lower() if text.startswith("//", found.end() - 1) else None


def local_path(place: AnyPath, *, decode: bool = True) -> Path:
    """The absolute local path that is meant by a path, with `~` for a home, or by a `file:` URL.

    Args:
        decode: %20 in a URL is a space. Spark takes such a URL as it is written.

    Raises:
        ConfigError: it is none, such as a URL of elsewhere, which can only be read.
    """
    text = text_of(place)
    if _WINDOWS.match(text):
        raise _refused(text, "a Windows path", "give a path of this system")
    scheme = _SCHEME.match(text)
    if scheme is not None and scheme[1].lower() != "file":
        remedy = "give a local directory; restore reads a snapshot there, Changelog.clone copies one here"
        if isinstance(place, os.PathLike):
            remedy = f"give a URL as text, not as a {type(place).__name__}; for a directory of that name: ./…"
        raise _refused(text, f"a URL with {scheme[1]}:", remedy)
    if text.lower().startswith("file:"):
        url = _FILE_URL.match(text)
        if url is None or (decode and re.search(r"[?#]", url[1])):
            raise _refused(text, "another form of a file: URL", "write it as file:///directory")
        text = text_of(unquote(url[1], errors="surrogateescape") if decode else url[1])
    elif text.startswith("~"):
        text = os.path.expanduser(text)
        if text.startswith("~"):
            raise _refused(text, "the home of an unknown user", "for a directory of that name: ./~…")
    try:
        return Path(text).absolute()
    except FileNotFoundError:
        raise _refused(text, "no working directory: it was removed", "give an absolute path") from None


def _refused(text: str, found: str, remedy: str) -> ConfigError:
    return ConfigError(
        "This is not on a local disk.", path=without_secrets(text),
        expected="a local directory, as a path or a file: URL", found=found, remedy=remedy,
    )  # fmt: skip
