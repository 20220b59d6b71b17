"""One micro-batch of a task, from Arrow batches to the changes that its commit has to write. No Spark."""

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
    """Any object with this method is a task; `Task` says what it may have besides."""

    def process(self, records: pa.RecordBatch, store: Any) -> None: ...


class Task(ABC):
    """A job in Samza's manner. A class may inherit from this one, but need not.

    Attributes:
        stores: its stores by their names; then `store["name"]` is one of them. None: `store` itself is one
            store, of bytes.
        window_interval: `window` is called at most so often, by the writer's clock; None: after every batch.

    One task has one store over all partitions of the changelog, not one per partition as in Samza, so that
    their number says nothing about how keys are processed, and another changelog may have more of them.
    """

    stores: ClassVar[Mapping[str, Store] | None] = None
    window_interval: ClassVar[timedelta | None] = None

    @abstractmethod
    def process(self, records: pa.RecordBatch, store: Any) -> None:
        """Called for each Arrow batch of a micro-batch that has rows; it must keep neither argument."""

    def window(self, store: Any) -> None:  # noqa: B027 - one that does nothing is the default
        """Called behind the last `process` of a micro-batch, whose commit it is part of.

        The first micro-batch of a process calls it, then the first one after each `window_interval`. Without
        a micro-batch there is no window: a query that has no new data calls nothing.
        """


@dataclass(frozen=True)
class TaskResult:
    """A micro-batch that has run. `changes` is what its commit has to write, then call `committed`."""

    changes: pa.Table
    committed: Callable[[], None]


class TaskRunner:
    """Runs the micro-batches of one task, one at a time, and knows when its windows and expiries are due.

    Raises `ConfigError` where the task is not as `Task` says.
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
        """Also where the clock went backwards: nobody knows how long ago the last window was then."""
        last_ms = self._windowed_ms
        return last_ms is None or not last_ms <= now_ms < last_ms + self._interval_ms

    def _committed(self, windowed: bool, now_ms: int, sweep: Sweep | None) -> None:
        if windowed:
            self._windowed_ms = now_ms
        if sweep is not None and self._sweeper is not None:
            self._sweeper.done(sweep)

    def _sweeper_of(self, engine: Engine, base: RecordStore, stores: Mapping[str, Store]) -> Sweeper:
        """That of this opening of the changelog, whose keys are looked at once."""
        if self._engine is not engine or self._sweeper is None:
            if has_other_keys(base, stores):
                raise ConfigError(
                    "The changelog has keys that belong to no store of this task.", path=engine.root,
                    expected=f"keys of {', '.join(stores)}", found="others as well",
                    remedy="a store that was renamed keeps its old name in the changelog: name it so again. "
                    "One that is not wanted any more is named until the task has deleted what is in it",
                )  # fmt: skip
            ttls = {prefix_of(n): store.ttl_ms for n, store in stores.items() if store.ttl_ms is not None}
            self._sweeper, self._engine = Sweeper(engine.files, engine.root, ttls), engine
        return self._sweeper


def is_task(process: object) -> bool:
    """Whether it is an object with `process`, not a function. Raises `ConfigError` where it is neither."""
    if isinstance(process, type):
        raise ConfigError(
            "A task is an object, this is its class.", expected=f"{process.__name__}(…)",
            found=f"the class {process.__name__}", remedy=f"make one: {process.__name__}()",
        )  # fmt: skip
    if hasattr(process, "process"):
        return True
    if callable(process):
        return False
    raise ConfigError(
        "That is no task.", expected="a method process(records, store), or a function of (df, store)",
        found=f"{type(process).__name__} without it", remedy="add the method",
    )  # fmt: skip


def _method(task: object, name: str, arguments: tuple[str, ...]) -> Call:
    """A method of a task that takes so many arguments. Raises `ConfigError`."""
    method = getattr(task, name, None)
    wanted = f"{name}({', '.join(arguments)})"
    if not callable(method):
        raise ConfigError(
            f"The task's {name} cannot be called.", expected=wanted, found=type(method).__name__,
            remedy=f"define a method {wanted}",
        )  # fmt: skip
    found = _signature(method)
    if found is not None:
        try:
            found.bind(*arguments)
        except TypeError:
            raise ConfigError(
                f"The task's {name} takes other arguments.", expected=wanted, found=f"{name}{found}",
                remedy=f"define a method {wanted}",
            ) from None  # fmt: skip
    return cast(Call, method)


def _signature(method: Call) -> inspect.Signature | None:
    try:
        return inspect.signature(method)
    except ValueError:  # of some functions that are not written in Python
        return None


def _interval_ms(interval: object, window: Call | None) -> int:
    if interval is None:
        return 0
    if not (isinstance(interval, timedelta) and interval >= timedelta(milliseconds=1)):
        raise ConfigError(
            "That is no window interval.", expected="a timedelta of a millisecond or more, or None",
            found=repr(interval), remedy="write for example window_interval = timedelta(minutes=1)",
        )  # fmt: skip
    if window is None:
        raise ConfigError(
            "The task has a window_interval, and no window.", expected="a method window(store)",
            found="none", remedy="define it, or leave the interval out",
        )  # fmt: skip
    return interval // timedelta(milliseconds=1)
