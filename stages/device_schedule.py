"""The schedule of one worker's device: which stage computes while the others wait.

Every running stage has a position: (iteration, chunk of the batch, index in the flow). The stage
with the lowest position has the device slot, and keeps it while it waits for an input. An input
always comes from a lower position, here or in another pool, so some stage of the run can proceed.

A stage that starts late with a lower position, such as a new attempt, gets the slot when the
present stage finishes its chunk or waits. Two stages never compute at once, because they share
engines and trainers. Positions depend on no measurement, so all ranks of a pool schedule the same
order, as collectives require. Work without a position runs while all stages wait for inputs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType

from rlinf.errors import RequeueRequested

Position = tuple[int, int, int]


class DeviceSchedule:
    """The positions of all running stages of a worker."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[DeviceSlot, Position] = {}
        self._computes: DeviceSlot | None = None
        self._ready: set[DeviceSlot] = set()
        """Stages that have their inputs and wait for the device."""
        self._closed = False

    def close(self) -> None:
        """Close the schedule, so that waiting stages do not delay the end of the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def add(self, position: Position) -> DeviceSlot:
        """Add a stage; return its slot, a context manager that removes it at exit."""
        turn = DeviceSlot(self)
        self.move(turn, position)
        return turn

    def move(self, slot: DeviceSlot, position: Position | None) -> None:
        """Move a stage to another position; None removes it."""
        with self._changed:
            if position is None:
                self._waiting.pop(slot, None)
                self._release(slot)
            else:
                self._waiting[slot] = position
            self._changed.notify_all()

    def acquire(self, slot: DeviceSlot) -> None:
        """Wait until this stage has the lowest position and no stage computes.

        Raises:
            RequeueRequested: the schedule is closed.
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
        """Whether a stage computes."""
        return self._computes is not None

    @contextlib.contextmanager
    def idle_time(self) -> Iterator[None]:
        """Acquire the device while every stage waits for inputs.

        Raises:
            RequeueRequested: the schedule is closed.
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
        """Release the slot of a waiting stage, and acquire it again at exit."""
        with self._changed:
            had = self._release(slot)
        yield
        if had:
            self.acquire(slot)

    def _release(self, turn: DeviceSlot) -> bool:
        """Release the device; return whether this slot had it."""
        if self._computes is not turn:
            return False
        self._computes = None
        self._changed.notify_all()
        return True

    def position(self, slot: DeviceSlot) -> Position:
        return self._waiting[slot]


class Unscheduled(contextlib.nullcontext[None]):
    """A slot for stages that do not compute, or that have a queue of their own."""

    def start_chunk(self, number: int) -> None:
        """Start a chunk of the batch at once."""

    def released(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing while waiting for an input."""
        return contextlib.nullcontext()


class DeviceSlot:
    """The slot of one stage; a context manager that acquires the device at entry."""

    def __init__(self, schedule: DeviceSchedule) -> None:
        self._schedule = schedule

    def start_chunk(self, number: int) -> None:
        """Start a chunk of the batch, after all stages that are at an earlier chunk."""
        iteration, part, place = self._schedule.position(self)
        self._schedule.move(self, (iteration, max(part, number), place))
        self._schedule.acquire(self)

    def released(self) -> contextlib.AbstractContextManager[None]:
        """Release the device while waiting for an input."""
        return self._schedule.released(self)

    def __enter__(self) -> DeviceSlot:
        self._schedule.acquire(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._schedule.move(self, None)
