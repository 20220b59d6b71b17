"""What becomes of changes that are not certain when the power goes: of one write, and of all of them.

The rules stand in `powerloss`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

SECTOR_BYTES: Final = 512


@dataclass(eq=False)
class Change:
    """One write to a file or one change of a directory's names; the numbers are moments of the recorder."""

    start: int
    #: when a sync that covers it returned; None: the change may be lost
    certain: int | None = None
    #: a sync that should have covered it failed
    forgotten: bool = False


@dataclass(eq=False)
class Write(Change):
    """`data` at `position`, or, without data, a cut at `position`."""

    position: int = 0
    data: bytes | None = None


@dataclass(eq=False)
class Link(Change):
    """Names that are set, or removed (None), at once."""

    names: dict[str, Node | None] = field(default_factory=dict)


@dataclass(eq=False)
class Node:
    """A file or a directory, whatever its name is: its changes in the order in which they ended."""

    number: int
    label: str
    is_directory: bool
    writes: list[Write] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    #: the names as they are now
    live: dict[str, Node] = field(default_factory=dict)

    def changes(self) -> Sequence[Change]:
        return self.links if self.is_directory else self.writes

    def uncertain(self, point: int) -> list[Change]:
        return [c for c in self.changes() if c.start < point and not is_certain(c, point)]


def is_certain(change: Change, point: int) -> bool:
    return change.certain is not None and change.certain < point


# -- what becomes of one uncertain write -----------------------------------------------------------------

Fate = Callable[[bytearray, Write], None]


def kept(content: bytearray, write: Write) -> None:
    if write.data is None:
        del content[write.position :]
    length = write.position if write.data is None else write.position + len(write.data)
    _lengthen(content, length)
    if write.data is not None:
        content[write.position : length] = write.data


def lost(content: bytearray, write: Write) -> None:
    """Nothing of it reached the disk."""


def zeros(content: bytearray, write: Write) -> None:
    """The length reached the disk, the bytes did not; bytes that were there before stay."""
    if write.data is None:
        kept(content, write)
    else:
        _lengthen(content, write.position + len(write.data))


def prefix(length: int) -> Fate:
    """Only the first bytes reached the disk, and the file's length is what they need."""

    def cut(content: bytearray, write: Write) -> None:
        if write.data is not None and length > 0:
            kept(content, Write(0, position=write.position, data=write.data[:length]))

    return cut


