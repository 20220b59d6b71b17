"""The option `where`: conditions on key columns, which decide what is read at all. No Spark in here.

    user = 'ann' AND day BETWEEN '2026-01-01' AND '2026-01-31'

The order of the bytes of keys is the order of the columns. So conditions on the first columns are a range of
bytes, and a value for each column is one key, which is in one partition.
"""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from keyfold.checkpoints.log.key_filter import Selection
from keyfold.statestore.errors import BadRecord, ConfigError
from keyfold.statestore.schema.columns import Columns

_FORM: Final = "conditions on key columns, joined by AND: =, <, <=, >, >=, BETWEEN … AND …, IN (…)"
_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<hex>[xX]'[0-9a-fA-F]*')
      | (?P<text>'(?:[^']|'')*')
      | (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<quoted>`(?:[^`]|``)+`)
      | (?P<word>[^\W\d]\w*)
      | (?P<sign><=|>=|==|=|<|>|\(|\)|,)
    )""",
    re.VERBOSE,
)
_COMPARED: Final = ("=", "<", "<=", ">", ">=")
#: The words that may stand before the text of a date or time.
_PREFIXES: Final = ("DATE", "TIME", "TIMESTAMP", "TIMESTAMP_NTZ", "TIMESTAMP_LTZ")


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str

    def is_word(self, *words: str) -> bool:
        return self.kind == "word" and self.text.upper() in words


@dataclass(frozen=True)
class _Condition:
    column: str
    sign: str  # one of _COMPARED, or IN
    values: tuple[_Token, ...]


def selection_of(text: str, columns: Columns | None, root: Path) -> Selection:
    """The keys that meet all conditions in `text`.

    Raises:
        ConfigError: It has another form, names something else than the first key columns, or a value does not
            have its column's type.
    """
    keys = ("key",) if columns is None else columns.keys
    conditions = list(_Parser(text, root).conditions())
    other = [c.column for c in conditions if c.column not in keys]
    if other:
        raise _refused(
            root, "It has a column that is not a key column.", ", ".join(keys), ", ".join(other),
            "filter the DataFrame by other columns",
        )  # fmt: skip
    try:
        return _Bounds(columns, root).of(conditions)
    except BadRecord as e:
        raise _refused(
            root, "A value does not fit its key column.", f"{e.position}: {e.expected}", str(e.found),
            "give a value of the column's type, within its range",
        ) from None  # fmt: skip


class _Parser:
    def __init__(self, text: str, root: Path) -> None:
        self._root = root
        self._tokens = list(self._split(text))
        self._place = 0

    def conditions(self) -> Iterator[_Condition]:
        while True:
            yield from self._condition()
            if self._place == len(self._tokens):
                return
            self._expect_word("AND")

    def _split(self, text: str) -> Iterator[_Token]:
        place = 0
        while text[place:].strip():
            found = _TOKEN.match(text, place)
            if found is None:
                raise self._bad(f"something else at character {place + 1}")
            kind = str(found.lastgroup)
            yield _Token(kind, found[kind])
            place = found.end()

    def _condition(self) -> Iterator[_Condition]:
        name = self._next()
        if name.kind == "quoted":
            column = name.text[1:-1].replace("``", "`")
        elif name.kind == "word":
            column = name.text
        else:
            raise self._bad("no column name where a condition begins")
        sign = self._next()
        if sign.is_word("BETWEEN"):
            yield _Condition(column, ">=", (self._value(),))
            self._expect_word("AND")
            yield _Condition(column, "<=", (self._value(),))
        elif sign.is_word("IN"):
            yield _Condition(column, "IN", tuple(self._list()))
        elif sign.text.replace("==", "=") in _COMPARED:
            yield _Condition(column, sign.text.replace("==", "="), (self._value(),))
        else:
            raise self._bad(f"another operator after column {column!r}")

    def _list(self) -> Iterator[_Token]:
        if self._next().text != "(":
            raise self._bad("IN without a list in parentheses")
        while True:
            yield self._value()
            end = self._next()
            if end.text == ")" and end.kind == "sign":
                return
            if end.text != "," or end.kind != "sign":
                raise self._bad("a list of values without commas")

    def _value(self) -> _Token:
        token = self._next()
        if token.is_word(*_PREFIXES):
            token = self._next()
            if token.kind != "text":
                raise self._bad("a date or time without quotes")
        if token.kind in ("text", "number", "hex") or token.is_word("TRUE", "FALSE"):
            return token
        raise self._bad("something else where a value belongs")

    def _next(self) -> _Token:
        if self._place == len(self._tokens):
            raise self._bad("an end in the middle of a condition")
        self._place += 1
        return self._tokens[self._place - 1]

    def _expect_word(self, word: str) -> None:
        if not self._next().is_word(word):
            raise self._bad(f"something else where {word} belongs")

    def _bad(self, found: str) -> ConfigError:
        return _refused(self._root, "It has another form.", _FORM, found, "correct it")


