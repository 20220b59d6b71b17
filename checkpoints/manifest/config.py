"""Configuration of a changelog: Kafka's names and meanings, validated when they are set, stored in
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

#: Larger than any real time or size. Kafka uses the largest int64 for "never" and "without limit".
UNLIMITED: Final = (1 << 63) - 1
#: Text that resets a setting to its default.
DEFAULT: Final = "default"
#: Text for no limit or no location, in settings that are optional.
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
    """A relative path would mean a different location in each process."""
    if not isinstance(value, str) or (value and not value.startswith("/") and "://" not in value):
        raise ValueError("an absolute path or a URL")
    if has_secret(value):
        raise ValueError("a URL without credentials (set them in the environment)")
    return value


def _option(name: str, default: object, parse: Callable[[object], object], *, none: object = None) -> Any:
    """`none`: the value of the text "none", in an optional setting."""

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


@dataclass(frozen=True)
class LogConfig:
    """Settings of one changelog. Sizes in bytes, times in ms; text such as "64MiB" or "24h" is accepted too.

    Every setting accepts "default". `max.compaction.lag.ms`, `retention.ms`, `retention.bytes`,
    `cleaner.io.max.bytes.per.second` and `snapshot.dest` accept "none": no limit or no location.

    Names, meanings and defaults are those of Kafka's topic and broker configurations if Kafka has them, with
    these exceptions: `segment.bytes` (128 MiB, not 1 GiB: the active segment is never cleaned) and
    `cleaner.io.max.bytes.per.second` (128 MiB, not unlimited; per changelog, and for background passes only).
    Settings of keyfold: `anchors.auto`, how many of the last commits the cleaner keeps restorable;
    `commits.retained`, how many of the last commits `at=` can name while their state is exact; and
    `store.backlog.bytes`, how far the last values may lag before writers wait.
    It and the limit of the cleaner count bytes of files, so of compressed blocks the compressed ones.

    With a `snapshot.dest`, an absolute path or a URL, snapshots are taken to it in the background and the
    newest two are kept. A snapshot is due after `snapshot.commits` commits (0: not by count), or when the
    bytes that the log has gained since the last one exceed `snapshot.dirty.ratio` of these bytes and the last
    snapshot together (1: not by size).
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
    compression_type: str = _option("compression.type", "zstd", _one_of("none", "lz4", "zstd"))
    store_backlog_bytes: int = _option("store.backlog.bytes", 1 << 30, _at_least(1 << 20, _bytes))
    anchors_auto: int = _option("anchors.auto", 3, _at_least(0, _int))
    commits_retained: int = _option("commits.retained", 1000, _at_least(1, _int))
    snapshot_dest: str = _option("snapshot.dest", "", _place, none="")
    snapshot_commits: int = _option("snapshot.commits", 0, _at_least(0, _int))
    snapshot_dirty_ratio: float = _option("snapshot.dirty.ratio", 0.5, _ratio)

    @property
    def codec(self) -> str | None:
        """`compression.type` under Arrow's name."""
        return None if self.compression_type == "none" else self.compression_type

    @classmethod
    def parsed(cls, changes: Mapping[str, object]) -> dict[str, Any]:
        """Settings by their Kafka names as fields, each one checked by itself.

        Raises:
            ConfigError: an unknown name (the closest valid one is named), or a value out of range.
        """
        known = {f.metadata["name"]: f for f in fields(cls)}
        checked: dict[str, Any] = {}
        for name, value in arguments.mapping("config", changes).items():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.75)
                raise ConfigError(
                    f"Unknown setting: {name!r}.",
                    expected=f"{near[0]!r}" if near else "one of " + ", ".join(sorted(known)),
                    found=repr(name),
                    remedy="use that name, if you mean it"
                    if near
                    else "`keyfold config PATH` shows all settings",
                )
            try:
                checked[known[name].name] = known[name].metadata["parse"](value)
            except ValueError as e:
                shown = without_secrets(value) if isinstance(value, str) else value
                raise ConfigError(
                    f"Invalid value for the setting {name!r}.", expected=str(e), found=repr(shown),
                    remedy="correct the value",
                ) from None  # fmt: skip
        return checked

    def with_changes(self, changes: Mapping[str, object]) -> LogConfig:
        """These settings with some changed, by their Kafka names.

        Raises:
            ConfigError: see `parsed`; or two values exclude each other.
        """
        changed = replace(self, **self.parsed(changes))
        if changed.anchors_auto > changed.commits_retained:
            raise ConfigError(
                "anchors.auto is larger than commits.retained.",
                expected=f"at most {changed.commits_retained}, the value of commits.retained",
                found=changed.anchors_auto, remedy="raise commits.retained, or lower anchors.auto",
            )  # fmt: skip
        if changed.max_compaction_lag_ms < changed.min_compaction_lag_ms:
            # A record would be due for cleaning before it may be cleaned.
            raise ConfigError(
                "max.compaction.lag.ms is smaller than min.compaction.lag.ms.",
                expected=f"at least {changed.min_compaction_lag_ms}, the value of min.compaction.lag.ms",
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
        """All settings by their Kafka names as readable text, which `with_changes` accepts."""
        return {
            f.metadata["name"]: NONE if value == f.metadata["none"] else str(value)
            for f in fields(self)
            for value in (getattr(self, f.name),)
        }
