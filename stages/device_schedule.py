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


class DeviceSchedule:
    """The positions of all stages of a worker that are under way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[DeviceSlot, Position] = {}
        self._computes: DeviceSlot | None = None
        self._ready: set[DeviceSlot] = set()
        """Stages that have their inputs, and would compute."""
        self._closed = False

    def close(self) -> None:
        """There are no more turns: the process ends, which must not wait for waiting stages."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def add(self, position: Position) -> DeviceSlot:
        """A place in the order, to be left by its context manager."""
        turn = DeviceSlot(self)
        self.move(turn, position)
        return turn

    def move(self, slot: DeviceSlot, position: Position | None) -> None:
        """Put a stage at another position; None: it is through."""
        with self._changed:
            if position is None:
                self._waiting.pop(slot, None)
                self._release(slot)
            else:
                self._waiting[slot] = position
            self._changed.notify_all()

    def acquire(self, slot: DeviceSlot) -> None:
        """Wait until no other stage is before this one, and none computes.

        Raises:
            RequeueRequested: there are no more turns.
        """
        with self._changed:
            self._release(slot)
            self._ready.add(slot)
            try:
                while self._computes or not self._first(slot):
                    self._pause()
            finally:
                self._ready.discard(slot)
            self._computes = slot

    @property
    def is_busy(self) -> bool:
        """Whether somebody computes."""
        return self._computes is not None

    @contextlib.contextmanager
    def idle_time(self) -> Iterator[None]:
        """A time in which no stage computes, for none has its inputs that may go on.

        Raises:
            RequeueRequested: there are no more turns.
        """
        turn = DeviceSlot(self)
        with self._changed:
            while self._computes or any(self._first(stage) for stage in self._ready):
                self._pause()
            self._computes = turn
        try:
            yield
        finally:
            with self._changed:
                self._release(turn)

    def _first(self, turn: DeviceSlot) -> bool:
        return self._waiting[turn] <= min(self._waiting.values())

    def _pause(self) -> None:
        if self._closed:
            raise RequeueRequested("the worker ends")
        self._changed.wait()

    @contextlib.contextmanager
    def released(self, slot: DeviceSlot) -> Iterator[None]:
        """While a stage that has its turn waits, others before it may compute."""
        with self._changed:
            had = self._release(slot)
        yield
        if had:
            self.acquire(slot)

    def _release(self, turn: DeviceSlot) -> bool:
        """Whether it computed until now."""
        if self._computes is not turn:
            return False
        self._computes = None
        self._changed.notify_all()
        return True

    def position(self, slot: DeviceSlot) -> Position:
        return self._waiting[slot]


class Unscheduled(contextlib.nullcontext[None]):
    """In place of a turn: of a stage that computes nothing, or has a queue of its own."""

    def start_chunk(self, number: int) -> None:
        """Go on to a part of the batch: no other stage is in the way."""

    def released(self) -> contextlib.AbstractContextManager[None]:
        """While it waits for an input."""
        return contextlib.nullcontext()


class DeviceSlot:
    """One stage's place; a context manager that begins with its first turn."""

    def __init__(self, turns: DeviceSchedule) -> None:
        self._turns = turns

    def start_chunk(self, number: int) -> None:
        """Go on to a part of the batch, after all who are still at an earlier one."""
        iteration, part, place = self._turns.position(self)
        self._turns.move(self, (iteration, max(part, number), place))
        self._turns.acquire(self)

    def released(self) -> contextlib.AbstractContextManager[None]:
        """While it waits for an input; ends with its turn again."""
        return self._turns.released(self)

    def __enter__(self) -> DeviceSlot:
        self._turns.acquire(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._turns.move(self, None)
