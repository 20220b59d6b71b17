"""What is open until it is closed, as a context manager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

C = TypeVar("C", bound="Closing")


class Closing(ABC):
    """Closes itself at the end of a `with` block."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
