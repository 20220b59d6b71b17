"""What `make docs` leaves out of the reference: parameters that only tests use, and private base classes."""

from __future__ import annotations

import re
from typing import Any

import griffe

_FOR_TESTS = ("files", "clock_ms")
_PRIVATE_BASES = ("ABC", "Closing", "ForeachBatch", "_Named")
#: The line of a docstring that says so, with its heading if there is no other line.
_LINE = re.compile(r"(^ *Args:\n(?=.*\n\s*\n))?^ *files(, clock_ms)?: [Ff]or tests\.\n", re.MULTILINE)


class HideInternals(griffe.Extension):
    """Griffe calls it for each function and class that it has read."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        for name in _FOR_TESTS:
            if name in func.parameters:
                del func.parameters[name]
        if func.docstring:
            func.docstring.value = _LINE.sub("", func.docstring.value)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        cls.bases = [base for base in cls.bases if str(base) not in _PRIVATE_BASES]
        if cls.docstring:
            cls.docstring.value = _LINE.sub("", cls.docstring.value)
