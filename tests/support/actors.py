"""Several writers of one changelog, each as a process of its own would be, one file operation at a time.

An actor is a function in a thread of its own. Before each of its operations it stops until the stage lets it
go on. So every order in which operations of several processes can come is a schedule that a test writes down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.faults.inject import Operation, Watched

_PATIENCE_S = 60.0


class Stage:
    """Lets one actor at a time go on."""

    def __init__(self) -> None:
        self._actors: dict[str, _Actor] = {}

    def add(self, name: str, play: Callable[[Stepped], None]) -> None:
        self._actors[name] = _Actor(name, play)

    def steps(self, name: str, count: int | None = None) -> int:
        """Let the actor do so many operations, all that are left with None; returns how many there were."""
        done = 0
        while (count is None or done < count) and self._actors[name].step():
            done += 1
        return done

    def living(self) -> list[str]:
        """The actors that have operations left."""
        return [name for name, actor in self._actors.items() if actor.is_living()]

    def finish(self) -> None:
        """Let all end, one after the other. Raises what an actor has raised and not caught."""
        for name in self._actors:
            self.steps(name)
        for actor in self._actors.values():
            actor.thread.join()
            if actor.failure is not None:
                raise actor.failure


class Stepped(Watched):
    """File operations of one actor; only those of its own thread wait."""

    def __init__(self, actor: _Actor) -> None:
        self._actor = actor

    @contextmanager
    def around(self, operation: Operation) -> Iterator[None]:
        self._actor.wait_for_turn()
        with super().around(operation):
            yield


class _Actor:
    def __init__(self, name: str, play: Callable[[Stepped], None]) -> None:
        self.failure: BaseException | None = None
        self._turns = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._ended = False
        self.thread = threading.Thread(target=self._run, args=(play,), name=name, daemon=True)
        self.thread.start()
        self._wait_until_it_stops()

    def is_living(self) -> bool:
        return not self._ended

    def step(self) -> bool:
        """One operation; False where none is left."""
        if self._ended:
            return False
        self._turns.release()
        self._wait_until_it_stops()
        return True

    def wait_for_turn(self) -> None:
        if threading.current_thread() is self.thread:
            self._stopped.release()
            if not self._turns.acquire(timeout=_PATIENCE_S):
                raise TimeoutError(f"{self.thread.name} was never let go on")

    def _run(self, play: Callable[[Stepped], None]) -> None:
        try:
            play(Stepped(self))
        except BaseException as e:
            self.failure = e
        self._ended = True
        self._stopped.release()

    def _wait_until_it_stops(self) -> None:
        if not self._stopped.acquire(timeout=_PATIENCE_S):
            raise TimeoutError(f"{self.thread.name} does not come to its next operation")
