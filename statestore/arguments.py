"""Type checks for the arguments of public functions. They raise the same errors as the rest of keyfold.

Only cheap checks are made here. The callee validates what a value means.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from keyfold.statestore.errors import ConfigError, WrongType


def whole(name: str, value: object, *, least: int | None = None) -> int:
    """An integer, of Python or numpy. Raises `WrongType`, and `ConfigError` if it is below `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise wrong_type(name, value, "an integer")
    number = int(value)
    if least is not None and number < least:
        raise ConfigError(
            f"Argument `{name}` is too small.", expected=f"{least} or more", found=number,
            remedy=f"correct `{name}=`",
        )  # fmt: skip
    return number


def seconds(name: str, value: object) -> float:
    """A duration in seconds, 0 or more. Raises `WrongType` or `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong_type(name, value, "a number of seconds")
    if math.isnan(value) or value < 0:
        raise ConfigError(
            f"Argument `{name}` is not a valid duration.", expected="0 or more seconds", found=value,
            remedy=f"correct `{name}=`",
        )  # fmt: skip
    return float(value)


def text(name: str, value: object) -> str:
    """Raises `WrongType`."""
    if isinstance(value, str):
        return value
    raise wrong_type(name, value, "text")


def flag(name: str, value: object) -> bool:
    """True or False. Other values are refused: the string "no", for example, is true. Raises `WrongType`."""
    if isinstance(value, bool):
        return value
    raise wrong_type(name, value, "True or False")


def mapping(name: str, value: object) -> Mapping[Any, Any]:
    """Raises `WrongType`."""
    if isinstance(value, Mapping):
        return value
    raise wrong_type(name, value, "a dict")


def several(name: str, value: object, of: str) -> Iterable[Any]:
    """An iterable. A string counts as one item, not as its characters. Raises `WrongType`."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray):
        return value
    raise wrong_type(name, value, f"a list of {of}")


def wrong_type(name: str, value: object, expected: str) -> WrongType:
    """The error for an argument of the wrong type. It does not show the value, which may be a record."""
    return WrongType(
        f"Argument `{name}` has the wrong type.", expected=expected, found=type(value).__name__,
        remedy=f"correct `{name}=`",
    )  # fmt: skip
