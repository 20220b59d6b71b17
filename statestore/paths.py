"""Parses paths given by users: a local directory, made absolute at once, or a remote URL."""

from __future__ import annotations

import os
import os.path
import re
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import unquote

from keyfold.statestore.errors import ConfigError

AnyPath: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"

#: One slash is enough, because a `Path` made from a URL keeps only one.
_SCHEME: Final = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):/")
_WINDOWS: Final = re.compile(r"^[A-Za-z]:[\\/]|^\\\\")
_FILE_URL: Final = re.compile(r"^file:(?://(?:localhost)?)?(/(?!/).*)$", re.IGNORECASE | re.DOTALL)
#: A storage key may contain slashes. A colon before a number and a slash introduces a port.
_USER: Final = re.compile(
    r"^(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/+(?:[^/@:]*:(?!\d+/)[^@]*|(?P<name>[^/@:]*))@"
)
#: Schemes in which the name before @ is neither a user nor a key.
_NAMED: Final = re.compile(r"abfss?|adl|wasbs?|hdfs|viewfs|sftp|ssh|ftp|smb|gs|gcs", re.IGNORECASE)
_SECRET_NAME: Final = re.compile(
    r"[?&][^=&]*(?:key|secret|token|passw|pwd|signature|sig|credentials?)=", re.IGNORECASE
)


def has_secret(text: str) -> bool:
    """Whether a URL contains a password or key, or a user that is half of a key. False for any path."""
    found = _USER.match(text)
    if found is not None and not (found["name"] is not None and _NAMED.fullmatch(found["scheme"])):
        return True
    return _SCHEME.match(text) is not None and _SECRET_NAME.search(text) is not None


def without_secrets(text: str) -> str:
    """A text for messages: a URL without its credentials before @ and without its query."""
    if _SCHEME.match(text) is None:
        return text
    if has_secret(text):
        text = re.sub(r"(?<=:/).*@", "/", text, flags=re.DOTALL)
    return re.sub(r"[?#].*$", "", text, flags=re.DOTALL)


def text_of(place: object) -> str:
    """A path or URL as text.

    Raises:
        ConfigError: It is not a path, is empty, or is a URL that contains a secret.
    """
    if isinstance(place, str | bytes | os.PathLike):
        text = os.fsdecode(place)
        if has_secret(text):
            raise ConfigError(
                "The URL contains credentials, which would be stored and shown.",
                path=without_secrets(text), expected="a URL without credentials",
                found="a URL with credentials",
                remedy="set the credentials in the environment for pyarrow.fs or fsspec "
                "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3), or pass a filesystem= that has them",
            )  # fmt: skip
        if text and "\0" not in text:
            return text
        found = repr(text)
    else:
        found = "None" if place is None else f"a {type(place).__name__}"
    raise ConfigError(
        "Not a valid path.", expected="a path as str, bytes or os.PathLike, not empty and without NUL",
        found=found, remedy="give the path of a directory",
    )  # fmt: skip


def remote_scheme(place: object) -> str | None:
    """The scheme of a remote URL. None for a local path, a `file:` URL and any `Path`."""
    text = text_of(place)
    found = _SCHEME.match(text)
    if found is None or found[1].lower() == "file" or isinstance(place, os.PathLike):
        return None
    return found[1].lower() if text.startswith("//", found.end() - 1) else None


def local_path(place: AnyPath, *, decode: bool = True) -> Path:
    """The absolute local path of a path (`~` is a home directory) or a `file:` URL.

    Args:
        decode: Whether %20 in a URL is a space. Spark does not decode URLs.

    Raises:
        ConfigError: It is not a local path. A remote URL, for example, can only be read.
    """
    text = text_of(place)
    if _WINDOWS.match(text):
        raise _refused(text, "a Windows path", "give a Linux path")
    scheme = _SCHEME.match(text)
    if scheme is not None and scheme[1].lower() != "file":
        remedy = "give a local directory; restore reads a remote snapshot, Changelog.clone copies it here"
        if isinstance(place, os.PathLike):
            remedy = f"give a URL as str, not as {type(place).__name__}; for a directory with that name: ./…"
        raise _refused(text, f"a URL with {scheme[1]}:", remedy)
    if text.lower().startswith("file:"):
        url = _FILE_URL.match(text)
        if url is None or (decode and re.search(r"[?#]", url[1])):
            raise _refused(text, "another form of a file: URL", "write it as file:///directory")
        text = text_of(unquote(url[1], errors="surrogateescape") if decode else url[1])
    elif text.startswith("~"):
        text = os.path.expanduser(text)
        if text.startswith("~"):
            raise _refused(text, "the home of an unknown user", "for a directory with that name: ./~…")
    try:
        return Path(text).absolute()
    except FileNotFoundError:
        raise _refused(text, "the working directory was removed", "give an absolute path") from None


def _refused(text: str, found: str, remedy: str) -> ConfigError:
    return ConfigError(
        "Not a path on a local disk.", path=without_secrets(text),
        expected="a local directory, as a path or a file: URL", found=found, remedy=remedy,
    )  # fmt: skip
