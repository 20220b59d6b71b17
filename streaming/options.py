"""The options of `format("keyfold")`: names, values, and which of them go together. No Spark in here."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

from keyfold.checkpoints.restore.view_token import ViewToken
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.paths import local_path

Mode: TypeAlias = Literal["state", "log", "changes"]
Kind: TypeAlias = Literal["batch", "stream"]

EARLIEST: Final = "earliest"
LATEST: Final = "latest"

_MODES: Final = ("state", "log", "changes")
_BOTH: Final = ("batch", "stream")
_RECORDS: Final = ("log", "changes")

#: Option → the modes and the kinds of read that it is for.
_USES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "path": (_MODES, _BOTH),
    "mode": (_MODES, _BOTH),
    "viewTimeoutMs": (_MODES, _BOTH),
    "columns": (_MODES, _BOTH),
    "where": (_MODES, _BOTH),
    "at": (("state",), _BOTH),
    "endOffsets": (("state",), ("batch",)),
    "view": (("state",), ("batch",)),
    "partitions": (_MODES, ("batch",)),
    "startingOffsets": (_RECORDS, _BOTH),
    "endingOffsets": (_RECORDS, ("batch",)),
    "failOnDataLoss": (_RECORDS, _BOTH),
    "includeHeaders": (("log",), _BOTH),
    "maxOffsetsPerTrigger": (_RECORDS, ("stream",)),
}
#: A reader with one of these follows the log: its default mode is "changes", else it is "state".
_FOLLOWING: Final = ("startingOffsets", "endingOffsets", "failOnDataLoss", "maxOffsetsPerTrigger")

#: One column, and several with commas between.
_ONE_NAME: Final = r"\s*(?:`(?:[^`]|``)+`|[^`,\s][^`,]*)\s*"
_NAME: Final = re.compile(_ONE_NAME)
_NAMES: Final = re.compile(f"{_ONE_NAME}(?:,{_ONE_NAME})*")

_VIEW_TIMEOUT_MS: Final = 600_000
_POSITION_FIELDS: Final = frozenset({"keyfold", "offsets", "snapshot", "generations", "begun"})


@dataclass(frozen=True)
class Offsets:
    """A position as the source itself writes it: `{"keyfold": uuid, "offsets": {"0": 12, "1": 40}}`.

    Attributes:
        uuid: of the changelog.
        offsets: partition → the next offset to read.
        snapshot: partition → the manifest line that it was written at, where `positions` wants to know.
        generations: partition → how often it had been rolled back, where it had been.
        begun: partition → where the query began; only until its first batch is read, else empty.
    """

    uuid: str
    offsets: Mapping[int, int]
    snapshot: Mapping[int, int]
    generations: Mapping[int, int] = field(default_factory=dict)
    begun: Mapping[int, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        written: dict[str, Any] = {
            "keyfold": self.uuid,
            "offsets": {str(p): o for p, o in sorted(self.offsets.items())},
        }
        if self.snapshot:
            written["snapshot"] = {str(p): n for p, n in sorted(self.snapshot.items())}
        if self.generations:
            written["generations"] = {str(p): g for p, g in sorted(self.generations.items())}
        if self.begun:
            written["begun"] = {str(p): o for p, o in sorted(self.begun.items())}
        return written

    @classmethod
    def from_json(cls, written: object) -> Offsets:
        """Raises `ValueError` where it has another form."""
        if not isinstance(written, dict) or not set(written) <= _POSITION_FIELDS:
            raise ValueError(f"other fields than {', '.join(sorted(_POSITION_FIELDS))}")
        uuid, offsets = written.get("keyfold"), written.get("offsets")
        snapshot, generations = written.get("snapshot", {}), written.get("generations", {})
        if not isinstance(uuid, str) or not isinstance(offsets, dict) or not isinstance(snapshot, dict):
            raise ValueError("no uuid under keyfold, or no object under offsets")
        begun = written.get("begun", {})
        if not isinstance(generations, dict) or not isinstance(begun, dict):
            raise ValueError("no object under generations or begun")
        for numbers in (offsets, snapshot, generations, begun):
            if not all(k.isdigit() and type(o) is int and o >= 0 for k, o in numbers.items()):
                raise ValueError(
                    "an offset that is no whole number from 0, or is not under its partition's number"
                )
        of = ({int(k): x for k, x in part.items()} for part in (offsets, snapshot, generations, begun))
        return cls(uuid, *of)


@dataclass(frozen=True)
class Options:
    """Checked options. `given` are the names that the user wrote; see `KeyfoldSource` for what each means.

    Attributes:
        path: absolute.
        end_offsets: one per partition.
        view: what `RestoredState.to_spark` knows of the files that hold the state up to `end_offsets`.
        max_rows: per trigger, None without limit.
        columns: the names of the columns to read, None for all.
        where: conditions on key columns, as the user wrote them.
    """

    path: Path
    mode: Mode
    at: int | str | None
    end_offsets: tuple[int, ...] | None
    view: ViewToken | None
    partitions: tuple[int, ...] | None
    starting: str | Offsets
    ending: str | Offsets
    max_rows: int | None
    fail_on_data_loss: bool
    include_headers: bool
    view_timeout_ms: int
    columns: tuple[str, ...] | None
    where: str | None
    given: frozenset[str]

    def check_kind(self, kind: Kind) -> None:
        """Raises `ConfigError` where an option, or the mode, is not for this kind of read."""
        for name in sorted(self.given):
            if kind not in _USES[name][1]:
                raise _refused(
                    name, f"It is not for a {kind}.", f"an option for a {kind}", name, "leave it out"
                )
        if kind == "stream" and self.mode == "state" and self.at is None:
            raise ConfigError(
                "A stream of the state needs the commit whose state it gives.", path=self.path,
                expected='startingOffsets or mode "changes" or "log" to follow the log; `at` for a seed',
                found='mode "state" without `at`',
                remedy='add .option("startingOffsets", "earliest") to follow the changelog',
            )  # fmt: skip
        if kind == "stream" and self.mode == "state" and not isinstance(self.at, int):
            raise _refused(
                "at", "A seed has to name a commit that never changes.", "a commit number", repr(self.at),
                "use the number of the anchor's commit",
            )  # fmt: skip


def parse(given: Mapping[str, str]) -> Options:
    """Check what the user gave to Spark; names are compared without case, as everywhere in Spark.

    Raises:
        ConfigError: an unknown name (the nearest valid one is named), a bad value, or options that
        contradict.
    """
    values = dict(_named(given))
    mode = _mode(values)
    for name in values:
        if mode not in _USES[name][0]:
            modes = " or ".join(repr(m) for m in _USES[name][0])
            raise _refused(name, "It is for another mode.", f"mode {modes}", f"mode {mode!r}", "leave it out")
    if "at" in values and "endOffsets" in values:
        raise _refused("endOffsets", "It says the same as `at`.", "one of the two", "both", "leave one out")
    if "view" in values and "endOffsets" not in values:
        raise _refused("view", "It goes with `endOffsets`.", "both", "view alone", "leave it out")
    return Options(
        path=_path(values),
        mode=mode,
        at=_at(values.get("at")),
        end_offsets=_numbers("endOffsets", values.get("endOffsets")),
        view=_view(values.get("view")),
        partitions=_numbers("partitions", values.get("partitions")),
        starting=_offsets("startingOffsets", values.get("startingOffsets", EARLIEST)),
        ending=_ending(values.get("endingOffsets", LATEST)),
        max_rows=_whole("maxOffsetsPerTrigger", values.get("maxOffsetsPerTrigger")),
        fail_on_data_loss=_flag("failOnDataLoss", values.get("failOnDataLoss", "true")),
        include_headers=_flag("includeHeaders", values.get("includeHeaders", "false")),
        view_timeout_ms=_whole("viewTimeoutMs", values.get("viewTimeoutMs")) or _VIEW_TIMEOUT_MS,
        columns=_names("columns", values.get("columns")),
        where=values.get("where"),
        given=frozenset(values),
    )


def _named(given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The options under the names as they are written here."""
    known = {name.lower(): name for name in _USES}
    for name, value in given.items():
        if name.lower() == "paths":
            raise _refused(
                "path", "One read is of one changelog.", "one path", "several", "read each, and union"
            )
        if name.lower() not in known:
            near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
            raise ConfigError(
                f"Unknown option {name!r}.",
                expected=known[near[0]] if near else "one of " + ", ".join(sorted(_USES)), found=name,
                remedy="use the nearest valid name" if near else "leave it out",
            )  # fmt: skip
        yield known[name.lower()], value


