"""Arguments of the public functions: of which type they are, said in the words of every other error.

Only what is cheap to see is looked at. What a value means, the callee knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from keyfold.statestore.errors import ConfigError, WrongType


def whole(name: str, value: object, *, least: int | None = None) -> int:
    """A whole number, of Python or numpy. Raises `WrongType`, and `ConfigError` below `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise wrong_type(name, value, "a whole number")
    number = int(value)
    if least is not None and number < least:
        raise ConfigError(
            f"The argument `{name}` is too small.", expected=f"{least} or more", found=number,
            remedy=f"correct `{name}=`",
        )  # fmt: skip
    return number


def seconds(name: str, value: object) -> float:
    """A time in seconds, 0 or more. Raises `WrongType`, `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong_type(name, value, "seconds")
    if math.isnan(value) or value < 0:
        raise ConfigError(
            f"The argument `{name}` is no time to wait.", expected="seconds, 0 or more", found=value,
            remedy=f"correct `{name}=`",
        )  # fmt: skip
    return float(value)


def text(name: str, value: object) -> str:
    """Raises `WrongType`."""
    if isinstance(value, str):
        return value
    raise wrong_type(name, value, "text")


def flag(name: str, value: object) -> bool:
    """True or False: other values are true that nobody means so, such as "no". Raises `WrongType`."""
    if isinstance(value, bool):
        return value
    raise wrong_type(name, value, "True or False")


def mapping(name: str, value: object) -> Mapping[Any, Any]:
    """Raises `WrongType`."""
    if isinstance(value, Mapping):
        return value
    raise wrong_type(name, value, "a dict")


def several(name: str, value: object, of: str) -> Iterable[Any]:
    """More than one of something; text is one, not its characters. Raises `WrongType`."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray):
        return value
    raise wrong_type(name, value, f"several {of}, in a list")


def wrong_type(name: str, value: object, expected: str) -> WrongType:
    """The error for an argument of another type. Its value may be a record, and is not shown."""
    return WrongType(
        f"The argument `{name}` has a wrong type.", expected=expected, found=type(value).__name__,
        remedy=f"correct `{name}=`",
    )  # fmt: skip
