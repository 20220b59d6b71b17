"""Reads how a running query begins from its plan in the JVM.

Spark's checkpoint says where each batch ends. Only the plan says where the first batch begins: the relation
of each source has the requested start offset. Sources of Spark's v1 interface, such as files, have no such
offset.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from keyfold.checkpoints.manifest.resumption import Operator, QueryStart
from keyfold.checkpoints.manifest.source_offsets import Begin, beginning_of, is_seed, seed_of

#: In the metadata of a column of an initial state: `{"changelog": uuid, "commit": number}`.
STATE_OF: Final = "keyfold.state"

#: Spark's stateful operators, by class name.
_STATEFUL: Final = (
    *("Aggregate", "Deduplicate", "DeduplicateWithinWatermark", "Distinct", "GlobalLimit"),
    *("FlatMapGroupsWithState", "FlatMapGroupsInPandasWithState"),
    *("TransformWithState", "TransformWithStateInPySpark"),
)
_WITH_INITIAL_STATE: Final = ("TransformWithState", "TransformWithStateInPySpark", "FlatMapGroupsWithState")
_SOURCE: Final = "StreamingDataSourceV2ScanRelation"


def elements(sequence: Any) -> list[Any]:
    """The elements of a Scala sequence."""
    return [sequence.apply(i) for i in range(sequence.size())]


def kind_of(node: Any) -> str:
    """The class name of a node."""
    return str(node.getClass().getSimpleName())


def stateful(plan: Any) -> Iterator[Any]:
    """The operators of a logical plan that keep state between batches."""
    for node in _nodes(plan):
        if not node.isStreaming():
            continue
        both = kind_of(node) == "Join" and all(below.isStreaming() for below in elements(node.children()))
        if both or kind_of(node) in _STATEFUL:
            yield node


def query_start(execution: Any, source: Sequence[str], previous: Sequence[str]) -> QueryStart:
    """How the query begins, read during the batch that it is computing.

    Args:
        execution: The query's object in the JVM.
        source, previous: The source offsets after and before that batch, from the checkpoint. `previous` is
            empty for the query's first batch.
    """
    streams = elements(execution.sources())
    known = len(previous) == len(source)
    begins: list[str | None] = list(previous) if known else _begins(execution, streams, source)
    with_loss = _with_loss(execution.logicalPlan(), streams)
    operators = [_operator(node, streams, source) for node in stateful(execution.logicalPlan())]
    events = [Begin(b, n in with_loss) for n, b in enumerate(begins) if not is_seed(source[n])]
    return QueryStart(tuple(events), tuple(operators))


def _begins(execution: Any, streams: list[Any], source: Sequence[str]) -> list[str | None]:
    begins: list[str | None] = [None] * len(source)
    for node in _nodes(execution.lastExecution().logical()):
        if kind_of(node) != _SOURCE or node.startOffset().isEmpty() or node.endOffset().isEmpty():
            continue
        begin, end = (str(o.get().json()) for o in (node.startOffset(), node.endOffset()))
        for number in _numbers(node, streams):
            # Named sources are stored in another order.
            if number < len(source) and source[number] == end:
                begins[number] = begin
    return [beginning_of(end, begin) for end, begin in zip(source, begins, strict=True)]


def _operator(node: Any, streams: list[Any], source: Sequence[str]) -> Operator:
    """An operator with its initial states: seeds among its sources, or its initial state."""
    states = set()
    for below in _nodes(node):
        if kind_of(below) == _SOURCE:
            states |= {seed_of(source[n]) for n in _numbers(below, streams) if n < len(source)}
    if kind_of(node) in _WITH_INITIAL_STATE and node.hasInitialState():
        for column in elements(node.initialState().output()):
            state = json.loads(column.metadata().json()).get(STATE_OF)
            states |= {(state["changelog"], state["commit"])} if state else set()
    return Operator(kind_of(node), tuple(sorted(state for state in states if state is not None)))


def _with_loss(plan: Any, streams: list[Any]) -> set[int]:
    """The numbers of the sources that may skip lost data."""
    found: set[int] = set()
    for node in _nodes(plan):
        if kind_of(node) == _SOURCE:
            option = node.relation().options().get("failOnDataLoss")
            if str(option).lower() == "false":
                found |= set(_numbers(node, streams))
    return found


def _numbers(relation: Any, streams: list[Any]) -> list[int]:
    """The query's sources that a relation reads. The same DataFrame can occur in a query twice."""
    return [n for n, stream in enumerate(streams) if stream.equals(relation.stream())]


def _nodes(plan: Any) -> Iterator[Any]:
    waiting = [plan]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += elements(node.children())
