"""Runs one micro-batch of a task, from Arrow batches to the changes to commit. No Spark."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Protocol, cast

import pyarrow as pa

from keyfold.checkpoints.engine import Engine
from keyfold.checkpoints.transaction import Transaction
from keyfold.sink.named_stores import NamedStores, Store, checked_stores, has_other_keys, prefix_of
from keyfold.sink.ttl import Sweep, Sweeper
from keyfold.statestore.errors import ConfigError
from keyfold.statestore.kv.api import RecordStore

Call = Callable[..., object]


class TaskLike(Protocol):
    """Any object with this method is a task. `Task` lists its optional members."""

    def process(self, records: pa.RecordBatch, store: Any) -> None: ...


class Task(ABC):
    """A stateful task in the style of Samza. A task class may inherit from this class, but need not.

    Attributes:
        stores: The stores of the task by name; `store["name"]` is one of them. None: `store` itself is a
            single store of bytes.
        window_interval: The minimum time between calls of `window`, by the writer's clock. None: after every
            batch.

    A task has one store over all partitions of the changelog, not one per partition as in Samza. The
    partition count does not affect processing, and another changelog may have more partitions.
    """

    stores: ClassVar[Mapping[str, Store] | None] = None
    window_interval: ClassVar[timedelta | None] = None

    @abstractmethod
    def process(self, records: pa.RecordBatch, store: Any) -> None:
        """Called for each Arrow batch with rows of a micro-batch. It must not keep its arguments."""

    def window(self, store: Any) -> None:  # noqa: B027 - does nothing by default
        """Called after the last `process` of a micro-batch. Its writes are part of the same commit.

        It is called in the first micro-batch of a process, and then in the first one after each
        `window_interval`. It is not called without a micro-batch: a query without new data calls nothing.
        """


@dataclass(frozen=True)
class TaskResult:
    """The result of a micro-batch. Commit `changes`, then call `committed`."""

    changes: pa.Table
    committed: Callable[[], None]


class TaskRunner:
    """Runs the micro-batches of one task, one at a time, and tracks when its windows and expiries are due.

    Raises `ConfigError` if the task does not have the form of `Task`.
    """

    def __init__(self, task: TaskLike) -> None:
        self._process = _method(task, "process", ("records", "store"))
        self._window = _method(task, "window", ("store",)) if getattr(task, "window", None) else None
        self._interval_ms = _interval_ms(getattr(task, "window_interval", None), self._window)
        stores = getattr(task, "stores", None)
        self._stores = None if stores is None else checked_stores(stores)
        self._windowed_ms: int | None = None
        self._engine: Engine | None = None
        self._sweeper: Sweeper | None = None

    def run(self, engine: Engine, batches: Iterable[pa.RecordBatch]) -> TaskResult:
        """Call the task for one micro-batch. The caller holds `engine.transactions` until it has committed.

        Raises:
            ConfigError: the changelog has keys of a store that the task does not name.
            Whatever the task raises; Damaged, StorageFailed: see there.
        """
        now_ms = engine.clock_ms()
        if self._stores is None:
            with engine.transaction() as store:
                windowed = self._call(store, batches, now_ms)
                return TaskResult(store.changes(), lambda: self._committed(windowed, now_ms, None))
        with engine.pin() as state:
            base: Any = engine.last_values().snapshot()
            with closing(base):
                sweeper = self._sweeper_of(engine, base, self._stores)
                sweep = sweeper.look(state, base, now_ms)
                with closing(NamedStores(base, self._stores, now_ms, sweep.keys)) as stores:
                    windowed = self._call(stores, batches, now_ms)
                    return TaskResult(stores.changes(), lambda: self._committed(windowed, now_ms, sweep))

    def _call(self, store: Transaction | NamedStores, batches: Iterable[pa.RecordBatch], now_ms: int) -> bool:
        for batch in batches:
            if batch.num_rows:
                self._process(batch, store)
        if self._window is None or not self._window_due(now_ms):
            return False
        self._window(store)
        return True

    def _window_due(self, now_ms: int) -> bool:
        """True also if the clock went backwards: then the time since the last window is unknown."""
        last_ms = self._windowed_ms
        return last_ms is None or not last_ms <= now_ms < last_ms + self._interval_ms

    def _committed(self, windowed: bool, now_ms: int, sweep: Sweep | None) -> None:
        if windowed:
            self._windowed_ms = now_ms
        if sweep is not None and self._sweeper is not None:
            self._sweeper.done(sweep)

    def _sweeper_of(self, engine: Engine, base: RecordStore, stores: Mapping[str, Store]) -> Sweeper:
        """The sweeper of this opening of the changelog. Its keys are checked once."""
        if self._engine is not engine or self._sweeper is None:
            if has_other_keys(base, stores):
                raise ConfigError(
                    "The changelog has keys that belong to no store of this task.", path=engine.root,
                    expected=f"keys of {', '.join(stores)}", found="other keys as well",
                    remedy="a renamed store keeps its old name in the changelog: declare the old name again. "
                    "Keep declaring a store that you no longer need until the task has deleted its entries",
                )  # fmt: skip
            ttls = {prefix_of(n): store.ttl_ms for n, store in stores.items() if store.ttl_ms is not None}
            self._sweeper, self._engine = Sweeper(engine.files, engine.root, ttls), engine
        return self._sweeper


def is_task(process: object) -> bool:
    """Whether it is an object with `process`, not a function. Raises `ConfigError` if it is neither."""
    if isinstance(process, type):
        raise ConfigError(
            "Not a task: a class instead of an object.", expected=f"{process.__name__}(…)",
            found=f"the class {process.__name__}", remedy=f"create an instance: {process.__name__}()",
        )  # fmt: skip
    if hasattr(process, "process"):
        return True
    if callable(process):
        return False
    raise ConfigError(
        "Not a task.", expected="a method process(records, store), or a function of (df, store)",
        found=f"{type(process).__name__} without process", remedy="add the method process",
    )  # fmt: skip


def _method(task: object, name: str, arguments: tuple[str, ...]) -> Call:
    """A method of a task that takes these arguments. Raises `ConfigError`."""
    method = getattr(task, name, None)
    wanted = f"{name}({', '.join(arguments)})"
    if not callable(method):
        raise ConfigError(
            f"The task's {name} is not a method.", expected=wanted, found=type(method).__name__,
            remedy=f"define a method {wanted}",
        )  # fmt: skip
    found = _signature(method)
    if found is not None:
        try:
            found.bind(*arguments)
        except TypeError:
            raise ConfigError(
                f"The task's {name} has the wrong parameters.", expected=wanted, found=f"{name}{found}",
                remedy=f"define a method {wanted}",
            ) from None  # fmt: skip
    return cast(Call, method)


def _signature(method: Call) -> inspect.Signature | None:
    try:
        return inspect.signature(method)
    except ValueError:  # some functions that are not written in Python
        return None


def _interval_ms(interval: object, window: Call | None) -> int:
    if interval is None:
        return 0
    if not (isinstance(interval, timedelta) and interval >= timedelta(milliseconds=1)):
        raise ConfigError(
            "The window_interval is invalid.", expected="a timedelta of 1 ms or more, or None",
            found=repr(interval), remedy="write for example window_interval = timedelta(minutes=1)",
        )  # fmt: skip
    if window is None:
        raise ConfigError(
            "The task has a window_interval but no method window.", expected="a method window(store)",
            found="none", remedy="define the method, or leave out the window_interval",
        )  # fmt: skip
    return interval // timedelta(milliseconds=1)
