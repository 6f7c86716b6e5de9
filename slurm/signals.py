"""Warning signals: they set a flag, and the work decides when to stop.

Slurm sends USR2 some time before the wall-time limit or a preemption (NCCL owns USR1) and TERM at
the end. A handler does nothing else: Python runs it between bytecodes, possibly in the middle of a
write.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

WATCHED = (signal.SIGUSR2, signal.SIGTERM)


class StopFlag:
    """Context manager that turns the warning signals into a flag.

    Outside the main thread, where Python allows no handlers, it only stays false.
    """

    def __init__(self) -> None:
        self._set = False
        self._previous: dict[signal.Signals, Any] = {}

    def is_set(self) -> bool:
        """Whether the allocation is about to end."""
        return self._set

    def __enter__(self) -> StopFlag:
        def handle(number: int, frame: FrameType | None) -> None:
            self._set = True

        for number in WATCHED:
            try:
                self._previous[number] = signal.signal(number, handle)
            except ValueError:
                break
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
