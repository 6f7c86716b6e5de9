"""The schedule of one worker's device: which stage computes while other stages wait.

Every running stage has a position: (iteration, chunk of the batch, index in the flow). The stage
with the lowest position gets the device. Stages with higher positions do not compute even while
that stage waits for an input. An input is always the output of a lower position, in this or another
pool, so some stage of the run can always proceed.

A stage that starts late with a lower position, such as a new attempt, gets the device when the
current stage finishes its chunk or waits. Two stages never compute at once, because they share
engines and trainers. Positions depend on no measurement, so stages compute in the same order on all
ranks of a pool, as collectives require. Work items of a rollout have no position: they run while
no stage runs, or the stage with the lowest position waits for an input.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType

from rlinf.errors import RequeueRequested

Position = tuple[int, int, int]
"""Iteration, chunk of the batch, and index of the stage in the flow."""


class DeviceSchedule:
    """The positions of all running stages of a worker."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._positions: dict[DeviceSlot, Position] = {}
        self._owner: DeviceSlot | None = None
        """The slot that has the device; None: the device is free."""
        self._ready: set[DeviceSlot] = set()
        """Slots of stages that have their inputs and wait for the device."""
        self._closed = False

    def close(self) -> None:
        """Make all waiting stages raise, so that they do not delay the end of the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def add(self, position: Position) -> DeviceSlot:
        """Add a stage; return its slot, a context manager that removes the stage at exit."""
        slot = DeviceSlot(self)
        self.move(slot, position)
        return slot

    def move(self, slot: DeviceSlot, position: Position | None) -> None:
        """Move a stage to another position; None removes it."""
        with self._changed:
            if position is None:
                self._positions.pop(slot, None)
                self._release(slot)
            else:
                self._positions[slot] = position
            self._changed.notify_all()

    def acquire(self, slot: DeviceSlot) -> None:
        """Take the device once this stage has the lowest position and no stage computes.

        Raises:
            RequeueRequested: the schedule is closed.
        """
        with self._changed:
            self._release(slot)
            self._ready.add(slot)
            try:
                while self._owner or not self._is_first(slot):
                    self._wait()
            finally:
                self._ready.discard(slot)
            self._owner = slot

    @property
    def is_busy(self) -> bool:
        """Whether a stage computes."""
        return self._owner is not None

    @contextlib.contextmanager
    def idle_time(self) -> Iterator[None]:
        """Acquire the device once no stage can compute; release it at exit.

        Raises:
            RequeueRequested: the schedule is closed.
        """
        slot = DeviceSlot(self)
        with self._changed:
            while self._owner or any(self._is_first(stage) for stage in self._ready):
                self._wait()
            self._owner = slot
        try:
            yield
        finally:
            with self._changed:
                self._release(slot)

    def _is_first(self, slot: DeviceSlot) -> bool:
        return self._positions[slot] <= min(self._positions.values())

    def _wait(self) -> None:
        if self._closed:
            raise RequeueRequested("the worker ends")
        self._changed.wait()

    @contextlib.contextmanager
    def released(self, slot: DeviceSlot) -> Iterator[None]:
        """Release the device for a stage that waits, and acquire it again at exit."""
        with self._changed:
            was_owner = self._release(slot)
        yield
        if was_owner:
            self.acquire(slot)

    def _release(self, slot: DeviceSlot) -> bool:
        """Release the device; return whether this slot had it."""
        if self._owner is not slot:
            return False
        self._owner = None
        self._changed.notify_all()
        return True

    def position(self, slot: DeviceSlot) -> Position:
        return self._positions[slot]


class Unscheduled(contextlib.nullcontext[None]):
    """A slot outside the schedule: of a stage without device, or in the rollout worker's thread."""

    def start_chunk(self, number: int) -> None:
        """Start a chunk of the batch at once."""

    def released(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def leave(self) -> None:
        """Do nothing."""


class DeviceSlot:
    """The right of one stage to use the device, by its position.

    It is a context manager that acquires the device at entry and leaves the schedule at exit.
    """

    def __init__(self, schedule: DeviceSchedule) -> None:
        self._schedule = schedule

    def start_chunk(self, number: int) -> None:
        """Start a chunk of the batch, after all stages with an earlier chunk."""
        iteration, chunk, index = self._schedule.position(self)
        self._schedule.move(self, (iteration, max(chunk, number), index))
        self._schedule.acquire(self)

    def released(self) -> contextlib.AbstractContextManager[None]:
        """Release the device while waiting for an input."""
        return self._schedule.released(self)

    def leave(self) -> None:
        """Leave the schedule; a stage that fails before it computes must not hold up others."""
        self._schedule.move(self, None)

    def __enter__(self) -> DeviceSlot:
        self._schedule.acquire(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()
