"""How a running query begins, read from its plan in the JVM.

Spark's checkpoint says where each batch ends; where the first one begins is known to its plan only: the
relation of each source has the offset that the source was asked for. Sources of Spark's first interface, such
as files, have no such offset.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from keyfold.checkpoints.manifest.resumption import Operator, QueryStart
from keyfold.checkpoints.manifest.source_offsets import Begin, beginning_of, is_seed, seed_of

#: In the metadata of a column of an initial state: `{"changelog": uuid, "commit": number}`.
STATE_OF: Final = "keyfold.state"

#: Operators of Spark that keep state in a stream, by the names of their classes.
_STATEFUL: Final = (
    *("Aggregate", "Deduplicate", "DeduplicateWithinWatermark", "Distinct", "GlobalLimit"),
    *("FlatMapGroupsWithState", "FlatMapGroupsInPandasWithState"),
    *("TransformWithState", "TransformWithStateInPySpark"),
)
_WITH_INITIAL_STATE: Final = ("TransformWithState", "TransformWithStateInPySpark", "FlatMapGroupsWithState")
_SOURCE: Final = "StreamingDataSourceV2ScanRelation"


def elements(sequence: Any) -> list[Any]:
    """The elements of a sequence of Scala."""
    return [sequence.apply(i) for i in range(sequence.size())]


def kind_of(node: Any) -> str:
    """The name of a node's class."""
    return str(node.getClass().getSimpleName())


def stateful(plan: Any) -> Iterator[Any]:
    """The operators of a logical plan that keep state from batch to batch."""
    for node in _nodes(plan):
        if not node.isStreaming():
            continue
        both = kind_of(node) == "Join" and all(below.isStreaming() for below in elements(node.children()))
        if both or kind_of(node) in _STATEFUL:
            yield node


def query_start(execution: Any, source: Sequence[str], previous: Sequence[str]) -> QueryStart:
    """How the query begins with the batch that it is computing.

    Args:
        execution: the JVM's object of the query.
        source, previous: where the sources stand after that batch and before it, from the checkpoint; of the
            query's first batch nothing is known before.
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
            # Sources with names are kept in another order.
            if number < len(source) and source[number] == end:
                begins[number] = begin
    return [beginning_of(end, begin) for end, begin in zip(source, begins, strict=True)]


def _operator(node: Any, streams: list[Any], source: Sequence[str]) -> Operator:
    """With the states that come to it: seeds among its sources, or its initial state."""
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
    """The numbers of the sources that may leave out what is gone."""
    found: set[int] = set()
    for node in _nodes(plan):
        if kind_of(node) == _SOURCE:
            option = node.relation().options().get("failOnDataLoss")
            if str(option).lower() == "false":
                found |= set(_numbers(node, streams))
    return found


def _numbers(relation: Any, streams: list[Any]) -> list[int]:
    """Which of the query's sources a relation reads; the same DataFrame can be in a query twice."""
    return [n for n, stream in enumerate(streams) if stream.equals(relation.stream())]


def _nodes(plan: Any) -> Iterator[Any]:
    waiting = [plan]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += elements(node.children())