def _mode(values: Mapping[str, str]) -> Mode:
    mode = values.get("mode", "changes" if any(name in values for name in _FOLLOWING) else "state").lower()
    if mode not in _MODES:
        near = difflib.get_close_matches(mode, _MODES, n=1)
        raise _refused(
            "mode",
            "Unknown mode.",
            near[0] if near else "one of " + ", ".join(_MODES),
            mode,
            "correct it",
        )
    return cast("Mode", mode)


def _path(values: Mapping[str, str]) -> Path:
    text = values.get("path", "")
    if not text:
        raise _refused(
            "path", "It is missing.", "the changelog's directory", "nothing", 'give it to load("…")'
        )
    try:
        return local_path(text)
    except ConfigError as e:
        raise _refused("path", e.what, str(e.expected), str(e.found), e.remedy or "correct it") from None


def _at(text: str | None) -> int | str | None:
    """A commit number, or the name of an anchor."""
    if text is None:
        return None
    if not text.strip():
        raise _refused("at", "It is empty.", "a commit number or an anchor's name", repr(text), "correct it")
    return int(text) if text.strip().isdigit() else text


def _view(text: str | None) -> ViewToken | None:
    try:
        return None if text is None else ViewToken.from_text(text)
    except ValueError:
        raise _refused(
            "view", "It has another form.", "what RestoredState.to_spark writes", "something else",
            "leave it out",
        ) from None  # fmt: skip


