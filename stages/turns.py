"""Turns of the stages of one worker: which of them computes while the others wait.

A position is (iteration, part of the batch, place in the flow). The lowest one of all stages that
are under way has its turn, and keeps it while it waits for an input: whatever it waits for has a
lower position still, here or in another pool, so some stage of the run can always go on. One that
comes late with a lower position (another attempt, say) has its turn when the present one is through
with its part or waits: stages share engines and trainers, so never do two compute. Positions depend
on nothing that is measured, so all ranks of a pool take the same turns, as collectives need.

What has no position fills the time in which all stages wait for inputs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType

from rlinf.errors import RequeueRequested

Position = tuple[int, int, int]


class Turns:
    """The positions of all stages of a worker that are under way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Turn, Position] = {}
        self._computes: Turn | None = None
        self._ready: set[Turn] = set()
        """Stages that have their inputs, and would compute."""
        self._closed = False

    def close(self) -> None:
        """There are no more turns: the process ends, which must not wait for waiting stages."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def enter(self, position: Position) -> Turn:
        """A place in the order, to be left by its context manager."""
        turn = Turn(self)
        self.place(turn, position)
        return turn

    def place(self, turn: Turn, position: Position | None) -> None:
        """Put a stage at another position; None: it is through."""
        with self._changed:
            if position is None:
                self._waiting.pop(turn, None)
                self._release(turn)
            else:
                self._waiting[turn] = position
            self._changed.notify_all()

    def wait(self, turn: Turn) -> None:
        """Wait until no other stage is before this one, and none computes.

        Raises:
            RequeueRequested: there are no more turns.
        """
        with self._changed:
            self._release(turn)
            self._ready.add(turn)
            try:
                while self._computes or not self._first(turn):
                    self._pause()
            finally:
                self._ready.discard(turn)
            self._computes = turn

    @property
    def busy(self) -> bool:
        """Whether somebody computes."""
        return self._computes is not None

    @contextlib.contextmanager
    def spare(self) -> Iterator[None]:
        """A time in which no stage computes, for none has its inputs that may go on.

        Raises:
            RequeueRequested: there are no more turns.
        """
        turn = Turn(self)
        with self._changed:
            while self._computes or any(self._first(stage) for stage in self._ready):
                self._pause()
            self._computes = turn
        try:
            yield
        finally:
            with self._changed:
                self._release(turn)

    def _first(self, turn: Turn) -> bool:
        return self._waiting[turn] <= min(self._waiting.values())

    def _pause(self) -> None:
        if self._closed:
            raise RequeueRequested("the worker ends")
        self._changed.wait()

    @contextlib.contextmanager
    def resting(self, turn: Turn) -> Iterator[None]:
        """While a stage that has its turn waits, others before it may compute."""
        with self._changed:
            had = self._release(turn)
        yield
        if had:
            self.wait(turn)

    def _release(self, turn: Turn) -> bool:
        """Whether it computed until now."""
        if self._computes is not turn:
            return False
        self._computes = None
        self._changed.notify_all()
        return True

    def position(self, turn: Turn) -> Position:
        return self._waiting[turn]


class Aside(contextlib.nullcontext[None]):
    """In place of a turn: of a stage that computes nothing, or has a queue of its own."""

    def part(self, number: int) -> None:
        """Go on to a part of the batch: no other stage is in the way."""

    def resting(self) -> contextlib.AbstractContextManager[None]:
        """While it waits for an input."""
        return contextlib.nullcontext()


class Turn:
    """One stage's place; a context manager that begins with its first turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def part(self, number: int) -> None:
        """Go on to a part of the batch, after all who are still at an earlier one."""
        iteration, part, place = self._turns.position(self)
        self._turns.place(self, (iteration, max(part, number), place))
        self._turns.wait(self)

    def resting(self) -> contextlib.AbstractContextManager[None]:
        """While it waits for an input; ends with its turn again."""
        return self._turns.resting(self)

    def __enter__(self) -> Turn:
        self._turns.wait(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._turns.place(self, None)