def sectors(keeps: Callable[[int], bool]) -> Fate:
    """The whole length and those sectors reached the disk for whose number in the file `keeps` is true."""

    def torn(content: bytearray, write: Write) -> None:
        zeros(content, write)
        start = write.position
        data = write.data or b""
        while data:
            length = SECTOR_BYTES - start % SECTOR_BYTES
            if keeps(start // SECTOR_BYTES):
                content[start : start + len(data[:length])] = data[:length]
            start, data = start + length, data[length:]

    return torn


def half(content: bytearray, write: Write) -> None:
    prefix(len(write.data or b"") // 2)(content, write)


def _lengthen(content: bytearray, length: int) -> None:
    content.extend(bytes(max(0, length - len(content))))


# -- what becomes of all uncertain changes ---------------------------------------------------------------


class Choice:
    """Decides for each uncertain change. `fate` goes for all writes of all files, `names` for all names."""

    def __init__(self, name: str, fate: Fate, names: bool) -> None:
        self.name = name
        self._fate = fate
        self._names = names

    def fates(self, node: Node, writes: Sequence[Change]) -> Sequence[Fate]:
        return [self._fate] * len(writes)

    def keeps(self, node: Node, links: Sequence[Change]) -> Sequence[bool]:
        return [self._names] * len(links)


#: The corners, by name. `everything` is what kill -9 leaves behind.
CORNERS: Final = {
    choice.name: choice
    for choice in (
        Choice("nothing", lost, names=False),
        Choice("everything", kept, names=True),
        Choice("names without data", lost, names=True),
        Choice("data without names", kept, names=False),
        Choice("lengths without data", zeros, names=True),
        Choice("half of each write", half, names=True),
        Choice("every other sector", sectors(lambda n: n % 2 == 1), names=True),
    )
}


class Apart(Choice):
    """The writes of one file, or one change of names, meet the other fate than all the rest."""

    def __init__(self, label: str, chosen: Sequence[Change], keeps: bool) -> None:
        super().__init__(f"{'only' if keeps else 'all but'} {label}", lost if keeps else kept, not keeps)
        self._chosen = set(chosen)
        self._other: Fate = kept if keeps else lost

    def fates(self, node: Node, writes: Sequence[Change]) -> Sequence[Fate]:
        return [self._other if w in self._chosen else self._fate for w in writes]

    def keeps(self, node: Node, links: Sequence[Change]) -> Sequence[bool]:
        return [self._names != (link in self._chosen) for link in links]


def units(node: Node, point: int) -> list[tuple[str, list[Change]]]:
    """What is lost or kept together, with a label: all uncertain writes of a file; each change of names."""
    uncertain = node.uncertain(point)
    if not node.is_directory:
        return [(node.label, uncertain)] if uncertain else []
    labels = (f"names {sorted(c.names)} of {node.label}" for c in uncertain if isinstance(c, Link))
    return [(label, [change]) for label, change in zip(labels, uncertain, strict=True)]


class Drawn(Choice):
    """Each file and each name for itself, drawn from a seed: the same for the same seed, point and file."""

    def __init__(self, seed: int, point: int) -> None:
        super().__init__(f"seed {seed}", kept, names=True)
        self._seed = f"{seed}/{point}"

    def fates(self, node: Node, writes: Sequence[Change]) -> Sequence[Fate]:
        draw = random.Random(f"{self._seed}/{node.number}")
        how = draw.choice(("all", "none", "lengths", "cut", "cut", "scattered"))
        if how == "cut":
            at = draw.randrange(len(writes) + 1)
            return (
                [kept] * at + [_torn(draw, w) for w in writes[at : at + 1]] + [lost] * (len(writes) - at - 1)
            )
        if how == "scattered":
            return [draw.choice((kept, lost, zeros, _torn(draw, w))) for w in writes]
        return [{"all": kept, "none": lost, "lengths": zeros}[how]] * len(writes)

    def keeps(self, node: Node, links: Sequence[Change]) -> Sequence[bool]:
        draw = random.Random(f"{self._seed}/{node.number}")
        return [draw.random() < 0.5 for _ in links]


def _torn(draw: random.Random, write: Change) -> Fate:
    assert isinstance(write, Write)
    if draw.random() < 0.5:
        return prefix(draw.randrange(len(write.data or b"") + 1))
    salt = draw.random()
    return sectors(lambda n: random.Random(f"{salt}/{n}").random() < 0.5)


# -- what is left of one file or directory ----------------------------------------------------------------


class Moment:
    """What one file or directory is, by what becomes of the changes that were not certain at that moment.

    Most had none such, and are the same for every choice.
    """

    def __init__(self, point: int) -> None:
        self._point = point
        self._uncertain: dict[int, list[Change]] = {}
        self._certain_content: dict[int, bytes] = {}
        self._certain_names: dict[int, dict[str, Node]] = {}

    def names(self, node: Node, choice: Choice) -> dict[str, Node]:
        found = self._certain_names.get(node.number)
        if found is not None:
            return found
        uncertain = self._uncertain_of(node)
        keeps = dict(zip(map(id, uncertain), choice.keeps(node, uncertain), strict=True))
        names: dict[str, Node] = {}
        for link in node.links:
            if is_certain(link, self._point) or keeps.get(id(link)):
                for name, child in link.names.items():
                    if child is None:
                        names.pop(name, None)
                    else:
                        names[name] = child
        if not uncertain:
            self._certain_names[node.number] = names
        return names

    def content(self, node: Node, choice: Choice) -> bytes:
        found = self._certain_content.get(node.number)
        if found is not None:
            return found
        uncertain = self._uncertain_of(node)
        fates = dict(zip(map(id, uncertain), choice.fates(node, uncertain), strict=True))
        content = bytearray()
        for write in node.writes:
            if is_certain(write, self._point):
                kept(content, write)
            elif id(write) in fates:
                fates[id(write)](content, write)
        if not uncertain:
            self._certain_content[node.number] = bytes(content)
        return bytes(content)

    def _uncertain_of(self, node: Node) -> list[Change]:
        found = self._uncertain.get(node.number)
        if found is None:
            found = self._uncertain[node.number] = node.uncertain(self._point)
        return found