class _Bounds:
    """Turns conditions into bytes."""

    def __init__(self, columns: Columns | None, root: Path) -> None:
        self._columns = columns
        self._root = root
        self._low = b""
        self._high: bytes | None = None

    def of(self, conditions: list[_Condition]) -> Selection:
        names = ("key",) if self._columns is None else self._columns.keys
        leading: tuple[object, ...] = ()
        keys: list[bytes] | None = None
        for i, name in enumerate(names):
            mine = [c for c in conditions if c.column == name]
            exact = [self._value(name, c.values[0]) for c in mine if c.sign == "="]
            later = [c.column for c in conditions if c.column in names[i + 1 :]]
            for c in mine:
                if c.sign != "IN":
                    self._narrow(c.sign, (*leading, self._value(name, c.values[0])))
                elif i < len(names) - 1:
                    raise self._needs_equality(name, f"IN for {name!r}, which is not the last key column")
                else:
                    wanted = {self._whole((*leading, self._value(name, v))) for v in c.values}
                    keys = sorted(wanted if keys is None else wanted.intersection(keys))
            if not exact:
                if later:
                    raise self._needs_equality(name, f"a condition on {later[0]!r} without one")
                return self._selection(keys)
            leading = (*leading, exact[0])
        whole = self._whole(leading)
        return self._selection([whole] if keys is None or whole in keys else [])

    def _selection(self, keys: list[bytes] | None) -> Selection:
        held = None
        if keys is not None:
            held = _binary([k for k in keys if k >= self._low and (self._high is None or k < self._high)])
        return Selection(held, None, self._low, self._high)

    def _narrow(self, sign: str, values: tuple[object, ...]) -> None:
        first, after = self._range(values)
        if sign in ("=", ">="):
            self._low = max(self._low, first)
        if sign == ">" and after is not None:
            self._low = max(self._low, after)
        if sign == ">" and after is None:
            self._high = b""  # no key is greater
        if sign == "<":
            self._high = first if self._high is None else min(self._high, first)
        if sign in ("=", "<=") and after is not None:
            self._high = after if self._high is None else min(self._high, after)

    def _range(self, values: tuple[object, ...]) -> tuple[bytes, bytes | None]:
        """The smallest bytes of a key that begins with these values, and the smallest that are greater than
        all of these. None if none are.
        """
        if self._columns is None or len(values) == len(self._columns.keys):
            whole = self._whole(values)
            return whole, whole + b"\0"
        first = self._columns.key_prefix(*values)
        kept = first.rstrip(b"\xff")
        return first, kept[:-1] + bytes([kept[-1] + 1]) if kept else None

    def _whole(self, values: tuple[object, ...]) -> bytes:
        if self._columns is None:
            (value,) = values
            assert isinstance(value, bytes)
            return value
        return self._columns.encode_key(*values)

    def _value(self, name: str, token: _Token) -> object:
        kind = pa.binary() if self._columns is None else self._columns.arrow_schema().field(name).type
        try:
            value = _python_value(token, kind)
        except (ValueError, ArithmeticError):
            value = None
        if value is None:
            raise _refused(
                self._root, f"A value does not have the type of the key column {name!r}.", str(kind),
                f"a literal of another type ({token.kind})",
                "write text, dates and times in single quotes, bytes as X'…'; for other types filter the "
                "DataFrame",
            )  # fmt: skip
        return value

    def _needs_equality(self, name: str, found: str) -> ConfigError:
        return _refused(
            self._root, "Its conditions are not on the first key columns.",
            f"an = condition on {name!r}", found, "filter the DataFrame by the other columns",
        )  # fmt: skip


def _binary(keys: list[bytes]) -> pa.Array:
    """As `pa.array`, which would import pandas: that takes longer than the lookup of a key."""
    ends = np.cumsum([0, *map(len, keys)], dtype=np.int32)
    return pa.Array.from_buffers(
        pa.binary(), len(keys), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(keys))]
    )


def _python_value(token: _Token, kind: pa.DataType) -> object:
    """The value of a literal as `Columns.encode_key` takes it; None or an error if it has another type."""
    t, text = pa.types, token.text
    if token.kind == "hex":
        return bytes.fromhex(text[2:-1]) if t.is_binary(kind) else None
    if token.kind == "word":
        return text.upper() == "TRUE" if t.is_boolean(kind) else None
    if token.kind == "number":
        if t.is_integer(kind):
            return int(text)
        if t.is_decimal(kind):
            return decimal.Decimal(text)
        return float(text) if t.is_floating(kind) else None
    text = text[1:-1].replace("''", "'")
    if t.is_string(kind):
        return text
    if t.is_binary(kind):
        return text.encode()
    if t.is_floating(kind) and text.lower() in ("nan", "infinity", "-infinity"):
        return float(text)
    if t.is_date(kind):
        return datetime.date.fromisoformat(text)
    if t.is_time(kind):
        return datetime.time.fromisoformat(text)
    if t.is_timestamp(kind):
        return _time(text, aware=kind.tz is not None)
    return None


def _time(text: str, *, aware: bool) -> datetime.datetime | None:
    """Without a time zone it is in UTC. A column without time zone takes no value with one."""
    time = datetime.datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
    if aware:
        return time if time.tzinfo is not None else time.replace(tzinfo=datetime.timezone.utc)
    return time if time.tzinfo is None else None


def _refused(root: Path, why: str, expected: str, found: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"The option 'where' is refused. {why}", path=root, expected=expected, found=found, remedy=remedy
    )