def _offsets(name: str, text: str) -> str | Offsets:
    if text.strip().lower() in (EARLIEST, LATEST):
        return text.strip().lower()
    try:
        return Offsets.from_json(json.loads(text))
    except ValueError as e:
        reason = "no JSON" if isinstance(e, json.JSONDecodeError) else str(e)
    raise _refused(
        name, "It has another form.",
        '"earliest", "latest", or {"keyfold": "<uuid>", "offsets": {"0": 12, …}}', reason,
        "give the text that the checkpoint, or resume(…).options(), has",
    )  # fmt: skip


def _ending(text: str) -> str | Offsets:
    found = _offsets("endingOffsets", text)
    if found == EARLIEST:
        raise _refused("endingOffsets", "Nothing would be read.", '"latest" or JSON', found, "correct it")
    return found


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise _refused(name, "It has another form.", 'whole numbers: "0,3,5"', repr(text), "correct it")
    return tuple(int(part) for part in parts)


def _names(name: str, text: str | None) -> tuple[str, ...] | None:
    """Names with commas between. In backquotes a name may have commas; a backquote in it is doubled."""
    if text is None:
        return None
    if not _NAMES.fullmatch(text):
        raise _refused(name, "It has another form.", '"a,b,`c,d`"', repr(text), "give one or more names")
    found = [part.strip() for part in _NAME.findall(text)]
    return tuple(n[1:-1].replace("``", "`") if n.startswith("`") else n for n in found)


def _whole(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.strip().isdigit() or int(text) < 1:
        raise _refused(name, "It has another form.", "a whole number from 1", repr(text), "correct it")
    return int(text)


def _flag(name: str, text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise _refused(name, "It has another form.", "true or false", repr(text), "correct it")
    return text.strip().lower() == "true"


def _refused(name: str, why: str, expected: str, found: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"The option {name!r} is refused. {why}", expected=expected, found=found, remedy=remedy
    )
