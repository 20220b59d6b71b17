"""Configuration of a changelog: Kafka's names and meanings, checked when they are set, kept in
`changelog.json`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, Final

from keyfold.statestore import arguments
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.paths import has_secret, without_secrets

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?\s*$", re.IGNORECASE)
_DURATION = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|min|h|d)\s*$", re.IGNORECASE)
_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}

#: Larger than any time or size that occurs; Kafka uses the largest int64 for "never" and "without limit".
UNLIMITED: Final = (1 << 63) - 1
#: Text that each setting takes for its default.
DEFAULT: Final = "default"
#: Text for no limit or no place, in the settings that can have none.
NONE: Final = "none"


def _bytes(value: object) -> int:
    if isinstance(value, str) and (found := _SIZE.match(value)):
        prefix = (found[2] or "").lower()
        base = 1024 if prefix.endswith("i") else 1000
        return int(Fraction(found[1]) * base ** (" kmgt".index(prefix[0]) if prefix else 0))
    return _int(value, 'bytes, such as 1048576, "64MiB" or "1GB"')


def _ms(value: object) -> int:
    if isinstance(value, str) and (found := _DURATION.match(value)):
        return int(Fraction(found[1]) * _UNITS_MS[found[2].lower()])
    return _int(value, 'milliseconds, or a time such as "90s" or "24h"')


def _int(value: object, expected: str = "a whole number") -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(expected)
    try:
        return int(value)
    except ValueError:
        raise ValueError(expected) from None


def _ratio(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a number from 0 to 1")
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise ValueError("a number from 0 to 1")
    return number


def _at_least(low: int, parse: Callable[[object], int]) -> Callable[[object], int]:
    def check(value: object) -> int:
        number = parse(value)
        if number < low:
            raise ValueError(f"{low} or more")
        return min(number, UNLIMITED)

    return check


def _one_of(*names: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if value not in names:
            raise ValueError("one of " + ", ".join(names))
        return str(value)

    return check


def _policy(value: object) -> str:
    parts = {p.strip() for p in str(value).split(",")}
    if not parts or not parts <= {"compact", "delete"}:
        raise ValueError('"compact", "delete" or "compact,delete"')
    return ",".join(sorted(parts))


def _place(value: object) -> str:
    """A relative path would mean another place in every process."""
    if not isinstance(value, str) or (value and not value.startswith("/") and "://" not in value):
        raise ValueError("an absolute path or a URL")
    if has_secret(value):
        raise ValueError("a URL without credentials, which belong in the environment")
    return value


def _option(name: str, default: object, parse: Callable[[object], object], *, none: object = None) -> Any:
    """`none`: the value that the text "none" means, in a setting that can have none."""

    def parsed(value: object) -> object:
        if value == DEFAULT:
            return default
        if none is not None and value == NONE:
            return none
        try:
            return parse(value)
        except ValueError as e:
            raise ValueError(f"{e}{'' if none is None else ', or none'}") from None

    return field(default=default, metadata={"name": name, "parse": parsed, "none": none})


_U: Final = "snapshot.u"
_RATIO: Final = "min.cleanable.dirty.ratio"


def _without_u(changes: Mapping[str, object]) -> Mapping[str, object]:
    """The same with `snapshot.u` said as a dirty ratio."""
    if _U not in changes:
        return changes
    if _RATIO in changes:
        raise ConfigError(
            f"{_U} and {_RATIO} are two ways to say the same.", expected="one of them", found="both",
            remedy="leave one out",
        )  # fmt: skip
    try:
        u = float(str(changes[_U]))
    except ValueError:
        u = -1.0
    if not 0 <= u < float("inf"):
        raise ConfigError(
            f"The setting {_U!r} cannot have this value.", expected="a number, 0 or more",
            found=repr(changes[_U]), remedy="correct the value",
        )  # fmt: skip
    return {name: value for name, value in changes.items() if name != _U} | {_RATIO: 1 / (1 + u)}


@dataclass(frozen=True)
class LogConfig:
    """Settings of one changelog. Sizes in bytes, times in ms; text such as "64MiB" or "24h" is taken too.

    Every setting takes "default"; `max.compaction.lag.ms`, `retention.ms`, `retention.bytes`,
    `cleaner.io.max.bytes.per.second` and `snapshot.dest` take "none", for no limit or no place.

    Names, meanings and defaults are Kafka's topic and broker configurations where Kafka has them, but for
    `segment.bytes` (128 MiB, not 1 GiB: the active segment is never cleaned),
    `cleaner.io.max.bytes.per.second` (128 MiB, not unlimited; of one changelog, and only of background
    passes) and our own: `anchors.auto`, how many of the last commits stay restorable whatever the cleaner
    does; `commits.retained`, how many of the last commits can be named by `at=` while their state is exact;
    and `store.backlog.bytes`, how far last values may lag before writers wait.

    With a `snapshot.dest`, an absolute path or a URL, snapshots are taken to it in the background and the
    newest two kept: after `snapshot.commits` commits (0: not by count), or when what the log has gained since
    the last one is more than `snapshot.dirty.ratio` of that and the last one together (1: not by size).

    `snapshot.u` is another way to say `min.cleanable.dirty.ratio`, in the words of Raft (Ongaro's
    dissertation, section 5.1.3): a pass is due when u times the dirty section is larger than the clean one,
    which is a ratio of 1 / (1 + u).
    """

    cleanup_policy: str = _option("cleanup.policy", "compact", _policy)
    segment_bytes: int = _option("segment.bytes", 128 << 20, _at_least(1024, _bytes))
    segment_ms: int = _option("segment.ms", 7 * 86_400_000, _at_least(1, _ms))
    min_cleanable_dirty_ratio: float = _option("min.cleanable.dirty.ratio", 0.5, _ratio)
    min_compaction_lag_ms: int = _option("min.compaction.lag.ms", 0, _at_least(0, _ms))
    max_compaction_lag_ms: int = _option(
        "max.compaction.lag.ms", UNLIMITED, _at_least(1, _ms), none=UNLIMITED
    )
    delete_retention_ms: int = _option("delete.retention.ms", 86_400_000, _at_least(0, _ms))
    retention_ms: int = _option("retention.ms", -1, _at_least(-1, _ms), none=-1)
    retention_bytes: int = _option("retention.bytes", -1, _at_least(-1, _bytes), none=-1)
    cleaner_backoff_ms: int = _option("cleaner.backoff.ms", 15_000, _at_least(1, _ms))
    cleaner_threads: int = _option("cleaner.threads", 1, _at_least(0, _int))
    cleaner_io_max_bytes_per_second: int = _option(
        "cleaner.io.max.bytes.per.second", 128 << 20, _at_least(1 << 10, _bytes), none=UNLIMITED
    )
    cleaner_dedupe_buffer_size: int = _option(
        "cleaner.dedupe.buffer.size", 128 << 20, _at_least(1024, _bytes)
    )
    compression_type: str = _option("compression.type", "none", _one_of("none", "lz4", "zstd"))
    store_backlog_bytes: int = _option("store.backlog.bytes", 1 << 30, _at_least(1 << 20, _bytes))
    anchors_auto: int = _option("anchors.auto", 3, _at_least(0, _int))
    commits_retained: int = _option("commits.retained", 1000, _at_least(1, _int))
    snapshot_dest: str = _option("snapshot.dest", "", _place, none="")
    snapshot_commits: int = _option("snapshot.commits", 0, _at_least(0, _int))
    snapshot_dirty_ratio: float = _option("snapshot.dirty.ratio", 0.5, _ratio)

    @property
    def codec(self) -> str | None:
        """`compression.type` as Arrow names it."""
        return None if self.compression_type == "none" else self.compression_type

    def with_changes(self, changes: Mapping[str, object]) -> LogConfig:
        """These settings with some changed, by their Kafka names.

        Raises:
            ConfigError: an unknown name (the nearest valid one is named), a value out of range, or two values
                that exclude one another.
        """
        known = {f.metadata["name"]: f for f in fields(self)}
        checked: dict[str, Any] = {}
        changes = _without_u(arguments.mapping("config", changes))
        for name, value in changes.items():
            if name not in known:
                near = difflib.get_close_matches(str(name), [*known, _U], n=1, cutoff=0.75)
                raise ConfigError(
                    f"There is no setting {name!r}.",
                    expected=f"{near[0]!r}" if near else "one of " + ", ".join(sorted(known)),
                    found=repr(name),
                    remedy="use that name, if it is what you mean"
                    if near
                    else "`keyfold config PATH` shows all settings",
                )
            try:
                checked[known[name].name] = known[name].metadata["parse"](value)
            except ValueError as e:
                shown = without_secrets(value) if isinstance(value, str) else value
                raise ConfigError(
                    f"The setting {name!r} cannot have this value.", expected=str(e), found=repr(shown),
                    remedy="correct the value",
                ) from None  # fmt: skip
        changed = replace(self, **checked)
        if changed.anchors_auto > changed.commits_retained:
            raise ConfigError(
                "anchors.auto is larger than commits.retained.",
                expected=f"at most {changed.commits_retained}, the commits that can be named",
                found=changed.anchors_auto, remedy="raise commits.retained, or lower anchors.auto",
            )  # fmt: skip
        if changed.max_compaction_lag_ms < changed.min_compaction_lag_ms:
            # A record would be due for cleaning while it may not be cleaned.
            raise ConfigError(
                "max.compaction.lag.ms is smaller than min.compaction.lag.ms.",
                expected=f"at least {changed.min_compaction_lag_ms}, the time that a record stays",
                found=changed.max_compaction_lag_ms,
                remedy="raise max.compaction.lag.ms, or lower min.compaction.lag.ms",
            )
        return changed

    def changed(self) -> dict[str, object]:
        """The settings that differ from the defaults, by their Kafka names."""
        return {
            f.metadata["name"]: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }

    def named(self) -> dict[str, object]:
        """All settings by their Kafka names."""
        return {f.metadata["name"]: getattr(self, f.name) for f in fields(self)}

    def shown(self) -> dict[str, str]:
        """All settings by their Kafka names as text for the eye, which `with_changes` takes back."""
        return {
            f.metadata["name"]: NONE if value == f.metadata["none"] else str(value)
            for f in fields(self)
            for value in (getattr(self, f.name),)
        }
