"""A reader of changelogs from docs/format.md and docs/encoding.md alone: json, struct, pyarrow and a CRC32C,
nothing of keyfold.

It is slow, holds everything in memory, and refuses what the page calls damage. If it and keyfold disagree,
one of them is not what the page says.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from crc32c import crc32c

from support.foreign_encoding import read_key, value_type

SLOT = re.compile(rb"^([0-9]{20}) ([0-9]{20}) ([0-9a-f]{8}) ([0-9a-f]{8})\n    $")
INDEX = struct.Struct("<4sHHQQII")
ENTRY = struct.Struct("<qqqqqII")
END = bytes.fromhex("ffffffff00000000")


class Refused(Exception):
    """What the page calls damage, or a point whose state is gone."""


class ForeignReader:
    """The changelog or snapshot in a directory, as of its newest durable line."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._view: int | None = None
        self._mark()
        self.identity = self._identity()
        self._journal()
        if self._view is not None:
            os.pwrite(self._view, b"%020d\n" % self.seq, 0)

    def close(self) -> None:
        if self._view is not None:
            os.unlink(self._view_path)
            os.close(self._view)
            self._view = None

    # -- readers/<id>.view -----------------------------------------------------------------------------------

    def _mark(self) -> None:
        readers = self.root / "readers"
        while readers.is_dir() and self._view is None:
            self._view_path = readers / f"{uuid.uuid4().hex}.view"
            view = os.open(self._view_path, os.O_CREAT | os.O_RDWR, 0o644)
            try:
                fcntl.flock(view, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.stat(self._view_path), os.fstat(view)):
                    self._view = view
            except (BlockingIOError, FileNotFoundError):
                pass
            if self._view is None:
                os.close(view)

    # -- changelog.json --------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        raw = (self.root / "changelog.json").read_bytes()
        fields: dict[str, Any] = json.loads(raw)
        if int(fields["crc32c"], 16) != crc32c(raw[: raw.rindex(b'"crc32c"')]):
            raise Refused("changelog.json")
        if fields["magic"] != "keyfold changelog" or fields["version"] != 2:
            raise Refused("another version")
        if fields["schema"] is not None and fields["schema"]["key_encoding"] != "ordered":
            raise Refused("another encoding of keys")
        return fields

    # -- typed columns ---------------------------------------------------------------------------------------

    def value_columns(self) -> list[list[dict[str, Any]]]:
        """The value columns of schema 1, 2, …; the last are the current ones. None for raw bytes."""
        schema = self.identity["schema"]
        if schema is None:
            return []
        return [
            [f for f in columns["fields"] if f["name"] not in schema["keys"]]
            for columns in (*schema["earlier"], schema["columns"])
        ]

    def key_types(self) -> list[Any]:
        schema = self.identity["schema"]
        kinds = {f["name"]: f["type"] for f in schema["columns"]["fields"]}
        return [kinds[name] for name in schema["keys"]]

    def _current(self, value: Any) -> Any:
        """A value of any schema with the columns of the current one."""
        if value is None or self.identity["schema"] is None:
            return value
        return {f["name"]: value.get(f["name"]) for f in self.value_columns()[-1]}

    # -- manifest --------------------------------------------------------------------------------------------

    def _head(self, epoch: int) -> tuple[int, int, int] | None:
        try:
            data = (self.root / "manifest" / f"{epoch}.head").read_bytes()
        except FileNotFoundError:
            return None
        found = []
        for start in (0, 64):
            slot = SLOT.match(data[start : start + 64])
            if slot and crc32c(data[start : start + 51]) == int(slot[4], 16):
                found.append((int(slot[1]), int(slot[2]), int(slot[3], 16)))
        return max(found, default=None)

    def _journal(self) -> None:
        epochs = [int(p.stem) for p in (self.root / "manifest").glob("*.journal")]
        for epoch in sorted(epochs, reverse=True):
            head = self._head(epoch)
            if head is not None:
                break
        else:
            raise Refused("no manifest")
        length, self.seq, crc = head
        data = (self.root / "manifest" / f"{epoch}.journal").read_bytes()[:length]
        if len(data) < length or crc32c(data) != crc or not data.endswith(b"\n"):
            raise Refused("journal")
        number = None
        for raw in data[:-1].split(b"\n"):
            if int(raw[:8], 16) != crc32c(raw[9:]):
                raise Refused("line")
            line = json.loads(raw[9:])
            if number is not None and line["seq"] != number + 1:
                raise Refused("number")
            number = line["seq"]
            getattr(self, "_line_" + line["t"])(line)
        if number != self.seq:
            raise Refused("head")

    def _line_checkpoint(self, line: dict[str, Any]) -> None:
        if (
            line["magic"] != "keyfold journal"
            or line["version"] != 2
            or line["changelog"] != self.identity["uuid"]
        ):
            raise Refused("another changelog")
        self.partitions: list[dict[str, Any]] = line["partitions"]
        for p in self.partitions:
            for segment in p["segments"]:
                if "marks" in segment:
                    segment["crc"] = segment.pop("marks")[-1][2]
        self.commits: list[dict[str, Any]] = line["commits"]
        self.apps: dict[str, dict[str, Any]] = line["apps"]
        self.anchors = {a["name"]: a for a in line["anchors"]}

    def _line_commit(self, line: dict[str, Any]) -> None:
        self._line_seal(line)
        commit = {**line, "ends": [p["end"] for p in self.partitions], "until": -1}
        self.commits.append(commit)
        self.apps[line["app"]] = commit
        for name in line.get("unanchor", ()):
            del self.anchors[name]

    def _line_seal(self, line: dict[str, Any]) -> None:
        for number, pieces in line["parts"].items():
            p = self.partitions[int(number)]
            for piece in pieces:
                if p["segments"] and p["segments"][-1]["file"] == piece["file"]:
                    p["segments"].pop()
                p["segments"].append(piece)
                p["end"] = piece["next"]

    def _line_swap(self, line: dict[str, Any]) -> None:
        p = self.partitions[line["partition"]]
        self._replace(p, line["out"], line["in"])
        for name in ("clean_end", "unique_end", "passes", "splits"):
            p[name] = line[name]

    def _line_delete(self, line: dict[str, Any]) -> None:
        p = self.partitions[line["partition"]]
        self._replace(p, line["out"], [])
        start = p["start"] = line["start"]
        p["clean_end"], p["unique_end"] = max(p["clean_end"], start), max(p["unique_end"], start)
        p["splits"] = [x for x in p["splits"] if x > start]

    def _line_rollback(self, line: dict[str, Any]) -> None:
        for number, (p, end) in enumerate(zip(self.partitions, line["ends"], strict=True)):
            part = line["parts"].get(str(number), {"out": [], "in": []})
            self._replace(p, part["out"], part["in"])
            p["end"] = end
            p["clean_end"], p["unique_end"] = min(p["clean_end"], end), min(p["unique_end"], end)
            p["splits"] = [x for x in p["splits"] if x < end]
            p["cuts"] = [*p["cuts"], end]
        self.commits = [c for c in self.commits if c["commit"] <= line["commit"]]
        self.apps = {c["app"]: c for c in self.commits}
        self.anchors = {k: a for k, a in self.anchors.items() if a["commit"] <= line["commit"]}

    def _line_anchor(self, line: dict[str, Any]) -> None:
        self.anchors[line["name"]] = line

    def _line_unanchor(self, line: dict[str, Any]) -> None:
        del self.anchors[line["name"]]

    def _line_uncleanable(self, line: dict[str, Any]) -> None:
        self.partitions[line["partition"]]["uncleanable"] = line["reason"]

    @staticmethod
    def _replace(p: dict[str, Any], out: list[str], added: list[dict[str, Any]]) -> None:
        for segment in added:
            if "marks" in segment:
                segment["crc"] = segment.pop("marks")[-1][2]
        kept = [s for s in p["segments"] if s["file"] not in out]
        p["segments"] = sorted((*kept, *added), key=lambda s: (s["base"], s["next"]))

    # -- records ---------------------------------------------------------------------------------------------

    def records(self, partition: int) -> Iterator[tuple[int, int, bytes, Any, Any]]:
        """Offset, timestamp in ms, key, value and headers of every record that is there, in order."""
        p = self.partitions[partition]
        last = p["start"] - 1
        for segment in p["segments"]:
            data = self._bytes(self.root / str(partition) / segment["file"], segment)
            with pa.ipc.open_stream(data) as stream:
                if stream.schema.metadata != {b"keyfold.magic": b"segment", b"keyfold.version": b"2"}:
                    raise Refused("not a segment")
                self._check_values(stream.schema.field("value").type)
                for batch in stream:
                    for row in batch.set_column(
                        1, "ms", batch.column("timestamp").cast(pa.int64())
                    ).to_pylist():
                        if not (max(last + 1, segment["base"]) <= row["offset"] < segment["next"]):
                            raise Refused("offsets")
                        last = row["offset"]
                        yield last, row["ms"], row["key"], self._current(row["value"]), row["headers"]

    def _check_values(self, kind: pa.DataType) -> None:
        schemas = [value_type(columns) for columns in self.value_columns()] or [pa.binary()]
        if kind not in schemas:
            raise Refused("columns")

    def _bytes(self, path: Path, segment: dict[str, Any]) -> bytes:
        data = path.read_bytes()
        size = segment["size"]
        if "index_crc" not in segment:
            if len(data) < size or crc32c(data[:size]) != segment["crc"]:
                raise Refused(path.name)
            return data[:size]
        index = path.with_suffix(".index").read_bytes()
        if crc32c(index) != segment["index_crc"] or data[size : size + 8] != END:
            raise Refused(path.name)
        magic, version, _, total, blocks, header, header_crc = INDEX.unpack_from(index)
        if (magic, version, total) != (b"KFIX", 2, size) or crc32c(data[:header]) != header_crc:
            raise Refused(path.name)
        position = header
        for i in range(blocks):
            _, _, at, length, _, _, crc = ENTRY.unpack_from(index, INDEX.size + i * ENTRY.size)
            if at != position or crc32c(data[at : at + length]) != crc:
                raise Refused(path.name)
            position += length
        if position != size:
            raise Refused(path.name)
        return data[: size + 8]

    # -- the state -------------------------------------------------------------------------------------------

    def state(self, ends: list[int] | None = None) -> dict[bytes, Any]:
        """The last value of every key as of these end offsets, by default of now."""
        found: dict[bytes, Any] = {}
        for number, p in enumerate(self.partitions):
            end = p["end"] if ends is None else ends[number]
            gone = end < p["start"] or (p["start"] < end < p["clean_end"] and end not in p["splits"])
            if gone:
                raise Refused("the state there is gone")
            for offset, _, key, value, _ in self.records(number):
                if offset >= end:
                    break
                if value is None:
                    found.pop(key, None)
                else:
                    found[key] = value
        return found

    def typed_state(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        """The same with typed columns: keys by the values of the key columns."""
        return {tuple(read_key(key, self.key_types())): value for key, value in self.state().items()}
